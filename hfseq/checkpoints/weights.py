"""Maps parameters of hfseq models to tensors of PyTorch checkpoints, and back.

Modules of hfseq have the attribute names of the PyTorch checkpoint, so most names follow from
rules. If the last component of a parameter path is ``kernel``, ``scale`` or ``embedding``, it is
``weight`` in PyTorch. ``mean`` and ``var`` are ``running_mean`` and ``running_var``. The axes of
kernels are permuted (:func:`torch_axes`). Layers that are stacked for scanning have one PyTorch
tensor per layer.

A model family only declares the exceptions to these rules: aliases of tied tensors, names to
ignore, templates that rename parameters in both directions, and synonyms, which are alternative
names that hfseq reads but does not write.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hfseq.errors import CheckpointError, WeightsError

if TYPE_CHECKING:
    import jax

ParamPath = tuple[str, ...]
#: A part of an array: slices, or ``...`` for the whole array.
Index = tuple[slice, ...] | EllipsisType
Entry = TypeVar("Entry")
#: PyTorch's name for the last component of a parameter path, if it differs.
TORCH_LEAF_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
# Prefix of Flax names in Transformers 4 checkpoints of models with several collections.
_COLLECTIONS = re.compile(r"^(params|batch_stats)\.")
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
_OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file, whose values are read on demand.

    Attributes:
        shape: The shape.
        dtype: The dtype as in NumPy, or the code of an unsupported dtype.
        read: Function that reads the part of the tensor that a tuple of slices selects. For
            ``...``, it reads the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]


def read_aligned(path: str, begin: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Reads an array of a file into a new buffer.

    XLA uses the buffer without a copy because its address is a multiple of 64. The file is not read
    through a memory map, because its pages would then stay in memory in addition to the buffer.

    Args:
        path: The file.
        begin: Offset of the first byte.
        shape: Shape of the array.
        dtype: The dtype of the array.

    Raises:
        CheckpointError: The file is too short.
    """
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    content = buffer[start : start + size]
    with open(path, "rb") as stream:
        stream.seek(begin)
        if stream.readinto(content) < size:  # type: ignore[arg-type]
            raise CheckpointError(
                f"{path} was truncated while it was read: download or save it again"
            )
    return content.view(dtype).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The PyTorch tensor for a parameter, or for one layer of a stacked parameter.

    Attributes:
        path: Path of the parameter.
        name: Name of the PyTorch tensor.
        axes: Permutation that transposes the PyTorch tensor to the axes of the parameter, or `None`
            if the axes have the same order.
        unstacked_path: Path of the parameter in a tree with separate parameters for each layer.
        layer: Index of the layer of a stacked parameter, or `None`.
        part: Index of the part of a joined parameter (see `JoinedTensor`) that the tensor contains,
            or an empty tuple.
    """

    path: ParamPath
    name: str
    axes: tuple[int, ...] | None
    unstacked_path: ParamPath
    layer: int | None = None
    # Not part of the hash, because slices are only hashable since Python 3.12.
    part: tuple[int | slice, ...] = dataclasses.field(default=(), hash=False)

    @property
    def flax_name(self) -> str:
        """The name in ``format: flax`` files, which is the dotted unstacked path."""
        return ".".join(self.unstacked_path)


@dataclasses.dataclass(frozen=True)
class JoinedTensor:
    """Names of the tensors in a file that PyTorch's class joins into one parameter.

    For example, files contain one tensor per expert, which Transformers stacks. Transformers
    describes the same operations in ``conversion_mapping.py``.

    Attributes:
        names: Names of the stored tensors, such as ``"experts.{}.gate_proj.weight"``. Tensors whose
            names differ in the index ``{}`` are stacked along a new leading axis of the parameter.
            If there are several names, their tensors have equal sizes and are concatenated.
            A file may also contain the parameter itself as one tensor, which is then read instead.
        axis: Axis of the stored tensors along which the tensors of several names are concatenated.
    """

    names: tuple[str, ...]
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class DerivedTensor:
    """A tensor in PyTorch checkpoints that is not a parameter of the hfseq model.

    The model computes it, or uses another tensor with the same values. A file may contain other
    values, for example because the tensor was trained.

    Attributes:
        value: The computed array, or the PyTorch name of the tensor with the same values.
        remedy: Advice for the user if a file contains other values, which is then an error. With
            `None`, other values are ignored with a warning.
        unused: Whether PyTorch's outputs do not depend on the tensor. Other values are then ignored
            without a warning.
    """

    value: np.ndarray | str
    remedy: str | None = None
    unused: bool = False

    def fits(self, tensor: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> bool:
        """Returns whether a tensor in a file has the expected values, up to rounding.

        Args:
            tensor: The tensor.
            tensors: All tensors of the file, by name without the prefix.
            prefix: The prefix of the base model.
        """
        if isinstance(self.value, str):
            other = tensors.get(self.value.removeprefix(f"{prefix}."))
            return other is None or np.array_equal(tensor.read(...), other.read(...))
        if tensor.shape != self.value.shape:
            return False
        array = np.asarray(tensor.read(...), np.float32)
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(tensor.dtype, 0.0)
        return bool(np.allclose(array, self.value, rtol=rounding, atol=1e-6))


@dataclasses.dataclass
class LoadReport:
    """The differences between a checkpoint and a model.

    Attributes:
        missing: Parameters that the checkpoint lacks or has with another shape.
        unexpected: Names of tensors in the checkpoint for which the model has no parameter.
        ignored: Names in the checkpoint that the model class ignores, for example buffers.
        mismatched: Name, shape in the checkpoint, and expected shape of each tensor whose shape
            differs.
        reinitialized: The parameters of the tensors in ``mismatched``. They are newly initialized
            if mismatches are ignored.
        conflicts: Pairs of names of tensors that belong to the same parameter but have different
            values. The first tensor of a pair is used.
        unused_biases: Pairs of names of biases that belong to the same parameter but have different
            values. PyTorch's model uses only the first bias, so this is not a conflict.
        derived: Names of tensors whose values differ from those that the model computes, with the
            remedy of their `DerivedTensor`.
        unsupported_dtypes: Dtypes by name of tensors whose dtype is not supported for parameters.
        dtypes: Number of tensors by dtype.
        incomplete: Names of missing tensors of joined parameters (`JoinedTensor`).
        mixed_layouts: Pairs of names of a joined parameter and of one of the tensors that it
            consists of, if a checkpoint contains both.
        suggestions: Maps a missing parameter to an unexpected tensor that may contain it. The
            tensor has the same shape, and its name is a different spelling of the expected name.
    """

    missing: list[ParamPath] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    ignored: list[str] = dataclasses.field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    reinitialized: set[ParamPath] = dataclasses.field(default_factory=set)
    conflicts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unused_biases: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    derived: dict[str, str | None] = dataclasses.field(default_factory=dict)
    unsupported_dtypes: dict[str, str] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)
    incomplete: list[str] = dataclasses.field(default_factory=list)
    mixed_layouts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    suggestions: dict[ParamPath, str] = dataclasses.field(default_factory=dict)


class WeightMap:
    """Maps the parameters of a model to tensors of PyTorch checkpoints, in both directions.

    Args:
        shapes: Shape of each parameter by path.
        prefix: Name of the base model, such as ``bert``. Names in checkpoints may start with it.
        aliases: Maps alternative PyTorch names of tied tensors to the name that hfseq uses.
        fallbacks: Maps a PyTorch name to the names that are tried, in order, if a checkpoint does
            not contain it.
        ignored: Regular expressions for PyTorch names that have no parameter in hfseq.
        templates: Pairs such as ``"block.{}.norm": "layers.{}.ln"`` that rename parameters to
            PyTorch names. The pairs are applied one after the other.
        synonyms: Pairs such as ``"layers.{}": "encoder.layer.{}"`` that rename PyTorch names in
            checkpoints of other versions to the names that hfseq writes. The pairs are applied one
            after the other.
        native_synonyms: Synonyms for files with Flax names.
        stacked: Maps the path prefix of scanned layers to the paths of the individual layers.
        joined: Maps PyTorch names of joined parameters to the tensors that files contain instead.
        modules: Pairs such as ``"encoder.layer.{}": "layers.{}"`` that rename PyTorch names in
            files to the names in a PyTorch model in memory. The pairs are applied one after the
            other.
        integers: The paths of variables that contain integers.
    """

    def __init__(
        self,
        shapes: Mapping[ParamPath, tuple[int, ...]],
        *,
        prefix: str = "",
        aliases: Mapping[str, str] | None = None,
        fallbacks: Mapping[str, Sequence[str]] | None = None,
        ignored: tuple[str, ...] = (),
        templates: Mapping[str, str] | None = None,
        synonyms: Mapping[str, str] | None = None,
        native_synonyms: Mapping[str, str] | None = None,
        stacked: Mapping[ParamPath, Sequence[ParamPath]] | None = None,
        joined: Mapping[str, JoinedTensor] | None = None,
        modules: Mapping[str, str] | None = None,
        integers: Collection[ParamPath] = (),
    ):
        self._integers = integers
        self.joined = dict(joined or {})
        self._modules = [_template(*pair) for pair in (modules or {}).items()]
        self.shapes, self.prefix, self.ignored = dict(shapes), prefix, ignored
        self.fallbacks = dict(fallbacks or {})
        self._templates = [_template(*pair) for pair in (templates or {}).items()]
        self._synonyms = [_template(*pair) for pair in (synonyms or {}).items()]
        self._native_synonyms = [_template(*pair) for pair in (native_synonyms or {}).items()]
        self.slots = [
            part
            for path in self.shapes
            for slot in self._slots(path, stacked or {})
            for part in self._parts(slot)
        ]
        names = {slot.name for slot in self.slots}
        if self.joined:  # aliases and fallbacks may use the name of the joined parameter
            names = names | {self.torch_name(path) for path in self.shapes}
        self._torch_names, self._flax_names = names, {slot.flax_name for slot in self.slots}
        # `resolve_name` adds or removes the prefix of the base model. Aliases of heads that this
        # model lacks are dropped.
        self.aliases = {
            alias: self.resolve_name(name)
            for alias, name in (aliases or {}).items()
            if self.has_parameter(name) and not self.has_parameter(alias)
        }
        # If the output projection of the head is not tied, PyTorch uses the projection's own bias
        # (`decoder.bias`), so this alias is saved as well.
        self._live = {
            a: n for a, n in self.aliases.items() if f"{a.rpartition('.')[0]}.weight" in names
        }

    def _slots(
        self, path: ParamPath, stacked: Mapping[ParamPath, Sequence[ParamPath]]
    ) -> list[Slot]:
        for head, layers in stacked.items():
            if path[: len(head)] == head:
                # A parameter that only the first layer has is stacked with a layer axis of size 1.
                paths = [(*p, *path[len(head) :]) for p in layers[: self.shapes[path][0]]]
                ndim = len(self.shapes[path]) - 1
                return [
                    Slot(path, self.torch_name(p), torch_axes(p, ndim), p, layer)
                    for layer, p in enumerate(paths)
                ]
        return [Slot(path, self.torch_name(path), torch_axes(path, len(self.shapes[path])), path)]

    def _parts(self, slot: Slot) -> list[Slot]:
        """Returns ``[slot]``, or for a joined parameter one slot per stored tensor."""
        patterns = {re.compile(rf"(?<![^.]){re.escape(n)}$"): j for n, j in self.joined.items()}
        pattern = next((pattern for pattern in patterns if pattern.search(slot.name)), None)
        if pattern is None:
            return [slot]
        joined = patterns[pattern]
        shape = self._expected(slot, native=True)
        stacked = "{}" in joined.names[0]
        axes = torch_axes(slot.path, len(shape) - stacked)
        axis = axes.index(joined.axis) if axes else joined.axis
        size, remainder = divmod(shape[axis + stacked], len(joined.names))
        if remainder:
            raise WeightsError(
                f"joined_weights: axis {joined.axis} of '{slot.name}' with shape {shape} cannot be "
                f"divided into {len(joined.names)} equal parts ({', '.join(joined.names)})"
            )
        parts = []
        for number in range(shape[0] if stacked else 1):
            lead = (number,) if stacked else ()
            for position, stored in enumerate(joined.names):
                columns = slice(position * size, (position + 1) * size)
                torch_name = pattern.sub(stored.replace("{}", str(number)), slot.name)
                part = (*lead, *[slice(None)] * axis, columns)
                parts.append(dataclasses.replace(slot, name=torch_name, axes=axes, part=part))
        return parts

    def torch_name(self, path: ParamPath) -> str:
        """Returns the PyTorch name of the parameter at ``path``."""
        name = ".".join(path)
        for pattern, replacement in self._templates:
            name = pattern.sub(replacement, name, count=1)
        head, _, leaf = name.rpartition(".")
        return (
            f"{head}.{TORCH_LEAF_NAMES.get(leaf, leaf)}"
            if head
            else TORCH_LEAF_NAMES.get(leaf, leaf)
        )

    def module_name(self, name: str) -> str:
        """Converts a PyTorch name in files to the name in memory, which adapters use."""
        for pattern, replacement in self._modules:
            name = pattern.sub(replacement, name, count=1)
        return name

    def resolve_name(self, name: str) -> str:
        """Returns the name that this map uses for a PyTorch name.

        The given name may have an alternative spelling, and need not have the base model's prefix.
        """
        name = self.apply_synonyms(name)
        return next(
            (candidate for candidate in self._with_prefix(name) if candidate in self._torch_names),
            name,
        )

    def is_alias(self, name: str) -> bool:
        """Returns whether a name in a checkpoint belongs to a tied copy of a parameter."""
        return any(n in self.aliases for n in self._with_prefix(self.apply_synonyms(name)))

    def tied_name(self, name: str) -> str:
        """Returns the PyTorch name of the parameter that a name or alias belongs to."""
        forms = self._with_prefix(self.apply_synonyms(name))
        alias = next((n for n in forms if n in self.aliases), None)
        return self.resolve_name(name) if alias is None else self.aliases[alias]

    def expand_ties(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds an entry for each parameter that the checkpoint only stores under a fallback name.

        In a checkpoint with tied tensors, this is the name of the tensor that the parameter is tied
        to. A model that does not tie the two tensors needs both entries.
        """
        names = {self.resolve_name(name) for name in tensors}
        absent = [name for name in self.fallbacks if name in self._torch_names - names]
        found = {}
        for name in absent:
            forms = (form for other in self.fallbacks[name] for form in self._with_prefix(other))
            if (form := next((form for form in forms if form in tensors), None)) is not None:
                found[name] = tensors[form]
        return {**tensors, **found}

    def has_parameter(self, name: str) -> bool:
        """Returns whether a PyTorch name belongs to a parameter itself, not to an alias of one."""
        return self.resolve_name(name) in self._torch_names

    def apply_synonyms(self, name: str, native: bool = False) -> str:
        """Replaces old spellings in a name of the checkpoint by the spellings that hfseq writes."""
        for pattern, replacement in self._native_synonyms if native else self._synonyms:
            name = pattern.sub(replacement, name, count=1)
        return name

    def _dtypes(self, path: ParamPath) -> tuple[str, ...]:
        """Returns the dtypes of tensors that can be read into a variable."""
        return ("int32", "int64") if path in self._integers else FLOAT_DTYPES

    def match(
        self, tensors: Mapping[str, Tensor], *, native: bool = False, compare: bool = True
    ) -> tuple[dict[Slot, Tensor], LoadReport]:
        """Matches the tensors of a checkpoint with the parameters.

        Args:
            tensors: The tensors of the checkpoint by name.
            native: Whether the names are Flax paths (``flax_model.msgpack``, ``format: flax``).
            compare: Whether to read and compare tensors that belong to the same parameter.

        Returns:
            The tensor of each slot, and a report of the differences.
        """
        cleaned: dict[str, tuple[str, Tensor]] = {}
        report = LoadReport()
        old_names = [
            pair
            for pair in _OLD_NAMES
            if not any(name.endswith(pair[0]) for name in self._torch_names)
        ]
        for name, tensor in tensors.items():
            old = next((pair for pair in old_names if name.endswith(pair[0])), ("", ""))
            renamed = name.removesuffix(old[0]) + old[1]
            renamed = _COLLECTIONS.sub("", renamed) if native else renamed
            renamed = self.apply_synonyms(renamed, native)
            if compare and renamed in cleaned and not self._is_ignored(renamed):
                if not same_values(cleaned[renamed][1], tensor):
                    report.conflicts.append((name, cleaned[renamed][0]))
            cleaned[renamed] = name, tensor
        matched, used = {}, set()
        absent = []
        joined_names = {} if native else self._joined_in(cleaned)
        for slot in self.slots:
            keys = self._find(slot, cleaned, native)
            if (key := joined_names.get(slot)) is not None:
                original, tensor = cleaned[key]
                used.add(key)
                if keys:
                    used.add(keys[0])
                    report.mixed_layouts.append((original, cleaned[keys[0]][0]))
                shape = self.layer_shape(slot)
                if tensor.shape != shape:
                    if (mismatch := (original, tensor.shape, shape)) not in report.mismatched:
                        report.mismatched.append(mismatch)
                    report.missing.append(slot.path)
                    report.reinitialized.add(slot.path)
                    continue
                if tensor.dtype not in self._dtypes(slot.path):
                    report.unsupported_dtypes[original] = tensor.dtype
                report.dtypes[tensor.dtype] = report.dtypes.get(tensor.dtype, 0) + 1
                matched[slot] = _part_of(tensor, slot.part)
                continue
            if not keys:
                report.missing.append(slot.path)
                if slot.part and not native:
                    report.incomplete.append(slot.name)
                absent.append(slot)
                continue
            original, tensor = cleaned[keys[0]]
            used.add(keys[0])
            for key in keys[1:] if compare else ():
                if key not in used and not same_values(tensor, cleaned[key][1]):
                    pairs = report.unused_biases if key == slot.name else report.conflicts
                    pairs.append((original, cleaned[key][0]))
            expected, shape = self._expected(slot, native), tensor.shape
            if expected != shape:
                report.mismatched.append((original, shape, expected))
                report.missing.append(slot.path)
                report.reinitialized.add(slot.path)
                continue
            if tensor.dtype not in self._dtypes(slot.path):
                report.unsupported_dtypes[original] = tensor.dtype
            report.dtypes[tensor.dtype] = report.dtypes.get(tensor.dtype, 0) + 1
            matched[slot] = tensor
        report.missing = list(dict.fromkeys(report.missing))
        for name, (original, _) in cleaned.items():
            if name not in used and not self._is_copy(name):
                group = report.ignored if self._is_ignored(name) else report.unexpected
                group.append(original)
        for slot in absent:
            for name in report.unexpected:
                same_shape = tensors[name].shape == self._expected(slot, native)
                if same_shape and _respelled(slot.flax_name if native else slot.name, name):
                    report.suggestions.setdefault(slot.path, name)
        return matched, report

    def _joined_in(self, tensors: Mapping[str, Any]) -> dict[Slot, str]:
        """Returns the slots of joined parameters that a checkpoint stores as one tensor each.

        Args:
            tensors: The tensors of the checkpoint by name.

        Returns:
            Maps each of these slots to the name of the tensor that contains its values.
        """
        names_by_slot = {}
        for slot in self.slots:
            if slot.part and slot.axes is None:
                names = self._with_prefix(self.torch_name(slot.unstacked_path))
                if (name := next((n for n in names if n in tensors), None)) is not None:
                    names_by_slot[slot] = name
        return names_by_slot

    def layer_shape(self, slot: Slot) -> tuple[int, ...]:
        """Returns the shape of the parameter of a slot without the axis of stacked layers."""
        return self.shapes[slot.path] if slot.layer is None else self.shapes[slot.path][1:]

    def torch_shape(self, slot: Slot) -> tuple[int, ...]:
        """Returns the shape of the PyTorch tensor of a slot."""
        return self._expected(slot, native=False)

    def _expected(self, slot: Slot, native: bool) -> tuple[int, ...]:
        shape = self.layer_shape(slot)
        if native:
            return shape
        return _in_torch(np.broadcast_to(0, shape)[slot.part].shape, slot.axes)

    def _find(self, slot: Slot, names: Mapping[str, Any], native: bool) -> list[str]:
        """Returns the names under which a file stores a slot's tensor.

        The tensor is read from the first name. The other names belong to copies of the tensor.
        """
        aliases = [alias for alias, name in self.aliases.items() if name == slot.name]
        # PyTorch uses the bias of the output projection (`decoder.bias`), not that of the head.
        biases = [alias for alias in aliases if alias.endswith(".bias")]
        names_of_slot = [*biases, slot.name, *aliases]
        fallbacks = list(self.fallbacks.get(slot.name, ()))
        if native:
            leaf = slot.path[-1]
            names_of_slot, fallbacks = (
                [f"{n.rpartition('.')[0]}.{leaf}" for n in group]
                for group in (names_of_slot, fallbacks)
            )
            names_of_slot.insert(0, slot.flax_name)
        own_names = (slot.name, slot.flax_name)
        slot_names = self._flax_names if native else self._torch_names
        for group in (names_of_slot, fallbacks):
            keys = [n for name in group for n in self._with_prefix(name) if n in names]
            if keys:
                copies = keys[1:] if group is names_of_slot else []
                copies = [key for key in copies if key in own_names or key not in slot_names]
                return list(dict.fromkeys([keys[0], *copies]))
        return []

    def _with_prefix(self, name: str) -> tuple[str, ...]:
        prefix = f"{self.prefix}."
        if not self.prefix:
            return (name,)
        return (name, name.removeprefix(prefix), prefix + name)

    def _is_ignored(self, name: str) -> bool:
        """Returns whether the model class ignores a name in checkpoints."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def _is_copy(self, name: str) -> bool:
        """Returns whether a name that is not read belongs to a copy of a tied tensor."""
        biases = (other for alias, other in self.aliases.items() if alias.endswith(".bias"))
        copies = (*self.aliases, *biases)
        return any(copy in self._with_prefix(name) for copy in copies)

    def saved_slots(self) -> dict[str, Slot]:
        """Returns the slot of each name in a saved file. Tied tensors are saved once."""
        slots = {slot.name: slot for slot in self.slots}
        return slots | {alias: slots[name] for alias, name in self._live.items() if name in slots}

    def sizes(self, itemsizes: Mapping[ParamPath, int]) -> dict[str, int]:
        """Returns the bytes of each saved tensor.

        Args:
            itemsizes: Bytes per value by parameter path.
        """
        return {
            name: itemsizes[slot.path] * math.prod(self.torch_shape(slot))
            for name, slot in self.saved_slots().items()
        }

    def unstack(
        self, params: Mapping[ParamPath, jax.Array | np.ndarray]
    ) -> dict[ParamPath, np.ndarray]:
        """Returns the parameters as NumPy arrays by unstacked path, as in Transformers 4."""
        return {
            slot.unstacked_path: np.asarray(
                params[slot.path] if slot.layer is None else params[slot.path][slot.layer]
            )
            for slot in self.slots
        }

    def to_torch(
        self, params: Mapping[ParamPath, jax.Array | np.ndarray], names: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Converts parameters to contiguous NumPy tensors by PyTorch name.

        Args:
            params: The parameters by path.
            names: The PyTorch names to convert. Default: all.
        """
        slots, tensors = self.saved_slots(), {}
        for name in slots if names is None else names:
            slot = slots[name]
            leaf = params[slot.path] if slot.layer is None else params[slot.path][slot.layer]
            array = np.asarray(leaf[slot.part] if slot.part else leaf)
            if slot.axes:
                array = array.transpose(np.argsort(slot.axes))
            tensors[name] = np.asarray(array, order="C")
        return tensors

    def read_param(
        self,
        tensors: Mapping[Slot, Tensor],
        path: ParamPath,
        index: Index = ...,
        *,
        native: bool = False,
    ) -> np.ndarray:
        """Reads a parameter, or a part of it.

        Args:
            tensors: The tensor of each slot, from `match`.
            path: Path of the parameter.
            index: The part to read.
            native: Whether the checkpoint has Flax names, and thus no permuted axes.
        """
        slots = [slot for slot in self.slots if slot.path == path]
        layers = [list(parts) for _, parts in itertools.groupby(slots, lambda slot: slot.layer)]
        if slots[0].layer is None:
            return self._read_parts(slots, tensors, index, native)
        if isinstance(index, EllipsisType):
            index = (slice(None),)
        lead, layer_index = index[0], index[1:] or ...
        return np.stack(
            [self._read_parts(parts, tensors, layer_index, native) for parts in layers[lead]]
        )

    def _read_parts(
        self, slots: Sequence[Slot], tensors: Mapping[Slot, Tensor], index: Index, native: bool
    ) -> np.ndarray:
        """Reads a parameter of one layer.

        For a joined parameter, only the parts that `index` selects are read from its tensors.
        """
        if native or not slots[0].part:
            return _read(slots[0], tensors[slots[0]], index, native)
        shape = self._expected(slots[0], native=True)
        slices = () if isinstance(index, EllipsisType) else index
        padded = (*slices, *[slice(None)] * (len(shape) - len(slices)))
        bounds = [range(size)[span] for size, span in zip(shape, padded, strict=True)]
        values = []
        for slot in slots:
            source, target = [], []
            for axis, bound in enumerate(bounds):
                part = slot.part[axis] if axis < len(slot.part) else slice(None)
                span = range(part, part + 1) if isinstance(part, int) else range(shape[axis])[part]
                start, stop = max(span.start, bound.start), min(span.stop, bound.stop)
                target.append(slice(start - bound.start, stop - bound.start))
                if not isinstance(part, int):
                    source.append(slice(start - span.start, stop - span.start))
                if start >= stop:
                    break
            else:
                array = _read(slot, tensors[slot], tuple(source), native)
                values.append((tuple(target), array[None] if array.ndim < len(shape) else array))
        dtypes = {array.dtype for _, array in values}
        joined = np.empty([len(bound) for bound in bounds], np.result_type(*dtypes))
        for spans, array in values:
            joined[spans] = array
        return joined


