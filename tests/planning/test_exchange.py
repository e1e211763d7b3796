"""Communication of devices by the sharding rules, in a compiled step, and its wire time."""

from __future__ import annotations

import jax
import pytest

from hfseq.cli.plan import step_compiler
from hfseq.cli.plan.estimate import exchange_by_rules, wire_seconds
from hfseq.cli.plan.run import abstract_mesh, build
from hfseq.training.hardware import get_accelerator

MESH = {"data": 8, "fsdp": 8, "expert": 1, "tensor": 1, "sequence": 1}


def of_kind(collectives, kind, *axes):
    return next(
        collective
        for collective in collectives
        if (collective["kind"], collective["axes"]) == (kind, list(axes))
    )


def test_gradients_are_summed_over_data_as_the_compiled_step_does_it(options):
    options = options(mesh="data=8")
    run = build(options, abstract_mesh("data=8", 8))
    rule = of_kind(exchange_by_rules(run), "all-reduce", "data")
    assert rule["bytes"] == 4 * sum(x.size for x in jax.tree.leaves(run.abstract_state().params))
    collectives = step_compiler.compile_step(options, 2, False, jax.devices())["collectives"]
    # XLA may all-reduce the two gradients of a tied table (lookup and head) separately.
    table = 4 * 128 * 32
    size = of_kind(collectives, "all-reduce", "data")["bytes"]
    assert rule["bytes"] <= size <= 1.02 * (rule["bytes"] + table)


@pytest.mark.slow
def test_weights_are_put_together_over_fsdp_as_the_compiled_step_does_it(options):
    options = options(mesh="fsdp=8")
    rules = exchange_by_rules(build(options, abstract_mesh("fsdp=8", 8)))
    collectives = step_compiler.compile_step(options, 2, False, jax.devices())["collectives"]
    gathered = of_kind(rules, "all-gather", "fsdp")["bytes"]
    assert of_kind(collectives, "all-gather", "fsdp")["bytes"] == pytest.approx(gathered, rel=0.05)


def test_recomputed_layers_gather_their_weights_again(options):
    mesh = abstract_mesh("fsdp=8", 8)
    once, twice = (
        exchange_by_rules(build(options(mesh="fsdp=8", gradient_checkpointing=remat), mesh))
        for remat in (False, True)
    )
    gathered = of_kind(once, "all-gather", "fsdp")["bytes"]
    assert of_kind(twice, "all-gather", "fsdp")["bytes"] == 2 * gathered


def test_ring_time_is_limited_by_the_slowest_link():
    h200 = get_accelerator("h200")
    summed = {"kind": "all-reduce", "axes": ["fsdp"], "bytes": 8e9}
    gathered = {"kind": "all-gather", "axes": ["fsdp"], "bytes": 8e9}
    scattered = {"kind": "reduce-scatter", "axes": ["fsdp"], "bytes": 1e9}
    # Seven eighths of 8 GB within a machine, at 450 GB/s. An all-reduce is both of the others.
    assert wire_seconds(gathered, MESH, h200) == pytest.approx(7e9 / 450e9)
    assert wire_seconds(scattered, MESH, h200) == pytest.approx(7e9 / 450e9)
    assert wire_seconds(summed, MESH, h200) == pytest.approx(14e9 / 450e9)
    # `data` is the outer axis: its groups span eight machines.
    outer = summed | {"axes": ["data"]}
    assert wire_seconds(outer, MESH, h200) == pytest.approx(14e9 / 50e9)
    assert wire_seconds(outer, MESH, h200, network=100e9) == pytest.approx(14e9 / 100e9)
    assert wire_seconds(outer, MESH, get_accelerator("l4")) is None
    assert wire_seconds(outer, MESH, get_accelerator("tpu-v5e")) == pytest.approx(14e9 / 200e9)
    alone = MESH | {"data": 1}
    assert wire_seconds(outer, alone, h200) == 0
