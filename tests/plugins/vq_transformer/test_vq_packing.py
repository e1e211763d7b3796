"""Packed rows: padding on any side, and masks that hide tokens within documents."""

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


def caller(kind):
    """A call of packed rows, which returns logits and the collections after a training step."""
    made = model("mqa", block_size=4, window_size=2, **KINDS[kind])
    params, extra = variables(made)

    def call(tokens, segments, mask=None):
        output, after = made(
            tokens, mask, params=params, extra=extra, segment_ids=segments, train=True
        )
        return output.logits, after, output.auxiliary_loss

    return jax.jit(call)


def hiding():
    """Documents of a row, and a mask that hides tokens where they begin, end and in between."""
    segments = np.array([[1] * 6 + [2] * 7, [1] * 3 + [2] * 2 + [3] * 6 + [0] * 2], np.int32)
    mask = np.ones((2, LENGTH), np.int32)
    mask[0, [2, 3, 6, 8]], mask[1, [0, 3, 4, 7, 8]] = 0, 0
    return segments, mask


@pytest.mark.parametrize("kind", ["serial", "full"])
def test_packed_rows_may_be_padded_on_any_side(kind):
    call, tokens = caller(kind), ids(2, 9)
    wide = np.full((2, LENGTH), 5, np.int32)
    found = []
    for first in (0, 3, 4):
        here = np.s_[:, first : first + 9]
        padded, segments = wide.copy(), np.zeros_like(wide)
        padded[here], segments[here] = tokens, [1] * 5 + [2] * 4
        logits, after, loss = call(padded, segments)
        found.append((np.asarray(logits)[here], statistics(after, "new_counts")[0], loss))
    for logits, counts, loss in found[1:]:
        assert max_difference(logits, found[0][0]) <= 1e-5
        assert np.array_equal(counts, found[0][1])
        assert float(loss) == pytest.approx(float(found[0][2]), rel=1e-5)


@pytest.mark.parametrize("kind", ["recurrent", "matmul", "vq_quadratic", "full"])
def test_tokens_that_a_mask_hides_in_documents_are_not_seen(kind):
    segments, mask = hiding()
    real = (mask > 0) & (segments > 0)
    call, tokens = caller(kind), ids(2, LENGTH)
    one, two, plain = (
        call(np.where(real, tokens, other), segments, shown)
        for other, shown in ((3, mask), (11, mask), (3, np.ones_like(mask)))
    )
    assert max_difference(np.asarray(one[0])[real], np.asarray(two[0])[real]) <= 1e-6
    assert max_difference(np.asarray(one[0])[real], np.asarray(plain[0])[real]) > 1e-2
    assert float(one[2]) == pytest.approx(float(two[2]), rel=1e-6)
    for name in ("new_counts", "new_sums"):
        assert np.array_equal(*(statistics(after, name)[0] for _, after, _ in (one, two)))
    if kind != "full":
        assert statistics(one[1], "new_counts")[0].sum() == real.sum()


@pytest.mark.slow
def test_hidden_tokens_keep_their_places_however_rows_are_computed():
    segments, mask = hiding()
    real = (mask > 0) & (segments > 0)
    wanted = np.asarray(caller("vq_quadratic")(ids(2, LENGTH), segments, mask)[0])
    for kind in REDUCTIONS:
        found = np.asarray(caller(kind)(ids(2, LENGTH), segments, mask)[0])
        assert max_difference(found[real], wanted[real]) <= 1e-5, kind
