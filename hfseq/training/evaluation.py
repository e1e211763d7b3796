"""Evaluation: sums over the whole validation split, divided once, the same on any batch size."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq.data.batches import RowRandom
from hfseq.errors import UsageError, write_whole
from hfseq.nn import sharding, trees
from hfseq.objectives.base import Texts
from hfseq.reports.log import smaller_is_better
from hfseq.training import loader, setup

if TYPE_CHECKING:
    from hfseq.training.run import Loop

logger = logging.getLogger(__name__)

#: Prefix of the metrics by split, as v4's scripts name them.
PREFIXES = {"validation": "eval", "test": "predict"}


PREDICTIONS, REFERENCES = "generated_predictions.txt", "generated_references.txt"


def write(loop: Loop, split: str) -> dict[str, float]:
    """Let the model write for a split; report the samples and return the scores by name."""
    started = time.perf_counter()
    with alone(loop) as (model, params):
        written = loop.objective.write_texts(model, params, split)
    if written is None:
        return {}
    loop.written = written
    prefix = PREFIXES[split]
    for name, note in written.notes.items():
        if loop.notes.get(f"{prefix}_{name}") != note:  # once a run
            loop.notes[f"{prefix}_{name}"] = note
            logger.info("%s_%s: %s", prefix, name, note)
    samples = samples_of(written, getattr(loop.arguments.data, "text_samples", 0))
    show(loop, f"{prefix}_samples", ("source", "reference", "model"), samples)
    measured = {f"{prefix}_{name}": value for name, value in written.metrics.items()}
    return measured | {f"{prefix}_generation_runtime": time.perf_counter() - started}


def show(loop: Loop, tag: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Give the trackers a table of texts, if there are any."""
    if text := table(names, rows):
        for tracker in loop.trackers:
            tracker.text(tag, text, loop.progress.step)


def predict_texts(loop: Loop) -> dict[str, float]:
    """Write for the test split, keep texts and references as files, and report the scores."""
    measured = write(loop, "test")
    loop.report(measured, loop.progress.step)
    if jax.process_index() == 0:
        loop.folder.mkdir(parents=True, exist_ok=True)
        for name, texts in (
            (PREDICTIONS, loop.written.hypotheses), (REFERENCES, loop.written.references),
        ):  # fmt: skip
            _write_lines(loop.folder / name, texts)
        shown = ", ".join(f"{k}: {v:.6g}" for k, v in measured.items() if "runtime" not in k)
        print(f"Predict... ({loop.progress.step} | {shown})", flush=True)
    return measured


