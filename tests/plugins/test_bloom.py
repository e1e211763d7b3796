"""BLOOM: the battery, biases of any number of heads, positions from the attention mask."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq import nn
from hfseq.testing import check_architecture
from hfseq_plugins.bloom.modeling import FlaxBloomForCausalLM
from tests.support.models import bloom_config as config
from tests.support.models import close, fewest_layers, ids
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("bloom", "ForCausalLM"))
def test_battery(head, checks):
    layers = fewest_layers("bloom") if checks else {}
    check_architecture("bloom", config(**layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"n_head": 6, "hidden_size": 36},  # version 4 cannot: no power of two
        {"apply_residual_connection_post_layernorm": True},
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        {"tie_word_embeddings": False},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_battery_of_an_option(changes):
    check_architecture("bloom", config(**changes), heads=["ForCausalLM"])


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 112])
def test_slopes_are_pytorchs_for_any_number_of_heads(heads):
    torch = pytest.importorskip("torch")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    right = build_alibi_tensor(torch.ones(1, 5, dtype=torch.long), heads, torch.float32)
    bias = nn.alibi_slopes(heads)[:, None, None] * np.arange(5)
    assert np.abs(bias - right.numpy()).max() < 1e-6


def test_left_padding_does_not_change_outputs():
    model, tokens = FlaxBloomForCausalLM(config(n_layer=1), seed=1), np.maximum(ids(1, 8), 4)
    padded = np.concatenate([np.full((1, 4), 3), tokens], 1)
    mask = np.concatenate([np.zeros((1, 4), int), np.ones((1, 8), int)], 1)
    logits = jax.jit(lambda *inputs: model(*inputs).logits)
    assert close(logits(padded, mask)[:, 4:], logits(tokens))


def test_rows_may_be_of_any_length():
    model = FlaxBloomForCausalLM(config(n_layer=1))
    assert jax.jit(model)(ids(1, 300)).logits.shape == (1, 300, 64)
