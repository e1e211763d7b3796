"""The plan itself: bytes, exchange, the largest batch and the time of a step."""

from __future__ import annotations

import math
import os
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from hfseq.cli.plan import compile
from hfseq.cli.plan.run import Options, Subject, abstract_mesh, build, local_bytes
from hfseq.nn.random import batch_keys
from hfseq.nn.sharding import AXES
from hfseq.training import throughput
from hfseq.training.hardware import Accelerator


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
    one, two = (kept_bytes(alone, rows) for rows in (1, 2))
    return Kept(max(2 * one - two, 0), two - one)


def kept_bytes(subject: Subject, rows: int) -> int:
    """Return the bytes kept for ``rows`` rows of a run on one device."""
    state, _ = subject.state()
    shapes, _ = subject.batch(rows)
    batch = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in shapes.items()}

    def backward(params: Any, extra: Any, batch: Any) -> Any:
        inputs, root = dict(batch), jax.random.key(0)
        keys = batch_keys(root, inputs.pop("row"), root)

        def loss(params: Any) -> jax.Array:
            model = subject.model
            return subject.objective.loss(model, params, inputs, keys, True, extra=extra)[0]

        return jax.vjp(loss, params)[1]

    found = jax.make_jaxpr(backward)(state["params"], state["extra"], batch).jaxpr
    given = set(found.invars)
    kept = {var for var in found.outvars if not isinstance(var, Literal) and var not in given}
    return sum(_activation_bytes(var.aval) for var in kept)


def _activation_bytes(aval: Any) -> int:
    return int(aval.size * getattr(aval.dtype, "itemsize", 4))


def by_rules(subject: Subject) -> list[dict[str, Any]]:
    """Return the exchange that the rules ask for, in the form of :func:`compiled.measure`.

    Gradients are summed over ``data`` once a micro-batch; kernels and tables that ``fsdp`` splits
    are put together for the forward pass, once more for the backward pass of a rematerialised
    layer, and their gradients summed where they lie; ``tensor`` sums hidden states behind each
    product that is split by its input, in both passes. Bytes are those left on a device.
    """
    mesh, itemsize = subject.mesh.shape, _itemsize(subject.arguments.model.param_dtype)
    shapes = subject.shapes()
    places = subject.layout.shardings(shapes)
    passes = 2 if subject.arguments.model.gradient_checkpointing else 1
    found: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def add(kind: str, axes: tuple[str, ...], count: float, size: float) -> None:
        if count and any(mesh[axis] > 1 for axis in axes):
            entry = found.setdefault((kind, axes), [0, 0])
            entry[0] += count * subject.micro
            entry[1] += size * count * subject.micro

    for path, place in places.items():
        shape = subject.layout.padded(path, shapes[path])
        local = math.prod(place.shard_shape(shape)) * itemsize
        split = {name for entry in place.spec for name in _names(entry) if mesh[name] > 1}
        add("all-reduce", ("data",), 1, local)
        if "fsdp" in split:
            add("all-gather", ("fsdp",), passes, local * mesh["fsdp"])
            add("reduce-scatter", ("fsdp",), 1, local)
        else:
            add("all-reduce", ("fsdp",), 1, local)
        if subject.layout.tactic(path) in ("row", "embedding") and "tensor" in split:
            layers = shape[0] if len(shape) > len(subject.layout.layer_shape(path, shape)) else 1
            hidden = subject.local_rows * subject.length / mesh["sequence"]
            width = _width(subject) * _itemsize(subject.model.precision.compute_dtype)
            both = 2 if subject.layout.tactic(path) == "row" else 1
            add("all-reduce", ("tensor",), both * layers, hidden * width)
    return [
        {"kind": kind, "axes": list(axes), "count": round(count), "bytes": round(size)}
        for (kind, axes), (count, size) in sorted(found.items(), key=lambda item: -item[1][1])
    ]


def wire_seconds(
    one: dict[str, Any], mesh: Any, device: Accelerator, network: float | None = None
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


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _itemsize(dtype: Any) -> int:
    import jax.numpy as jnp

    return jnp.dtype(dtype or jnp.float32).itemsize


def _width(subject: Subject) -> int:
    config = subject.model.config
    return int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0))


