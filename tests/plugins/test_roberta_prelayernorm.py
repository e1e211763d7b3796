"""RoBERTa-PreLayerNorm: the battery for every head, and the position of its norms."""

from __future__ import annotations

import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.roberta_prelayernorm.modeling import FlaxRobertaPreLayerNormModel
from tests.support.models import roberta_prelayernorm_config
from tests.support.parity import compare_states
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("roberta-prelayernorm", "ForMaskedLM"))
def test_battery(head, checks):
    config = roberta_prelayernorm_config(num_labels=2, num_hidden_layers=1 if checks else 2)
    check_architecture("roberta-prelayernorm", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_with_cross_attention_and_untied_embeddings():
    config = roberta_prelayernorm_config(
        num_hidden_layers=1, is_decoder=True, add_cross_attention=True, tie_word_embeddings=False
    )
    check_architecture("roberta-prelayernorm", config, heads=["ForCausalLM"])


@pytest.mark.slow
def test_hidden_states_and_attentions_come_in_the_order_of_pytorch(tmp_path):
    config = roberta_prelayernorm_config(initializer_range=0.3)
    compare_states(FlaxRobertaPreLayerNormModel(config), tmp_path)
