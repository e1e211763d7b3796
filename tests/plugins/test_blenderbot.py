"""Blenderbot and Blenderbot Small: the batteries, positions and norms, replies equal to PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq import plugins
from hfseq.testing import check_architecture
from hfseq_plugins.blenderbot.modeling import FlaxBlenderbotForConditionalGeneration
from hfseq_plugins.blenderbot_small.modeling import FlaxBlenderbotSmallForConditionalGeneration
from hfseq_plugins.marian.modeling import FlaxMarianMTModel
from hfseq_plugins.pegasus.modeling import FlaxPegasusForConditionalGeneration
from tests.support.models import blenderbot_config, blenderbot_small_config, ids
from tests.support.parity import compare, compare_tokens
from tests.support.tiers import CHECKS, first
from tests.support.torch_counterparts import torch_counterpart

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
CONFIGS = {"blenderbot": blenderbot_config, "blenderbot-small": blenderbot_small_config}
CLASSES = {
    "blenderbot": FlaxBlenderbotForConditionalGeneration,
    "blenderbot-small": FlaxBlenderbotSmallForConditionalGeneration,
}
QUICK = [(name, "ForSeq2SeqLM", CHECKS) for name in CONFIGS]
WHOLE = [(name, head, None) for name in CONFIGS for head in ("Model", "ForSeq2SeqLM")]


@pytest.mark.parametrize(("name", "head", "checks"), first([*QUICK, *WHOLE], *QUICK))
def test_battery(name, head, checks):
    config = CONFIGS[name](**(SHALLOW if checks else {}))
    check_architecture(name, config, heads=[head], checks=checks)


@pytest.mark.parametrize("name", CONFIGS)
def test_battery_covers_every_registered_head(name):
    assert set(plugins.load().architectures[name].target.heads) == {"Model", "ForSeq2SeqLM"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "changes", [{"scale_embedding": True}, {"tie_word_embeddings": False}], ids=str
)
def test_equals_pytorch(name, changes, tmp_path):
    pytest.importorskip("torch")
    ours = CLASSES[name](CONFIGS[name](**SHALLOW, **changes))
    ours.save_pretrained(tmp_path)
    inputs = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 7, 1)}
    unused = 1 if ours.config.tie_word_embeddings else 2
    compare(CLASSES[name], tmp_path, inputs, unused=unused)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [*CLASSES.values(), FlaxMarianMTModel, FlaxPegasusForConditionalGeneration]
)
def test_shift_tokens_right_of_the_module(cls):
    """As in the scripts of Transformers 4."""
    shift = __import__(cls.__module__, fromlist=["shift_tokens_right"]).shift_tokens_right
    assert np.asarray(shift(np.array([[5, 6, 2, -100]]), 1, 3)).tolist() == [[3, 5, 6, 2]]


@pytest.mark.slow
def test_norm_positions_match_pytorch():
    def names(name):
        tree = CLASSES[name](CONFIGS[name](), _do_init=False).params_shape_tree["model"]
        return {part for part in tree["decoder"] if "norm" in part}

    assert names("blenderbot") == {"layer_norm"}
    assert names("blenderbot-small") == {"layernorm_embedding"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("beams", [1, 4])
def test_generation_matches_pytorch(name, beams, tmp_path):
    model = CLASSES[name](CONFIGS[name](init_std=0.3))
    theirs = torch_counterpart(model, tmp_path)
    compare_tokens(model, theirs, ids(3, 9), max_length=12, num_beams=beams)


@pytest.mark.slow
def test_a_reply_repeats_no_ngram_of_the_input_as_in_pytorch(tmp_path):
    """The Flax classes of Transformers 4 ignored the option, whose default is 3."""
    model = FlaxBlenderbotForConditionalGeneration(blenderbot_config(init_std=0.3))
    theirs = torch_counterpart(model, tmp_path)
    source = np.stack([np.arange(4, 40), np.arange(39, 3, -1)]).astype(np.int32)
    for size, repeated in ((0, True), (1, False)):
        options = {"max_length": 14, "num_beams": 1, "encoder_no_repeat_ngram_size": size}
        sequences = compare_tokens(model, theirs, source, **options)
        assert np.isin(sequences, source).any() == repeated
