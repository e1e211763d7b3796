"""The two-way weight map between our parameter trees and PyTorch checkpoints.

Attribute names equal the checkpoint's, so the map is a rule, not a table: the last component
``kernel``, ``scale`` and ``embedding`` is ``weight`` in PyTorch, ``mean`` and ``var`` are
``running_mean`` and ``running_var``, and the axes of kernels lie in another order there
(:func:`torch_axes`). A family declares what differs: aliases (ties), ignored
names, symmetric templates, and synonyms that are only read. Layers that are stacked for scanning
map to one PyTorch tensor a layer.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hfseq.errors import WeightsError, did_you_mean

if TYPE_CHECKING:
    import jax

ParamPath = tuple[str, ...]
#: What is cut out of an array: slices, or ``...`` for all of it.
Index = tuple[slice, ...] | EllipsisType
Entry = TypeVar("Entry")
#: The last components of our names that are others in PyTorch.
TORCH_LEAF_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "mean": "running_mean",
    "var": "running_var",
}
# What version 4 wrote before the paths of models whose collections are beside their parameters.
_COLLECTIONS = re.compile(r"^(params|batch_stats)\.")
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
_OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its shape and type are known, its values are read by slices.

    ``read`` takes a tuple of slices (or ``...``) and returns a NumPy array of just that part.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Index], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a parameter (or one layer of a stacked one) lies in a PyTorch checkpoint.

    ``axes`` are those of PyTorch's tensor in the order of ours, or ``None`` where they are alike.
    """

    path: ParamPath
    name: str
    axes: tuple[int, ...] | None
    unstacked_path: ParamPath
    layer: int | None = None

    @property
    def flax_name(self) -> str:
        """The name in ``format: flax`` files: the dotted path, layers numbered."""
        return ".".join(self.unstacked_path)


@dataclasses.dataclass(frozen=True)
class DerivedTensor:
    """A tensor that PyTorch's class stores and ours computes, or has under another name.

    ``value`` is the array, or the PyTorch name of the tensor that this one repeats; ``remedy`` is
    what to do with a file that holds something else, because somebody trained it there. Without a
    remedy a file may hold anything.
    """

    value: np.ndarray | str
    remedy: str | None = None

    def fits(self, found: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> bool:
        """Whether ``found`` holds the value; half types may differ by their rounding."""
        if isinstance(self.value, str):
            other = tensors.get(self.value.removeprefix(f"{prefix}."))
            return other is None or np.array_equal(found.read(...), other.read(...))
        if found.shape != self.value.shape:
            return False
        given = np.asarray(found.read(...), np.float32)
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(found.dtype, 0.0)
        return bool(np.allclose(given, self.value, rtol=rounding, atol=1e-6))


@dataclasses.dataclass
class LoadReport:
    """What did not fit, all of it together."""

    missing: list[ParamPath] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = dataclasses.field(
        default_factory=list
    )
    reinitialized: set[ParamPath] = dataclasses.field(default_factory=set)
    unsupported_dtypes: dict[str, str] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, int] = dataclasses.field(default_factory=dict)


