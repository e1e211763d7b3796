"""Histograms of weights and gradients, for ``--log_histograms``.

The training step is left as it is, to the bit: the gradients come from a second program, which
takes the step's own batch and random numbers and an optimizer that only looks.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hfseq.errors import NonFiniteLoss
from hfseq.nn import trees
from hfseq.training import state as states
from hfseq.training import throughput
from hfseq.training.arguments import profiled_steps
from hfseq.training.evaluation import extra_metrics
from hfseq.training.event_file import Histogram

if TYPE_CHECKING:
    from hfseq.training.run import Loop

logger = logging.getLogger(__name__)

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


def log(loop: Loop, bar: Any) -> None:
    """Read the sums of the log window, empty it, and report."""
    window = _empty_window(loop)
    step, bad = loop.progress.step, window.pop("bad_steps")
    if bad:
        not_finite(loop, int(bad))
    rate = float(loop.schedule(step - 1))
    measured = loop.objective.metrics(window) | extra_metrics(loop)
    loop.metrics |= {
        **{f"train_{name}": value for name, value in measured.items()},
        "train_learning_rate": rate,
        "train_grad_norm": float(loop.last_step["grad_norm"]),
        "tokens_seen": float(loop.progress.tokens_seen),
        **loop.meter.read(),
        "peak_memory_gb": throughput.peak_memory_gb(),
        "train_runtime": loop.progress.seconds,
    }
    if not loop.arguments.data.streaming:
        loop.metrics["epoch"] = step / len(loop.data.train)
    loop.report({k: v for k, v in loop.metrics.items() if not k.startswith("eval_")}, step)
    bar.set_postfix(loss=f"{measured['loss']:.3f}")
    if bar.disable and jax.process_index() == 0:
        line = f"Step... ({step} | Loss: {measured['loss']:.6g}, Learning Rate: {rate:.6g})"
        print(line, flush=True)


def _empty_window(loop: Loop) -> dict[str, float]:
    window = loop.state["window"]
    sums = {name: float(value) for name, value in jax.device_get(window).items()}
    loop.state["window"] = jax.tree.map(_zeros, window)
    return sums


def _zeros(like: jax.Array) -> jax.Array:
    """Return zeros of the same place; device_put would have all processes compare theirs."""
    zero = np.zeros(like.shape, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: zero[index])


def not_finite(loop: Loop, count: int) -> None:
    """Stop the run, or say how many steps were skipped, as ``--on_non_finite`` asks."""
    step = loop.progress.step
    if loop.training.on_non_finite == "skip":
        logger.warning(
            "%d steps up to %d had a non-finite loss or gradient and were skipped", count, step
        )
        return
    loop.checkpoints.settle()
    kept = loop.checkpoints.steps()
    saved = f"the checkpoint of step {kept[-1]} is kept" if kept else "nothing was saved yet"
    raise NonFiniteLoss(
        f"the loss or a gradient became NaN or infinite at step {step} or since the last log; "
        f"{saved}. Lower --learning_rate, set --max_grad_norm 1, warm up for longer, or use "
        "--on_non_finite skip"
    )


def progress_bar(loop: Loop) -> Any:
    """Return a progress bar, which shows on a terminal only."""
    from tqdm import tqdm

    shown = sys.stderr.isatty() and not loop.training.disable_tqdm and jax.process_index() == 0
    return tqdm(
        total=loop.total_steps,
        initial=loop.progress.step,
        disable=not shown,
        unit="step",
        desc="Training",
    )


class Profiler:
    """Writes a jax profile of the steps ``first-last``, both included, to ``folder/profile``.

    Steps count from 1, as in the log. A run that goes on in the middle of them profiles the rest.
    """

    def __init__(self, steps: str | None, folder: Path):
        self.folder, self.running = folder / "profile", False
        self.first, self.last = profiled_steps(steps) if steps else (0, 0)

    def at(self, step: int, before: Any = None) -> None:
        """Start or stop before ``step`` runs; ``before`` is what the step before it measured.

        Steps run while the host is ahead of them, so the one before has to be over.
        """
        if not self.running and self.first <= step <= self.last:
            jax.block_until_ready(before)
            jax.profiler.start_trace(str(self.folder))
            self.running = True
        elif self.running and step > self.last:
            self.close(before)

    def close(self, before: Any = None) -> None:
        """Write what was recorded, once ``before`` is there."""
        if self.running:
            jax.block_until_ready(before)
            jax.profiler.stop_trace()
            self.running, self.first = False, self.last + 1
            logger.info("profile written to %s (open it with TensorBoard or xprof)", self.folder)
