"""HuBERT and WavLM: the battery for every head, hidden states, and bad configurations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS, jit
from hfseq_plugins.hubert.modeling import FlaxHubertForSequenceClassification, FlaxHubertModel
from hfseq_plugins.wavlm.modeling import (
    FlaxWavLMForCTC,
    FlaxWavLMForSequenceClassification,
    FlaxWavLMModel,
)
from tests.support import models
from tests.support.models import close, waveforms
from tests.support.tiers import CHECKS, first, heads
from tests.support.torch_counterparts import tensors, torch_counterpart

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
# The mask vector is only used if the caller masks frames.
UNUSED = (*ZERO_GRADIENTS, r"masked_spec_embed$")
# The weighted mean of hidden states contains the output of the last layer before this norm.
UNWEIGHTED = (*UNUSED, r"wavlm/encoder/layer_norm/(scale|bias)$")
# See `test_scanned_layers_of_wavlm_equal_a_loop`.
ROUNDING = {"scan_layers": "a scan rounds the scores of attention differently than a loop"}
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
    zero_gradients = UNUSED if head == "ForCTC" else UNWEIGHTED
    skip = ROUNDING if name == "wavlm" else {}
    check_architecture(
        name, config, heads=[head], checks=checks, zero_gradients=zero_gradients, skip=skip
    )


@pytest.mark.slow
def test_scanned_layers_of_wavlm_equal_a_loop(tmp_path):
    """Outputs with dropout and gradients are equal up to rounding."""
    model = FlaxWavLMForCTC(models.wavlm_config(num_labels=3))
    model.save_pretrained(tmp_path)
    results = []
    for scan in (False, True):
        loaded = FlaxWavLMForCTC.from_pretrained(tmp_path, scan_layers=scan)

        def loss(params, loaded=loaded):
            logits = loaded(
                waveforms(), params=params, train=True, dropout_rng=jax.random.key(3)
            ).logits
            return (logits * jnp.cos(jnp.arange(logits.size)).reshape(logits.shape)).sum(), logits

        gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(loaded.params)
        results.append((logits, loaded.weight_map.unstack(trees.flatten(gradient))))
    (expected, expected_gradient), (logits, gradient) = results
    assert close(logits, expected, 1e-6)
    largest = max(np.abs(leaf).max() for leaf in expected_gradient.values())
    for path, leaf in expected_gradient.items():
        np.testing.assert_allclose(gradient[path], leaf, rtol=1e-5, atol=1e-6 * largest)


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
    skip = ROUNDING if name == "wavlm" else {}
    check_architecture(name, config, heads=[head], zero_gradients=UNUSED, skip=skip)


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
    logits = jit(lambda audio, mask: model(audio, mask).logits)
    assert close(logits(padded, mask), logits(audio, np.ones((1, 90), np.int32)))


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
