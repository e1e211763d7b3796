"""Tests of the translation benchmark: workloads, comparison and report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import harness
import translation

pytestmark = pytest.mark.slow

TINY = {
    "layers": 1,
    "vocab_size": 60,
    "d_model": 32,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "init_std": 0.4,
}
BATCHES = [[[5, 9, 0], [7, 1, 8, 33, 0]], [[12, 0]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("weights")
    translation.save_weights(str(path), TINY)
    (path / "sources.json").write_text(json.dumps(BATCHES))
    return str(path)


@pytest.mark.parametrize("beams", [1, 3])
def test_all_sides_return_the_same_translations(folder, beams):
    pytest.importorskip("ctranslate2")
    settings = {"folder": folder, "size": TINY, "beams": beams, "new_tokens": 5}
    makers = (
        translation.torch_translate,
        translation.hfseq_translate,
        translation.ctranslate2_translate,
    )
    results = []
    for make in makers:
        workload = make(**settings, dtype="float32")
        results.append([workload.step()["tokens"] for _ in BATCHES])
        assert workload.step()["tokens"] == results[-1][0], (
            "after the last batch, the first one is translated again"
        )
    assert [len(tokens) for tokens in results[0]] == [2, 1]
    assert all(len(row) == 5 for batch in results[0] for row in batch)
    assert results[0] == results[1] == results[2]
    assert len({tuple(row) for batch in results[0] for row in batch}) == 3, "all rows are equal"


def row(name, seconds, tokens):
    values = [{"tokens": batch} for batch in tokens]
    return harness.Row(name, "greedy", seconds=seconds, values=values, peak_bytes=10**9)


def test_recorded_values_and_the_printed_section():
    rows = [
        row("PyTorch", [2.0, 4.0], [[[1], [2]], [[3], [4]]]),
        row("CTranslate2", [1.0, 1.0], [[[1], [2]], [[3], [9]]]),
        row("hfseq", [1.0, 1.0], [[[1], [9]], [[9], [4]]]),
        harness.Row("hfseq bfloat16", "greedy", status="not run: no jax"),
    ]
    shares = translation.agreement(rows)
    assert shares == {"greedy": {"PyTorch": 1.0, "CTranslate2": 0.75, "hfseq": 0.5}}
    assert translation.disagreements(shares, 0.5) == []
    assert "only 50.0% of the sentences" in translation.disagreements(shares, 0.98)[0]
    summaries = [translation.summary(r, rows, 4) for r in rows]
    assert summaries[2]["ratios"] == {"PyTorch": 3.0, "CTranslate2": 1.0}
    assert summaries[2]["sentences_per_second"] == 2.0
    result = {
        "options": vars(translation.parse([])) | {"layers": 2},
        "command": "python x",
        "threads": 2,
        "machine": harness.machine_info(),
        "agreement": shares,
        "rows": summaries,
        "sentences": 4,
        "source_tokens": 9.2,
    }
    text = translation.section(result)
    assert "| hfseq | greedy | 2.0 | 3.00x | 1.00x | 1.00 GB |" in text
    assert "| hfseq bfloat16 (not run: no jax) | greedy | - |" in text
    assert "CTranslate2 75.0%, hfseq 50.0%" in text and "4 sentences of 9.2 tokens" in text
