"""Codebooks: nearest codes, straight-through gradients, moving averages, and exact counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq_plugins.vq_transformer.codebook import Codebook, quantize, sum_by_code
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
from hfseq_plugins.vq_transformer.state import summarize_by_code
from tests.plugins.vq_transformer.vq_cases import (
    attentions,
    ids,
    max_difference,
    model,
    statistics,
    variables,
)


def planted_keys(heads=2, codes=7, width=8, length=20):
    """Returns codebooks, random codes, and keys close to those codes."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(heads, codes, width)).astype(np.float32)
    planted_codes = rng.integers(0, codes, (3, length, heads))
    keys = np.stack([rows[h][planted_codes[:, :, h]] for h in range(heads)], 2)
    return jnp.asarray(rows), planted_codes, jnp.asarray(keys + 0.01 * rng.normal(size=keys.shape))


def test_planted_codes_are_found_by_each_head():
    rows, planted_codes, keys = planted_keys()
    quantized = quantize(keys, rows)
    assert np.array_equal(quantized.codes, planted_codes) and quantized.codes.dtype == jnp.int32
    for head in range(2):
        assert np.array_equal(quantized.keys[:, :, head], rows[head][planted_codes[:, :, head]])
    expected_errors = jnp.square(keys - quantized.keys).sum(-1)
    assert max_difference(quantized.errors, expected_errors) <= 1e-7


def test_values_are_the_codebooks_to_the_last_bit_and_gradients_the_keys():
    rows, planted_codes, keys = planted_keys()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=keys.shape), jnp.float32)
    slope = jax.grad(lambda k: (quantize(k, rows).keys * weights).sum())(keys)
    assert np.array_equal(slope, weights)
    table = jax.grad(lambda r: (quantize(keys, r).keys * weights).sum())(rows)
    assert (
        max_difference(
            jax.grad(lambda k: quantize(k, rows).errors.sum())(keys),
            2 * (keys - quantize(keys, rows).keys),
        )
        <= 1e-6
    )
    # The codebook module stops this gradient: its rows are averages.
    assert table.shape == rows.shape
    from flax import nnx

    book = Codebook(2, 7, 8, 0.01, nnx.Rngs(0))
    old_state = nnx.state(book)
    graph = nnx.graphdef(book)
    slopes = jax.grad(lambda s: quantize(keys, nnx.merge(graph, s).rows()).keys.sum())(old_state)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(slopes))