class WeightMap:
    """Names of a model's parameters in PyTorch checkpoints, in both directions.

    **Arguments:** ``shapes`` maps every path of the tree to its shape; ``prefix`` is the base
    model's name, which checkpoints may lack or have; ``aliases`` maps other PyTorch names to the
    one used; ``ignored`` are regular expressions of names without weights of ours; ``templates``
    are symmetric pairs such as ``"block.{}.norm": "layers.{}.ln"`` on dotted names, ours to theirs;
    ``synonyms`` are pairs such as ``"layers.{}": "encoder.layer.{}"``, which turn names that are
    read into those that are written, one after the other, and ``native_synonyms`` are those of
    Flax's own files; ``stacked`` maps the path prefix of
    scanned layers to the paths that they have one by one.
    """

    def __init__(
        self,
        shapes: Mapping[ParamPath, tuple[int, ...]],
        *,
        prefix: str = "",
        aliases: Mapping[str, str] | None = None,
        fallbacks: Mapping[str, str] | None = None,
        ignored: tuple[str, ...] = (),
        templates: Mapping[str, str] | None = None,
        synonyms: Mapping[str, str] | None = None,
        native_synonyms: Mapping[str, str] | None = None,
        stacked: Mapping[ParamPath, Sequence[ParamPath]] | None = None,
    ):
        self.shapes, self.prefix, self.ignored = dict(shapes), prefix, ignored
        self.fallbacks = dict(fallbacks or {})
        self._templates = [_template(*pair) for pair in (templates or {}).items()]
        self._synonyms = [_template(*pair) for pair in (synonyms or {}).items()]
        self._native_synonyms = [_template(*pair) for pair in (native_synonyms or {}).items()]
        self.slots = [slot for path in self.shapes for slot in self._slots(path, stacked or {})]
        names = {slot.name for slot in self.slots}
        self.aliases = {
            alias: name for alias, name in (aliases or {}).items() if alias not in names
        }
        # An untied head has a projection of its own, whose bias is then the one that PyTorch adds.
        self._live = {
            a: n for a, n in self.aliases.items() if f"{a.rpartition('.')[0]}.weight" in names
        }

    def _slots(
        self, path: ParamPath, stacked: Mapping[ParamPath, Sequence[ParamPath]]
    ) -> list[Slot]:
        for head, layers in stacked.items():
            if path[: len(head)] == head:
                # Not all layers: a variable of the first layer alone is stacked over one.
                paths = [(*p, *path[len(head) :]) for p in layers[: self.shapes[path][0]]]
                drawn = len(self.shapes[path]) - 1
                return [
                    Slot(path, self.torch_name(p), torch_axes(p, drawn), p, layer)
                    for layer, p in enumerate(paths)
                ]
        return [Slot(path, self.torch_name(path), torch_axes(path, len(self.shapes[path])), path)]

    def torch_name(self, path: ParamPath) -> str:
        """Return the PyTorch name of the parameter at ``path``."""
        name = ".".join(path)
        for pattern, replacement in self._templates:
            name, changed = pattern.subn(replacement, name, count=1)
            if changed:
                break
        head, _, leaf = name.rpartition(".")
        return (
            f"{head}.{TORCH_LEAF_NAMES.get(leaf, leaf)}"
            if head
            else TORCH_LEAF_NAMES.get(leaf, leaf)
        )

    def resolve_name(self, name: str) -> str:
        """Return the name that this map has for a PyTorch name: without or with the prefix."""
        name = self.apply_synonyms(name)
        known = {slot.name for slot in self.slots}
        return next((other for other in self._with_prefix(name) if other in known), name)

    def apply_synonyms(self, name: str, native: bool = False) -> str:
        """Return the name that is written of one that is read: its synonyms replaced."""
        for pattern, replacement in self._native_synonyms if native else self._synonyms:
            name = pattern.sub(replacement, name, count=1)
        return name

    def match(
        self, tensors: Mapping[str, Tensor], *, native: bool = False
    ) -> tuple[dict[Slot, Tensor], LoadReport]:
        """Pair every slot with the tensor of a checkpoint that fills it, and report the rest.

        ``native`` says that the names are ours already (``flax_model.msgpack``, ``format: flax``).
        """
        cleaned = {}
        for name, tensor in tensors.items():
            old = next((pair for pair in _OLD_NAMES if name.endswith(pair[0])), ("", ""))
            renamed = name.removesuffix(old[0]) + old[1]
            renamed = _COLLECTIONS.sub("", renamed) if native else renamed
            cleaned[self.apply_synonyms(renamed, native)] = name, tensor
        report, found, used = LoadReport(), {}, set()
        for slot in self.slots:
            key = self._find(slot, cleaned, native)
            if key is None:
                report.missing.append(slot.path)
                continue
            original, tensor = cleaned[key]
            used.add(key)
            expected, given = self._expected(slot, native), tensor.shape
            if expected != given:
                report.mismatched.append((original, given, expected))
                report.missing.append(slot.path)
                report.reinitialized.add(slot.path)
                continue
            if tensor.dtype not in FLOAT_DTYPES:
                report.unsupported_dtypes[original] = tensor.dtype
            report.dtypes[tensor.dtype] = report.dtypes.get(tensor.dtype, 0) + 1
            found[slot] = tensor
        report.missing = list(dict.fromkeys(report.missing))
        report.unexpected = [
            original
            for name, (original, _) in cleaned.items()
            if name not in used and not self._known(name, cleaned)
        ]
        return found, report

    def torch_shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of the tensor that fills ``slot``."""
        return self._expected(slot, native=False)

    def _expected(self, slot: Slot, native: bool) -> tuple[int, ...]:
        shape = self.shapes[slot.path] if slot.layer is None else self.shapes[slot.path][1:]
        return shape if native else _in_torch(shape, slot.axes)

    def _find(self, slot: Slot, names: Mapping[str, Any], native: bool) -> str | None:
        live = [alias for alias, name in self._live.items() if name == slot.name]
        aliases = [alias for alias, name in self.aliases.items() if name == slot.name]
        known = [*live, slot.name, *aliases, self.fallbacks.get(slot.name, slot.name)]
        if native:
            known = [slot.flax_name, *(f"{n.rpartition('.')[0]}.{slot.path[-1]}" for n in known)]
        return next((n for name in known for n in self._with_prefix(name) if n in names), None)

    def _with_prefix(self, name: str) -> tuple[str, ...]:
        prefix = f"{self.prefix}."
        if not self.prefix:
            return (name,)
        return (name, name.removeprefix(prefix), prefix + name)

    def _known(self, name: str, names: Mapping[str, Any]) -> bool:
        """Tell whether a left-over name is a tied copy of one that is there, or a buffer."""
        if any(re.search(pattern, name) for pattern in self.ignored):
            return True
        copies = (*self.aliases, *self._live.values())
        return any(copy in self._with_prefix(name) for copy in copies)

    def saved_slots(self) -> dict[str, Slot]:
        """Return every name in a saved file with the slot it comes from; ties are not repeated."""
        slots = {slot.name: slot for slot in self.slots}
        return slots | {alias: slots[name] for alias, name in self._live.items() if name in slots}

    def sizes(self, itemsizes: Mapping[ParamPath, int]) -> dict[str, int]:
        """Return the bytes of every outgoing tensor, given those of one number of each leaf."""
        return {
            name: itemsizes[slot.path] * math.prod(self._expected(slot, native=True))
            for name, slot in self.saved_slots().items()
        }

    def unstack(
        self, params: Mapping[ParamPath, jax.Array | np.ndarray]
    ) -> dict[ParamPath, np.ndarray]:
        """Return NumPy leaves under the paths of the v4 tree, with a key for each layer."""
        return {
            slot.unstacked_path: np.asarray(
                params[slot.path] if slot.layer is None else params[slot.path][slot.layer]
            )
            for slot in self.slots
        }

    def to_torch(
        self, params: Mapping[ParamPath, jax.Array | np.ndarray], names: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Return contiguous NumPy tensors under PyTorch names (all, or only ``names``)."""
        slots, tensors = self.saved_slots(), {}
        for name in slots if names is None else names:
            slot = slots[name]
            leaf = params[slot.path] if slot.layer is None else params[slot.path][slot.layer]
            array = np.asarray(leaf)
            if slot.axes:
                array = array.transpose(np.argsort(slot.axes))
            tensors[name] = np.asarray(array, order="C")
        return tensors

    def read_param(
        self,
        found: Mapping[Slot, Tensor],
        path: ParamPath,
        index: Index = ...,
        *,
        native: bool = False,
    ) -> np.ndarray:
        """Read the parameter at ``path``, or the part of it that ``index`` cuts out."""
        slots = [slot for slot in self.slots if slot.path == path]
        if slots[0].layer is None:
            return _read(slots[0], found[slots[0]], index, native)
        if isinstance(index, EllipsisType):
            index = (slice(None),)
        lead, rest = index[0], index[1:] or ...
        return np.stack([_read(slot, found[slot], rest, native) for slot in slots[lead]])


