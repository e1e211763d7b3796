"""Attention: explicit and fused implementations agree on masks, grouped queries and dropout."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.nn import cpu
from hfseq.nn.attention import CPU, EAGER, SPLASH, XLA, attention_spec, select_implementation
from hfseq.nn.context import Options
from hfseq.nn.dispatch import AttentionSpec
from hfseq.nn.layers import dropout_with_bits
from hfseq.nn.scores import attention_weights, mix_values
from hfseq.nn.visible import Visibility
from tests.support.models import close


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def by(attention):
    """Returns `nn.dot_product` with the given implementation."""

    def run(*arrays, **options):
        with nn.options(Options(attention=attention)):
            return nn.dot_product(*arrays, **options)

    return run


eager_attention, xla_attention, few_queries_attention = by(EAGER), by(None), by(CPU[0])


QUERY, KEY, VALUE = random(2, 5, 4, 8), random(2, 7, 2, 8, seed=1), random(2, 7, 2, 8, seed=2)


@pytest.mark.parametrize(
    ("biased", "masked", "causal"), [(False, False, True), (False, True, False), (True, True, True)]
)
def test_explicit_and_fused_attention_agree(causal, masked, biased):
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
    explicit, weights = nn.attend(QUERY, key, value, return_weights=True, **options)
    assert close(explicit, fused, 1e-6) and np.allclose(weights.sum(-1), 1, atol=1e-6)
    result, no_weights = nn.attend(QUERY, key, value, **options)
    assert close(result, fused, 0) and no_weights is None


def test_query_heads_share_key_heads_in_order():
    repeated = [jnp.repeat(part, 2, axis=2) for part in (KEY, VALUE)]
    assert close(eager_attention(QUERY, KEY, VALUE), eager_attention(QUERY, *repeated), 1e-6)


def test_scale_is_applied():
    scores = attention_weights(QUERY, KEY, Visibility(), scale=0.0)
    assert np.allclose(scores, 1 / 7)


def test_softmax_is_in_float32_for_half_inputs():
    halves = (QUERY * 30).astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)
    weights = attention_weights(*halves, Visibility(), scale=8**-0.5)
    assert weights.dtype == jnp.bfloat16 and np.isfinite(np.asarray(weights, np.float32)).all()


def test_half_types_on_a_cpu_take_float32_sums():
    halves = [jnp.tile(part, (1, 9, 1, 1)).astype(jnp.bfloat16) for part in (QUERY, KEY, VALUE)]
    actual = xla_attention(*halves, scale=0.5)
    assert actual.dtype == jnp.bfloat16
    assert (actual == eager_attention(*halves, scale=0.5)).all()
    exact = xla_attention(*(part.astype(jnp.float32) for part in halves), scale=0.5)
    assert close(actual.astype(jnp.float32), exact, 1e-2)


def test_rows_without_visible_keys_are_finite():
    mask = jnp.zeros((2, 1, 1, 7), bool)
    for run in (eager_attention, xla_attention):
        assert np.isfinite(run(QUERY, KEY, VALUE, mask=mask)).all()


def test_dropout_scales_kept_weights_and_depends_on_the_key():
    def run(seed):
        keys = nn.make_keys(jax.random.key(seed))
        return nn.attend(QUERY, KEY, VALUE, dropout_rate=0.5, rngs=keys, return_weights=True)

    weights = np.asarray(run(0)[1])
    undropped = np.asarray(attention_weights(QUERY, KEY, Visibility(), scale=8**-0.5))
    is_kept = weights != 0
    assert 0.35 < is_kept.mean() < 0.65
    assert np.allclose(weights[is_kept], 2 * undropped[is_kept], rtol=1e-5)
    assert not np.array_equal(run(0)[0], run(1)[0])


@pytest.mark.slow
def test_dropout_has_the_expected_rate_and_mean():
    """Over 4,096 rows with independent random bits, within four standard deviations."""
    draws, rate = 4096, 0.1
    arrays = [jnp.broadcast_to(x[:1], (draws, *x.shape[1:])) for x in (QUERY, KEY, VALUE)]

    def run(**options):
        return nn.attend(
            *arrays, dropout_rate=rate, rngs=nn.make_keys(jax.random.key(3)), **options
        )

    mixed, expected = np.asarray(run()[0], np.float64), nn.attend(QUERY[:1], KEY[:1], VALUE[:1])[0]
    error = abs(mixed.mean(0) - np.asarray(expected)[0])
    assert (error < 4 * mixed.std(0) / draws**0.5).all()
    weights = np.asarray(run(return_weights=True)[1])
    keep_rate, keep_rates = (weights != 0).mean(), (weights != 0).mean(0)
    assert abs(keep_rate - 0.9) < 4 * (rate * (1 - rate) / weights.size) ** 0.5
    assert (abs(keep_rates - 0.9) < 5 * (rate * (1 - rate) / draws) ** 0.5).all()


def test_masks_of_keys_queries_and_documents():
    assert nn.attention_mask(None) is None
    assert nn.attention_mask(jnp.ones((2, 3))).shape == (2, 1, 1, 3)
    assert nn.attention_mask(jnp.ones((2, 4, 3))).shape == (2, 1, 4, 3)
    both = nn.attention_mask(jnp.array([[1, 0, 1]]), jnp.array([[1, 1, 2]]))
    expected = [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert np.array_equal(both[0, 0], np.array(expected, bool))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_equal_the_explicit_implementation(queries, heads):
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    query = draw(3, queries, heads[0], 8)
    key = draw(3, 9, heads[1], 8)
    value = draw(3, 9, heads[1], 8)
    bias, mask = draw(1, heads[0], queries, 9), jnp.asarray(random.random((3, 1, 1, 9)) < 0.7)
    for options in ({}, {"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask, "scale": 0.3}):
        expected = jax.nn.dot_product_attention(query, key, value, **options)
        actual = few_queries_attention(query, key, value, **options)
        assert np.allclose(actual, expected, atol=2e-6), options.keys()


def test_decoding_on_a_cpu_does_not_transpose_the_cache():
    query, cache = jnp.ones((16, 1, 12, 64)), jnp.ones((16, 128, 12, 64))
    text = jax.jit(xla_attention).lower(query, cache, cache).compile().as_text()
    assert "f32[16,12,128,64]" not in text and "f32[16,12,64,128]" not in text


@pytest.mark.slow
def test_returned_attention_weights_match_the_output():
    mask = jnp.array([1.0, 0.0, 1.0, 1.0])[None, :, None, None]
    mixed, weights = nn.attend(QUERY, KEY, VALUE, head_mask=mask, return_weights=True)
    assert not np.asarray(weights[:, 1]).any() and np.asarray(weights[:, 2]).any()
    assert not np.asarray(mixed[:, :, 1]).any()


def naive_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False):
    """Aligned at the start like jax's function, and NaN for a query without keys."""
    scores = jnp.einsum("bqhd,bshd->bhqs", query, key) / query.shape[-1] ** 0.5
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(scores), value)