def test_first_of_equally_near_codes_is_taken():
    rows = jnp.asarray([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    quantized = quantize(jnp.asarray([[[[1.0, 0.0]]]]), rows)
    assert quantized.codes.item() == 0


def test_codes_beyond_the_codebook_count_nowhere():
    keys = jnp.ones((1, 4, 1, 2))
    sums, counts = sum_by_code(keys, jnp.asarray([[[0], [3], [2], [3]]]), 3)
    assert counts.tolist() == [[1.0, 0.0, 1.0]] and sums[0, :, 0].tolist() == [1.0, 0.0, 1.0]
    cache = summarize_by_code(jnp.ones((1, 4, 2)), jnp.asarray([[0, 3, 2, 3]]), 3)
    assert cache.count.tolist() == [[1, 0, 1]] and cache.mean[0, :, 0].tolist() == [1, 0, 1]


def test_a_code_scores_as_its_tokens_together():
    """The score of a code of n keys is that of one key plus log n, for n up to 1023."""
    from hfseq_plugins.vq_transformer.blocks import cache_scores

    counts = jnp.arange(1024, dtype=jnp.int32)[None, None]
    scores = cache_scores(jnp.zeros((1, 1, 1, 1, 2)), counts, jnp.zeros((1, 1024, 2)))
    actual = np.asarray(scores)[0, 0, 0, 0]
    assert np.exp(actual[0]) == 0
    expected = np.log(np.arange(1, 1024)).astype(np.float32)
    np.testing.assert_array_max_ulp(actual[1:], expected, maxulp=1)


@pytest.mark.slow
def test_averages_move_once_a_step_over_all_its_micro_batches():
    flax_model = model("mqa", ema_decay=0.9)
    params, extra = variables(flax_model)
    tokens, mask = ids(4, 8), np.ones((4, 8), np.int32)
    mask[3, 5:] = 0
    call = jax.jit(
        lambda rows, counted, extra: flax_model(
            rows, params=params, train=True, extra=extra, code_mask=counted
        )
    )
    output, updated = call(tokens, mask, extra)
    losses, parts = 0.0, extra
    for start in range(0, 4, 2):
        out, parts = call(tokens[start : start + 2], mask[start : start + 2], parts)
        losses += float(out.auxiliary_loss)
    assert losses == pytest.approx(float(output.auxiliary_loss), rel=1e-6)
    settled = [flax_model.finalize_extra(tree) for tree in (updated, parts)]
    for name in ("sums", "counts"):
        old, new = statistics(extra, name)[0], statistics(updated, f"new_{name}")[0]
        assert np.array_equal(statistics(updated, name)[0], old)
        assert max_difference(statistics(settled[0], name)[0], 0.9 * old + 0.1 * new) <= 1e-6
        assert max_difference(*(statistics(tree, name)[0] for tree in settled)) <= 1e-6
        assert not np.any(statistics(settled[0], f"new_{name}"))
    # The second step starts with counts of 0.
    again = statistics(call(tokens, mask, settled[0])[1], "new_counts")[0]
    assert again.sum() == mask.sum()


def test_statistics_do_not_depend_on_the_blocks():
    actual = []
    for block in (2, 5):
        flax_model = model("mqa", block_size=block)
        params, extra = variables(flax_model)
        updated = jax.jit(
            lambda flax_model=flax_model, params=params, extra=extra: flax_model(
                ids(2, 9), params=params, train=True, extra=extra
            )[1]
        )()
        actual.append([np.stack(statistics(updated, name)) for name in ("new_sums", "new_counts")])
    assert max_difference(actual[0][0], actual[1][0]) <= 1e-5 and np.array_equal(
        actual[0][1], actual[1][1]
    )


@pytest.mark.slow
def test_numpy_collections_are_read_and_left_alone():
    flax_model = model("mqa")
    params, extra = variables(flax_model)
    numpy_extra = jax.tree.map(lambda leaf: np.array(leaf), extra)
    _, updated = flax_model(ids(2, 5), params=params, train=True, extra=numpy_extra)
    assert statistics(updated, "new_counts")[0].sum() == 10
    assert not statistics(numpy_extra, "new_counts")[0].any()


def test_evaluation_leaves_the_statistics_alone():
    flax_model = model("mqa")
    params, extra = variables(flax_model)
    call = jax.jit(lambda tokens: flax_model(tokens, params=params, extra=extra))
    output, updated = call(ids(2, 5))
    assert output.auxiliary_loss is None
    assert not statistics(updated, "new_counts")[0].any()


def test_perplexity_of_the_codes_is_reported():
    flax_model = model("mqa", num_codes=4)
    book = {"sums": jnp.zeros((1, 4, 8)), "counts": jnp.asarray([[2.0, 2.0, 0.0, 0.0]])}
    extra = {"codebook": {"model": {"layers": {"0": {"attention": {"codebook": book}}}}}}
    metrics = flax_model.extra_metrics(extra)
    assert all(float(value) == pytest.approx(2.0) for value in metrics.values()) and metrics


@pytest.mark.parametrize("count", [255, 2**24 - 1])
def test_counts_of_a_long_text_stay_exact_in_bfloat16(count):
    """Runs one token at a time, from states with a large count of one code."""
    flax_model = FlaxVQTransformerForCausalLM(
        model("mqa", num_codes=1, window_size=2).config, _do_init=False, dtype=jnp.bfloat16
    )
    params, extra = variables(flax_model)
    state = flax_model.init_cache(1)
    part = attentions(state)[0]
    part["cache_count"] = jnp.full((1, 1, 1), count, jnp.int32)
    part["window_code"] = jnp.zeros((1, 1, 2), jnp.int32)
    part["position"] = jnp.full((1,), count + 2, jnp.int32)

    def step(state, token):
        output, _ = flax_model(token[None, None], params=params, extra=extra, past_key_values=state)
        return output.past_key_values, output.logits

    state, logits = jax.jit(functools.partial(jax.lax.scan, step))(state, jnp.asarray(ids(1, 9)[0]))
    assert attentions(state)[0]["cache_count"].item() == count + 9
    assert attentions(state)[0]["position"].item() == count + 11
    assert np.isfinite(np.asarray(logits, np.float32)).all()


def test_cache_keeps_means_and_counts_wide_in_bfloat16():
    flax_model = FlaxVQTransformerForCausalLM(
        model("mqa").config, _do_init=False, dtype=jnp.bfloat16
    )
    part = attentions(flax_model.init_cache(2))[0]
    types = {name: leaf.dtype.name for name, leaf in part.items()}
    assert types["cache_mean"] == types["window_key"] == "float32"
    assert types["cache_count"] == types["position"] == types["window_code"] == "int32"


@pytest.mark.slow
def test_many_tokens_of_one_code_are_counted_exactly():
    cache = summarize_by_code(jnp.ones((1, 70000, 1)), jnp.zeros((1, 70000), jnp.int32), 2)
    assert cache.count.tolist() == [[70000, 0]] and cache.mean[0, 0, 0] == 1.0
