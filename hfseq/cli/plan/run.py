"""The run that is planned: the training's own, on devices that are only described."""

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
from jax.sharding import AbstractMesh, AxisType, Mesh

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
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.random import LazyBits
from hfseq.nn.scores import attention_weights, mix_values
from hfseq.nn.visible import Visibility
from hfseq.training.arguments import parse
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import Run, build_run

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: The script's objective for the heads of an architecture, the first that it has.
HEAD_OBJECTIVES = {"ForSeq2SeqLM": "span_mlm", "ForMaskedLM": "mlm", "ForCausalLM": "clm"}


def abstract_mesh(layout: str | None, devices: int) -> AbstractMesh:
    """Return the mesh of a layout on devices that need not be there."""
    sizes = tuple(sharding.mesh_sizes(layout, devices).values())
    return AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * len(sharding.AXES))


def build(options: Options, devices: AbstractMesh | Sequence[jax.Device], **changes: bool) -> Run:
    """Build the run on ``devices``; ``changes`` are other values of the model's flags.

    Raises:
        UsageError: what the run would refuse, too: mesh, heads, lengths, rows.
    """
    config = load_config(options)
    name = choose_objective(options, config)
    arguments = parse(options.script_flags(name), objective=name)
    for flag, value in changes.items():
        setattr(arguments.model, flag, value)
    if arguments.training.update_length:
        raise UsageError("--update_length cannot be planned: plan a window as a row of its length")
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
    """Return the run with attention that CPUs can be compiled for, to be traced for an accelerator.

    Where a kernel of the accelerator's serves, it is one that keeps as little (:func:`in_blocks`).
    """
    named = run.model._options.attention

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        visible: Visibility,
        *,
        bias: jax.Array | None,
        scale: float,
        rate: float,
        drawn: LazyBits | None,
        mesh: Mesh | None,
    ) -> jax.Array:
        facts = attention.attention_spec(query, key, visible, bias, rate)
        serves = attention.select_implementation(facts, named)
        product = blockwise_attention if serves.name in FUSED_KERNELS else serves.attend
        return product(
            query, key, value, visible, bias=bias, scale=scale, rate=rate, drawn=drawn, mesh=mesh
        )

    stand_in = attention.Implementation("XLA for CPUs", attend)
    run.model._options = dataclasses.replace(run.model._options, attention=stand_in)
    return run


@contextlib.contextmanager
def record_attention_choices() -> Iterator[list[dict[str, Any]]]:
    """Collect what is chosen for attention while models are traced: each kind of call once.

    An entry says ``of`` what shapes, the ``name``, and why others do not serve (``refused``).
    """
    found: list[dict[str, Any]] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            arguments: Any = record.args
            facts, _, taken = arguments
            found.append({"of": str(facts), "name": taken.name, "refused": dict(taken.reasons)})

    listener, level, shown = Listener(), dispatch.logger.level, dispatch.logger.propagate
    dispatch.log_selection.cache_clear()  # what was said before is said again
    dispatch.logger.addHandler(listener)
    dispatch.logger.setLevel(logging.INFO)
    dispatch.logger.propagate = False
    try:
        yield found
    finally:
        dispatch.logger.removeHandler(listener)
        dispatch.logger.setLevel(level)
        dispatch.logger.propagate = shown


def rows_per_shard(run: Run) -> int:
    """Return the rows that a data shard has in a micro-batch."""
    return run.batch.rows // (sharding.data_shards(run.mesh) * run.batch.micro_batches)