def _part_of(tensor: Tensor, part: tuple[int | slice, ...]) -> Tensor:
    """Returns a part of a tensor, which is read on demand.

    Args:
        tensor: The tensor.
        part: The index of the part. Axes with an integer are removed.
    """
    padded = (*part, *[slice(None)] * (len(tensor.shape) - len(part)))
    spans = [
        entry if isinstance(entry, int) else range(size)[entry]
        for entry, size in zip(padded, tensor.shape, strict=True)
    ]
    shape = tuple(len(span) for span in spans if not isinstance(span, int))

    def read(index: Index) -> np.ndarray:
        slices = iter(() if isinstance(index, EllipsisType) else index)
        region = []
        for span in spans:
            if isinstance(span, int):
                region.append(slice(span, span + 1))
            else:
                selected = span[next(slices, slice(None))]
                region.append(slice(selected.start, selected.stop))
        array = tensor.read(tuple(region))
        sizes = [n for n, s in zip(array.shape, spans, strict=True) if not isinstance(s, int)]
        return array.reshape(sizes)

    return Tensor(shape, tensor.dtype, read)


def _read(slot: Slot, tensor: Tensor, index: Index, native: bool) -> np.ndarray:
    if native or not slot.axes:
        return tensor.read(index)
    torch_index = index if isinstance(index, EllipsisType) else _in_torch(index, slot.axes)
    return tensor.read(torch_index).transpose(slot.axes)


