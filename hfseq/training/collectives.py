"""``--inspect_sharding``: what lies where, and what a compiled step sends between devices.

The second is read from the step's HLO: instructions, of these the collectives, each with the axes
of the mesh that it runs over.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from hfseq.nn import trees
from hfseq.nn.sharding import Layout

if TYPE_CHECKING:
    import optax

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.training.setup import Run
    from hfseq.training.state import Batch, TrainState, Tree

COLLECTIVE_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_CALL = re.compile(r"(body|condition|to_apply|calls|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
# Groups of devices: {{0,1},{2,3}}, or [2,2]<=[4]T(1,0), or
# mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}: named axes over devices in some order.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" ?\{([^}]*)\}"
)
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation: what it leaves on each device, the mesh axes it runs over, where it is from.

    ``arrays`` are the shapes of the results, ``size`` their bytes; ``dimension`` is the one that an
    all-gather puts together; ``times`` counts the turns of the loops that it is in.
    """

    kind: str
    arrays: tuple[tuple[int, ...], ...]
    size: int
    axes: tuple[str, ...]
    dimension: int | None
    source: str
    times: int = 1


class Instruction(NamedTuple):
    """A line of a computation: ``shape`` is its result as written, ``rest`` what follows ``(``."""

    computation: str
    entry: bool
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The computations that it runs, each with its role."""
        calls = _CALL.findall(self.rest)
        return [(role, name) for role, names in calls for name in re.findall(r"[\w.\-]+", names)]

    @property
    def op_name(self) -> str:
        """Where it comes from, in jax's terms (``jit(step)/jvp()/dot_general``)."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of the mesh along which the members of a group differ."""
        different: set[str] = set()
        for group in self.groups(mesh.size):
            indices = np.stack(np.unravel_index(np.array(group), mesh.devices.shape))
            moving = (indices != indices[:, :1]).any(1)
            different |= {
                name for name, moves in zip(mesh.axis_names, moving, strict=True) if moves
            }
        return tuple(name for name in mesh.axis_names if name in different)

    def groups(self, devices: int) -> list[list[int]]:
        """Return the groups of devices, read from any of the forms in which XLA writes them."""
        if match := _LISTED.search(self.rest):
            return [list(_numbers(part)) for part in re.findall(r"\{([\d, ]+)\}", match[1])]
        order = np.arange(devices)
        listed = _IOTA.search(self.rest)
        if (match := listed or _NAMED.search(self.rest)) is None:
            return [order.tolist()]
        if match[2]:
            order = order.reshape(_numbers(match[2]))
        if match[3]:
            order = order.transpose(_numbers(match[3]))
        if listed:
            return order.reshape(_numbers(match[1])).tolist()
        # mesh['a'=4,'b'=2] {'b'}: ``'a':(2)2`` is the part of an axis behind the first 2.
        parts = {
            name: (int(lead or 1), int(size or 0)) for name, lead, size in _PART.findall(match[4])
        }
        shape: list[int] = []
        chosen = []
        for name, size in re.findall(r"'(\w+)'=(\d+)", match[1]):
            lead, part = parts.get(name, (1, 1))
            part = part or int(size)
            chosen += [len(shape) + 1] if name in parts else []
            shape += [lead, part, int(size) // (lead * part)]
        order = np.moveaxis(order.reshape(shape), chosen, range(-len(chosen), 0))
        return order.reshape(-1, math.prod(shape[axis] for axis in chosen)).tolist()


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a program, each with the computation that it is in."""
    computation, entry = "", False
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, entry = header[2], bool(header[1])
        elif match := _INSTRUCTION.match(line):
            yield Instruction(computation, entry, *match.groups())


def array_shapes(shape: str) -> list[tuple[tuple[int, ...], int]]:
    """Return dimensions and bytes of each array in a shape as HLO writes it."""
    return [
        ((dims := _numbers(sizes)), math.prod(dims) * int(bits or 8) // 8)
        for bits, sizes in _ARRAY.findall(shape)
    ]


def find_collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Return the collectives in the HLO ``text`` of a program that was compiled for ``mesh``."""
    program = list(instructions(text))
    callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for one in program:
        for role, name in one.calls:
            trips = _TRIPS.search(one.rest) if role == "body" else None
            callers[name].append((one.computation, int(trips[1]) if trips else 1))

    @functools.cache
    def turns(name: str) -> int:  # as far as the text says it
        return sum(turns(caller) * trips for caller, trips in callers.get(name, [])) or 1

    exchanged = []
    for one in program:
        kind = one.opcode.removesuffix("-start")
        if kind not in COLLECTIVE_OPS or not (axes := one.axes(mesh)):
            continue
        left = array_shapes(one.shape)
        if kind != one.opcode and one.shape.startswith("("):  # a started one lists its operands too
            left = left[len(left) // 2 :]
        gathered = re.search(r"dimensions=\{(\d+)\}", one.rest)
        exchanged.append(
            Collective(
                kind,
                tuple(dims for dims, _ in left),
                sum(size for _, size in left),
                axes,
                int(gathered[1]) if gathered else None,
                one.op_name.removeprefix("jit(step)/"),
                turns(one.computation),
            )
        )
    return exchanged


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def unexpected_all_gathers(
    exchanged: Iterable[Collective], layout: Layout, model: FlaxPreTrainedModel
) -> list[Collective]:
    """Return the all-gathers that neither a rule nor a flag asked for.

    Asked for are the weights that ``fsdp`` keeps in parts, keys and values of rows that
    ``sequence`` cuts, and with sequence parallelism the hidden states, along their length.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.abstract_params).items()}
    ways = layout.mesh.shape["tensor"]
    split = set()  # what a device has of each weight that fsdp splits, once it is put together
    for path, axes in layout.axes(shapes).items():
        if any("fsdp" in _names(entry) for entry in axes):
            shape = layout.padded_shape(path, shapes[path])
            lead = len(shape) - len(layout.layer_shape(path, shape))
            entries = (*(None,) * lead, *axes, *(None,) * len(shape))
            local = [
                size // ways if "tensor" in _names(entry) else size
                for size, entry in zip(shape, entries, strict=False)
            ]
            split |= {_plain(local), _plain(local[lead:])}
    weights = split | {_plain(layout.layer_shape(path, shape)) for path, shape in shapes.items()}
    lengthwise = {"sequence", "tensor"} if model.sequence_parallel else {"sequence"}

    def is_asked(one: Collective) -> bool:
        arrays, axes = {_plain(shape) for shape in one.arrays}, set(one.axes)
        if axes == {"fsdp"}:
            return arrays <= split
        if axes == {"sequence"}:
            return True
        return axes <= lengthwise and one.dimension == 1 and not arrays & weights

    return [one for one in exchanged if one.kind == "all-gather" and not is_asked(one)]


def _plain(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes in order: a weight may be transposed, or have an axis of one, before it is gathered."""
    return tuple(sorted(size for size in shape if size > 1))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


# -- tables


def print_report(run: Run, state: TrainState, batch: Batch) -> None:
    """Print where parameters, optimizer state and the batch lie, and the collectives of a step.

    The step is compiled once more for it. Process 0 prints.
    """
    text = run.step_function().lower(state, run.frozen, batch).compile().as_text()
    exchanged = find_collectives(text or "", run.mesh)
    unasked = unexpected_all_gathers(exchanged, run.layout, run.model)
    if jax.process_index() == 0:
        for line in (
            *describe_state(run.layout, state.params, state.opt_state),
            "Batch (micro-batches first):",
            *_table([(name, _shape(leaf), _split(leaf)) for name, leaf in sorted(batch.items())]),
            *describe_collectives(exchanged, unasked),
        ):
            print(line, flush=True)


def describe_state(layout: Layout, params: Tree, opt_state: optax.OptState) -> Iterator[str]:
    """Yield a line for each parameter: path, shape, tactic, axes, bytes on a device.

    Of the optimizer's state the sum, and what is whole though its parameter is split.
    """
    mesh = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    yield f"Parameters on the mesh {mesh} ({layout.mesh.size} devices):"
    rows = [("parameter", "shape", "tactic", "split over", "bytes a device")]
    for path, leaf in trees.flatten(params).items():
        tactic, local = str(layout.tactic(path)), f"{_local(leaf):,}"
        rows.append((trees.join(path), _shape(leaf), tactic, _split(leaf), local))
    yield from _table(rows)
    yield _total("All parameters", jax.tree.leaves(params))
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if hasattr(leaf, "sharding")
    ]
    if leaves:
        yield _total("Optimizer state", [leaf for _, leaf in leaves])

    def is_whole(leaf: jax.Array) -> bool:
        return leaf.sharding.is_fully_replicated

    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if not is_whole(leaf)}
    for path, leaf in leaves:
        if is_whole(leaf) and leaf.shape in shapes:
            yield f"  whole on every device: {jax.tree_util.keystr(path)} {_shape(leaf)}"


