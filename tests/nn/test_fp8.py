"""FP8 products: results, updates of scales and histories, guards and calibration."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from hfseq.nn import fp8
from hfseq.nn.context import Options, options
from hfseq.nn.precision import choose_precision
from tests.support.models import close

MATRIX = (((1,), (0,)), ((), ()))
E4M3, E5M2 = 448.0, 57344.0


def random(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def run(module, x, w, g):
    """Value, gradients and next state of one training step's product."""
    graph, state = nnx.split(module)

    def value(x, w, state):
        product = nnx.merge(graph, fp8.for_gradient(state))
        with options(Options(train=True)):
            y = product(x, w, (((x.ndim - 1,), (0,)), ((), ())))
        return (y.astype(jnp.float32) * g).sum(), y

    (dx, dw, next_state), y = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True))(x, w, state)
    return y, dx, dw, fp8.from_gradient(next_state)


def advance(module, next_state):
    nnx.update(module, next_state)
    return module


def rounded(x, scale, dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    return (
        np.clip(np.asarray(x, np.float32) / scale, -limit, limit).astype(dtype).astype(np.float64)
    )


def by_hand(x, w, g, scales):
    """The three products in NumPy, with operands rounded to FP8."""
    sx, sw, sg = (np.float32(scale) for scale in scales)
    qx, qw = (rounded(a, s, ml_dtypes.float8_e4m3fn) for a, s in ((x, sx), (w, sw)))
    qg = rounded(g, sg, ml_dtypes.float8_e5m2)
    return qx @ qw * sx * sw, qg @ qw.T * sg * sw, qx.T @ qg * sx * sg


@pytest.mark.slow
def test_current_scaling_is_the_product_of_rounded_operands():
    x, w, g = random(6, 16), random(16, 8, seed=1, scale=0.02), random(6, 8, seed=2, scale=1e-5)

    def value(x, w):
        return (fp8.current_product(x, w, MATRIX) * g).sum()

    dx, dw = jax.grad(value, (0, 1))(x, w)
    scales = [float(jnp.abs(a).max()) / limit for a, limit in ((x, E4M3), (w, E4M3), (g, E5M2))]
    y, dx_due, dw_due = by_hand(x, w, g, scales)
    assert close(fp8.current_product(x, w, MATRIX), y, 1e-6)
    assert np.allclose(dx, dx_due, rtol=1e-5, atol=1e-12)
    assert np.allclose(dw, dw_due, rtol=1e-5, atol=1e-12)


@pytest.mark.slow
def test_errors_match_three_and_two_mantissa_bits():
    x, w, g = random(64, 128), random(128, 64, seed=1), random(64, 64, seed=2)
    dx, dw = jax.grad(lambda x, w: (fp8.current_product(x, w, MATRIX) * g).sum(), (0, 1))(x, w)
    for actual, expected in (
        (fp8.current_product(x, w, MATRIX), x @ w),
        (dx, g @ w.T),
        (dw, x.T @ g),
    ):
        error = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
        assert 0.01 < error < 0.08


@pytest.mark.slow
def test_kernels_of_three_axes_and_output_major_kernels_give_equal_results():
    x, w = random(2, 3, 16), random(16, 8, seed=1)
    plain = fp8.current_product(x, w, (((2,), (0,)), ((), ())))
    turned = fp8.current_product(x, w.T, (((2,), (1,)), ((), ())))
    stacked = fp8.current_product(x, jnp.stack([w, w], 1), (((2,), (0,)), ((), ())))
    assert np.array_equal(plain, turned)
    assert np.array_equal(plain, stacked[..., 0, :])

    def gradient(w, axis):
        dims = (((2,), (axis,)), ((), ()))
        return jax.grad(lambda w: (fp8.current_product(x, w, dims) ** 2).sum())(w)

    assert close(gradient(w, 0), gradient(w.T, 1).T, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0, 2])
