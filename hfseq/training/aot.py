"""Devices that are only described, and programs compiled for them by the real compilers.

The compilers are packages (the extra ``aot``) that need no device: XLA's CUDA plugin with NVIDIA's
assembler, and libtpu. They show how a step is divided, fused and laid out in memory, not how fast
it is; what cuDNN takes as workspace is not among it. A process that compiles has jax on the CPU,
which is fixed as jax starts: :func:`environment`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata, resources
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.training import hardware
from hfseq.training.hardware import Accelerator

if TYPE_CHECKING:
    import jax

INSTALL_COMMAND = "pip install 'hfseq[aot]'"
#: Where descriptions of GPUs lie, as XLA writes them (``xla.StreamExecutorGpuTargetConfigProto``).
TARGET_CONFIGS = resources.files("hfseq.training") / "targets"
CUDA_PLUGIN, CUDA_ASSEMBLER = "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"
_SHAPES_2D = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
#: By accelerator: what libtpu calls it, its slices, how many devices jax sees in a chip.
_TPUS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "tpu-v3": ("v3", _SHAPES_2D, 2),
    "tpu-v4": ("v4", _SHAPES_3D, 1),
    "tpu-v5e": ("v5e", _SHAPES_2D, 1),
    "tpu-v5p": ("v5p", _SHAPES_3D, 1),
    "tpu-v6e": ("v6e", _SHAPES_2D, 1),
    "tpu-v7": ("tpu7x", _SHAPES_3D, 2),
}
#: What JAX_OPTIMIZATION_LEVEL=O0 (9) and JAX_EXEC_TIME_OPTIMIZATION_EFFORT=-1.0 set.
FAST_COMPILE_OPTIONS = {"optimization_level": 9, "exec_time_optimization_effort": -1.0}
#: What libtpu reads: there is no TPU to look for, and others may have loaded it, too. A description
#: takes nobody's chip away.
_FOR_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class NoCompiler(HfseqError):
    """The real compiler for a device is not here, or does not know the device."""


def parse(text: str) -> tuple[Accelerator, int]:
    """Return the accelerator and the number of ``NAME:N``, or ``NAME`` for one.

    TPUs may go without ``tpu-``: "v5e:4".
    """
    name, colon, number = text.partition(":")
    if colon and not re.fullmatch(r"[1-9]\d*", number):
        raise UsageError(
            f"--devices {text}: give an accelerator and a number, e.g. h200:64 or v5e:4"
        )
    return hardware.get_accelerator(name), int(number or 1)


def describe(name: str, count: int = 1) -> list[jax.Device]:
    """Return ``count`` devices of the accelerator ``name`` for programs to be compiled for.

    They can be put into a mesh and nothing can be run on them. GPUs are those of machines of eight,
    TPUs the first of the smallest slice that has as many. A process that has described a TPU cannot
    be profiled any more: libtpu, which is loaded then, ends it.

    Raises:
        UsageError: no such accelerator is known. NoCompiler: its compiler is not installed, is of
        another version than jax, is held by another process, or has no description of it.
    """
    device = hardware.get_accelerator(name)
    _check(device)
    from jax.experimental import topologies

    arguments: dict[str, Any]
    if device.name in _TPUS:
        kind, shapes, cores = _TPUS[device.name]
        wanted = -(-count // cores)
        shape = next((s for s in shapes if math.prod(map(int, s.split("x"))) >= wanted), None)
        if shape is None:
            raise NoCompiler(f"{count} devices are more than the largest slice of {device.name}")
        arguments = {"platform": "tpu", "topology_name": f"{kind}:{shape}"}
        if device.name == "tpu-v4":  # both cores of a chip as one device, as jax runs it
            arguments["chip_config_name"] = "megacore"
        for variable, value in _FOR_LIBTPU.items():
            os.environ.setdefault(variable, value)
    else:
        machine = min(count, device.devices_per_machine)
        arguments = {
            "platform": "cuda",
            "topology_name": device.name,
            "target_config": (TARGET_CONFIGS / f"{device.name}.txtpb").read_text(),
            "topology": f"1x{-(-count // machine)}x{machine}",
        }
    try:
        with _flags_hidden():
            found = topologies.get_topology_desc(**arguments).devices
    except Exception as error:  # jax's own, of every kind
        if "lockfile" in str(error):
            raise NoCompiler(
                "libtpu is held by another process of this machine, and "
                "ALLOW_MULTIPLE_LIBTPU_LOAD forbids to load it twice: end that one, or set it to 1"
            ) from error
        raise NoCompiler(f"{device.name} cannot be described: {first_line(error)}") from error
    return list(found[:count])


def device_stub(name: str) -> Any:
    """Return what can be traced for as if it were a device of ``name``, without any compiler."""
    device = hardware.get_accelerator(name)
    kind = device.device_kinds[0]
    if device.capability:
        return SimpleNamespace(
            platform="gpu", device_kind=kind, compute_capability=device.capability
        )
    return SimpleNamespace(platform="tpu", device_kind=kind)


def environment() -> dict[str, str]:
    """Return the environment of a process that compiles for described devices: this one's, changed.

    jax is kept on the CPU, since with its plugins installed it would look for their devices, and
    libtpu is told that there is none. CUDA's assembler jax finds where pip put it.
    """
    return {**os.environ, "JAX_PLATFORMS": "cpu", **_FOR_LIBTPU}


def has_only_compilers() -> bool:
    """Tell whether compilers for accelerators are installed here, and only they are there.

    jax would say at length that it finds no devices: no driver (``libcuda``) or cuDNN for the CUDA
    plugin, and no PCI device of Google's for libtpu.
    """
    if _place(CUDA_PLUGIN) is None and _place("libtpu") is None:
        return False
    plugins = _place("jax_plugins")
    if plugins and any(not p.name.startswith(("xla_cuda", "_")) for p in plugins.iterdir()):
        return False
    if _place(CUDA_PLUGIN) is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            return False
        if _place("nvidia.cudnn") is not None:  # then a device is wanted: jax says what it lacks
            return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return not any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)


def start_quietly() -> None:
    """Let jax, which has not begun, look for no accelerators where there are only compilers."""
    if has_only_compilers():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def jax_has_started() -> bool:
    """Tell whether jax has devices in this process, and so has read all flags."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def unavailable_reason(name: str) -> str:
    """Say why no program can be compiled for the accelerator ``name`` here; empty if it can."""
    try:
        _check(hardware.get_accelerator(name))
    except NoCompiler as error:
        return str(error)
    return ""


