"""MegatronBERT: the battery, its variants against PyTorch, and stock checkpoints."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq import FlaxAutoModelForMaskedLM
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.megatron_bert.modeling import (
    FlaxMegatronBertForMaskedLM,
    FlaxMegatronBertModel,
)
from tests.support.models import close, ids, megatron_bert_config
from tests.support.parity import compare, compare_states

SHALLOW = {"num_hidden_layers": 1}
TYPES = (ids(2, 12, 3) % 2).astype(np.int32)
INPUTS = {"input_ids": ids(), "token_type_ids": TYPES}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_battery(head):
    check_architecture("megatron-bert", megatron_bert_config(num_labels=3), heads=[head])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "changes"),
    [
        (FlaxMegatronBertModel, {**SHALLOW, "is_decoder": True, "hidden_act": "relu"}),
        (FlaxMegatronBertForMaskedLM, {"layer_norm_eps": 1e-5}),
        (FlaxMegatronBertForMaskedLM, {**SHALLOW, "tie_word_embeddings": False}),
    ],
)
def test_equals_pytorch(cls, changes, tmp_path):
    pytest.importorskip("torch")
    cls(megatron_bert_config(**changes), seed=1).save_pretrained(tmp_path)
    compare(cls, tmp_path, INPUTS, unused=2)  # a pooler that idles


def test_attends_to_an_encoder_as_pytorch_does(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import MegatronBertModel

    model = FlaxMegatronBertModel(
        megatron_bert_config(is_decoder=True, add_cross_attention=True, initializer_range=0.3)
    )
    model.save_pretrained(tmp_path)
    theirs = MegatronBertModel.from_pretrained(tmp_path).eval()
    # As many encoder states as tokens: the PyTorch class supports no other number.
    states = np.random.default_rng(0).normal(size=(2, 12, 32)).astype(np.float32)
    mask = np.array([[1] * 12, [1] * 5 + [0] * 7])
    ours = model(ids(), encoder_hidden_states=states, encoder_attention_mask=mask)
    with torch.no_grad():
        expected = theirs(
            torch.tensor(ids()).long(),
            encoder_hidden_states=torch.tensor(states),
            encoder_attention_mask=torch.tensor(mask),
        )
    assert close(ours.last_hidden_state, expected.last_hidden_state)


def test_hidden_states_and_attentions_come_in_the_order_of_pytorch(tmp_path):
    model = FlaxMegatronBertModel(megatron_bert_config(initializer_range=0.3))
    compare_states(model, tmp_path)
    output = model(ids(), output_hidden_states=True)
    assert np.array_equal(output.hidden_states[-1], output.last_hidden_state)


def test_stock_checkpoint_with_both_heads_loads_its_masked_lm(tmp_path, caplog):
    torch = pytest.importorskip("torch")
    from transformers import MegatronBertForPreTraining

    torch.manual_seed(0)
    theirs = MegatronBertForPreTraining(megatron_bert_config()).eval()
    theirs.save_pretrained(tmp_path)
    ours = FlaxAutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(ours) is FlaxMegatronBertForMaskedLM
    assert "cls.seq_relationship.weight" in caplog.text
    with torch.no_grad():
        expected = theirs(torch.tensor(ids()).long()).prediction_logits
    assert close(ours(ids()).logits, expected)


def test_head_mask_removes_a_head():
    model = FlaxMegatronBertModel(megatron_bert_config(**SHALLOW, initializer_range=0.3))
    mask = np.ones((1, 4), np.float32)
    assert close(model(ids(), head_mask=mask)[0], model(ids())[0], 1e-6)
    mask[0, 1] = 0
    assert not close(model(ids(), head_mask=mask)[0], model(ids())[0], 1e-3)


def test_dropout_needs_a_key_and_depends_on_it():
    import jax

    model = FlaxMegatronBertModel(megatron_bert_config(**SHALLOW))
    with pytest.raises(UsageError, match="dropout_rng"):
        model(ids(), train=True)
    trained = jax.jit(lambda key: model(ids(), train=True, dropout_rng=key)[0])
    first_output, second_output = (trained(jax.random.key(n)) for n in (0, 1))
    assert not close(first_output, second_output, 1e-3) and not close(
        first_output, jax.jit(model)(ids())[0], 1e-3
    )
