"""What the devices exchange in a step by the sharding rules, and how long the wires take."""

from __future__ import annotations

import math
from typing import Any

from hfseq.hardware import Accelerator
from hfseq.planning.subject import Subject
from hfseq.training.sharding import AXES


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
            layers = shape[0] if len(shape) > len(subject.layout.own_shape(path, shape)) else 1
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


__all__ = ["by_rules", "wire_seconds"]
