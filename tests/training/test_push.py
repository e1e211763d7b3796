"""Pushing from a run: one commit a save, all artefacts, and a dead Hub that stops nothing."""

from __future__ import annotations

import pytest

from hfseq.errors import HfseqError

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
PUSH = {"push_to_hub": True, "hub_model_id": "user/tiny", "report_to": "tensorboard jsonl"}


@pytest.fixture
def flags(flags):
    """The flags with --report_to as two values."""

    def make(output="run", objective="mlm", **changes):
        given = flags(output, objective, **changes)
        return [part for flag in given for part in flag.replace("=", " ", 1).split(" ")]

    return make


def test_a_run_pushes_everything_and_loads_back_by_name(train, hub):
    train("tiny", devices=1, save_steps=3, **PUSH)
    repo = hub.repo("user/tiny")
    files = set(repo.at("main").files)
    assert [commit.title for commit in repo.history()][-1] == "Training in progress, step 3"
    assert files >= {
        "model.safetensors", "config.json", "tokenizer.json", "README.md", "learning_curve.png",
        "metrics.jsonl", "eval_results.json",
    }  # fmt: skip
    assert any("tfevents" in name for name in files)
    assert not any(name.startswith("checkpoints") for name in files)

    from hfseq import FlaxAutoModelForMaskedLM

    model = FlaxAutoModelForMaskedLM.from_pretrained("user/tiny")
    assert model.config.hidden_size == 32


def test_a_refusing_hub_does_not_stop_training(train, hub, no_waiting, tmp_path):
    hub.fail("POST", ".*", times=10_000, status=403)
    with pytest.raises(HfseqError, match="hfseq push"):
        train("tiny", devices=1, save_steps=3, **PUSH)
    assert (tmp_path / "tiny" / "model.safetensors").exists()
    assert (tmp_path / "tiny" / "README.md").exists()
