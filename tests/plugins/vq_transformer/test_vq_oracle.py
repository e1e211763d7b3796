"""The oracle that other tests compare with: it has to give the public reference's numbers."""

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
# One of each kind; the other cases take as long again.
FEW = ("main/gau_l6_m3", "main/mhga", "opt/mqa")
SOME = first(CASES, *FEW)


def evaluated(golden, case):
    """Our configuration, gradients and results of a case, computed once."""
    if case not in RESULTS:
        RESULTS[case] = evaluate(golden, case)
    return RESULTS[case]


def evaluate(golden, case):
    """Window and block are arguments, so cases that differ in them alone compile once."""
    reference, batch = golden.reference(case), golden.batch()
    chosen = reference.config
    given = {"window": np.int32(chosen.window_size), "block": np.int32(chosen.block_size)}
    if case.startswith("main"):
        given["code_mask"] = batch["loss_mask"]
    books = reference.extra["codebook"]
    return chosen, oracle.gradients(chosen, reference.params, books, batch, **given)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_oracle_gives_the_numbers_of_the_reference(golden, case):
    main = case.startswith("main")
    chosen, ((loss, (token_loss, result)), gradients) = evaluated(golden, case)
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
    for number, seen in enumerate(result.modules):
        codes = np.moveaxis(seen.codes, 2, 1)
        assert np.array_equal(codes, golden[f"{case}/shortcodes"][number])
        assert max_difference(np.moveaxis(seen.keys, 2, 1), golden[f"{case}/keys"][number]) <= 2e-5
        assert (
            max_difference(np.moveaxis(seen.errors, 2, 1), golden[f"{case}/errs2"][number]) <= 2e-5
        )


@pytest.mark.parametrize("case", SOME[: len(MAIN)])
def test_oracle_ends_in_the_state_of_the_reference(golden, case):
    chosen, ((_, (_, result)), _) = evaluated(golden, case)
    names = {
        "window_key": "xlcache_k_hat",
        "window_value": "xlcache_v",
        "window_code": "xlcache_z",
        "cache_mean": "agg_mean",
        "cache_count": "agg_count",
    }
    for number, seen in enumerate(result.modules):
        state = oracle.final_state(chosen, seen)
        for ours, theirs in names.items():
            wanted = golden[f"{case}/final_state/attn{number}/{theirs}"]
            assert max_difference(state[ours], wanted) <= 2e-5, ours


@pytest.mark.parametrize("case", ["main/mhga", "opt/mqa"])
def test_oracle_counts_what_the_moving_averages_take_in(golden, case):
    over = 1 if case.startswith("main") else 6  # the stacked family counts its 6 blocks six times
    _, ((_, (_, result)), _) = evaluated(golden, case)
    before, after = (
        attentions(golden.reference(case, what).extra["codebook"]) for what in ("params", "grads")
    )
    for seen, old, gradient in zip(result.modules, before, after, strict=True):
        for name, new in (("sums", seen.sums), ("counts", seen.counts)):
            wanted = old["codebook"][name] - gradient["codebook"][name]
            assert max_difference(0.99 * old["codebook"][name] + 0.01 * over * new, wanted) <= 1e-6


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
