"""The plan itself: bytes, exchange, the largest batch and the time of a step."""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp

from hfseq.planning import activations, compiled, exchange
from hfseq.planning.options import Options
from hfseq.planning.subject import Subject, abstract_mesh, build, local_bytes
from hfseq.training import throughput


def make_plan(options: Options) -> dict[str, Any]:
    """Return the whole plan as plain values: bytes, FLOPs, seconds.

    Raises:
        UsageError: what the training loop would refuse, and unknown devices or models.
    """
    subject = build(options, abstract_mesh(options.mesh, options.count))
    found = {"run": _run(subject), "devices": _devices(options)}
    found["bytes"] = _bytes(subject)
    kept = {remat: activations.trace(options, remat) for remat in (False, True)}
    ways = subject.mesh.shape["sequence"]
    found["activations"] = {
        _remat(remat): round(one.of(subject.local_rows) / ways) for remat, one in kept.items()
    }
    remat = subject.arguments.model.gradient_checkpointing
    programs: list[dict[str, Any]] = []
    problem = "--no_compile"
    if not options.no_compile:
        _say(f"compiling the step for {options.count} host devices, three times")
        programs, problem = compiled.measure_apart(options, _variants(subject))
    found["compiled"] = {"programs": programs, "problem": problem}
    found["fit"] = _fit(found, kept, subject)
    rules = exchange.by_rules(subject)
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


def _fit(
    found: dict[str, Any], kept: dict[bool, activations.Kept], subject: Subject
) -> dict[str, Any]:
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
        one | {"seconds": exchange.wire_seconds(one, mesh, options.accelerator, network)}
        for one in found
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


__all__ = ["make_plan"]
