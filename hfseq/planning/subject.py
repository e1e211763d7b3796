"""The run that is planned: model, layout, objective, optimizer and shapes, but no arrays."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

from hfseq._compat import prepare_jax

prepare_jax()

import jax  # noqa: E402
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding  # noqa: E402

from hfseq import plugins, trees  # noqa: E402
from hfseq.config_overrides import override, parse_overrides, preset_values  # noqa: E402
from hfseq.errors import CheckpointError, UsageError, first_line, nearest  # noqa: E402
from hfseq.planning import standin  # noqa: E402
from hfseq.planning.options import HEADS, Options  # noqa: E402
from hfseq.resolve import native_config  # noqa: E402
from hfseq.training import setup, sharding  # noqa: E402
from hfseq.training import state as states  # noqa: E402
from hfseq.training.arguments import Arguments, parse  # noqa: E402
from hfseq.training.optimizers import make_optimizer, make_schedule  # noqa: E402

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

    from hfseq.transformers_hook import register_auto_classes

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
        rows = standin.rows_of_text(local_rows, length, self.objective.tokenizer, pairs)
        flat = standin.batch_arrays(self.objective, rows, self.shards * self.micro)
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
    tokenizer = standin.make_tokenizer(config, sentinels=name == "span_mlm")
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
        chosen = standin.flash_attention
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


__all__ = ["Subject", "abstract_mesh", "build", "choose_objective", "load_config", "local_bytes"]
