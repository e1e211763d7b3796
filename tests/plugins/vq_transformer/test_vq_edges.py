"""Edge cases: unused codes, one code for all keys, short rows, empty caches, no window."""

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


def far_code(book):
    """Returns codebooks with one code that is far from all keys and has count 0."""
    sums = book["sums"].at[:, 1].set(100.0)
    return {**book, "sums": sums, "counts": book["counts"].at[:, 1].set(0.0)}


def single_code(book):
    """Returns codebooks with one code near all keys. The others are far away."""
    sums = jnp.full_like(book["sums"], 50.0).at[:, 2].set(0.0)
    return {**book, "sums": sums, "counts": jnp.ones_like(book["counts"])}


CASES = {
    "a code that is never used": (far_code, 9, {}),
    "all keys of one code": (single_code, 9, {}),
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
    flax_model = model("mqa", **options)
    params, extra = variables(flax_model)
    if change is not None:
        part = extra["codebook"]["model"]["layers"]["0"]["attention"]
        part["codebook"] = change(part["codebook"])
    tokens = ids(2, length)

    def loss(params):
        output, updated = flax_model(
            tokens, params=params, extra=extra, train=True, past_key_values=flax_model.init_cache(2)
        )
        main_loss = token_losses(output.logits, tokens).mean() + output.auxiliary_loss
        return main_loss, (output, flax_model.finalize_extra(updated))

    (value, (output, updated)), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    for path, leaf in trees.flatten(
        {"p": slopes, "e": updated, "s": output.past_key_values}
    ).items():
        assert np.isfinite(leaf).all(), trees.join(path)
    expected = oracle.evaluate(flax_model.config, params, extra["codebook"], tokens)
    assert np.isfinite(value)
    assert max_difference(output.logits, expected.logits) <= 1e-5 * max(
        1, np.abs(expected.logits).max()
    )


@pytest.mark.slow
def test_rows_without_any_token_are_finite():
    flax_model = model("mqa")
    params, extra = variables(flax_model)
    mask = np.array([[1] * 6, [0] * 6], np.int32)

    def loss(params):
        output, updated = flax_model(
            ids(2, 6),
            mask,
            params=params,
            extra=extra,
            train=True,
            past_key_values=flax_model.init_cache(2),
        )
        return output.logits[0].sum() + output.auxiliary_loss, (output.past_key_values, updated)

    (value, outputs), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.isfinite(value)
    for leaf in jax.tree.leaves((outputs, slopes)):
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_an_empty_cache_takes_no_part():
    """Codes with large scores have no effect while all tokens are in the window."""
    flax_model = model("mqa", window_size=16)
    params, extra = variables(flax_model)
    wide = jax.tree.map(lambda leaf: leaf, extra)
    part = wide["codebook"]["model"]["layers"]["0"]["attention"]
    # Rows that are not nearest to any key but have large scores with all queries.
    extended_sums = jnp.concatenate(
        [part["codebook"]["sums"][:, :4], jnp.full((1, 1, 8), 300.0)], 1
    )
    part["codebook"] = {**part["codebook"], "sums": extended_sums}
    single, two = (
        flax_model(ids(2, 9), params=params, extra=tree, past_key_values=flax_model.init_cache(2))[
            0
        ].logits
        for tree in (extra, wide)
    )
    first = (
        oracle.evaluate(flax_model.config, params, extra["codebook"], ids(2, 9)).modules[0].codes
    )
    if (first != 4).all():
        assert max_difference(single, two) <= 1e-6
    assert np.isfinite(two).all()


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4])
def test_a_cache_that_is_switched_off_takes_no_part_whatever_it_holds(length):
    flax_model = model("mqa", use_compressive_cache=False)
    params, extra = variables(flax_model)

    def call(tokens, state):
        output, _ = flax_model(tokens, params=params, extra=extra, past_key_values=state)
        return output.logits, output.past_key_values

    _, state = call(ids(2, 5), flax_model.init_cache(2))
    huge = {"cache_count": 10**6, "cache_mean": 1e6}
    full = trees.unflatten(
        {
            path: jnp.full_like(leaf, huge[path[-1]]) if path[-1] in huge else leaf
            for path, leaf in trees.flatten(state).items()
        }
    )
    first, two = (call(ids(2, length, 1), old_state)[0] for old_state in (state, full))
    assert np.array_equal(first, two)


@pytest.mark.slow
def test_first_values_are_those_of_the_reference():
    """Kernels and codes have variance 1 / fan-in, counts are 1, offsets and biases are 0."""
    flax_model = type(model())(
        model("shga", hidden_size=64, head_dim=32, num_codes=64, value_dim=128).config, seed=1
    )
    flat = trees.flatten(flax_model.params)
    for path, leaf in flat.items():
        if path[-1] == "kernel":
            assert np.std(leaf) == pytest.approx(leaf.shape[0] ** -0.5, rel=0.1), trees.join(path)
        if path[-1] in ("bias", "content_bias", "position_bias", "position_scale"):
            assert not leaf.any()
        if path[-1] == "scale":
            assert (leaf == 1).all()
    assert np.std(flat["model", "embed_tokens", "embedding"]) == pytest.approx(1, rel=0.1)
    book = flax_model.extra["codebook"]["model"]["layers"]["0"]["attention"]["codebook"]
    assert np.std(book["sums"]) == pytest.approx(64**-0.5, rel=0.1)
    assert (book["counts"] == 1).all() and not book["new_counts"].any()