def same_values(first: Tensor, second: Tensor, rows: int = 1024) -> bool:
    """Returns whether two tensors are equal.

    Reads ``rows`` entries of the first axis at a time, and stops at the first difference.
    """
    if first.shape != second.shape:
        return False
    if not first.shape:
        return bool(np.array_equal(first.read(...), second.read(...), equal_nan=True))
    for start in range(0, first.shape[0], rows):
        stop = min(start + rows, first.shape[0])
        part = (slice(start, stop), *(slice(None) for _ in first.shape[1:]))
        one, other = (np.asarray(tensor.read(part), np.float32) for tensor in (first, second))
        if not np.array_equal(one, other, equal_nan=True):
            return False
    return True


def different_copies(
    aliases: Mapping[str, str], tensors: Mapping[str, Tensor], prefix: str
) -> dict[str, str]:
    """Returns the aliases of tied tensors whose values in a file differ from the tied tensor.

    Like PyTorch, this compares each alias with the tensor that it is tied to or, if the file lacks
    that tensor, with its first alias in the file.

    Args:
        aliases: Maps alternative PyTorch names of tied tensors to the name that hfseq uses.
        tensors: The tensors of the file by PyTorch name, or by Flax path.
        prefix: Prefix of the base model, which names in files may lack.

    Returns:
        Maps each of these aliases to the name of the tensor that it was compared with.
    """

    def find(name: str, leaf: str) -> str | None:
        flax = f"{name.removesuffix('weight')}{leaf}"
        bare = [n.removeprefix(f"{prefix}.") for n in (name, flax)]
        return next((n for n in (name, flax, *bare) if n in tensors), None)

    references = {name: find(name, "embedding") for name in aliases.values()}
    different = {}
    for alias, name in aliases.items():
        found, reference = find(alias, "kernel"), references[name]
        if found is None:
            continue
        if reference is None:
            references[name] = found
            continue
        copy = tensors[found]
        if found.endswith(".kernel") and reference.endswith(".embedding"):
            copy = _transposed(copy)
        if not same_values(copy, tensors[reference]):
            different[alias] = reference
    return different