#: Variants of computing attention: the implementation, patched attributes of `hfseq.nn.cpu`, and
#: arguments of `nn.attend`.
VARIANTS = {
    "jax": (jax.nn.dot_product_attention, {}, {}),
    "xla": (XLA, {}, {}),
    "auto": (None, {}, {}),
    "direct": (None, {"is_single_cpu": lambda: True}, {}),
    "blocked": (
        None,
        {"is_single_cpu": lambda: True, "MIN_BLOCKED_SCORES": 1, "CAUSAL_BLOCK_QUERIES": 3},
        {},
    ),
    "eager": (EAGER, {}, {}),
    "registered": (naive_attention, {}, {}),
    "weights": (None, {}, {"return_weights": True}),
    "dropped": (None, {}, {"dropout_rate": 1e-5}),
    "dropped and direct": (None, {"is_single_cpu": lambda: True}, {"dropout_rate": 1e-5}),
}
VISIBLE_KEYS = jnp.array([[0, 0, 1, 1, 1, 0, 0, 0], [1] * 8, [0] * 8], bool)[:, None, None]


@pytest.fixture(params=VARIANTS)
def variant(request, monkeypatch):
    product, patches, options = VARIANTS[request.param]
    for name, value in patches.items():
        monkeypatch.setattr(cpu, name, value)
    if "dropout_rate" in options:
        options = {**options, "rngs": nn.make_keys(jax.random.key(0))}

    def run(*arrays, **arguments):
        with nn.options(Options(attention=product)):
            return nn.attend(*arrays, **arguments, **options)[0]

    return run


