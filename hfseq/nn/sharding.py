"""Sharding of parameters and activations over a device mesh.

Rules select the sharding of parameters by regular expressions on their paths. A rule is a pair
(pattern, tactic), where the tactic is the name of a way to split a parameter. The first rule whose
pattern is found in the path of a parameter applies. If no rule matches a parameter, an error is
raised. The tactics are:

* `column`, `row`: the kernel of a linear layer, split over `tensor` by its output features (column)
  or its input features (row), as in Megatron.
* `embedding`: an embedding matrix, split over `tensor` by vocabulary.
* `table`, `row_table`: a matrix that is split over `fsdp` only, along its second dimension (table)
  or its first dimension (row_table).
* `vocab`: a vector with one element per vocabulary entry.
* `vocab_column`, `vocab_row`: a matrix with one column per vocabulary entry. `vocab_row` is not
  split over `fsdp`.
* `column_bias`: the bias of a `column` layer, split over both `tensor` and `fsdp`.
* `heads`: a matrix with one column per attention head.
* `channels`: the kernel of a two-dimensional convolution.
* `expert_column`, `expert_row`: the kernels of all experts of a layer, one parameter with three
  dimensions. `expert` splits the experts, and `tensor` splits the second (column) or third (row)
  dimension.
* `expert_table`: the parameters of all experts of a layer. `expert` splits the experts, and `fsdp`
  splits the second dimension.
* `expert_column_bias`, `expert_bias`: the biases of all experts. `expert` splits the experts, and
  `tensor` splits the second dimension of an `expert_column_bias`.
* `vector`: normalization parameters and other biases.
* `replicated`: a parameter that is not split.

In a matrix, `fsdp` and `tensor` split different dimensions. Activations are split over the same
mesh axes as the weight of their layer.
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
from jax.typing import DTypeLike

from hfseq.errors import UsageError, did_you_mean
from hfseq.nn import trees
from hfseq.nn.context import current_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AXES = ("data", "fsdp", "expert", "tensor", "sequence")
FSDP, EXPERT, TENSOR, SEQUENCE = AXES[1:]
# The mesh axes that split the batch axis of inputs and activations.
BATCH_AXES = ("data", "fsdp", "expert")

# The entry of a parameter tree with the weights of sentence-transformers' modules.
SENTENCE_MODULES = "sentence_modules"

Rules = Sequence[tuple[str, str]]
#: An `Entry` is the mesh axis or axes that split one dimension, or `None`. `Axes` has one `Entry`
#: per dimension.
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
    "expert_column": ("expert", "tensor", "fsdp"),
    "expert_row": ("expert", "fsdp", "tensor"),
    "expert_table": ("expert", "fsdp"),
    "expert_column_bias": ("expert", "tensor"),
    "expert_bias": ("expert",),
    "vector": ("fsdp",),
    "replicated": (),
}

# For each of these tactics, the dimension whose size is the vocabulary size. It may be padded to a
# multiple of the size of the `tensor` axis.
VOCAB_DIMENSIONS = {"embedding": 0, "vocab": 0, "vocab_column": 1, "vocab_row": 1}

# The rules of architectures that define none. They support the axes `data` and `fsdp`. A `tensor`
# axis of size 2 or more raises an error.
DEFAULT_RULES: Rules = ((r"kernel$|weight$|embedding$", "table"), (r".*", "replicated"))


def make_mesh(layout: str | None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh from a layout.

    Args:
        layout: Axis sizes such as `data=2,fsdp=4`. One size may be -1 for the remaining devices.
            `None` puts all devices on the `data` axis.
        devices: The devices of the mesh. Default: all devices.

    Raises:
        UsageError: An axis does not exist, or the product of the axis sizes is not the number of
            devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(layout, len(devices))
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def complete_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh over the same devices that has all axes of `AXES`, with automatic axis types.

    Args:
        mesh: A mesh whose axes are in `AXES`. The missing axes get size 1.

    Raises:
        UsageError: The mesh has an axis that is not in `AXES`.
    """
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise UsageError(
            f"the mesh has the axis {unknown[0]!r}{did_you_mean(str(unknown[0]), AXES)}; the "
            f"possible axes are {', '.join(AXES)}, for example "
            f"jax.make_mesh(({mesh.size},), ('data',))"
        )
    automatic = (AxisType.Auto,) * len(AXES)
    missing = [name for name in AXES if name not in mesh.axis_names]
    if not missing and mesh.axis_types == automatic:
        return mesh
    devices = mesh.devices.reshape(*mesh.devices.shape, *[1] * len(missing))
    return Mesh(devices, (*mesh.axis_names, *missing), axis_types=automatic)


