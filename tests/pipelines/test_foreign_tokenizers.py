"""Third-party tokenizers without attention mask or padding token, or with unused token types."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hfseq.data.tokenizers import train_tokenizer
from hfseq.pipelines import encode
from hfseq.pipelines.factory import pipeline
from tests.support import models

TEXTS = [f"the law of every land is read by all who live there {i}" for i in range(30)]


def without(folder: Path, *names: str, **changes) -> None:
    """Removes settings from a tokenizer's file, and adds others."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in settings.items() if k not in names}))


@pytest.fixture
def gpt2(tmp_path) -> Path:
    import hfseq

    tokenizer = train_tokenizer([TEXTS], "gpt2", None, 300, tmp_path)
    config = models.gpt2_config(vocab_size=len(tokenizer), n_layer=1, initializer_range=0.4)
    hfseq.FlaxGPT2LMHeadModel(config, seed=3).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def roberta(tmp_path) -> Path:
    from transformers import RobertaConfig

    import hfseq

    tokenizer = train_tokenizer([TEXTS], "roberta", None, 300, tmp_path)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        type_vocab_size=1,
    )
    hfseq.FlaxRobertaForMaskedLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_tokenizer_without_attention_mask_generates(gpt2):
    expected = pipeline("text-generation", str(gpt2))("the law", max_new_tokens=4)
    without(gpt2, model_input_names=["input_ids"])
    writer = pipeline("text-generation", str(gpt2))
    assert "attention_mask" not in writer.tokenizer("the law")
    assert writer("the law", max_new_tokens=4) == expected
    assert list(writer.stream_text("the law", max_new_tokens=4))


def test_fill_mask_ignores_extra_tokenizer_outputs(roberta):
    texts = ["the <mask> of every land", "a <mask>"]
    expected = pipeline("fill-mask", str(roberta))(texts, top_k=2)
    for names in (["input_ids"], ["input_ids", "token_type_ids", "attention_mask"]):
        without(roberta, model_input_names=names)
        assert pipeline("fill-mask", str(roberta))(texts, top_k=2) == expected
    without(roberta, "pad_token", model_input_names=["input_ids"])
    actual = pipeline("fill-mask", str(roberta))(texts, top_k=2)
    for item, other in zip(actual, expected, strict=True):
        assert [guess["token"] for guess in item] == [guess["token"] for guess in other]


def test_rows_are_padded_on_the_right_and_masked(gpt2):
    from transformers import AutoTokenizer

    without(gpt2, "pad_token", model_input_names=["input_ids"])
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    batch = encode(tokenizer, ["law", TEXTS[0]])
    first, second = batch["attention_mask"].sum(-1)
    assert first == len(tokenizer("law")["input_ids"]) < second == batch["input_ids"].shape[1]
    assert batch["input_ids"].dtype == np.int32 and set(batch) == {"input_ids", "attention_mask"}
    assert encode(tokenizer, [""])["input_ids"].shape == (1, 0)