def describe_collectives(
    exchanged: Sequence[Collective], unasked: Sequence[Collective]
) -> Iterator[str]:
    """Yield a line for each kind of collective, largest first, and the verdict."""
    yield f"Collectives of a training step, as compiled for {jax.default_backend()}:"
    groups: dict[tuple[str, ...], list[Collective]] = collections.defaultdict(list)
    for one in exchanged:
        source = "/".join(one.source.rsplit("/", 2)[-2:])
        groups[(one.kind, "x".join(one.axes), source)].append(one)

    def size(group: Iterable[Collective]) -> int:
        return sum(one.size * one.times for one in group)

    rows = [("kind", "over", "count", "bytes a device", "from")]
    for (kind, axes, source), group in sorted(
        groups.items(), key=lambda item: (COLLECTIVE_OPS.index(item[0][0]), -size(item[1]))
    ):
        count = sum(one.times for one in group)
        rows.append((kind, axes, str(count), f"{size(group):,}", source))
    yield from _table(rows) if exchanged else ["  none"]
    yield f"All-gathers that no rule asked for: {len(unasked) or 'none'}"
    for one in sorted(unasked, key=lambda one: -one.size * one.times):
        shapes = ", ".join(str(list(shape)) for shape in one.arrays)
        amount = f"{one.size:,} bytes x {one.times}"
        yield f"  {shapes} over {'x'.join(one.axes)}, {amount}: {one.source}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _total(title: str, leaves: Sequence[Any]) -> str:
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    local = sum(map(_local, leaves))
    return f"{title}: {whole:,} bytes, {local:,} a device ({whole / max(local, 1):.2f} ways)"


def _local(leaf: jax.Array) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _shape(leaf: jax.Array) -> str:
    return "x".join(map(str, leaf.shape)) or "scalar"


def _split(leaf: Any) -> str:
    """Name the axes that really split each dimension; ``-`` is one that is whole."""
    sizes, spec = leaf.sharding.mesh.shape, leaf.sharding.spec
    parts = ["+".join(name for name in _names(entry) if sizes[name] > 1) or "-" for entry in spec]
    return "whole" if set(parts) <= {"-"} else ", ".join(parts)
