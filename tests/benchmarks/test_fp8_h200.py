"""Tests of ``fp8.py h200``: target and packages, product counts, and earlier results."""

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

pytestmark = pytest.mark.slow


def test_a_target_that_would_disable_fp8_is_rejected(tmp_path):
    with pytest.raises(SystemExit, match=r"absent\.txtpb: no such file"):
        training.read_target(tmp_path / "absent.txtpb")
    target = tmp_path / "h200.txtpb"
    target.write_text("gpu_device_info { core_count: 132 }")
    with pytest.raises(SystemExit, match="has no runtime_version"):
        training.read_target(target)


def test_the_error_for_missing_packages_contains_the_command_to_install_them(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match=r"has no jax_plugins(.|\n)*pip install --no-deps"):
        training.use_packages(tmp_path)


def test_a_product_that_is_not_fp8_is_a_problem():
    kernels = {training.FP8_PRODUCT: 11, training.OTHER_PRODUCT: 1}
    wrong = fp8.Counts("gpt2", "fp8_delayed", 12, kernels)
    right = fp8.Counts("gpt2", "bfloat16", 0, {training.OTHER_PRODUCT: 12})
    assert fp8.h200_problems([wrong, right]) == [
        "gpt2 in fp8_delayed: 11 of 12 targeted matrix multiplications are in FP8"
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
    assert fp8.earlier_rows(again, tmp_path) == {
        ("gpt2", "fp8_current"): fp8.Counts("gpt2", "fp8_current", 12, {}, 1.0)
    }
    assert fp8.earlier_rows(result | {"options": {"width": 512}}, tmp_path) == {}
    assert fp8.earlier_rows(result | {"target": "B200"}, tmp_path) == {}
    assert fp8.earlier_rows(result, tmp_path / "none") == {}


def test_a_step_compiled_for_an_h200_has_fp8_in_every_targeted_product(shared, tmp_path):
    """Requires HFSEQ_CUDA_PACKAGES, a folder as described in ``fp8.py h200 --help``."""
    folder, target = os.environ.get("HFSEQ_CUDA_PACKAGES"), shared.parent / "golden"
    target = target / "h200_target.txtpb"
    if not folder or not target.exists():
        pytest.skip("no HFSEQ_CUDA_PACKAGES, or no description of an H200")
    flags = ["--target", str(target), "--packages", folder, "--output", str(tmp_path)]
    completed = subprocess.run(
        [sys.executable, str(SCRIPTS / "fp8.py"), "h200", *flags, "--models", "bert"],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    rows = json.loads((tmp_path / "benchmarks" / "fp8_h200.json").read_text())["rows"]
    assert [r["fp8_products"] for r in rows] == [0, 12, 12]
