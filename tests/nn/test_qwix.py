"""The optional recipes of qwix: int8 and FP8 inference, and errors in training."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.nn.fp8 import SITES
from hfseq.nn.precision import resolve_precision
from hfseq.nn.qwix import dequantize, quantize_kernel, quantized_kernel_product, quantized_product
from tests.support.models import close

NAMES = ("qwix_int8", "qwix_fp8")
TYPES = {"qwix_int8": jnp.int8, "qwix_fp8": jnp.float8_e4m3fn}
# Half a step of int8 is 1/254 of a row's maximum, half a step of e4m3 1/16 of the value;
# measured 0.009 and 0.035 of the norm for a product; 0.027 and 0.084 for two layers, where bfloat16
# has 0.011.
ERRORS = {"qwix_int8": 0.015, "qwix_fp8": 0.05}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def distance(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@functools.cache
def model(precision):
    from transformers import GPT2Config

    import hfseq

    config = GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=16, initializer_range=0.2
    )
    return hfseq.FlaxAutoModelForCausalLM.from_config(config, precision=precision)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_raises_an_error_with_the_install_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(UsageError, match=r"requires qwix: pip install 'hfseq\[qwix\]'"):
        resolve_precision(name, None)


def test_both_are_registered():
    assert set(NAMES) <= set(plugins.load().precisions)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_products_use_the_dtype_and_are_close_to_float32(name, axis):
    pytest.importorskip("qwix")
    x, w = random(3, 5, 64), random(64, 48, seed=1)
    w = w if axis == 0 else w.T
    dimensions = (((2,), (axis,)), ((), ()))
    product = jax.jit(lambda x, w: quantized_product(name, TYPES[name], x, w, dimensions))
    actual = product(x, w)
    exact = jax.lax.dot_general(x, w, dimensions)
    assert actual.dtype == x.dtype and 0 < distance(actual, exact) < ERRORS[name]
    jaxpr = str(jax.make_jaxpr(product)(x, w))
    hlo_dtype = {"qwix_int8": "i8", "qwix_fp8": "f8_e4m3fn"}[name]
    (line,) = [line for line in jaxpr.splitlines() if "dot_general[" in line]
    assert f"{hlo_dtype}[" in jaxpr and line


def test_an_outlier_in_one_token_does_not_affect_others():
    """With one scale per tensor the small rows would all be rounded to zero."""
    pytest.importorskip("qwix")
    x, w = random(4, 64), random(64, 8, seed=1)
    dimensions = (((1,), (0,)), ((), ()))
    wild = x.at[0].multiply(1e4)
    product = jax.jit(lambda x: quantized_product("qwix_int8", jnp.int8, x, w, dimensions))
    actual, exact = product(wild), product(x)
    assert close(actual[1:], exact[1:], 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_inference_is_close_to_float32_with_the_same_parameters(name):
    pytest.importorskip("qwix")
    plain, quantized = model("float32"), model(name)
    ids = np.random.default_rng(0).integers(0, 60, (3, 12), dtype=np.int32)
    exact, actual = (
        jax.jit(lambda params, model=model: model(ids, params=params).logits)(plain.params)
        for model in (plain, quantized)
    )
    shapes = [jax.tree.map(jnp.shape, m.params) for m in (plain, quantized)]
    assert shapes[0] == shapes[1] and quantized.extra == {}
    assert 0 < distance(actual, exact) < 2.5 * ERRORS[name]


def test_sites_equal_those_of_fp8_training():
    pytest.importorskip("qwix")
    recipe = resolve_precision("qwix_int8", None)
    assert recipe.sites == SITES and recipe.compute_dtype == jnp.bfloat16
    jaxpr = str(jax.make_jaxpr(lambda ids: model("qwix_int8")(ids).logits)(np.ones((1, 4), int)))
    # Four Linears per layer and two layers, without the embedding and the head.
    assert jaxpr.count("preferred_element_type=int32") == 8


@pytest.mark.parametrize("name", NAMES)
def test_training_is_an_error(name):
    pytest.importorskip("qwix")
    quantised = model(name)

    def loss(params):
        return quantised(np.ones((1, 4), np.int32), params=params).logits.sum()

    with pytest.raises(UsageError, match=f"'{name}' is for inference.*fp8_delayed"):
        jax.grad(loss)(quantised.params)


# -- quantized kernels

#: The 16 values of NF4 (Dettmers et al., 2023, appendix E).
NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
def test_nf4_rounds_blocks_of_64_to_the_nearest_values(axis):
    pytest.importorskip("qwix")
    kernel = random(3, 128, 40) if axis == 0 else random(3, 40, 128)
    rows = np.asarray(kernel if axis == 1 else kernel.swapaxes(1, 2), np.float64)
    parts = rows.reshape(3, 40, 2, 64)
    scale = np.abs(parts).max(-1, keepdims=True)
    expected = NF4[np.abs(parts[..., None] / scale[..., None] - NF4).argmin(-1)] * scale
    expected = expected.reshape(rows.shape)
    expected = expected if axis == 1 else expected.swapaxes(1, 2)
    actual = dequantize(quantize_kernel(kernel, "nf4", axis), jnp.float32)
    # Ties between two values may be rounded either way, but this data has none.
    assert np.allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("qtype", ["nf4", "int8"])
def test_the_backward_pass_does_not_keep_a_dequantized_kernel(qtype):
    pytest.importorskip("qwix")
    x, kernel = random(5, 64), quantize_kernel(random(64, 48, seed=1), qtype, 0)
    dimensions = (((1,), (0,)), ((), ()))
    product = jax.jit(lambda x: quantized_kernel_product(x, kernel, None, dimensions))
    y, back = jax.vjp(product, x)
    dequantized = dequantize(kernel, jnp.float32)
    assert np.allclose(y, x @ dequantized, atol=1e-5)
    assert np.allclose(back(y)[0], y @ dequantized.T, atol=1e-4)
    residuals = {(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(back)}
    assert ((64, 48), "float32") not in residuals
