"""Tests of the benchmark command: all suites with tiny models, their tables, and failures."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import harness
import inference
import training

from tests.support.tiers import first

TINY = harness.Options(profile="tiny")


class Inline:
    """Replaces `harness.Process`: runs a contestant in this process, where jax is imported once."""

    def __init__(self, contestant, threads, patience=None, time_budget=None):
        self.answer = {}
        module, _, name = contestant.factory.partition(":")
        try:
            workload = getattr(importlib.import_module(module), name)(**contestant.settings)
            self.workload, self.answer = workload, {"facts": workload.info}
        except Exception as error:
            self.answer = {"error": f"{type(error).__name__}: {error}"}

    def read(self):
        if "error" in self.answer:
            raise RuntimeError(self.answer["error"])
        return self.answer

    def ask(self, command):
        if command == "memory":
            return {"peak_bytes": self.workload.memory()}
        values = self.workload.step()
        return {"seconds": values.pop("seconds", 0.001), "values": values}

    def close(self):
        self.workload.close()


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(harness, "Process", Inline)


def well_formed(text, rows):
    """Checks that a section has a table line per row, all with the same number of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == len(rows) + 2
    for line, row in zip(lines[2:], rows, strict=True):
        assert line.startswith(f"| {row['name']}") and "None" not in line and "nan" not in line


# -- suites

RUN = {
    "limits": "",
    "train": "WMT",
    "inference": "2 x (12|197), float32",
    "generation": "GPT-2 small, greedy",
    "data": "(tokenise|pack|mask|whole batch|clm)",
    "startup": "--help",
    "checkpoint": "",
    "memory": "RoBERTa.*recomputed",
    "scaling": "batch [12]/hfseq",
    "data_scale": "",
    "compile": "dropout 0.1/H200",
    "pipelines": "classify",
    "retrieval": "train",
}


