"""Compiles the training step for the devices of a plan, in a separate process.

If the compiler of the accelerator is installed, it is used. Otherwise the step is compiled with XLA
for the same number of CPU devices. No array is allocated and nothing runs: the program is
partitioned over the mesh, and the compiler reports the memory and the collectives of the program.
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
# Matches the required memory in libtpu's error for a program that does not fit. This number
# includes arguments and results.
_FULL = re.compile(
    r"(?:Used |memory required for HLO temporaries \()([\d.]+)([KMGT]?)(?: of [\d.]+[KMGT]? hbm|\))"
)
HOST_COMPILER = "XLA for CPUs"


@dataclasses.dataclass
class Programs:
    """Results of compiling the variants of a step.

    Attributes:
        results: The result of :func:`compile_step` for each variant that was compiled in time.
        compiler: Name and version of the compiler.
        problem: The reason why results are missing, or an empty string.
        skip_reason: The reason why the compiler of the accelerator was not used, or an empty
            string.
    """

    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compiler: str = ""
    problem: str = ""
    skip_reason: str = ""

    @property
    def is_accelerator(self) -> bool:
        """Whether the compiler of the accelerator was used."""
        return self.compiler not in ("", HOST_COMPILER)


def compiler_for(accelerator: str) -> str:
    """Returns name and version of the installed compiler for an accelerator.

    Raises:
        NoCompiler: No compiler is installed, or it does not support the accelerator.
    """
    if reason := aot.unavailable_reason(accelerator):
        raise aot.NoCompiler(reason)
    package = "libtpu" if accelerator.startswith("tpu") else "jax-cuda12-plugin"
    return f"{package} {metadata.version(package)}"


def compile_in_subprocess(options: Options, variants: Sequence[dict[str, Any]]) -> Programs:
    """Compiles variants of the step in another process.

    XLA for CPUs is used if the compiler of the accelerator is missing or fails.
    ``--compile_timeout`` limits the time of both attempts together.

    Args:
        options: The options of the plan.
        variants: Dictionaries with the keys ``rows`` (number of rows per data shard and
            micro-batch) and ``remat`` (whether layers are recomputed in the backward pass).
    """
    deadline = time.monotonic() + options.compile_timeout
    skip_reason = ""
    try:
        compiler = compiler_for(options.accelerator.name)
        programs = _compile_with(options, variants, compiler, deadline)
        if programs.results or time.monotonic() >= deadline:
            return programs
        skip_reason = programs.problem
    except aot.NoCompiler as error:
        skip_reason = str(error)
    programs = _compile_with(options, variants, HOST_COMPILER, deadline)
    return dataclasses.replace(programs, skip_reason=skip_reason)


def _compile_with(
    options: Options, variants: Sequence[dict[str, Any]], compiler: str, deadline: float
) -> Programs:
    """Compiles the variants with one compiler, until the deadline."""
    environment = aot.environment()
    # Programs that are read from the compilation cache have no memory analysis.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if compiler == HOST_COMPILER:
        flags = _FORCED.sub("", os.environ.get("XLA_FLAGS", ""))
        forced = f"{flags} --xla_force_host_platform_device_count={options.count}"
        environment["XLA_FLAGS"] = forced.strip()
    target = f"{options.count} host devices" if compiler == HOST_COMPILER else options.devices
    print(
        f"compiling {len(variants)} variants of the step for {target} with {compiler}",
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
        remaining = max(deadline - time.monotonic(), 0)
        text, errors = process.communicate(json.dumps(request), timeout=remaining)
    except subprocess.TimeoutExpired:
        process.kill()
        text, errors = process.communicate()
        problem = f"compilation exceeded --compile_timeout {options.compile_timeout:g} seconds"
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if results and "error" in results[-1]:
        problem = f"compilation failed: {results.pop()['error']}"
    elif not problem and (process.returncode or len(results) < len(variants)):
        last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        problem = f"compilation failed: {last}"
    return Programs(results, compiler, problem)


def compile_step(
    options: Options,
    rows: int,
    remat: bool,
    devices: Sequence[jax.Device],
    stand_in: bool = False,
) -> dict[str, Any]:
    """Compiles one variant of the step and reads the compiler's analysis.

    Args:
        options: The options of the plan.
        rows: Rows per data shard and micro-batch.
        remat: Whether layers are recomputed in the backward pass.
        devices: Devices to compile for.
        stand_in: Whether ``devices`` are CPUs instead of the accelerator of the plan. The program
            is then as similar to the program for the accelerator as CPUs allow.

    Returns:
        A dictionary with these keys:

        - ``rows`` and ``remat``: the arguments of this function.
        - ``arguments``, ``temporary`` and ``peak``: the bytes per device of the program's
          arguments, of its temporary buffers, and of its peak memory.
        - ``alias``: the bytes per device of arguments whose memory is reused for results.
        - ``collectives``: for each group of collectives, its kind, axes, count, and the bytes of
          the results per device.
        - ``attention``: the selected attention implementations.
        - ``seconds``: the time of compilation.
        - ``cudnn``: whether the program calls cuDNN.

        If the program does not fit on the device, only its total memory is known. ``temporary`` is
        then the total minus the arguments, ``alias`` and ``peak`` are `None`, and ``cudnn`` is
        missing.
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
    result: dict[str, Any] = {"rows": rows, "remat": remat}
    try:
        with record_attention_choices() as choices:
            program = aot.compile_for(devices[0], step, *arguments, traced_for=target)
    except jax.errors.JaxRuntimeError as error:  # libtpu raises it if the program does not fit
        if (full := _FULL.search(str(error))) is None:
            raise
        size = sum(
            leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(arguments)
        )
        used = float(full[1]) * 1024 ** " KMGT".index(full[2] or " ")
        result |= {
            "arguments": size,
            "temporary": round(max(used - size, 0)),
            "alias": None,
            "peak": None,
            "collectives": [],
        }
    else:
        memory = program.memory_analysis()
        if memory is None:
            raise HfseqError("this version of JAX has no memory analysis of compiled programs")
        text = program.as_text() or ""
        result |= {
            "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "peak": getattr(memory, "peak_memory_in_bytes", None) or None,
            "collectives": _grouped(collectives.find_collectives(text, run.mesh)),
            "cudnn": "__cudnn$" in text,
        }
    choices = [choice for choice in choices if choice["name"] != HOST_COMPILER]
    return result | {"attention": choices, "seconds": time.perf_counter() - started}


def _grouped(collectives: Sequence[Any]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for collective in collectives:
        entry = {"kind": collective.op, "axes": list(collective.axes), "count": 0, "bytes": 0}
        group = groups.setdefault((collective.op, collective.axes), entry)
        group["count"] += collective.times
        group["bytes"] += collective.size * collective.times
    return sorted(groups.values(), key=lambda group: -group["bytes"])


def main() -> None:
    """Reads a request from standard input and writes a line of JSON for each variant."""
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
            result = compile_step(
                options, variant["rows"], variant["remat"], devices, stand_in=request["host"]
            )
            print(json.dumps(result), flush=True)
    except Exception as error:  # compilers raise errors of many types and many lines
        print(json.dumps({"error": first_line(error)}), flush=True)


if __name__ == "__main__":
    main()
