"""Where the time of compiled steps goes: kinds of kernels, from a profile of jax.

Kernels carry the name of the instruction that they run; the compiled program tells its kind
(:mod:`fp8_hlo`). Reads the ``.xplane.pb`` of the profile: the JSON beside it ends after a million
events.
"""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fp8_hlo

UNKNOWN = "unknown"
# Kernels that no instruction names: libraries' own, by what they call themselves.
_BY_NAME = (
    (re.compile(r"nccl", re.IGNORECASE), fp8_hlo.COLLECTIVE),
    (re.compile(r"memcpy|memset", re.IGNORECASE), fp8_hlo.COPY),
    (re.compile(r"fmha|flash|cudnn.*sdpa", re.IGNORECASE), fp8_hlo.ATTENTION),
    (re.compile(r"(gemm|nvjet|xmma|cutlass).*(e4m3|e5m2|_q[a-z]*q)", re.I), fp8_hlo.FP8_PRODUCT),
    (re.compile(r"gemm|nvjet|xmma|cutlass", re.IGNORECASE), fp8_hlo.PRODUCT),
)


def kind_of(event: str, instruction: str | None, kinds: Mapping[str, str]) -> str:
    """Return the kind of a kernel by its instruction, or by its own name."""
    if instruction in kinds:
        return kinds[instruction]
    return next((kind for pattern, kind in _BY_NAME if pattern.search(event)), UNKNOWN)


def device_events(data: Any) -> Iterator[tuple[str, str | None, float]]:
    """Yield (name, instruction, seconds) of what ran on the devices, each kernel once.

    GPUs have a line a stream, and lines derived from them, which would count everything again. On a
    CPU instructions stand among all other events of the host, and those that hold others (loops)
    are known by having no kind.
    """
    planes = list(data.planes)
    streams = [
        line
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
    ]
    lines = streams or [line for p in planes if p.name.startswith("/host:CPU") for line in p.lines]
    for line in lines:
        for event in line.events:
            stats = dict(event.stats)
            instruction = stats.get("hlo_op")
            if streams or instruction:
                yield event.name, instruction, event.duration_ns / 1e9


def shares(data: Any, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return the share of the devices' time in each kind, in the order of ``fp8_hlo.KINDS``."""
    on_host = not any(plane.name.startswith("/device:GPU") for plane in data.planes)
    found: dict[str, float] = collections.defaultdict(float)
    for name, instruction, seconds in device_events(data):
        if on_host and instruction not in kinds:
            continue
        found[kind_of(name, instruction, kinds)] += seconds
    total = sum(found.values())
    order = (*fp8_hlo.KINDS, UNKNOWN)
    return {kind: found[kind] / total for kind in order if found.get(kind)}


def profiled(run: Callable[[], Any], kinds: Mapping[str, str]) -> dict[str, float]:
    """Run ``run``, which waits for the device, under the profiler; returns :func:`shares`.

    RuntimeError if the profile is empty.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        found = shares(jax.profiler.ProfileData.from_file(str(files[-1])), kinds) if files else {}
    if not found:
        raise RuntimeError("the profile has no kernels: is another profiler attached?")
    return found
