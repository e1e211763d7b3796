"""Ahead-of-time compilation for accelerators that this machine does not have.

jax compiles for a *described device*. This is an object that has the properties of an accelerator
but cannot run programs. The compilers need no device. They are Python packages that the extra `aot`
installs: XLA's CUDA plugin with NVIDIA's assembler for GPUs, and libtpu for TPUs. The compiled
program shows how a step is partitioned, fused and laid out in memory, but not how fast it runs, or
how much workspace cuDNN uses.

A process that compiles for described devices must run jax on the CPU. jax selects its devices when
it starts. The process must therefore be started with the environment variables that `environment`
returns.
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
#: Descriptions of GPUs in XLA's format (``xla.StreamExecutorGpuTargetConfigProto``).
TARGET_CONFIGS = resources.files("hfseq.training") / "targets"
CUDA_PLUGIN, CUDA_ASSEMBLER = "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"
_SHAPES_2D = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SHAPES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
#: For each accelerator: its name in libtpu, the shapes of its slices in chips, and the number of
#: jax devices per chip.
_TPUS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "tpu-v3": ("v3", _SHAPES_2D, 2),
    "tpu-v4": ("v4", _SHAPES_3D, 1),
    "tpu-v5e": ("v5e", _SHAPES_2D, 1),
    "tpu-v5p": ("v5p", _SHAPES_3D, 1),
    "tpu-v6e": ("v6e", _SHAPES_2D, 1),
    "tpu-v7": ("tpu7x", _SHAPES_3D, 2),
}
#: Compiler options of `fast_compile`. They have the same effect as the environment variables
#: JAX_OPTIMIZATION_LEVEL=O0 (O0 has the value 9) and JAX_EXEC_TIME_OPTIMIZATION_EFFORT=-1.0.
FAST_COMPILE_OPTIONS = {"optimization_level": 9, "exec_time_optimization_effort": -1.0}
#: Environment variables for libtpu. The first three keep libtpu from looking for a TPU. The last
#: one allows several processes to load libtpu at the same time. This is safe, because a described
#: device does not occupy a chip.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class NoCompiler(HfseqError):
    """The compiler for an accelerator is not installed, or does not know the accelerator."""


def parse(text: str) -> tuple[Accelerator, int]:
    """Parses `NAME:N`, or `NAME` for one device.

    The prefix `tpu-` can be omitted: "v5e:4".

    Returns:
        The accelerator and the number of devices.

    Raises:
        UsageError: The number is invalid, or the accelerator is unknown.
    """
    name, colon, number = text.partition(":")
    if colon and not re.fullmatch(r"[1-9]\d*", number):
        raise UsageError(
            f"--devices {text}: '{number}' is not a number of devices. Use an accelerator and a "
            "number, e.g. h200:64 or v5e:4"
        )
    return hardware.get_accelerator(name), int(number or 1)


def describe(name: str, count: int = 1) -> list[jax.Device]:
    """Returns described devices of an accelerator, for which programs can be compiled.

    The devices can form a mesh, but cannot run programs. GPUs are described as machines with eight
    devices each. TPUs are described as the first devices of the smallest slice that has enough
    devices. Describing a TPU loads libtpu. If the process is profiled afterwards, libtpu aborts it.

    Args:
        name: Name of the accelerator, e.g. "h200" or "v5e".
        count: Number of devices.

    Raises:
        UsageError: The accelerator is unknown.
        NoCompiler: The compiler is not installed, its version differs from that of jax, it is in
            use by another process, or it has no description of the accelerator.
    """
    device = hardware.get_accelerator(name)
    _check_compiler(device)
    from jax.experimental import topologies

    arguments: dict[str, Any]
    if device.name in _TPUS:
        libtpu_name, shapes, cores = _TPUS[device.name]
        num_chips = -(-count // cores)
        shape = next((s for s in shapes if math.prod(map(int, s.split("x"))) >= num_chips), None)
        if shape is None:
            raise NoCompiler(f"{count} devices exceed the largest slice of {device.name}")
        arguments = {"platform": "tpu", "topology_name": f"{libtpu_name}:{shape}"}
        if device.name == "tpu-v4":  # jax uses the two cores of a chip as one device
            arguments["chip_config_name"] = "megacore"
        for variable, value in _LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    else:
        devices_per_machine = min(count, device.devices_per_machine)
        arguments = {
            "platform": "cuda",
            "topology_name": device.name,
            "target_config": (TARGET_CONFIGS / f"{device.name}.txtpb").read_text(),
            "topology": f"1x{-(-count // devices_per_machine)}x{devices_per_machine}",
        }
    try:
        with _without_xla_flags():
            devices = topologies.get_topology_desc(**arguments).devices
    except Exception as error:  # jax raises many types of errors
        if "lockfile" in str(error):
            raise NoCompiler(
                "libtpu is in use by another process of this machine, and "
                "ALLOW_MULTIPLE_LIBTPU_LOAD does not allow a second one: end that process, or set "
                "the variable to 1"
            ) from error
        raise NoCompiler(
            f"jax cannot describe {device.name} to the compiler: {first_line(error)}"
        ) from error
    return list(devices[:count])


def device_stub(name: str) -> Any:
    """Returns an object that can take the place of a device of the accelerator in tracing.

    Unlike `describe`, this requires no compiler.

    Args:
        name: Name of the accelerator, e.g. "h200" or "v5e".
    """
    device = hardware.get_accelerator(name)
    device_kind = device.device_kinds[0]
    if device.capability:
        return SimpleNamespace(
            platform="gpu", device_kind=device_kind, compute_capability=device.capability
        )
    return SimpleNamespace(platform="tpu", device_kind=device_kind)


def environment() -> dict[str, str]:
    """Returns the environment variables for a process that compiles for described devices.

    They restrict jax to the CPU, because its plugins would otherwise look for their devices. They
    also configure libtpu to expect no TPU. NVIDIA's assembler needs no variable, because jax finds
    it in the installed package.
    """
    return {**os.environ, "JAX_PLATFORMS": "cpu", **_LIBTPU_ENVIRONMENT}


def has_only_compilers() -> bool:
    """Returns whether this machine has compilers for accelerators, but no accelerator.

    In this case, jax would print long messages, because the CUDA plugin does not find the driver
    (`libcuda`) or cuDNN, and libtpu does not find a PCI device of Google.
    """
    if _package_folder(CUDA_PLUGIN) is None and _package_folder("libtpu") is None:
        return False
    plugins = _package_folder("jax_plugins")
    if plugins and any(not p.name.startswith(("xla_cuda", "_")) for p in plugins.iterdir()):
        return False
    if _package_folder(CUDA_PLUGIN) is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libcuda.so.1")
            return False
        if _package_folder("nvidia.cudnn") is not None:  # only used with a GPU: keep jax's messages
            return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return not any(vendor.read_text().strip() == "0x1ae0" for vendor in vendors)


def start_quietly() -> None:
    """Restricts jax to the CPU if this machine has compilers for accelerators, but no accelerator.

    Must be called before jax starts.
    """
    if has_only_compilers():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def jax_has_started() -> bool:
    """Returns whether jax has initialized its devices. After that, jax does not read XLA flags."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def unavailable_reason(name: str) -> str:
    """Returns why programs cannot be compiled for the accelerator `name`, or an empty string."""
    try:
        _check_compiler(hardware.get_accelerator(name))
    except NoCompiler as error:
        return str(error)
    return ""