@pytest.mark.parametrize(
    "suite",
    first(harness.SUITES, "limits", "data_scale"),
)
def test_suite_runs_with_tiny_models_and_writes_its_table(
    suite, inline, tmp_path, capfd, monkeypatch
):
    pytest.importorskip("torch")
    monkeypatch.setenv("HFSEQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the command changes it for its processes
    monkeypatch.chdir(tmp_path)
    arguments = [suite, "--tiny", "--peers", "torch", "hfseq", "--rounds", "1", "--output", "out"]
    code = harness.main([*arguments, "--only", f"{suite}/.*{RUN[suite]}"])
    result = json.loads((tmp_path / "out" / "benchmarks" / f"run_{suite}.json").read_text())
    assert code == 0, result["problems"]
    rows = result["rows"]
    assert rows and all(row["status"] == "ok" and row["seconds"] for row in rows)
    # The suite compile does not use device memory.
    assert all((row["peak_memory_gb"] is not None) == (suite != "compile") for row in rows)
    page = (tmp_path / "out" / "benchmarks" / "tables.md").read_text()
    section = page.split(f"<!-- run_{suite} -->")[1].split(f"<!-- /run_{suite} -->")[0]
    well_formed(section, rows)
    assert "run.py" in section and str(tmp_path) not in section and "measured limits" in section
    assert section.strip() in capfd.readouterr().out


@pytest.mark.parametrize("profile", harness.PROFILES)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_rows_have_unique_names_and_existing_factories(profile, device):
    options = harness.Options(profile=profile, device=device)
    assert set(RUN) == set(harness.SUITES)
    names = [
        f"{suite}/{case.name}/{contestant.name}"
        for suite in harness.SUITES
        for case in harness.load_suite(suite).cases(options)
        for contestant in case.contestants
    ]
    assert len(names) == len(set(names)) and len(names) > 60
    for suite in harness.SUITES:
        for case in harness.load_suite(suite).cases(options):
            assert case.rounds >= 1 and case.contestants
            for contestant in case.contestants:
                module, _, name = contestant.factory.partition(":")
                assert callable(getattr(importlib.import_module(module), name))


# -- the command


def test_list_requires_only_the_standard_library():
    """The list does not require an installation of hfseq or of any package."""
    process = subprocess.run(
        [sys.executable, "-S", "-E", str(SCRIPTS / "run.py"), "--list", "--only", "/PyTorch"],
        capture_output=True,
        text=True,
        cwd="/",
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    lines = process.stdout.splitlines()
    assert len(lines) > 20 and all("/PyTorch" in line for line in lines)


def test_only_selects_rows(capsys):
    assert harness.main(["train", "--only", "GPT-2.*float32/hfseq", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "train/GPT-2 small, 2 x 512, float32/hfseq",
        "train/GPT-2 small, 1 x 1024, float32/hfseq",
    ]
    assert harness.main(["--only", "no such row"]) == 2
    assert "matches no row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown suite trian (available: limits, train"),
        (["--rounds", "0"], "--rounds 0: must be greater than 0"),
        (["--only", "("], "--only (:"),
        (["--tag", "a b"], "--tag a b: use only letters"),
        (["--packages", "nowhere"], "--packages nowhere: no such directory"),
        (["--against", "nowhere"], "--against nowhere: no such directory"),
        (["--against", "/"], "--against /: not an hfseq checkout"),
        (["--quick", "--tiny"], "not allowed with"),
    ],
)
def test_invalid_flags(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        harness.main(arguments)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_recorded_command_omits_local_paths():
    arguments = ["train", "--packages", "wheels", "--only", "a b", "--output", "x"]
    command = harness.command("run.py", arguments, ("--output", "--packages"))
    assert command == "python scripts/benchmarks/run.py train --only 'a b'"


def test_other_checkout_is_the_baseline_with_its_factories(tmp_path):
    checkout = tmp_path / "before"
    (checkout / "scripts" / "benchmarks").mkdir(parents=True)
    (checkout / "scripts" / "benchmarks" / "training.py").write_text(
        "import harness\ndef hfseq_step(**settings):\n"
        "    return harness.Workload(lambda: {'seconds': 7.0}, lambda: 1, {'device': 'before'})\n"
    )
    settings = {"model": "gpt2", "dtype": "float32", "size": {}}
    case = harness.comparison_case(
        TINY, training.FACTORIES, settings, "GPT-2", 1.0, ("torch", "hfseq")
    )
    both = harness.add_checkout(case, checkout)
    assert [contestant.name for contestant in both.contestants] == [
        "PyTorch",
        "hfseq, before",
        "hfseq",
    ]
    assert both.baseline == "hfseq, before" and both.contestants[2] == case.contestants[1]
    (row,) = harness.run([both.contestants[1]], rounds=1, warmup=0)
    assert (row.info, row.seconds) == ({"device": "before"}, [7.0])
    assert harness.parse(["train", "--against", str(checkout)]).tag == "against"


# -- failures


def fake(name, factory="steady", **options):
    return harness.Contestant(name, "g", f"fakes:{factory}", **options)


def runner(tmp_path, **options):
    return harness.Runner(TINY.threads, tmp_path, **options)


@pytest.fixture
def fakes(monkeypatch):
    tests_dir = str(Path(__file__).resolve().parent)
    monkeypatch.setenv("PYTHONPATH", tests_dir)
    monkeypatch.syspath_prepend(tests_dir)


def test_time_limit_applies_within_a_case(tmp_path, fakes):
    """A blocked contestant is killed, and weights are not saved after the time limit."""
    case = harness.Case("c", (fake("hfseq", "silent"),), 8.0)
    (row,) = runner(tmp_path, suite_time=0.5).run_suite("train", [case])
    assert row["status"] == "not run: the time limit of the suite (0.5 s) was reached"
    late = harness.Case("c", (fake("hfseq"),), 8.0, weights=("no such model", {}))
    (row,) = runner(tmp_path, suite_time=1e-9).run_suite("train", [late])
    assert row["status"].startswith("not run")


def test_completed_rounds_are_kept_at_the_time_limit(fakes):
    lines = []

    class Short(harness.TimeBudget):
        def remaining(self):
            return 0.3 if any(line.startswith("round") for line in lines) else 100.0

    (row,) = harness.run(
        [fake("a", "stuck", settings={"steps": 2})],
        rounds=50,
        warmup=1,
        time_budget=Short(),
        report=lines.append,
    )
    assert row.status == "ok" and len(row.seconds) == 1


def test_ratio_accounts_for_the_amount_of_work():
    small = harness.Row("a", "g", seconds=[1.0], values=[{"work": 8.0}])
    large = harness.Row("b", "g", seconds=[2.0], values=[{"work": 64.0}])
    assert harness.ratio(large, small) == 4.0


@pytest.mark.slow
def test_contestant_is_killed_after_patience(fakes):
    """A blocked contestant is killed after ``patience`` seconds, and its row reports this."""
    (row,) = harness.run([fake("slow", "silent")], rounds=1, warmup=0, patience=3)
    assert row.status == "failed: no answer within 3 s"


def test_failed_save_of_weights_fails_the_rows(tmp_path, inline, fakes, monkeypatch):
    monkeypatch.setattr(harness, "write_weights", lambda *a, **k: ["failed: no weights: full"])
    case = harness.Case(
        "c", (fake("a"), fake("b", requires=("no_such",))), 1.0, weights=("bert", {})
    )
    rows = runner(tmp_path).run_suite("train", [case])
    assert [row["status"] for row in rows] == ["failed: no weights: full", "not run: no no_such"]


def test_join_keeps_rows_of_an_earlier_run_on_the_same_machine(tmp_path, capsys):
    def result(case, seconds, command, limit, cpu="this"):
        machine = {"cpu": cpu, "cores": 2, "versions": {"jax": "1"}}
        row = {"case": case, "name": "hfseq", "seconds": seconds}
        return {"rows": [row], "machine": machine, "command": command, "limits": {"float32": limit}}

    path = tmp_path / "run_train.json"
    new = result("b", [2.0], "second", 4.0)
    assert harness.load_earlier_result(path, new) is None
    earlier = result("a", [1.0], "first", 5.0)
    earlier["rows"] += [{"case": "b", "name": "hfseq", "seconds": [3.0]}]
    earlier["rows"] += [{"case": "c", "name": "hfseq", "seconds": []}]  # did not run
    path.write_text(json.dumps(earlier))
    harness.join_results(new, harness.load_earlier_result(path, new))
    assert [(row["case"], row["seconds"]) for row in new["rows"]] == [("a", [1.0]), ("b", [2.0])]
    assert (new["command"], new["limits"]) == ("first, then second", {"float32": 5.0})
    with pytest.raises(SystemExit) as stopped:
        harness.load_earlier_result(path, result("b", [2.0], "third", 4.0, cpu="other"))
    assert stopped.value.code == 2 and "another machine" in capsys.readouterr().err


# -- results


def test_different_hidden_states_are_reported():
    def row(name, mean):
        return {"case": "c", "name": name, "dtype": "float32", "facts": {"mean": mean}}

    problems = inference.inference_problems
    assert problems([row("PyTorch", 1.0), row("hfseq", 1.00001)]) == []
    (problem,) = problems([row("PyTorch", 1.0), row("hfseq", 1.1)])
    assert re.search(r"^c: .* hfseq is 1\.1, .* PyTorch .*1$", problem)


@pytest.mark.slow
def test_command_runs_all_peers(tmp_path):
    """Runs two suites in a subprocess, with torch.compile if a compiler is installed."""
    pytest.importorskip("torch")
    process = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "run.py"),
            "startup",
            "train",
            "--tiny",
            "--only",
            "(startup|GPT-2 small, 2 x 16)",
            "--output",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    for suite in ("startup", "train"):
        rows = json.loads((tmp_path / "benchmarks" / f"run_{suite}.json").read_text())["rows"]
        assert {row["status"] for row in rows} <= {"ok", "not run: no g++"}
        assert any(row["name"].startswith("torch.compile") for row in rows)