def samples_of(written: Texts, count: int) -> list[tuple[str, str, str]]:
    """Return so many (source, reference, hypothesis), spread evenly over the texts."""
    total = len(written.hypotheses)
    places = [i * total // count for i in range(min(count, total))] if count else []
    rows = (written.sources, written.references, written.hypotheses)
    return [(rows[0][i], rows[1][i], rows[2][i]) for i in dict.fromkeys(places)]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return texts as a Markdown table, as TensorBoard shows them; nothing without rows."""
    lines = ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    head = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    return "\n".join(head + lines) if lines else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


@contextlib.contextmanager
def alone(loop: Loop) -> Iterator[tuple[Any, Any]]:
    """Give the model that answers, with the run's collections, and its parameters.

    The collections are the model's for this while only: the next step will donate their buffers.
    """
    model, params, extra = _writer(loop)
    before, model.extra = model.extra, extra
    try:
        yield model, params
    finally:
        model.extra = before


def _writer(loop: Loop) -> tuple[Any, Any, Any]:
    """Return the model that writes, its parameters and its collections.

    One of several processes writes all texts by itself, on one device: none waits for another's.
    """
    if jax.process_count() == 1:
        return loop.model, _whole(loop), loop.state["extra"]
    alone = copy.copy(loop.model)
    alone.use_mesh(None)
    params = setup.to_host(loop.state["params"], loop.layout)
    extra = jax.tree.map(np.asarray, loop.state["extra"])  # replicated: every process has it
    return alone, *jax.device_put((params, extra), jax.local_devices()[0])


def _whole(loop: Loop) -> Any:
    """The parameters without the rows that pad the vocabulary: those must not be written."""
    flat = trees.flatten(loop.state["params"])
    return trees.unflatten({path: loop.layout.cut(path, leaf) for path, leaf in flat.items()})


def _write_lines(path: Path, texts: list[str]) -> None:
    """One text a line: line breaks within a text become spaces."""
    write_whole(path, "".join(" ".join(text.split()) + "\n" for text in texts))


def extra_metrics(loop: Loop) -> dict[str, float]:
    """Read what the model reports of its collections, e.g. how many codes are in use."""
    if not loop.state["extra"]:
        return {}
    found = jax.device_get(loop.read_extra(loop.state["extra"]))
    return {name: float(value) for name, value in found.items()}


def check_metric(loop: Loop) -> None:
    """Refuse to choose by a number that there is not, or not in evaluations of a part.

    Raises:
        UsageError: ``--metric_for_best_model`` is the perplexity per word of a part, or nothing
            that the objective reports.
    """
    training = loop.training
    name = training.metric_for_best_model.removeprefix("eval_")
    during = training.do_train and training.eval_strategy != "no"
    if name == "word_perplexity" and during and _reads_part(loop):
        raise UsageError(
            f"--max_eval_batches {training.max_eval_batches} reads a part of the "
            f"{len(loop.data.evaluation)} validation batches, whose words are not known, so "
            "--metric_for_best_model word_perplexity has no number: drop --max_eval_batches, or "
            "choose by loss"
        )
    known = None if loop.data.evaluation is None else loop.objective.reported("validation")
    if known is not None and name not in known and not loop.model.statistics:
        raise UsageError(
            f"--metric_for_best_model {training.metric_for_best_model}: there is only "
            f"{', '.join(f'eval_{metric}' for metric in sorted(known))}"
        )


def _reads_part(loop: Loop) -> bool:
    limit = loop.training.max_eval_batches
    return limit is not None and limit < len(loop.data.evaluation)


def evaluate(loop: Loop, limit: int | None = None) -> dict[str, float]:
    """Evaluate the present parameters, report the metrics, and return them.

    With ``limit`` only so many batches are read; such numbers do not count as an evaluation of
    the whole split.
    """
    training, started = loop.training, time.perf_counter()
    whole = limit is None or limit >= len(loop.data.evaluation)
    measured, _ = _measure(loop, "validation", limit)
    measured["eval_runtime"] = time.perf_counter() - started
    measured |= write(loop, "validation")
    loop.report(measured, loop.progress.step)
    loop.evaluated_step = loop.progress.step if whole else -1
    _print(loop, "Eval", measured)
    # Numbers of a part and of the whole do not compare: where there are parts, they count.
    if not (whole and training.eval_strategy != "no" and _reads_part(loop)):
        note_best(loop, measured)
    return measured


def predict(loop: Loop) -> dict[str, float]:
    """Judge the test split: its loss where there are rows of it, and what the model writes."""
    if loop.data.test is None:
        return predict_texts(loop)
    started = time.perf_counter()
    measured, rows = _measure(loop, "test", None)
    if jax.process_index() == 0:
        loop.folder.mkdir(parents=True, exist_ok=True)
        loop.objective.save_predictions(rows, "test", loop.folder)
    measured["predict_runtime"] = time.perf_counter() - started
    loop.report(measured, loop.progress.step)
    _print(loop, "Predict", measured)
    return measured


def _measure(
    loop: Loop, split: str, limit: int | None
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Sum over the batches of a split, at most ``limit``, and turn the sums into metrics.

    Returns what the objective says of each row, too, in the order of the split.
    """
    data = loop.data.evaluation if split == "validation" else loop.data.test
    totals: dict[str, float] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for step in range(len(data) if limit is None else min(limit, len(data))):
        # Masks belong to the row of the data set: every evaluation draws the same.
        numbers, valid = data.indices(step)
        random = RowRandom(loop.training.seed, 0, numbers)
        batch = loop.objective.collate(data[step], random, sharding.data_shards(loop.mesh))
        placed = loader.place_batch(batch, loop.mesh, 1)
        found = jax.device_get(loop.eval_step(loop.state["params"], loop.state["extra"], placed))
        for name in [name for name, value in found.items() if value.ndim]:
            parts.setdefault(name, []).append(found.pop(name)[valid])
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in found.items()}
    rows = {name: np.concatenate(part) for name, part in parts.items()}
    whole = limit is None or limit >= len(data)
    facts = loop.data.description[split]
    # The words of the whole text say nothing about a part of it; the bytes of a token do.
    known = ("words", "bytes", "tokens") if whole else ("bytes", "tokens")
    totals |= {name: facts[name] for name in known if name in facts}
    measured = loop.objective.metrics(totals) | extra_metrics(loop)
    if rows:
        measured |= loop.objective.row_metrics(rows, split)
    prefix = PREFIXES[split]
    return {f"{prefix}_{name}": value for name, value in measured.items()}, rows


def _print(loop: Loop, title: str, measured: dict[str, float]) -> None:
    if jax.process_index() == 0:
        shown = ", ".join(f"{k}: {v:.6g}" for k, v in measured.items() if not k.endswith("runtime"))
        shown = shown or "no labels to judge by"
        print(f"{title}... ({loop.progress.step} | {shown})", flush=True)


def note_best(loop: Loop, measured: dict[str, float]) -> None:
    """Remember the step whose ``metric_for_best_model`` is the best so far."""
    training, progress = loop.training, loop.progress
    name = f"eval_{training.metric_for_best_model.removeprefix('eval_')}"
    if name not in measured:
        raise UsageError(f"--metric_for_best_model {name}: there is only {', '.join(measured)}")
    greater = training.greater_is_better
    if greater is None:
        greater = not smaller_is_better(name)
    best, value = progress.best_metric, measured[name]
    better = best is None or (value > best if greater else value < best)
    if math.isfinite(value) and better:
        progress.best_metric, progress.best_step = value, progress.step
