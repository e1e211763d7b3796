"""The command for whoever has a device: it runs to its end in small, and tells what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import device


def test_what_is_wrong_or_failed_is_told_and_what_is_refused_is_not():
    right = {"implementation": "flash", "shape": "packed", "right": True}
    results = {
        "attention": {"rows": [right, right | {"right": False, "error": 0.5}, {"refused": "why"}]},
        "training": {"rows": [{"model": "gpt2", "failed": "no memory"}]},
        "speed": {"rows": [], "problem": "took more than 1 seconds"},
    }
    first, second, third = device.wrong(results)
    assert first.startswith("attention: flash packed is wrong")
    assert second == "training: gpt2 failed: no memory"
    assert third == "speed: took more than 1 seconds"


def test_a_part_that_takes_too_long_is_ended_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device, "PARTS", {"facts": 0.01, "fp8": 60})
    assert device.main(["--toy", "--only", "facts", "fp8", "--output", str(tmp_path)]) == 1
    assert "facts: took more than 0.01 seconds" in capsys.readouterr().out
    (path,) = (tmp_path / "benchmarks").glob("device_*.json")
    assert json.loads(path.read_text())["fp8"]["rows"] == [
        {"refused": "a toy run has no FP8 units"}
    ]


@pytest.mark.slow
def test_a_toy_run_gets_to_its_end_and_writes_its_table(tmp_path, monkeypatch):
    # The limits are those of an accelerator; two cores that others use take longer.
    monkeypatch.setattr(device, "PARTS", dict.fromkeys(device.PARTS, 900))
    assert device.main(["--toy", "--output", str(tmp_path)]) == 0
    table = (tmp_path / "benchmarks.md").read_text()
    assert "| direct | dropout |" in table or "| explicit | dropout |" in table
    assert "| roberta | 0.1 | 0.0e+00 | yes |" in table and "RoBERTa" in table
