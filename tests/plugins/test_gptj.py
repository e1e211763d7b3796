"""GPT-J: the battery, partial rotary positions, the head with a bias, and generation."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import GPTJConfig

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.gptj.modeling import FlaxGPTJForCausalLM
from tests.support.models import ids
from tests.support.tiers import first


def config(**changes):
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 6,
             "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
             "initializer_range": 0.2}  # fmt: skip
    return GPTJConfig(**sizes | changes)


@pytest.mark.parametrize("head", first(("ForCausalLM", "Model"), "ForCausalLM"))
def test_battery(head):
    check_architecture("gptj", config(), heads=[head])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"n_inner": 20, "activation_function": "relu"},
        {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        {"rotary_dim": 16},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_battery_of_an_option(changes):
    check_architecture("gptj", config(**changes), heads=["ForCausalLM"])


def test_a_tied_head_has_its_bias_alone():
    tied = FlaxGPTJForCausalLM(config(tie_word_embeddings=True, n_layer=1), _do_init=False)
    assert {p for p in tied.required_params if p[0] == "lm_head"} == {("lm_head", "bias")}


def test_rows_longer_than_the_positions_are_refused():
    model = FlaxGPTJForCausalLM(config(n_layer=1))
    with pytest.raises(UsageError, match="41 tokens a row.*n_positions=40"):
        model(ids(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_tokens_are_pytorchs(search, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = FlaxGPTJForCausalLM(config(), seed=1)
    model.save_pretrained(tmp_path)
    tokens, mask = np.maximum(ids(3, 9), 3), np.ones((3, 9), np.int64)
    mask[0, :4] = 0
    options = {"max_new_tokens": 14, "do_sample": False, **search}
    found = model.generate(tokens, attention_mask=mask, **options).sequences
    right = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask), **options
    )
    assert np.array_equal(found[:, : right.shape[1]], right.numpy())
