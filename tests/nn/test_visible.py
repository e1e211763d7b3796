"""Visibility: masks of descriptions, and results that do not need the mask."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn.context import RowGuarantees
from hfseq.nn.visible import Visibility, as_visibility

BATCH = 3


def described(queries, keys, *, segments, lengths=False, dense=False, causal=False, window=None):
    """A description, and its mask computed by a loop in NumPy."""
    random = np.random.default_rng(queries * 31 + keys)
    query_segments, key_segments = (
        np.sort(random.integers(0, 4, (BATCH, n)), axis=1) for n in (queries, keys)
    )
    if segments == "keys":
        key_segments = random.integers(0, 2, (BATCH, keys))
    key_segments[0] = 0  # only segment 0, which is padding
    counts, mask = np.array([0, 2, keys]), random.random((BATCH, 1, 1, keys)) < 0.5
    visible = Visibility(
        causal=causal,
        window=window,
        query_segments=jnp.asarray(query_segments) if segments in ("same", "both") else None,
        key_segments=jnp.asarray(key_segments) if segments in ("keys", "both") else None,
        key_lengths=jnp.asarray(counts) if lengths else None,
        dense=jnp.asarray(mask) if dense else None,
    )
    expected = np.zeros((BATCH, queries, keys), bool)
    for row, query, key in itertools.product(range(BATCH), range(queries), range(keys)):
        position = query + keys - queries
        left, right = window or (99, 99)
        expected[row, query, key] = (
            (segments != "keys" or key_segments[row, key] != 0)
            and (segments != "both" or query_segments[row, query] == key_segments[row, key])
            and (segments != "same" or query_segments[row, query] == query_segments[row, key])
            and (not lengths or key < counts[row])
            and (not dense or mask[row, 0, 0, key])
            and (not causal or key <= position)
            and position - left <= key <= position + right
        )
    return visible, expected


CASES = [
    {"segments": segments, "lengths": lengths, "dense": dense, "causal": causal, "window": window}
    for segments in ("", "keys", "same", "both")
    for lengths, dense in ((False, False), (True, False), (False, True))
    for causal, window in ((False, None), (True, None), (False, (2, 1)), (True, (1, 0)))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_visibility_matches_its_mask(case):
    sizes = [(7, 7)] if case["segments"] == "same" else [(5, 8), (8, 5)]
    for queries, keys in sizes:
        visible, expected = described(queries, keys, **case)
        array = visible.array(queries, keys)
        ones = np.ones((BATCH, 1, queries, keys), bool)
        array = ones if array is None else np.broadcast_to(array, ones.shape)
        np.testing.assert_array_equal(array[:, 0], expected)
        sees_any = visible.sees_any(queries, keys)
        sees_any = True if sees_any is None else np.broadcast_to(sees_any, (BATCH, 1, queries, 1))
        np.testing.assert_array_equal(
            np.broadcast_to(sees_any, (BATCH, 1, queries, 1))[:, 0, :, 0], expected.any(-1)
        )
        part = visible.part(1, 4, 4).without_band(4)
        band = visible.band(3, 4, keys - queries + 1)
        part_mask = (
            np.ones((BATCH, 3, 4), bool)
            if part is None
            else np.broadcast_to(part, (BATCH, 1, 3, 4))[:, 0]
        )
        part_mask = part_mask if band is None else part_mask & np.asarray(band)
        np.testing.assert_array_equal(part_mask, expected[:, 1:4, :4])


@pytest.mark.parametrize("case", [case for case in CASES if not case["dense"]], ids=str)
def test_masked_queries_need_no_dense_mask(case):
    size = 37
    visible, _ = described(size, size, **case)
    text = str(jax.make_jaxpr(lambda v: v.sees_any(size, size))(visible))
    banded = case["causal"] or case["window"]
    needs_all = banded and (
        case["segments"] == "both" or (case["segments"] == "same" and case["lengths"])
    )
    assert (f"{size},{size}]" in text) == bool(needs_all)


def test_descriptions_of_padding_and_documents():
    mask, segments = jnp.array([[1, 0, 1]]), jnp.array([[1, 1, 2]])
    assert nn.visible(None) is None
    padded = nn.visible(mask)
    assert padded.segments == "keys" and padded.key_lengths is None
    assert nn.visible(None, segments).segments == "same"
    both = nn.visible(mask, segments)
    expected = [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert np.array_equal(both.array(3, 3)[0, 0], np.array(expected, bool))
    per_query = nn.visible(jnp.ones((2, 4, 3)))
    assert per_query.dense.shape == (2, 1, 4, 3)
    assert as_visibility(per_query, causal=True).causal


def test_row_guarantees_turn_masks_into_lengths_and_bound_documents():
    mask, segments = jnp.array([[1, 1, 0]]), jnp.array([[1, 2, 0]])
    with nn.row_guarantees(RowGuarantees(max_runs=3)):
        padded, packed = nn.visible(mask), nn.visible(mask, segments)
        crossed = nn.visible_across(mask, segments, segments)
    assert padded.key_lengths.tolist() == [2] and padded.segments == ""
    assert (packed.segments, packed.max_runs) == ("same", 3)
    assert crossed.key_segments.tolist() == segments.tolist()
    assert nn.visible(mask).key_lengths is None  # no guarantees outside of the block
