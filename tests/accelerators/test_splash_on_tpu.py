"""Splash attention compiled for TPUs by libtpu, without having one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq import nn
from hfseq.nn.context import Options
from hfseq.training import aot

KERNELS = {
    "splash_mha_fwd_segmented_residuals",
    "splash_mha_dq_segmented_no_residuals",
    "splash_mha_dkv_segmented_no_residuals",
}
COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(")


def program(
    length: int, target: str = "v5e", heads: int = 12, kv_heads: int = 12, width: int = 64, **band
) -> jax.stages.Compiled:
    """The gradients of packed rows over four devices, two rows at a time on two shards of heads."""
    if reason := aot.unavailable_reason(f"tpu-{target}"):
        pytest.skip(reason)
    devices = aot.describe(f"tpu-{target}", 4)
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"))

    def laid(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        axes = ("data", None, "tensor")[: 3 if len(shape) == 4 else 1]
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    def total(query, key, value, segments):
        with nn.options(Options(mesh=mesh)):
            visible = nn.Visibility(query_segments=segments, **band)
            mixed, _ = nn.attend(query, key, value, mask=visible)
        return mixed.astype(jnp.float32).sum()

    key = laid(2, length, kv_heads, width)
    arguments = laid(2, length, heads, width), key, key, laid(2, length, dtype=jnp.int32)
    step = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    return aot.compile_for(devices[0], step, *arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"length": 384},
        pytest.param({"length": 384, "target": "v6e", "causal": True}, marks=pytest.mark.slow),
        pytest.param({"length": 510, "kv_heads": 4, "window": (64, 64)}, marks=pytest.mark.slow),
        pytest.param({"length": 2048, "causal": True, "width": 128}, marks=pytest.mark.slow),
        pytest.param({"length": 384, "kv_heads": 2, "width": 80}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_kernels_without_communication_or_full_scores(options):
    text = program(**options).as_text() or ""
    assert set(re.findall(r"splash_mh[aq]_\w+", text)) == KERNELS
    assert not COLLECTIVE.search(text)
    length = str(options["length"])
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", text))
    assert not [shape for shape in shapes if shape.split(",").count(length) > 1]


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square():
    for length in (2048, 4096, 8192, 16384):
        queries = 6 * length * 128 * 4  # of a device: heads of 64 fill 128 lanes, in float32
        assert program(length).memory_analysis().temp_size_in_bytes < 4 * queries
