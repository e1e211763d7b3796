"""Comparison of the plugin with all golden numbers of the public reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.generation import FlaxTopPLogitsWarper
from hfseq_plugins.vq_transformer.codebook import quantize
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
from hfseq_plugins.vq_transformer.positions import sinusoids
from tests.plugins.vq_transformer.vq_cases import (
    CASES,
    MAIN,
    REDUCTIONS,
    assert_gradients_close,
    attentions,
    max_difference,
    statistics,
    token_losses,
)
from tests.support.tiers import first

RESULTS = {}
SOME = first(CASES, "main/mhga")
STATE = {
    "window_key": "xlcache_k_hat",
    "window_value": "xlcache_v",
    "window_code": "xlcache_z",
    "cache_mean": "agg_mean",
    "cache_count": "agg_count",
}


def model_of(golden, case, **changes):
    reference = golden.reference(case)
    for name, value in changes.items():
        setattr(reference.config, name, value)
    return FlaxVQTransformerForCausalLM(reference.config, _do_init=False), reference


def evaluate(golden, case, **changes):
    """Returns loss, gradients, output and collections of a training call without a state."""
    model, reference = model_of(golden, case, **changes)
    batch = golden.batch()
    masked = batch["loss_mask"] if case.startswith("main") else None
    size = batch["inputs"].size

    def loss(params):
        output, extra = model(
            batch["inputs"],
            params=params,
            past_key_values=model.init_cache(2, 0),
            train=True,
            code_mask=masked,
            output_hidden_states=True,
            extra=reference.extra,
        )
        each = batch["loss_mask"] * token_losses(output.logits, batch["targets"])
        return each.mean() + output.auxiliary_loss / size, (each.mean(), output, extra)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(reference.params)


def evaluated(golden, case):
    if case not in RESULTS:
        RESULTS[case] = evaluate(golden, case)
    return RESULTS[case]


def matching_logits(golden, case, logits):
    """Returns our logits and the reference's. The recurrent layout stores log-probabilities."""
    if case.startswith("main"):
        return jax.nn.log_softmax(logits), golden[f"{case}/logprobs"]
    return logits, golden[f"{case}/logits"]


@pytest.mark.parametrize("case", SOME)
def test_logits_and_losses(golden, case):
    (loss, (token_loss, output, _)), _ = evaluated(golden, case)
    assert max_difference(*matching_logits(golden, case, output.logits)) <= 2e-5
    assert float(loss) == pytest.approx(float(golden[f"{case}/loss_total"]), rel=1e-5)
    assert float(token_loss) == pytest.approx(float(golden[f"{case}/loss_lm"]), rel=1e-5)
    model_config = golden.reference(case).config
    commitment = output.auxiliary_loss / golden["common/inputs"].size / model_config.commitment_cost
    assert float(commitment) == pytest.approx(float(golden[f"{case}/l_commit"]), rel=1e-5)


@pytest.mark.parametrize("case", SOME)
def test_gradients_of_every_parameter(golden, case):
    _, gradients = evaluated(golden, case)
    assert_gradients_close(gradients, golden.reference(case, "grads").params)


@pytest.mark.parametrize("case", SOME)
def test_hidden_states_of_every_layer(golden, case):
    (_, (_, output, _)), _ = evaluated(golden, case)
    residuals = golden[f"{case}/{'attn_res' if case.startswith('main') else 'residuals'}"]
    states = output.hidden_states
    for number in range(2):
        expected = residuals[2 * number] + residuals[2 * number + 1]
        layer_output = golden[f"{case}/x_final"] if number else states[1]
        assert max_difference(layer_output - np.asarray(states[number]), expected) <= 2e-5


@pytest.mark.parametrize("case", SOME)
def test_nearest_codes_and_distances_of_the_golden_keys(golden, case):
    for number, keys in enumerate(golden[f"{case}/keys"]):
        rows = jnp.asarray(golden[f"{case}/codebooks"][number])
        actual = quantize(jnp.moveaxis(jnp.asarray(keys), 1, 2), rows)
        expected = np.moveaxis(golden[f"{case}/shortcodes"][number], 1, 2)
        assert np.array_equal(actual.codes, expected)
        assert (
            max_difference(actual.errors, np.moveaxis(golden[f"{case}/errs2"][number], 1, 2))
            <= 2e-5
        )