def _read(slot: Slot, tensor: Tensor, index: Index, native: bool) -> np.ndarray:
    if native or not slot.axes:
        return tensor.read(index)
    cut = index if isinstance(index, EllipsisType) else _in_torch(index, slot.axes)
    return tensor.read(cut).transpose(slot.axes)


def torch_axes(path: ParamPath, ndim: int) -> tuple[int, ...] | None:
    """Return the axes of PyTorch's tensor in the order of the parameter at ``path``.

    A kernel is (in, out) or (taps, ..., in, out), PyTorch's (out, in, taps, ...). ``None`` where
    the axes are alike.
    """
    return (*range(2, ndim), 1, 0) if path[-1] == "kernel" and ndim >= 2 else None


def _in_torch(entries: tuple[Entry, ...], axes: tuple[int, ...] | None) -> tuple[Entry, ...]:
    """Bring what is known of each of our axes into the order of PyTorch's."""
    return tuple(entries[at] for at in np.argsort(axes)) if axes else entries


def _template(given: str, wanted: str) -> tuple[re.Pattern[str], str]:
    """Return the pattern of names with ``given`` in them, and what replaces it."""
    pattern = re.escape(given).replace(r"\{\}", r"([^.]+)")
    first, *parts = wanted.split("{}")
    replacement = first + "".join(rf"\{n}{part}" for n, part in enumerate(parts, 1))
    return re.compile(rf"(?<![^.]){pattern}(?![^.])"), replacement


