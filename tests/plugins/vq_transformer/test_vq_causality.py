"""What a token can depend on: Jacobians are triangular, and not by being zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.plugins.vq_transformer.vq_cases import model, variables

LENGTH = 12
FEW = [
    ("gqa", "recurrent", 3, 2, {}),
    ("mqa", "serial", 5, 3, {}),
    ("mqa", "associative_scan", 2, 4, {}),
    ("mha", "matmul", 4, 1, {}),
    ("mqa", "recurrent", 4, 3, {"use_compressive_cache": False}),
    ("mqa", "recurrent", 4, 4, {"attention_type": "full"}),
]
MORE = [
    pytest.param(
        "shga",
        reduction,
        block,
        window,
        {"use_compressive_cache": compressive},
        marks=pytest.mark.slow,
    )
    for reduction in ("recurrent", "matmul")
    for block in (1, 2, 3, 4, 6)
    for window in (1, 2, 3, 4, 6)
    for compressive in (True, False)
]


def jacobian(made, segments=None):
    """How much the logits at one place change with the embedding at another, (T, T).

    Every token is another one, so that its row of the table belongs to one place.
    """
    params, extra = variables(made)
    weights = np.random.default_rng(1).normal(size=made.config.vocab_size).astype(np.float32)
    tokens = np.arange(LENGTH, dtype=np.int32)[None]

    def logits(table):
        given = {**params, "model": {**params["model"], "embed_tokens": {"embedding": table}}}
        output, _ = made(tokens, params=given, extra=extra, segment_ids=segments)
        return output.logits[0] @ weights

    found = jax.jit(jax.jacrev(logits))(jnp.asarray(params["model"]["embed_tokens"]["embedding"]))
    return np.abs(found[:, :LENGTH]).max(-1)


@pytest.mark.slow
@pytest.mark.parametrize("head, reduction, block, window, changes", [*FEW, *MORE])
def test_nothing_depends_on_what_comes_later(head, reduction, block, window, changes):
    made = model(
        head,
        reduction=reduction,
        block_size=block,
        window_size=window,
        tie_word_embeddings=False,
        **changes,
    )
    found = jacobian(made)
    assert found[np.triu_indices(LENGTH, 1)].max() <= 1e-9
    assert (np.diag(found) > 1e-3).all()
    # Two attentions one after the other reach twice as far as a window.
    whole = made.config.use_compressive_cache or made.config.gated
    reach = LENGTH if whole else window + 1
    near = made.config.gated and not made.config.use_compressive_cache
    for place in range(LENGTH):
        reach = min(reach, 2 * window + 1) if near else reach
        seen = found[place, max(0, place - reach + 1) : place + 1]
        assert (seen > 1e-9).all()
    if reach < LENGTH:
        assert found[np.tril_indices(LENGTH, -reach)].max() <= 1e-9


@pytest.mark.slow
def test_documents_in_a_row_do_not_depend_on_each_other():
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32)
    made = model("mqa", window_size=3, block_size=4, tie_word_embeddings=False)
    found = jacobian(made, segments)
    alike = (segments[0][:, None] == segments[0]) & (segments[0] > 0)
    real = segments[0] > 0
    assert found[real][:, ~real].max() <= 1e-9
    apart = real[:, None] & real & ~alike
    assert found[apart].max() <= 1e-9
    assert (found[np.tril(alike)] > 1e-9).all()