def abstract_batch(run: Run, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and shardings of a placed batch with so many full rows a data shard."""
    full = run.objective.full_rows(rows, run.batch.length)
    batch = run.objective.collate(full, RowRandom(0, 0, np.arange(rows)), 1)
    return abstract_placed_batch(run, batch | {"row": np.arange(rows, dtype=np.int32)})


def abstract_placed_batch(
    run: Run, batch: Mapping[str, np.ndarray]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and shardings of a batch, of which every data shard has one like ``batch``.

    What an objective returns has rows or groups first, and both grow with the groups.
    """
    micro, shards = run.batch.micro_batches, sharding.data_shards(run.mesh)
    width = batch["input_ids"].shape if "input_ids" in batch else None
    placed = {}
    for name, array in batch.items():
        shape = (micro, shards * array.shape[0], *array.shape[1:])
        split = array.shape == width and not width[1] % run.mesh.shape["sequence"]
        where = sharding.batch_sharding(run.mesh, len(shape), split_length=split)
        placed[name] = jax.ShapeDtypeStruct(shape, array.dtype, sharding=where)
    return placed


def load_config(options: Options) -> PreTrainedConfig:
    """Return the configuration of a directory, a JSON file, a Hub name or a model type.

    Raises:
        UsageError: it is none of them. CheckpointError: it cannot be read.
    """
    plugins.register_auto_classes()
    name, known = options.config, plugins.load(extra=options.plugin).architectures
    kind = known.get(name).load_config() if name in known else None
    sizes = preset_values(kind, options.preset, name)
    if kind is not None:
        config = kind(**sizes)
    elif not Path(name).exists() and "/" not in name:
        types = ", ".join(sorted(known))
        raise UsageError(
            f"--config {name} is neither a directory, a JSON file nor a model type"
            f"{did_you_mean(name, known)} (model types: {types}; a name on the Hub has a '/')"
        )
    else:
        config = auto_config(name)
    if options.config_overrides:
        apply_overrides(config, parse_overrides(options.config_overrides))
    return config


def choose_objective(options: Options, config: PreTrainedConfig) -> str:
    """Return the objective: what was asked for, or that of the architecture's own script."""
    if options.objective:
        return options.objective
    spec = plugins.load().architectures.get(config.model_type)
    for kind in plugins.load().objectives:
        default = plugins.load().objectives.get(kind).default_model_type
        if default == config.model_type:
            return kind
    found = [objective for head, objective in HEAD_OBJECTIVES.items() if head in spec.heads]
    if not found:
        raise UsageError(f"'{config.model_type}' has no head that is planned: give --objective")
    return found[0]


# -- placeholders

MAX_SENTINELS = 100
MAX_VOCAB_SIZE = 2**20  # beyond that a vocabulary of placeholders fills the memory
QUERY_BLOCK = 128  # queries that in_blocks looks at together
#: What keeps no square of scores for the backward pass.
FUSED_KERNELS = ("cudnn", "cudnn_packed", "cudnn_bias", "flash", "splash")


def make_tokenizer(config: PreTrainedConfig, sentinels: bool) -> PreTrainedTokenizerBase:
    """Return a tokenizer of the configuration's vocabulary, whose entries mean nothing.

    With ``sentinels`` its last entries are T5's, a hundred or a quarter of the vocabulary.
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


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visibility,
    *,
    bias: jax.Array | None,
    scale: float,
    rate: float,
    drawn: LazyBits | None,
    mesh: Mesh | None,
) -> jax.Array:
    """Attention that keeps what a flash kernel keeps, in programs for a CPU: no square of scores.

    A block of queries at a time, computed again in the backward pass. Slow, and never run: of
    dropout and of who sees whom it has the work, not the numbers.
    """
    queries, keys = query.shape[1], key.shape[1]
    block = QUERY_BLOCK if queries % QUERY_BLOCK == 0 else queries

    @jax.checkpoint
    def one(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(query, start, block, axis=1)
        added = bias
        if bias is not None and bias.shape[2] > 1:
            added = jax.lax.dynamic_slice_in_dim(bias, start, block, axis=2)
        seen = visible
        if visible.query_segments is not None:
            segments = jax.lax.dynamic_slice_in_dim(visible.query_segments, start, block, axis=1)
            other = visible.query_segments if visible.key_segments is None else visible.key_segments
            seen = dataclasses.replace(visible, query_segments=segments, key_segments=other)
        if visible.dense is not None and visible.dense.shape[-2] > 1:
            dense = jax.lax.dynamic_slice_in_dim(visible.dense, start, block, axis=-2)
            seen = dataclasses.replace(seen, dense=dense)
        weights = attention_weights(part, key, seen, bias=added, scale=scale)
        if drawn is not None:
            shape = (*drawn.shape[:2], block, keys)
            weights = dropout_with_bits(weights, rate, drawn._replace(shape=shape).all())
        return mix_values(weights, value)

    if block == queries:
        return one(jnp.int32(0))
    found = jax.lax.map(one, jnp.arange(0, queries, block))
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], queries, *found.shape[3:])
