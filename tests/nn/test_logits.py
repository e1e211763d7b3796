"""Logits that are computed for a part of the positions at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq import nn
from hfseq.nn import logits as logits_module
from hfseq.objectives.cross_entropy import cross_entropy
from tests.support.models import gpt2_config, llama_config


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(logits_module, "CHUNK_LOGITS", 300)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_chunks_change_neither_the_loss_nor_its_gradient(kind, small_chunks):
    model = (
        hfseq.FlaxLlamaForCausalLM(llama_config(num_hidden_layers=1))
        if kind == "llama"
        else hfseq.FlaxGPT2LMHeadModel(gpt2_config(n_layer=1))
    )
    ids = np.random.default_rng(0).integers(3, 40, (3, 11))
    labels = jnp.where(jnp.arange(11) % 3 > 0, ids, -100)

    def loss(params, deferred):
        if not deferred:
            return cross_entropy(model(ids, params=params).logits, labels)[0]
        with nn.defer_logits():
            output = model(ids, params=params).logits
        assert isinstance(output, logits_module.DeferredLogits)
        assert output.shape == (3, 11, model.config.vocab_size)
        return cross_entropy(output, labels)[0]

    (whole, expected), (chunked, gradient) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(model.params, deferred)
        for deferred in (False, True)
    )
    assert chunked == pytest.approx(float(whole), rel=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for first, second in zip(*map(jax.tree.leaves, (expected, gradient)), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-6 * largest, rtol=0)


def test_the_compiled_loss_never_holds_the_logits_of_the_batch(monkeypatch):
    """Of teacher and student, forward and backward."""
    rows, length, hidden, vocabulary = 4, 64, 8, 4096
    monkeypatch.setattr(logits_module, "CHUNK_LOGITS", rows * 4 * vocabulary)

    def loss(kernel, other, x):
        student, teacher = (
            logits_module.DeferredLogits(lambda y, k=k: y @ k, x) for k in (kernel, other)
        )
        values = nn.map_logits(
            lambda own, fixed: jnp.square(jax.nn.softmax(own) - jax.nn.softmax(fixed)).sum(-1),
            (student, teacher),
        )
        return values.sum()

    kernel = jax.ShapeDtypeStruct((hidden, vocabulary), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, length, hidden), jnp.float32)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 2))).lower(kernel, kernel, x).compile()
    all_logits = rows * length * vocabulary * 4
    assert compiled.memory_analysis().temp_size_in_bytes < all_logits / 2
