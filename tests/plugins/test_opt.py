"""OPT: the battery for its published shapes, and positions from the attention mask."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from hfseq.testing import check_architecture
from hfseq_plugins.opt.modeling import FlaxOPTForCausalLM
from tests.support.models import close, fewest_layers, ids
from tests.support.models import opt_config as config
from tests.support.tiers import battery


@pytest.mark.parametrize(("head", "checks"), battery("opt", "ForCausalLM"))
def test_battery(head, checks):
    layers = fewest_layers("opt") if checks else {}
    check_architecture("opt", config(**layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
        {"_remove_final_layer_norm": True},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"tie_word_embeddings": False, "activation_function": "gelu"},
        {"dropout": 0.0, "attention_dropout": 0.1},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_battery_of_an_option(changes):
    check_architecture("opt", config(**changes), heads=["ForCausalLM"])


def test_the_model_of_350m_has_no_last_norm_and_narrow_words():
    small = config(do_layer_norm_before=False, word_embed_proj_dim=20)
    paths = FlaxOPTForCausalLM(small, _do_init=False).required_params
    assert ("model", "decoder", "final_layer_norm", "scale") not in paths
    assert ("model", "decoder", "project_in", "kernel") in paths


def test_padding_on_the_left_moves_no_position():
    model, tokens = FlaxOPTForCausalLM(config(), seed=1), np.maximum(ids(1, 8), 3)
    padded = np.concatenate([np.ones((1, 4), int), tokens], 1)
    mask = np.concatenate([np.zeros((1, 4), int), np.ones((1, 8), int)], 1)
    assert close(jax.jit(model)(padded, mask).logits[:, 4:], jax.jit(model)(tokens).logits)


def test_deterministic_is_the_v4_name_of_train():
    model, key = FlaxOPTForCausalLM(config(), seed=1), jax.random.PRNGKey(0)
    plain = jax.jit(model)(ids()).logits
    for deterministic in (True, False):
        call = jax.jit(functools.partial(model, deterministic=deterministic))
        assert close(call(ids(), dropout_rng=key).logits, plain) == deterministic
