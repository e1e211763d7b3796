"""Span corruption compared with its definition: lengths, statistics and recoverable targets."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data.batches import RowRandom, shift_right
from hfseq.objectives.span_mlm import (
    compute_input_and_target_lengths,
    corrupt,
    count_spans,
    noise_mask,
    sentinel_ids,
)

EOS, PAD, FIRST = 1, 0, 900
SENTINELS = np.arange(999, FIRST - 1, -1).astype(np.int32)


def numbers(count, seed=0):
    return RowRandom(seed, 0, np.arange(count))


def make(rows, length, density=0.15, mean=3.0, lengths=None, seed=0):
    """Returns rows of text and their corrupted form."""
    ids = np.random.default_rng(seed).integers(3, FIRST, (rows, length)).astype(np.int32)
    lengths = np.full(rows, length) if lengths is None else np.asarray(lengths)
    real = np.arange(length) < lengths[:, None]
    hidden, first = noise_mask(lengths, length, numbers(rows, seed), density, mean)
    noise, spans = count_spans(length, density, mean)
    widths = int(length - noise + spans + 1), int(noise + spans + 1)
    result = corrupt(ids, real, hidden, first, SENTINELS, EOS, widths, PAD)
    return ids, real, hidden, first, *result


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ((64, 0.15, 3.0), (70, 14)),
        ((128, 0.15, 3.0), (141, 29)),
        ((256, 0.15, 3.0), (284, 58)),
        ((512, 0.15, 3.0), (568, 114)),
        ((1024, 0.15, 3.0), (1137, 229)),
        ((512, 0.5, 3.0), (766, 512)),
        ((128, 0.25, 2.0), (145, 55)),
        ((512, 0.15, 1.0), (512, 155)),
    ],
)
def test_lengths_are_those_of_t5(inputs, expected):
    assert compute_input_and_target_lengths(*inputs) == expected


@pytest.mark.parametrize("inputs", [16, 33, 100, 512])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.3, 2.0), (0.5, 5.0), (0.15, 1.5)])
def test_corrupted_rows_have_exactly_the_lengths_computed(inputs, density, mean):
    raw, targets = compute_input_and_target_lengths(inputs, density, mean)
    *_, actual, tokens, labels = make(5, raw, density, mean)
    assert actual.shape == (5, inputs) and tokens.all()
    assert labels.shape == (5, targets) and (labels != -100).all()
    assert actual.dtype == labels.dtype == np.int32


@pytest.mark.parametrize("lengths", [None, [1, 2, 3, 7, 20, 69, 70, 70]])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.6, 2.0), (0.9, 1.0), (0.3, 9.0)])
def test_text_is_recovered_from_inputs_and_targets(density, mean, lengths):
    ids, real, hidden, _, inputs, tokens, labels = make(8, 70, density, mean, lengths)
    for row in range(8):
        target = labels[row][labels[row] != -100].tolist()
        source = inputs[row][tokens[row]].tolist()
        assert source.pop() == EOS and (not target or target.pop() == EOS)
        spans: dict[int, list[int]] = {}
        for token in target:
            if token in SENTINELS:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == SENTINELS[: len(spans)].tolist()  # in order, each once
        text = [t for token in source for t in spans.get(token, [token])]
        assert text == ids[row][real[row]].tolist()
        assert all(spans.values()) and not (set(source) - set(spans)) & set(SENTINELS.tolist())
        assert hidden[row].sum() == sum(map(len, spans.values()))


def test_span_counts_follow_the_formula():
    _, _, hidden, first, *_ = make(200, 568)
    assert (hidden.sum(axis=1) == 85).all() and (first.sum(axis=1) == 28).all()
    assert (first & ~hidden).sum() == 0
    runs = hidden & ~np.pad(hidden, ((0, 0), (1, 0)))[:, :-1]
    np.testing.assert_array_equal(runs, first)  # spans never touch


def test_span_positions_are_uniform():
    """Inside a row, each position is masked with a probability equal to the density.

    At the edges it is spans / (gaps between unmasked tokens), because only a span that begins or
    ends there covers them. Version 4 never masked the first token, and always the last.
    """
    rows, length = 20_000, 60
    hidden, _ = noise_mask(np.full(rows, length), length, numbers(rows), 0.15, 3.0)
    share = hidden.mean(axis=0)
    error = 5 * np.sqrt(0.15 * 0.85 / rows)
    edge = 3 / (51 + 1)  # 9 hidden tokens in 3 spans, 51 stay
    assert abs(share[0] - edge) < error and abs(share[-1] - edge) < error
    inside = share[10:-10]
    assert abs(inside.mean() - 0.15) < 0.01 and np.ptp(inside) < 2.5 * error
    np.testing.assert_allclose(share, share[::-1], atol=2 * error)


def test_every_way_to_cut_the_spans_is_equally_likely():
    rows = 30_000
    hidden, first = noise_mask(np.full(rows, 12), 12, numbers(rows), 0.4, 2.5)
    assert set(first.sum(axis=1)) == {2} and set(hidden.sum(axis=1)) == {5}
    patterns, counts = np.unique(hidden, axis=0, return_counts=True)
    # 4 ways to cut 5 tokens in two spans, 8 over 2 pairs of gaps between 7 tokens
    assert len(patterns) == 4 * 28
    expected = rows / len(patterns)
    assert ((counts - expected) ** 2 / expected).sum() < 112 + 5 * np.sqrt(2 * 112)


def test_a_row_is_corrupted_alike_in_any_company_and_width():
    lengths = np.array([40, 17, 33, 2])
    full = noise_mask(lengths, 40, numbers(4), 0.15, 3.0)
    part = noise_mask(lengths[[2, 1]], 33, RowRandom(0, 0, np.array([2, 1])), 0.15, 3.0)
    for a, b in zip(full, part, strict=True):
        np.testing.assert_array_equal(a[[2, 1], :33], b)


def test_single_token_row_has_no_targets():
    *_, inputs, tokens, labels = make(1, 20, lengths=[1])
    assert tokens.sum() == 2 and inputs[0, 1] == EOS and (labels == -100).all()


def test_labels_shift_to_decoder_inputs():
    labels = np.array([[5, 6, 1, -100], [7, 1, -100, -100]])
    expected = [[9, 5, 6, 1], [9, 7, 1, 0]]
    assert shift_right(labels, 0, 9).tolist() == expected


def test_sentinels_are_found_by_name_in_any_order():
    class Reversed:
        def get_vocab(self):
            return {"a": 0, "<extra_id_1>": 5, "<extra_id_0>": 4, "<extra_id_3>": 9}

    assert sentinel_ids(Reversed()).tolist() == [4, 5]
