"""What attend chooses for an H200, and each of cuDNN's ways compiled for one that is not there."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq import nn
from hfseq.nn.attention import CUDNN
from hfseq.nn.context import Options
from hfseq.training import aot

B, T, N, H = 8, 512, 12, 64
INTS = jnp.int32


def program(
    heads: int = N,
    keys: int = T,
    biased: bool = False,
    dtype: str = "bfloat16",
    count: int = 1,
    rate: float = 0.0,
    named: tuple = (),
    **given,
) -> str:
    """The gradients of attention as text; ``given`` are dtypes of what is visible, and values."""
    if reason := aot.unavailable_reason("h200"):
        pytest.skip(reason)
    devices = aot.describe("h200", count)
    mesh = Mesh(np.array(devices), ("data",))

    def laid(*shape: int, kind=dtype, rows: bool = True) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("data") if rows else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))

    arrays = {
        "query_segments": laid(B, T, kind=INTS),
        "key_segments": laid(B, keys, kind=INTS),
        "key_lengths": laid(B, kind=INTS),
        "dense": laid(B, 1, 1, keys, kind=jnp.bool_),
    }
    shown = {name: arrays[name] for name in given.pop("seen", ())}
    bias = laid(1, N, T, keys, rows=False) if biased else None

    def total(parts, bias, shown):
        visible = nn.Visibility(**shown, **given)
        rngs = nn.make_keys(jax.random.key(0)) if rate else None
        with nn.options(Options(mesh=mesh, attention=named)):
            mixed, _ = nn.attend(*parts, mask=visible, bias=bias, dropout_rate=rate, rngs=rngs)
        return mixed.astype(jnp.float32).sum()

    parts = laid(B, T, N, H), *[laid(B, keys, heads, H)] * 2
    wanted = (0, 1) if biased else 0
    step = jax.jit(jax.grad(total, argnums=wanted))
    return aot.compile_for(devices[0], step, parts, bias, shown).as_text() or ""


def calls(text: str) -> list[str]:
    return sorted(set(re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)))


def squares(text: str, length: int = T) -> set[str]:
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", text))
    return {shape for shape in shapes if shape.split(",").count(str(length)) > 1}


PLAIN = ["fmhaSoftmax", "fmhaSoftmaxBackward"]
PACKED = {"seen": ["query_segments"], "max_runs": 8, "named": CUDNN}
BIASED = ["fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, {"mask_type": "NO_MASK"}),
        ({"causal": True, "heads": 4}, {"mask_type": "CAUSAL"}),
        ({"causal": True, "window": (128, 0)}, {"sliding_window_length": 129}),
        ({"seen": ["key_lengths"]}, {"mask_type": "PADDING"}),
        ({"seen": ["key_lengths"], "causal": True}, {"mask_type": "PADDING_CAUSAL"}),
        (PACKED, {"max_seg_per_batch": 8}),
        (
            PACKED | {"causal": True, "heads": 4, "count": 2},
            {"mask_type": "PADDING_CAUSAL", "max_seg_per_batch": 8},
        ),
    ],
    ids=["plain", "causal, grouped", "window", "lengths", "both", "packed", "packed on two"],
)
def test_cudnn_needs_no_mask_in_memory(options, told):
    text = program(**options)
    assert calls(text) == PLAIN and not squares(text)
    for name, value in told.items():
        assert re.search(rf'"{name}": "?{value}\b', text), name
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1


@pytest.mark.parametrize(
    "options",
    [{"biased": True}, {"seen": ["dense"]}, {"biased": True, "seen": ["dense"], "causal": True}],
    ids=["bias", "padding anywhere", "all"],
)
def test_bias_and_dense_mask_use_the_fused_kernel(options):
    text = program(**options)
    assert calls(text) == BIASED and squares(text)


@pytest.mark.parametrize(
    "options",
    [
        {"seen": ["query_segments"]},
        pytest.param({"seen": ["key_segments"]}, marks=pytest.mark.slow),
        pytest.param({"seen": ["query_segments"], "max_runs": 8}, marks=pytest.mark.slow),
        pytest.param(
            {"window": (64, 64), "seen": ["query_segments"], "max_runs": 8}, marks=pytest.mark.slow
        ),
        pytest.param({"rate": 0.1}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32"}, marks=pytest.mark.slow),
    ],
    ids=["uncounted", "packed", "holes", "both sides", "dropout", "float32"],
)
def test_flash_kernel_handles_packed_rows_and_inputs_that_cudnn_rejects(options):
    text = program(**options)
    assert calls(text) == [] and not squares(text)
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3


@pytest.mark.slow
def test_a_dense_mask_with_dropout_falls_back_on_the_explicit_form():
    text = program(seen=["dense"], rate=0.1)
    assert calls(text) == [] and "xla.gpu.triton" not in text and squares(text)


def test_explicit_cudnn_accepts_padding_anywhere():
    text = program(seen=["key_segments"], named=CUDNN)
    assert calls(text) == BIASED and squares(text)
