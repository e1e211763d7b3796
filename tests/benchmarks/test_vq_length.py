"""Tests of the VQ Transformer benchmark: measurements, derived values and report."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import harness
import vq

pytestmark = pytest.mark.slow

TINY = [
    *("--lengths", "64", "128", "--hidden_size", "16", "--head_dim", "8", "--value_dim", "16"),
    *("--codes", "8", "--window", "16", "--block", "16", "--layers", "1", "--vocab_size", "20"),
    *("--rounds", "2", "--decode_tokens", "64", "--report_every", "32", "--chunk", "16"),
    *("--no_check", "--memory_gb", "1"),
]


@pytest.fixture(scope="module")
def in_process():
    """A replacement of ``harness.run`` in this process that compiles every point once."""
    ready: dict[str, harness.Workload] = {}

    def run(contestants, *, rounds, warmup=0, threads=None, report=print):
        rows = []
        for contestant in contestants:
            key = json.dumps([contestant.factory, contestant.settings], sort_keys=True)
            if key not in ready:
                module, _, name = contestant.factory.partition(":")
                factory = getattr(importlib.import_module(module), name)
                ready[key] = factory(**contestant.settings)
            row = harness.Row(contestant.name, contestant.group, info=ready[key].info)
            for number in range(-warmup, rounds):
                started = time.perf_counter()
                row.values.append(ready[key].step())
                if number >= 0:
                    row.seconds.append(time.perf_counter() - started)
            row.peak_bytes = ready[key].memory()
            rows.append(row)
        return rows

    return run


SLOW = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("train", "memory", "compare")]


@pytest.mark.parametrize("mode", ["forward", "decode", *SLOW])
def test_every_mode_measures_and_records(mode, in_process, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(harness, "run", in_process)
    assert vq.costs([mode, *TINY, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "benchmarks" / f"vq_{mode}.json").read_text())
    plot = tmp_path / "benchmarks" / f"vq_{mode}.png"
    assert plot.exists() == (mode != "compare")
    assert f"<!-- vq_{mode} -->" in (tmp_path / "benchmarks" / "tables.md").read_text()
    assert str(tmp_path) not in json.dumps(result)
    check = {"decode": check_decoding, "compare": check_comparison}.get(mode, check_lengths)
    check(result)
    assert capsys.readouterr().out.strip().endswith("--no_check --memory_gb 1`")


def check_lengths(result):
    assert {(row["name"], row["length"]) for row in result["rows"]} == {
        (name, length) for name in ("vq recurrent", "full") for length in (64, 128)
    }
    for row in result["rows"]:
        assert row["status"] == "ok" and row["microseconds_per_token"] > 0
        assert row["compiled_bytes"] > row["temporary_bytes"] > 0
    assert [curve["lengths"] for curve in result["curves"]] == [[64, 128]] * 2
    if result["benchmark"] == "vq_memory":
        assert [each["length"] for each in result["state_bytes"]] == [64, 128]
    else:
        assert len(result["rows"][0]["seconds"]) == 4, "two rounds in each of two passes"
        assert "vq recurrent and full (shga)" in result["crossovers"][0]["text"]


def check_comparison(result):
    assert {row["what"] for row in result["rows"]} == {"train", "forward"}
    assert result["ratios"].keys() == {
        f"{pass_name} shga {length}" for pass_name in ("train", "forward") for length in (64, 128)
    }
    assert all(value["vq recurrent"] > 0 for value in result["ratios"].values())


def check_decoding(result):
    (row,) = result["rows"]
    assert [chunk["tokens"] for chunk in row["chunks"]] == [32, 64]
    assert len({chunk["state_bytes"] for chunk in row["chunks"]}) == 1
    assert all(chunk["tokens_missing"] == 0 for chunk in row["chunks"])
    assert row["chunks"][0]["memory_bytes"] > 0 and row["tokens_per_second"] > 0


def test_a_point_that_exceeds_the_memory_is_marked_and_not_run(in_process, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(harness, "run", in_process)
    limits = ["--lengths", "64", "--memory_gb", "0.0000001", "--output", str(tmp_path)]
    assert vq.costs(["forward", *TINY, *limits]) == 1
    result = json.loads((tmp_path / "benchmarks" / "vq_forward.json").read_text())
    assert {row["status"] for row in result["rows"]} == {"does not fit"}
    assert all(row["compiled_bytes"] and not row["seconds"] for row in result["rows"])
    assert result["curves"][1]["does_not_fit"] == [64]
    assert "| does not fit |" in (tmp_path / "benchmarks" / "tables.md").read_text()


def test_a_growing_state_and_wrong_counts_are_reported():
    chunk = {"state_bytes": 8, "tokens_missing": 0, "memory_bytes": 1e8}
    row = {"name": "shga", "deviation": 0.01, "chunks": [chunk] * 3}
    assert vq.decoding_problems(row) == []
    last = {"state_bytes": 9, "tokens_missing": 2, "memory_bytes": 2e8}
    problems = vq.decoding_problems(row | {"deviation": 0.3, "chunks": [chunk, chunk, last]})
    assert [
        expected in text
        for expected, text in zip(
            ("size of the state", "token counts", "deviates by 30%", "from 100 to 200 MB"),
            problems,
            strict=True,
        )
    ] == [True] * 4
