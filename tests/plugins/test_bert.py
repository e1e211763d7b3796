"""BERT: the battery for every head, its variants, and real checkpoints against PyTorch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.bert.modeling import (
    FlaxBertForCausalLM,
    FlaxBertForMaskedLM,
    FlaxBertForSequenceClassification,
    FlaxBertModel,
)
from tests.support.models import bert_config, close, ids
from tests.support.parity import compare
from tests.support.tiers import first, heads


@pytest.mark.parametrize("head", first(heads("bert"), "ForMaskedLM"))
def test_battery(head):
    check_architecture("bert", bert_config(num_labels=2), heads=[head])


@pytest.mark.slow
def test_battery_with_cross_attention_and_untied_embeddings():
    config = bert_config(
        num_hidden_layers=1, is_decoder=True, add_cross_attention=True, tie_word_embeddings=False
    )
    check_architecture("bert", config, heads=["ForCausalLM"])


@pytest.mark.slow
def test_battery_with_another_activation_and_no_dropout():
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = bert_config(num_hidden_layers=1, hidden_act="gelu_new", **quiet)
    check_architecture("bert", config, heads=["ForMaskedLM"])


def test_untied_head_has_a_projection_and_bias():
    tied = FlaxBertForMaskedLM(bert_config())
    untied = FlaxBertForMaskedLM(bert_config(tie_word_embeddings=False))
    added = untied.required_params - tied.required_params
    assert added == {("cls", "predictions", "decoder", "kernel")}
    assert "cls.predictions.decoder.bias" in untied.weight_map.saved_slots()


def test_cache_needs_position_ids():
    model = FlaxBertForCausalLM(bert_config(is_decoder=True))
    with pytest.raises(ValueError, match="past_key_values.*position_ids"):
        model(ids(), past_key_values=model.init_cache(2, 12))


def test_encoder_has_no_cache():
    with pytest.raises(UsageError, match="no cache.*is_decoder"):
        FlaxBertModel(bert_config()).init_cache(2, 12)


def test_head_mask_removes_a_head():
    model = FlaxBertModel(bert_config(num_hidden_layers=1))
    mask = np.ones((1, 4), np.float32)
    assert close(model(ids(), head_mask=mask)[0], model(ids())[0], 1e-6)
    mask[0, 1] = 0
    assert not close(model(ids(), head_mask=mask)[0], model(ids())[0], 1e-6)


def test_masked_positions_match_the_full_head():
    model = FlaxBertForMaskedLM(bert_config())
    tokens, positions = ids(), np.array([[0, 5, 13], [2, 3, 4]])[:1]
    full = np.asarray(jax.jit(model)(tokens).logits).reshape(1, 24, 64)
    assert close(model(tokens, masked_positions=positions).logits, full[:, positions[0]], 1e-6)


def test_attentions_are_rows_of_probabilities():
    output = FlaxBertModel(bert_config())(ids(), output_attentions=True, output_hidden_states=True)
    assert [weights.shape for weights in output.attentions] == [(2, 4, 12, 12)] * 2
    assert np.allclose(np.sum(output.attentions[0], -1), 1, atol=1e-5)
    assert len(output.hidden_states) == 3
    assert np.array_equal(output.hidden_states[-1], output.last_hidden_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "cls"),
    [
        ("coldfire-tiny_bert", FlaxBertModel),
        ("caikit-BertForSequenceClassification", FlaxBertForSequenceClassification),
    ],
)
def test_published_checkpoints_equal_pytorch(shared, folder, cls):
    pytest.importorskip("torch")
    tokens = ids(2, 20)
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    compare(cls, shared / "checkpoints-tiny" / folder, inputs, unused=2)  # a pooler that idles


@pytest.mark.slow
def test_trained_model_equals_pytorch_on_a_real_sentence(trained_bert):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained_bert)
    batch = tokenizer(
        ["The cat sat on the mat, and the dog lay beside it.", "A cat was sitting on a rug."],
        padding=True,
        return_tensors="np",
    )
    inputs = {name: np.array(batch[name]) for name in ("input_ids", "attention_mask")}
    compare(
        FlaxBertModel,
        trained_bert,
        inputs,
        output_mask=inputs["attention_mask"][..., None],
        unused=2,
    )


@pytest.mark.slow
def test_trained_model_knows_which_sentences_mean_the_same(trained_bert):
    from transformers import AutoTokenizer

    texts = ["The cat sat on the mat.", "A cat was sitting on a rug.", "Shares fell on Monday."]
    batch = AutoTokenizer.from_pretrained(trained_bert)(texts, padding=True, return_tensors="np")
    states = np.asarray(FlaxBertModel.from_pretrained(trained_bert)(**batch).last_hidden_state)
    mask = batch["attention_mask"][..., None]
    vectors = (states * mask).sum(1) / mask.sum(1)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
