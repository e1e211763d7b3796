"""Our Triton kernels compiled for an H200 by its own compiler, without having one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq.nn.dispatch import AttentionCall
from hfseq.nn.kernels.flash import flash_attention
from hfseq.nn.random import LazyBits
from hfseq.nn.visible import Visibility
from hfseq.training import aot

KERNEL = "__gpu$xla.gpu.triton"
HEADS = 12


def program(
    length: int,
    *,
    rate: float = 0.1,
    width: int = 64,
    kv_heads: int = HEADS,
    batch: int = 2,
    dtype: str = "bfloat16",
    keys: int | None = None,
    over: tuple[int, int] = (1, 1),
    bias: bool = False,
    learned: int = 3,
    **band,
) -> jax.stages.Compiled:
    """The gradients of packed rows, for as many devices as ``over`` has (data, tensor).

    Those of the first ``learned`` of query, key, value and bias.
    """
    if reason := aot.unavailable_reason("h200"):
        pytest.skip(reason)
    devices = aot.describe("h200", over[0] * over[1])
    mesh = Mesh(np.array(devices).reshape(over), ("data", "tensor"))
    keys = keys or length

    def laid(*shape: int, dtype=dtype) -> jax.ShapeDtypeStruct:
        axes = ("data", None, "tensor", None) if len(shape) == 4 else ("data",)[: len(shape)]
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def total(query, key, value, bias, segments, key_segments, words, use):
        bits = LazyBits(words, use, (batch, HEADS, length, keys))
        visible = Visibility(query_segments=segments, key_segments=key_segments, **band)
        call = AttentionCall(
            *(query, key, value, visible),
            bias=bias,
            scale=0.1,
            dropout_rate=rate,
            dropout_bits=bits,
            mesh=mesh,
        )
        attended = flash_attention(call)
        return attended.astype(jnp.float32).sum()

    segments = [laid(batch, size, dtype=jnp.int32) for size in (length, keys)]
    random = laid(batch, 2, dtype=jnp.uint32), laid(dtype=jnp.uint32)
    key = laid(batch, keys, kv_heads, width)
    added = jax.ShapeDtypeStruct(
        (1, HEADS, length, keys), dtype, sharding=NamedSharding(mesh, PartitionSpec(None, "tensor"))
    )
    arguments = (
        laid(batch, length, HEADS, width),
        key,
        key,
        added if bias else None,
        *segments,
        *random,
    )
    step = jax.jit(jax.grad(total, argnums=tuple(range(learned))))
    return aot.compile_for(devices[0], step, *arguments)


def twice(text: str, length: int) -> list[str]:
    """The shapes of a program that have two axes of this length."""
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", text))
    return [shape for shape in shapes if shape.split(",").count(str(length)) > 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "kv_heads": 4},
        {"rate": 0.0, "window": (64, 64), "width": 80},
        {"keys": 1000, "dtype": "float16"},
    ],
    ids=["causal and grouped", "window and no power of two", "cross-attention"],
)
def test_one_forward_and_two_backward_kernels_without_full_scores(options):
    text = program(384, **options).as_text()
    assert text.count(f'custom_call_target="{KERNEL}"') == 3
    assert not twice(text, 384)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "lengths"), [(0.1, (2048, 4096, 8192, 16384)), (0.0, (2048, 4096, 8192, 16384))]
)
def test_memory_grows_as_the_row_does(rate, lengths):
    bytes_of = [program(n, rate=rate).memory_analysis().temp_size_in_bytes for n in lengths]
    per_position = [size / n for size, n in zip(bytes_of, lengths, strict=True)]
    # The output is kept and has a change, of half precision; two numbers of each query and head.
    assert max(per_position) < 1.05 * min(per_position)
    assert max(per_position) < 1.1 * 2 * HEADS * (2 * 64 * 2 + 2 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize(("rate", "learned"), [(0.0, 3), (0.1, 3), (0.1, 4)])
def test_the_tiles_of_every_width_fit_the_shared_memory(width, dtype, rate, learned):
    """The compiler refuses those that do not."""
    bias = learned == 4
    compiled = program(512, width=width, dtype=dtype, rate=rate, bias=bias, learned=learned)
    assert compiled.as_text().count(f'custom_call_target="{KERNEL}"') == learned


@pytest.mark.slow
def test_a_bias_that_is_not_learned_has_no_gradients_kernel():
    text = program(512, bias=True).as_text()
    assert text.count(f'custom_call_target="{KERNEL}"') == 3
    assert set(twice(text, 512)) == {f"1,{HEADS},512,512"}


def test_a_mesh_adds_no_exchange():
    compiled = program(256, batch=4, kv_heads=4, over=(4, 2))
    text = compiled.as_text()
    assert text.count(f'custom_call_target="{KERNEL}"') == 3
    assert not re.findall(r"all-reduce|all-gather|all-to-all|collective-permute", text)
    # A device has one row of four and six heads of twelve.
    assert re.search(r"bf16\[1,256,6,64\]", text)
