"""The run that is planned: model, layout, objective, optimizer and shapes, but no arrays."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from hfseq import plugins
from hfseq.checkpoints.config import native_config, override, parse_overrides, preset_values
from hfseq.data.batches import RowRandom
from hfseq.errors import CheckpointError, UsageError, first_line, nearest
from hfseq.nn import attention, sharding, trees
from hfseq.training import hardware, setup
from hfseq.training import state as states
from hfseq.training.arguments import Arguments, parse
from hfseq.training.optimizers import make_optimizer, make_schedule

#: The script's objective for the heads of an architecture, the first that it has.
HEADS = {"ForMaskedLM": "mlm", "ForCausalLM": "clm", "ForSeq2SeqLM": "span_mlm"}


OBJECTIVES = ("mlm", "clm", "span_mlm", "denoising", "translation")


@dataclass
class Options:
    """The flags of the command as plain values, so that another process can have them."""

    config: str
    devices: str
    mesh: str | None = None
    config_overrides: str | None = None
    preset: str | None = None
    objective: str | None = None
    length: int | None = None
    target_length: int | None = None
    per_device_train_batch_size: int = 8
    global_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    optim: str = "adamw"
    precision: str = "bfloat16"
    param_dtype: str = "float32"
    gradient_checkpointing: bool = False
    scan_layers: bool = False
    sequence_parallel: bool = False
    attn_implementation: str | None = None
    mfu: float = 0.4
    tokens: float | None = None
    peak_tflops: float | None = None
    memory_gb: float | None = None
    memory_share: float | None = None
    network_gbs: float | None = None
    no_compile: bool = False
    compile_timeout: float = 1800.0
    plugin: list[str] = dataclasses.field(default_factory=list)
    training: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        counts = ("length", "target_length", "per_device_train_batch_size", "global_batch_size",
                  "gradient_accumulation_steps")  # fmt: skip
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value}: give a number of at least 1")
        for name in ("peak_tflops", "memory_gb", "network_gbs", "tokens", "compile_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name} {value}: give a positive number")
        for name in ("mfu", "memory_share"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"--{name} {value}: give a share, above 0 and at most 1")
        if self.objective and self.objective not in OBJECTIVES:
            raise UsageError(
                f"--objective {self.objective} cannot be planned"
                f"{nearest(self.objective, OBJECTIVES)} (there are {', '.join(OBJECTIVES)}; "
                "for classification plan mlm: the layers are the same, only the head is smaller)"
            )
        self.accelerator, self.count = parse_devices(self.devices)

    def plain(self) -> dict[str, Any]:
        """Return the values for :class:`Options` in another process."""
        return dataclasses.asdict(self)

    def flags(self, objective: str) -> list[str]:
        """Return the training script's flags: what was given, then what follows ``--``."""
        kept = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "precision",
                "param_dtype", "global_batch_size", "attn_implementation")  # fmt: skip
        values: dict[str, Any] = {name: getattr(self, name) for name in kept}
        if self.length is not None:
            values["max_source_length" if objective == "translation" else "max_seq_length"] = (
                self.length
            )
        if objective == "translation":
            values["max_target_length"] = self.target_length or self.length
        elif self.target_length is not None:
            raise UsageError(
                f"--target_length {self.target_length} is for translation; '{objective}' derives "
                "it from --length"
            )
        switches = ("gradient_checkpointing", "scan_layers", "sequence_parallel")
        given = [f"--{name}={value}" for name, value in values.items() if value is not None]
        given += [f"--{name}" for name in switches if getattr(self, name)]
        return ["--output_dir=plan", "--do_train", *given, *self.training]


def parse_devices(text: str) -> tuple[hardware.Accelerator, int]:
    """Read ``h200:64``: an accelerator and how many; without a number, one.

    Raises:
        UsageError: the form is another, or no such accelerator is known.
    """
    name, colon, number = text.partition(":")
    if colon and not re.fullmatch(r"[1-9]\d*", number):
        raise UsageError(f"--devices {text}: give an accelerator and a number, e.g. h200:64")
    return hardware.named(name), int(number or 1)


SENTINELS = 100


BLOCK = 128  # queries that flash_attention looks at together


