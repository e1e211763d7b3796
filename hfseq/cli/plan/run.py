"""Builds the training run of a plan on devices that need not be present."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from hfseq import plugins
from hfseq.checkpoints.config import (
    apply_overrides,
    auto_config,
    parse_overrides,
    preset_values,
    wrap_build_errors,
)
from hfseq.cli.plan.options import Options
from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError, did_you_mean
from hfseq.nn import attention, dispatch, sharding
from hfseq.nn.dispatch import AttentionCall, BuiltInImplementation
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.scores import attention_weights, mix_values
from hfseq.training.arguments import parse
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import Run, build_run

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: The default objective for each task head of an architecture, in order of preference.
HEAD_OBJECTIVES = {"ForSeq2SeqLM": "span_mlm", "ForMaskedLM": "mlm", "ForCausalLM": "clm"}


def abstract_mesh(layout: str | None, devices: int) -> AbstractMesh:
    """Returns the mesh of a layout on devices that need not be present."""
    sizes = tuple(sharding.mesh_sizes(layout, devices).values())
    return AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * len(sharding.AXES))


def build(options: Options, devices: AbstractMesh | Sequence[jax.Device], **changes: bool) -> Run:
    """Builds the training run of a plan.

    Args:
        options: The options of the plan.
        devices: The devices, or an abstract mesh.
        **changes: Values of model flags, such as ``gradient_checkpointing``, that replace the
            values in ``options``.

    Raises:
        UsageError: The training script would raise the same error, for example because the number
            of attention heads, a sequence length or the number of rows is not a multiple of the
            size of a mesh axis.
    """
    from transformers import AutoTokenizer

    config = load_config(options)
    name = choose_objective(options, config)
    arguments = parse(options.script_flags(name), objective=name)
    for flag, value in changes.items():
        setattr(arguments.model, flag, value)
    if arguments.training.update_length:
        raise UsageError(
            "--update_length cannot be planned: set --length to the length of a window instead"
        )
    tokenizer: Any
    if teacher := arguments.data.teacher:  # the vocabulary must be that of the teacher
        tokenizer = AutoTokenizer.from_pretrained(teacher)
    else:
        tokenizer = make_tokenizer(config, sentinels=name == "span_mlm")
    plugins.load().objectives.get(name).configure(config, tokenizer, False)
    arguments.training.mesh = options.mesh
    with wrap_build_errors(options.config):
        run = build_run(
            arguments,
            name,
            Path(arguments.training.output_dir),
            Progress(),
            devices,
            tokenizer=tokenizer,
            config=config,
            with_data=False,
        )
        run.abstract_state()
    return run


def with_host_attention(run: Run) -> Run:
    """Returns the run with attention that can be compiled for CPUs.

    The implementation is selected as on the accelerator. If it is a fused kernel, it is replaced by
    `blockwise_attention`, which also stores few values for the backward pass.
    """
    requested = run.model._options.attention

    def attend(call: AttentionCall) -> jax.Array:
        spec = attention.attention_spec(
            call.query, call.key, call.visible, call.bias, call.dropout_rate
        )
        implementation = attention.select_implementation(spec, requested)
        if implementation.name in FUSED_KERNELS:
            return blockwise_attention(call)
        return implementation.run(call)

    stand_in = BuiltInImplementation("XLA for CPUs", attend)
    run.model._options = dataclasses.replace(run.model._options, attention=stand_in)
    return run


@contextlib.contextmanager
def record_attention_choices() -> Iterator[list[dict[str, Any]]]:
    """Records the attention implementations that are selected while the `with` block traces models.

    Yields:
        A list with one entry for each type of attention call: ``of`` describes the shapes, ``name``
        is the implementation, and ``refused`` maps unsuitable implementations to the reasons.
    """
    choices: list[dict[str, Any]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            arguments: Any = record.args
            spec, _, selected = arguments
            reasons = dict(selected.reasons)
            choices.append({"of": str(spec), "name": selected.name, "refused": reasons})

    listener, level, propagate = Listener(), dispatch.logger.level, dispatch.logger.propagate
    dispatch.log_selection.cache_clear()  # so that choices that were logged before are logged again
    dispatch.logger.addHandler(listener)
    dispatch.logger.setLevel(logging.INFO)
    dispatch.logger.propagate = False
    try:
        yield choices
    finally:
        dispatch.logger.removeHandler(listener)
        dispatch.logger.setLevel(level)
        dispatch.logger.propagate = propagate


def rows_per_shard(run: Run) -> int:
    """Returns the rows per data shard and micro-batch."""
    return run.batch.rows // (sharding.data_shards(run.mesh) * run.batch.micro_batches)


def abstract_batch(run: Run, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of a batch with ``rows`` rows of full length per data shard."""
    full = run.objective.full_rows(rows, run.batch.length)
    batch = run.objective.collate(full, RowRandom(0, 0, np.arange(rows)), 1)
    numbers = dict.fromkeys(("row", "tokens"), np.zeros(rows, np.int32))  # as in the loader
    return abstract_placed_batch(run, batch | numbers)


