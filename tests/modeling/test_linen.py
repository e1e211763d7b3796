"""The module classes of Transformers 4: Linen's init and apply."""

from __future__ import annotations

import functools

import jax
import numpy as np

import hfseq
from hfseq.nn import trees
from hfseq_plugins.bert import modeling
from hfseq_plugins.bert.modeling import FlaxBertForCausalLM, FlaxBertForMaskedLM
from tests.support.models import bert_config, close, ids


def test_every_model_class_has_a_module_class():
    assert hfseq.FlaxBertForMaskedLMModule is modeling.FlaxBertForMaskedLMModule
    assert modeling.FlaxBertModule.model_class is modeling.FlaxBertModel
    assert not hasattr(modeling, "FlaxBertPreTrainedModule")


def test_init_and_apply_match_the_model():
    module = modeling.FlaxBertForMaskedLMModule(bert_config())
    variables = jax.jit(module.init)({"params": jax.random.key(0)}, ids())
    model = FlaxBertForMaskedLM(bert_config(), _do_init=False)
    assert trees.flatten(variables["params"]).keys() == model.required_params
    expected = jax.jit(model)(ids(), params=variables["params"]).logits
    assert close(jax.jit(module.apply)(variables, ids()).logits, expected, 0)
    apply_noisy = jax.jit(functools.partial(module.apply, deterministic=False))
    noisy = apply_noisy(variables, ids(), rngs={"dropout": jax.random.key(1)})
    assert not close(noisy.logits, expected, 1e-6)


def test_module_of_a_model_takes_other_parameters():
    model = FlaxBertForMaskedLM(bert_config())
    other = FlaxBertForMaskedLM(bert_config(), seed=7)
    result = model.module.apply({"params": other.params}, ids()).logits
    assert close(result, other(ids()).logits, 0) and model.module.config is model.config


def test_cache_goes_in_and_comes_back():
    model = FlaxBertForCausalLM(bert_config(is_decoder=True))
    positions = np.broadcast_to(np.arange(12), (2, 12))
    variables = {"params": model.params, "cache": model.init_cache(2, 12)}
    output, changed = model.module.apply(
        variables, ids(), position_ids=positions, mutable=["cache"]
    )
    assert close(output.logits, jax.jit(model)(ids()).logits)
    assert set(map(int, jax.tree.leaves(jax.tree.map(np.max, _indices(changed["cache"]))))) == {12}


def _indices(cache):
    return {path: leaf for path, leaf in trees.flatten(cache).items() if path[-1] == "cache_index"}