def _transposed(tensor: Tensor) -> Tensor:
    def read(index: Index) -> np.ndarray:
        return tensor.read(index[::-1] if isinstance(index, tuple) else index).T

    return Tensor(tensor.shape[::-1], tensor.dtype, read)


def torch_axes(path: ParamPath, ndim: int) -> tuple[int, ...] | None:
    """Returns the permutation that transposes a PyTorch tensor to a parameter, or `None`.

    The kernel of a linear layer has the shape `(in, out)`, and that of a convolution
    `(*kernel_size, in, out)`. The PyTorch tensors have the shapes `(out, in)` and
    `(out, in, *kernel_size)`. Other parameters are not transposed.
    """
    return (*range(2, ndim), 1, 0) if path[-1] == "kernel" and ndim >= 2 else None


def _in_torch(entries: tuple[Entry, ...], axes: tuple[int, ...] | None) -> tuple[Entry, ...]:
    """Reorders a tuple with one entry per parameter axis to the order of the PyTorch axes."""
    return tuple(entries[axis] for axis in np.argsort(axes)) if axes else entries


def _template(pattern_name: str, replacement_name: str) -> tuple[re.Pattern[str], str]:
    """Returns a regular expression for names that contain a template, and its replacement."""
    pattern = re.escape(pattern_name).replace(r"\{\}", r"([^.]+)")
    first, *parts = replacement_name.split("{}")
    replacement = first + "".join(rf"\{n}{part}" for n, part in enumerate(parts, 1))
    return re.compile(rf"(?<![^.]){pattern}(?![^.])"), replacement