def make_plan(options: Options) -> dict[str, Any]:
    """Return the whole plan as plain values: bytes, FLOPs, seconds.

    Raises:
        UsageError: what the training loop would refuse, and unknown devices or models.
    """
    subject = build(options, abstract_mesh(options.mesh, options.count))
    found = {"run": _run(subject), "devices": _devices(options)}
    found["bytes"] = _bytes(subject)
    kept = {remat: trace(options, remat) for remat in (False, True)}
    ways = subject.mesh.shape["sequence"]
    found["activations"] = {
        _remat(remat): round(one.of(subject.local_rows) / ways) for remat, one in kept.items()
    }
    remat = subject.arguments.model.gradient_checkpointing
    programs: list[dict[str, Any]] = []
    problem = "--no_compile"
    if not options.no_compile:
        _say(f"compiling the step for {options.count} host devices, three times")
        programs, problem = compile.measure_apart(options, _variants(subject))
    found["compiled"] = {"programs": programs, "problem": problem}
    found["fit"] = _fit(found, kept, subject)
    rules = by_rules(subject)
    own = next((p for p in programs if p["remat"] == remat), None)
    found["exchange"] = {
        "rules": _with_seconds(rules, subject, options),
        "compiled": _with_seconds(own["collectives"], subject, options) if own else [],
    }
    found["time"] = _time(subject, options, rules)
    return found


def _run(subject: Subject) -> dict[str, Any]:
    model, arguments = subject.model, subject.arguments
    return {
        "model_type": model.config.model_type,
        "objective": subject.objective.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params_shape_tree)),
        "length": subject.length,
        "target_length": subject.objective.target_length(subject.length),
        "rows": subject.rows,
        "rows_a_shard": subject.local_rows,
        "micro_batches": subject.micro,
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


def _bytes(subject: Subject) -> dict[str, Any]:
    """Return bytes of each part, in all and on a device, and of what lies whole on every device."""
    state, places = subject.state()
    batch, batch_places = subject.batch(subject.local_rows)
    other = {k: v for k, v in state.items() if k not in ("params", "opt_state")}
    other_places = {name: places[name] for name in other}
    parts = {
        "parameters": (state["params"], places["params"]),
        "optimizer": (state["opt_state"], places["opt_state"]),
        "other": (other, other_places),
        "gradients": (state["params"], places["params"]),
        "batch": (batch, batch_places),
    }
    found = {name: {"all": _size(tree), "device": local_bytes(tree, where)}
             for name, (tree, where) in parts.items()}  # fmt: skip
    whole = [
        (leaf, place)
        for name in ("params", "opt_state")
        for leaf, place in zip(
            jax.tree.leaves(state[name]), jax.tree.leaves(places[name]), strict=True
        )
        if place.shard_shape(leaf.shape) == leaf.shape
    ]
    found["whole"] = {"all": 0, "device": sum(leaf.size * leaf.dtype.itemsize for leaf, _ in whole)}
    return found


def _size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _variants(subject: Subject) -> list[dict[str, Any]]:
    """The run itself, the same with twice as many rows, and with the other choice of remat."""
    rows, remat = subject.local_rows, subject.arguments.model.gradient_checkpointing
    return [
        {"rows": rows, "remat": remat},
        {"rows": 2 * rows, "remat": remat},
        {"rows": rows, "remat": not remat},
    ]


def _fit(found: dict[str, Any], kept: dict[bool, Kept], subject: Subject) -> dict[str, Any]:
    """Return what the run needs and the largest batch, by two programs or else by the trace.

    Where layers are recomputed, one at a time has all of its own activations.
    """
    usable, rows = found["devices"]["usable"], subject.local_rows
    remat = subject.arguments.model.gradient_checkpointing
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
        layers = getattr(subject.model.config, "num_hidden_layers", 0) or 1
        row = kept[remat].row + (kept[False].row / layers if remat else 0)
        slope = row / subject.mesh.shape["sequence"] + parts["batch"]["device"] / rows
        needed = fixed + kept[remat].fixed + slope * rows
    slope = max(slope, 1.0)
    smallest = needed - slope * (rows - 1)
    largest = max(int(rows + (usable - needed) // slope), 0)
    return {
        "source": source, "needed": round(needed), "row": round(slope),
        "left": round(usable - needed), "one_row": round(smallest),
        "largest_rows_a_shard": largest if smallest <= usable else 0,
    }  # fmt: skip


def _with_seconds(found: list[dict[str, Any]], subject: Subject, options: Options) -> Any:
    mesh, network = subject.mesh.shape, options.network_gbs and options.network_gbs * 1e9
    return [
        one | {"seconds": wire_seconds(one, mesh, options.accelerator, network)} for one in found
    ]


def _time(subject: Subject, options: Options, rules: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the model FLOPs of a step and what it takes at the stated MFU."""
    flops = throughput.run_flops(subject.model, subject.objective, subject.rows, subject.length)
    dtype = jnp.dtype(subject.model.precision.compute_dtype or jnp.float32)
    peak = options.accelerator.peak(dtype.itemsize)
    peak = peak if options.peak_tflops is None else options.peak_tflops * 1e12
    seconds = flops / (options.mfu * peak * options.count)
    tokens = subject.rows * subject.length
    wires = [x["seconds"] for x in _with_seconds(rules, subject, options)]
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
