"""Mixtures of experts equal a loop over tokens and choices in float64, on CPUs and accelerators."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import nn
from hfseq.nn import experts as experts_module

TOKENS, FEATURES, INNER = 21, 6, 10


def problem(num_experts, choices, *, used=None):
    """Returns arguments of a mixture in float64, whose tokens use the experts below `used`."""
    random = np.random.default_rng(num_experts * 10 + choices)
    used = used or num_experts
    index = np.stack([random.permutation(used)[:choices] for _ in range(TOKENS)])
    return index.astype(np.int32), {
        "x": random.normal(size=(TOKENS, FEATURES)),
        "weights": random.uniform(0.1, 1, size=(TOKENS, choices)),
        "up": random.normal(size=(num_experts, FEATURES, INNER)),
        "bias": random.normal(size=(num_experts, INNER)),
        "down": random.normal(size=(num_experts, INNER, FEATURES)),
    }


def mixture(index, x, weights, up, bias, down):
    def compute(rows, layout):
        return layout.product(jnp.tanh(layout.product(rows, up, bias)), down)

    return nn.mix_experts(x, index, weights, len(up), compute)


def reference(index, arrays, factors):
    """Returns the outputs, and the gradients of their weighted sum, one pair after the other."""
    x, weights, up, bias, down = arrays.values()
    outputs = np.zeros_like(x)
    gradients = {name: np.zeros_like(value) for name, value in arrays.items()}
    for t, k in np.ndindex(index.shape):
        e = index[t, k]
        if e >= len(up):
            continue
        inner = np.tanh(x[t] @ up[e] + bias[e])
        row = inner @ down[e]
        outputs[t] += weights[t, k] * row
        gradients["weights"][t, k] = factors[t] @ row
        row_gradient = weights[t, k] * factors[t]
        gradients["down"][e] += np.outer(inner, row_gradient)
        inner_gradient = (down[e] @ row_gradient) * (1 - inner**2)
        gradients["bias"][e] += inner_gradient
        gradients["up"][e] += np.outer(x[t], inner_gradient)
        gradients["x"][t] += up[e] @ inner_gradient
    return outputs, gradients


@pytest.fixture(params=["cpu", "cuda"])
def platform(request, monkeypatch):
    """The mixture that is used on a platform, with the sizes of its blocks."""
    monkeypatch.setattr(experts_module, "platform", lambda: request.param)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    ("num_experts", "choices", "used"),
    [(4, 2, None), (5, 1, None), (3, 3, None), (8, 2, 3), (1, 1, None)],
    ids=["some", "one choice", "all experts", "empty experts", "one expert"],
)
def test_mixture_equals_a_loop_over_pairs(num_experts, choices, used):
    index, arrays = problem(num_experts, choices, used=used)
    if choices == 2 and used is None:
        index[3, 1] = index[5, 0] = num_experts  # choices to ignore
    factors = np.random.default_rng(1).normal(size=(TOKENS, FEATURES))
    outputs, gradients = reference(index, arrays, factors)

    def loss(arrays):
        ours = mixture(jnp.asarray(index), **arrays)
        return (ours * factors).sum(), ours

    single = {name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()}
    (_, ours), ours_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(single)
    np.testing.assert_allclose(ours, outputs, rtol=0, atol=2e-6 * np.abs(outputs).max())
    for name, gradient in gradients.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(
            ours_gradients[name], gradient, rtol=0, atol=3e-6 * largest, err_msg=name
        )


@pytest.mark.usefixtures("platform")
def test_result_does_not_depend_on_other_tokens_or_the_order():
    index, arrays = problem(4, 2)
    single = {name: jnp.asarray(value, jnp.float32) for name, value in arrays.items()}
    run = jax.jit(lambda index, arrays: mixture(index, **arrays))
    whole = run(jnp.asarray(index), single)
    order = np.random.default_rng(0).permutation(TOKENS)[:9]
    part = dict(single, x=single["x"][order], weights=single["weights"][order])
    np.testing.assert_allclose(run(jnp.asarray(index[order]), part), whole[order], atol=1e-5)


def test_mixture_runs_under_vmap_and_in_bfloat16():
    index, arrays = problem(4, 2)
    half = {name: jnp.asarray(value, jnp.bfloat16) for name, value in arrays.items()}
    run = jax.jit(lambda arrays: mixture(jnp.asarray(index), **arrays))
    outputs = run(half)
    assert outputs.dtype == jnp.bfloat16
    pairs = {name: jnp.stack([value, 2 * value]) for name, value in half.items()}
    both = jax.jit(jax.vmap(run))(pairs)
    np.testing.assert_allclose(
        both[0].astype(np.float32), outputs.astype(np.float32), rtol=0.05, atol=0.1
    )


def test_blocks_on_cpus_pad_few_rows():
    # 512 rows of 16 experts need at most 64 blocks of 8 rows, and one partial block per expert.
    assert experts_module._block_size(512, 16) == 8
    index = np.arange(512, dtype=np.int32)[:, None] % 16
    shapes = []

    def compute(rows, layout):
        shapes.append(rows.shape)
        return rows

    inputs = jnp.zeros((512, 4)), jnp.asarray(index), jnp.ones((512, 1))
    jax.eval_shape(lambda *arrays: nn.mix_experts(*arrays, 16, compute), *inputs)
    assert shapes == [(80 * 8, 4)]
