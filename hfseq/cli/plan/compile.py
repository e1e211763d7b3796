"""The real step, compiled for as many CPU devices as the plan has, in a process of its own.

Nothing is allocated or run: the program is divided over the devices of the mesh as it would be on
the accelerators, and the compiler says what memory it needs and what the devices exchange.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hfseq.cli.plan.options import Options
from hfseq.errors import HfseqError, end_with

if TYPE_CHECKING:
    import jax

_FORCED = re.compile(r"--xla_force_host_platform_device_count=\d+")


def measure_apart(
    options: Options, variants: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], str]:
    """Compile each variant (``rows`` a data shard, ``remat``) in another process.

    Returns what was found, in order and fewer than asked for where time ran out, and a sentence
    on what is missing, if anything is.
    """
    flags = _FORCED.sub("", os.environ.get("XLA_FLAGS", ""))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={options.count}".strip(),
        # A program that comes from a cache has no memory analysis.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    request = {"parent": os.getpid(), "options": dataclasses.asdict(options), "variants": variants}
    problem, pipe = "", subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "hfseq.cli.plan.compile"],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
    )  # fmt: skip
    try:
        text, errors = process.communicate(json.dumps(request), timeout=options.compile_timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        text, errors = process.communicate()
        problem = f"compiling took more than --compile_timeout {options.compile_timeout:g} seconds"
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not problem and (process.returncode or len(found) < len(variants)):
        last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        problem = f"compiling failed: {last}"
    return found, problem


def measure(
    options: Options, rows: int, remat: bool, devices: Sequence[jax.Device]
) -> dict[str, Any]:
    """Compile the step for ``devices`` with ``rows`` rows a data shard; returns what it says.

    ``arguments`` and ``temporary`` are bytes on a device, ``collectives`` what the devices exchange
    in a step: kind, axes, times and bytes that each leaves on a device.
    """
    from hfseq.cli.plan.run import abstract_batch, build
    from hfseq.training import collectives

    started = time.perf_counter()
    run = build(options, devices, gradient_checkpointing=remat)
    step, batch = run.step_function(), abstract_batch(run, rows)
    program = step.lower(run.abstract_state(), run.frozen, batch).compile()
    memory = program.memory_analysis()
    if memory is None:
        raise HfseqError("this jax gives no memory analysis of compiled programs")
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for one in collectives.collectives(program.as_text() or "", run.mesh):
        entry = {"kind": one.kind, "axes": list(one.axes), "count": 0, "bytes": 0}
        group = groups.setdefault((one.kind, one.axes), entry)
        group["count"] += one.times
        group["bytes"] += one.size * one.times
    return {
        "rows": rows,
        "remat": remat,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": sorted(groups.values(), key=lambda group: -group["bytes"]),
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Read a request from standard input and write a line of JSON for each variant."""
    request = json.load(sys.stdin)
    end_with(request["parent"])
    options = Options(**request["options"])
    import jax

    for variant in request["variants"]:
        found = measure(options, variant["rows"], variant["remat"], jax.devices())
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
