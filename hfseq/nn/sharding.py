"""How parameters and activations are split over a mesh of devices.

Parameters by regular expressions on their paths: a rule is a pair (pattern, tactic), the first
pattern found in a path decides, and a parameter that no rule matches is an error. Tactics:
``column`` and ``row`` (Megatron's split of a product's output and input), ``embedding`` (split by
vocabulary), ``vocab`` (a vector over the vocabulary), ``column_bias`` (the bias of a column-split
product), ``heads`` (a table with a column for each head), ``channels`` (the kernel of a
convolution), ``vector`` (norms and other biases) and ``replicated``. ``fsdp`` splits what
``tensor`` leaves whole. Activations by the axes that split the weight of their layer.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hfseq.errors import UsageError, did_you_mean
from hfseq.nn import trees
from hfseq.nn.context import current_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AXES = ("data", "fsdp", "tensor", "sequence")
FSDP, TENSOR, SEQUENCE = AXES[1:]
# The axes that split rows, of a batch and of activations.
BATCH_AXES = ("data", "fsdp")

Rules = Sequence[tuple[str, str]]
#: The axes that split one dimension, and each dimension of a weight: a PartitionSpec's entries.
Entry = str | tuple[str, ...] | None
Axes = tuple[Entry, ...]

TACTICS: dict[str, Axes] = {
    "column": ("fsdp", "tensor"),
    "row": ("tensor", "fsdp"),
    "embedding": ("tensor", "fsdp"),
    "table": (None, "fsdp"),
    "row_table": ("fsdp",),
    "vocab": ("tensor",),
    "vocab_column": ("fsdp", "tensor"),
    "vocab_row": (None, "tensor"),
    "column_bias": (("tensor", "fsdp"),),
    "heads": (None, "tensor"),
    "channels": (None, None, None, "fsdp"),
    "vector": ("fsdp",),
    "replicated": (),
}

# Tactics whose dimension over the vocabulary may be padded to divide the tensor axis: which it is.
VOCAB_DIMENSIONS = {"embedding": 0, "vocab": 0, "vocab_column": 1, "vocab_row": 1}

# For architectures that declare no rules: right on data and fsdp axes, refused with tensor > 1.
DEFAULT_RULES: Rules = ((r"kernel$|weight$|embedding$", "table"), (r".*", "replicated"))


def make_mesh(layout: str | None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh from ``data=2,fsdp=4``; without a layout all devices are on ``data``.

    One axis may be -1 and takes the devices that are left.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(layout, len(devices))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(layout: str | None, devices: int) -> dict[str, int]:
    """Return the size of every axis of ``layout`` on so many devices.

    Raises:
        UsageError: the axes do not exist, or do not multiply to the number of devices.
    """
    given: dict[str, int] = {} if layout else {"data": devices}
    for part in layout.split(",") if layout else ():
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise UsageError(
                f"--mesh {layout}: no axis '{axis}'{did_you_mean(axis, AXES)} (axes: {', '.join(AXES)})"
            )
        if axis in given:
            raise UsageError(f"--mesh {layout}: axis '{axis}' is given twice")
        if not re.fullmatch(r"-1|[1-9]\d*", size.strip()):
            raise UsageError(f"--mesh {layout}: '{axis}={size}' needs a positive number or -1")
        given[axis] = int(size)
    if list(given.values()).count(-1) > 1:
        raise UsageError(f"--mesh {layout}: only one axis can be -1")
    sizes = dict.fromkeys(AXES, 1) | given
    known = math.prod(size for size in sizes.values() if size > 0)
    sizes = {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        raise UsageError(
            f"--mesh {layout} describes {math.prod(sizes.values())} devices, there are "
            f"{devices}: make the product of the axes {devices} (one axis may be -1: it "
            "takes what is left)"
        )
    return sizes


def data_shards(mesh: Mesh) -> int:
    """Return how many parts the batch is cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


Tree = TypeVar("Tree")


