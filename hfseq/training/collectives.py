"""The report of `--inspect_sharding`: how arrays are sharded, and which collectives a step runs.

Collectives are operations with which devices communicate, such as all-gather. They are parsed from
the HLO text of the compiled step. For each of them, the report shows over which mesh axes it runs.
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
# HLO has three notations for the groups of devices of a collective:
# - {{0,1},{2,3}} lists them.
# - [2,2]<=[4]T(1,0) reshapes and transposes the list of all devices.
# - mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'} names the axes of a mesh along which the
#   devices of a group differ. device_ids gives the order of the devices in the mesh.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" ?\{([^}]*)\}"
)
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation in a compiled program.

    Attributes:
        op: The operation, one of `COLLECTIVE_OPS`.
        shapes: The shapes of the results on each device.
        size: The size of the results on each device, in bytes.
        axes: The mesh axes over which the operation runs.
        dimension: The dimension along which an all-gather concatenates, or `None`.
        source: The jax operation from which XLA created this operation.
        times: How often the operation runs per call of the program, including loop iterations.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    size: int
    axes: tuple[str, ...]
    dimension: int | None
    source: str
    times: int = 1


class Instruction(NamedTuple):
    """An instruction in HLO text.

    Attributes:
        computation: The name of the computation that contains the instruction.
        entry: Whether `computation` is the entry computation of the program.
        name: The name of the result.
        shape: The shape of the result, as HLO text.
        opcode: The operation.
        attributes: The text after the opening parenthesis, with the operands and the attributes.
    """

    computation: str
    entry: bool
    name: str
    shape: str
    opcode: str
    attributes: str

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The computations that the instruction calls, as pairs of role and name."""
        calls = _CALL.findall(self.attributes)
        return [(role, name) for role, names in calls for name in re.findall(r"[\w.\-]+", names)]

    @property
    def op_name(self) -> str:
        """The jax operation that XLA compiled to this instruction: `jit(step)/dot_general`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Returns the mesh axes along which the devices of a group differ."""
        varying_axes: set[str] = set()
        for group in self.groups(mesh.size):
            indices = np.stack(np.unravel_index(np.array(group), mesh.devices.shape))
            varies = (indices != indices[:, :1]).any(1)
            varying_axes |= {
                name
                for name, axis_varies in zip(mesh.axis_names, varies, strict=True)
                if axis_varies
            }
        return tuple(name for name in mesh.axis_names if name in varying_axes)

    def groups(self, num_devices: int) -> list[list[int]]:
        """Returns the groups of devices that communicate with each other.

        Args:
            num_devices: The number of devices of the program.
        """
        if match := _LISTED.search(self.attributes):
            return [list(_numbers(part)) for part in re.findall(r"\{([\d, ]+)\}", match[1])]
        device_ids = np.arange(num_devices)
        iota_match = _IOTA.search(self.attributes)
        if (match := iota_match or _NAMED.search(self.attributes)) is None:
            return [device_ids.tolist()]
        if match[2]:
            device_ids = device_ids.reshape(_numbers(match[2]))
        if match[3]:
            device_ids = device_ids.transpose(_numbers(match[3]))
        if iota_match:
            return device_ids.reshape(_numbers(match[1])).tolist()
        # In mesh['a'=8,'b'=2] {'a':(2)2}, axis a is split into three axes of sizes 2, 2 and 2. The
        # devices of a group differ along the second of them. (2) is the size of the axes before it,
        # and the number after the parentheses is its own size.
        parts = {
            name: (int(lead or 1), int(size or 0)) for name, lead, size in _PART.findall(match[4])
        }
        shape: list[int] = []
        group_axes = []
        for name, size in re.findall(r"'(\w+)'=(\d+)", match[1]):
            lead, part = parts.get(name, (1, 1))
            part = part or int(size)
            group_axes += [len(shape) + 1] if name in parts else []
            shape += [lead, part, int(size) // (lead * part)]
        device_ids = np.moveaxis(device_ids.reshape(shape), group_axes, range(-len(group_axes), 0))
        return device_ids.reshape(-1, math.prod(shape[axis] for axis in group_axes)).tolist()


def instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of a program in HLO text."""
    computation, entry = "", False
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, entry = header[2], bool(header[1])
        elif match := _INSTRUCTION.match(line):
            yield Instruction(computation, entry, *match.groups())


def array_shapes(shape: str) -> list[tuple[tuple[int, ...], int]]:
    """Returns the dimensions and the size in bytes of each array in an HLO shape."""
    return [
        ((dims := _numbers(sizes)), math.prod(dims) * int(bits or 8) // 8)
        for bits, sizes in _ARRAY.findall(shape)
    ]


def find_collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Returns the collectives in the HLO `text` of a program compiled for `mesh`."""
    program = list(instructions(text))
    callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for instruction in program:
        for role, name in instruction.calls:
            trips = _TRIPS.search(instruction.attributes) if role == "body" else None
            callers[name].append((instruction.computation, int(trips[1]) if trips else 1))

    @functools.cache
    def executions(name: str) -> int:  # loops of unknown length count as one iteration
        return sum(executions(caller) * trips for caller, trips in callers.get(name, [])) or 1

    found_collectives = []
    for instruction in program:
        op = instruction.opcode.removesuffix("-start")
        if op not in COLLECTIVE_OPS or not (axes := instruction.axes(mesh)):
            continue
        results = array_shapes(instruction.shape)
        # The result of an asynchronous start operation lists its operands before its results.
        if op != instruction.opcode and instruction.shape.startswith("("):
            results = results[len(results) // 2 :]
        dimension_match = re.search(r"dimensions=\{(\d+)\}", instruction.attributes)
        found_collectives.append(
            Collective(
                op,
                tuple(dims for dims, _ in results),
                sum(size for _, size in results),
                axes,
                int(dimension_match[1]) if dimension_match else None,
                instruction.op_name.removeprefix("jit(step)/"),
                executions(instruction.computation),
            )
        )
    return found_collectives


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def unexpected_all_gathers(
    collectives: Iterable[Collective], layout: Layout, model: FlaxPreTrainedModel
) -> list[Collective]:
    """Returns the all-gathers that neither the sharding rules nor the flags explain.

    All-gathers of these arrays are expected:

    - Weights that are sharded over the mesh axis `fsdp`.
    - Keys and values of attention, if sequences are sharded over the mesh axis `sequence`.
    - Hidden states along their length, if the model uses sequence parallelism.
    - The tokens of mixtures of experts over the mesh axis `expert`.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.abstract_params).items()}
    tensor_size = layout.mesh.shape["tensor"]
    # The shapes on each device, after the all-gather, of the weights that are sharded over fsdp.
    fsdp_shapes = set()
    for path, axes in layout.axes(shapes).items():
        if any("fsdp" in _axis_names(entry) for entry in axes):
            shape = layout.padded_shape(path, shapes[path])
            num_stack_axes = len(shape) - len(layout.layer_shape(path, shape))
            entries = (*(None,) * num_stack_axes, *axes, *(None,) * len(shape))
            local = [
                size // tensor_size if "tensor" in _axis_names(entry) else size
                for size, entry in zip(shape, entries, strict=False)
            ]
            fsdp_shapes |= {_sorted_sizes(local), _sorted_sizes(local[num_stack_axes:])}
    weight_shapes = fsdp_shapes | {
        _sorted_sizes(layout.layer_shape(path, shape)) for path, shape in shapes.items()
    }
    sequence_axes = {"sequence", "tensor"} if model.sequence_parallel else {"sequence"}

    def is_expected(collective: Collective) -> bool:
        result_shapes = {_sorted_sizes(shape) for shape in collective.shapes}
        axes = set(collective.axes)
        if axes == {"fsdp"}:
            # When they are gathered, the kernels of experts have an additional axis that separates
            # gate and values.
            kernels = {shape for shape in collective.shapes if len(shape) == 4}
            others = {_sorted_sizes(shape) for shape in collective.shapes if shape not in kernels}
            sizes = {math.prod(shape) for shape in fsdp_shapes}
            return others <= fsdp_shapes and {math.prod(shape) for shape in kernels} <= sizes
        if axes == {"sequence"}:
            return True
        if axes == {"expert"}:
            return not result_shapes & weight_shapes
        return (
            axes <= sequence_axes
            and collective.dimension == 1
            and not result_shapes & weight_shapes
        )

    return [
        collective
        for collective in collectives
        if collective.op == "all-gather" and not is_expected(collective)
    ]


def _sorted_sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes above 1, sorted. Transposing a weight does not change the result."""
    return tuple(sorted(size for size in shape if size > 1))


def _axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


# -- tables


def print_report(run: Run, state: TrainState, batch: Batch) -> None:
    """Prints the sharding of parameters, optimizer state and batch, and the collectives of a step.

    This compiles the step once more. Only process 0 prints.
    """
    text = run.step_function().lower(state, run.frozen, batch).compile().as_text()
    collectives = find_collectives(text or "", run.mesh)
    unexpected = unexpected_all_gathers(collectives, run.layout, run.model)
    if jax.process_index() == 0:
        for line in (
            *describe_state(run.layout, state.params, state.opt_state),
            "Batch (micro-batches on the first axis):",
            *_table([(name, _shape(leaf), _split(leaf)) for name, leaf in sorted(batch.items())]),
            *describe_collectives(collectives, unexpected),
        ):
            print(line, flush=True)


def describe_state(layout: Layout, params: Tree, opt_state: optax.OptState) -> Iterator[str]:
    """Yields the lines of the report on parameters and optimizer state.

    There is one line per parameter, with its path, shape, sharding tactic (see
    `hfseq.nn.sharding`), mesh axes and bytes per device. Another line contains the total size of
    the optimizer state. Further lines list optimizer arrays that are replicated although a
    parameter of the same shape is sharded.
    """
    mesh = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    yield f"Parameters on the mesh {mesh} ({layout.mesh.size} devices):"
    rows = [("parameter", "shape", "tactic", "split over", "bytes per device")]
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

    def is_replicated(leaf: jax.Array) -> bool:
        return leaf.sharding.is_fully_replicated

    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if not is_replicated(leaf)}
    for path, leaf in leaves:
        if is_replicated(leaf) and leaf.shape in shapes:
            yield f"  replicated on every device: {jax.tree_util.keystr(path)} {_shape(leaf)}"


def describe_collectives(
    collectives: Sequence[Collective], unexpected: Sequence[Collective]
) -> Iterator[str]:
    """Yields the lines of the report on collectives.

    The lines are a table of all collectives by operation, largest first, followed by a list of
    unexpected all-gathers.
    """
    yield f"Collectives of a training step, as compiled for {jax.default_backend()}:"
    groups: dict[tuple[str, ...], list[Collective]] = collections.defaultdict(list)
    for collective in collectives:
        source = "/".join(collective.source.rsplit("/", 2)[-2:])
        groups[(collective.op, "x".join(collective.axes), source)].append(collective)

    def size(group: Iterable[Collective]) -> int:
        return sum(collective.size * collective.times for collective in group)

    rows = [("operation", "over", "count", "bytes per device", "from")]
    for (op, axes, source), group in sorted(
        groups.items(), key=lambda item: (COLLECTIVE_OPS.index(item[0][0]), -size(item[1]))
    ):
        count = sum(collective.times for collective in group)
        rows.append((op, axes, str(count), f"{size(group):,}", source))
    yield from _table(rows) if collectives else ["  none"]
    yield f"Unexpected all-gathers: {len(unexpected) or 'none'}"
    for collective in sorted(
        unexpected, key=lambda collective: -collective.size * collective.times
    ):
        shapes = ", ".join(str(list(shape)) for shape in collective.shapes)
        amount = f"{collective.size:,} bytes x {collective.times}"
        yield f"  {shapes} over {'x'.join(collective.axes)}, {amount}: {collective.source}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _total(title: str, leaves: Sequence[Any]) -> str:
    total_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    device_bytes = sum(map(_local, leaves))
    return (
        f"{title}: {total_bytes:,} bytes, {device_bytes:,} per device "
        f"(split {total_bytes / max(device_bytes, 1):.2f} ways)"
    )


def _local(leaf: jax.Array) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _shape(leaf: jax.Array) -> str:
    return "x".join(map(str, leaf.shape)) or "scalar"


def _split(leaf: Any) -> str:
    """Returns the mesh axes that split each dimension. `-` marks dimensions that are not split."""
    sizes, spec = leaf.sharding.mesh.shape, leaf.sharding.spec
    parts = [
        "+".join(name for name in _axis_names(entry) if sizes[name] > 1) or "-" for entry in spec
    ]
    return "replicated" if set(parts) <= {"-"} else ", ".join(parts)
