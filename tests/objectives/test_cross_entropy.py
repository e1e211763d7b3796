"""Cross-entropy: ignored labels, and the explicit derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hfseq.data.batches import IGNORE_INDEX
from hfseq.objectives import cross_entropy as cross_entropy_module
from hfseq.objectives.cross_entropy import cross_entropy

pytestmark = pytest.mark.usefixtures("rows_together")
LOGITS = jax.random.normal(jax.random.key(0), (2, 5, 7)) * 3
LABELS = jnp.array([[0, 3, IGNORE_INDEX, 6, 0], [IGNORE_INDEX, 1, 2, IGNORE_INDEX, 5]])


def wanted(logits: jax.Array) -> jax.Array:
    safe = jnp.where(LABELS == IGNORE_INDEX, 0, LABELS)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
    return jnp.where(LABELS == IGNORE_INDEX, 0.0, losses).sum()


def test_sum_and_gradient_are_those_of_softmax_and_one_hot_labels():
    ours = jax.jit(jax.value_and_grad(lambda logits: cross_entropy(logits, LABELS)[0]))(LOGITS)
    theirs = jax.jit(jax.value_and_grad(wanted))(LOGITS)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_token_0_is_a_target_like_any_other():
    """The Transformers 4 scripts treated all labels <= 0 as padding."""
    labels = jnp.array([[0, 0, IGNORE_INDEX]])
    logits = jnp.zeros((1, 3, 4)).at[:, :, 0].set(2.0)
    total, count, right = cross_entropy(logits, labels)
    assert int(count) == 2 and int(right) == 2
    assert np.isclose(total, -2 * jax.nn.log_softmax(logits[0, 0])[0])


def test_padding_of_the_vocabulary_gets_no_probability():
    padded = jnp.concatenate([LOGITS, jnp.full((2, 5, 1), 50.0)], axis=-1)
    ours, theirs = cross_entropy(padded, LABELS, 7), cross_entropy(LOGITS, LABELS)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_backward_pass_keeps_no_one_hot_array():
    """Only the logits are saved; all other residuals lack the vocabulary axis."""
    _, pull = jax.vjp(lambda logits: cross_entropy(logits, LABELS)[0], LOGITS)
    remaining = [leaf.size for leaf in jax.tree.leaves(pull)]
    assert sum(size >= LOGITS.size for size in remaining) == 1


def test_on_one_cpu_a_few_rows_are_looked_at_together_and_on_several_devices_all(monkeypatch):
    monkeypatch.undo()
    logits = jax.ShapeDtypeStruct((4, 30, 50257), jnp.float32)
    assert cross_entropy_module.rows_per_chunk(logits) == 120  # eight forced devices
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert cross_entropy_module.rows_per_chunk(logits) == 5
    assert cross_entropy_module.rows_per_chunk(LOGITS) == 10


def test_bfloat16_logits_are_widened_a_few_rows_at_a_time(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cross_entropy_module, "is_single_cpu", lambda: True)
    monkeypatch.setattr(cross_entropy_module, "CHUNK_LOGITS", 4000)
    logits = jax.ShapeDtypeStruct((64, 1000), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    call = jax.jit(jax.grad(lambda x, y: cross_entropy(x, y)[0]))
    program = call.lower(logits, labels).compile().as_text()
    assert "f32[4,1000]" in program
    assert "f32[64,1000]" not in program
