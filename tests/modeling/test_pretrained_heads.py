"""from_pretrained of a checkpoint with another head."""

from __future__ import annotations

import jax
import pytest

from hfseq_plugins.bert.modeling import (
    FlaxBertForMaskedLM,
    FlaxBertForPreTraining,
    FlaxBertForSequenceClassification,
    FlaxBertModel,
)
from tests.support.models import bert_config, ids, trees_equal
from tests.support.saved_bert import capture_warnings


def test_base_model_into_a_head_and_back(tmp_path, caplog, messages):
    base = FlaxBertModel(bert_config())
    base.save_pretrained(tmp_path / "base")
    with capture_warnings(caplog):
        head = FlaxBertForSequenceClassification.from_pretrained(tmp_path / "base")
    assert "are newly initialized: classifier.bias classifier.kernel You should" in messages()
    assert trees_equal(head.params["bert"], base.params)
    head.save_pretrained(tmp_path / "head")
    caplog.clear()
    with capture_warnings(caplog):
        again = FlaxBertModel.from_pretrained(tmp_path / "head")
    assert trees_equal(again.params, base.params)
    assert "were not used when initializing FlaxBertModel: ['classifier.bias'" in messages()


def test_new_parameters_are_those_of_the_seed(tmp_path):
    FlaxBertModel(bert_config()).save_pretrained(tmp_path)
    load = FlaxBertForSequenceClassification.from_pretrained
    first, two = load(tmp_path, seed=1), load(tmp_path, seed=2)
    assert trees_equal(first.params["classifier"], load(tmp_path, seed=1).params["classifier"])
    assert not trees_equal(first.params["classifier"], two.params["classifier"])


def test_another_number_of_labels(tmp_path, caplog, messages):
    head = FlaxBertForSequenceClassification(bert_config(num_labels=2))
    head.save_pretrained(tmp_path)
    load = FlaxBertForSequenceClassification.from_pretrained
    with pytest.raises(
        ValueError, match=r"classifier\.weight: \(2, 32\).*\(5, 32\)[\s\S]*ignore_mism"
    ):
        load(tmp_path, num_labels=5)
    with capture_warnings(caplog):
        other = load(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert "the shapes did not match" in messages()
    assert jax.jit(other)(ids()).logits.shape == (2, 5)
    assert trees_equal(other.params["bert"], head.params["bert"])


@pytest.mark.slow
def test_new_parameters_are_reported_with_mismatches(tmp_path, caplog, messages):
    FlaxBertForMaskedLM(bert_config()).save_pretrained(tmp_path)
    load = FlaxBertForPreTraining.from_pretrained
    with capture_warnings(caplog):
        load(tmp_path, type_vocab_size=3, ignore_mismatched_sizes=True)
    assert "the shapes did not match" in messages() and "seq_relationship" in messages()
