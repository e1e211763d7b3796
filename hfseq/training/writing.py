"""Texts that the model writes while it trains and at the end: scores, samples, files."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hfseq import trees
from hfseq.objectives.base import Written
from hfseq.training import setup
from hfseq.whole_files import write_text

if TYPE_CHECKING:
    from hfseq.training.loop import Loop

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


def predict(loop: Loop) -> dict[str, float]:
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


def samples_of(written: Written, count: int) -> list[tuple[str, str, str]]:
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
    write_text(path, "".join(" ".join(text.split()) + "\n" for text in texts))
