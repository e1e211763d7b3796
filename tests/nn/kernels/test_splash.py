"""Splash attention for TPUs, run as plain jax and compared with dense attention in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn.dispatch import AttentionCall, AttentionSpec
from hfseq.nn.kernels import splash
from hfseq.nn.visible import Visibility
from tests.support.tiers import first

SPEC = AttentionSpec("tpu", 8, 512, 512, 12, 12, 64, "bfloat16")


def segments(layout: str, length: int, rows: int = 2) -> jax.Array:
    """Documents, padding at either end, or holes in row 0. The last row has no hidden keys."""
    ids = np.ones((rows, length), np.int32)
    if layout == "documents":
        ids[0, length // 3 :] = 2
        ids[0, length // 2 :] = 3
    hidden = {"left": slice(0, 30), "right": slice(length - 30, None), "holes": slice(5, 60, 4)}
    ids[0, hidden.get("right" if layout == "documents" else layout, slice(0, 0))] = 0
    return jnp.asarray(ids)


CASES = {
    "documents, causal, grouped": ("documents", {"causal": True}, 2, 128, 128),
    "holes, window": ("holes", {"window": (9, 20)}, 4, 128, 128),
    "documents": ("documents", {}, 4, 200, 200),
    "documents, window, grouped": ("documents", {"window": (16, 16)}, 2, 256, 256),
    "documents, causal window": ("documents", {"causal": True, "window": (16, 0)}, 4, 150, 150),
    "left, causal": ("left", {"causal": True}, 4, 256, 256),
    "right, causal, grouped": ("right", {"causal": True}, 1, 130, 130),
    "left, window": ("left", {"window": (40, 3)}, 4, 256, 256),
    "right": ("right", {}, 2, 256, 256),
    "plain": ("none", {}, 4, 256, 256),
    "plain, causal, incomplete block": ("none", {"causal": True}, 4, 200, 200),
    "to a padded source": ("right", {}, 4, 128, 256),
    "fewer queries, causal": ("right", {"causal": True}, 4, 128, 250),
    "more queries, causal": ("right", {"causal": True}, 4, 256, 128),
}


@pytest.mark.parametrize("name", first(CASES, "documents, causal, grouped"))
def test_outputs_and_gradients_equal_dense_attention(name):
    layout, band, kv_heads, queries, keys = CASES[name]
    random = np.random.default_rng(0)
    q, k, v, cotangent = (
        jnp.asarray(random.normal(size=(2, n, heads, 32)), jnp.float32)
        for n, heads in ((queries, 4), (keys, kv_heads), (keys, kv_heads), (queries, 4))
    )
    ids = segments(layout, keys)
    if layout == "documents":
        visible = Visibility(query_segments=ids, **band)
    else:
        visible = Visibility(key_segments=None if layout == "none" else ids, **band)
    mask = visible.array(queries, keys)
    mask = jnp.ones((1, 1, queries, keys), bool) if mask is None else mask
    sees_any = visible.sees_any(queries, keys)

    def ours(q, k, v):
        mixed = splash.splash_attention(AttentionCall(q, k, v, visible, 0.3), interpret=True)
        return mixed if sees_any is None else jnp.where(sees_any.swapaxes(1, 2), mixed, 0)

    def reference(q, k, v):
        k, v = (jnp.repeat(x, 4 // kv_heads, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * 0.3
        weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30)), 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")

    def output_and_gradients(attend):
        mixed, back = jax.vjp(attend, q, k, v)
        return mixed, *back(cotangent)

    results = [jax.jit(output_and_gradients, static_argnums=0)(f) for f in (ours, reference)]
    for array, expected in zip(*results, strict=True):
        scale = max(1.0, float(abs(expected).max()))
        np.testing.assert_allclose(array, expected, atol=1e-5 * scale)


@pytest.mark.slow
def test_documents_are_independent_bit_for_bit():
    visible = Visibility(query_segments=segments("documents", 128))
    random = np.random.default_rng(1)
    q, k, v = (jnp.asarray(random.normal(size=(2, 128, 2, 32)), jnp.float32) for _ in range(3))
    run = jax.jit(
        lambda k, v: splash.splash_attention(AttentionCall(q, k, v, visible, 1.0), interpret=True)
    )
    original, changed = run(k, v), run(k.at[0, 10].add(3.0), v.at[0, 10].add(3.0))
    differs = np.asarray((original != changed).any((2, 3)))
    assert differs[0, :42].all() and not differs[0, 42:].any() and not differs[1].any()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cuda"}, "TPUs only"),
        ({"bias": (1, 12, 512, 512)}, "bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"mask": (8, 1, 1, 512)}, "mask"),
        ({"queries": 64}, "mostly padding"),
        ({"segments": "both", "causal": True}, "fully masked queries"),
        ({"segments": "same", "lengths": True, "window": (3, 3)}, "fully masked queries"),
        ({"mesh": (("sequence", 2),)}, "splits sequences"),
        ({"mesh": (("data", 16),)}, "does not divide"),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(changes, reason):
    assert splash.unsupported_reason(SPEC) is None
    assert reason in (splash.unsupported_reason(dataclasses.replace(SPEC, **changes)) or "")
