"""Configuration overrides by flag, and the attributes that are derived from them."""

from __future__ import annotations

import pytest
from transformers import BertConfig, T5Config

from hfseq.checkpoints.config import apply_overrides, parse_overrides
from hfseq.errors import UsageError


def test_values_have_their_types():
    overrides = parse_overrides("a=1,b=gelu,c=0.5,d=false,e=null")
    assert overrides == {"a": 1, "b": "gelu", "c": 0.5, "d": False, "e": None}
    assert parse_overrides(None) == {}
    assert parse_overrides("a=[1,2],b=3,c=[]") == {"a": [1, 2], "b": 3, "c": []}


@pytest.mark.parametrize("text", ["a", "=3", "a=1,b"])
def test_pairs_are_needed(text):
    with pytest.raises(UsageError, match="--config_overrides .*use name=value"):
        parse_overrides(text)


def test_derived_attributes_are_updated():
    config = T5Config(d_model=64, num_layers=3)
    apply_overrides(config, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})
    assert config.is_gated_act and config.dense_act_fn == "gelu_new"
    assert config.scale_decoder_outputs is False
    assert config.d_model == 64 and config.num_layers == 3


def test_other_attributes_are_unchanged():
    config = BertConfig(hidden_size=32, num_labels=5)
    apply_overrides(config, {"hidden_act": "relu", "hidden_size": 64})
    assert (config.hidden_act, config.hidden_size, config.num_labels) == ("relu", 64, 5)


def test_unknown_name_error_suggests_the_closest():
    with pytest.raises(UsageError, match="bert has no hiden_size.*hidden_size"):
        apply_overrides(BertConfig(), {"hiden_size": 3})


def test_value_of_another_type_is_refused():
    with pytest.raises(UsageError, match="hidden_size"):
        apply_overrides(BertConfig(), {"hidden_size": "wide"})
