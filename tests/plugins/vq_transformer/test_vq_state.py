"""The state: windows, prompts and single tokens give the results of one call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq_plugins.vq_transformer.state import Cache, merge, summarize_by_code
from tests.plugins.vq_transformer import vq_oracle as oracle
from tests.plugins.vq_transformer.vq_cases import (
    REDUCTIONS,
    attentions,
    ids,
    max_difference,
    model,
    statistics,
    variables,
)
from tests.support.tiers import first

LENGTH, BLOCK, WINDOW = 13, 4, 3
TOKENS = ids(3, LENGTH)


@functools.cache
def model_case(head="gqa", reduction="recurrent", **changes):
    """Returns a model, its variables, and a compiled call with a state."""
    flax_model = model(head, reduction=reduction, block_size=BLOCK, window_size=WINDOW, **changes)
    params, extra = variables(flax_model)

    def call(state, tokens, mask=None, rows=None):
        output, _ = flax_model(
            tokens, mask, params=params, extra=extra, past_key_values=state, reset_rows=rows
        )
        return output.logits, output.past_key_values

    return flax_model, params, extra, jax.jit(call)


@functools.cache
def oracle_result(head="gqa"):
    """Returns the oracle's result for full rows."""
    flax_model, params, extra, _ = model_case(head)
    return oracle.evaluate(flax_model.config, params, extra["codebook"], TOKENS)


def check_state(state, head, counts):
    """Checks that the state of row i equals the oracle's after `counts[i]` tokens."""
    flax_model = model_case(head)[0]
    for part, module in zip(attentions(state), oracle_result(head).modules, strict=True):
        for row, count in enumerate(counts):
            prefix_arrays = jax.tree.map(lambda leaf, n=count: leaf[:, :n], module._asdict())
            prefix = module._replace(**{n: prefix_arrays[n] for n in ("keys", "codes", "values")})
            expected = oracle.final_state(flax_model.config, prefix)
            slots = (count + np.arange(WINDOW)) % WINDOW
            for name, leaf in expected.items():
                actual = np.asarray(part[name][row])
                actual = actual[:, slots] if name.startswith("window") else actual
                exact = name in ("window_code", "cache_count", "position")
                assert max_difference(actual, leaf[row]) <= (0 if exact else 1e-5), name


def start(rows=3, head="gqa"):
    return model_case(head)[0].init_cache(rows)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gqa", "shga"])
def test_decoding_goes_on_from_a_prompt_of_any_length(head):
    """Prompt lengths are near multiples of block and window. The other tokens are masked."""
    flax_model, params, extra, call = model_case(head)
    logits, state = oracle_result(head).logits, None
    for count in (1, 3, 4, 5, 7, 8, 9, 12):
        mask = np.broadcast_to(np.arange(LENGTH) < count, TOKENS.shape).astype(np.int32)
        actual, state = call(start(head=head), jnp.asarray(TOKENS), jnp.asarray(mask))
        assert max_difference(actual[:, :count], logits[:, :count]) <= 1e-5
        check_state(state, head, [count] * 3)
        for position in range(count, min(count + 2, LENGTH)):
            actual, state = call(state, jnp.asarray(TOKENS[:, position : position + 1]))
            assert max_difference(actual[:, 0], logits[:, position]) <= 1e-5
    check_state(state, head, [LENGTH] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["recurrent", "serial"])
def test_a_text_may_be_cut_into_windows(reduction):
    call = model_case("gqa", reduction)[-1]
    state, actual = start(), []
    for begin, end in ((0, 6), (6, 7), (7, 13)):
        logits, state = call(state, jnp.asarray(TOKENS[:, begin:end]))
        actual.append(logits)
    assert max_difference(np.concatenate(actual, 1), oracle_result().logits) <= 1e-5
    check_state(state, "gqa", [LENGTH] * 3)


def test_padding_on_any_side_leaves_no_trace():
    """Each row masks other columns. The result equals that of the row without them."""
    call = model_case()[-1]
    mask = np.ones((3, LENGTH + 4), np.int32)
    mask[0, :4], mask[1, -4:], mask[2, [0, 5, 6, 15]] = 0, 0, 0
    padded = np.full(mask.shape, 2, np.int32)
    padded[mask > 0] = TOKENS.reshape(-1)
    logits, state = call(start(), jnp.asarray(padded), jnp.asarray(mask))
    actual = np.asarray(logits)[mask > 0].reshape(3, LENGTH, -1)
    assert max_difference(actual, oracle_result().logits) <= 1e-5
    check_state(state, "gqa", [LENGTH] * 3)


