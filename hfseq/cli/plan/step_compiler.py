"""The real step, compiled for the devices of the plan, in a process of its own.

The accelerator's own compiler does it where it is installed, and else XLA for as many CPU devices.
Nothing is allocated or run: the program is divided over the devices of the mesh as it would be, and
the compiler says what memory it needs and what the devices exchange.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hfseq.cli.plan.options import Options
from hfseq.errors import HfseqError, exit_with_parent, first_line
from hfseq.training import aot

if TYPE_CHECKING:
    import jax

_FORCED = re.compile(r"--xla_force_host_platform_device_count=\d+")
# How libtpu says that a program does not fit; the sum has arguments and results in it, too.
_FULL = re.compile(
    r"(?:Used |memory required for HLO temporaries \()([\d.]+)([KMGT]?)(?: of [\d.]+[KMGT]? hbm|\))"
)
HOST_COMPILER = "XLA for CPUs"


@dataclasses.dataclass
class Programs:
    """What compilers said: a program for each variant that was done in time, by ``compiler``.

    ``problem`` is a sentence on what is missing, if anything is, and ``passed_over`` why the
    accelerator's own compiler did not speak.
    """

    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compiler: str = ""
    problem: str = ""
    skip_reason: str = ""

    @property
    def is_accelerator(self) -> bool:
        """Whether the compiler is that of the accelerator."""
        return self.compiler not in ("", HOST_COMPILER)


def compiler_for(accelerator: str) -> str:
    """Return name and version of the installed compiler for an accelerator.

    Raises:
        described.NoCompiler: there is none, or it does not know the accelerator.
    """
    if reason := aot.unavailable_reason(accelerator):
        raise aot.NoCompiler(reason)
    package = "libtpu" if accelerator.startswith("tpu") else "jax-cuda12-plugin"
    return f"{package} {metadata.version(package)}"


def compile_in_subprocess(options: Options, variants: Sequence[dict[str, Any]]) -> Programs:
    """Compile each variant (``rows`` a data shard, ``remat``) in another process.

    Where the accelerator's compiler is not there or fails, XLA for CPUs is asked; there is one
    ``--compile_timeout`` for both.
    """
    end = time.monotonic() + options.compile_timeout
    passed_over = ""
    try:
        compiler = compiler_for(options.accelerator.name)
        programs = _measure_apart(options, variants, compiler, end)
        if programs.results or time.monotonic() >= end:
            return programs
        passed_over = programs.problem
    except aot.NoCompiler as error:
        passed_over = str(error)
    programs = _measure_apart(options, variants, HOST_COMPILER, end)
    return dataclasses.replace(programs, skip_reason=passed_over)


def _measure_apart(
    options: Options, variants: Sequence[dict[str, Any]], compiler: str, end: float
) -> Programs:
    environment = aot.environment()
    # A program that comes from a cache has no memory analysis.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if compiler == HOST_COMPILER:
        flags = _FORCED.sub("", os.environ.get("XLA_FLAGS", ""))
        forced = f"{flags} --xla_force_host_platform_device_count={options.count}"
        environment["XLA_FLAGS"] = forced.strip()
    what = f"{options.count} host devices" if compiler == HOST_COMPILER else options.devices
    print(
        f"compiling the step for {what} by {compiler}, {len(variants)} times",
        file=sys.stderr,
        flush=True,
    )
    request = {
        "parent": os.getpid(),
        "options": dataclasses.asdict(options),
        "variants": variants,
        "host": compiler == HOST_COMPILER,
    }
    problem, pipe = "", subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "hfseq.cli.plan.step_compiler"],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
    )
    try:
        left = max(end - time.monotonic(), 0)
        text, errors = process.communicate(json.dumps(request), timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()
        text, errors = process.communicate()
        problem = f"compiling took more than --compile_timeout {options.compile_timeout:g} seconds"
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if found and "error" in found[-1]:
        problem = f"compiling failed: {found.pop()['error']}"
    elif not problem and (process.returncode or len(found) < len(variants)):
        last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        problem = f"compiling failed: {last}"
    return Programs(found, compiler, problem)


def compile_step(
    options: Options,
    rows: int,
    remat: bool,
    devices: Sequence[jax.Device],
    stand_in: bool = False,
) -> dict[str, Any]:
    """Compile the step for ``devices`` with ``rows`` rows a data shard; returns what it says.

    ``arguments``, ``temporary``, ``alias`` (arguments that results are written into) and ``peak``
    are bytes on a device; ``collectives`` what the devices exchange in a step: kind, axes, times
    and bytes that each leaves on a device. A program that is larger than the device is one of
    which only the sum is known: all of it is ``temporary`` but the arguments. With ``stand_in``
    the program is that of the plan's accelerator as far as ``devices`` can have it.
    """
    import jax

    from hfseq.cli.plan.run import (
        abstract_batch,
        build,
        record_attention_choices,
        with_host_attention,
    )
    from hfseq.training import collectives

    started = time.perf_counter()
    target = aot.device_stub(options.accelerator.name) if stand_in else devices[0]
    with aot.compiling_for(target):
        run = build(options, devices, gradient_checkpointing=remat)
        arguments = run.abstract_state(), run.abstract_frozen(), abstract_batch(run, rows)
        step = (with_host_attention(run) if stand_in else run).step_function()
    found: dict[str, Any] = {"rows": rows, "remat": remat}
    try:
        with record_attention_choices() as chosen:
            program = aot.compile_for(devices[0], step, *arguments, traced_for=target)
    except jax.errors.JaxRuntimeError as error:  # libtpu's, where it does not fit
        if (full := _FULL.search(str(error))) is None:
            raise
        size = sum(
            leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(arguments)
        )
        used = float(full[1]) * 1024 ** " KMGT".index(full[2] or " ")
        found |= {
            "arguments": size,
            "temporary": round(max(used - size, 0)),
            "alias": None,
            "peak": None,
            "collectives": [],
        }
    else:
        memory = program.memory_analysis()
        if memory is None:
            raise HfseqError("this jax gives no memory analysis of compiled programs")
        text = program.as_text() or ""
        found |= {
            "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "peak": getattr(memory, "peak_memory_in_bytes", None) or None,
            "collectives": _grouped(collectives.find_collectives(text, run.mesh)),
            "cudnn": "__cudnn$" in text,
        }
    chosen = [one for one in chosen if one["name"] != HOST_COMPILER]
    return found | {"attention": chosen, "seconds": time.perf_counter() - started}


def _grouped(exchanged: Sequence[Any]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for one in exchanged:
        entry = {"kind": one.kind, "axes": list(one.axes), "count": 0, "bytes": 0}
        group = groups.setdefault((one.kind, one.axes), entry)
        group["count"] += one.times
        group["bytes"] += one.size * one.times
    return sorted(groups.values(), key=lambda group: -group["bytes"])


def main() -> None:
    """Read a request from standard input and write a line of JSON for each variant."""
    request = json.load(sys.stdin)
    exit_with_parent(request["parent"])
    options = Options(**request["options"])
    import jax

    try:
        if request["host"]:
            devices = jax.devices()
        else:
            devices = aot.describe(options.accelerator.name, options.count)
        for variant in request["variants"]:
            found = compile_step(
                options, variant["rows"], variant["remat"], devices, stand_in=request["host"]
            )
            print(json.dumps(found), flush=True)
    except Exception as error:  # the compilers' own are of every kind, and of many lines
        print(json.dumps({"error": first_line(error)}), flush=True)


if __name__ == "__main__":
    main()
