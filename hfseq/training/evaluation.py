"""Evaluation: metrics over a whole split, and generated texts.

The numerator and the denominator of each metric are summed over all batches and divided once at the
end. Metrics therefore do not depend on the batch size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from hfseq.errors import DataError
from hfseq.modeling import FlaxPreTrainedModel
from hfseq.nn import trees
from hfseq.objectives.base import GeneratedTexts, SkippedExamplesMixin
from hfseq.training import processes
from hfseq.training.loader import EvaluationLoader
from hfseq.training.setup import Run
from hfseq.training.state import TrainState, Tree, join_frozen

#: The prefix of metric names for each split, as in the scripts of Transformers 4.
PREFIXES = {"validation": "eval", "test": "predict"}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: The metrics by name, with the prefix of the split.
        per_example: Arrays by name with one value per example, in the order of the split.
        texts: The generated texts, if the objective generates any.
        is_complete: Whether all batches were evaluated.
    """

    metrics: dict[str, float]
    per_example: dict[str, np.ndarray]
    texts: GeneratedTexts | None
    is_complete: bool


def evaluate(run: Run, state: TrainState, split: str, limit: int | None = None) -> Evaluation:
    """Computes metrics on a split, and generates texts if the objective supports this.

    On the test split, an objective either computes metrics or generates texts. The caller logs and
    saves the results.

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
        params = state.inference_params
        parts: dict[str, list[np.ndarray]] = {}
        loader = EvaluationLoader(data, run.objective, run.mesh, 1, run.arguments.training.seed)
        steps = len(data) if limit is None else min(limit, len(data))
        for step, batch, _ in loader.batches(0, steps):
            _, valid = data.indices(step)
            sums = jax.device_get(run.eval_step(params, run.frozen, state.extra, batch))
            for name in [name for name, value in sums.items() if value.ndim]:
                parts.setdefault(name, []).append(sums.pop(name)[valid])
            totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
        rows = {name: np.concatenate(part) for name, part in parts.items()}
        if isinstance(run.objective, SkippedExamplesMixin):
            skipped = run.objective.skipped_examples.get(split, {})
            for indices in processes.exchange(list(skipped)):
                run.objective.add_skipped(split, indices)
        counts = run.data.description[split]
        # The counts are those of the whole split, so the number of words is only used if all
        # batches were evaluated. The numbers of bytes and tokens are always used, because only
        # their ratio affects metrics.
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
    """Computes metrics from sums over a split, or over training steps.

    If the sums contain no targets, all metrics are NaN. If the objective has no labels for the
    split, the result is empty.

    Raises:
        DataError: All batches of the split were evaluated, and none contains a target.
    """
    if split != "train" and not run.objective.has_targets(split):
        return {}
    metrics = run.objective.metrics(totals)
    if totals["count"]:
        return metrics
    if split != "train" and is_complete:
        raise DataError(
            f"the {split} split has no targets: its texts are too short, or they contain no tokens "
            "to predict. Use other data, or do not evaluate this split"
        )
    return dict.fromkeys(metrics, math.nan)


def extra_metrics(run: Run, state: TrainState) -> dict[str, float]:
    """Returns the metrics that the model computes from its non-parameter collections."""
    if not state.extra:
        return {}
    numbers = jax.device_get(run.read_extra_metrics(state.extra))
    return {name: float(value) for name, value in numbers.items()}


@contextlib.contextmanager
def inference_model(run: Run, state: TrainState) -> Iterator[tuple[FlaxPreTrainedModel, Tree]]:
    """Yields the model with the collections of `state`, and its parameters.

    The parameters do not contain vocabulary padding. After the context ends, the model must not be
    used with the collections of `state`, because the next training step donates their buffers. With
    several processes, all processes must run the model on the same inputs. The inputs are not
    split, so every device processes all of them.
    """
    model, extra = run.model, dict(state.extra)
    # Without vocabulary padding, so that padding tokens are never generated.
    flat = trees.flatten(join_frozen(state.inference_params, run.frozen))
    params: Tree = trees.unflatten(
        {path: run.layout.cut(path, leaf) for path, leaf in flat.items()}
    )
    original_extra, model.extra = model.extra, extra
    try:
        yield model, params
    finally:
        model.extra = original_extra


def select_samples(texts: GeneratedTexts, count: int) -> list[tuple[str, str, str]]:
    """Returns up to `count` evenly spread texts as tuples (source, reference, hypothesis)."""
    rows = list(zip(texts.sources, texts.references, texts.hypotheses, strict=True))
    total = len(rows)
    indices = [i * total // count for i in range(min(count, total))] if count else []
    return [rows[i] for i in dict.fromkeys(indices)]


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table for TensorBoard, or an empty string if `rows` is empty."""
    cells = [[" ".join(text.replace("|", "\\|").split()) for text in row] for row in rows]
    lines = [f"| {' | '.join(line)} |" for line in (names, *cells)]
    lines.insert(1, "| --- " * len(names) + "|")
    return "\n".join(lines) if cells else ""
