"""RoBERTa: the battery for every head, and its two differences from BERT."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM, FlaxRobertaModel
from tests.support.models import close, fewest_layers, ids, roberta_config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("roberta", "ForMaskedLM"))
def test_battery(head, checks):
    config = roberta_config(num_labels=2, **(fewest_layers("roberta") if checks else {}))
    check_architecture("roberta", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_with_cross_attention_and_untied_embeddings():
    config = roberta_config(
        num_hidden_layers=1, is_decoder=True, add_cross_attention=True, tie_word_embeddings=False
    )
    check_architecture("roberta", config, heads=["ForCausalLM"])


def test_positions_start_after_the_padding_id_and_skip_padding():
    model = FlaxRobertaModel(roberta_config(num_hidden_layers=1))
    tokens = ids(1, 6)
    tokens[0, 4:] = 1
    explicit = jax.jit(model)(tokens, position_ids=np.array([[2, 3, 4, 5, 1, 1]]))
    assert np.array_equal(jax.jit(model)(tokens)[0], explicit[0])


def test_positions_restart_in_every_packed_document():
    model = FlaxRobertaModel(roberta_config(num_hidden_layers=1))
    segments = np.array([[1, 1, 1, 2, 2, 0]])
    packed = {"segment_ids": segments}
    explicit = jax.jit(model)(ids(1, 6), **packed, position_ids=np.array([[2, 3, 4, 2, 3, 1]]))
    assert close(jax.jit(model)(ids(1, 6), **packed)[0], explicit[0], 0)


@pytest.mark.slow
def test_grouped_masked_positions_match_the_full_head():
    model = FlaxRobertaForMaskedLM(roberta_config())
    full = np.asarray(model(ids(4)).logits)
    positions = np.array([[0, 23], [5, 11]])  # two groups of two rows of twelve
    logits = np.asarray(model(ids(4), masked_positions=positions).logits)
    assert close(logits[0], full[:2].reshape(24, 64)[[0, 23]], 1e-6)
    assert close(logits[1], full[2:].reshape(24, 64)[[5, 11]], 1e-6)
