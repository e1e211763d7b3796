"""Dependencies between tokens: Jacobians are triangular and not zero."""

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


def jacobian(flax_model, segments=None):
    """Returns the change of the logits per embedding, `(T, T)`.

    All tokens differ, so each row of the embedding table belongs to one position.
    """
    params, extra = variables(flax_model)
    weights = np.random.default_rng(1).normal(size=flax_model.config.vocab_size).astype(np.float32)
    tokens = np.arange(LENGTH, dtype=np.int32)[None]

    def logits(table):
        changed_params = {
            **params,
            "model": {**params["model"], "embed_tokens": {"embedding": table}},
        }
        output, _ = flax_model(tokens, params=changed_params, extra=extra, segment_ids=segments)
        return output.logits[0] @ weights

    actual = jax.jit(jax.jacrev(logits))(jnp.asarray(params["model"]["embed_tokens"]["embedding"]))
    return np.abs(actual[:, :LENGTH]).max(-1)


@pytest.mark.slow
@pytest.mark.parametrize("head, reduction, block, window, changes", [*FEW, *MORE])
def test_nothing_depends_on_what_comes_later(head, reduction, block, window, changes):
    flax_model = model(
        head,
        reduction=reduction,
        block_size=block,
        window_size=window,
        tie_word_embeddings=False,
        **changes,
    )
    actual = jacobian(flax_model)
    assert actual[np.triu_indices(LENGTH, 1)].max() <= 1e-9
    assert (np.diag(actual) > 1e-3).all()
    # Two consecutive attentions reach twice as far as one window.
    unbounded = flax_model.config.use_compressive_cache or flax_model.config.gated
    reach = LENGTH if unbounded else window + 1
    near = flax_model.config.gated and not flax_model.config.use_compressive_cache
    for position in range(LENGTH):
        reach = min(reach, 2 * window + 1) if near else reach
        reachable = actual[position, max(0, position - reach + 1) : position + 1]
        assert (reachable > 1e-9).all()
    if reach < LENGTH:
        assert actual[np.tril_indices(LENGTH, -reach)].max() <= 1e-9


@pytest.mark.slow
def test_documents_in_a_row_do_not_depend_on_each_other():
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32)
    flax_model = model("mqa", window_size=3, block_size=4, tie_word_embeddings=False)
    actual = jacobian(flax_model, segments)
    alike = (segments[0][:, None] == segments[0]) & (segments[0] > 0)
    real = segments[0] > 0
    assert actual[real][:, ~real].max() <= 1e-9
    apart = real[:, None] & real & ~alike
    assert actual[apart].max() <= 1e-9
    assert (actual[np.tril(alike)] > 1e-9).all()
