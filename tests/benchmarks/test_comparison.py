"""Tests of the comparison with PyTorch: the losses on the same batches agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest

from tests.training.conftest import corpus, flags  # noqa: F401

pytest.importorskip("torch")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "benchmarks"))

import against_pytorch

from hfseq.errors import UsageError
from hfseq.training.arguments import parse

pytestmark = pytest.mark.slow

STEPS = 5


def arguments(flags, objective, **changes):  # noqa: F811
    values = {
        "max_steps": STEPS,
        "global_batch_size": 8,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
    }
    values |= {"warmup_steps": 2, "per_device_eval_batch_size": 2, "report_to": "none"}
    return parse(flags(objective, objective=objective, **values | changes), objective=objective)


@pytest.mark.parametrize("objective", ["mlm", "clm", "span_mlm", "denoising"])
def test_losses_of_packed_rows_agree_step_by_step(objective, flags):  # noqa: F811
    run_arguments = arguments(flags, objective)
    seeds = [run_arguments.training.seed]
    result = against_pytorch.compare(run_arguments, objective, seeds, 100, jax.devices()[:1])
    assert result["parity_steps"] == result["steps"] == STEPS
    assert result["max_difference"] < 1e-4, result["differences"]
    ours, theirs = result["hfseq"]["losses"], result["pytorch"][0]["losses"]
    assert ours[0] > ours[-1] and len(set(ours)) == len(theirs) == STEPS
    assert result["final_loss"] == pytest.approx(result["pytorch"][0]["final_loss"], abs=1e-4)
    assert result["final_loss_is"] == "eval_loss"
    assert len(result["step_seconds"]) == 2 and result["speed_ratio"] > 0
    folder = Path(run_arguments.training.output_dir)
    assert json.loads((folder / "pytorch_comparison.json").read_text())["objective"] == objective
    assert (folder / "pytorch_comparison.png").read_bytes().startswith(b"\x89PNG")
    assert all(not v for k, v in result["config"].items() if "dropout" in k or "pdrop" in k)
    assert "largest |loss difference|" in against_pytorch.report(result)


def test_other_seeds_have_other_weights_and_another_order(flags):  # noqa: F811
    run_arguments = arguments(flags, "mlm", max_steps=2, max_grad_norm=0.5)
    seed = run_arguments.training.seed
    result = against_pytorch.compare(run_arguments, "mlm", [seed, seed + 1], 1, jax.devices()[:1])
    first, second = (other["losses"] for other in result["pytorch"])
    assert result["parity_steps"] == 1 and result["max_difference"] < 1e-4
    assert abs(first[0] - second[0]) > 1e-4
    assert result["range"] == sorted(result["pytorch_final_losses"])


def trained(final, losses=(2.0, 1.0), seed=0):
    return against_pytorch.TrainingRecord(seed, list(losses), final)


def test_the_final_loss_is_compared_with_the_range_of_the_seeds():
    records = [trained(1.0), trained(1.2), trained(1.1)]
    inside = against_pytorch.verdict(trained(1.15, (2.0, 1.5)), records, 100)
    assert inside["within_range"] and inside["distance_to_range"] == 0
    assert inside["own_seed_difference"] == pytest.approx(0.15)
    assert inside["range_of_other_seeds"] == [1.1, 1.2]
    assert inside["max_difference"] == 0.5 and inside["parity_steps"] == 2
    outside = against_pytorch.verdict(trained(1.5), records, 1)
    assert not outside["within_range"]
    assert outside["distance_to_range"] == pytest.approx(0.3) and outside["max_difference"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "lion"}, "--optim lion"),
        ({"precision": "bfloat16"}, "--precision bfloat16"),
        ({"freeze": "embeddings"}, "--freeze"),
    ],
)
def test_unsupported_arguments_are_rejected(changes, message, flags):  # noqa: F811
    with pytest.raises(UsageError, match=message):
        against_pytorch.compare(arguments(flags, "mlm", **changes), "mlm", [0], 1)