def make_tokenizer(config: Any, sentinels: bool) -> Any:
    """Return a tokenizer of the configuration's vocabulary, whose entries mean nothing.

    With ``sentinels`` its last entries are T5's, a hundred or a quarter of the vocabulary.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    size = config.vocab_size
    roles = ("bos", "pad", "eos", "unk", "cls", "sep", "mask")
    words = [f"<{role}>" for role in roles] + [f"w{i}" for i in range(max(size - len(roles), 1))]
    count = min(SENTINELS, size // 4) if sentinels else 0
    if count:
        words[-count:] = [f"<extra_id_{k}>" for k in reversed(range(count))]
    words = words[: max(size, len(roles) + 1)]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    special: dict[str, Any] = {f"{role}_token": f"<{role}>" for role in roles}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def rows_of_text(count: int, length: int, tokenizer: Any, target_length: int = 0) -> Any:
    """Return full rows as a data set gives them; with ``target_length``, pairs."""
    word = len(tokenizer.all_special_ids)
    full = {
        "input_ids": np.full((count, length), word, np.int32),
        "segment_ids": np.ones((count, length), np.int32),
        "valid": np.ones(count, bool),
    }
    if target_length:
        full["target_ids"] = np.full((count, target_length), word, np.int32)
        full["target_segment_ids"] = np.ones((count, target_length), np.int32)
    return full


def batch_arrays(objective: Any, rows: dict[str, np.ndarray], groups: int) -> dict[str, Any]:
    """Return shapes and types of a batch of ``groups`` times ``rows``, as the feed makes them.

    What an objective returns has rows or groups first, and both grow with the groups.
    """
    count = len(rows["input_ids"])
    random = RowRandom(0, 0, np.arange(count))
    batch = objective.collate(rows, random, 1) | {"row": np.arange(count, dtype=np.int32)}
    return {
        name: jax.ShapeDtypeStruct((groups * array.shape[0], *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Attention that keeps what a flash kernel keeps, in programs for a CPU: no square of scores.

    A block of queries at a time, computed again in the backward pass. Slow, and never run.
    """
    length = query.shape[1]
    block = BLOCK if length % BLOCK == 0 else length
    if is_causal:
        below = jnp.tril(jnp.ones((length, key.shape[1]), bool), key.shape[1] - length)
        mask = below[None, None] if mask is None else mask & below

    def cut(x: jax.Array | None, start: jax.Array) -> jax.Array | None:
        if x is None or x.shape[2] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, block, axis=2)

    @jax.checkpoint
    def one(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(query, start, block, axis=1)
        return attention.eager_attention(
            part, key, value, cut(bias, start), cut(mask, start), scale=scale
        )

    if block == length:
        return one(jnp.int32(0))
    found = jax.lax.map(one, jnp.arange(0, length, block))
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], length, *found.shape[3:])


STEPS = 1_000_000  # of the schedule, whose state is a counter whatever its length


def abstract_mesh(layout: str | None, devices: int) -> AbstractMesh:
    """Return the mesh of a layout on devices that need not be there."""
    sizes = tuple(sharding.mesh_sizes(layout, devices).values())
    return AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * len(sharding.AXES))


def load_config(options: Options) -> Any:
    """Return the configuration of a directory, a JSON file, a Hub name or a model type.

    Raises:
        UsageError: it is none of them. CheckpointError: it cannot be read.
    """
    from transformers import AutoConfig

    from hfseq.plugins import register_auto_classes

    register_auto_classes()
    name, known = options.config, plugins.load(extra=options.plugin).architectures
    kind = known.get(name).load_config() if name in known else None
    sizes = preset_values(kind, options.preset, name)
    if kind is not None:
        config = kind(**sizes)
    elif not Path(name).exists() and "/" not in name:
        types = ", ".join(sorted(known))
        raise UsageError(
            f"--config {name} is neither a directory, a JSON file nor a model type"
            f"{nearest(name, known)} (model types: {types}; a name on the Hub has a '/')"
        )
    else:
        try:
            config = native_config(AutoConfig.from_pretrained(name))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"--config {name}: {first_line(error)}") from error
    if options.config_overrides:
        override(config, parse_overrides(options.config_overrides))
    return config


def choose_objective(options: Options, config: Any) -> str:
    """Return the objective: what was asked for, or that of the architecture's own script."""
    if options.objective:
        return options.objective
    spec = plugins.load().architectures.get(config.model_type)
    for kind in plugins.load().objectives:
        default = plugins.load().objectives.get(kind).default_model_type
        if default == config.model_type:
            return kind
    found = [objective for head, objective in HEADS.items() if head in spec.heads]
    if not found:
        raise UsageError(f"'{config.model_type}' has no head that is planned: give --objective")
    return found[0]


