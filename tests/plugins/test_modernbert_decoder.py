"""ModernBERT decoder: the battery for every head and option, and causal windows."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq import FlaxModernBertDecoderForCausalLM
from hfseq.testing import check_architecture
from tests.support.models import fewest_layers, ids
from tests.support.models import modernbert_decoder_config as config
from tests.support.parity import compare_tokens
from tests.support.tiers import battery
from tests.support.torch_counterparts import torch_counterpart


@pytest.mark.parametrize(("head", "checks"), battery("modernbert-decoder", "ForCausalLM"))
def test_battery(head, checks):
    model_config = config(num_labels=3, **(fewest_layers("modernbert-decoder") if checks else {}))
    check_architecture("modernbert-decoder", model_config, heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "changes"),
    [
        (
            "ForCausalLM",
            {
                "norm_bias": True,
                "attention_bias": True,
                "mlp_bias": True,
                "classifier_bias": True,
                "tie_word_embeddings": False,
            },
        ),
        ("ForCausalLM", {"decoder_bias": False, "attention_dropout": 0.1, "mlp_dropout": 0.1}),
        ("ForSequenceClassification", {"classifier_bias": True, "classifier_dropout": 0.1}),
    ],
    ids=str,
)
def test_battery_of_an_option(head, changes):
    check_architecture("modernbert-decoder", config(num_labels=2, **changes), heads=[head])


def test_a_window_counts_itself():
    model = FlaxModernBertDecoderForCausalLM(config(), seed=1)
    attentions = model(ids(1, 12), output_attentions=True).attentions
    distance = np.arange(12)[:, None] - np.arange(12)
    for attention_type, weights in zip(model.config.layer_types, attentions, strict=True):
        allowed = (distance >= 0) & ((distance < 3) | (attention_type == "full_attention"))
        assert np.array_equal(np.asarray(weights[0, 0]) > 0, allowed)
        assert model.config.local_attention == 6


@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_matches_pytorch(search, tmp_path):
    model = FlaxModernBertDecoderForCausalLM(config(), seed=2)
    tokens, mask = ids(50, 9), np.ones((50, 9), np.int32)
    for row, length in enumerate(np.random.default_rng(3).integers(3, 10, 50)):
        mask[row, : 9 - length] = 0
    tokens = np.where(mask, tokens, 0)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **search}
    compare_tokens(model, torch_counterpart(model, tmp_path), tokens, mask, **options)
