"""Tests of the accelerator validation: toy runs, problems, time limits and tables."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import device

pytestmark = pytest.mark.slow


def test_wrong_and_failed_rows_are_problems_but_skipped_rows_are_not():
    right = {"implementation": "flash", "shape": "packed", "right": True}
    results = {
        "attention": {"rows": [right, right | {"right": False, "error": 0.5}, {"refused": "why"}]},
        "training": {"rows": [{"model": "gpt2", "failed": "no memory"}]},
        "speed": {"rows": [], "problem": "took more than 1 seconds"},
    }
    first, second, third = device.find_problems(results)
    assert first.startswith("attention: flash packed is wrong")
    assert second == "training: gpt2 failed: no memory"
    assert third == "speed: took more than 1 seconds"


def test_part_is_killed_at_its_time_limit_and_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device, "PARTS", {"flags": 0.01, "facts": 60})
    assert device.main(["--toy", "--only", "flags", "facts", "--output", str(tmp_path)]) == 1
    assert "flags: took more than 0.01 seconds" in capsys.readouterr().out
    (path,) = (tmp_path / "benchmarks").glob("device_*.json")
    (fact,) = json.loads(path.read_text())["facts"]["rows"]
    assert fact["device"] == "cpu" and fact["tflops"] > 0 and fact["copy_gbs"] > 0


def test_nan_error_is_wrong_at_any_position():
    limits = device.LIMITS["bfloat16"]
    assert device.check_errors([1e-3, 1e-3, 2e-3, 1e-3], limits)["right"]
    for position in range(4):
        errors = [1e-3] * 4
        errors[position] = math.nan
        assert not device.check_errors(errors, limits)["right"]
    assert math.isnan(device.check_errors([1e-3, 1e-3, math.nan, 1e-3], limits)["gradient_error"])


def test_results_of_other_parts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "local_device", lambda: ("cpu", "a device"))
    path = tmp_path / "benchmarks" / "device_a_device.json"
    device.harness.write_json(path, {"training": {"rows": [], "seconds": 1.0}})
    assert device.main(["--toy", "--only", "facts", "--output", str(tmp_path)]) == 0
    assert list(json.loads(path.read_text())) == ["training", "facts"]


def test_time_limit_keeps_finished_rows_and_kills_children(tmp_path, monkeypatch):
    child = tmp_path / "child"
    script = tmp_path / "part.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "print('{\"right\": true}', flush=True)\n"
        "asleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "started = subprocess.Popen(asleep, stdout=subprocess.DEVNULL)\n"
        f"open({str(child)!r}, 'w').write(str(started.pid))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(device, "__file__", str(script))
    monkeypatch.setattr(device, "PARTS", {"facts": 5})
    result = {"rows": []}
    row_counts = []
    device.run_part("facts", True, result, lambda: row_counts.append(len(result["rows"])))
    assert result["rows"] == [{"right": True}] and row_counts == [1, 1]
    assert result["problem"] == "took more than 5 seconds"
    for _ in range(50):
        status = Path("/proc", child.read_text(), "stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        os.kill(int(child.read_text()), 9)
        pytest.fail("a child process of a part still runs after the time limit")


def test_failed_contestant_is_a_problem():
    missing_values = dict.fromkeys(("median_seconds", "rate", "ratio", "peak_memory_gb"))
    row = {
        "name": "hfseq",
        "case": "GPT-2",
        "status": "failed: no memory",
        "values": [],
        **missing_values,
    }
    (problem,) = device.find_problems({"speed": {"rows": [device.suite_row(row)]}})
    assert problem == "speed:  failed: GPT-2: hfseq failed: no memory"
    assert "failed" not in device.suite_row(row | {"status": "not run: no torch"})


def test_losses_must_match_the_cpu_and_repeated_runs():
    cpu = [7.0, 6.5]
    near, far = [7.0001, 6.5], [7.01, 6.5]
    right = {"whole": near, "again": near, "resumed": near, "half": far}
    assert device.compare_losses(right, cpu)["right"]
    for wrong in (
        {"whole": far, "again": far, "resumed": far},
        {"half": [7.5, 6.5]},
        {"again": [7.0, 6.5]},
        {"resumed": [7.0, 6.5]},
        {"half": [math.nan, 6.5]},
    ):
        assert not device.compare_losses(right | wrong, cpu)["right"], wrong


def test_missed_targets_are_in_the_table_but_not_problems():
    def row(name: str, rate: float, title: str = "GPT-2 124M") -> dict:
        return {
            "name": name,
            "case": f"{title}, 16 x 1024",
            "title": title,
            "rate": rate,
            "mfu": 0.4,
            "peak_memory_gb": 9.5,
            "planned_gb": None,
        }

    rows = [row("torch.compile", 300e3), row("hfseq", 260e3), row("hfseq, xla", 290e3)]
    results = {"speed": {"rows": rows}}
    line = "| GPT-2 124M, 16 x 1024 | hfseq | 260,000 | 40.0% | 9.50 | – |"
    assert line in device.table(results)
    missed = [
        "GPT-2 124M, 16 x 1024: 0.87 times torch.compile",
        "GPT-2 124M, 16 x 1024: 0.90 times hfseq, xla",
    ]
    assert device.missed_targets(results) == missed and device.find_problems(results) == []
    device_facts = dict.fromkeys(("count", "tflops", "copy_gbs"), 1) | {
        "jax": "",
        "device": "NVIDIA H200",
    }
    results["facts"] = {"rows": [device_facts]}
    assert device.missed_targets(results) == [
        "GPT-2 124M, 16 x 1024: 260,000 tokens/s of 350,000",
        *missed,
    ]
    assert f"Missed: {missed[1]}." in device.table(results)
    results["speed"]["rows"] = [row("torch.compile", 300e3), row("hfseq", 360e3)]
    assert device.missed_targets(results) == []


def test_toy_run_writes_its_table(tmp_path, monkeypatch):
    # The time limits are meant for accelerators, so this CPU run extends them.
    monkeypatch.setattr(device, "PARTS", dict.fromkeys(device.PARTS, 900))
    assert device.main(["--toy", "--output", str(tmp_path)]) == 0
    table = (tmp_path / "benchmarks.md").read_text()
    assert "| direct | dropout |" in table or "| explicit | dropout |" in table
    assert re.search(r"\| gpt2 \| 0.1 \| 0.0e\+00 \| \S+ \| equal, equal \|", table)
    assert "RoBERTa" in table and "| fp8_delayed |" in table
    assert "| xla_gpu_deterministic_ops=true |" in table