@contextlib.contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
    """Context manager in which jax traces and lowers programs for `device`.

    `device` can be a described device. The implementation of each operation, such as attention, is
    selected for `device`. To lower cuDNN attention, jax usually queries the machine for its GPU and
    its cuDNN version. In this context, jax uses the compute capability of `device` and cuDNN 9.10
    instead.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    from hfseq.nn.context import capability, tracing_for

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing_for(device))
        device_capability = capability()
        if device_capability is not None:

            def version() -> int:
                return 91000

            def at_least(minimum: str) -> bool:
                return device_capability >= _parse_capability(minimum)

            def equal(expected: str) -> bool:
                return device_capability == _parse_capability(expected)

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
    """Compiles a jitted step for an accelerator.

    Args:
        device: A device of the target, possibly a described one.
        step: The jitted function.
        arguments: The arguments of `step`, as `jax.ShapeDtypeStruct` objects with shardings over
            described devices.
        fast_compile: Whether to skip most optimizations, so that compilation takes a quarter of the
            time. The kernels and collectives are the same, but the size of the temporary memory
            differs.
        traced_for: The device for which implementations are selected. Default: `device`.
    """
    platform = "cuda" if device.platform == "gpu" else device.platform
    with compiling_for(traced_for or device):
        lowered = step.trace(*arguments).lower(lowering_platforms=(platform,))
    with _without_cache(), _without_xla_flags():
        program: jax.stages.Compiled = lowered.compile(
            FAST_COMPILE_OPTIONS if fast_compile else None
        )
    return program


@contextlib.contextmanager
def _without_xla_flags() -> Iterator[None]:
    """Context manager that hides XLA_FLAGS from libtpu.

    libtpu reads the flags when it is loaded or compiles for the first time. If the XLA in libtpu
    does not know one of the flags, libtpu aborts the process.
    """
    import jax

    jax.devices("cpu")  # jax's own XLA reads the flags now, before they are hidden
    flags = os.environ.pop("XLA_FLAGS", None)
    try:
        yield
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Context manager that disables jax's compilation cache.

    Loading a cached program requires the device for which it was compiled.
    """
    from jax._src import compilation_cache, config

    compilation_cache.reset_cache()  # otherwise jax does not notice that the setting changes
    try:
        with config.enable_compilation_cache(False):
            yield
    finally:
        compilation_cache.reset_cache()


def _check_compiler(device: Accelerator) -> None:
    """Checks that a compiler for `device` is installed.

    Raises:
        NoCompiler: The compiler is missing, or its version differs from that of jax.
    """
    if device.name in _TPUS:
        if _package_folder("libtpu") is None:
            raise NoCompiler(f"compiling for {device.name} requires libtpu: {INSTALL_COMMAND}")
        return
    if not (TARGET_CONFIGS / f"{device.name}.txtpb").is_file():
        available = sorted(
            p.name.removesuffix(".txtpb") for p in TARGET_CONFIGS.iterdir() if "txtpb" in p.name
        )
        raise NoCompiler(
            f"there is no description of {device.name} for the compiler (devices with a "
            f"description: {', '.join([*available, *_TPUS])})"
        )
    for module, package in (
        (CUDA_PLUGIN, "jax-cuda12-plugin"),
        (CUDA_ASSEMBLER, "nvidia-cuda-nvcc-cu12"),
    ):
        if _package_folder(module) is None:
            raise NoCompiler(f"compiling for {device.name} requires {package}: {INSTALL_COMMAND}")
    jaxlib_version = metadata.version("jaxlib")
    for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = "absent"
        if installed != jaxlib_version:
            raise NoCompiler(
                f"{package} is {installed}, but jaxlib is {jaxlib_version}. Their versions must "
                f"match: pip install {package}=={jaxlib_version}"
            )


def _package_folder(module: str) -> Path | None:
    """Returns the folder of an installed package, without importing it, or `None`."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the parent package is missing
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def _parse_capability(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)