def with_automatic_axes(name: str, value: Any) -> Any:
    """Moves an array from a mesh with explicit axes to the same mesh with automatic axes.

    The shards of the array do not change.

    Args:
        name: Name of the argument, for the error message.
        value: An array. A value that is not an array is returned unchanged.

    Raises:
        UsageError: The array is traced, so its mesh cannot be replaced.
    """
    if not isinstance(value, jax.Array):
        return value
    mesh = getattr(jax.typeof(value).sharding, "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return value
    if isinstance(value, jax.core.Tracer):
        raise UsageError(
            f"{name} is sharded over a mesh with explicit axes {mesh.axis_names}. Inside jit, use "
            "the mesh that model.shard(mesh) returns, or create the mesh with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    sharding: Any = value.sharding
    return jax.device_put(value, NamedSharding(complete_mesh(sharding.mesh), sharding.spec))


def mesh_sizes(layout: str | None, devices: int) -> dict[str, int]:
    """Returns the size of every mesh axis.

    Args:
        layout: Axis sizes such as `data=2,fsdp=4`, or `None`.
        devices: Number of devices.

    Raises:
        UsageError: An axis does not exist, or the product of the axis sizes is not the number of
            devices.
    """
    requested: dict[str, int] = {} if layout else {"data": devices}
    for part in layout.split(",") if layout else ():
        axis, _, size = part.strip().partition("=")
        if axis not in AXES:
            raise UsageError(
                f"--mesh {layout}: unknown axis '{axis}'{did_you_mean(axis, AXES)} "
                f"(axes: {', '.join(AXES)})"
            )
        if axis in requested:
            raise UsageError(f"--mesh {layout}: axis '{axis}' is given twice")
        if not re.fullmatch(r"-1|[1-9]\d*", size.strip()):
            raise UsageError(f"--mesh {layout}: '{axis}={size}' requires a positive number or -1")
        requested[axis] = int(size)
    if list(requested.values()).count(-1) > 1:
        raise UsageError(f"--mesh {layout}: only one axis can be -1")
    sizes = dict.fromkeys(AXES, 1) | requested
    fixed = math.prod(size for size in sizes.values() if size > 0)
    sizes = {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != devices:
        raise UsageError(
            f"--mesh {layout} describes {math.prod(sizes.values())} devices, but there are "
            f"{devices}. The product of the axis sizes must be {devices} (one size may be -1 for "
            "the remaining devices)"
        )
    return sizes


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of the mesh that split the batch axis of inputs and activations."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def data_shards(mesh: Mesh) -> int:
    """Returns the number of shards into which the mesh splits a batch."""
    return _num_shards(mesh, BATCH_AXES)


Tree = TypeVar("Tree")


class HasHeads(Protocol):
    """A model whose attention heads can be split over the `tensor` axis."""

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration."""
        ...

    @property
    def head_counts(self) -> tuple[str, ...]:
        """The names of configuration attributes that count heads."""
        ...


def check_heads(model: HasHeads, mesh: Mesh) -> None:
    """Checks that the attention heads can be distributed evenly over the `tensor` axis.

    Raises:
        UsageError: A number of heads in the configuration is not a multiple of the axis size.
    """
    tensor_shards, config = mesh.shape["tensor"], model.config.to_dict()
    parts = [part for part in config.values() if isinstance(part, dict) and "model_type" in part]
    counts = (
        (name, heads)
        for values in (config, *parts)
        for name in model.head_counts
        for heads in np.ravel(values.get(name) or 0).tolist()  # one number, or one per stage
    )
    for name, heads in counts:
        if heads and heads % tensor_shards:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise UsageError(
                f"--mesh tensor={tensor_shards} does not divide the {heads} attention heads of the "
                f"configuration ({name}) evenly. Set tensor to one of {', '.join(map(str, fits))}"
            )


class Layout:
    """Computes the sharding of every parameter of a model from sharding rules and a mesh.

    Args:
        mesh: The mesh over which the parameters are split.
        rules: Pairs (pattern, tactic), or `None` for an architecture without rules.
        vocab_size: Size of the vocabulary. If it is not a multiple of the size of the `tensor`
            axis, the vocabulary is padded.
        stacked: Path prefixes of scanned layers. The leading axis of their parameters is the layer
            axis, which is never split.
        shapes: Shape of every parameter without padding. The method `cut` restores these shapes.
        pad_vocabulary: Whether to pad the vocabulary. If this is False and the vocabulary size is
            not a multiple of the size of the `tensor` axis, the vocabulary is not split.

    Raises:
        UsageError: A tactic is unknown, or `rules` is `None` and the size of the `tensor` axis is
            greater than 1.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: Rules | None,
        vocab_size: int | None = None,
        stacked: Sequence[trees.Path] = (),
        shapes: Mapping[trees.Path, tuple[int, ...]] | None = None,
        pad_vocabulary: bool = True,
    ):
        if rules is None and mesh.shape["tensor"] > 1:
            raise UsageError(
                "--mesh has tensor > 1, but this architecture declares no sharding rules. Register "
                "the architecture with sharding=[(pattern, tactic), ...], or use the axes data and "
                "fsdp only"
            )
        self.mesh, self.stacked, self.vocab_size = mesh, tuple(stacked), vocab_size
        self.shapes, self.pad_vocabulary = shapes or {}, pad_vocabulary
        self.rules = [(re.compile(pattern), tactic) for pattern, tactic in rules or DEFAULT_RULES]
        unknown = [tactic for _, tactic in self.rules if tactic not in TACTICS]
        if unknown:
            raise UsageError(f"unknown sharding tactics {unknown} (known: {', '.join(TACTICS)})")

    def tactic(self, path: trees.Path) -> str | None:
        """Returns the tactic of the first rule that matches `path`."""
        name = trees.join(path)
        if any(part.startswith("lora_") for part in path[-2:]):
            return "replicated"  # adapters are small
        if path[0] == SENTENCE_MODULES:
            return "replicated"  # and so are the layers after an encoder
        return next((tactic for pattern, tactic in self.rules if pattern.search(name)), None)

    def specs(self, shapes: dict[trees.Path, tuple[int, ...]]) -> dict[trees.Path, PartitionSpec]:
        """Returns the partition spec of every parameter.

        Raises:
            UsageError: Some parameters cannot be split. The message lists all of them.
        """
        specs, problems = {}, []
        for path, shape in shapes.items():
            tactic = self.tactic(path)
            if tactic is None:
                problems.append(f"  {trees.join(path)}: no sharding rule matches")
                continue
            specs[path] = self._spec(path, tactic, len(shape))
            axis = VOCAB_DIMENSIONS.get(tactic)
            if not self.pad_vocabulary and axis is not None and axis < len(shape):
                if shape[axis] % _num_shards(self.mesh, _names(specs[path][axis])):
                    whole = list(specs[path])
                    whole[axis] = None
                    specs[path] = PartitionSpec(*whole)
            for dimension, (size, axes) in enumerate(
                zip(self.padded_shape(path, shape), specs[path], strict=False)
            ):
                shards = _num_shards(self.mesh, _names(axes))
                if size % shards:
                    fits = [str(n) for n in range(1, shards + 1) if size % n == 0]
                    problems.append(
                        f"  {trees.join(path)}: dimension {dimension} of size {size} is not "
                        f"divisible by {'x'.join(_names(axes))}={shards} (possible: "
                        f"{', '.join(fits)})"
                    )
        if problems:
            raise UsageError("this model cannot be sharded over --mesh:\n" + "\n".join(problems))
        return specs

    def _spec(self, path: trees.Path, tactic: str, ndim: int) -> PartitionSpec:
        lead = (None,) if self._is_stacked(path) else ()
        axes = TACTICS[tactic]
        # A vector (a bias or a scale) that matches the rule of a matrix is split like the last
        # dimension of the matrix.
        body = axes[len(axes) - (ndim - len(lead)) :] if len(axes) > ndim - len(lead) else axes
        return PartitionSpec(*lead, *body)

    def layer_shape(self, path: trees.Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter without the axis of stacked layers."""
        return shape[int(self._is_stacked(path)) :]

    def _is_stacked(self, path: trees.Path) -> bool:
        return any(path[: len(head)] == head for head in self.stacked)

    def axes(self, shapes: dict[trees.Path, tuple[int, ...]]) -> dict[trees.Path, Axes]:
        """Returns the mesh axes that split each parameter, without the axis of stacked layers."""
        lead = {path: int(self._is_stacked(path)) for path in shapes}
        return {path: tuple(spec)[lead[path] :] for path, spec in self.specs(shapes).items()}

    def shardings(
        self, shapes: dict[trees.Path, tuple[int, ...]]
    ) -> dict[trees.Path, NamedSharding]:
        """Returns the sharding of every parameter."""
        return {path: NamedSharding(self.mesh, spec) for path, spec in self.specs(shapes).items()}

    # -- the vocabulary
    # -----------------------------------------------------------------------------

    def padded_shape(self, path: trees.Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape` with the vocabulary size rounded up.

        The padded size is a multiple of the size of the `tensor` axis.
        """
        axis = VOCAB_DIMENSIONS.get(self.tactic(path) or "")
        tensor_shards = self.mesh.shape["tensor"]
        if axis is None or not self.pad_vocabulary or shape[axis] != self.vocab_size:
            return shape
        rounded = math.ceil(shape[axis] / tensor_shards) * tensor_shards
        return (*shape[:axis], rounded, *shape[axis + 1 :])

    def pad(self, path: trees.Path, leaf: jax.Array) -> jax.Array:
        """Pads a parameter with zeros to `padded_shape`."""
        target = self.padded_shape(path, leaf.shape)
        missing = [(0, new - old) for old, new in zip(leaf.shape, target, strict=True)]
        return leaf if target == leaf.shape else jnp.pad(leaf, missing)

    def cut(self, path: trees.Path, leaf: jax.Array) -> jax.Array:
        """Removes the padding of the vocabulary from a parameter before it is saved.

        The size of the vocabulary is read from the shape of this parameter in `shapes`, because a
        model may have two vocabularies.
        """
        axis = VOCAB_DIMENSIONS.get(self.tactic(path) or "")
        if axis is None or leaf.shape[axis] == self.shapes[path][axis]:
            return leaf
        return jax.lax.slice_in_dim(leaf, 0, self.shapes[path][axis], axis=axis)


def optimizer_shardings(
    tree: Tree,
    shardings: dict[trees.Path, NamedSharding],
    shapes: dict[trees.Path, tuple[int, ...]],
    mesh: Mesh,
) -> Tree:
    """Returns the sharding of each leaf of an optimizer state.

    A leaf is sharded like a parameter if its path ends with the path of the parameter and both have
    the same shape. Other leaves are replicated.

    Args:
        tree: The optimizer state, with `jax.ShapeDtypeStruct` leaves.
        shardings: Sharding of each parameter.
        shapes: Shape of each parameter.
        mesh: The mesh over which the other leaves are replicated.
    """
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
    """Returns the sharding of an input array.

    The batch axis is split over the mesh axes `data`, `fsdp` and `expert`, and the length axis over
    the mesh axis `sequence`.

    Args:
        mesh: The mesh.
        ndim: Number of axes of the array.
        lead: Number of axes before the batch axis.
        split_length: Whether to split the length axis, which follows the batch axis.
    """
    length = ("sequence",) if split_length and ndim > lead + 1 else ()
    return NamedSharding(mesh, PartitionSpec(*(None,) * lead, batch_axes(mesh), *length))


# -- arrays of several processes


def is_distributed(leaf: Any) -> bool:
    """Returns whether an array is on devices of several processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def replicate(tree: Tree) -> Tree:
    """Copies the arrays that are distributed over processes to all devices of their mesh.

    All processes must call this function. Each process can then read the values.
    """

    def copied(leaf: Any) -> Any:
        if not is_distributed(leaf) or leaf.is_fully_replicated:
            return leaf
        return _replicate(leaf.sharding.mesh)(leaf)

    return jax.tree.map(copied, tree)


class GatheredArray:
    """An array that is distributed over processes, and is copied to process 0 when it is read.

    All processes must read the same parts in the same order. Process 0 receives the values, and the
    other processes receive zeros. Only the part that is being read is in the memory of process 0.

    Args:
        array: The distributed array.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    def __init__(self, array: jax.Array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __getitem__(self, index: Any) -> Any:
        """Returns one entry along the first axis, or the values of a part of the array.

        For an integer, the result is a `GatheredArray` whose values are not read yet. For any other
        index, the values are read.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(first, int):
            return np.asarray(self)[index]
        entry = GatheredArray(_take(self._array, first))
        return entry[tuple(rest)] if rest else entry

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = self._array
        parts: Mapping[Any, Any] = array.sharding.devices_indices_map(self.shape)
        in_first = {str(part) for device, part in parts.items() if not device.process_index}
        if in_first != set(map(str, parts.values())):
            array = jax.block_until_ready(_replicate(array.sharding.mesh)(array))  # type: ignore[attr-defined]
        values = np.zeros(self.shape, self.dtype)
        if not jax.process_index():
            for shard in array.addressable_shards:
                values[shard.index] = shard.data
        return values if dtype is None else values.astype(dtype)


@jax.jit
def _take(array: jax.Array, index: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled function that copies an array to all devices."""
    return jax.jit(lambda array: array, out_shardings=NamedSharding(mesh, PartitionSpec()))


# -- activations
# ---------------------------------------------------------------------------------------


def assign_weight_axes(module: nnx.Module, axes: Mapping[tuple[str, ...], Axes]) -> None:
    """Sets the attribute `weight_axes` of every layer.

    A layer derives the sharding of its activations from this attribute.

    Args:
        module: The model.
        axes: Maps the path of each weight to the mesh axes that split its dimensions. The axis of
            stacked layers is left out.
    """
    for path, layer in nnx.iter_graph(module):
        for name in ("kernel", "embedding"):
            split = axes.get((*map(str, path), name))
            if split is not None and hasattr(layer, "weight_axes"):
                layer.weight_axes = split


def splits_sequence() -> bool:
    """Returns whether the mesh axis `sequence` splits the length of sequences."""
    mesh = current_options().mesh
    return mesh is not None and _num_shards(mesh, (SEQUENCE,)) > 1


def gather_weight(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Gathers a weight over `fsdp`. The backward pass reduces and scatters the gradient."""
    mesh = current_options().mesh
    if mesh is None or axes is None or _num_shards(mesh, (FSDP,)) == 1:
        return x
    parts = (_names(entry) for entry in axes)
    gathered = PartitionSpec(*(tuple(n for n in names if n != FSDP) or None for names in parts))
    stored = NamedSharding(mesh, PartitionSpec(*axes))
    # The gradient first gets the sharding of the gathered weight, and then that of the stored
    # weight. With only the second one, the compiler would also split the terms whose sum is the
    # gradient.
    used = NamedSharding(mesh, gathered)
    return x if gathered == stored.spec else _move(_move(x, None, stored), used, used)


def constrain_hidden_states(x: jax.Array) -> jax.Array:
    """Sets the sharding of hidden states between layers.

    The shape of `x` is `(batch, length, features)`. Features are not split.
    """
    split = (SEQUENCE, TENSOR) if current_options().sequence_parallel else (SEQUENCE,)
    return _constrain(x, split, None)


def constrain_product_input(x: jax.Array, axes: Axes | None, dimension: int) -> jax.Array:
    """Sets the sharding of the input of a matrix multiplication with a weight.

    If several layers read the same input, it is gathered only once.

    Args:
        x: The input.
        axes: The mesh axes that split each dimension of the weight.
        dimension: The dimension of the weight that corresponds to the input features.
    """
    options = current_options()
    if options.mesh is None or axes is None:
        return x
    into, out = (TENSOR in _names(_entry(axes, axis)) for axis in (dimension, 1 - dimension))
    if into:
        return _constrain(x, (SEQUENCE,), TENSOR)
    if not (out and options.sequence_parallel):
        return x
    entry = options.gathered.get(id(x))
    if entry is None:  # keep a reference to the array, so that no other array gets its id
        scattered, gathered = _length_shardings(x, options.mesh)
        entry = options.gathered[id(x)] = (x, _move(x, gathered, scattered))
    return entry[1]


def constrain_product_output(x: jax.Array, axes: Axes | None, dimension: int) -> jax.Array:
    """Sets the sharding of the result of a matrix multiplication with a weight.

    Args:
        x: The result.
        axes: The mesh axes that split each dimension of the weight.
        dimension: The dimension of the weight that corresponds to the output features.
    """
    options = current_options()
    if options.mesh is None or axes is None:
        return x
    if TENSOR in _names(_entry(axes, dimension)):
        return _constrain(x, (SEQUENCE,), TENSOR)
    if TENSOR not in _names(_entry(axes, 1 - dimension)):
        return x
    if not options.sequence_parallel:
        return _constrain(x, (SEQUENCE,), None)
    scattered, gathered = _length_shardings(x, options.mesh)
    return _move(x, scattered, gathered)


def constrain_token_ids(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Sets the sharding of token IDs for the lookup in an embedding matrix split by vocabulary.

    The shape of `x` is `(batch, length)`. Token IDs are not split over the `tensor` axis.
    """
    mesh = current_options().mesh
    if mesh is None or TENSOR not in _names(_entry(axes or (), 0)) or x.ndim != 2:
        return x
    rows, length = _fitting(mesh, x.shape[0], BATCH_AXES), _fitting(mesh, x.shape[1], SEQUENCE)
    sharding = NamedSharding(mesh, PartitionSpec(rows, length))
    return jax.lax.with_sharding_constraint(x, sharding)


def constrain_lookup(x: jax.Array, axes: Axes | None) -> jax.Array:
    """Sets the sharding of vectors looked up in an embedding matrix split by vocabulary.

    Each device has only a part of the vocabulary. The vectors are not split over `tensor`, so that
    the compiler sums the lookup results of the devices.
    """
    split = axes is not None and TENSOR in _names(_entry(axes, 0))
    return _constrain(x, (SEQUENCE,), None) if split else x


def constrain_shared_heads(x: jax.Array) -> jax.Array:
    """Sets the sharding of head vectors that all rows of a batch share.

    The shape of `x` is `(length, heads, head_dim)`. Only heads are split. Otherwise, the compiler
    of jax 0.10 computes wrong gradients of such vectors on a mesh in which `data`, `fsdp` and
    `tensor` are all larger than 1.
    """
    mesh = current_options().mesh
    if mesh is None or mesh.size == 1:
        return x
    sharding = NamedSharding(mesh, PartitionSpec(None, _fitting(mesh, x.shape[1], TENSOR), None))
    return jax.lax.with_sharding_constraint(x, sharding)


def map_over_rows(
    function: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, weight: jax.Array
) -> jax.Array:
    """Returns `function(x, weight)`. Each device computes it for its own part of the batch."""
    mesh = current_options().mesh
    if mesh is None or mesh.size == 1 or x.shape[0] % _num_shards(mesh, BATCH_AXES):
        return function(x, weight)
    rows = PartitionSpec(batch_axes(mesh))
    run = jax.shard_map(
        function, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
    )
    return run(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: jax.Array, to: NamedSharding | None, back: NamedSharding | None) -> jax.Array:
    """Sets the sharding of `x` to `to` and the sharding of its gradient to `back`.

    If the forward pass gathers, the backward pass scatters. If the forward pass scatters, the
    backward pass gathers.
    """
    return x if to is None else jax.lax.with_sharding_constraint(x, to)


_move.defvjp(
    lambda x, to, back: (_move(x, to, back), None), lambda to, back, _, g: (_move(g, back, to),)
)


def _length_shardings(
    x: jax.Array, mesh: Mesh
) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Returns the shardings of hidden states between layers and within layers.

    Between layers, `tensor` splits the length too (sequence parallelism).
    """
    return _spec(x, mesh, (SEQUENCE, TENSOR), None), _spec(x, mesh, (SEQUENCE,), None)


def _constrain(x: jax.Array, length: tuple[str, ...], features: Entry) -> jax.Array:
    mesh = current_options().mesh
    sharding = None if mesh is None else _spec(x, mesh, length, features)
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def _spec(
    x: jax.Array, mesh: Mesh, length: tuple[str, ...], features: Entry
) -> NamedSharding | None:
    """Returns the sharding of an array `(batch, features)` or `(batch, length, features)`.

    Returns:
        The sharding, or `None` for other numbers of axes and for a single device.
    """
    if not 2 <= x.ndim <= 3 or mesh.size == 1:
        return None
    kinds = (BATCH_AXES, length, features) if x.ndim == 3 else (BATCH_AXES, features)
    entries = [_fitting(mesh, size, axes) for size, axes in zip(x.shape, kinds, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*entries))


def _fitting(mesh: Mesh, size: int, axes: Entry) -> Any:
    """Returns the entry of a `PartitionSpec` that splits a dimension over some mesh axes.

    The entry is `UNCONSTRAINED` if `size` is not a multiple of the number of shards, and `None` if
    the mesh has none of the axes.
    """
    present = tuple(name for name in _names(axes) if name in mesh.shape)
    if not present:
        return None
    return present if size % _num_shards(mesh, present) == 0 else PartitionSpec.UNCONSTRAINED


def _entry(axes: Axes, dimension: int) -> Entry:
    return axes[dimension] if dimension < len(axes) else None


def _names(entry: Entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _num_shards(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(dict(mesh.shape).get(name, 1) for name in names)
