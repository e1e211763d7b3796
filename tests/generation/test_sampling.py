"""Samples follow PyTorch's distribution and depend only on the key."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.generation import (
    FlaxMinPLogitsWarper,
    FlaxTopKLogitsWarper,
    FlaxTopPLogitsWarper,
    options,
    request,
    search,
)
from tests.generation import families

CHAINS = {
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "top-p alone": {"top_k": 0, "top_p": 0.6},
    "typical": {"top_k": 0, "typical_p": 0.7},
    "cutoffs": {"top_k": 0, "epsilon_cutoff": 0.01, "eta_cutoff": 0.02},
    "top-h": {"top_h": 0.5, "temperature": 1.5},
    "default": {},
}


def tokens(model=None, ids=None, **changes):
    model = model or families.model("llama")
    ids = families.prompts(3, 5) if ids is None else ids
    settings = {"max_length": 12, "do_sample": True, "eos_token_id": None, **changes}
    return np.asarray(model.generate(ids, **settings).sequences)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", CHAINS)
def test_filtered_probabilities_are_pytorchs(name, beams):
    torch = pytest.importorskip("torch")
    from transformers import GenerationConfig

    ours, theirs = families.model_pair("llama")
    settings = {"do_sample": True, "num_beams": beams, "eos_token_id": 2, **CHAINS[name]}
    config, _, _ = request.merge_options(ours, GenerationConfig(**settings), {})
    theirs._prepare_special_tokens(config, device="cpu")
    chain = theirs._get_logits_processor(config, input_ids_seq_length=1)
    logits = (2 * np.random.default_rng(0).normal(size=(6, 5000))).astype(np.float32)
    expected = torch.softmax(chain(None, torch.tensor(logits)), -1).numpy()
    scores = logits
    for warper in options.resolve_options(config, {}).warpers():
        scores = warper(None, scores, None)
    np.testing.assert_allclose(jax.nn.softmax(scores), expected, atol=1e-7)
    assert ((np.asarray(scores) > -np.inf) == (expected > 0)).all()


@pytest.mark.slow
def test_frequencies_are_the_probabilities():
    scores = np.array([[0.0, 1.0, 2.0, -np.inf]], np.float32)
    keys = search.row_keys(jax.random.PRNGKey(0), 20000, 3)
    samples = np.asarray(search.sample(keys, np.repeat(scores, 20000, 0)))
    frequencies = np.bincount(samples, minlength=4) / len(samples)
    np.testing.assert_allclose(frequencies, np.asarray(jax.nn.softmax(scores))[0], atol=0.01)


@pytest.mark.slow
def test_top_k_draws_the_same_as_filtering_the_vocabulary():
    warpers = [FlaxTopPLogitsWarper(0.8), FlaxMinPLogitsWarper(0.05)]
    scores = (2 * np.random.default_rng(0).normal(size=(1, 300))).astype(np.float32)
    filtered = FlaxTopKLogitsWarper(20)(None, scores, None)
    for warper in warpers:
        filtered = warper(None, filtered, None)
    expected = np.asarray(jax.nn.softmax(filtered))[0]
    keys = search.row_keys(jax.random.PRNGKey(0), 20000, 3)
    repeated = np.repeat(scores, 20000, 0)
    for samples in (
        search.sample_top_k(keys, repeated, 20, warpers),
        search.sample(keys, np.repeat(np.asarray(filtered), 20000, 0)),
    ):
        frequencies = np.bincount(np.asarray(samples), minlength=300) / 20000
        np.testing.assert_allclose(frequencies, expected, atol=0.015)
        assert not frequencies[expected == 0].any()


def test_sampling_without_replacement_prefers_the_probable():
    scores = np.repeat(np.log([[0.5, 0.3, 0.15, 0.05]]).astype(np.float32), 20000, 0)
    keys = search.row_keys(jax.random.PRNGKey(0), 20000, 0)
    picked, indices = map(np.asarray, search.sample_without_replacement(keys, scores, 2))
    assert (indices[:, 0] != indices[:, 1]).all()
    assert (picked == np.take_along_axis(scores, indices, 1)).all()
    first = np.bincount(indices[:, 0], minlength=4) / len(indices)
    np.testing.assert_allclose(first, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    assert (indices == 0).any(1).mean() == pytest.approx(
        0.5 + 0.3 * 5 / 7 + 0.15 * 5 / 8.5 + 0.05 * 5 / 9.5, abs=0.015
    )


@pytest.mark.slow
def test_key_decides():
    first = tokens(prng_key=1)
    assert (tokens(prng_key=1) == first).all()
    assert (tokens(prng_key=jax.random.PRNGKey(1)) == first).all()
    assert (tokens(prng_key=2) != first).any()
    assert (tokens() == tokens(prng_key=0)).all()
    typed = tokens(prng_key=jax.random.key(1))
    assert (typed == first).all()


@pytest.mark.slow
def test_sampled_rows_do_not_depend_on_other_rows():
    ids = families.prompts(3, 5)
    full = tokens(ids=ids, prng_key=4)
    assert (tokens(ids=ids[:1], prng_key=4) == full[:1]).all()
    assert (tokens(ids=np.repeat(ids[:1], 3, 0), prng_key=4)[0] == full[0]).all()
    assert (tokens(ids=np.repeat(ids[:1], 3, 0), prng_key=4)[1] != full[0]).any()


@pytest.mark.slow
def test_several_samples_of_each_row():
    result = tokens(num_return_sequences=4)
    assert result.shape == (12, 12)
    assert (result[:, :5] == np.repeat(families.prompts(3, 5), 4, 0)).all()
    assert len({tuple(row) for row in result[:4]}) > 1
    pair = (
        families.model("t5")
        .generate(families.prompts(2, 5), do_sample=True, max_length=9, num_return_sequences=3)
        .sequences
    )
    assert pair.shape == (6, 9) and len({tuple(map(int, row)) for row in pair[:3]}) > 1


@pytest.mark.slow
def test_samples_respect_the_filters():
    model = families.model("llama")
    greedy = np.asarray(model.generate(families.prompts(3, 5), max_length=12, eos_token_id=None)[0])
    assert (tokens(top_k=1) == greedy).all()
    assert (tokens(top_p=1e-6, top_k=0) == greedy).all()
    assert (tokens(top_k=40, temperature=0.001) == greedy).all()
    assert (tokens(top_k=0, prng_key=3) != greedy).any()


@pytest.mark.slow
def test_beam_sampling():
    first = tokens(num_beams=3, num_return_sequences=2, prng_key=1)
    assert first.shape == (6, 12)
    assert (tokens(num_beams=3, num_return_sequences=2, prng_key=1) == first).all()
    assert (tokens(num_beams=3, num_return_sequences=2, prng_key=2) != first).any()
    cold = tokens(num_beams=3, temperature=0.001, top_k=0)
    assert (cold == tokens(num_beams=3, do_sample=False)).all()