@contextlib.contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
    """Trace and lower what is inside for ``device``, which may be one that is only described.

    What is chosen while a model is traced is chosen for it, and cuDNN's attention is lowered as if
    the device and cuDNN 9.10 were there; jax asks the machine otherwise.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from hfseq.nn.context import capability, tracing_for

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_for(device))
        own = capability()
        if own is not None:

            def version() -> int:
                return 91000

            def at_least(wanted: str) -> bool:
                return own >= _numbers(wanted)

            def equal(wanted: str) -> bool:
                return own == _numbers(wanted)

            for name, stand_in in (
                ("check_cudnn_version", version),
                ("check_compute_capability", at_least),
                ("is_cuda_compute_capability_equal", equal),
            ):
                stack.callback(setattr, cudnn, name, getattr(cudnn, name))
                setattr(cudnn, name, stand_in)
        yield


def compile_for(
    device: jax.Device,
    step: Any,
    *arguments: Any,
    fast_compile: bool = False,
    traced_for: jax.Device | None = None,
) -> jax.stages.Compiled:
    """Compile the jitted ``step`` for devices like ``device``, on which ``arguments`` are laid.

    Arguments are ``jax.ShapeDtypeStruct`` with shardings over described devices. With
    ``structure_only`` the compiler optimises little: the same kernels and collectives in a quarter
    of the time, but other temporary memory. Choices are made for ``traced_for``, if it is another.
    """
    platform = "cuda" if device.platform == "gpu" else device.platform
    with compiling_for(traced_for or device):
        lowered = step.trace(*arguments).lower(lowering_platforms=(platform,))
    with _without_cache(), _flags_hidden():
        program: jax.stages.Compiled = lowered.compile(
            FAST_COMPILE_OPTIONS if fast_compile else None
        )
    return program


@contextlib.contextmanager
def _flags_hidden() -> Iterator[None]:
    """Hide XLA_FLAGS from libtpu, which ends the process at those that its own XLA has not.

    It reads them as it is loaded, or compiles for the first time.
    """
    import jax

    jax.devices("cpu")  # jax's own XLA has read them
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compile what is inside anew: a stored program can only be loaded by its device."""
    from jax._src import compilation_cache, config

    compilation_cache.reset_cache()  # what it found out about being used is kept otherwise
    try:
        with config.enable_compilation_cache(False):
            yield
    finally:
        compilation_cache.reset_cache()


def _check(device: Accelerator) -> None:
    """See that there is a compiler that knows ``device``."""
    if device.name in _TPUS:
        if _place("libtpu") is None:
            raise NoCompiler(
                f"programs for {device.name} are compiled by libtpu: {INSTALL_COMMAND}"
            )
        return
    if not (TARGET_CONFIGS / f"{device.name}.txtpb").is_file():
        known = sorted(
            p.name.removesuffix(".txtpb") for p in TARGET_CONFIGS.iterdir() if "txtpb" in p.name
        )
        raise NoCompiler(
            f"no description of {device.name} is here to compile for (there are those of "
            f"{', '.join([*known, *_TPUS])})"
        )
    for module, package in (
        (CUDA_PLUGIN, "jax-cuda12-plugin"),
        (CUDA_ASSEMBLER, "nvidia-cuda-nvcc-cu12"),
    ):
        if _place(module) is None:
            raise NoCompiler(
                f"programs for {device.name} are compiled by {package}: {INSTALL_COMMAND}"
            )
    wanted = metadata.version("jaxlib")
    for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "absent"
        if found != wanted:
            raise NoCompiler(
                f"{package} is {found} and jaxlib {wanted}, and they must be the same: "
                f"pip install {package}=={wanted}"
            )


def _place(module: str) -> Path | None:
    """Return the folder of an installed package without importing it, or None."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # what it would be in
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def _numbers(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)
