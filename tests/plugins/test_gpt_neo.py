"""GPT-Neo: the battery, and layers with a window."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.gpt_neo.modeling import FlaxGPTNeoForCausalLM
from tests.support.models import close, fewest_layers, ids
from tests.support.models import gpt_neo_config as config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("gpt_neo", "ForCausalLM"))
def test_battery(head, checks):
    layers = fewest_layers("gpt_neo") if checks else {}
    check_architecture("gpt_neo", config(**layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_types": [[["local"], 2]], "num_layers": 2, "window_size": 2},
        {"resid_dropout": 0.1, "embed_dropout": 0.1, "attention_dropout": 0.1},
        {"tie_word_embeddings": False, "intermediate_size": 20, "activation_function": "relu"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_battery_of_an_option(changes):
    check_architecture("gpt_neo", config(**changes), heads=["ForCausalLM"])


def test_local_window_includes_the_query_position():
    output = FlaxGPTNeoForCausalLM(config())(ids(1, 12), output_attentions=True)
    distance = np.arange(12)[:, None] - np.arange(12)
    for weights, window in zip(output.attentions, (99, 5) * 2, strict=True):
        assert ((np.asarray(weights[0, 0]) > 0) == ((distance >= 0) & (distance < window))).all()


@pytest.mark.slow
def test_alternating_layers_are_scanned_as_one_block():
    model_config = config()
    plain = FlaxGPTNeoForCausalLM(model_config, seed=1)
    scanned = FlaxGPTNeoForCausalLM(model_config, seed=1, scan_layers=True)
    assert scanned.stacked_prefixes and close(scanned(ids()).logits, plain(ids()).logits)
