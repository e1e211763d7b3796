"""Evaluation: sums over the whole validation split, divided once, the same on any batch size."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import jax

from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError
from hfseq.training import setup, sharding, writing

if TYPE_CHECKING:
    from hfseq.training.loop import Loop


def evaluate(loop: Loop) -> dict[str, float]:
    """Evaluate the present parameters, report the metrics, and return them."""
    data, started = loop.data.evaluation, time.perf_counter()
    totals: dict[str, float] = {}
    for step in range(len(data)):
        # Masks belong to the row of the data set: every evaluation draws the same.
        random = RowRandom(loop.training.seed, 0, data.indices(step)[0])
        batch = loop.objective.collate(data.fetch(step), random, sharding.data_shards(loop.mesh))
        placed = setup.place_batch(batch, loop.mesh, 1)
        sums = jax.device_get(loop.eval_step(loop.state["params"], loop.state["extra"], placed))
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
    words = loop.data.description["validation"].get("words")
    totals |= {} if words is None else {"words": words}
    measured = {f"eval_{name}": value for name, value in loop.objective.metrics(totals).items()}
    measured["eval_runtime"] = time.perf_counter() - started
    measured |= writing.write(loop, "validation")
    loop.report(measured, loop.progress.step)
    loop.evaluated_step = loop.progress.step
    if jax.process_index() == 0:
        shown = ", ".join(f"{k}: {v:.6g}" for k, v in measured.items() if not k.endswith("runtime"))
        print(f"Eval... ({loop.progress.step} | {shown})", flush=True)
    note_best(loop, measured)
    return measured


def note_best(loop: Loop, measured: dict[str, float]) -> None:
    """Remember the step whose ``metric_for_best_model`` is the best so far."""
    training, progress = loop.training, loop.progress
    name = f"eval_{training.metric_for_best_model.removeprefix('eval_')}"
    if name not in measured:
        raise UsageError(f"--metric_for_best_model {name}: there is only {', '.join(measured)}")
    greater = training.greater_is_better
    if greater is None:
        greater = not name.endswith(("loss", "perplexity"))
    best, value = progress.best_metric, measured[name]
    better = best is None or (value > best if greater else value < best)
    if math.isfinite(value) and better:
        progress.best_metric, progress.best_step = value, progress.step
