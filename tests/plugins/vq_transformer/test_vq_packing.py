"""Packed rows: padding on any side, and masked tokens within documents."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.plugins.vq_transformer.vq_cases import (
    REDUCTIONS,
    ids,
    max_difference,
    model,
    statistics,
    variables,
)

KINDS = {name: {"reduction": name} for name in REDUCTIONS}
KINDS |= {name: {"attention_type": name} for name in ("vq_quadratic", "full")}
LENGTH = 13


def make_call(variant):
    """Returns a function for packed rows that returns logits, updated collections and loss."""
    flax_model = model("mqa", block_size=4, window_size=2, **KINDS[variant])
    params, extra = variables(flax_model)

    def call(tokens, segments, mask=None):
        output, updated = flax_model(
            tokens, mask, params=params, extra=extra, segment_ids=segments, train=True
        )
        return output.logits, updated, output.auxiliary_loss

    return jax.jit(call)


def masked_documents():
    """Returns documents, and a mask of tokens at their starts, at their ends and within."""
    segments = np.array([[1] * 6 + [2] * 7, [1] * 3 + [2] * 2 + [3] * 6 + [0] * 2], np.int32)
    mask = np.ones((2, LENGTH), np.int32)
    mask[0, [2, 3, 6, 8]], mask[1, [0, 3, 4, 7, 8]] = 0, 0
    return segments, mask


@pytest.mark.parametrize("variant", ["serial", "full"])
def test_packed_rows_may_be_padded_on_any_side(variant):
    call, tokens = make_call(variant), ids(2, 9)
    wide = np.full((2, LENGTH), 5, np.int32)
    actual = []
    for first in (0, 3, 4):
        columns = np.s_[:, first : first + 9]
        padded, segments = wide.copy(), np.zeros_like(wide)
        padded[columns], segments[columns] = tokens, [1] * 5 + [2] * 4
        logits, updated, loss = call(padded, segments)
        actual.append((np.asarray(logits)[columns], statistics(updated, "new_counts")[0], loss))
    for logits, counts, loss in actual[1:]:
        assert max_difference(logits, actual[0][0]) <= 1e-5
        assert np.array_equal(counts, actual[0][1])
        assert float(loss) == pytest.approx(float(actual[0][2]), rel=1e-5)


@pytest.mark.parametrize("variant", ["recurrent", "matmul", "vq_quadratic", "full"])
def test_tokens_that_a_mask_hides_in_documents_are_not_seen(variant):
    segments, mask = masked_documents()
    real = (mask > 0) & (segments > 0)
    call, tokens = make_call(variant), ids(2, LENGTH)
    first, two, plain = (
        call(np.where(real, tokens, other), segments, call_mask)
        for other, call_mask in ((3, mask), (11, mask), (3, np.ones_like(mask)))
    )
    assert max_difference(np.asarray(first[0])[real], np.asarray(two[0])[real]) <= 1e-6
    assert max_difference(np.asarray(first[0])[real], np.asarray(plain[0])[real]) > 1e-2
    assert float(first[2]) == pytest.approx(float(two[2]), rel=1e-6)
    for name in ("new_counts", "new_sums"):
        assert np.array_equal(*(statistics(updated, name)[0] for _, updated, _ in (first, two)))
    if variant != "full":
        assert statistics(first[1], "new_counts")[0].sum() == real.sum()


@pytest.mark.slow
def test_hidden_tokens_keep_their_positions_however_rows_are_computed():
    segments, mask = masked_documents()
    real = (mask > 0) & (segments > 0)
    expected = np.asarray(make_call("vq_quadratic")(ids(2, LENGTH), segments, mask)[0])
    for variant in REDUCTIONS:
        actual = np.asarray(make_call(variant)(ids(2, LENGTH), segments, mask)[0])
        assert max_difference(actual[real], expected[real]) <= 1e-5, variant