@pytest.mark.parametrize(
    ("queries", "keys", "masked", "causal"),
    [
        (8, 5, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product((8, 5, 2), (8, 5), (False, True), (False, True))
            if case != (8, 5, True, True)
        ),
    ],
)
def test_all_implementations_align_at_the_end_and_zero_masked_queries(
    variant, queries, keys, masked, causal
):
    q = random(3, queries, 2, 4)
    k, v, cotangent = (random(3, n, 2, 4, seed=i) for i, n in enumerate((keys, keys, queries), 1))
    mask = VISIBLE_KEYS[..., :keys] if masked else None
    visible = jnp.ones((3, 1, queries, keys), bool) if mask is None else mask
    if causal:
        visible = visible & jnp.tri(queries, keys, keys - queries, dtype=bool)
    visible = jnp.broadcast_to(visible, (3, 1, queries, keys))

    def reference(q, k, v):
        scores = jnp.where(visible, jnp.einsum("bqhd,bshd->bhqs", q, k) / 2, -1e30)
        weights = jnp.where(visible, jax.nn.softmax(scores), 0)
        return jnp.einsum("bhqs,bshd->bqhd", weights, v)

    def output_and_gradients(attend):
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(cotangent)

    def attend(q, k, v):
        return variant(q, k, v, mask=mask, causal=causal)

    ours, theirs = jax.jit(
        lambda: (output_and_gradients(attend), output_and_gradients(reference))
    )()
    for actual, expected in zip(ours, theirs, strict=True):
        # some variants drop one weight in 10^5
        np.testing.assert_allclose(actual, expected, atol=3e-4)
    masked_queries = ~np.asarray(visible.any(-1))[:, 0]
    assert (
        not np.asarray(ours[0])[masked_queries].any()
        and not np.asarray(ours[1])[masked_queries].any()
    )
    assert masked or masked_queries.any() == (causal and queries > keys)


def test_weights_of_a_masked_query_are_zero():
    _, weights = nn.attend(
        QUERY, KEY, VALUE, mask=jnp.zeros((2, 1, 1, 7), bool), return_weights=True
    )
    assert not np.asarray(weights).any()


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (2, 1, 5, 7)])
def test_visible_tokens_are_bit_equal_to_the_unwrapped_implementation(shape):
    mask = jnp.asarray(np.random.default_rng(5).random(shape) < 0.4).at[0].set(False)
    theirs = jax.jit(lambda: xla_attention(QUERY, KEY, VALUE, mask=mask))()
    ours = jax.jit(lambda: nn.attend(QUERY, KEY, VALUE, mask=mask)[0])()
    assert (np.asarray(ours)[1] == np.asarray(theirs)[1]).all() and not np.asarray(ours)[0].any()


def test_beams_of_one_source_are_each_causal():
    query = random(4, 3, 4, 8, seed=7)
    attend = jax.jit(lambda key, value: nn.attend(query, key, value, causal=True)[0])
    ours, apart = attend(KEY, VALUE), attend(*(jnp.repeat(x, 2, 0) for x in (KEY, VALUE)))
    assert close(ours, apart, 1e-6)


def test_a_row_of_length_zero_gives_zeros():
    mixed = nn.dot_product(QUERY, KEY, VALUE, key_value_seq_lengths=jnp.array([0, 3], jnp.int32))
    assert not np.asarray(mixed[0]).any() and np.asarray(mixed[1]).any()


