"""One attention: the explicit and the fused form agree; masks, groups, dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn.attention import eager_attention, xla_attention
from hfseq.nn.cpu import few_queries_attention
from hfseq.nn.scores import attention_weights
from tests.support.models import close


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


QUERY, KEY, VALUE = random(2, 5, 4, 8), random(2, 7, 2, 8, seed=1), random(2, 7, 2, 8, seed=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_explicit_and_fused_forms_agree(causal, masked, biased):
    key, value = (KEY[:, :5], VALUE[:, :5]) if causal else (KEY, VALUE)
    keys = key.shape[1]
    mask = jnp.arange(keys)[None, None, None] < jnp.array([3, keys])[:, None, None, None]
    options = {
        "mask": mask if masked else None,
        "bias": random(1, 4, 5, keys, seed=3) if biased else None,
        "is_causal": causal,
    }
    fused = xla_attention(QUERY, key, value, **options)
    assert close(eager_attention(QUERY, key, value, **options), fused, 1e-6)
    options["causal"] = options.pop("is_causal")
    shown, weights = nn.attend(QUERY, key, value, return_weights=True, **options)
    assert close(shown, fused, 1e-6) and np.allclose(weights.sum(-1), 1, atol=1e-6)
    plain, nothing = nn.attend(QUERY, key, value, **options)
    assert close(plain, fused, 0) and nothing is None


def test_query_heads_share_key_heads_in_order():
    repeated = [jnp.repeat(part, 2, axis=2) for part in (KEY, VALUE)]
    assert close(eager_attention(QUERY, KEY, VALUE), eager_attention(QUERY, *repeated), 1e-6)


def test_scale_can_be_given():
    scores = attention_weights(QUERY, KEY, scale=0.0)
    assert np.allclose(scores, 1 / 7)


def test_softmax_is_in_float32_for_half_inputs():
    weights = attention_weights(QUERY.astype(jnp.bfloat16) * 30, KEY.astype(jnp.bfloat16))
    assert weights.dtype == jnp.bfloat16 and np.isfinite(np.asarray(weights, np.float32)).all()


def test_half_types_on_a_cpu_take_float32_sums():
    halves = [jnp.tile(part, (1, 9, 1, 1)).astype(jnp.bfloat16) for part in (QUERY, KEY, VALUE)]
    found = xla_attention(*halves, scale=0.5)
    assert found.dtype == jnp.bfloat16
    assert (found == eager_attention(*halves, scale=0.5)).all()
    exact = xla_attention(*(part.astype(jnp.float32) for part in halves), scale=0.5)
    assert close(found.astype(jnp.float32), exact, 1e-2)


def test_rows_without_any_visible_key_stay_finite():
    mask = jnp.zeros((2, 1, 1, 7), bool)
    for run in (eager_attention, xla_attention):
        assert np.isfinite(run(QUERY, KEY, VALUE, mask=mask)).all()


def test_dropout_scales_what_it_keeps_and_depends_on_the_key():
    def run(seed):
        keys = nn.make_keys(jax.random.key(seed))
        return nn.attend(QUERY, KEY, VALUE, dropout_rate=0.5, rngs=keys, return_weights=True)

    weights = np.asarray(run(0)[1])
    whole = np.asarray(attention_weights(QUERY, KEY))
    kept = weights != 0
    assert 0.35 < kept.mean() < 0.65
    assert np.allclose(weights[kept], 2 * whole[kept], rtol=1e-5)
    assert not np.array_equal(run(0)[0], run(1)[0])


def test_masks_of_keys_of_queries_and_of_documents():
    assert nn.attention_mask(None) is None
    assert nn.attention_mask(jnp.ones((2, 3))).shape == (2, 1, 1, 3)
    assert nn.attention_mask(jnp.ones((2, 4, 3))).shape == (2, 1, 4, 3)
    both = nn.attention_mask(jnp.array([[1, 0, 1]]), jnp.array([[1, 1, 2]]))
    expected = [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert np.array_equal(both[0, 0], np.array(expected, bool))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_give_what_a_product_per_head_gives(queries, heads):
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    query, key, value = (
        draw(3, queries, heads[0], 8),
        draw(3, 9, heads[1], 8),
        draw(3, 9, heads[1], 8),
    )
    bias, mask = draw(1, heads[0], queries, 9), jnp.asarray(random.random((3, 1, 1, 9)) < 0.7)
    for options in ({}, {"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask, "scale": 0.3}):
        expected = jax.nn.dot_product_attention(query, key, value, **options)
        found = few_queries_attention(query, key, value, **options)
        assert np.allclose(found, expected, atol=2e-6), options.keys()


def test_decoding_on_a_cpu_transposes_no_cache():
    query, cache = jnp.ones((16, 1, 12, 64)), jnp.ones((16, 128, 12, 64))
    text = jax.jit(xla_attention).lower(query, cache, cache).compile().as_text()
    assert "f32[16,12,128,64]" not in text and "f32[16,12,64,128]" not in text


def test_returned_weights_are_those_that_were_used():
    mask = jnp.array([1.0, 0.0, 1.0, 1.0])[None, :, None, None]
    mixed, weights = nn.attend(QUERY, KEY, VALUE, head_mask=mask, return_weights=True)
    assert not np.asarray(weights[:, 1]).any() and np.asarray(weights[:, 2]).any()
    assert not np.asarray(mixed[:, :, 1]).any()