@pytest.mark.parametrize("case", SOME)
def test_statistics_of_the_codes(golden, case):
    """The sums of a call are the golden keys, grouped by their golden codes."""
    (_, (_, _, extra)), _ = evaluated(golden, case)
    main = case.startswith("main")
    mask = golden["common/loss_mask"] if main else np.ones_like(golden["common/loss_mask"])
    sums, counts = statistics(extra, "new_sums"), statistics(extra, "new_counts")
    for number, codes in enumerate(golden[f"{case}/shortcodes"]):
        one_hot = np.eye(10)[codes] * mask[:, None, :, None]
        assert np.array_equal(counts[number], one_hot.sum((0, 2)))
        keys = golden[f"{case}/keys"][number]
        assert max_difference(sums[number], np.einsum("bhts,bhtk->hsk", one_hot, keys)) <= 2e-5
    if not main:
        assert np.array_equal(counts, golden[f"{case}/ema_count_hat"])
        assert max_difference(sums, golden[f"{case}/ema_sum_hat"]) <= 2e-5


@pytest.mark.parametrize("case", SOME)
def test_moving_averages(golden, case):
    """The reference's stacked layout counts each of its 6 blocks six times. Ours counts it once."""
    (_, (_, _, extra)), _ = evaluated(golden, case)
    model, reference = model_of(golden, case)
    settled = model.finalize_extra(extra)
    gradients = golden.reference(case, "grads").extra
    for name in ("sums", "counts"):
        old = np.stack(statistics(reference.extra, name))
        if case.startswith("main"):
            expected = old - np.stack(statistics(gradients, name))
        else:
            hat = golden[f"{case}/ema_{name.removesuffix('s')}_hat"]
            expected = 0.99 * old + 0.01 * hat
        assert max_difference(statistics(settled, name), expected) <= 1e-5
        assert not np.any(statistics(settled, f"new_{name}"))


@pytest.mark.parametrize("case", SOME[: len(MAIN)])
def test_state_after_the_call(golden, case):
    (_, (_, output, _)), _ = evaluated(golden, case)
    check_state(golden, case, output.past_key_values)


def check_state(golden, case, state):
    window = golden.reference(case).config.window_size
    for number, part in enumerate(attentions(state)):
        slots = (24 + np.arange(window)) % window  # token i is in slot i modulo the window size
        for ours, theirs in STATE.items():
            actual = np.asarray(part[ours])
            actual = actual[:, :, slots] if ours.startswith("window") else actual
            expected = golden[f"{case}/final_state/attn{number}/{theirs}"]
            exact = ours in ("window_code", "cache_count")
            assert max_difference(actual, expected) <= (0 if exact else 2e-5), (number, ours)
        assert np.array_equal(part["position"], [24, 24])


@pytest.mark.parametrize("case", first(CASES, "main/gau"))
def test_one_token_after_the_other(golden, case):
    model, reference = model_of(golden, case)

    def step(state, ids):
        output = model(
            ids[:, None], params=reference.params, extra=reference.extra, past_key_values=state
        )[0]
        return output.past_key_values, output.logits[:, 0]

    ids = jnp.asarray(golden["common/inputs"]).T
    state, logits = jax.jit(functools.partial(jax.lax.scan, step))(model.init_cache(2, 0), ids)
    assert max_difference(*matching_logits(golden, case, jnp.moveaxis(logits, 0, 1))) <= 2e-5
    if case.startswith("main"):
        check_state(golden, case, state)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_gives_the_same(golden, reduction):
    case = "opt/mqa"
    (loss, (_, output, _)), gradients = evaluate(golden, case, reduction=reduction)
    assert max_difference(output.logits, golden[f"{case}/logits"]) <= 2e-5
    assert float(loss) == pytest.approx(float(golden[f"{case}/loss_total"]), rel=1e-5)
    assert_gradients_close(gradients, golden.reference(case, "grads").params)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["opt/shga", "opt/mqa"])
def test_quadratic_baseline(golden, case):
    model, reference = model_of(golden, case, attention_type="full")
    output = model(golden["common/inputs"], params=reference.params, extra=reference.extra)[0]
    assert max_difference(output.logits, golden[f"{case}/full_attention_logits"]) <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["main/mhga", "main/gau_noagg", "opt/mqa"])
def test_quadratic_attention_over_codes(golden, case):
    model, reference = model_of(golden, case, attention_type="vq_quadratic")
    output = model(golden["common/inputs"], params=reference.params, extra=reference.extra)[0]
    assert max_difference(*matching_logits(golden, case, output.logits)) <= 2e-5


def test_sinusoids(golden):
    actual = sinusoids(jnp.arange(9), 16, 1000.0)
    assert max_difference(actual, golden["pieces/sinusoid_pos0to8_width16_lam1000"]) <= 1e-6


@pytest.mark.slow
def test_nucleus_keeps_what_the_reference_keeps(golden):
    """The reference has a tolerance of 1e-4 and keeps the last of equal tokens."""
    logits = golden["sampling/logits"]
    for p, expected in zip(golden["sampling/p"], golden["sampling/nucleus_kept"], strict=True):
        filtered = FlaxTopPLogitsWarper(float(p) - 1e-4)(None, logits, cur_len=None)
        assert np.array_equal(np.isfinite(filtered), expected), p