def test_hidden_tokens_are_in_no_statistics():
    flax_model, params, extra, _ = model_case()
    mask = np.ones((3, LENGTH), np.int32)
    mask[0, :4], mask[1, -4:] = 0, 0
    call = jax.jit(
        lambda counted: flax_model(
            TOKENS, mask, params=params, train=True, extra=extra, code_mask=counted
        )
    )
    shorter = np.ones_like(mask)
    shorter[2, 6:] = 0
    for counted in (np.ones_like(mask), shorter):
        output, updated = call(counted)
        result = oracle.evaluate(
            flax_model.config, params, extra["codebook"], TOKENS, mask=mask, code_mask=counted
        )
        assert statistics(updated, "new_counts")[0].sum() == 2 * (mask * counted).sum()
        assert np.array_equal(statistics(updated, "new_counts")[0], result.modules[0].counts)
        assert max_difference(statistics(updated, "new_sums")[0], result.modules[0].sums) <= 1e-5
        expected = flax_model.config.commitment_cost * result.commitment
        assert float(output.auxiliary_loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_row_may_begin_afresh():
    call = model_case()[-1]
    _, state = call(start(), jnp.asarray(TOKENS))
    logits, state = call(state, jnp.asarray(TOKENS), None, jnp.asarray([True, True, True]))
    assert max_difference(logits, oracle_result().logits) <= 1e-5
    check_state(state, "gqa", [LENGTH] * 3)
    _, initial = call(start(), jnp.asarray(TOKENS[:, ::-1].copy()))
    on, _ = call(initial, jnp.asarray(TOKENS))
    some, _ = call(initial, jnp.asarray(TOKENS), None, jnp.asarray([False, True, False]))
    assert max_difference(some[1], oracle_result().logits[1]) <= 1e-5
    assert np.array_equal(some[::2], on[::2]) and max_difference(some[1], on[1]) > 0.01


def test_a_single_token_may_begin_afresh():
    call = model_case()[-1]
    _, state = call(start(), jnp.asarray(TOKENS))
    logits, state = call(state, jnp.asarray(TOKENS[:, :1]), None, jnp.asarray([True, True, True]))
    assert max_difference(logits, oracle_result().logits[:, :1]) <= 1e-5
    check_state(state, "gqa", [1] * 3)


def test_hidden_single_tokens_change_nothing():
    call = model_case()[-1]
    _, state = call(start(), jnp.asarray(TOKENS))
    mask = jnp.asarray([[1], [0], [1]])
    logits, updated = call(state, jnp.asarray(TOKENS[:, :1]), mask)
    assert np.isfinite(logits).all()
    for old, new in zip(attentions(state), attentions(updated), strict=True):
        for name, leaf in old.items():
            assert np.array_equal(leaf[1], new[name][1]), name
            if name == "position":
                assert np.array_equal(new[name], [LENGTH + 1, LENGTH, LENGTH + 1])


@pytest.mark.parametrize("reduction", first(REDUCTIONS, "recurrent", "serial", "matmul"))
def test_packed_documents_do_not_see_each_other(reduction):
    """Windows, caches and positions are per document, independent of block borders."""
    flax_model = model("mqa", reduction=reduction, block_size=BLOCK, window_size=2)
    params, extra = variables(flax_model)
    segments = np.array([[1] * 6 + [2] * 7, [1] * 3 + [2] * 2 + [3] * 6 + [0] * 2], np.int32)
    call = jax.jit(
        lambda tokens: flax_model(tokens, params=params, extra=extra, segment_ids=segments)[0]
    )
    expected = oracle.evaluate(
        flax_model.config, params, extra["codebook"], TOKENS[:2], segments=segments
    )
    real = segments > 0
    actual = np.asarray(call(TOKENS[:2]).logits)
    assert max_difference(actual[real], expected.logits[real]) <= 1e-5


@pytest.mark.slow
def test_caches_can_be_put_together_in_any_grouping():
    rng = np.random.default_rng(0)
    parts = [
        summarize_by_code(
            jnp.asarray(rng.normal(size=(2, n, 4)), jnp.float32),
            jnp.asarray(rng.integers(0, 6, (2, n)), jnp.int32),
            5,
        )
        for n in (3, 7, 4)
    ]
    empty = Cache(jnp.zeros((2, 5, 4)), jnp.zeros((2, 5), jnp.int32))
    left = merge(merge(parts[0], parts[1]), parts[2])
    right = merge(parts[0], merge(parts[1], parts[2]))
    pairs = ((left, right), (merge(empty, left), left), (merge(left, empty), left))
    for merged, other in pairs:
        assert (
            np.array_equal(merged.count, other.count)
            and max_difference(merged.mean, other.mean) <= 1e-6
        )


@pytest.mark.slow
def test_size_does_not_depend_on_the_length():
    flax_model = model_case()[0]
    shapes = [jax.tree.map(jnp.shape, flax_model.init_cache(2, length)) for length in (0, 10**6)]
    assert shapes[0] == shapes[1]
