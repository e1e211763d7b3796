"""Evaluation: metrics over a whole split, and generated texts.

Sums are accumulated over all batches and divided once, so metrics do not depend on the batch size.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from hfseq.data.batches import RowRandom
from hfseq.errors import DataError
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
    """The result of an evaluation.

    Attributes:
        metrics: The metrics by name, with the prefix of the split.
        per_example: Arrays with one value per example, in the order of the split.
        texts: The generated texts, if the objective generates any.
        is_complete: Whether all batches were evaluated.
    """

    metrics: dict[str, float]
    per_example: dict[str, np.ndarray]
    texts: GeneratedTexts | None
    is_complete: bool


def evaluate(run: Run, state: TrainState, split: str, limit: int | None = None) -> Evaluation:
    """Evaluates a split, and generates texts if the objective does so.

    For the test split, either metrics are computed or texts are generated. Nothing is logged or
    saved.

    Args:
        run: The run.
        state: The state to evaluate.
        split: "validation" or "test".
        limit: Maximum number of batches. Default: all.
    """
    assert run.data is not None
    data = run.data.evaluation if split == "validation" else run.data.test
    prefix, started = PREFIXES[split], time.perf_counter()
    metrics: dict[str, float] = {}
    rows: dict[str, np.ndarray] = {}
    texts, is_complete = None, True
    if data is not None:
        is_complete = limit is None or limit >= len(data)
        totals: dict[str, float] = {}
        parts: dict[str, list[np.ndarray]] = {}
        for step in range(len(data) if limit is None else min(limit, len(data))):
            # Masks depend only on the row of the dataset: every evaluation draws the same ones.
            row_indices, valid = data.indices(step)
            random = RowRandom(run.arguments.training.seed, 0, row_indices)
            batch = run.objective.collate(data[step], random, sharding.data_shards(run.mesh))
            device_batch = place_batch(batch, run.mesh, 1)
            sums = jax.device_get(
                run.eval_step(state.params, run.frozen, state.extra, device_batch)
            )
            for name in [name for name, value in sums.items() if value.ndim]:
                parts.setdefault(name, []).append(sums.pop(name)[valid])
            totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
        rows = {name: np.concatenate(part) for name, part in parts.items()}
        counts = run.data.description[split]
        # The word count of the split is only valid for all batches. Bytes per token is a ratio.
        count_names = ("words", "bytes", "tokens") if is_complete else ("bytes", "tokens")
        totals |= {name: counts[name] for name in count_names if name in counts}
        values = metrics_of(run, totals, split, is_complete) | extra_metrics(run, state)
        if rows:
            values |= run.objective.row_metrics(rows, split)
        values["runtime"] = time.perf_counter() - started
        metrics = {f"{prefix}_{name}": value for name, value in values.items()}
    if data is None or split == "validation":
        started = time.perf_counter()
        with inference_model(run, state) as (model, params):
            texts = run.objective.generate_texts(model, params, split)
        if texts is not None:
            metrics |= {f"{prefix}_{name}": value for name, value in texts.metrics.items()}
            metrics[f"{prefix}_generation_runtime"] = time.perf_counter() - started
    return Evaluation(metrics, rows, texts, is_complete)


def metrics_of(
    run: Run, totals: dict[str, float], split: str, is_complete: bool = True
) -> dict[str, float]:
    """Returns the metrics of sums over a split, or over training steps.

    Without any target, all of them are NaN.

    Raises:
        DataError: The complete split has no targets.
    """
    if split != "train" and not run.objective.has_targets(split):
        return {}
    metrics = run.objective.metrics(totals)
    if totals["count"]:
        return metrics
    if split != "train" and is_complete:
        raise DataError(
            f"the {split} split has no targets: its texts are too short, or nothing in them is "
            "predicted. Use other data, or do not evaluate it"
        )
    return dict.fromkeys(metrics, math.nan)


def extra_metrics(run: Run, state: TrainState) -> dict[str, float]:
    """Returns the metrics that the model computes from its collections."""
    if not state.extra:
        return {}
    numbers = jax.device_get(run.read_extra_metrics(state.extra))
    return {name: float(value) for name, value in numbers.items()}


@contextlib.contextmanager
def inference_model(run: Run, state: TrainState) -> Iterator[tuple[FlaxPreTrainedModel, Tree]]:
    """Yields the model with the current collections, and its parameters without vocabulary padding.

    The collections are assigned only for the duration of the body, because the next step donates
    their buffers. With several processes, each one runs the model independently on a single device.
    """
    model, extra = run.model, dict(state.extra)
    if jax.process_count() == 1:
        # Without vocabulary padding, so that padding tokens are never generated.
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
    original_extra, model.extra = model.extra, extra
    try:
        yield model, params
    finally:
        model.extra = original_extra


def select_samples(texts: GeneratedTexts, count: int) -> list[tuple[str, str, str]]:
    """Returns `count` tuples (source, reference, hypothesis), spread evenly over the texts."""
    rows = list(zip(texts.sources, texts.references, texts.hypotheses, strict=True))
    total = len(rows)
    indices = [i * total // count for i in range(min(count, total))] if count else []
    return [rows[i] for i in dict.fromkeys(indices)]


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table, as TensorBoard displays it. Without rows, it is empty."""
    cells = [[" ".join(text.replace("|", "\\|").split()) for text in row] for row in rows]
    lines = [f"| {' | '.join(line)} |" for line in (names, *cells)]
    lines.insert(1, "| --- " * len(names) + "|")
    return "\n".join(lines) if cells else ""
