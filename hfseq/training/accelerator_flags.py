"""XLA flags for accelerators, from the recommended sets or from the user.

XLA reads its flags once, when jax starts, and aborts the process if it finds an unknown flag. The
flags are therefore first tested in a separate process that uses no device. Flags for TPUs are read
by libtpu, from a different environment variable than the flags for XLA.
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
#: Recommended flags for several GPUs or TPUs. They overlap communication with computation. Their
#: effect has not been measured with hfseq.
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
_SECONDS = 120.0  # time limit for testing flags
_TRIALS = {
    XLA_VARIABLE: "import jax; jax.jit(lambda x: x + 1)(1)",
    LIBTPU_VARIABLE: "from hfseq.training import aot; aot.describe('v5e', 4)",
}


def find_problem(value: str) -> str:
    """Checks the syntax of a value of `--accelerator_flags`.

    Returns:
        The error message, or an empty string. This function does not check whether XLA knows the
        flags.
    """
    if value in (NONE, RECOMMENDED):
        return ""
    invalid = [word for word in value.split() if not _FLAG.fullmatch(word)]
    if not invalid and value.strip():
        return ""
    return (
        f"--accelerator_flags {value}: this is not a list of XLA flags. Use {RECOMMENDED}, {NONE}, "
        f"or flags such as 'xla_gpu_enable_latency_hiding_scheduler=true'"
    )


def recommended_flags(
    platform: str | None = None, multiple_devices: bool | None = None
) -> tuple[str, ...]:
    """Returns the recommended flags for a platform.

    Args:
        platform: "cuda", "tpu", or "" for no accelerator. Default: the platform of this machine.
        multiple_devices: Whether the run uses several devices. No flags are recommended for a
            single device. Default: whether this machine has several devices.
    """
    platform = local_accelerator() if platform is None else platform
    multiple_devices = local_device_count() > 1 if multiple_devices is None else multiple_devices
    return {"cuda": GPU_FLAGS, "tpu": TPU_FLAGS}.get(platform, ()) if multiple_devices else ()


def local_accelerator() -> str:
    """Returns the kind of accelerators in this machine: "cuda", "tpu", or "" for none.

    This does not start jax.
    """
    if "cpu" in os.environ.get("JAX_PLATFORMS", "").split(","):
        return ""
    return (
        "cuda"
        if Path("/proc/driver/nvidia/gpus").exists()
        else "tpu"
        if _tpu_device_files()
        else ""
    )


def local_device_count() -> int:
    """Returns the number of accelerators of this machine, without starting jax.

    If a TPU slice consists of several machines, only the chips of this machine are counted.
    """
    cards = Path("/proc/driver/nvidia/gpus")
    return len(list(cards.iterdir())) if cards.exists() else len(_tpu_device_files())


def current_flags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that contain flags for XLA and libtpu.

    Variables that are unset or empty are left out.
    """
    return {name: environ[name] for name in (XLA_VARIABLE, LIBTPU_VARIABLE) if environ.get(name)}


def apply_flags(value: str) -> None:
    """Sets the flags of `--accelerator_flags` in the environment. Must be called before jax starts.

    Recommended flags that the installed XLA does not know are skipped with a log message.

    Raises:
        UsageError: A flag from the user is unknown, or jax has already started.
    """
    if value == NONE:
        return
    flags = recommended_flags() if value == RECOMMENDED else value.split()
    flags = [f"--{flag.removeprefix('--')}" for flag in flags]
    if not flags:
        logger.info(
            "--accelerator_flags %s: no flags are set, because this machine has at most one "
            "accelerator",
            value,
        )
        return
    present = {name: os.environ.get(name, "").split() for name in (XLA_VARIABLE, LIBTPU_VARIABLE)}
    new_flags = [flag for flag in flags if flag not in present[variable_for(flag)]]
    if new_flags and aot.jax_has_started():
        raise UsageError(
            f"--accelerator_flags {value}: jax has started and ignores new flags. Start Python "
            f"with {' and '.join(f'{k}={v!r}' for k, v in _group_by_variable(new_flags).items())}"
        )
    for name, flags_text in _group_by_variable(new_flags).items():
        accepted = flags_text.split()
        if try_flags(name, accepted):
            failing = {flag: try_flags(name, [flag]) for flag in accepted}
            failing = {flag: reason for flag, reason in failing.items() if reason}
            if value != RECOMMENDED or not failing:
                reasons = "; ".join(failing.values()) or try_flags(name, accepted)
                raise UsageError(f"--accelerator_flags: {reasons}")
            for flag, reason in failing.items():
                logger.info("skipping %s, which cannot be used: %s", flag, reason)
            accepted = [flag for flag in accepted if flag not in failing]
        os.environ[name] = " ".join([*present[name], *accepted])
        logger.info("set %s to include %s", name, " ".join(accepted))


def variable_for(flag: str) -> str:
    """Returns the environment variable in which `flag` is passed to XLA or libtpu."""
    name = flag.removeprefix("--").partition("=")[0]
    libtpu_flags = {tpu_flag.partition("=")[0] for tpu_flag in TPU_FLAGS}
    return LIBTPU_VARIABLE if name.startswith("xla_tpu_") or name in libtpu_flags else XLA_VARIABLE


def try_flags(variable: str, flags: Sequence[str]) -> str:
    """Starts jax with `flags` in a separate process, without using a device.

    The flags of libtpu can only be tested if libtpu is installed. If it is not, jax does not start,
    and the function returns the error.

    Args:
        variable: Environment variable in which the flags are passed.
        flags: Flags with leading dashes.

    Returns:
        The reason why jax did not start, or an empty string.
    """
    environment = aot.environment()
    environment[variable] = " ".join([environment.get(variable, ""), *flags]).strip()
    try:
        process = subprocess.run(
            [sys.executable, "-c", _TRIALS[variable]],
            env=environment,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"jax did not start within {_SECONDS:g} s with {' '.join(flags)}"
    if process.returncode == 0:
        return ""
    unknown = re.search(r"(?i)unknown (?:command line )?flags?[^\n]*", process.stderr)
    last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return f"XLA does not start with {' '.join(flags)} ({unknown[0] if unknown else last})"


def _group_by_variable(flags: Sequence[str]) -> dict[str, str]:
    """Returns, for each environment variable, the flags to pass in it, joined by spaces."""
    groups: dict[str, list[str]] = {}
    for flag in flags:
        groups.setdefault(variable_for(flag), []).append(flag)
    return {name: " ".join(group) for name, group in groups.items()}


def _tpu_device_files() -> list[Path]:
    return [*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*")]
