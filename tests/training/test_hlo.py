"""Collectives in HLO text: sizes, loops, and groups of devices in all notations."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from hfseq.training.collectives import find_collectives

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "tensor", "sequence"))


def line(groups: str, opcode: str = "all-gather", result: str = "f32[4,16]{1,0}") -> str:
    source = 'metadata={op_name="jit(step)/a/dot"}'
    return f"  %x.1 = {result} {opcode}(%y), {groups}, dimensions={{0}}, {source}"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("sequence",)),
        ("replica_groups=[4,2]<=[8]", ("sequence",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("tensor",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ("tensor",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ("sequence",)),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("tensor",)),
        ("replica_groups={}", ("data", "tensor", "sequence")),
    ],
)
def test_groups_of_devices_are_axes_of_the_mesh(groups, axes):
    (collective,) = find_collectives(line(groups), MESH)
    assert collective.axes == axes and collective.shapes == ((4, 16),) and collective.size == 256
    assert (collective.op, collective.dimension, collective.source) == ("all-gather", 0, "a/dot")


def test_permutations_have_axes_too():
    text = line("source_target_pairs={{0,4},{4,0},{1,5}}", "collective-permute", "bf16[8]{0}")
    (collective,) = find_collectives(text, MESH)
    assert collective.axes == ("data",) and collective.size == 16


def test_asynchronous_collectives_count_once():
    started = "(f32[2,8]{1,0}, f32[4,8]{1,0})"
    text = line("replica_groups=[4,2]<=[8]", "all-gather-start", started)
    text += "\n  %d = f32[4,8]{1,0} all-gather-done(%x.1)"
    (collective,) = find_collectives(text, MESH)
    assert collective.shapes == ((4, 8),)


def test_single_device_groups_do_not_communicate():
    assert find_collectives(line("replica_groups=[8,1]<=[8]", "all-reduce"), MESH) == []


def test_loops_count_their_iterations():
    @jax.jit
    def run(x):
        def body(x, _):
            text = jax.lax.with_sharding_constraint(x * 2, jax.NamedSharding(MESH, jax.P()))
            return jax.lax.with_sharding_constraint(text + 1, computation), None

        return jax.lax.scan(body, x, None, length=5)[0]

    computation = jax.NamedSharding(MESH, jax.P("tensor"))
    text = run.lower(jax.device_put(np.ones((8, 8), np.float32), computation)).compile().as_text()
    (collective,) = [
        collective for collective in find_collectives(text, MESH) if collective.op == "all-gather"
    ]
    assert collective.times == 5 and collective.axes == ("tensor",) and collective.size == 256