def check_report(
    report: LoadReport, source: str, class_name: str, *, ignore_mismatched: bool
) -> None:
    """Raises an error that lists the tensors of a checkpoint that the model cannot use.

    Args:
        report: The report of `WeightMap.match`.
        source: The weight file, for the message.
        class_name: The model class, for the message.
        ignore_mismatched: Whether tensors with a different shape are allowed.

    Raises:
        WeightsError: Tensors have conflicting values, an unsupported dtype or a different shape,
            or parts of joined parameters are missing.
    """
    if report.conflicts:
        raise WeightsError(
            f"{source} contains different values for the same parameter of {class_name}:\n"
            + "\n".join(f"  {name} and {other}" for name, other in report.conflicts)
            + "\nRemove the wrong tensor of each pair"
        )
    if report.mixed_layouts:
        pairs = [f"  {name} and {other}" for name, other in report.mixed_layouts[:3]]
        raise WeightsError(
            f"{source} contains both layouts of the same parameter of {class_name}: the parameter "
            "as one tensor, and a separate tensor for a part of it:\n"
            + "\n".join(pairs)
            + f"\nRemove one tensor of each of the {len(report.mixed_layouts)} pairs"
        )
    if report.unsupported_dtypes:
        unsupported = ", ".join(
            f"{name} ({dtype})" for name, dtype in report.unsupported_dtypes.items()
        )
        raise WeightsError(
            f"{source} contains tensors with dtypes that hfseq does not support: {unsupported} "
            f"(supported: {', '.join(FLOAT_DTYPES)}). Convert or dequantize the checkpoint first"
        )
    if report.incomplete and not report.mismatched:
        raise WeightsError(
            f"{source} lacks {len(report.incomplete)} tensors of {class_name} that are parts of "
            f"larger parameters, such as {', '.join(report.incomplete[:3])}. Download or convert "
            "the checkpoint again"
        )
    if not report.mismatched or ignore_mismatched:
        return
    lines = [
        f"  {name}: {shape} in the file, {expected} in the model"
        for name, shape, expected in report.mismatched
    ]
    raise WeightsError(
        f"{source} does not fit {class_name}: {len(lines)} tensors differ in shape\n"
        + "\n".join(lines)
        + "\nUse the configuration of these weights, or ignore_mismatched_sizes=True to initialize "
        "these tensors newly"
    )