def abstract_placed_batch(
    run: Run, batch: Mapping[str, np.ndarray]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of a batch on the devices of a run.

    Args:
        run: The run, which determines the mesh and the number of micro-batches.
        batch: The arrays of one data shard and micro-batch. Their first axis counts rows, or groups
            of rows.
    """
    micro, shards = run.batch.micro_batches, sharding.data_shards(run.mesh)
    width = batch["input_ids"].shape if "input_ids" in batch else None
    placed = {}
    for name, array in batch.items():
        shape = (micro, shards * array.shape[0], *array.shape[1:])
        split = array.shape == width and not width[1] % run.mesh.shape["sequence"]
        placement = sharding.batch_sharding(run.mesh, len(shape), split_length=split)
        placed[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=placement)
    return placed


def load_config(options: Options) -> PreTrainedConfig:
    """Loads the configuration that ``--config`` names.

    Raises:
        UsageError: ``--config`` is not a directory, a JSON file, a Hub name or a model type.
        CheckpointError: The configuration cannot be read.
    """
    plugins.register_auto_classes()
    name, architectures = options.config, plugins.load(extra=options.plugin).architectures
    config_class = architectures.get(name).load_config() if name in architectures else None
    sizes = preset_values(config_class, options.preset, name)
    if config_class is not None:
        config = config_class(**sizes)
    elif not Path(name).exists() and "/" not in name:
        types = ", ".join(sorted(architectures))
        raise UsageError(
            f"--config {name} is neither a directory, a JSON file nor a model type"
            f"{did_you_mean(name, architectures)} (model types: {types}; Hub names contain a '/')"
        )
    else:
        config = auto_config(name)
    if options.config_overrides:
        apply_overrides(config, parse_overrides(options.config_overrides))
    return config


def choose_objective(options: Options, config: PreTrainedConfig) -> str:
    """Returns ``--objective``, or the default objective of the architecture."""
    if options.objective:
        return options.objective
    spec = plugins.load().architectures.get(config.model_type)
    for objective in plugins.load().objectives:
        default = plugins.load().objectives.get(objective).default_model_type
        if default == config.model_type:
            return objective
    objectives = [objective for head, objective in HEAD_OBJECTIVES.items() if head in spec.heads]
    if not objectives:
        raise UsageError(
            f"'{config.model_type}' has no head with a default objective "
            f"({', '.join(HEAD_OBJECTIVES)}): set --objective"
        )
    return objectives[0]


# -- placeholders

MAX_SENTINELS = 100
MAX_VOCAB_SIZE = 2**20  # larger placeholder vocabularies need too much memory
QUERY_BLOCK = 128  # queries per block of blockwise_attention
#: Implementations that do not store the attention scores for the backward pass.
FUSED_KERNELS = ("cudnn", "cudnn_packed", "cudnn_bias", "flash", "splash")


def make_tokenizer(config: PreTrainedConfig, sentinels: bool) -> PreTrainedTokenizerBase:
    """Returns a tokenizer with a placeholder vocabulary, whose size is that of the configuration.

    Args:
        config: The configuration of the model.
        sentinels: Whether the last entries are T5's sentinels: at most `MAX_SENTINELS`, and at
            most a quarter of the vocabulary.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    size = min(config.vocab_size, MAX_VOCAB_SIZE)
    roles = ("bos", "pad", "eos", "unk", "cls", "sep", "mask")
    words = [f"<{role}>" for role in roles] + [f"w{i}" for i in range(max(size - len(roles), 1))]
    count = min(MAX_SENTINELS, size // 4) if sentinels else 0
    if count:
        words[-count:] = [f"<extra_id_{k}>" for k in reversed(range(count))]
    words = words[: max(size, len(roles) + 1)]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    special: dict[str, Any] = {f"{role}_token": f"<{role}>" for role in roles}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def blockwise_attention(call: AttentionCall) -> jax.Array:
    """Computes attention on CPUs in blocks, with as little memory as a flash attention kernel.

    The function processes a block of queries at a time, recomputes the block in the backward pass,
    and does not store the attention scores. The function is only compiled and never run. Its
    dropout and its masks have wrong values, but need as much memory and time as correct ones.
    """
    query, key, visible, bias = call.query, call.key, call.visible, call.bias
    queries, keys = call.queries, call.keys
    block = QUERY_BLOCK if queries % QUERY_BLOCK == 0 else queries

    @jax.checkpoint
    def attend_block(start: jax.Array) -> jax.Array:
        block_query = jax.lax.dynamic_slice_in_dim(query, start, block, axis=1)
        block_bias = bias
        if bias is not None and bias.shape[2] > 1:
            block_bias = jax.lax.dynamic_slice_in_dim(bias, start, block, axis=2)
        block_visible = visible
        if visible.query_segments is not None:
            segments = jax.lax.dynamic_slice_in_dim(visible.query_segments, start, block, axis=1)
            key_segments = (
                visible.query_segments if visible.key_segments is None else visible.key_segments
            )
            block_visible = dataclasses.replace(
                visible, query_segments=segments, key_segments=key_segments
            )
        if visible.dense is not None and visible.dense.shape[-2] > 1:
            dense = jax.lax.dynamic_slice_in_dim(visible.dense, start, block, axis=-2)
            block_visible = dataclasses.replace(block_visible, dense=dense)
        weights = attention_weights(
            block_query, key, block_visible, bias=block_bias, scale=call.scale
        )
        if call.dropout_bits is not None:
            shape = (*call.dropout_bits.shape[:2], block, keys)
            bits = call.dropout_bits._replace(shape=shape).all()
            weights = dropout_with_bits(weights, call.dropout_rate, bits)
        return mix_values(weights, call.value)

    if block == queries:
        return attend_block(jnp.int32(0))
    blocks = jax.lax.map(attend_block, jnp.arange(0, queries, block))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape[0], queries, *blocks.shape[3:])
