"""Unusual models and texts: unused codes, one code for all, short rows, empty caches, no window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.nn import trees
from tests.plugins.vq_transformer import vq_oracle as oracle
from tests.plugins.vq_transformer.vq_cases import (
    ids,
    max_difference,
    model,
    token_losses,
    variables,
)


def far(book):
    """One code that no key comes near, and that has never been counted."""
    sums = book["sums"].at[:, 1].set(100.0)
    return {**book, "sums": sums, "counts": book["counts"].at[:, 1].set(0.0)}


def alone(book):
    """One code near all keys, the others far away."""
    sums = jnp.full_like(book["sums"], 50.0).at[:, 2].set(0.0)
    return {**book, "sums": sums, "counts": jnp.ones_like(book["counts"])}


CASES = {
    "a code that is never used": (far, 9, {}),
    "all keys of one code": (alone, 9, {}),
    "a row shorter than window and block": (None, 2, {"window_size": 7, "block_size": 8}),
    "a row of one token": (None, 1, {}),
    "nothing ever leaves the window": (None, 6, {"window_size": 64, "block_size": 2}),
    "no window": (None, 9, {"window_size": 0}),
    "one code": (None, 9, {"num_codes": 1}),
    "more codes than keys": (None, 3, {"num_codes": 40}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_finite_and_right(case):
    change, length, options = CASES[case]
    made = model("mqa", **options)
    params, extra = variables(made)
    if change is not None:
        part = extra["codebook"]["model"]["layers"]["0"]["attention"]
        part["codebook"] = change(part["codebook"])
    tokens = ids(2, length)

    def loss(params):
        output, after = made(
            tokens, params=params, extra=extra, train=True, past_key_values=made.init_cache(2)
        )
        own = token_losses(output.logits, tokens).mean() + output.auxiliary_loss
        return own, (output, made.finalize_extra(after))

    (value, (output, after)), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    for path, leaf in trees.flatten({"p": slopes, "e": after, "s": output.past_key_values}).items():
        assert np.isfinite(leaf).all(), trees.join(path)
    wanted = oracle.evaluate(made.config, params, extra["codebook"], tokens)
    assert np.isfinite(value)
    assert max_difference(output.logits, wanted.logits) <= 1e-5 * max(
        1, np.abs(wanted.logits).max()
    )


@pytest.mark.slow
def test_rows_without_any_token_are_finite():
    made = model("mqa")
    params, extra = variables(made)
    mask = np.array([[1] * 6, [0] * 6], np.int32)

    def loss(params):
        output, after = made(
            ids(2, 6),
            mask,
            params=params,
            extra=extra,
            train=True,
            past_key_values=made.init_cache(2),
        )
        return output.logits[0].sum() + output.auxiliary_loss, (output.past_key_values, after)

    (value, rest), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.isfinite(value)
    for leaf in jax.tree.leaves((rest, slopes)):
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_an_empty_cache_takes_no_part():
    """Codes that score far above all keys count for nothing while no token has left the window."""
    made = model("mqa", window_size=16)
    params, extra = variables(made)
    wide = jax.tree.map(lambda leaf: leaf, extra)
    part = wide["codebook"]["model"]["layers"]["0"]["attention"]
    # Rows that no key is nearest to, in the direction of every query at once.
    more = jnp.concatenate([part["codebook"]["sums"][:, :4], jnp.full((1, 1, 8), 300.0)], 1)
    part["codebook"] = {**part["codebook"], "sums": more}
    one, two = (
        made(ids(2, 9), params=params, extra=tree, past_key_values=made.init_cache(2))[0].logits
        for tree in (extra, wide)
    )
    first = oracle.evaluate(made.config, params, extra["codebook"], ids(2, 9)).modules[0].codes
    if (first != 4).all():
        assert max_difference(one, two) <= 1e-6
    assert np.isfinite(two).all()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4])
def test_a_cache_that_is_switched_off_takes_no_part_whatever_it_holds(length):
    made = model("mqa", use_compressive_cache=False)
    params, extra = variables(made)

    def call(tokens, state):
        output, _ = made(tokens, params=params, extra=extra, past_key_values=state)
        return output.logits, output.past_key_values

    _, state = call(ids(2, 5), made.init_cache(2))
    huge = {"cache_count": 10**6, "cache_mean": 1e6}
    full = trees.unflatten(
        {
            path: jnp.full_like(leaf, huge[path[-1]]) if path[-1] in huge else leaf
            for path, leaf in trees.flatten(state).items()
        }
    )
    one, two = (call(ids(2, length, 1), before)[0] for before in (state, full))
    assert np.array_equal(one, two)


@pytest.mark.slow
def test_first_values_are_those_of_the_reference():
    """Kernels and codes have variances of 1 / fan-in, counts are 1, offsets and biases 0."""
    made = type(model())(
        model("shga", hidden_size=64, head_dim=32, num_codes=64, value_dim=128).config, seed=1
    )
    flat = trees.flatten(made.params)
    for path, leaf in flat.items():
        if path[-1] == "kernel":
            assert np.std(leaf) == pytest.approx(leaf.shape[0] ** -0.5, rel=0.1), trees.join(path)
        if path[-1] in ("bias", "content_bias", "position_bias", "position_scale"):
            assert not leaf.any()
        if path[-1] == "scale":
            assert (leaf == 1).all()
    assert np.std(flat["model", "embed_tokens", "embedding"]) == pytest.approx(1, rel=0.1)
    book = made.extra["codebook"]["model"]["layers"]["0"]["attention"]["codebook"]
    assert np.std(book["sums"]) == pytest.approx(64**-0.5, rel=0.1)
    assert (book["counts"] == 1).all() and not book["new_counts"].any()
