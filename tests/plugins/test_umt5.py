"""UMT5: the battery for every head, position biases of each layer."""

from __future__ import annotations

import pytest

from hfseq import FlaxUMT5EncoderModel, FlaxUMT5ForConditionalGeneration
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from tests.support.models import ids, trees_equal, umt5_config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("umt5", "ForSeq2SeqLM"))
def test_battery(head, checks):
    config = umt5_config(num_labels=2, num_layers=1 if checks else 2, num_decoder_layers=2)
    check_architecture("umt5", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_of_an_untied_head_and_an_ungated_block():
    changes = {"tie_word_embeddings": False, "feed_forward_proj": "relu", "d_kv": 16}
    check_architecture("umt5", umt5_config(**changes), heads=["ForSeq2SeqLM"])


def test_every_layer_has_its_own_position_bias():
    model = FlaxUMT5ForConditionalGeneration(umt5_config(), _do_init=False)
    tables = [path for path in model.required_params if "relative_attention_bias" in path]
    assert len(tables) == 4


@pytest.mark.slow
def test_encoder_reads_the_files_of_the_whole_model(tmp_path):
    model = FlaxUMT5ForConditionalGeneration(umt5_config(num_layers=1), seed=1)
    model.save_pretrained(tmp_path)
    encoder = FlaxUMT5EncoderModel.from_pretrained(tmp_path)
    assert trees_equal(encoder.params["encoder"], model.params["encoder"])
    assert trees.flatten(encoder.params).keys() < trees.flatten(model.params).keys()
    assert trees_equal(encoder(ids())[0], model.encode(ids())[0])


def test_classification_needs_an_end_token():
    from hfseq import FlaxUMT5ForSequenceClassification

    with pytest.raises(UsageError, match="requires eos_token_id"):
        FlaxUMT5ForSequenceClassification(umt5_config(eos_token_id=None), _do_init=False)
