"""Tests of ``vq.py quality``: runs are grouped by name and compared by the mean of their seeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hfseq.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"))

import vq

pytestmark = pytest.mark.slow


def write(folder, bits, codes=None):
    folder.mkdir()
    steps = [{"step": step, "train_loss": 3.0 - step / 10} for step in (1, 2, 3)]
    if codes is not None:
        steps = [record | {"train_code_perplexity": codes} for record in steps]
    records = [*steps, {"step": 3, "eval_loss": 2.0, "eval_bits_per_byte": bits}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def test_the_ratio_is_that_of_the_means_over_seeds(tmp_path):
    runs = [
        ("full", write(tmp_path / "a", 2.0)),
        ("full", write(tmp_path / "b", 3.0)),
        ("vq", write(tmp_path / "c", 2.6, codes=8.0)),
    ]
    result = vq.compare_runs(runs)
    assert result["mean"] == {"full": 2.5, "vq": 2.6}
    assert result["ratio"]["vq"] == pytest.approx(1.04)
    vq.draw_runs(result, tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def test_the_error_for_an_unfinished_run_names_the_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"metrics\.jsonl"):
        vq.read_run(tmp_path)
