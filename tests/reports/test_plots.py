"""The learning curve: content, and no overlapping elements."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hfseq.errors import DataError
from hfseq.reports.plots import (
    draw_learning_curve,
    format_count,
    learning_curve,
    read_curve,
    smooth,
)


def full_run(steps: int = 400) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3 + 6 * math.exp(-step / 60) + 0.2 * math.sin(37 * step)
        rate = {"train_learning_rate": 5e-4 * (1 - step / steps), "tokens_seen": step * 32_768}
        records.append({"step": step, "time": 1.0, "train_loss": loss, **rate})
        if step % 100 == 0:
            records.append({"step": step, "time": 1.0, "eval_loss": loss + 0.1})
    return records


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    return struct.unpack(">II", data[16:24])


RUNS = {
    "full": full_run(),
    "one point": [{"step": 5, "train_loss": 9.2, "train_learning_rate": 1e-5}],
    "no eval": [{"step": s, "train_loss": 10 - s / 10} for s in range(1, 12)],
    "eval only": [{"step": 0, "eval_loss": 4.0}],
    "with nulls": [{"step": 1, "train_loss": 4.0}, {"step": 2, "train_loss": None}],
}


def judged(**metrics: float) -> list[dict[str, Any]]:
    """A run with two evaluations and doubling metrics."""
    return [
        {
            "step": step,
            "train_loss": 4.0 - step,
            "eval_loss": 4.0 - step,
            **{f"eval_{name}": step * value for name, value in metrics.items()},
        }
        for step in (1, 2)
    ]


RUNS |= {
    "translated": judged(bleu=15.0, accuracy=0.2),
    "classified": judged(accuracy=0.4, matthews_correlation=-0.1),
}


@pytest.mark.parametrize(
    ("metrics", "label"),
    [
        ({"bleu": 15.0, "accuracy": 0.2}, "BLEU"),
        ({"accuracy": 0.4, "matthews_correlation": -0.1}, "Matthews correlation"),
        ({"accuracy": 0.4, "runtime": 2.0}, "accuracy"),
    ],
)
def test_the_metric_that_matters_has_a_panel(metrics: dict[str, float], label: str) -> None:
    figure = draw_learning_curve(judged(**metrics), None, {})
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats)", label]
    (line,) = figure.axes[1].lines
    assert len(line.get_xdata()) == 2
    low, high = figure.axes[1].get_ylim()
    assert all(low <= value <= high for value in line.get_ydata())


def test_a_single_evaluation_is_not_a_curve() -> None:
    figure = draw_learning_curve(judged(accuracy=0.4)[:1], None, {})
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats)"]


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_becomes_a_picture(name: str, tmp_path: Path) -> None:
    log = write(tmp_path / "metrics.jsonl", RUNS[name])
    png = learning_curve(log, tmp_path / "plots/curve.png", name, {"unigram entropy": 7.0})
    assert png == tmp_path / "plots/curve.png" and size(png) == (1200, 750)
    assert [path.name for path in png.parent.iterdir()] == ["curve.png"]


@pytest.mark.parametrize("records", [[], [{"step": 1, "train_loss": None}], [{"step": 1}]])
def test_log_without_any_loss_is_an_error_naming_it(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    log = write(tmp_path / "metrics.jsonl", records)
    with pytest.raises(DataError, match=r"metrics.jsonl contains no finite train_loss"):
        learning_curve(log, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_curve_shows_losses_rate_tokens_and_baselines() -> None:
    figure = draw_learning_curve(
        full_run(), "norwegian-roberta", {"unigram entropy": 7.02, "goal": 5.02}
    )
    losses, rate = figure.axes
    labels = losses.get_legend_handles_labels()[1]
    assert [label.rsplit(" ", 1)[0] for label in labels] == [
        *("training", "validation", "unigram entropy", "goal")
    ]
    assert labels[1] == f"validation {full_run()[-1]['eval_loss']:.2f}"
    assert list(losses.lines[2].get_xdata()) == [100, 200, 300, 400]
    assert rate.get_ylabel() == "learning rate" and "tokens" in rate.get_xlabel()
    FigureCanvasAgg(figure).draw()
    ticks = {label.get_text() for label in rate.get_xticklabels()}
    assert "400\n13.1M" in ticks
    assert figure.get_suptitle() == "norwegian-roberta"


@pytest.mark.parametrize("name", RUNS)
def test_no_two_labels_overlap(name: str) -> None:
    figure = draw_learning_curve(RUNS[name], "a title", {"unigram entropy": 7.02, "goal": 5.02})
    FigureCanvasAgg(figure).draw()
    texts = [figure._suptitle, *(axes.xaxis.label for axes in figure.axes)]  # type: ignore[attr-defined]
    for axes in figure.axes:
        texts += [axes.yaxis.label, axes.yaxis.get_offset_text()]
        texts += axes.get_xticklabels() if axes is figure.axes[-1] else []
        low, high = axes.get_ylim()
        texts += [t for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) > 5
    for (first, box), (second, other) in combinations(boxes, 2):
        assert not box.overlaps(other), (first, second)


def test_smoothing_keeps_length_ends_and_straight_lines() -> None:
    np = pytest.importorskip("numpy")
    line = np.arange(50.0)
    assert np.allclose(smooth(line, 9), line)
    noisy = line + np.tile([1.0, -1.0], 25)
    assert np.abs(smooth(noisy, 9) - line)[9:-9].max() < 0.2
    assert smooth(noisy, 9)[0] == noisy[0]


def test_points_without_finite_value_are_left_out() -> None:
    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": math.inf}]
    steps, values = read_curve(records, "train_loss", "loss")
    assert steps.tolist() == [1.0] and values.tolist() == [2.0]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (950, "950"), (12_500, "12.5k"), (3e6, "3M"), (1.2e9, "1.2B")]
)
def test_counts_are_written_short(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.slow
def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    log = write(tmp_path / "metrics.jsonl", RUNS["no eval"])
    code = (
        "import sys; from hfseq.reports.plots import learning_curve; learning_curve(*sys.argv[1:]);"
        "assert 'matplotlib.pyplot' not in sys.modules and 'jax' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(log), str(tmp_path / "curve.png")]
    assert subprocess.run(command).returncode == 0


def test_values_that_matplotlib_cannot_label_are_left_out(tmp_path):
    rows = [{"step": i, "train_loss": 3.0 - i, "tokens_seen": i} for i in range(3)]
    rows.insert(1, {"step": 1, "train_loss": 1.7e308})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert learning_curve(tmp_path / "metrics.jsonl", tmp_path / "c.png").is_file()


@pytest.mark.parametrize("record", [{"step": 10**30, "loss": 1}, {"step": 1, "loss": 10**400}])
def test_numbers_that_no_float_holds_are_not_measurements(tmp_path, record):
    from hfseq.reports.log import read_metrics

    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + '\n{"step": 2, "loss": 2.0}\n')
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[-1] == {"step": 2, "loss": 2.0}
    assert records[:-1] in ([], [{"step": 1}])
