"""Evaluation: sums over a whole split, divided once, the same on any batch size; and texts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from hfseq.data.batches import RowRandom
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import sharding, trees
from hfseq.objectives.base import GeneratedTexts
from hfseq.training.loader import place_batch
from hfseq.training.setup import Run
from hfseq.training.state import TrainState, Tree, join_frozen, to_host

#: Prefix of the metrics by split, as v4's scripts name them.
PREFIXES = {"validation": "eval", "test": "predict"}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured on a split: metrics by name, and for each row, and what was written.

    ``rows`` are arrays in the order of the split; ``whole`` says whether all batches were read.
    """

    metrics: dict[str, float]
    per_example: dict[str, np.ndarray]
    texts: GeneratedTexts | None
    is_complete: bool


def evaluate(run: Run, state: TrainState, split: str, limit: int | None = None) -> Evaluation:
    """Judge the rows of a split, and let the model write where the objective wants it to.

    With ``limit`` only so many batches are read. Of a test split either the rows are judged or
    texts are written. Nothing is reported or kept.
    """
    assert run.data is not None
    data = run.data.evaluation if split == "validation" else run.data.test
    prefix, started = PREFIXES[split], time.perf_counter()
    metrics: dict[str, float] = {}
    rows: dict[str, np.ndarray] = {}
    texts, whole = None, True
    if data is not None:
        whole = limit is None or limit >= len(data)
        totals: dict[str, float] = {}
        parts: dict[str, list[np.ndarray]] = {}
        for step in range(len(data) if limit is None else min(limit, len(data))):
            # Masks belong to the row of the data set: every evaluation draws the same.
            numbers, valid = data.indices(step)
            random = RowRandom(run.arguments.training.seed, 0, numbers)
            batch = run.objective.collate(data[step], random, sharding.data_shards(run.mesh))
            placed = place_batch(batch, run.mesh, 1)
            sums = jax.device_get(run.eval_step(state.params, run.frozen, state.extra, placed))
            for name in [name for name, value in sums.items() if value.ndim]:
                parts.setdefault(name, []).append(sums.pop(name)[valid])
            totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
        rows = {name: np.concatenate(part) for name, part in parts.items()}
        facts = run.data.description[split]
        # The words of the whole text say nothing about a part of it; the bytes of a token do.
        known = ("words", "bytes", "tokens") if whole else ("bytes", "tokens")
        totals |= {name: facts[name] for name in known if name in facts}
        measured = run.objective.metrics(totals) | extra_metrics(run, state)
        if rows:
            measured |= run.objective.row_metrics(rows, split)
        measured["runtime"] = time.perf_counter() - started
        metrics = {f"{prefix}_{name}": value for name, value in measured.items()}
    if data is None or split == "validation":
        started = time.perf_counter()
        with inference_model(run, state) as (model, params):
            texts = run.objective.generate_texts(model, params, split)
        if texts is not None:
            metrics |= {f"{prefix}_{name}": value for name, value in texts.metrics.items()}
            metrics[f"{prefix}_generation_runtime"] = time.perf_counter() - started
    return Evaluation(metrics, rows, texts, whole)


def extra_metrics(run: Run, state: TrainState) -> dict[str, float]:
    """Read what the model reports of its collections, e.g. how many codes are in use."""
    if not state.extra:
        return {}
    numbers = jax.device_get(run.read_extra_metrics(state.extra))
    return {name: float(value) for name, value in numbers.items()}


@contextlib.contextmanager
def inference_model(run: Run, state: TrainState) -> Iterator[tuple[FlaxPreTrainedModel, Tree]]:
    """Give the model that answers, with the run's collections, and its parameters.

    The collections are the model's for this while only: the next step will donate their buffers.
    One of several processes answers by itself, on one device: none waits for another's.
    """
    model, extra = run.model, dict(state.extra)
    if jax.process_count() == 1:
        # Without the rows that pad the vocabulary: those must not be written.
        flat = trees.flatten(join_frozen(state.params, run.frozen))
        params: Tree = trees.unflatten(
            {path: run.layout.cut(path, leaf) for path, leaf in flat.items()}
        )
    else:
        model = copy.copy(model)
        model.use_mesh(None)
        extra = jax.tree.map(np.asarray, extra)  # replicated: every process has it
        params = to_host(join_frozen(state.params, run.frozen), run.layout)
        params, extra = jax.device_put((params, extra), jax.local_devices()[0])
    before, model.extra = model.extra, extra
    try:
        yield model, params
    finally:
        model.extra = before


def select_samples(texts: GeneratedTexts, count: int) -> list[tuple[str, str, str]]:
    """Return so many (source, reference, hypothesis), spread evenly over the texts."""
    rows = list(zip(texts.sources, texts.references, texts.hypotheses, strict=True))
    total = len(rows)
    numbers = [i * total // count for i in range(min(count, total))] if count else []
    return [rows[i] for i in dict.fromkeys(numbers)]


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return texts as a Markdown table, as TensorBoard shows them; nothing without rows."""
    cells = [[" ".join(text.replace("|", "\\|").split()) for text in row] for row in rows]
    lines = [f"| {' | '.join(line)} |" for line in (names, *cells)]
    lines.insert(1, "| --- " * len(names) + "|")
    return "\n".join(lines) if cells else ""
