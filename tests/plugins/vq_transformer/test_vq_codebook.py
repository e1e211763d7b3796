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


def planted(heads=2, codes=7, width=8, length=20):
    """Codebooks, and keys close to codes that are known."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(heads, codes, width)).astype(np.float32)
    chosen = rng.integers(0, codes, (3, length, heads))
    keys = np.stack([rows[h][chosen[:, :, h]] for h in range(heads)], 2)
    return jnp.asarray(rows), chosen, jnp.asarray(keys + 0.01 * rng.normal(size=keys.shape))


def test_planted_codes_are_found_by_each_head():
    rows, chosen, keys = planted()
    found = quantize(keys, rows)
    assert np.array_equal(found.codes, chosen) and found.codes.dtype == jnp.int32
    for head in range(2):
        assert np.array_equal(found.keys[:, :, head], rows[head][chosen[:, :, head]])
    wanted = jnp.square(keys - found.keys).sum(-1)
    assert max_difference(found.errors, wanted) <= 1e-7


def test_values_are_the_codebooks_to_the_last_bit_and_gradients_the_keys():
    rows, chosen, keys = planted()
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
    # The codebook module stops this one: its rows come from averages, not from gradients.
    assert table.shape == rows.shape
    from flax import nnx

    book = Codebook(2, 7, 8, 0.01, nnx.Rngs(0))
    before = nnx.state(book)
    graph = nnx.graphdef(book)
    slopes = jax.grad(lambda s: quantize(keys, nnx.merge(graph, s).rows()).keys.sum())(before)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(slopes))


def test_first_of_equally_near_codes_is_taken():
    rows = jnp.asarray([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    found = quantize(jnp.asarray([[[[1.0, 0.0]]]]), rows)
    assert found.codes.item() == 0


def test_codes_beyond_the_codebook_count_nowhere():
    keys = jnp.ones((1, 4, 1, 2))
    sums, counts = sum_by_code(keys, jnp.asarray([[[0], [3], [2], [3]]]), 3)
    assert counts.tolist() == [[1.0, 0.0, 1.0]] and sums[0, :, 0].tolist() == [1.0, 0.0, 1.0]
    cache = summarize_by_code(jnp.ones((1, 4, 2)), jnp.asarray([[0, 3, 2, 3]]), 3)
    assert cache.count.tolist() == [[1, 0, 1]] and cache.mean[0, :, 0].tolist() == [1, 0, 1]


def test_a_code_scores_as_its_tokens_together():
    """A code of n keys has the score of one and log n, for 0 to 1023, to the last bit but one."""
    from hfseq_plugins.vq_transformer.blocks import cache_scores

    counts = jnp.arange(1024, dtype=jnp.int32)[None, None]
    scores = cache_scores(jnp.zeros((1, 1, 1, 1, 2)), counts, jnp.zeros((1, 1024, 2)))
    found = np.asarray(scores)[0, 0, 0, 0]
    assert np.exp(found[0]) == 0
    wanted = np.log(np.arange(1, 1024)).astype(np.float32)
    np.testing.assert_array_max_ulp(found[1:], wanted, maxulp=1)


@pytest.mark.slow
def test_averages_move_once_a_step_over_all_its_micro_batches():
    made = model("mqa", ema_decay=0.9)
    params, extra = variables(made)
    tokens, mask = ids(4, 8), np.ones((4, 8), np.int32)
    mask[3, 5:] = 0
    call = jax.jit(
        lambda rows, counted, extra: made(
            rows, params=params, train=True, extra=extra, code_mask=counted
        )
    )
    output, whole = call(tokens, mask, extra)
    losses, parts = 0.0, extra
    for start in range(0, 4, 2):
        out, parts = call(tokens[start : start + 2], mask[start : start + 2], parts)
        losses += float(out.auxiliary_loss)
    assert losses == pytest.approx(float(output.auxiliary_loss), rel=1e-6)
    settled = [made.finalize_extra(tree) for tree in (whole, parts)]
    for name in ("sums", "counts"):
        before, new = statistics(extra, name)[0], statistics(whole, f"new_{name}")[0]
        assert np.array_equal(statistics(whole, name)[0], before)
        assert max_difference(statistics(settled[0], name)[0], 0.9 * before + 0.1 * new) <= 1e-6
        assert max_difference(*(statistics(tree, name)[0] for tree in settled)) <= 1e-6
        assert not np.any(statistics(settled[0], f"new_{name}"))
    # A second step counts from 0 again.
    again = statistics(call(tokens, mask, settled[0])[1], "new_counts")[0]
    assert again.sum() == mask.sum()


def test_statistics_do_not_depend_on_the_blocks():
    found = []
    for block in (2, 5):
        made = model("mqa", block_size=block)
        params, extra = variables(made)
        after = jax.jit(
            lambda made=made, params=params, extra=extra: made(
                ids(2, 9), params=params, train=True, extra=extra
            )[1]
        )()
        found.append([np.stack(statistics(after, name)) for name in ("new_sums", "new_counts")])
    assert max_difference(found[0][0], found[1][0]) <= 1e-5 and np.array_equal(
        found[0][1], found[1][1]
    )


@pytest.mark.slow
def test_numpy_collections_are_read_and_left_alone():
    made = model("mqa")
    params, extra = variables(made)
    given = jax.tree.map(lambda leaf: np.array(leaf), extra)
    _, after = made(ids(2, 5), params=params, train=True, extra=given)
    assert statistics(after, "new_counts")[0].sum() == 10
    assert not statistics(given, "new_counts")[0].any()


def test_evaluation_leaves_the_statistics_alone():
    made = model("mqa")
    params, extra = variables(made)
    output, after = made(ids(2, 5), params=params, extra=extra)
    assert output.auxiliary_loss is None
    assert not statistics(after, "new_counts")[0].any()


def test_perplexity_of_the_codes_is_reported():
    made = model("mqa", num_codes=4)
    book = {"sums": jnp.zeros((1, 4, 8)), "counts": jnp.asarray([[2.0, 2.0, 0.0, 0.0]])}
    extra = {"codebook": {"model": {"layers": {"0": {"attention": {"codebook": book}}}}}}
    found = made.extra_metrics(extra)
    assert all(float(value) == pytest.approx(2.0) for value in found.values()) and found


@pytest.mark.parametrize("count", [255, 2**24 - 1])
def test_counts_of_a_long_text_stay_exact_in_bfloat16(count):
    """One token after the other, from states that have seen so many of one code."""
    made = FlaxVQTransformerForCausalLM(
        model("mqa", num_codes=1, window_size=2).config, _do_init=False, dtype=jnp.bfloat16
    )
    params, extra = variables(made)
    state = made.init_cache(1)
    part = attentions(state)[0]
    part["cache_count"] = jnp.full((1, 1, 1), count, jnp.int32)
    part["window_code"] = jnp.zeros((1, 1, 2), jnp.int32)
    part["position"] = jnp.full((1,), count + 2, jnp.int32)

    def step(state, token):
        output, _ = made(token[None, None], params=params, extra=extra, past_key_values=state)
        return output.past_key_values, output.logits

    state, logits = jax.jit(functools.partial(jax.lax.scan, step))(state, jnp.asarray(ids(1, 9)[0]))
    assert attentions(state)[0]["cache_count"].item() == count + 9
    assert attentions(state)[0]["position"].item() == count + 11
    assert np.isfinite(np.asarray(logits, np.float32)).all()


def test_cache_keeps_means_and_counts_wide_in_bfloat16():
    made = FlaxVQTransformerForCausalLM(model("mqa").config, _do_init=False, dtype=jnp.bfloat16)
    part = attentions(made.init_cache(2))[0]
    types = {name: leaf.dtype.name for name, leaf in part.items()}
    assert types["cache_mean"] == types["window_key"] == "float32"
    assert types["cache_count"] == types["position"] == types["window_code"] == "int32"


@pytest.mark.slow
def test_many_tokens_of_one_code_are_counted_exactly():
    cache = summarize_by_code(jnp.ones((1, 70000, 1)), jnp.zeros((1, 70000), jnp.int32), 2)
    assert cache.count.tolist() == [[70000, 0]] and cache.mean[0, 0, 0] == 1.0
