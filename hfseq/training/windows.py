"""Truncated back-propagation: a row is trained window by window, and the model's state carried.

A step of the loop is one update on a window of ``--update_length`` tokens of each row. What the
model knows of the windows before it (``init_cache``, of a size that does not depend on the length)
is a part of the training state, so it lies with its rows on the mesh, is cut into micro-batches
like them, and comes back with a checkpoint in mid-sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq import trees
from hfseq.data.text_arguments import has_arrays
from hfseq.errors import UsageError
from hfseq.training import sharding


@dataclasses.dataclass(frozen=True)
class Windows:
    """How rows are cut: ``count`` windows of ``length`` tokens; ``streams`` never reset."""

    length: int
    count: int
    streams: bool


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where the rows are in the carried state: ``rows`` of them, in stacks on the second axis.

    ``windows`` make a sequence; ``stacked`` are path prefixes of scanned layers.
    """

    rows: int
    windows: int
    stacked: tuple[trees.Path, ...] = ()

    def _axis(self, path: trees.Path) -> int:
        return int(any(path[: len(head)] == head for head in self.stacked))

    def _map(self, change: Any, *given: Any) -> Any:
        flat = [trees.flatten(tree) for tree in given]
        return trees.unflatten(
            {path: change(self._axis(path), *(tree[path] for tree in flat)) for path in flat[0]}
        )

    def shardings(self, tree: Any, mesh: Mesh) -> Any:
        """Lay the rows over the axes of the batch."""

        def place(axis: int, leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(None,) * axis, sharding.BATCH))

        return self._map(place, tree)

    def cut(self, tree: Any, micro: int) -> Any:
        """Cut the rows as a batch is cut, micro-batches on a new first axis."""

        def one(axis: int, leaf: jax.Array) -> jax.Array:
            shape = (*leaf.shape[:axis], micro, self.rows // micro, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(leaf.reshape(shape), axis, 0)

        return self._map(one, tree)

    def join(self, tree: Any, like: Any) -> Any:
        """Undo :meth:`cut`; the types are those of ``like``."""

        def one(axis: int, leaf: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.moveaxis(leaf, 0, axis).reshape(old.shape).astype(old.dtype)

        return self._map(one, tree, like)

    def reset(self, tree: Any, rows: jax.Array, fresh: Any) -> Any:
        """Put the state ``fresh`` in the place of the rows that ``rows`` (bool) names."""

        def one(axis: int, leaf: jax.Array, new: jax.Array) -> jax.Array:
            shape = (1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1)
            return jnp.where(rows.reshape(shape), new.astype(leaf.dtype), leaf)

        return self._map(one, tree, fresh)


def plan(arguments: Any, objective: Any, model: Any, length: int) -> Windows | None:
    """Return how rows of ``length`` tokens are cut, or None where a row is one step.

    Raises:
        UsageError: what is trained cannot carry a state, or the length does not fit.
    """
    training = arguments.training
    window, streams = training.update_length, training.state_reset == "never"
    if window is None or not training.do_train:
        return None
    if problem := _problem(arguments, objective, model, length):
        raise UsageError(f"--update_length {window}: {problem}")
    return Windows(window, length // window, streams)


def _problem(arguments: Any, objective: Any, model: Any, length: int) -> str | None:
    """Say why windows cannot be, if so."""
    window, data = arguments.training.update_length, arguments.data
    name = model.config.model_type
    if not objective.carries_state:
        return (
            f"'{objective.name}' needs a row as a whole; only causal language modelling "
            "(run_clm_flax.py) trains it window by window"
        )
    if not model.fixed_state:
        return (
            f"'{name}' keeps keys and values of every token it has seen, so there is no state of "
            "fixed size to carry; vq_transformer has one. Drop the flag"
        )
    try:
        jax.eval_shape(lambda: model.init_cache(1, 0))
    except UsageError as error:  # an option of the configuration leaves it without a state
        return str(error)
    if has_arrays(data) and arguments.training.state_reset == "never":
        return (
            "--state_reset never needs one text to read on in, and images are rows of their own; "
            "drop --state_reset"
        )
    if length % window:
        fits = [n for n in range(1, length + 1) if length % n == 0][-6:]
        return (
            f"rows of {length} tokens are not whole windows: give a divisor of the row length "
            f"(such as {', '.join(map(str, fits))}), or another --block_size"
        )
    if data.streaming:
        return "--streaming has no row to go back to for its next window; drop one of the two"
    if data.line_by_line:
        return "--line_by_line makes rows of different lengths; drop one of the two"
    if not objective.cross_documents:
        return (
            "documents that share a row cannot be kept apart by a state that is carried on; add "
            "--cross_documents (the text is one stream)"
        )
    return None