def different_derived(
    derived: Mapping[str, DerivedTensor], tensors: Mapping[str, Tensor], prefix: str
) -> dict[str, str | None]:
    """Returns the derived tensors whose values in a checkpoint differ from the expected values.

    Args:
        derived: The derived tensors by PyTorch name.
        tensors: The tensors of the checkpoint by name.
        prefix: The prefix of the base model.

    Returns:
        The remedy of each such tensor, by name. Tensors that do not affect PyTorch's outputs are
        omitted.
    """
    by_name = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}
    different = {}
    for name, entry in derived.items():
        tensor = by_name.get(name.removeprefix(f"{prefix}."))
        if tensor is not None and not entry.unused and not entry.fits(tensor, by_name, prefix):
            different[name] = entry.remedy
    return different


def check_derived(report: LoadReport, source: str) -> None:
    """Raises an error if derived tensors in a checkpoint have unexpected values.

    Args:
        report: The report of `FlaxPreTrainedModel.match_tensors`.
        source: The weight file, for the message.

    Raises:
        WeightsError: The report contains such a tensor, and its `DerivedTensor` has a remedy. The
            message lists all of these tensors with their remedies.
    """
    by_remedy: dict[str, list[str]] = {}
    for name, remedy in report.derived.items():
        if remedy is not None:
            by_remedy.setdefault(remedy, []).append(name)
    if by_remedy:
        lines = [
            f"  {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}: "
            f"{remedy}"
            for remedy, names in by_remedy.items()
        ]
        raise WeightsError(
            f"{source} contains values that the options in its config.json do not allow, probably "
            "because it was trained with another library\n" + "\n".join(lines)
        )


