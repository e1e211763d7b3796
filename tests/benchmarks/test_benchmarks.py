"""Tests of the training and generation benchmarks: contestants, comparisons and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"
sys.path.insert(0, str(SCRIPTS))

import fp8
import harness
import inference
import training

pytestmark = pytest.mark.slow

ENCODER = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
BART = {
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
TINY = {
    "roberta": ENCODER,
    "bert": ENCODER,
    "gpt2": {"n_embd": 32, "n_head": 4},
    "t5": {"d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8},
    "bart": BART,
}


def tiny(name):
    return TINY[name] | {"vocab_size": 120, "layers": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Returns a function that saves tiny weights of a model once and returns their path."""
    parent = tmp_path_factory.mktemp("weights")

    def write(name):
        path = parent / name
        if not path.exists():
            training.save_weights(str(path), name, tiny(name))
        return str(path)

    return write


# -- sizes and flags


def test_invalid_sizes_are_rejected():
    with pytest.raises(ValueError, match="GPT2Config has no .*n_heads"):
        training.make_config("gpt2", {"n_heads": 3})
    with pytest.raises(SystemExit):
        training.parse(["--model", "gpt2", "--target_length", "8"])
    with pytest.raises(SystemExit, match="--config_overrides n_embd: .*name=value"):
        harness.size_from_flags(training.parse(["--config_overrides", "n_embd"]))
    with pytest.raises(SystemExit):
        fp8.parse(["--widths", "100"])


@pytest.mark.parametrize("name", ["roberta", "gpt2", "bart"])
def test_hfseq_and_pytorch_have_the_same_losses(name, weights):
    pytest.importorskip("torch")
    settings = {
        "model": name,
        "dtype": "float32",
        "rows": 2,
        "length": 12,
        "targets": 6 if name == "bart" else 0,
        "size": tiny(name),
        "dropout": 0.0,
        "weights": weights(name),
    }
    ours, theirs = training.hfseq_step(**settings), training.torch_step(**settings)
    losses = [[side.step()["loss"] for _ in range(3)] for side in (ours, theirs)]
    assert np.allclose(*losses, rtol=2e-5) and losses[0][0] != losses[0][1]
    assert ours.info["model_flops"] > 0 and ours.memory() > 0
    assert ours.info["parameters"] > 0 and theirs.info["attention"] == "sdpa"


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("gpt2", "greedy", marks=pytest.mark.slow),
        ("gpt2", "sampling"),
        pytest.param("t5", "beam", marks=pytest.mark.slow),
    ],
)
def test_hfseq_and_pytorch_generate_the_same_tokens(name, mode, weights):
    pytest.importorskip("torch")
    from hfseq.modeling import FlaxPreTrainedModel

    if not hasattr(FlaxPreTrainedModel, "generate"):
        pytest.skip("models of this version do not generate")
    settings = {
        "model": name,
        "mode": mode,
        "beams": 3,
        "rows": 2,
        "length": 5,
        "new_tokens": 4,
        "size": tiny(name),
        "weights": weights(name),
    }
    sides = inference.hfseq_generate(**settings), inference.torch_generate(**settings)
    ours, theirs = (side.step()["tokens"] for side in sides)
    assert len(ours) == len(theirs) == 8
    assert mode == "sampling" or ours == theirs


# -- comparisons


def test_different_losses_are_reported():
    def row(name, *losses):
        values = [{"loss": loss} for loss in losses]
        return {"name": name, "case": "c", "dtype": "float32", "values": values}

    def problems(*rows):
        return training.loss_problems(rows, training.TOLERANCE)

    assert problems(row("PyTorch", 1.0, 2.0), row("hfseq", 1.00001, 2.0)) == []
    (problem,) = problems(row("PyTorch", 1.0, 2.0), row("hfseq", 1.0, 2.1))
    assert "hfseq and PyTorch differ" in problem
    assert problems(row("PyTorch", 1.0), row("hfseq", float("nan")))


def test_different_tokens_are_counted_except_for_sampling():
    def row(group, *tokens):
        return harness.Row("x", group, values=[{"tokens": list(tokens)}])

    rows = [
        row("greedy, batch 2", 1, 2, 3, 4),
        row("greedy, batch 2", 1, 2, 3, 5),
        row("sampling, batch 1", 1, 2),
        row("sampling, batch 1", 3, 4),
        row("beam 4, batch 1", 1, 2),
    ]
    shares = inference.agreement(rows, 2)
    assert shares == {"greedy, batch 2": 0.5}
    assert inference.disagreements(shares, 0.5) == []
    assert "only 50%" in inference.disagreements(shares, 1.0)[0]


# -- tables and records


def test_ratios_are_relative_to_the_baseline():
    rows = [harness.Row(n, "a", seconds=[t]) for n, t in (("PyTorch", 3.0), ("hfseq", 2.0))]
    ratios = [harness.summarize(r, harness.Case("a", ()), rows, {})["ratio"] for r in rows]
    assert ratios == [1.0, 1.5]
    other = harness.Case("b", (), baseline="bfloat16")
    rows = [harness.Row(n, "b", seconds=[t]) for n, t in (("bfloat16", 3.0), ("fp8", 2.0))]
    assert [harness.summarize(r, other, rows, {})["ratio"] for r in rows] == [1.0, 1.5]
    assert harness.summarize(rows[1], harness.Case("b", ()), rows, {})["ratio"] is None


def test_failed_contestant_fails_the_command(tmp_path):
    def outcome(status):
        result = {
            "benchmark": "x",
            "problems": [],
            "rows": [{"name": "hfseq", "group": "g", "status": status, "seconds": []}],
        }
        return harness.publish(result, "text", tmp_path, failed=False)

    assert outcome("failed: ValueError") == 1
    assert outcome("not run: no torch") == 0
    assert json.loads((tmp_path / "benchmarks" / "x.json").read_text())["problems"] == []
