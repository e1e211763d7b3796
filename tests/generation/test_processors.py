"""Processors equal PyTorch's and accept the arguments of Transformers 4's Flax processors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import generation as g

ROWS, VOCAB, LENGTH, WIDTH = 4, 23, 9, 16


def scores(seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(ROWS, VOCAB))).astype(np.float32)


def tokens(seed: int = 1, width: int = LENGTH) -> np.ndarray:
    """Few different tokens, so that n-grams repeat."""
    return np.random.default_rng(seed).integers(0, 5, (ROWS, width)).astype(np.int32)


SOURCE = tokens(5, 12)
IGNORED = np.array([0, 3, 8, 1])
CASES = {
    "temperature": (g.FlaxTemperatureLogitsWarper(0.7), "TemperatureLogitsWarper", [0.7]),
    "top_k": (g.FlaxTopKLogitsWarper(5), "TopKLogitsWarper", [5]),
    "top_k above vocabulary": (g.FlaxTopKLogitsWarper(99), "TopKLogitsWarper", [99]),
    "top_p": (g.FlaxTopPLogitsWarper(0.8), "TopPLogitsWarper", [0.8]),
    "top_p keeps": (
        g.FlaxTopPLogitsWarper(0.1, min_tokens_to_keep=3),
        "TopPLogitsWarper",
        [0.1, -np.inf, 3],
    ),
    "top_h": (g.FlaxTopHLogitsWarper(0.4), "TopHLogitsWarper", [0.4]),
    "min_p": (g.FlaxMinPLogitsWarper(0.1), "MinPLogitsWarper", [0.1]),
    "min_p keeps": (
        g.FlaxMinPLogitsWarper(0.9, min_tokens_to_keep=4),
        "MinPLogitsWarper",
        [0.9, -np.inf, 4],
    ),
    "typical": (g.FlaxTypicalLogitsWarper(0.6), "TypicalLogitsWarper", [0.6]),
    "typical keeps": (
        g.FlaxTypicalLogitsWarper(0.2, min_tokens_to_keep=5),
        "TypicalLogitsWarper",
        [0.2, -np.inf, 5],
    ),
    "epsilon": (g.FlaxEpsilonLogitsWarper(0.02), "EpsilonLogitsWarper", [0.02]),
    "eta": (g.FlaxEtaLogitsWarper(0.05), "EtaLogitsWarper", [0.05]),
    "repetition": (
        g.FlaxRepetitionPenaltyLogitsProcessor(1.7),
        "RepetitionPenaltyLogitsProcessor",
        [1.7],
    ),
    "repetition, padding": (
        g.FlaxRepetitionPenaltyLogitsProcessor(1.7, IGNORED),
        "RepetitionPenaltyLogitsProcessor",
        [1.7, IGNORED],
    ),
    "encoder repetition": (
        g.FlaxEncoderRepetitionPenaltyLogitsProcessor(1.7, SOURCE),
        "EncoderRepetitionPenaltyLogitsProcessor",
        [1.7, SOURCE],
    ),
    "2-grams": (g.FlaxNoRepeatNGramLogitsProcessor(2), "NoRepeatNGramLogitsProcessor", [2]),
    "3-grams": (g.FlaxNoRepeatNGramLogitsProcessor(3), "NoRepeatNGramLogitsProcessor", [3]),
    "1-grams": (g.FlaxNoRepeatNGramLogitsProcessor(1), "NoRepeatNGramLogitsProcessor", [1]),
    "encoder 2-grams": (
        g.FlaxEncoderNoRepeatNGramLogitsProcessor(2, SOURCE),
        "EncoderNoRepeatNGramLogitsProcessor",
        [2, SOURCE],
    ),
    "sequence bias": (
        g.FlaxSequenceBiasLogitsProcessor({(3,): 2.0, (1, 4): -3.0, (2, 6): 1.0, (0, 1, 2): 5.0}),
        "SequenceBiasLogitsProcessor",
        [{(3,): 2.0, (1, 4): -3.0, (2, 6): 1.0, (0, 1, 2): 5.0}],
    ),
    "bad words": (
        g.FlaxNoBadWordsLogitsProcessor([[3], [2], [1, 4], [4, 4, 0]], 2),
        "NoBadWordsLogitsProcessor",
        [[[3], [2], [1, 4], [4, 4, 0]], 2],
    ),
    "min length": (
        g.FlaxMinLengthLogitsProcessor(10, [2, 5]),
        "MinLengthLogitsProcessor",
        [10, [2, 5]],
    ),
    "min length reached": (
        g.FlaxMinLengthLogitsProcessor(9, 2),
        "MinLengthLogitsProcessor",
        [9, 2],
    ),
    "min new": (
        g.FlaxMinNewTokensLengthLogitsProcessor(5, 5, 2),
        "MinNewTokensLengthLogitsProcessor",
        [5, 5, 2],
    ),
    "forced eos": (
        g.FlaxForcedEOSTokenLogitsProcessor(10, [2, 3]),
        "ForcedEOSTokenLogitsProcessor",
        [10, [2, 3]],
    ),
    "forced bos": (g.FlaxForcedBOSTokenLogitsProcessor(4), "ForcedBOSTokenLogitsProcessor", [4]),
    "decay": (
        g.FlaxExponentialDecayLengthPenalty((2, 1.2), [2], 4),
        "ExponentialDecayLengthPenalty",
        [(2, 1.2), [2], 4],
    ),
    "suppress": (
        g.FlaxSuppressTokensLogitsProcessor([1, 7]),
        "SuppressTokensLogitsProcessor",
        [[1, 7]],
    ),
    "suppress first": (
        g.FlaxSuppressTokensAtBeginLogitsProcessor([1, 7], 9),
        "SuppressTokensAtBeginLogitsProcessor",
        [[1, 7], 9],
    ),
    "normalise": (g.FlaxLogitNormalization(), "LogitNormalization", []),
}


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_equals_pytorch(name, compiled):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process

    ours, theirs, arguments = CASES[name]
    arguments = [torch.tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
    process = jax.jit(ours.__call__) if compiled else ours
    for length in (1, 4, LENGTH):
        ids, values = tokens()[:, :length], scores()
        values[0, 3] = -np.inf  # a forbidden token
        expected = getattr(logits_process, theirs)(*arguments)(
            torch.tensor(ids).long(), torch.tensor(values)
        ).numpy()
        # The rest of the buffer must not affect the result, and the length must be traceable.
        buffer = np.concatenate([ids, tokens(9, WIDTH - length)], axis=1)
        actual = process(buffer, jnp.asarray(values), length)
        np.testing.assert_allclose(actual, expected, rtol=2e-6, err_msg=f"length {length}")


def test_invalid_values_become_finite():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import InfNanRemoveLogitsProcessor

    values = np.array([[np.nan, np.inf, -np.inf, 1.5]], np.float32)
    expected = InfNanRemoveLogitsProcessor()(None, torch.tensor(values)).numpy()
    assert (np.asarray(g.FlaxInfNanRemoveLogitsProcessor()(None, values, 1)) == expected).all()


def test_source_of_several_beams_and_its_bucket():
    beams = np.repeat(tokens(), 2, axis=0)
    values = np.repeat(scores(), 2, axis=0)
    wide = np.pad(SOURCE, ((0, 0), (0, 4)), constant_values=7)
    for processor_class, argument in (
        (g.FlaxEncoderNoRepeatNGramLogitsProcessor, 2),
        (g.FlaxEncoderRepetitionPenaltyLogitsProcessor, 1.5),
    ):
        single = processor_class(argument, SOURCE)(tokens(), scores(), LENGTH)
        double = processor_class(argument, wide, length=12)(beams, values, LENGTH)
        np.testing.assert_array_equal(np.asarray(double)[::2], single)


# -- the behavior of Transformers 4's Flax processors


def test_top_k_of_a_ramp():
    ramp = np.broadcast_to(np.arange(10, dtype=np.float32), (2, 10)).copy()
    ramp[1:, :5] = ramp[1:, :5] + 10
    filtered = g.FlaxTopKLogitsWarper(3)(None, ramp, cur_len=None)
    assert np.isinf(filtered[0]).tolist() == 7 * [True] + 3 * [False]
    assert np.isinf(filtered[1]).tolist() == 2 * [True] + 3 * [False] + 5 * [True]
    zero_filled = g.FlaxTopKLogitsWarper(top_k=1, filter_value=0.0, min_tokens_to_keep=3)(
        None, np.ones((2, 10), np.float32) * np.arange(10, dtype=np.float32), cur_len=None
    )
    assert (np.asarray(zero_filled) == 0).sum(-1).tolist() == [7, 7]


def test_top_p_of_known_probabilities():
    distribution = np.log(np.array([[0.3, 0.1, 0.1, 0.5], [0.15, 0.3, 0.3, 0.25]]))
    filtered = np.exp(
        g.FlaxTopPLogitsWarper(0.8)(None, distribution.astype(np.float32), cur_len=None)
    )
    expected = [[0.3, 0.0, 0.0, 0.5], [0.0, 0.3, 0.3, 0.25]]
    np.testing.assert_allclose(filtered, expected, atol=1e-3)


@pytest.mark.slow
def test_top_p_drops_the_first_of_equally_probable_tokens_as_pytorch_does():
    torch = pytest.importorskip("torch")
    from transformers import TopPLogitsWarper

    table = np.array([[4, 4, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1], [9, 3, 3, 3, 1, 1]], np.float32)
    distribution = np.log(table)
    for mass in (0.3, 0.55, 0.7, 0.8, 0.9, 0.97):
        theirs = TopPLogitsWarper(mass)(None, torch.tensor(distribution)).numpy()
        ours = g.FlaxTopPLogitsWarper(mass)(None, distribution, cur_len=None)
        assert np.isinf(ours).tolist() == np.isinf(theirs).tolist()


@pytest.mark.slow
def test_ngrams_of_known_rows():
    ids = np.array([[1, 1, 2, 1], [0, 1, 0, 1]])
    values = np.zeros((2, 3), np.float32)
    two = g.FlaxNoRepeatNGramLogitsProcessor(2)(ids, values, cur_len=4)
    assert np.isinf(two).tolist() == [[False, True, True], [True, False, False]]
    three = g.FlaxNoRepeatNGramLogitsProcessor(3)(ids, values, cur_len=4)
    assert np.isinf(three).tolist() == [[False, False, False], [True, False, False]]


def test_forced_and_suppressed_positions():
    values = scores()
    forced = g.FlaxForceTokensLogitsProcessor([[1, 5], [3, None], [4, 6]])
    for position, token in ((1, 5), (4, 6)):
        assert (np.asarray(forced(None, values, position)).argmax(-1) == token).all()
        assert np.isinf(forced(None, values, position)).sum() == ROWS * (VOCAB - 1)
    for position in (0, 2, 3, 5, 17):
        assert (np.asarray(forced(None, values, position)) == values).all()
    begin = g.FlaxSuppressTokensAtBeginLogitsProcessor([3], begin_index=2)
    assert np.isinf(begin(None, values, 2))[:, 3].all()
    assert not np.isinf(begin(None, values, 3)).any()


def test_list_applies_all_and_can_be_jitted():
    parts = [
        g.FlaxTemperatureLogitsWarper(0.5),
        g.FlaxTopKLogitsWarper(7),
        g.FlaxTopPLogitsWarper(0.9),
        g.FlaxMinLengthLogitsProcessor(12, 2),
        g.FlaxForcedBOSTokenLogitsProcessor(1),
        g.FlaxForcedEOSTokenLogitsProcessor(15, 2),
        g.FlaxNoRepeatNGramLogitsProcessor(2),
    ]
    ids, values = tokens(), jnp.asarray(scores())
    one_by_one = values
    for part in parts:
        one_by_one = part(ids, one_by_one, cur_len=LENGTH)
    processor_list = g.FlaxLogitsProcessorList(parts)
    np.testing.assert_allclose(processor_list(ids, values, cur_len=LENGTH), one_by_one)
    jitted = jax.jit(lambda ids, scores, cur_len: processor_list(ids, scores, cur_len=cur_len))
    np.testing.assert_allclose(jitted(ids, values, LENGTH), one_by_one, rtol=1e-6)


def test_list_passes_further_arguments():
    class Shifted(g.FlaxLogitsProcessor):
        def __call__(self, input_ids, scores, cur_len, shift):
            return scores + shift

    parts = g.FlaxLogitsProcessorList([Shifted()])
    assert (np.asarray(parts(None, scores(), 1, shift=2.0)) == scores() + 2).all()
    with pytest.raises(ValueError, match="required parameters.*shift"):
        parts(None, scores(), 1)


def test_whisper_timestamps_come_in_pairs():
    class Config:
        eos_token_id, no_timestamps_token_id, is_multilingual, vocab_size = 10, 11, False, VOCAB
        max_initial_timestamp_index = 2

    rules = g.FlaxWhisperTimeStampLogitsProcessor(Config, Config, decoder_input_length=0)
    ids = np.array([[1, 14, 0, 0], [1, 3, 14, 0]])
    values = np.zeros((2, VOCAB), np.float32)
    first = np.isinf(rules(ids, values, 1))
    assert first[:, 11].all() and first[:, 15:].all() and not first[:, 12:15].any()
    closed = np.isinf(rules(ids, values, 2))  # one timestamp, the first token: text must follow
    assert closed[0, 12:].all() and not closed[0, :11].any()
    # text, then a timestamp: a second timestamp or the end must follow
    opened = np.isinf(rules(ids, values, 3))
    assert opened[1, :10].all() and not opened[1, 14:].any()
    assert opened[1, 12:14].all()  # timestamps do not decrease


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: g.FlaxTemperatureLogitsWarper(2), "`temperature` has to be a strictly positive"),
        (lambda: g.FlaxTemperatureLogitsWarper(0.0), "do_sample=False"),
        (lambda: g.FlaxTopKLogitsWarper(0), "`top_k` has to be a strictly positive integer"),
        (lambda: g.FlaxTopKLogitsWarper(2.0), "`top_k` has to be a strictly positive integer"),
        (lambda: g.FlaxTopPLogitsWarper(1.5), "`top_p` has to be a float"),
        (lambda: g.FlaxTopPLogitsWarper(0.5, min_tokens_to_keep=0), "`min_tokens_to_keep`"),
        (lambda: g.FlaxTopHLogitsWarper(0.0), "`top_h` has to be"),
        (lambda: g.FlaxMinPLogitsWarper(-0.1), "`min_p` has to be"),
        (lambda: g.FlaxTypicalLogitsWarper(1.0), "`typical_p` has to be"),
        (lambda: g.FlaxEpsilonLogitsWarper(0.0), "`epsilon_cutoff` has to be"),
        (lambda: g.FlaxEtaLogitsWarper(1.0), "`eta_cutoff` has to be"),
        (lambda: g.FlaxRepetitionPenaltyLogitsProcessor(2), "`penalty` has to be a strictly"),
        (lambda: g.FlaxNoRepeatNGramLogitsProcessor(0), "`ngram_size` has to be a strictly"),
        (lambda: g.FlaxMinLengthLogitsProcessor(-1, 2), "`min_length` has to be a non-negative"),
        (lambda: g.FlaxMinLengthLogitsProcessor(3, -2), "`eos_token_id` has to be"),
        (lambda: g.FlaxNoBadWordsLogitsProcessor([3], 2), "`bad_words_ids` has to be"),
        (lambda: g.FlaxSequenceBiasLogitsProcessor({}), "`sequence_bias` has to be"),
        (lambda: g.FlaxSequenceBiasLogitsProcessor({(1,): 2}), "`sequence_bias` has to be"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
