"""Histograms of weights and gradients, for ``--log_histograms``.

The training step is left as it is, to the bit: the gradients come from a second program, which
takes the step's own batch and random numbers and an optimizer that only looks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfseq import trees
from hfseq.training import state as states
from hfseq.training.event_file import Histogram

if TYPE_CHECKING:
    from hfseq.training.loop import Loop

BINS = 40


class Watcher:
    """Reports, before every n-th step, the weights that it begins with and its gradients.

    Gradients are those before clipping. Tags are ``weights/<path>`` and ``gradients/<path>``.
    """

    def __init__(self, loop: Loop):
        self.loop, self.every = loop, loop.training.log_histograms
        self._look: Any = None

    def at(self, step: int, batch: Any) -> None:
        """Report if ``step``, which comes next, is one to look at; all processes take part."""
        if not self.every or step % self.every:
            return
        if self._look is None:
            self._look = self._make()
        found = jax.device_get(self._look(self.loop.state, batch))
        values = {
            f"{kind}/{trees.join(path)}": _histogram(bins)
            for kind, tree in found.items()
            for path, bins in tree.items()
        }
        for tracker in self.loop.trackers:
            if report := getattr(tracker, "histograms", None):
                report(values, step)

    def _make(self) -> Any:
        loop = self.loop
        bins = self._bins
        looking = optax.GradientTransformation(
            lambda params: bins(jax.tree.map(jnp.zeros_like, params)),
            lambda grads, before, params: (jax.tree.map(jnp.zeros_like, grads), bins(grads)),
        )
        step = states.make_step(
            loop.objective, loop.model, looking, loop.training.seed, False, loop.memory()
        )

        def look(state: Any, batch: Any) -> Any:
            start = {**state, "opt_state": looking.init(state["params"])}
            return {
                "weights": bins(state["params"]),
                "gradients": step(start, batch)[0]["opt_state"],
            }

        return jax.jit(look, out_shardings=jax.NamedSharding(loop.mesh, jax.P()))

    def _bins(self, tree: Any) -> dict[trees.Path, Any]:
        """Return the bins of each leaf, without the rows that pad the vocabulary; traced."""
        return {
            path: _bins(self.loop.layout.cut(path, leaf))
            for path, leaf in trees.flatten(tree).items()
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        }


def _bins(leaf: jax.Array) -> dict[str, jax.Array]:
    """Return counts (BINS,) of the finite values, their limits and their sums; float32."""
    values = leaf.astype(jnp.float32).reshape(-1)
    finite = jnp.isfinite(values)
    low = jnp.min(jnp.where(finite, values, jnp.inf), initial=jnp.inf)
    high = jnp.max(jnp.where(finite, values, -jnp.inf), initial=-jnp.inf)
    some = jnp.any(finite)
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    kept = jnp.where(finite, values, low)
    width = jnp.where(high > low, (high - low) / BINS, 1.0)
    place = jnp.clip(((kept - low) / width).astype(jnp.int32), 0, BINS - 1)
    counts = jnp.zeros(BINS, jnp.int32).at[place].add(finite.astype(jnp.int32))
    kept = jnp.where(finite, values, 0.0)
    sums = {"total": kept.sum(), "squares": jnp.square(kept).sum()}
    return {"counts": counts, "low": low, "high": high, **sums}


def _histogram(bins: dict[str, Any]) -> Histogram:
    low, high = float(bins["low"]), float(bins["high"])
    edges = np.linspace(low, high if high > low else low + BINS, BINS + 1)
    counts = bins["counts"].tolist()
    return Histogram(
        low, high, sum(counts), float(bins["total"]), float(bins["squares"]), edges.tolist(), counts
    )


__all__ = ["Watcher"]
