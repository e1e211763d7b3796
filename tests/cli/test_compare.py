"""``hfseq compare``: the table of results, the flags that differ, and the plot."""

from __future__ import annotations

import json
import struct
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hfseq import cli
from hfseq.errors import DataError
from hfseq.reports import plots
from hfseq.reports.log import RunLog, unique_names
from tests.support.run_logs import records, write_log


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    base = write_log(tmp_path / "base", records(report_to=["jsonl"], max_steps=100))
    wide = write_log(
        tmp_path / "wide", records(60, learning_rate=3e-3, max_steps=100, run_name="w")
    )
    (wide / "training_args.json").write_text('{"freeze": [], "max_steps": 100}')
    return [base, wide]


def drawn(monkeypatch, logs, **options):
    """Captures the figure of a comparison instead of writing it."""
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure) or path)
    plots.draw_comparison(logs, "x.png", **options)
    FigureCanvasAgg(figures[0]).draw()
    return figures[0]


def test_the_table_has_every_run_and_the_flags_that_differ(runs, capsys, tmp_path):
    image = tmp_path / "out" / "both.png"
    assert cli.main(["compare", *map(str, runs), "--plot", str(image)]) == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["base"][1:5] == ["finished", "100", "2.04", "eval_loss"]
    assert rows["wide"][2:4] == ["60", "2.299"] and rows["wide"][-2:] == ["2:00", "min"]
    assert rows["learning_rate"][-2:] == ["0.001", "0.003"]
    assert "run_name" not in out and "report_to" not in out and "max_steps" not in out
    assert struct.unpack(">II", image.read_bytes()[16:24]) == (1200, 720)
    assert str(image) in err and [p.name for p in image.parent.iterdir()] == ["both.png"]


def test_json_has_it_all(runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *map(str, runs), "--json", "--no_plot"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs"]["base"]["best"] == {
        "metric": "eval_loss",
        "value": pytest.approx(2.1404, abs=1e-3),
        "step": 100,
    }
    assert report["different_flags"] == {"learning_rate": {"base": 1e-3, "wide": 3e-3}}
    assert not (tmp_path / "comparison.png").exists()


def test_runs_with_equal_names_are_distinguished_by_folder(tmp_path):
    logs = [RunLog(write_log(tmp_path / side / "run", records())) for side in ("a", "b")]
    assert list(unique_names(logs)) == ["a/run", "b/run"]
    with pytest.raises(DataError, match="is specified twice"):
        unique_names([logs[0], logs[0]])


@pytest.mark.parametrize(
    ("x", "last", "label"),
    [("step", 100, "step"), ("tokens", 80_000, "tokens seen"), ("time", 200, "training time")],
)
def test_curves_lie_over_steps_tokens_or_time(runs, monkeypatch, x, last, label):
    figure = drawn(monkeypatch, [RunLog(run) for run in runs], x=x)
    (panel,) = figure.axes
    lines = {line.get_label(): line for line in panel.lines}
    assert lines["base"].get_xdata()[-1] == pytest.approx(last)
    assert lines["wide"].get_xdata()[-1] == pytest.approx(0.6 * last)
    assert lines["base"].get_color() != lines["wide"].get_color()
    assert panel.get_xlabel() == label
    points = [line for line in panel.lines if line.get_marker() == "o"]
    assert np.allclose(points[0].get_xdata(), np.arange(20, 101, 20) / 100 * last)


def test_a_metric_is_drawn_alone(runs, monkeypatch):
    figure = drawn(monkeypatch, [RunLog(run) for run in runs], metric="eval_accuracy")
    (panel,) = figure.axes
    assert panel.get_ylabel() == "eval_accuracy" and len(panel.lines) == 2
    assert panel.lines[0].get_ydata()[-1] == 0.5


def test_no_two_labels_overlap(tmp_path, monkeypatch):
    logs = [RunLog(write_log(tmp_path / f"a-rather-long-name-{i}", records())) for i in range(5)]
    (panel,) = drawn(monkeypatch, logs, x="tokens").axes
    low, high = panel.get_ylim()
    texts = [panel.xaxis.label, panel.yaxis.label, *panel.get_legend().get_texts()]
    texts += [t for t in panel.get_yticklabels() if low <= t.get_position()[1] <= high]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    for (first, first_box), (second, other) in combinations(boxes, 2):
        assert not first_box.overlaps(other), (first, second)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["base"], 2, "at least two runs"),
        (["base", "nowhere"], 1, "'nowhere' does not exist"),
        (
            ["base", "wide", "--metric", "eval_blue"],
            1,
            "none of the runs has finite values of eval_blue",
        ),
        (["base", "bare", "--x", "tokens"], 1, "no tokens_seen: use --x step"),
    ],
)
def test_incomparable_runs_are_a_one_line_error(runs, flags, code, message, capsys, monkeypatch):
    monkeypatch.chdir(runs[0].parent)
    write_log(Path("bare"), [{"step": 1, "train_loss": 2.0}, {"step": 2, "train_loss": 1.0}])
    assert cli.main(["compare", *flags]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert not Path("comparison.png").exists()
