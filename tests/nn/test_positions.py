"""Positions after padding and in packed documents, and hidden states at positions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn


def test_positions_skip_padding():
    ids = jnp.array([[5, 6, 1, 7, 1], [1, 1, 5, 6, 7]])
    assert nn.positions_after_padding(ids, 1).tolist() == [[2, 3, 1, 4, 1], [1, 1, 2, 3, 4]]


def test_positions_restart_in_every_document():
    segments = jnp.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 0, 0, 0]])
    expected = [[0, 1, 0, 1, 2, 0], [0, 0, 0, 0, 1, 2]]
    assert nn.positions_in_segments(segments).tolist() == expected


@pytest.mark.slow
def test_gathering_by_groups():
    states = jnp.arange(4 * 3 * 2.0).reshape(4, 3, 2)
    assert nn.gather_positions(states, None) is states
    picked = nn.gather_positions(states, jnp.array([[0, 5], [1, 3]]))
    flat = np.asarray(states).reshape(2, 6, 2)
    assert np.array_equal(picked, np.stack([flat[0, [0, 5]], flat[1, [1, 3]]]))


def test_positions_from_a_mask_count_visible_tokens():
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]])
    expected = [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 0, 1, 2, 0]]
    assert np.array_equal(nn.positions_from_mask(mask), expected)


@pytest.mark.parametrize("method", ["cubic", "linear"])
@pytest.mark.parametrize("size", [(2, 9), (7, 3), (16, 16), (1, 1)])
def test_resized_grids_equal_pytorch(method, size):
    torch = pytest.importorskip("torch")
    table = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    expected = torch.nn.functional.interpolate(
        torch.tensor(table).permute(2, 0, 1)[None], size=size, mode=f"bi{method}"
    )[0].permute(1, 2, 0)
    assert np.abs(nn.resize_grid(jnp.asarray(table), size, method) - expected.numpy()).max() < 2e-6
    assert nn.resize_grid(table, (5, 7), method) is table