@dataclasses.dataclass
class Subject:
    """A run on a mesh, real or abstract; ``model`` computes on the mesh where it is real."""

    arguments: Arguments
    mesh: Mesh | AbstractMesh
    model: Any
    objective: Any
    layout: sharding.Layout
    optimizer: Any
    length: int
    rows: int  # a step
    micro: int

    @property
    def shards(self) -> int:
        """How many parts the rows of a micro-batch are cut into."""
        return sharding.data_shards(self.mesh)  # type: ignore[arg-type]

    @property
    def local_rows(self) -> int:
        """Rows that a data shard has in a micro-batch."""
        return self.rows // (self.shards * self.micro)

    def shapes(self) -> dict[trees.Path, tuple[int, ...]]:
        """Return the shapes of the parameters, without padding."""
        return {p: leaf.shape for p, leaf in trees.flatten(self.model.params_shape_tree).items()}

    def state(self) -> tuple[Any, Any]:
        """Return shapes and shardings of the whole training state, as the loop makes it."""
        names = tuple(sorted({"loss", "count", *self.objective.sums}))
        shapes, dtype = self.shapes(), self.arguments.model.param_dtype
        padded = trees.unflatten(
            {p: jax.ShapeDtypeStruct(self.layout.padded(p, s), dtype) for p, s in shapes.items()}
        )

        def build(params: Any, extra: Any) -> Any:
            return states.make_state(
                params, self.optimizer, extra, states.zero_window(names),
                self.model.precision.compute_dtype,
            )  # fmt: skip

        abstract = jax.eval_shape(build, padded, self.model.extra_shape_tree)
        places = self.layout.shardings(shapes)
        return abstract, states.state_shardings(abstract, places, self.mesh)  # type: ignore[arg-type]

    def batch(self, local_rows: int) -> tuple[Any, Any]:
        """Return shapes and shardings of a placed batch with so many rows a data shard."""
        length = self.objective.row_length(self.length)
        translates = self.objective.name == "translation"
        pairs = self.objective.target_length(self.length) if translates else 0
        rows = rows_of_text(local_rows, length, self.objective.tokenizer, pairs)
        flat = batch_arrays(self.objective, rows, self.shards * self.micro)
        whole = flat["input_ids"].shape
        shapes, places, mesh = {}, {}, cast(Mesh, self.mesh)
        for name, leaf in flat.items():
            shape = (self.micro, leaf.shape[0] // self.micro, *leaf.shape[1:])
            split = leaf.shape == whole and not whole[1] % mesh.shape["sequence"]
            shapes[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
            places[name] = sharding.batch_sharding(mesh, len(shape), split_length=split)
        return shapes, places

    def step(self) -> Any:
        """Return the training step of the loop."""
        training = self.arguments.training
        return states.make_step(
            self.objective, self.model, self.optimizer, training.seed,
            training.on_non_finite == "skip",
        )  # fmt: skip


def build(options: Options, mesh: Mesh | AbstractMesh, **changes: Any) -> Subject:
    """Build the run on ``mesh``; ``changes`` are other values of the model's flags.

    Raises:
        UsageError: what the loop would refuse, too: mesh, heads, lengths, rows.
    """
    config = load_config(options)
    name = choose_objective(options, config)
    arguments = parse(options.flags(name), objective=name)
    for flag, value in changes.items():
        setattr(arguments.model, flag, value)
    training, kind = arguments.training, plugins.load().objectives.get(name)
    if training.update_length:
        raise UsageError("--update_length cannot be planned: plan a window as a row of its length")
    tokenizer = make_tokenizer(config, sentinels=name == "span_mlm")
    kind.configure(config, tokenizer, False)
    attention, arguments.model.attn_implementation = arguments.model.attn_implementation, None
    model = setup.build_model(arguments, config, kind.auto_class)
    if attention:
        use_attention(model, attention)
    objective = kind(arguments.data, tokenizer, config)
    layout = setup.lay_out(model, mesh, training.sequence_parallel)  # type: ignore[arg-type]
    objective.prepare(model)
    length = objective.choose_length(model.max_length())
    _check_lengths(objective, length, mesh, training.sequence_parallel)
    schedule = make_schedule(training, STEPS, getattr(config, "hidden_size", None))
    factory = plugins.load().optimizers.get(training.optim)
    optimizer = make_optimizer(factory, training, schedule, model.stacked_prefixes)
    return Subject(
        arguments, mesh, model, objective, layout, optimizer, length,
        *_rows(training, sharding.data_shards(mesh)),  # type: ignore[arg-type]
    )  # fmt: skip


def use_attention(model: Any, name: str) -> None:
    """Let the model attend as ``name`` says; what only an accelerator can do is stood in for."""
    chosen = plugins.load().attention.get(name)
    if name == "cudnn":
        chosen = flash_attention
    model._options = dataclasses.replace(model._options, attention=chosen)


def _rows(training: Any, shards: int) -> tuple[int, int]:
    micro = training.gradient_accumulation_steps
    rows = training.global_batch_size or training.per_device_train_batch_size * shards * micro
    if rows % (shards * micro):
        raise UsageError(
            f"a step has {rows} rows, which do not divide by {shards} data shards x {micro} "
            f"micro-batches: give --global_batch_size a multiple of {shards * micro}"
        )
    return rows, micro


def _check_lengths(objective: Any, length: int, mesh: Any, parallel: bool) -> None:
    axes = ["sequence", *(["tensor"] if parallel else [])]
    ways = math.prod(mesh.shape[name] for name in axes)
    for what, tokens in (("row", length), ("target row", objective.target_length(length))):
        if tokens % ways:
            raise UsageError(
                f"--mesh {','.join(f'{name}={mesh.shape[name]}' for name in axes)} does not divide "
                f"the {tokens} tokens of a {what}: give a --length that is a multiple of {ways}"
            )


def local_bytes(shapes: Any, places: Any) -> int:
    """Return the bytes that a device has of a tree of shapes laid out by ``places``."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(places, is_leaf=_is_place), strict=True)
    return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
               for leaf, place in pairs)  # fmt: skip


def _is_place(node: Any) -> bool:
    return isinstance(node, NamedSharding)