class HasHeads(Protocol):
    """What is asked of a model whose attention heads are split."""

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration."""
        ...

    @property
    def head_counts(self) -> tuple[str, ...]:
        """Its attributes that count heads."""
        ...


def check_heads(model: HasHeads, mesh: Mesh) -> None:
    """Refuse to cut an attention head in two.

    Raises:
        UsageError: the ``tensor`` axis does not divide a number of heads in the configuration.
    """
    ways, config = mesh.shape["tensor"], model.config.to_dict()
    parts = [part for part in config.values() if isinstance(part, dict) and "model_type" in part]
    for name, heads in (
        (name, c.get(name)) for c in (config, *parts) for name in model.head_counts
    ):
        if heads and heads % ways:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise UsageError(
                f"--mesh tensor={ways} does not divide the {heads} attention heads of the "
                f"configuration ({name}): give tensor one of {', '.join(map(str, fits))}"
            )


class Layout:
    """The rules of an architecture on a mesh: the sharding of every parameter.

    **Arguments:** ``rules`` pairs (pattern, tactic), or ``None`` for an architecture without;
    ``vocab_size`` is padded where the tensor axis does not divide it; ``stacked`` are path prefixes
    of scanned layers, whose leading axis is never split.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Rules | None,
        vocab_size: int | None = None,
        stacked: Sequence[trees.Path] = (),
    ):
        if rules is None and mesh.shape["tensor"] > 1:
            raise UsageError(
                "--mesh has tensor > 1, but this architecture declares no sharding rules: give "
                "sharding=[(pattern, tactic), ...] when it is registered, or use data and fsdp only"
            )
        self.mesh, self.stacked, self.vocab_size = mesh, tuple(stacked), vocab_size
        self.rules = [(re.compile(pattern), tactic) for pattern, tactic in rules or DEFAULT_RULES]
        unknown = [tactic for _, tactic in self.rules if tactic not in TACTICS]
        if unknown:
            raise UsageError(f"unknown sharding tactics {unknown} (known: {', '.join(TACTICS)})")

    def tactic(self, path: trees.Path) -> str | None:
        """Return the tactic of the first rule that matches ``path``."""
        name = trees.join(path)
        if any(part.startswith("lora_") for part in path[-2:]):
            return "replicated"  # a few numbers a feature
        return next((tactic for pattern, tactic in self.rules if pattern.search(name)), None)

    def specs(self, shapes: dict[trees.Path, tuple[int, ...]]) -> dict[trees.Path, PartitionSpec]:
        """Return the partition of every parameter, or one error listing all that cannot be."""
        specs, problems = {}, []
        for path, shape in shapes.items():
            tactic = self.tactic(path)
            if tactic is None:
                problems.append(f"  {trees.join(path)}: no sharding rule matches it")
                continue
            specs[path] = self._spec(path, tactic, len(shape))
            for dimension, (size, axes) in enumerate(
                zip(self.padded_shape(path, shape), specs[path], strict=False)
            ):
                ways = _ways(self.mesh, _names(axes))
                if size % ways:
                    fits = [str(n) for n in range(1, ways + 1) if size % n == 0]
                    problems.append(
                        f"  {trees.join(path)}: dimension {dimension} of size {size} does not "
                        f"divide by {'x'.join(_names(axes))}={ways} (what divides it: "
                        f"{', '.join(fits)})"
                    )
        if problems:
            raise UsageError("this model cannot be laid out on --mesh:\n" + "\n".join(problems))
        return specs

    def _spec(self, path: trees.Path, tactic: str, ndim: int) -> PartitionSpec:
        lead = (None,) if self._is_stacked(path) else ()
        axes = TACTICS[tactic]
        # A table's rule on a vector (a bias, a scale) keeps its last entry.
        body = axes[len(axes) - (ndim - len(lead)) :] if len(axes) > ndim - len(lead) else axes
        return PartitionSpec(*lead, *body)

    def layer_shape(self, path: trees.Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one layer's parameter, where layers are stacked."""
        return shape[int(self._is_stacked(path)) :]

    def _is_stacked(self, path: trees.Path) -> bool:
        return any(path[: len(head)] == head for head in self.stacked)

    def axes(self, shapes: dict[trees.Path, tuple[int, ...]]) -> dict[trees.Path, Axes]:
        """Return the axes that split each parameter, without that of stacked layers."""
        lead = {path: int(self._is_stacked(path)) for path in shapes}
        return {path: tuple(spec)[lead[path] :] for path, spec in self.specs(shapes).items()}

    def shardings(
        self, shapes: dict[trees.Path, tuple[int, ...]]
    ) -> dict[trees.Path, NamedSharding]:
        """Return the sharding of every parameter."""
        return {path: NamedSharding(self.mesh, spec) for path, spec in self.specs(shapes).items()}

    # -- the vocabulary
    # -----------------------------------------------------------------------------

    def padded_shape(self, path: trees.Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return ``shape`` with the vocabulary rounded up to what the tensor axis divides."""
        axis, ways = VOCAB_DIMENSIONS.get(self.tactic(path) or ""), self.mesh.shape["tensor"]
        if axis is None or shape[axis] != self.vocab_size:
            return shape
        rounded = math.ceil(shape[axis] / ways) * ways
        return (*shape[:axis], rounded, *shape[axis + 1 :])

    def pad(self, path: trees.Path, leaf: jax.Array) -> jax.Array:
        """Add the zero rows that :meth:`padded` asks for."""
        target = self.padded_shape(path, leaf.shape)
        missing = [(0, new - old) for old, new in zip(leaf.shape, target, strict=True)]
        return leaf if target == leaf.shape else jnp.pad(leaf, missing)

    def cut(self, path: trees.Path, leaf: jax.Array) -> jax.Array:
        """Take the padding rows off again, before saving."""
        axis, size = VOCAB_DIMENSIONS.get(self.tactic(path) or ""), self.vocab_size
        if axis is None or size is None or leaf.shape[axis] <= size:
            return leaf
        return jax.lax.slice_in_dim(leaf, 0, size, axis=axis)


def optimizer_shardings(
    tree: Tree,
    shardings: dict[trees.Path, NamedSharding],
    shapes: dict[trees.Path, tuple[int, ...]],
    mesh: Mesh,
) -> Tree:
    """Lay out optimizer state: a leaf with a parameter's path and shape lies like it."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def sharding_of(
        key_path: tuple[jax.tree_util.KeyEntry, ...], leaf: jax.ShapeDtypeStruct
    ) -> NamedSharding:
        names = tuple(
            str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
            for key in key_path
        )
        for start in range(len(names)):
            if shapes.get(names[start:]) == leaf.shape:
                return shardings[names[start:]]
        return replicated

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def batch_sharding(
    mesh: Mesh, ndim: int, lead: int = 1, split_length: bool = True
) -> NamedSharding:
    """Rows over data and fsdp, length over sequence; ``lead`` axes come before the rows."""
    length = ("sequence",) if split_length and ndim > lead + 1 else ()
    return NamedSharding(mesh, PartitionSpec(*(None,) * lead, BATCH_AXES, *length))


# -- what layers do with activations
# ---------------------------------------------------------------------------------------


def assign_weight_axes(module: nnx.Module, axes: Mapping[tuple[str, ...], Axes]) -> None:
    """Tell every layer how its weight is split; ``axes`` by the path of the weight, without the
    axis of stacked layers."""
    for path, layer in nnx.iter_graph(module):
        for name in ("kernel", "embedding"):
            split = axes.get((*map(str, path), name))
            if split is not None and hasattr(layer, "weight_axes"):
                layer.weight_axes = split


def splits_sequence() -> bool:
    """Tell whether the length of a row is split over devices while a layer computes."""
    mesh = current_options().mesh
    return mesh is not None and _ways(mesh, (SEQUENCE,)) > 1


def gather_weight(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Put together what ``fsdp`` split; the gradient is summed where it is to lie."""
    mesh = current_options().mesh
    if mesh is None or axes is None or _ways(mesh, (FSDP,)) == 1:
        return x
    parts = (_names(entry) for entry in axes)
    whole = PartitionSpec(*(tuple(n for n in names if n != FSDP) or None for names in parts))
    stored = NamedSharding(mesh, PartitionSpec(*axes))
    # Between the two the gradient is whole: the compiler would split what it is summed from.
    used = NamedSharding(mesh, whole)
    return x if whole == stored.spec else _move(_move(x, None, stored), used, used)


def constrain_hidden_states(x: jax.Array) -> jax.Array:
    """Lay out what goes from block to block: (rows, length, features), features whole."""
    split = (SEQUENCE, TENSOR) if current_options().sequence_parallel else (SEQUENCE,)
    return _constrain(x, split, None)


def constrain_product_input(x: jax.Array, axes: Axes | None, dimension: int) -> jax.Array:
    """Lay out the input of a product whose weight has the features that go in at ``dimension``.

    One array stays one array, however many products read it.
    """
    options = current_options()
    if options.mesh is None or axes is None:
        return x
    into, out = (TENSOR in _names(_entry(axes, axis)) for axis in (dimension, 1 - dimension))
    if into:
        return _constrain(x, (SEQUENCE,), TENSOR)
    if not (out and options.sequence_parallel):
        return x
    known = options.gathered.get(id(x))
    if known is None:  # the array itself is kept, so that no other can have its id
        parts, whole = _length_shardings(x, options.mesh)
        known = options.gathered[id(x)] = (x, _move(x, whole, parts))
    return known[1]


def constrain_product_output(x: jax.Array, axes: Axes | None, dimension: int) -> jax.Array:
    """Lay out the result of a product whose weight has its features at ``dimension``."""
    options = current_options()
    if options.mesh is None or axes is None:
        return x
    if TENSOR in _names(_entry(axes, dimension)):
        return _constrain(x, (SEQUENCE,), TENSOR)
    if TENSOR not in _names(_entry(axes, 1 - dimension)):
        return x
    if not options.sequence_parallel:
        return _constrain(x, (SEQUENCE,), None)
    parts, whole = _length_shardings(x, options.mesh)
    return _move(x, parts, whole)


def constrain_token_ids(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Lay out (rows, length) as what is looked up in a table that is split by its entries."""
    mesh = current_options().mesh
    if mesh is None or TENSOR not in _names(_entry(axes or (), 0)) or x.ndim != 2:
        return x
    rows, length = _fitting(mesh, x.shape[0], BATCH_AXES), _fitting(mesh, x.shape[1], SEQUENCE)
    sharding = NamedSharding(mesh, PartitionSpec(rows, length))
    return jax.lax.with_sharding_constraint(x, sharding)


def constrain_lookup(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Lay out the rows of a table that is split by its entries: every device adds those it has."""
    split = axes is not None and TENSOR in _names(_entry(axes, 0))
    return _constrain(x, (SEQUENCE,), None) if split else x


def map_over_rows(
    function: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, weight: jax.Array
) -> jax.Array:
    """Return ``function(x, weight)``, of which every device computes the rows that it has."""
    mesh = current_options().mesh
    if mesh is None or mesh.size == 1 or x.shape[0] % _ways(mesh, BATCH_AXES):
        return function(x, weight)
    rows = PartitionSpec(BATCH_AXES)
    run = jax.shard_map(
        function, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
    )
    return run(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: jax.Array, to: NamedSharding | None, back: NamedSharding | None) -> jax.Array:
    """Lay out ``x`` by ``to`` and its gradient by ``back``: one gathers what the other scatters."""
    return x if to is None else jax.lax.with_sharding_constraint(x, to)


_move.defvjp(
    lambda x, to, back: (_move(x, to, back), None), lambda to, back, _, g: (_move(g, back, to),)
)


def _length_shardings(
    x: jax.Array, mesh: Mesh
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Return where hidden states lie between the blocks and inside, with sequence parallelism."""
    return _spec(x, mesh, (SEQUENCE, TENSOR), None), _spec(x, mesh, (SEQUENCE,), None)


def _constrain(x: jax.Array, length: tuple[str, ...], features: Entry) -> jax.Array:
    mesh = current_options().mesh
    sharding = None if mesh is None else _spec(x, mesh, length, features)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def _spec(
    x: jax.Array, mesh: Mesh, length: tuple[str, ...], features: Entry
) -> NamedSharding | None:
    """Return where (rows, features) or (rows, length, features) lie; None for other shapes."""
    if not 2 <= x.ndim <= 3 or mesh.size == 1:
        return None
    kinds = (BATCH_AXES, length, features) if x.ndim == 3 else (BATCH_AXES, features)
    entries = [_fitting(mesh, size, axes) for size, axes in zip(x.shape, kinds, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _fitting(mesh: Mesh, size: int, axes: Entry) -> Any:
    """Return the axes that split a dimension; those of a size that is not divided stay open."""
    present = tuple(name for name in _names(axes) if name in mesh.shape)
    if not present:
        return None
    return present if size % _ways(mesh, present) == 0 else PartitionSpec.UNCONSTRAINED


def _entry(axes: Axes, dimension: int) -> Entry:
    return axes[dimension] if dimension < len(axes) else None


def _names(entry: Entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _ways(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(dict(mesh.shape).get(name, 1) for name in names)
