"""The best tokens found from block maxima equal those of a full search."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.generation import logits_process as p
from hfseq.nn import cpu


@pytest.mark.parametrize(
    ("size", "width"),
    [(54688, 32), (32128, 128), (50265, 45), (50257, 29), (48, 12), (10007, None), (17, None)],
)
def test_a_block_divides_the_vocabulary(size, width):
    assert cpu.block_width(size) == width


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("levels", [2, 5, 10_000])
def test_top_k_matches_jax_with_ties(levels, count):
    random = np.random.default_rng(levels + count)
    values = jnp.asarray(random.integers(0, levels, (16, 2048)), jnp.float32)
    values = values.at[3].set(-jnp.inf).at[4, 7:].set(-jnp.inf)
    expected = jax.lax.top_k(values, count)
    result = cpu.top_k(values, count, cpu.block_maxima(values, 16))
    for mine, theirs in zip(result, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(cpu.top_k(values, count), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("levels", [2, 10_000])
def test_the_first_best_is_argmax(levels):
    random = np.random.default_rng(levels)
    values = jnp.asarray(random.integers(0, levels, (16, 320)), jnp.float32)
    result = cpu.argmax_from_maxima(values, cpu.block_maxima(values, 32))
    np.testing.assert_array_equal(result, values.argmax(-1))


@pytest.mark.parametrize("rows", [1, 6, 7, 24])
def test_parts_of_log_softmax(rows):
    logits = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, 96)) * 9, jnp.float32)
    top, mass, maxima = cpu.log_softmax_parts(logits, 16)
    np.testing.assert_allclose(logits - top - mass, jax.nn.log_softmax(logits), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(maxima, cpu.block_maxima(logits, 16))


PROCESSORS = {
    "lengths": [
        p.FlaxMinLengthLogitsProcessor(6, 3),
        p.FlaxMinNewTokensLengthLogitsProcessor(1, 4, [3, 70]),
    ],
    "forced": [
        p.FlaxSuppressTokensLogitsProcessor([90]),
        p.FlaxForcedEOSTokenLogitsProcessor(6, 3),
    ],
    "begin": [
        p.FlaxForcedBOSTokenLogitsProcessor(5),
        p.FlaxSuppressTokensAtBeginLogitsProcessor([8, 9], 5),
    ],
    "bias": [p.FlaxSequenceBiasLogitsProcessor({(7,): 9.0, (40,): -3.0, (1, 2, 60): 5.0})],
    "bad words": [p.FlaxNoBadWordsLogitsProcessor([[95], [1, 9]], 3)],
    "decay": [p.FlaxExponentialDecayLengthPenalty((1, 1.5), 3, 1)],
    "places": [p.FlaxForceTokensLogitsProcessor([(5, 44), (6, None)])],
    "none": [],
}


@pytest.mark.parametrize("length", [1, 5, 6])
@pytest.mark.parametrize("name", PROCESSORS)
def test_only_touched_blocks_are_looked_at_again(name, length):
    random = np.random.default_rng(0)
    scores = jnp.asarray(random.normal(size=(4, 96)), jnp.float32)
    ids = jnp.asarray(random.integers(0, 3, (4, 8)), jnp.int32)
    processed = scores
    for processor in PROCESSORS[name]:
        processed = processor(ids, processed, jnp.int32(length))
    # Scores of other tokens are unchanged or -inf.
    changed = cpu.changed_blocks(PROCESSORS[name], 96, 4)
    assert changed is not None and len(changed) <= 4
    maxima = cpu.update_block_maxima(
        PROCESSORS[name], cpu.block_maxima(scores, 4), processed, length, changed
    )
    np.testing.assert_array_equal(maxima, cpu.block_maxima(processed, 4))


def test_full_vocabulary_processors_are_marked():
    for processor in (p.FlaxRepetitionPenaltyLogitsProcessor(1.2), lambda ids, scores, n: scores):
        assert cpu.changed_blocks([processor], 96, 4) is None
    every_second_token = p.FlaxSuppressTokensLogitsProcessor(list(range(0, 96, 2)))
    assert cpu.changed_blocks([every_second_token], 96, 4) is None
