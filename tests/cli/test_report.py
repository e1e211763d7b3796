"""``hfseq report``: running, finished and failed runs."""

from __future__ import annotations

import json
import re
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hfseq import cli
from hfseq.cli import report
from hfseq.cli import text as terminal
from hfseq.cli.text import draw_curve, format_duration, format_table
from hfseq.errors import DataError
from hfseq.reports.log import RunLog, summarize
from tests.support.run_logs import START, records, write_log


def test_a_finished_run_is_summed_up(tmp_path, capsys):
    folder = write_log(tmp_path / "my-run", records())
    assert cli.main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    for text in (
        *("my-run: finished", "100 of 100 (100%), epoch 2.00", "80k", "3:20 min of training"),
        *("400 tokens/s, MFU 25.0%, peak memory 1.50 GB", "6.673 at first, 2.04 now"),
        *("eval_loss 2.14 at step 100", "step  eval_loss  eval_accuracy", "2.14            0.5"),
    ):
        assert text in out, text
    assert "eval_runtime" not in out and "warning" not in out and "\033" not in out


def test_running_run_shows_the_remaining_time(tmp_path):
    log = RunLog(write_log(tmp_path, records(40)))
    summary = summarize(log, now=START + 90)
    assert (summary["status"], summary["step"], summary["total_steps"]) == ("running", 40, 100)
    assert summary["seconds_to_go"] == pytest.approx(120)
    assert summary["tokens_per_second"] == 400 and summary["warnings"] == []


def test_silent_run_is_reported_as_stopped_with_advice(tmp_path):
    summary = summarize(RunLog(write_log(tmp_path, records(40))), now=START + 90_000)
    assert summary["status"] == "stopped" and summary["seconds_to_go"] is None
    assert "stopped at step 40 of 100; run the same command" in summary["warnings"][0]


def test_slow_steps_do_not_count_as_stopped(tmp_path):
    slow = [{**record, "time": 200 * record["time"]} for record in records(40)]
    assert (
        summarize(RunLog(write_log(tmp_path, slow)), now=200 * (START + 90))["status"] == "running"
    )


def test_log_without_flags_ends_at_its_last_record(tmp_path):
    folder = write_log(tmp_path, [record for record in records() if "run" not in record])
    assert summarize(RunLog(folder))["status"] == "ended"
    (folder / "eval_results.json").write_text("{}")
    assert summarize(RunLog(folder))["status"] == "finished"
    (folder / "training_args.json").write_text('{"max_steps": 400}')
    assert summarize(RunLog(folder))["total_steps"] == 400


def test_a_half_written_last_line_is_left_out_and_mentioned(tmp_path, capsys):
    folder = write_log(tmp_path, records(), tail='{"step": 105, "train_lo')
    assert cli.main(["report", str(folder), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step"] == 100
    assert summary["warnings"] == [
        "the last line of the log is incomplete (still being written, or truncated)"
    ]


def test_nan_spikes_and_resumes_are_reported(tmp_path):
    log = records()
    (at,) = (i for i, r in enumerate(log) if r["step"] == 75)
    log[at] = {**log[at], "train_loss": 9.0}
    log[14] = {**log[14], "train_loss": None}
    log.insert(13, {"step": 50, "time": START, "run": {"total_steps": 100}})
    summary = summarize(RunLog(write_log(tmp_path, log)))
    assert summary["resumed_at"] == [50]
    assert any("NaN or infinite at step 60" in text for text in summary["warnings"])
    assert any("jumped up at step 75" in text for text in summary["warnings"])


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ({}, ("eval_loss", 100)),
        ({"metric_for_best_model": "accuracy"}, ("eval_accuracy", 100)),
        (
            {"metric_for_best_model": "eval_accuracy", "greater_is_better": False},
            ("eval_accuracy", 20),
        ),
        ({"metric_for_best_model": "eval_bleu"}, None),
    ],
)
def test_the_best_evaluation_is_that_of_the_run_s_metric(tmp_path, flags, best):
    reported = summarize(RunLog(write_log(tmp_path, records(**flags))))["best"]
    assert (reported and (reported["metric"], reported["step"])) == best


