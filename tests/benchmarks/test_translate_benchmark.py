"""Tests of the translation benchmark: workloads, comparison and report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import harness
import translation

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


def test_sizes_are_those_of_opus_mt():
    config = translation.configuration({})
    assert (config.vocab_size, config.d_model, config.decoder_layers) == (54688, 512, 6)
    assert config.pad_token_id == config.decoder_start_token_id == 54687
    assert translation.configuration({"layers": 2}).encoder_layers == 2
    words = translation.names(config.vocab_size)
    assert len(set(words)) == 54688 and words[translation.END] == "</s>"


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


def test_extra_rows_and_padding_are_masked():
    ids, mask = translation.padded([[4, 5, 0], [6, 0]], 3, 59)
    np.testing.assert_array_equal(ids, [[4, 5, 0], [6, 0, 59], [4, 5, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 1], [1, 1, 0], [1, 1, 1]])


def test_sentences_are_distinct_and_the_sample_is_fixed(tmp_path):
    table, lines = tmp_path / "pairs.csv", tmp_path / "lines.txt"
    table.write_text("english,spanish\n" + "".join(f"S{i % 30},x\n" for i in range(60)))
    lines.write_text("one\n\ntwo\none\n")
    sample = translation.sentences(table, 20)
    assert len(set(sample)) == 20 and sample == translation.sentences(table, 20)
    assert sorted(translation.sentences(lines, 1000)) == ["one", "two"]


def test_batches_contain_sentences_of_similar_length():
    rows = [[1] * length for length in np.random.default_rng(0).permutation(40) + 1]
    batches = translation.batched(rows, 16)
    assert sorted(map(len, batches)) == [8, 16, 16]
    spans = [max(map(len, batch)) - min(map(len, batch)) for batch in batches]
    assert max(spans) == 15 and sum(map(len, batches)) == 40


def test_all_contestants_use_both_search_modes():
    options = translation.parse(["--sides", *translation.SIDES, "--beams", "5"])
    contestants = translation.contestants(options, "w")
    assert [c.name for c in contestants if c.group == "beam 5"] == [
        "PyTorch",
        "CTranslate2",
        "hfseq",
        "hfseq bfloat16",
    ]
    assert [c.settings["beams"] for c in contestants] == [1] * 4 + [5] * 4
    assert len({json.dumps(c.settings | {"dtype": ""}, default=str) for c in contestants}) == 2


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