def test_a_plugin_implementation_receives_the_documented_arguments():
    received = []

    def attend(query, key, value, visible, *, bias, scale, rate, drawn, mesh):
        received.append((visible.segments, visible.causal, scale))
        return jax.nn.dot_product_attention(
            query, key, value, mask=visible.array(query.shape[1], key.shape[1]), scale=scale
        )

    mine = nn.Implementation(
        "mine", attend, lambda spec: "it drops nothing" if spec.dropout else None
    )
    mask = nn.visible(jnp.ones((2, 7), jnp.int32).at[0, 5:].set(0), causal=True)
    with nn.options(Options(attention=mine)):
        mixed, _ = nn.attend(KEY, KEY, VALUE, mask=mask)
        with pytest.raises(UsageError, match=r"'mine' does not support .*mine: it drops nothing"):
            nn.attend(KEY, KEY, VALUE, dropout_rate=0.5, rngs=nn.make_keys(jax.random.key(0)))
    assert received == [("keys", True, 1 / 8**0.5)]
    assert close(mixed, nn.attend(KEY, KEY, VALUE, mask=mask)[0], 1e-6)


def test_a_plugin_implementation_can_drop_the_same_weights():
    def attend(query, key, value, visible, *, bias, scale, rate, drawn, mesh):
        assert mesh is None
        weights = attention_weights(query, key, visible, bias=bias, scale=scale)
        return mix_values(dropout_with_bits(weights, rate, drawn.all()), value)

    results = []
    for attention in (nn.Implementation("plugin", attend), EAGER):
        keys = nn.make_keys(jax.random.key(0))
        with nn.options(Options(attention=attention)):
            bias = random(1, 4, 5, 7, seed=3)
            results.append(nn.attend(QUERY, KEY, VALUE, bias=bias, dropout_rate=0.5, rngs=keys)[0])
    assert np.array_equal(*results)


def test_a_requested_kernel_for_another_platform_is_an_error():
    with nn.options(Options(attention=SPLASH)):
        with pytest.raises(UsageError, match=r"'splash' does not support .* on cpu .*TPUs only"):
            nn.attend(QUERY, KEY, VALUE)


def test_selection_by_call_properties():
    base = AttentionSpec("cuda", 8, 512, 512, 12, 12, 64, "bfloat16", capability=(9, 0))

    def name(**changes):
        return select_implementation(dataclasses.replace(base, **changes), None).name

    packed = {"segments": "same", "max_runs": 16}
    bias = {"bias": (1, 12, 512, 512)}
    assert [
        name(), name(causal=True, window=(64, 0)), name(lengths=True), name(**packed),
        name(**packed, dropout=0.1), name(segments="same"), name(segments="keys"),
        name(dtype="float32"), name(**bias), name(**bias, dropout=0.1), name(mask=(8, 1, 512, 512)),
        name(mask=(8, 1, 512, 512), dropout=0.1), name(window=(64, 64)), name(queries=1),
        name(**packed, capability=(8, 0)), name(capability=(7, 0)), name(mesh=(("sequence", 2),)),
    ] == [
        "cudnn", "cudnn", "cudnn", "flash",
        "flash", "flash", "flash",
        "flash", "cudnn_bias", "flash", "cudnn_bias",
        "explicit", "flash", "explicit",
        "flash", "explicit", "explicit",
    ]  # fmt: skip
    tpu = {"platform": "tpu", "capability": None}
    assert [
        name(**tpu),
        name(**tpu, **packed, causal=True),
        name(**tpu, window=(64, 64)),
        name(**tpu, dropout=0.1),
        name(**tpu, **bias),
        name(**tpu, queries=64),
        name(**tpu, queries=1),
    ] == ["splash"] * 3 + ["explicit"] * 4
    one_device, many_devices = {"platform": "cpu", "devices": 1}, {"platform": "cpu", "devices": 8}
    single = {"dtype": "float32", "capability": None}
    assert [
        name(**one_device, **single),
        name(**one_device, **single, batch=1, queries=64, keys=64),
        name(**one_device, queries=1),
        name(**many_devices, **single),
        name(**many_devices),
        name(platform="rocm"),
    ] == ["blocked", "direct", "few_queries", "xla", "explicit", "xla"]


def test_memory_of_another_process_is_not_queried(monkeypatch):
    class Foreign:
        platform = "cpu"

        def memory_stats(self):
            raise jax.errors.JaxRuntimeError("MemoryStats is only supported for addressable ones")

    monkeypatch.setattr(jax, "devices", lambda *ignored: [Foreign()])
    query = random(1, 8, 2, 4)
    assert attention_spec(query, query, Visibility(), None, 0.0).platform == "cpu"
