"""Steps compiled for an H200 without one: what the command needs, counts, keeps and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import fp8
import harness
import training


def test_a_target_that_would_switch_fp8_off_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="there is no such file"):
        training.read_target(tmp_path / "absent.txtpb")
    target = tmp_path / "h200.txtpb"
    target.write_text("gpu_device_info { core_count: 132 }")
    with pytest.raises(SystemExit, match="has no runtime_version"):
        training.read_target(target)


def test_a_folder_without_the_compiler_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match=r"has no jax_plugins(.|\n)*pip install --no-deps"):
        training.use_packages(tmp_path)


def test_a_product_that_is_not_fp8_is_a_problem():
    kernels = {training.FP8_PRODUCT: 11, training.PRODUCT: 1}
    wrong = fp8.Counts("gpt2", "fp8_delayed", 12, kernels)
    right = fp8.Counts("gpt2", "bfloat16", 0, {training.PRODUCT: 12})
    assert fp8.h200_problems([wrong, right]) == [
        "gpt2 in fp8_delayed: 11 of 12 targeted products are FP8"
    ]


def test_a_run_adds_to_an_earlier_one_of_the_same_sizes(tmp_path):
    row = {"name": "gpt2", "group": "fp8_current", "targeted": 12, "kernels": {}, "seconds": 1.0}
    result = {
        "benchmark": "fp8_h200",
        "target": "H200",
        "machine": {"versions": {"jax": "1"}},
        "options": {"width": 256, "models": ["gpt2"]},
        "rows": [row | {"status": "ok", "fp8_products": 12}],
    }
    harness.write_json(tmp_path / "benchmarks" / "fp8_h200.json", result)
    again = result | {"options": {"width": 256, "models": ["bert"]}}
    assert fp8.kept(again, tmp_path) == {
        ("gpt2", "fp8_current"): fp8.Counts("gpt2", "fp8_current", 12, {}, 1.0)
    }
    assert fp8.kept(result | {"options": {"width": 512}}, tmp_path) == {}
    assert fp8.kept(result | {"target": "B200"}, tmp_path) == {}
    assert fp8.kept(result, tmp_path / "none") == {}


def test_the_recorded_command_makes_the_whole_table_and_names_no_place(tmp_path):
    given = [*("--target", str(tmp_path / "h200.txtpb")), *("--packages", str(tmp_path))]
    options = fp8.parse_h200([*given, "--models", "gpt2", "--layers", "2", "--cublas"])
    assert fp8.h200_command(options) == (
        "python scripts/benchmarks/fp8.py h200 --target h200.txtpb --packages DIR --layers 2 "
        "--cublas"
    )


@pytest.mark.slow
def test_a_step_compiled_for_an_h200_has_fp8_in_every_targeted_product(shared, tmp_path):
    """Needs HFSEQ_CUDA_PACKAGES, a folder as ``fp8.py h200 --packages`` describes it."""
    folder, target = os.environ.get("HFSEQ_CUDA_PACKAGES"), shared.parent / "golden"
    target = target / "h200_target.txtpb"
    if not folder or not target.exists():
        pytest.skip("no HFSEQ_CUDA_PACKAGES, or no description of an H200")
    flags = ["--target", str(target), "--packages", folder, "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "fp8.py"), "h200", *flags, "--models", "bert"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "benchmarks" / "fp8_h200.json").read_text())["rows"]
    assert [r["fp8_products"] for r in rows] == [0, 12, 12]
