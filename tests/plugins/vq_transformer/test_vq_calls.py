"""Calls: keys for dropout, independent rows, and dtypes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq_plugins.vq_transformer import layers as attention
from hfseq_plugins.vq_transformer.blocks import AttentionInputs, AttentionOptions, ScoreTerms
from hfseq_plugins.vq_transformer.configuration import DROPOUT_RATES, VQTransformerConfig
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
from hfseq_plugins.vq_transformer.state import empty_state

SIZES = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "num_codes": 10,
    "window_size": 3,
    "block_size": 4,
}
IDS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


def model(**changes):
    return FlaxVQTransformerForCausalLM(VQTransformerConfig(**{**SIZES, **changes}))


@pytest.mark.parametrize("rate", DROPOUT_RATES)
def test_training_with_any_dropout_needs_a_key(rate):
    flax_model = FlaxVQTransformerForCausalLM(
        VQTransformerConfig(**SIZES, **{rate: 0.5}), _do_init=False
    )
    with pytest.raises(UsageError, match="dropout_rng"):
        flax_model(IDS, params={"any": 0}, train=True)


@pytest.mark.slow
def test_logits_have_the_type_of_computation():
    flax_model = model(head_bias=True)
    assert flax_model(IDS, params=flax_model.params).logits.dtype == jnp.float32
    half = FlaxVQTransformerForCausalLM(flax_model.config, dtype=jnp.bfloat16, _do_init=False)
    output = half(IDS, params=flax_model.params, extra=flax_model.extra)[0]
    assert output.logits.dtype == jnp.bfloat16


def one_token_of(value, **changes):
    """Attends with one token per row and a full state. Returns output and state."""
    config = VQTransformerConfig(**SIZES, value_dim=4)
    key = jax.random.key(0)
    state = empty_state(2, config, jnp.float32)
    state = state._replace(
        window_key=jax.random.normal(key, state.window_key.shape),
        window_value=value(state.window_value.shape),
        window_code=jnp.array([[[1, 2, 3]], [[4, 5, 6]]]),
        position=jnp.full(2, 3),
    )
    inputs = AttentionInputs(
        jax.random.normal(key, (2, 1, 1, 1, 8)),
        jax.random.normal(key, (2, 1, 1, 8)),
        jnp.ones((2, 1, 1, 4)),
        jnp.full((2, 1, 1), 7),
    )
    relative = jnp.ones((4, 16)), jax.random.normal(key, (16, 1, 8))
    offsets = jnp.zeros((1, 1, 1, 8))
    terms = ScoreTerms(jax.random.normal(key, (1, 10, 8)), relative, offsets, offsets)
    return attention.attend_one_token(
        inputs, terms, AttentionOptions(window=3, block=4, **changes), state
    )


@pytest.mark.slow
def test_infinite_values_of_a_row_stay_in_it():
    def poisoned(shape):
        return jnp.ones(shape).at[0].set(jnp.inf)

    (clean, updated), (out, state) = one_token_of(jnp.ones), one_token_of(poisoned)
    assert not np.isfinite(out[0]).all()
    np.testing.assert_array_equal(out[1], clean[1])
    for name, leaf in state._asdict().items():
        np.testing.assert_array_equal(leaf[1], getattr(updated, name)[1], err_msg=name)


def test_gradients_stop_at_the_state_for_one_token_too():
    def total(factor, stop):
        return one_token_of(lambda shape: factor * jnp.ones(shape), stop_gradient=stop)[0].sum()

    gradients = jax.jit(lambda factor: [jax.grad(total)(factor, stop) for stop in (True, False)])
    stopped, whole = gradients(1.0)
    assert stopped == 0.0 != whole


@pytest.mark.slow
def test_short_calls_take_short_blocks():
    flax_model = model(block_size=512)
    text = jax.make_jaxpr(lambda ids: flax_model(ids, params=flax_model.params).logits)(
        IDS
    ).pretty_print()
    assert "512" not in text
