"""Plans agree with the arrays and the compiled steps of real runs."""

from __future__ import annotations

import jax
import pytest

from hfseq.cli.plan import step_compiler
from hfseq.cli.plan.estimate import make_plan
from hfseq.cli.plan.options import Options
from hfseq.cli.plan.run import abstract_batch, abstract_mesh, build, rows_per_shard
from hfseq.training.loader import Loader


def local_bytes(tree) -> int:
    """Returns the bytes of arrays on the first device."""
    first = jax.devices()[0]
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


def planned(loop, **changes) -> Options:
    """Returns the options of a plan for the run of ``loop``."""
    training = loop.run.arguments.training
    return Options(
        config=str(loop.folder),
        devices=f"h200:{loop.run.mesh.size}",
        mesh=training.mesh,
        objective=loop.run.objective.name,
        length=32,
        global_batch_size=loop.run.batch.rows,
        gradient_accumulation_steps=loop.run.batch.micro_batches,
        optim=training.optim,
        precision="float32",
        **({"no_compile": True} | changes),
    )


def first_batch(loop):
    run = loop.run
    seed = run.arguments.training.seed
    return (
        Loader(run.data.train, run.objective, run.mesh, run.batch.micro_batches, seed)
        .make_batch(0)
        .batch
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "objective", "optimizer"),
    [
        ("fsdp=8", "mlm", "adamw"),
        ("data=2,fsdp=2,tensor=2", "span_mlm", "adafactor"),
        ("data=8", "rtd", "adamw"),
        ("data=2,fsdp=4", "sop", "adamw"),
    ],
)
def test_bytes_on_a_device_are_those_of_the_arrays_of_a_run(train, mesh, objective, optimizer):
    loop = train(
        mesh=mesh,
        objective=objective,
        optim=optimizer,
        max_steps=2,
        do_train=True,
        save_strategy="no",
    )
    options = planned(loop)
    plan = make_plan(options)
    state = loop.state
    assert plan["bytes"]["parameters"]["device"] == local_bytes(state.params)
    assert plan["bytes"]["optimizer"]["device"] == local_bytes(state.opt_state)
    run = build(options, abstract_mesh(mesh, 8))
    shapes = run.abstract_state()
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for planned_leaf, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (planned_leaf.shape, planned_leaf.dtype) == (leaf.shape, leaf.dtype)
        assert planned_leaf.sharding.spec == leaf.sharding.spec
    batch, planned_batch = first_batch(loop), abstract_batch(run, rows_per_shard(run))
    assert {k: (x.shape, x.dtype) for k, x in batch.items()} == {
        k: (x.shape, x.dtype) for k, x in planned_batch.items()
    }
    assert plan["bytes"]["batch"]["device"] == local_bytes(batch)


@pytest.mark.slow
def test_a_program_of_the_plan_is_that_of_the_run(train):
    loop = train(
        mesh="data=2,fsdp=4", objective="clm", max_steps=2, do_train=True, save_strategy="no"
    )
    batch = first_batch(loop)
    memory = loop.run.step_function().lower(loop.state, {}, batch).compile().memory_analysis()
    options = planned(loop)
    program = step_compiler.compile_step(options, loop.run.batch.rows // 8, False, jax.devices())
    assert program["arguments"] == memory.argument_size_in_bytes
    assert program["temporary"] == memory.temp_size_in_bytes
    arrays = local_bytes(loop.state) + local_bytes(batch)
    assert program["arguments"] == pytest.approx(arrays, abs=64 * len(jax.tree.leaves(loop.state)))


@pytest.mark.slow
def test_fsdp_shards_parameters_over_eight_devices(options):
    plan = make_plan(options(mesh="fsdp=8", no_compile=True))
    parts = plan["bytes"]
    assert parts["parameters"]["all"] == 4 * plan["run"]["parameters"]
    total, mine = (
        parts["parameters"][scope] + parts["optimizer"][scope] for scope in ("all", "device")
    )
    unsharded = parts["whole"]["device"]
    assert abs(mine - unsharded - total / 8) <= 0.1 * total / 8
    # Only the counters of the optimizer are not sharded.
    assert unsharded < 0.01 * total / 8