def describe_missing(report: LoadReport, names: Mapping[ParamPath, str] | None = None) -> str:
    """Lists the missing parameters, one per line, with suggestions of similar names.

    Args:
        report: The report of `WeightMap.match`.
        names: Names of parameters in the checkpoint, by path. Default: the paths.
    """
    suggestions = {p: f"; did you mean '{name}'?" for p, name in report.suggestions.items()}
    return "\n".join(
        f"  {(names or {}).get(path, '.'.join(path))}{suggestions.get(path, '')}"
        for path in report.missing
        if path not in report.reinitialized
    )


def _respelled(name: str, other: str) -> bool:
    """Returns whether two names only differ in a prefix, or in the spelling of one component.

    Different components count as two spellings if they are sufficiently similar. The thresholds
    distinguish spellings from the names of different heads, such as those of ELECTRA's generator
    and discriminator.
    """
    parts, other_parts = name.split("."), other.split(".")
    if len(parts) != len(other_parts):
        return name.endswith(f".{other}") or other.endswith(f".{name}")
    changed = [pair for pair in zip(parts, other_parts, strict=True) if pair[0] != pair[1]]
    if len(changed) != 1:
        return False
    spelling, other_spelling = (part.lower().replace("_", "") for part in changed[0])
    similarity = difflib.SequenceMatcher(None, spelling, other_spelling).ratio()
    # If only the last components differ, both are in the same module, so less similarity suffices.
    return similarity >= (0.6 if parts[:-1] == other_parts[:-1] else 0.87)
