"""The plan itself: bytes, exchange, the largest batch and the time of a step."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.typing import DTypeLike

from hfseq.checkpoints.config import wrap_build_errors
from hfseq.cli.plan import step_compiler
from hfseq.cli.plan.options import Options
from hfseq.cli.plan.run import (
    abstract_batch,
    abstract_mesh,
    build,
    record_attention_choices,
    rows_per_shard,
)
from hfseq.nn import trees
from hfseq.nn.qwix import is_quantized
from hfseq.nn.random import batch_keys
from hfseq.nn.sharding import AXES
from hfseq.training import aot, throughput
from hfseq.training.hardware import Accelerator
from hfseq.training.setup import Run, param_shapes
from hfseq.training.state import Batch, Tree, join_frozen


class ActivationBytes(NamedTuple):
    """Bytes kept for the backward pass: in any case, and for each row of a micro-batch."""

    fixed: float
    row: float

    def total(self, rows: int) -> float:
        """Return the bytes that ``rows`` rows keep."""
        return self.fixed + self.row * rows


def trace_activations(options: Options, remat: bool) -> ActivationBytes:
    """Return what one device keeps that has whole rows and whole layers.

    Counted is what the backward pass takes from the forward pass, other than parameters and batch.
    Layers are traced as one scanned layer: unrolled, the trace has copies that XLA merges. ``fsdp``
    and ``data`` change nothing for a row; ``sequence`` divides it, ``tensor`` a part of it.
    """
    alone = build(
        options, abstract_mesh("data=1", 1), scan_layers=True, gradient_checkpointing=remat
    )
    with wrap_build_errors(options.config):
        one, two = (activation_bytes(alone, rows) for rows in (1, 2))
    return ActivationBytes(max(2 * one - two, 0), two - one)


def activation_bytes(run: Run, rows: int) -> int:
    """Return the bytes kept for ``rows`` rows of a run on one device."""
    state = run.abstract_state()
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for name, leaf in abstract_batch(run, rows).items()
    }

    def backward(params: Tree, frozen: Tree, extra: Tree, batch: Batch) -> Any:
        inputs, root = dict(batch), jax.random.key(0)
        keys: Any = batch_keys(root, inputs.pop("row"), root)

        def loss(params: Tree) -> jax.Array:
            whole = join_frozen(params, frozen)
            return run.objective.loss(run.model, whole, inputs, keys, True, extra=extra)[0]

        return jax.vjp(loss, params)[1]

    frozen = run.abstract_frozen()
    found = jax.make_jaxpr(backward)(state.params, frozen, state.extra, batch).jaxpr
    given = set(found.invars)
    kept = {var for var in found.outvars if not isinstance(var, Literal) and var not in given}
    return sum(int(var.aval.size * getattr(var.aval.dtype, "itemsize", 4)) for var in kept)


def exchange_by_rules(run: Run) -> list[dict[str, Any]]:
    """Return the exchange that the rules ask for, in the form of :func:`compiled.measure`.

    Gradients are summed over ``data`` once a micro-batch; kernels and tables that ``fsdp`` splits
    are put together for the forward pass, once more for the backward pass of a rematerialised
    layer, and their gradients summed where they lie; ``tensor`` sums hidden states behind each
    product that is split by its input, in both passes. Bytes are those left on a device.
    """
    mesh, itemsize = run.mesh.shape, _itemsize(run.arguments.model.param_dtype)
    stored = {
        path: _itemsize(leaf.qvalue.dtype)
        for path, leaf in trees.flatten(run.abstract_frozen()).items()
        if is_quantized(leaf)
    }
    shapes, trained = param_shapes(run.model), run.model.trainable_paths
    places = run.layout.shardings(shapes)
    passes = 2 if run.arguments.model.gradient_checkpointing else 1
    config = run.model.config
    width: float = getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0)
    width *= _itemsize(run.model.precision.compute_dtype)
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def add(kind: str, axes: tuple[str, ...], count: float, size: float) -> None:
        if count and any(mesh[axis] > 1 for axis in axes):
            entry = sums.setdefault((kind, axes), [0, 0])
            entry[0] += count * run.batch.micro_batches
            entry[1] += size * count * run.batch.micro_batches

    for path, place in places.items():
        shape = run.layout.padded_shape(path, shapes[path])
        local = math.prod(place.shard_shape(shape)) * stored.get(path, itemsize)
        names = [(entry,) if isinstance(entry, str) else entry or () for entry in place.spec]
        split = {name for name in itertools.chain.from_iterable(names) if mesh[name] > 1}
        add("all-reduce", ("data",), int(path in trained), local)
        if "fsdp" in split:
            add("all-gather", ("fsdp",), passes, local * mesh["fsdp"])
            add("reduce-scatter", ("fsdp",), int(path in trained), local)
        else:
            add("all-reduce", ("fsdp",), int(path in trained), local)
        if run.layout.tactic(path) in ("row", "embedding") and "tensor" in split:
            layers = shape[0] if len(shape) > len(run.layout.layer_shape(path, shape)) else 1
            hidden = rows_per_shard(run) * run.batch.length / mesh["sequence"]
            both = 2 if run.layout.tactic(path) == "row" else 1
            add("all-reduce", ("tensor",), both * layers, hidden * width)
    return [
        {"kind": kind, "axes": list(axes), "count": round(count), "bytes": round(size)}
        for (kind, axes), (count, size) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]


def wire_seconds(
    one: dict[str, Any], mesh: Mapping[str, int], device: Accelerator, network: float | None = None
) -> float | None:
    """Return the least time that an exchange takes on the links, or None where no figure exists.

    Rings: a device sends (n - 1)/n of what is gathered or exchanged, twice that of what is summed.
    Devices are numbered along the mesh, ``sequence`` fastest; an axis that reaches over the devices
    of a machine goes at the speed of the network.
    """
    ways = math.prod(mesh[axis] for axis in one["axes"])
    if ways == 1 or not one["bytes"]:
        return 0.0
    # A sum leaves all of what it is of, a scattered one a part of it.
    parts = {
        "all-reduce": 2 * (ways - 1) / ways,
        "reduce-scatter": ways - 1.0,
        "collective-permute": 1.0,
    }
    sent = one["bytes"] * parts.get(one["kind"], (ways - 1) / ways)
    inner = math.prod(mesh[axis] for axis in AXES[AXES.index(one["axes"][0]) :])
    leaves = bool(device.devices_per_machine) and inner > device.devices_per_machine
    rate = (network or device.network_bandwidth) if leaves else device.link_bandwidth
    return sent / rate if rate else None


def _itemsize(dtype: DTypeLike | None) -> float:
    """Return the bytes of a number on an accelerator, where two of four bits share one."""
    dtype = jnp.dtype(dtype or jnp.float32)
    return 0.5 if dtype in (jnp.uint4, jnp.int4) else dtype.itemsize


def make_plan(options: Options) -> dict[str, Any]:
    """Return the whole plan as plain values: bytes, FLOPs, seconds.

    Raises:
        UsageError: what the training loop would refuse, and unknown devices or models.
    """
    target = aot.device_stub(options.accelerator.name)
    with aot.compiling_for(target):
        run = build(options, abstract_mesh(options.mesh, options.count))
    model, arguments, rows = run.model, run.arguments, rows_per_shard(run)
    remat = arguments.model.gradient_checkpointing
    device = options.accelerator
    share = options.memory_share or float(
        os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or device.memory_fraction
    )
    memory = device.memory_bytes if options.memory_gb is None else options.memory_gb * 1e9
    plan: dict[str, Any] = {
        "run": {
            "model_type": model.config.model_type,
            "objective": run.objective.name,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params)),
            "length": run.batch.length,
            "target_length": run.objective.target_length(run.batch.length),
            "rows": run.batch.rows,
            "rows_a_shard": rows,
            "micro_batches": run.batch.micro_batches,
            "precision": model.precision.name,
            "optimizer": arguments.training.optim,
            "gradient_checkpointing": remat,
            "scan_layers": arguments.model.scan_layers,
        },
        "devices": {
            "name": device.name,
            "count": options.count,
            "mesh": dict(run.mesh.shape),
            "memory": memory,
            "share": share,
            "usable": memory * share,
        },
        "bytes": _bytes(run),
    }
    programs = step_compiler.Programs(problem="--no_compile")
    if not options.no_compile:
        # The run itself, with twice as many rows, and with the other choice of remat.
        variants = ((rows, remat), (2 * rows, remat), (rows, not remat))
        wanted = [{"rows": count, "remat": choice} for count, choice in variants]
        programs = step_compiler.compile_in_subprocess(options, wanted)
    kept: dict[bool, ActivationBytes] = {}
    if not programs.problem:
        chosen = programs.results[0]["attention"]
    else:  # rules have to say what compilers do not
        with aot.compiling_for(target):
            kept = {choice: trace_activations(options, choice) for choice in (False, True)}
            with record_attention_choices() as chosen, wrap_build_errors(options.config):
                batch = abstract_batch(run, rows)
                given = run.abstract_state(), run.abstract_frozen(), batch
                jax.eval_shape(run.step_function(), *given)
    plan["attention"] = chosen
    names = dict.fromkeys(one["name"] for one in chosen)
    plan["run"]["attention"] = ", ".join(names) or arguments.model.attn_implementation or "none"
    plan["activations"] = {
        name: round(kept[choice].total(rows) / run.mesh.shape["sequence"])
        for name, choice in (("kept", False), ("recomputed", True))
        if kept
    }
    plan["compiled"] = {
        "compiler": programs.compiler,
        "real": programs.is_accelerator,
        "programs": programs.results,
        "problem": programs.problem,
        "passed_over": programs.skip_reason,
    }
    plan["fit"] = _fit(plan, kept, run)
    compiled: list[Any] = next(
        (x["collectives"] for x in programs.results if x["remat"] == remat), []
    )
    network = options.network_gbs and options.network_gbs * 1e9
    plan["exchange"] = {
        name: [
            one | {"seconds": wire_seconds(one, run.mesh.shape, device, network)}
            for one in exchange
        ]
        for name, exchange in (("rules", exchange_by_rules(run)), ("compiled", compiled))
    }
    exchange = plan["exchange"]["compiled" if programs.is_accelerator and compiled else "rules"]
    wires = [one["seconds"] for one in exchange]
    tokens = run.batch.rows * run.batch.length
    flops = throughput.run_flops(model, run.objective, run.batch.rows, run.batch.length)
    peak = device.peak_flops(_itemsize(model.precision.compute_dtype))
    peak = peak if options.peak_tflops is None else options.peak_tflops * 1e12
    seconds = flops / (options.mfu * peak * options.count)
    plan["time"] = {
        "flops": flops,
        "peak": peak,
        "mfu": options.mfu,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "wire_seconds": None if None in wires else sum(filter(None, wires)),
        "days": options.tokens and options.tokens / tokens * seconds / 86400,
    }
    return plan


def _bytes(run: Run) -> dict[str, Any]:
    """Return bytes of each part, in all and on a device, and of what lies whole on every device."""
    state = run.abstract_state()
    others = state.to_dict()
    parts = {
        "parameters": {"trained": state.params, "frozen": run.abstract_frozen()},
        "optimizer": state.opt_state,
        "other": {name: others[name] for name in others.keys() - {"params", "opt_state"}},
        "gradients": state.params,
        "batch": abstract_batch(run, rows_per_shard(run)),
    }
    sizes = {name: {"all": 0.0, "device": 0.0} for name in (*parts, "whole")}
    for name, tree in parts.items():
        for leaf in jax.tree.leaves(tree):
            shape = leaf.sharding.shard_shape(leaf.shape)
            sizes[name]["all"] += leaf.size * _itemsize(leaf.dtype)
            sizes[name]["device"] += math.prod(shape) * _itemsize(leaf.dtype)
            if name in ("parameters", "optimizer") and shape == leaf.shape:
                sizes["whole"]["device"] += leaf.size * _itemsize(leaf.dtype)
    return jax.tree.map(round, sizes)


def _fit(plan: dict[str, Any], kept: dict[bool, ActivationBytes], run: Run) -> dict[str, Any]:
    """Return what the run needs and the largest batch, by two programs or else by the trace.

    Where layers are recomputed, one at a time has all of its own activations.
    """
    usable, rows = plan["devices"]["usable"], rows_per_shard(run)
    remat = run.arguments.model.gradient_checkpointing
    sizes = {
        p["rows"]: p["arguments"] + p["temporary"]
        for p in plan["compiled"]["programs"]
        if p["remat"] == remat
    }
    slope = 1.0
    if kept:
        parts = plan["bytes"]
        fixed = sum(parts[name]["device"] for name in ("parameters", "optimizer", "gradients"))
        layers = getattr(run.model.config, "num_hidden_layers", 0) or 1
        row = kept[remat].row + (kept[False].row / layers if remat else 0)
        slope = row / run.mesh.shape["sequence"] + parts["batch"]["device"] / rows
        needed = fixed + kept[remat].fixed + slope * rows
    if rows in sizes:
        needed = sizes[rows]
    if 2 * rows in sizes:
        slope = (sizes[2 * rows] - sizes[rows]) / rows
    slope = max(slope, 1.0)
    smallest = needed - slope * (rows - 1)
    largest = max(int(rows + (usable - needed) // slope), 0)
    return {
        "source": "compiled" if rows in sizes else "traced",
        "row_source": "compiled" if 2 * rows in sizes else "traced",
        "needed": round(needed),
        "row": round(slope),
        "left": round(usable - needed),
        "one_row": round(smallest),
        "largest_rows_a_shard": largest if smallest <= usable else 0,
    }
