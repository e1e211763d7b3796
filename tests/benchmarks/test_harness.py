"""Tests of the benchmark harness with workloads that have no dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS_DIR = Path(__file__).resolve().parent
SCRIPTS = TESTS_DIR.parent.parent / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import harness


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS_DIR))


def contestant(name, factory="steady", group="g", **settings):
    return harness.Contestant(name, group, f"fakes:{factory}", settings)


def test_contestants_run_in_separate_processes():
    lines = []
    rows = harness.run(
        [contestant("a"), contestant("b", loss=4.0)], rounds=3, warmup=1, report=lines.append
    )
    assert [row.name for row in rows] == ["a", "b"]
    for row in rows:
        assert row.status == "ok" and row.info == {"device": "fake"}
        assert len(row.seconds) == 3 and len(row.values) == 4
        assert row.peak_bytes == 3_000_000
    processes = {value["process"] for row in rows for value in row.values}
    assert len(processes) == 2 and os.getpid() not in processes
    assert [value["loss"] for value in rows[1].values] == [4.0, 2.0, 4 / 3, 1.0]
    rounds = [line.split()[2] for line in lines if line.startswith("round")]
    assert rounds == ["b", "a", "a", "b", "b", "a"] or rounds == ["a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize("start_together", [False, True])
def test_contestants_start_one_after_the_other_or_together(monkeypatch, start_together):
    events = []

    class RecordedProcess(harness.Process):
        def __init__(self, contestant, *args):
            events.append(f"start {contestant.name}")
            super().__init__(contestant, *args)

        def read(self, time_budget=None):
            answer = super().read(time_budget)
            events.extend(["ready"] if "facts" in answer else [])
            return answer

    monkeypatch.setattr(harness, "Process", RecordedProcess)
    contestants = [contestant("a"), contestant("broken", "broken"), contestant("b")]
    rows = harness.run(contestants, rounds=1, warmup=0, start_together=start_together)
    assert [row.status == "ok" for row in rows] == [True, False, True]
    starts = ["start a", "start broken", "start b"]
    one_by_one = ["start a", "ready", "start broken", "start b", "ready"]
    assert events == ([*starts, "ready", "ready"] if start_together else one_by_one)


def test_settle_steps_are_not_timed():
    lines = []
    (row,) = harness.run([contestant("a")], rounds=2, warmup=1, settle=2, report=lines.append)
    assert len(row.seconds) == 2 and len(row.values) == 9
    assert [line.startswith("round") for line in lines] == [False] * 5 + [True] + [False] * 2 + [
        True
    ]


def test_environment_applies_to_one_contestant():
    marked = harness.Contestant("a", "g", "fakes:steady", environment={"MARK": "x"})
    rows = harness.run([marked, contestant("b")], rounds=1, warmup=0)
    assert [row.info.get("mark") for row in rows] == ["x", None]


def test_missing_package_is_reported_and_others_run():
    contestant_without_package = harness.Contestant(
        "absent", "g", "fakes:steady", {}, ("json", "no_such_package")
    )
    rows = harness.run([contestant_without_package, contestant("there")], rounds=1, warmup=0)
    assert rows[0].status == "not run: no no_such_package" and rows[0].seconds == []
    assert rows[1].status == "ok" and len(rows[1].seconds) == 1


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("failing", {"steps": 1}, "ValueError: out of luck"),
        ("broken", {}, "OSError: no such weights"),
        ("exiting", {}, "exit code 9"),
        ("steady", {"unknown": 1}, "TypeError"),
    ],
)
def test_failure_is_reported_and_others_run(name, settings, reason):
    rows = harness.run(
        [contestant("bad", name, **settings), contestant("good")], rounds=2, warmup=0
    )
    assert rows[0].status.startswith("failed: ") and reason in rows[0].status
    assert rows[0].seconds == []
    assert rows[1].status == "ok" and len(rows[1].seconds) == 2


def test_ratio_is_the_median_of_ratios_per_round():
    slow = harness.Row("slow", "g", seconds=[2.0, 20.0, 4.0])
    fast = harness.Row("fast", "g", seconds=[1.0, 10.0, 1.0])
    assert harness.ratio(fast, slow) == 2.0
    assert harness.ratio(fast, harness.Row("none", "g")) is None


def test_spread_and_median():
    row = harness.Row("a", "g", seconds=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert row.median == 3.0 and row.spread == pytest.approx(1 / 3)
    assert harness.Row("a", "g").median is None and harness.Row("a", "g").spread is None


def test_machine_info():
    info = harness.machine_info()
    assert info["cores"] >= 1 and info["memory_gb"] > 0
    assert info["versions"]["numpy"]
    json.dumps(info)


def test_peak_memory_of_this_process():
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import harness;"
        "a = harness.host_peak_bytes(); x = bytearray(b'1') * 200_000_000; del x;"
        "print(harness.host_peak_bytes() - a)"
    )
    growth = int(
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    )
    assert 150e6 < growth < 300e6


def test_section_is_replaced_between_its_markers(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text("# Title\n\n<!-- one -->\nold\n<!-- /one -->\n\nafter\n")
    harness.write_section(page, "one", "new")
    assert page.read_text() == "# Title\n\n<!-- one -->\n\nnew\n\n<!-- /one -->\n\nafter\n"
    harness.write_section(page, "two", "second")
    assert page.read_text().endswith("after\n\n<!-- two -->\n\nsecond\n\n<!-- /two -->\n")
    text = page.read_text()
    harness.write_section(page, "two", "second")
    assert page.read_text() == text


def test_single_marker_is_an_error_and_keeps_the_file(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text("<!-- one -->\ntext\n")
    with pytest.raises(ValueError, match="only one of the markers"):
        harness.write_section(page, "one", "new")
    assert page.read_text() == "<!-- one -->\ntext\n"


@pytest.mark.slow
def test_json_is_written_atomically(tmp_path):
    path = tmp_path / "deep" / "x.json"
    harness.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        harness.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_memory_of_the_pytorch_import(monkeypatch):
    import inference

    title, format_cell = harness.TORCH_MEMORY
    assert title == "PyTorch import" and harness.TORCH_MEMORY in inference.COLUMNS
    assert format_cell({"facts": {"torch_bytes": 1.8e8}}) == "0.18 GB"
    assert format_cell({"facts": {}}) == format_cell({}) == harness.ABSENT
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert harness.import_torch() == {}  # torch was imported before
