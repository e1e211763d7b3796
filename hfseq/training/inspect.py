"""``--inspect_sharding``: what lies where, and what a compiled step sends between devices."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

from hfseq import trees
from hfseq.training.hlo import KINDS, Collective, collectives
from hfseq.training.sharding import Layout

if TYPE_CHECKING:
    from hfseq.training.loop import Loop


def report(loop: Loop, step: Any, batch: Any) -> None:
    """Print where parameters, optimizer state and the batch lie, and the collectives of ``step``.

    The step is compiled once more for it. Process 0 prints.
    """
    text = step.lower(loop.state, batch).compile().as_text()
    found = collectives(text, loop.mesh)
    unasked = unasked_gathers(found, loop.layout, loop.model)
    if jax.process_index() == 0:
        for line in (
            *describe_parameters(loop.layout, loop.state["params"]),
            *_describe_optimizer(loop.state["opt_state"], loop.state["params"]),
            *_describe_batch(batch),
            *describe_collectives(found, unasked),
        ):
            print(line, flush=True)


def unasked_gathers(found: Iterable[Collective], layout: Layout, model: Any) -> list[Collective]:
    """Return the all-gathers that neither a rule nor a flag asked for.

    Asked for are the weights that ``fsdp`` keeps in parts, keys and values of rows that
    ``sequence`` cuts, and with sequence parallelism the hidden states, along their length.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(model.params_shape_tree).items()}
    split = set(_weights(layout, shapes))
    weights = split | {_plain(layout.own_shape(path, shape)) for path, shape in shapes.items()}
    lengthwise = {"sequence", "tensor"} if model.sequence_parallel else {"sequence"}

    def is_asked(one: Collective) -> bool:
        arrays, axes = {_plain(shape) for shape in one.arrays}, set(one.axes)
        if axes == {"fsdp"}:
            return arrays <= split
        if axes == {"sequence"}:
            return True
        return axes <= lengthwise and one.dimension == 1 and not arrays & weights

    return [one for one in found if one.kind == "all-gather" and not is_asked(one)]


def _weights(
    layout: Layout, shapes: dict[trees.Path, tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Yield what a device has of each weight that ``fsdp`` splits, once it is put together."""
    ways = layout.mesh.shape["tensor"]
    for path, axes in layout.axes(shapes).items():
        if any("fsdp" in _names(entry) for entry in axes):
            shape = layout.padded(path, shapes[path])
            lead = len(shape) - len(layout.own_shape(path, shape))
            entries = (*(None,) * lead, *axes, *(None,) * len(shape))
            local = [
                size // ways if "tensor" in _names(entry) else size
                for size, entry in zip(shape, entries, strict=False)
            ]
            yield _plain(local)
            yield _plain(local[lead:])


def _plain(shape: Sequence[int]) -> tuple[int, ...]:
    """Sizes in order: a weight may be transposed, or have an axis of one, before it is gathered."""
    return tuple(sorted(size for size in shape if size > 1))


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


# -- tables
# ---------------------------------------------------------------------------------------


def describe_parameters(layout: Layout, params: Any) -> Iterator[str]:
    """Yield a line for each parameter: path, shape, tactic, axes, bytes on a device."""
    mesh = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    yield f"Parameters on the mesh {mesh} ({layout.mesh.size} devices):"
    rows = [("parameter", "shape", "tactic", "split over", "bytes a device")]
    for path, leaf in trees.flatten(params).items():
        split, local = _split(leaf), _local(leaf)
        rows.append((trees.join(path), _shape(leaf), str(layout.tactic(path)), split, f"{local:,}"))
    yield from _table(rows)
    yield _total("All parameters", jax.tree.leaves(params))


def _describe_optimizer(state: Any, params: Any) -> Iterator[str]:
    leaves = [leaf for leaf in jax.tree.leaves(state) if hasattr(leaf, "sharding")]
    if not leaves:
        return
    yield _total("Optimizer state", leaves)
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if not _is_whole(leaf)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if hasattr(leaf, "sharding") and _is_whole(leaf) and leaf.shape in shapes:
            yield f"  whole on every device: {jax.tree_util.keystr(path)} {_shape(leaf)}"


def _describe_batch(batch: Any) -> Iterator[str]:
    yield "Batch (micro-batches first):"
    rows = [(name, _shape(leaf), _split(leaf)) for name, leaf in sorted(batch.items())]
    yield from _table(rows)


def describe_collectives(
    found: Sequence[Collective], unasked: Sequence[Collective]
) -> Iterator[str]:
    """Yield a line for each kind of collective, largest first, and the verdict."""
    yield f"Collectives of a training step, as compiled for {jax.default_backend()}:"
    groups: dict[tuple[str, ...], list[Collective]] = collections.defaultdict(list)
    for one in found:
        source = "/".join(one.source.rsplit("/", 2)[-2:])
        groups[(one.kind, "x".join(one.axes), source)].append(one)
    rows = [("kind", "over", "count", "bytes a device", "from")]
    for (kind, axes, source), group in sorted(
        groups.items(), key=lambda item: (KINDS.index(item[0][0]), -_bytes(item[1]))
    ):
        count = sum(one.times for one in group)
        rows.append((kind, axes, str(count), f"{_bytes(group):,}", source))
    yield from _table(rows) if found else ["  none"]
    if not unasked:
        yield "All-gathers that no rule asked for: none"
        return
    yield f"All-gathers that no rule asked for: {len(unasked)}"
    for one in sorted(unasked, key=lambda one: -one.size * one.times):
        shapes = ", ".join(str(list(shape)) for shape in one.arrays)
        amount = f"{one.size:,} bytes x {one.times}"
        yield f"  {shapes} over {'x'.join(one.axes)}, {amount}: {one.source}"


def _bytes(group: Iterable[Collective]) -> int:
    return sum(one.size * one.times for one in group)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _total(title: str, leaves: Sequence[Any]) -> str:
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    local = sum(map(_local, leaves))
    return f"{title}: {whole:,} bytes, {local:,} a device ({whole / max(local, 1):.2f} ways)"


def _local(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _is_whole(leaf: Any) -> bool:
    return leaf.sharding.is_fully_replicated


def _shape(leaf: Any) -> str:
    return "x".join(map(str, leaf.shape)) or "scalar"


def _split(leaf: Any) -> str:
    """Name the axes that really split each dimension; ``-`` is one that is whole."""
    mesh = leaf.sharding.mesh.shape
    parts = [
        "+".join(name for name in _names(entry) if mesh[name] > 1) or "-"
        for entry in leaf.sharding.spec
    ]
    return "whole" if set(parts) <= {"-"} else ", ".join(parts)
