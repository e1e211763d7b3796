"""Pushing from a run: one commit a save, all artefacts, and a dead Hub that stops nothing."""

from __future__ import annotations

import numpy as np
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


def test_a_pushed_translator_translates_alike_in_jax_and_in_pytorch(train, hub):
    """From pairs to the Hub and back: by name, with the classes that PyTorch's users know."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from hfseq import FlaxAutoModelForSeq2SeqLM

    sizes = (
        "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,"
        "decoder_attention_heads=4,encoder_ffn_dim=64,decoder_ffn_dim=64,max_position_embeddings=40"
    )
    train(
        "tiny", 1, "translation", model_type=None, tokenizer_name=None, vocab_size=300,
        config_overrides=sizes, source_column="source", target_column="target", num_beams=2, **PUSH,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained("user/tiny")
    ids = tokenizer(["the law of every land", "who do not yet know"], padding=True)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained("user/tiny")
    assert type(theirs).__name__ == "PegasusForConditionalGeneration"
    found = FlaxAutoModelForSeq2SeqLM.from_pretrained("user/tiny").generate(
        **{name: np.asarray(value) for name, value in ids.items()}, max_new_tokens=8
    )
    with torch.no_grad():
        expected = theirs.generate(
            **{name: torch.tensor(value) for name, value in ids.items()}, max_new_tokens=8
        )
    width = expected.shape[1]
    np.testing.assert_array_equal(np.asarray(found.sequences)[:, :width], expected.numpy())


def test_a_refusing_hub_does_not_stop_training(train, hub, no_waiting, tmp_path):
    hub.fail("POST", ".*", times=10_000, status=403)
    with pytest.raises(HfseqError, match="hfseq push"):
        train("tiny", devices=1, save_steps=3, **PUSH)
    assert (tmp_path / "tiny" / "model.safetensors").exists()
    assert (tmp_path / "tiny" / "README.md").exists()