def test_scales_and_histories_follow_their_recursion(margin):
    """Each scale is the largest of the last L values divided by the maximum of FP8."""
    length = 3
    module = fp8.Fp8Product(length, margin)
    amaxes = {"input": [], "kernel": [], "output_grad": []}
    limits = {"input": E4M3, "kernel": E4M3, "output_grad": E5M2}
    for step in range(6):
        sizes = (10.0 / (step + 1), 0.1 * (step + 1), 1e-4)
        x, w, g = (
            random(*s, seed=step, scale=k)
            for s, k in zip(((4, 8), (8, 4), (4, 4)), sizes, strict=True)
        )
        largest = {n: max(values[-length:], default=0.0) for n, values in amaxes.items()}
        advance(module, run(module, x, w, g)[3])
        for name, array in (("input", x), ("kernel", w), ("output_grad", g)):
            amaxes[name].append(float(jnp.abs(array).max()))
            history = getattr(module, f"{name}_amax_history")[...]
            expected = ([*reversed(amaxes[name])] + [0.0] * length)[:length]
            assert np.allclose(history, expected, rtol=1e-6)
            scale = largest[name] / limits[name] * 2**margin if largest[name] else 1.0
            assert np.allclose(getattr(module, f"{name}_scale")[...], scale, rtol=1e-6)


def test_delayed_products_use_the_scale_of_earlier_steps():
    module = fp8.Fp8Product(4)
    x, w, g = random(4, 8), random(8, 4, seed=1), random(4, 4, seed=2)
    advance(module, run(module, x, w, g)[3])
    y, dx, dw, _ = run(module, 2 * x, w, g)  # twice the largest value in the history: clipped
    scales = [float(jnp.abs(a).max()) / limit for a, limit in ((x, E4M3), (w, E4M3), (g, E5M2))]
    expected_results = by_hand(2 * x, w, g, scales)
    for actual, expected in zip((y, dx, dw), expected_results, strict=True):
        assert close(actual, expected, 1e-5)
    assert float(jnp.abs(y - 2 * x @ w).max()) > 0.1


def test_an_unused_operation_keeps_its_state():
    old = {"fc": {"dot_general": state_of(fp8.Fp8Product(4))}}
    zero = jax.tree.map(jnp.zeros_like, old)
    updated = fp8.overwrite(old, zero)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), updated, old))


def state_of(module):
    return {"/".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(nnx.state(module))}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_do_not_enter_the_history(bad):
    module = fp8.Fp8Product(4)
    x, w, g = random(4, 8), random(8, 4, seed=1), random(4, 4, seed=2)
    advance(module, run(module, x, w, g)[3])
    old_state = state_of(module)
    advance(module, run(module, x.at[0, 0].set(bad), w, g)[3])
    new_state = state_of(module)
    assert all(np.isfinite(leaf).all() for leaf in new_state.values())
    assert new_state["input_amax_history"][0] == 0
    assert new_state["input_amax_history"][1] == old_state["input_amax_history"][0]
    y, *_ = run(module, x, w, g)
    assert np.isfinite(y).all() and close(y, x @ w, 0.1)


def test_nan_survives_the_cast():
    x = random(4, 8).at[0, 0].set(jnp.nan)
    assert np.isnan(fp8.current_product(x, random(8, 4), MATRIX)[0]).all()


def test_overflow_is_not_hidden_by_clipping():
    """Infinite gradients, as float16 produces them under a loss scale, must stay detectable."""
    x, w = random(4, 8), random(8, 4, seed=1)
    y = fp8.current_product(x.at[0, 0].set(jnp.inf), w, MATRIX)
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()
    module = fp8.Fp8Product(4)
    g = random(4, 4, seed=2).at[1, 1].set(jnp.inf)
    *_, dx, dw, next_state = run(module, x, w, g)
    assert np.isnan(dx[1]).all() and np.isnan(dw[:, 1]).all()
    assert np.isfinite(next_state["output_grad_amax_history"][...]).all()


