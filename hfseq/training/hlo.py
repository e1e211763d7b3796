"""The collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*)?\{")
_CALL = re.compile(r"(body|condition|to_apply|calls|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
# mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}: named axes over devices in some order.
_NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" ?\{([^}]*)\}"
)
_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


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


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Return the collectives in the HLO ``text`` of a program that was compiled for ``mesh``."""
    places = list(_lines(text))
    turns = _turns(places)
    found = []
    for computation, line in places:
        if match := _OPERATION.search(line):
            arrays = _ARRAY.findall(match[1])
            if match[3] and match[1].startswith("("):  # a started one lists its operands, too
                arrays = arrays[len(arrays) // 2 :]
            shapes = tuple(tuple(map(int, filter(None, dims.split(",")))) for *_, dims in arrays)
            bits = (8 if kind == "pred" else int(width) for kind, width, _ in arrays)
            size = sum(b * math.prod(s) for b, s in zip(bits, shapes, strict=True)) // 8
            gathered = re.search(r"dimensions=\{(\d+)\}", line)
            found.append(
                Collective(
                    match[2], shapes, size, _axes(line, mesh),
                    int(gathered[1]) if gathered else None, _source(line), turns(computation),
                )
            )  # fmt: skip
    return [one for one in found if one.axes]


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Pair every line with the computation that it is in."""
    name = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[1]
        yield name, line


def _turns(places: list[tuple[str, str]]):
    """Return a function from a computation to how often it runs, as far as the text says it."""
    callers: dict[str, list[tuple[str, int]]] = {}
    for caller, line in places:
        for role, names in _CALL.findall(line):
            trips = _TRIPS.search(line) if role == "body" else None
            for name in re.findall(r"[\w.\-]+", names):
                callers.setdefault(name, []).append((caller, int(trips[1]) if trips else 1))

    @functools.cache
    def of(name: str) -> int:
        return sum(of(caller) * trips for caller, trips in callers.get(name, [])) or 1

    return of


def _source(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    return name[1].removeprefix("jit(step)/") if name else ""


# -- the devices that take part
# ---------------------------------------------------------------------------------------


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh along which the members of a group differ."""
    different: set[str] = set()
    for group in _groups(line, mesh.size):
        places = np.stack(np.unravel_index(np.array(group), mesh.devices.shape))
        moving = (places != places[:, :1]).any(1)
        different |= {name for name, moves in zip(mesh.axis_names, moving, strict=True) if moves}
    return tuple(name for name in mesh.axis_names if name in different)


def _groups(line: str, devices: int) -> list[list[int]]:
    """Read the groups of devices, in any of the forms in which XLA writes them."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}", line):
        return [
            [int(n) for n in part.split(",")] for part in re.findall(r"\{([\d, ]+)\}", match[1])
        ]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        ids = np.arange(devices).reshape(_numbers(match[2]))
        ids = ids.transpose(_numbers(match[3])) if match[3] else ids
        return ids.reshape(_numbers(match[1])).tolist()
    if match := _NAMED.search(line):
        order = np.arange(devices)
        if match[2]:
            order = order.reshape(_numbers(match[2]))
            order = order.transpose(_numbers(match[3])) if match[3] else order
        return order.reshape(-1)[_named_groups(match[1], match[4])].tolist()
    return [list(range(devices))]


def _named_groups(sizes: str, named: str) -> np.ndarray:
    """Read ``mesh['a'=4,'b'=2] {'b'}``; ``'a':(2)2`` is the part of an axis behind the first 2."""
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", sizes)}
    shape, chosen, place = [], [], 0
    parts = {n: (int(b or 1), int(s or 0)) for n, b, s in _PART.findall(named)}
    for name, size in axes.items():
        before, own = parts.get(name, (1, 1))
        own = own or size
        shape += [before, own, size // (before * own)]
        chosen += [place + 1] if name in parts else []
        place += 3
    ids = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), chosen, range(-len(chosen), 0))
    return ids.reshape(-1, math.prod(shape[axis] for axis in chosen))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