def check_report(
    report: LoadReport, source: str, class_name: str, *, ignore_mismatched: bool
) -> None:
    """Raise one error that lists every tensor whose type or shape does not fit."""
    if report.unsupported_dtypes:
        found = ", ".join(f"{name} ({dtype})" for name, dtype in report.unsupported_dtypes.items())
        raise WeightsError(
            f"{source} holds tensors of types that hfseq cannot load as parameters: {found} "
            f"(loadable: {', '.join(FLOAT_DTYPES)}). Convert or dequantise the checkpoint first"
        )
    if not report.mismatched or ignore_mismatched:
        return
    lines = [
        f"  {name}: {given} in the file, {expected} in the model"
        for name, given, expected in report.mismatched
    ]
    raise WeightsError(
        f"{source} does not fit {class_name}: {len(lines)} tensors differ in shape\n"
        + "\n".join(lines)
        + "\nUse the configuration that belongs to these weights, or ignore_mismatched_sizes=True "
        "to initialise these tensors anew"
    )


def check_derived(
    derived: Mapping[str, DerivedTensor], tensors: Mapping[str, Tensor], prefix: str, source: str
) -> None:
    """Raise one error that lists the tensors of a file that the model would not compute so."""
    bare = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}
    wrong: dict[str, list[str]] = {}
    for name, entry in derived.items():
        found = bare.get(name.removeprefix(f"{prefix}."))
        if entry.remedy and found is not None and not entry.fits(found, bare, prefix):
            wrong.setdefault(entry.remedy, []).append(name)
    if wrong:
        lines = [
            f"  {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}: {what}"
            for what, names in wrong.items()
        ]
        raise WeightsError(
            f"{source} was trained elsewhere: it holds values that the options in its config.json "
            "rule out\n" + "\n".join(lines)
        )


def describe_missing(report: LoadReport) -> str:
    """List parameters that the checkpoint lacks, each with the nearest name that it left over."""
    lines = []
    for path in report.missing:
        if path not in report.reinitialized:
            theirs = ".".join((*path[:-1], TORCH_LEAF_NAMES.get(path[-1], path[-1])))
            lines.append(f"  {'.'.join(path)}{did_you_mean(theirs, report.unexpected)}")
    return "\n".join(lines)
