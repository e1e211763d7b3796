"""XLM-RoBERTa: the battery for every head, and RoBERTa checkpoints."""

from __future__ import annotations

import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM
from hfseq_plugins.xlm_roberta.modeling import FlaxXLMRobertaForMaskedLM, FlaxXLMRobertaModel
from tests.support.models import ids, roberta_config, trees_equal, xlm_roberta_config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("xlm-roberta", "ForMaskedLM"))
def test_battery(head, checks):
    config = xlm_roberta_config(num_labels=2, num_hidden_layers=1 if checks else 2)
    check_architecture("xlm-roberta", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_with_cross_attention_and_untied_embeddings():
    config = xlm_roberta_config(
        num_hidden_layers=1, is_decoder=True, add_cross_attention=True, tie_word_embeddings=False
    )
    check_architecture("xlm-roberta", config, heads=["ForCausalLM"])


@pytest.mark.slow
def test_its_parameters_are_robertas():
    ours = FlaxXLMRobertaForMaskedLM(xlm_roberta_config())
    theirs = FlaxRobertaForMaskedLM(roberta_config())
    assert trees_equal(ours.params, theirs.params)
    assert trees_equal(ours(ids()).logits, theirs(ids()).logits)


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "msgpack"])
def test_encoder_and_head_load_in_both_directions(safe, tmp_path):
    """Transformers 4 loaded no weights: it looked for the prefix `xlm-roberta`."""
    head = FlaxXLMRobertaForMaskedLM(xlm_roberta_config(num_hidden_layers=1), seed=3)
    head.save_pretrained(tmp_path / "head", safe_serialization=safe)
    alone = FlaxXLMRobertaModel.from_pretrained(tmp_path / "head", add_pooling_layer=False)
    assert trees_equal(alone.params, head.params["roberta"])
    alone.save_pretrained(tmp_path / "alone", safe_serialization=safe)
    back = FlaxXLMRobertaForMaskedLM.from_pretrained(tmp_path / "alone")
    assert trees_equal(back.params["roberta"], head.params["roberta"])
