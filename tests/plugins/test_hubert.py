"""HuBERT and WavLM: the battery for every head, hidden states, and bad configurations."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from hfseq_plugins.hubert.modeling import FlaxHubertForSequenceClassification, FlaxHubertModel
from hfseq_plugins.wavlm.modeling import FlaxWavLMForSequenceClassification, FlaxWavLMModel
from tests.support import models
from tests.support.models import close, waveforms
from tests.support.tiers import CHECKS, first, heads
from tests.support.torch_counterparts import tensors, torch_counterpart

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
# The mask vector is only used if the caller masks frames.
UNUSED = (*ZERO_GRADIENTS, r"masked_spec_embed$")
QUICK = [("hubert", "ForCTC", CHECKS), ("wavlm", "ForCTC", CHECKS)]


@pytest.mark.parametrize(
    ("name", "head", "checks"),
    first(
        [*QUICK, *((name, head, None) for name in ("hubert", "wavlm") for head in heads(name))],
        *QUICK,
    ),
)
def test_battery(name, head, checks):
    layers = models.fewest_layers(name) if checks else {}
    config = getattr(models, f"{name}_config")(num_labels=3, **layers)
    check_architecture(name, config, heads=[head], checks=checks, zero_gradients=UNUSED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "changes"),
    [
        ("hubert", "ForCTC", {"feat_proj_layer_norm": True, "do_stable_layer_norm": True}),
        ("hubert", "SequenceClassification", {"use_weighted_layer_sum": False}),
        ("wavlm", "ForCTC", {"do_stable_layer_norm": False, "feat_extract_norm": "group"}),
        ("wavlm", "Model", {"add_adapter": True, "num_adapter_layers": 2}),
    ],
)
def test_battery_of_a_switch(name, head, changes):
    config = getattr(models, f"{name}_config")(**changes)
    check_architecture(name, config, heads=[head], zero_gradients=UNUSED)


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [FlaxHubertModel, FlaxWavLMModel])
def test_hidden_states_of_pre_norm_models_are_pytorchs(model_class, tmp_path):
    name = "hubert" if model_class is FlaxHubertModel else "wavlm"
    model = model_class(getattr(models, f"{name}_config")(do_stable_layer_norm=True))
    theirs = torch_counterpart(model, tmp_path)
    inputs = {"input_values": waveforms()}
    expected = theirs(**tensors(**inputs), output_hidden_states=True).hidden_states
    states = model(**inputs, output_hidden_states=True).hidden_states
    assert [close(a, b.detach()) for a, b in zip(states, expected, strict=True)] == [True] * 3


def test_padding_does_not_change_the_class():
    config = models.hubert_config(num_hidden_layers=1, feat_extract_norm="layer")
    model = FlaxHubertForSequenceClassification(config)
    audio = waveforms(1, 90)
    padded = np.concatenate([audio, np.full((1, 40), 9.0, np.float32)], 1)
    mask = (np.arange(130) < 90).astype(np.int32)[None]
    alone = model(audio, np.ones((1, 90), np.int32)).logits
    assert close(model(padded, mask).logits, alone)


@pytest.mark.parametrize(
    ("model_class", "config", "message"),
    [
        (FlaxHubertModel, models.hubert_config, "conv_pos_batch_norm=True"),
        (FlaxWavLMForSequenceClassification, models.wavlm_config, "add_adapter=True"),
    ],
)
def test_unsupported_configurations_are_refused(model_class, config, message):
    name = message.split("=")[0]
    with pytest.raises(UsageError, match=message):
        model_class(config(**{name: True}), _do_init=False)