@pytest.mark.parametrize("size", [1e-29, 1e-33, 1e-36, 1e-38])
def test_vanishing_gradients_do_not_divide_by_zero(size):
    """The inverse of their scale exceeds float32, so they count as zero, like true zeros."""
    x, w = random(4, 8), random(8, 4, seed=1)
    g = size * random(4, 4, seed=2).at[0].set(0.0)
    for product in (fp8.current_product, fp8.Fp8Product(4)):
        with fp8.calibrating():
            dx, dw = jax.grad(lambda x, w, f=product: (f(x, w, MATRIX) * g).sum(), (0, 1))(x, w)
        assert np.isfinite(dx).all() and np.isfinite(dw).all()
        assert (np.asarray(dw) != 0).any() == (size > 1e-30)


def test_an_operation_used_twice_keeps_the_maximum():
    module = fp8.Fp8Product(4)
    graph, state = nnx.split(module)
    x, w = random(4, 8), random(8, 8, seed=1)

    def value(state):
        product = nnx.merge(graph, fp8.for_gradient(state))
        with options(Options(train=True)):
            return sum(product(k * x, w, MATRIX).sum() for k in (1.0, 3.0, 2.0))

    next_state = fp8.from_gradient(jax.jit(jax.grad(value))(state))
    assert np.allclose(next_state["input_amax_history"][...][0], 3 * jnp.abs(x).max(), rtol=1e-6)
    assert float(next_state["input_scale"][...][0]) == 1.0  # one step's scale, not the sum of three


def test_evaluation_without_a_history_uses_scales_of_the_tensors():
    """Models that are loaded without scales compute them from the tensors themselves."""
    x, w = random(4, 8), random(8, 4, seed=1, scale=1e-4)
    fresh = fp8.Fp8Product(4)
    assert np.array_equal(fresh(x, w, MATRIX), fp8.current_product(x, w, MATRIX))
    with options(Options(train=True)):  # scale 1 would round the kernel to zero
        assert float(jnp.abs(fresh(x, w, MATRIX)).max()) == 0.0


@pytest.mark.parametrize(("tokens", "gain"), [(64, None), (16384, 10)])
def test_calibration_preserves_gradients_of_a_large_batch(tokens, gain):
    """Gradients of a mean over 16k tokens are below the smallest e5m2 value at scale 1."""
    x, w = random(512, 32), random(32, 32, seed=1, scale=0.2)
    g = random(512, 32, seed=2, scale=0.05 / tokens)
    expected = x.T @ g

    def error(module):
        return float(
            jnp.linalg.norm(run(module, x, w, g)[2] - expected) / jnp.linalg.norm(expected)
        )

    blind = error(fp8.Fp8Product(16))
    module = fp8.Fp8Product(16)
    with fp8.calibrating():
        *_, dw, next_state = run(module, x, w, g)
    calibrated = error(advance(module, next_state))
    assert calibrated < 0.08
    if gain:
        assert blind > gain * calibrated


def test_emulated_products_cause_a_warning(messages):
    fp8.warn_if_emulated.cache_clear()
    fp8.current_scaling()
    fp8.current_scaling()
    assert messages().count("FP8 units") == 1


@pytest.mark.parametrize("options", [{"amax_history_length": 0}, {"margin": -1}, {"margin": 17}])
def test_impossible_histories_and_margins_are_refused(options):
    from hfseq.errors import UsageError

    with pytest.raises(UsageError, match="must be 1 or more"):
        fp8.delayed_scaling(**options)


@pytest.mark.parametrize(
    ("name", "width", "warns"),
    [("fp8_delayed", 512, True), ("fp8_current", 4096, False), ("bfloat16", 512, False)],
)
def test_narrow_models_cause_a_warning(messages, monkeypatch, name, width, warns):
    monkeypatch.setattr(fp8, "has_fp8_units", lambda: True)
    fp8.warn_if_narrow(choose_precision(name), width)
    assert ("FP8 is not expected to be faster" in messages()) == warns


@pytest.mark.parametrize(
    ("capability", "has_units"), [("9.0", True), ("8.9", True), ("8.6", False), ("gfx942", False)]
)
def test_fp8_units_depend_on_the_compute_capability(monkeypatch, capability, has_units):
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert fp8.has_fp8_units() == has_units