def test_the_log_itself_may_be_named_and_the_curve_is_written(tmp_path, capsys):
    folder = write_log(tmp_path / "run", records())
    image = tmp_path / "plots" / "curve.png"
    assert cli.main(["report", str(folder / "metrics.jsonl"), "--plot", str(image)]) == 0
    width, height = struct.unpack(">II", image.read_bytes()[16:24])
    assert (width, height) == (1200, 750)
    assert f"wrote {image}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nowhere", "nowhere' does not exist"),
        (lambda p: p, "has no metrics.jsonl"),
        (lambda p: write_log(p / "empty", []), "contains no records"),
        (lambda p: write_log(p / "noise", [], tail="\x00\x01 {]\n[1]\n"), "contains no records"),
    ],
)
def test_non_run_exits_with_1_and_one_line(tmp_path, capsys, make, message):
    assert cli.main(["report", str(make(tmp_path))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    with pytest.raises(DataError):
        RunLog(make(tmp_path))


def test_a_log_that_may_not_be_read_is_one_line(tmp_path, capsys, monkeypatch):
    folder = write_log(tmp_path, records())

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(folder / "metrics.jsonl"))

    monkeypatch.setattr(Path, "open", denied)
    assert cli.main(["report", str(folder)]) == 1
    assert "Permission denied" in capsys.readouterr().err


def test_unwritable_plot_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    folder = write_log(tmp_path / "run", records())
    assert cli.main(["report", str(folder), "--plot", str(tmp_path / "file" / "x.png")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_watching_ends_with_the_run(tmp_path, capsys, monkeypatch):
    now = time.time() - START
    folder = write_log(
        tmp_path, [{**record, "time": record["time"] + now} for record in records(40)]
    )
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            write_log(folder, records())

    # Do not patch the time module itself: threads of other tests may call sleep.
    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=sleep))
    assert cli.main(["report", str(folder), "--watch", "0.1"]) == 0
    states = re.findall(r": (running|finished)$", capsys.readouterr().out, flags=re.M)
    assert states == ["running"] * 3 + ["finished"] and waits == [0.1] * 3


def test_watching_can_be_left_quietly(tmp_path, monkeypatch):
    now = time.time() - START
    folder = write_log(tmp_path, [{**r, "time": r["time"] + now} for r in records(40)])

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=interrupt))
    assert cli.main(["report", str(folder), "--watch"]) == 0


@pytest.mark.parametrize("flags", [["--watch", "0"], ["--watch", "5", "--json"]])
def test_watching_wants_seconds_and_a_reader(tmp_path, capsys, flags):
    assert cli.main(["report", str(write_log(tmp_path, records())), *flags]) == 2
    assert "--watch requires" in capsys.readouterr().err


# -- the curve in text


def test_a_falling_curve_falls_from_the_left_to_the_right(monkeypatch):
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(terminal.sys, "stdout", Ascii())
    lines = draw_curve([(1, 9.0), (2, 6.0), (3, 3.0)], 26, 5)
    assert lines[0].startswith("9 |*") and lines[-2].startswith("3 |")
    tops = [line.split("|")[1].find("*") for line in lines[:-1]]
    assert tops == sorted(tops) and lines[-2].endswith("*")
    assert lines[-1].split() == ["1", "3"] and max(map(len, lines)) <= 26


@pytest.mark.parametrize("points", [[(5, 1.0)], [(5, 1.0), (6, 1.0)], [(5, 1.0), (5, 2.0)]])
def test_a_curve_of_one_point_or_one_height_is_drawn(points):
    lines = draw_curve(points, 60)
    assert len(lines) == 9 and any(ord(letter) > 0x2800 for letter in "".join(lines))
    assert draw_curve([], 60) == []


def test_columns_that_do_not_fit_are_left_out():
    rows = [["step", "a", "b"], ["1", "2" * 30, "3"]]
    assert format_table(rows, 20) == ["step", "1"]
    assert format_table(rows, 50)[1].split() == ["1", "2" * 30, "3"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (187, "3:07 min"), (9000, "2:30 h"), (3.1 * 86400, "3.1 days")],
)
def test_durations_are_written_as_people_do(seconds, text):
    assert format_duration(seconds) == text


def test_the_best_of_bits_per_byte_is_the_smallest(tmp_path):
    from hfseq.reports.log import RunLog, summarize

    lines = [
        {"step": step, "time": 1.0, "eval_bits_per_byte": value}
        for step, value in ((1, 3.0), (2, 2.5), (3, 2.8))
    ]
    flags = {"metric_for_best_model": "bits_per_byte"}
    (tmp_path / "training_args.json").write_text(json.dumps(flags))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = summarize(RunLog(tmp_path))["best"]
    assert best == {"metric": "eval_bits_per_byte", "value": 2.5, "step": 2}
