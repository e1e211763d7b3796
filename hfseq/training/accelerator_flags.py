"""XLA's flags for accelerators: those worth trying, and those that a user gives, checked first.

XLA ends the process at a flag that it does not know, and reads all of them once, as jax starts. So
they are tried in another process, without a device. Flags of TPUs are libtpu's.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hfseq.errors import UsageError
from hfseq.training import aot

logger = logging.getLogger(__name__)

NONE, RECOMMENDED = "none", "recommended"
XLA_VARIABLE, LIBTPU_VARIABLE = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
#: For several devices: exchange runs beside products. No figures of ours stand behind them.
GPU_FLAGS = (
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_pipelined_all_reduce=true",
    "xla_gpu_enable_pipelined_all_gather=true",
    "xla_gpu_enable_pipelined_reduce_scatter=true",
    "xla_gpu_enable_while_loop_double_buffering=true",
)
TPU_FLAGS = (
    "xla_tpu_enable_latency_hiding_scheduler=true",
    "xla_tpu_enable_async_collective_fusion=true",
    "xla_tpu_overlap_compute_collective_tc=true",
    "xla_enable_async_all_gather=true",
    "xla_tpu_enable_data_parallel_all_reduce_opt=true",
)
_FLAG = re.compile(r"(--)?xla_\w+(=\S+)?")
_SECONDS = 120.0  # that a trial may take
_TRIALS = {
    XLA_VARIABLE: "import jax; jax.jit(lambda x: x + 1)(1)",
    LIBTPU_VARIABLE: "from hfseq.training import described; described.describe('v5e', 4)",
}


def find_problem(value: str) -> str:
    """Say what is wrong with the value of ``--accelerator_flags``; empty if it can be tried."""
    if value in (NONE, RECOMMENDED):
        return ""
    wrong = [word for word in value.split() if not _FLAG.fullmatch(word)]
    if not wrong and value.strip():
        return ""
    return (
        f"--accelerator_flags {value}: give {RECOMMENDED}, {NONE} or flags of XLA such as "
        f"'xla_gpu_enable_latency_hiding_scheduler=true'"
    )


def recommended_flags(
    platform: str | None = None, multiple_devices: bool | None = None
) -> tuple[str, ...]:
    """Return what is recommended for the accelerators of this machine, or for ``kind``.

    ``kind`` is "cuda", "tpu" or "" for none; for a single device there is nothing to recommend.
    """
    platform = local_accelerator() if platform is None else platform
    multiple_devices = local_device_count() > 1 if multiple_devices is None else multiple_devices
    return {"cuda": GPU_FLAGS, "tpu": TPU_FLAGS}.get(platform, ()) if multiple_devices else ()


def local_accelerator() -> str:
    """Return "cuda" or "tpu" for the accelerators of this machine, without starting jax."""
    if "cpu" in os.environ.get("JAX_PLATFORMS", "").split(","):
        return ""
    return "cuda" if Path("/proc/driver/nvidia/gpus").exists() else "tpu" if _chips() else ""


def local_device_count() -> int:
    """Return how many accelerators this machine has; TPUs on several machines count as many."""
    cards = Path("/proc/driver/nvidia/gpus")
    return len(list(cards.iterdir())) if cards.exists() else len(_chips())


def current_flags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what is set of the variables that XLA and libtpu read."""
    return {name: environ[name] for name in (XLA_VARIABLE, LIBTPU_VARIABLE) if environ.get(name)}


def apply_flags(value: str) -> None:
    """Set the flags of ``--accelerator_flags`` in the environment; call it before jax starts.

    Of those that are recommended the ones that this XLA does not know are left out, and said.

    Raises:
        UsageError: a flag that was given is not known, or jax has started.
    """
    if value == NONE:
        return
    flags = recommended_flags() if value == RECOMMENDED else value.split()
    flags = [f"--{flag.removeprefix('--')}" for flag in flags]
    if not flags:
        logger.info(
            "--accelerator_flags %s: there are not several accelerators here, none set", value
        )
        return
    present = {name: os.environ.get(name, "").split() for name in (XLA_VARIABLE, LIBTPU_VARIABLE)}
    wanted = [flag for flag in flags if flag not in present[variable_for(flag)]]
    if wanted and aot.jax_has_started():
        raise UsageError(
            f"--accelerator_flags {value}: jax has started and reads no more flags: start Python "
            f"with {' and '.join(f'{k}={v!r}' for k, v in _together(wanted).items())}"
        )
    for name, flags_of_it in _together(wanted).items():
        known = flags_of_it.split()
        if try_flags(name, known):
            failing = {flag: try_flags(name, [flag]) for flag in known}
            failing = {flag: why for flag, why in failing.items() if why}
            if value != RECOMMENDED or not failing:
                told = "; ".join(failing.values()) or try_flags(name, known)
                raise UsageError(f"--accelerator_flags: {told}")
            for flag, why in failing.items():
                logger.info("%s is left out: %s", flag, why)
            known = [flag for flag in known if flag not in failing]
        os.environ[name] = " ".join([*present[name], *known])
        logger.info("%s: %s", name, " ".join(known))


def variable_for(flag: str) -> str:
    """Return the variable in which ``flag`` is read."""
    name = flag.removeprefix("--").partition("=")[0]
    of_tpus = {one.partition("=")[0] for one in TPU_FLAGS}
    return LIBTPU_VARIABLE if name.startswith("xla_tpu_") or name in of_tpus else XLA_VARIABLE


def try_flags(variable: str, flags: Sequence[str]) -> str:
    """Start jax elsewhere with ``flags``, in the variable that reads them; returns what went wrong.

    No device is taken for it. Where libtpu is not installed its flags do not start, either.
    """
    environment = aot.environment()
    environment[variable] = " ".join([environment.get(variable, ""), *flags]).strip()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIALS[variable]],
            env=environment,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"jax did not start within {_SECONDS:g} s with {' '.join(flags)}"
    if done.returncode == 0:
        return ""
    unknown = re.search(r"(?i)unknown (?:command line )?flags?[^\n]*", done.stderr)
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"XLA does not start with {' '.join(flags)} ({unknown[0] if unknown else last})"


def _together(flags: Sequence[str]) -> dict[str, str]:
    """Return the flags by the variable that they belong into."""
    found: dict[str, list[str]] = {}
    for flag in flags:
        found.setdefault(variable_for(flag), []).append(flag)
    return {name: " ".join(some) for name, some in found.items()}


def _chips() -> list[Path]:
    """Return the device files of TPU chips."""
    return [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
