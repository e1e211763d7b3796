"""The plan itself: bytes, exchange, the largest batch and the time of a step."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.typing import DTypeLike

from hfseq.checkpoints.config import building
from hfseq.cli.plan import compile
from hfseq.cli.plan.run import (
    Options,
    abstract_batch,
    abstract_mesh,
    build,
    local_bytes,
    local_rows,
)
from hfseq.nn.random import batch_keys
from hfseq.nn.sharding import AXES
from hfseq.training import throughput
from hfseq.training.hardware import Accelerator
from hfseq.training.setup import Run, shapes_of
from hfseq.training.state import Batch, Tree


class Kept(NamedTuple):
    """Bytes kept for the backward pass: in any case, and for each row of a micro-batch."""

    fixed: float
    row: float

    def of(self, rows: int) -> float:
        """Return the bytes that ``rows`` rows keep."""
        return self.fixed + self.row * rows


def trace(options: Options, remat: bool) -> Kept:
    """Return what one device keeps that has whole rows and whole layers.

    Counted is what the backward pass takes from the forward pass, other than parameters and batch.
    Layers are traced as one scanned layer: unrolled, the trace has copies that XLA merges. ``fsdp``
    and ``data`` change nothing for a row; ``sequence`` divides it, ``tensor`` a part of it.
    """
    alone = build(
        options, abstract_mesh("data=1", 1), scan_layers=True, gradient_checkpointing=remat
    )
    with building(options.config):
        one, two = (kept_bytes(alone, rows) for rows in (1, 2))
    return Kept(max(2 * one - two, 0), two - one)


def kept_bytes(run: Run, rows: int) -> int:
    """Return the bytes kept for ``rows`` rows of a run on one device."""
    state = run.abstract_state()
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for name, leaf in abstract_batch(run, rows).items()
    }

    def backward(params: Tree, extra: Tree, batch: Batch) -> Any:
        inputs, root = dict(batch), jax.random.key(0)
        keys: Any = batch_keys(root, inputs.pop("row"), root)

        def loss(params: Tree) -> jax.Array:
            model = run.model
            return run.objective.loss(model, params, inputs, keys, True, extra=extra)[0]

        return jax.vjp(loss, params)[1]

    found = jax.make_jaxpr(backward)(state.params, state.extra, batch).jaxpr
    given = set(found.invars)
    kept = {var for var in found.outvars if not isinstance(var, Literal) and var not in given}
    return sum(_activation_bytes(var.aval) for var in kept)


def _activation_bytes(aval: Any) -> int:
    return int(aval.size * getattr(aval.dtype, "itemsize", 4))


def by_rules(run: Run) -> list[dict[str, Any]]:
    """Return the exchange that the rules ask for, in the form of :func:`compiled.measure`.

    Gradients are summed over ``data`` once a micro-batch; kernels and tables that ``fsdp`` splits
    are put together for the forward pass, once more for the backward pass of a rematerialised
    layer, and their gradients summed where they lie; ``tensor`` sums hidden states behind each
    product that is split by its input, in both passes. Bytes are those left on a device.
    """
    mesh, itemsize = run.mesh.shape, _itemsize(run.arguments.model.param_dtype)
    shapes = shapes_of(run.model)
    places = run.layout.shardings(shapes)
    passes = 2 if run.arguments.model.gradient_checkpointing else 1
    found: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def add(kind: str, axes: tuple[str, ...], count: float, size: float) -> None:
        if count and any(mesh[axis] > 1 for axis in axes):
            entry = found.setdefault((kind, axes), [0, 0])
            entry[0] += count * run.batch.micro
            entry[1] += size * count * run.batch.micro

    for path, place in places.items():
        shape = run.layout.padded(path, shapes[path])
        local = math.prod(place.shard_shape(shape)) * itemsize
        split = {name for entry in place.spec for name in _names(entry) if mesh[name] > 1}
        add("all-reduce", ("data",), 1, local)
        if "fsdp" in split:
            add("all-gather", ("fsdp",), passes, local * mesh["fsdp"])
            add("reduce-scatter", ("fsdp",), 1, local)
        else:
            add("all-reduce", ("fsdp",), 1, local)
        if run.layout.tactic(path) in ("row", "embedding") and "tensor" in split:
            layers = shape[0] if len(shape) > len(run.layout.layer_shape(path, shape)) else 1
            hidden = local_rows(run) * run.batch.length / mesh["sequence"]
            width = _width(run) * _itemsize(run.model.precision.compute_dtype)
            both = 2 if run.layout.tactic(path) == "row" else 1
            add("all-reduce", ("tensor",), both * layers, hidden * width)
    return [
        {"kind": kind, "axes": list(axes), "count": round(count), "bytes": round(size)}
        for (kind, axes), (count, size) in sorted(found.items(), key=lambda item: -item[1][1])
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
    parts = {"all-reduce": 2 * (ways - 1) / ways, "reduce-scatter": ways - 1.0,
             "collective-permute": 1.0}  # fmt: skip
    sent = one["bytes"] * parts.get(one["kind"], (ways - 1) / ways)
    inner = math.prod(mesh[axis] for axis in AXES[AXES.index(one["axes"][0]) :])
    leaves = bool(device.machine) and inner > device.machine
    rate = (network or device.network) if leaves else device.link
    return sent / rate if rate else None


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _itemsize(dtype: DTypeLike | None) -> int:
    import jax.numpy as jnp

    return jnp.dtype(dtype or jnp.float32).itemsize


def _width(run: Run) -> int:
    config = run.model.config
    return int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0))


def make_plan(options: Options) -> dict[str, Any]:
    """Return the whole plan as plain values: bytes, FLOPs, seconds.

    Raises:
        UsageError: what the training loop would refuse, and unknown devices or models.
    """
    run = build(options, abstract_mesh(options.mesh, options.count))
    found = {"run": _run(run), "devices": _devices(options)}
    found["bytes"] = _bytes(run)
    kept = {remat: trace(options, remat) for remat in (False, True)}
    ways = run.mesh.shape["sequence"]
    found["activations"] = {
        _remat(remat): round(one.of(local_rows(run)) / ways) for remat, one in kept.items()
    }
    remat = run.arguments.model.gradient_checkpointing
    programs: list[dict[str, Any]] = []
    problem = "--no_compile"
    if not options.no_compile:
        _say(f"compiling the step for {options.count} host devices, three times")
        programs, problem = compile.measure_apart(options, _variants(run))
    found["compiled"] = {"programs": programs, "problem": problem}
    found["fit"] = _fit(found, kept, run)
    rules = by_rules(run)
    own = next((p for p in programs if p["remat"] == remat), None)
    found["exchange"] = {
        "rules": _with_seconds(rules, run, options),
        "compiled": _with_seconds(own["collectives"], run, options) if own else [],
    }
    found["time"] = _time(run, options, rules)
    return found


def _run(run: Run) -> dict[str, Any]:
    model, arguments = run.model, run.arguments
    return {
        "model_type": model.config.model_type,
        "objective": run.objective.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params_shape_tree)),
        "length": run.batch.length,
        "target_length": run.objective.target_length(run.batch.length),
        "rows": run.batch.rows,
        "rows_a_shard": local_rows(run),
        "micro_batches": run.batch.micro,
        "precision": model.precision.name,
        "optimizer": arguments.training.optim,
        "gradient_checkpointing": arguments.model.gradient_checkpointing,
        "scan_layers": arguments.model.scan_layers,
        "attention": arguments.model.attn_implementation or "xla",
    }


def _devices(options: Options) -> dict[str, Any]:
    device = options.accelerator
    share = options.memory_share or float(
        os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or device.share
    )
    memory = device.memory if options.memory_gb is None else options.memory_gb * 1e9
    sizes = dict(abstract_mesh(options.mesh, options.count).shape)
    return {
        "name": device.name, "count": options.count, "mesh": sizes, "memory": memory,
        "share": share, "usable": memory * share,
    }  # fmt: skip


def _bytes(run: Run) -> dict[str, Any]:
    """Return bytes of each part, in all and on a device, and of what lies whole on every device."""
    state = run.abstract_state()
    apart = ("params", "opt_state")
    parts = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "other": {name: part for name, part in state.to_dict().items() if name not in apart},
        "gradients": state.params,
        "batch": abstract_batch(run, local_rows(run)),
    }
    found = {
        name: {"all": _size(tree), "device": local_bytes(tree)} for name, tree in parts.items()
    }
    whole = [
        leaf
        for leaf in jax.tree.leaves((state.params, state.opt_state))
        if leaf.sharding.shard_shape(leaf.shape) == leaf.shape
    ]
    found["whole"] = {"all": 0, "device": _size(whole)}
    return found


def _size(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _variants(run: Run) -> list[dict[str, Any]]:
    """The run itself, the same with twice as many rows, and with the other choice of remat."""
    rows, remat = local_rows(run), run.arguments.model.gradient_checkpointing
    return [
        {"rows": rows, "remat": remat},
        {"rows": 2 * rows, "remat": remat},
        {"rows": rows, "remat": not remat},
    ]


def _fit(found: dict[str, Any], kept: dict[bool, Kept], run: Run) -> dict[str, Any]:
    """Return what the run needs and the largest batch, by two programs or else by the trace.

    Where layers are recomputed, one at a time has all of its own activations.
    """
    usable, rows = found["devices"]["usable"], local_rows(run)
    remat = run.arguments.model.gradient_checkpointing
    sizes = {
        p["rows"]: p["arguments"] + p["temporary"]
        for p in found["compiled"]["programs"] if p["remat"] == remat
    }  # fmt: skip
    if len(sizes) == 2:
        source, needed = "compiled", sizes[rows]
        slope = (sizes[2 * rows] - sizes[rows]) / rows
    else:
        parts = found["bytes"]
        source = "traced"
        fixed = sum(parts[name]["device"] for name in ("parameters", "optimizer", "gradients"))
        layers = getattr(run.model.config, "num_hidden_layers", 0) or 1
        row = kept[remat].row + (kept[False].row / layers if remat else 0)
        slope = row / run.mesh.shape["sequence"] + parts["batch"]["device"] / rows
        needed = fixed + kept[remat].fixed + slope * rows
    slope = max(slope, 1.0)
    smallest = needed - slope * (rows - 1)
    largest = max(int(rows + (usable - needed) // slope), 0)
    return {
        "source": source, "needed": round(needed), "row": round(slope),
        "left": round(usable - needed), "one_row": round(smallest),
        "largest_rows_a_shard": largest if smallest <= usable else 0,
    }  # fmt: skip


def _with_seconds(found: list[dict[str, Any]], run: Run, options: Options) -> Any:
    mesh, network = run.mesh.shape, options.network_gbs and options.network_gbs * 1e9
    return [
        one | {"seconds": wire_seconds(one, mesh, options.accelerator, network)} for one in found
    ]


def _time(run: Run, options: Options, rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model FLOPs of a step and what it takes at the stated MFU."""
    flops = throughput.run_flops(run.model, run.objective, run.batch.rows, run.batch.length)
    dtype = jnp.dtype(run.model.precision.compute_dtype or jnp.float32)
    peak = options.accelerator.peak(dtype.itemsize)
    peak = peak if options.peak_tflops is None else options.peak_tflops * 1e12
    seconds = flops / (options.mfu * peak * options.count)
    tokens = run.batch.rows * run.batch.length
    wires = [x["seconds"] for x in _with_seconds(rules, run, options)]
    return {
        "flops": flops, "peak": peak, "mfu": options.mfu, "seconds": seconds, "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "wire_seconds": None if None in wires else sum(wires),
        "days": options.tokens and options.tokens / tokens * seconds / 86400,
    }  # fmt: skip


def _remat(remat: bool) -> str:
    return "recomputed" if remat else "kept"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
