"""The oracle of the other tests, compared with the public reference's numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.nn.trees import flatten
from tests.plugins.vq_transformer import vq_oracle as oracle
from tests.plugins.vq_transformer.vq_cases import (
    CASES,
    MAIN,
    assert_gradients_close,
    attentions,
    max_difference,
)
from tests.support.tiers import first

RESULTS = {}
# One case per layout. The others are as slow.
FEW = ("main/gau_l6_m3", "main/mhga", "opt/mqa")
SOME = first(CASES, *FEW)


def evaluated(golden, case):
    """Returns configuration, results and gradients of a case, computed once."""
    if case not in RESULTS:
        RESULTS[case] = evaluate(golden, case)
    return RESULTS[case]


def evaluate(golden, case):
    """Evaluates a case. Window and block are traced, so that cases share compiled programs."""
    reference, batch = golden.reference(case), golden.batch()
    model_config = reference.config
    inputs = {
        "window": np.int32(model_config.window_size),
        "block": np.int32(model_config.block_size),
    }
    if case.startswith("main"):
        inputs["code_mask"] = batch["loss_mask"]
    books = reference.extra["codebook"]
    return model_config, oracle.gradients(model_config, reference.params, books, batch, **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_oracle_gives_the_numbers_of_the_reference(golden, case):
    main = case.startswith("main")
    model_config, ((loss, (token_loss, result)), gradients) = evaluated(golden, case)
    logits = np.asarray(jax.nn.log_softmax(result.logits)) if main else result.logits
    assert max_difference(logits, golden[f"{case}/{'logprobs' if main else 'logits'}"]) <= 2e-5
    assert loss == pytest.approx(float(golden[f"{case}/loss_total"]), rel=1e-5)
    assert token_loss == pytest.approx(float(golden[f"{case}/loss_lm"]), rel=1e-5)
    size = golden["common/inputs"].size
    assert result.commitment / size == pytest.approx(float(golden[f"{case}/l_commit"]), rel=1e-5)
    assert max_difference(result.final, golden[f"{case}/x_final"]) <= 2e-5
    for ours, theirs in zip(
        result.residuals, golden[f"{case}/{'attn_res' if main else 'residuals'}"], strict=True
    ):
        assert max_difference(ours, theirs) <= 2e-5
    assert_gradients_close(gradients, golden.reference(case, "grads").params)


@pytest.mark.parametrize("case", SOME)
def test_oracle_chooses_the_codes_of_the_reference(golden, case):
    _, ((_, (_, result)), _) = evaluated(golden, case)
    for number, module in enumerate(result.modules):
        codes = np.moveaxis(module.codes, 2, 1)
        assert np.array_equal(codes, golden[f"{case}/shortcodes"][number])
        assert (
            max_difference(np.moveaxis(module.keys, 2, 1), golden[f"{case}/keys"][number]) <= 2e-5
        )
        assert (
            max_difference(np.moveaxis(module.errors, 2, 1), golden[f"{case}/errs2"][number])
            <= 2e-5
        )


@pytest.mark.parametrize("case", SOME[: len(MAIN)])
def test_oracle_ends_in_the_state_of_the_reference(golden, case):
    model_config, ((_, (_, result)), _) = evaluated(golden, case)
    names = {
        "window_key": "xlcache_k_hat",
        "window_value": "xlcache_v",
        "window_code": "xlcache_z",
        "cache_mean": "agg_mean",
        "cache_count": "agg_count",
    }
    for number, module in enumerate(result.modules):
        state = oracle.final_state(model_config, module)
        for ours, theirs in names.items():
            expected = golden[f"{case}/final_state/attn{number}/{theirs}"]
            assert max_difference(state[ours], expected) <= 2e-5, ours


@pytest.mark.parametrize("case", ["main/mhga", "opt/mqa"])
def test_oracle_counts_what_the_moving_averages_take_in(golden, case):
    over = 1 if case.startswith("main") else 6  # the stacked layout counts its 6 blocks six times
    _, ((_, (_, result)), _) = evaluated(golden, case)
    initial, updated = (
        attentions(golden.reference(case, entry).extra["codebook"]) for entry in ("params", "grads")
    )
    for module, old, gradient in zip(result.modules, initial, updated, strict=True):
        for name, new in (("sums", module.sums), ("counts", module.counts)):
            expected = old["codebook"][name] - gradient["codebook"][name]
            assert (
                max_difference(0.99 * old["codebook"][name] + 0.01 * over * new, expected) <= 1e-6
            )


@pytest.mark.parametrize("case", SOME[len(MAIN) :])
def test_oracle_has_the_quadratic_baseline_of_the_reference(golden, case):
    reference = golden.reference(case)
    reference.config.attention_type = "full"
    books = reference.extra["codebook"]
    result = oracle.evaluate(reference.config, reference.params, books, golden["common/inputs"])
    assert max_difference(result.logits, golden[f"{case}/full_attention_logits"]) <= 2e-5


def test_every_case_has_every_parameter(golden):
    for case in CASES:
        params = golden.reference(case).params
        gradients = golden.reference(case, "grads").params
        assert flatten(params).keys() == flatten(gradients).keys()
