"""Described devices, and programs that the real compilers compile for them."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq.errors import UsageError
from hfseq.nn import context
from hfseq.training import aot, hardware


def devices(name: str, count: int) -> list[jax.Device]:
    if reason := aot.unavailable_reason(name):
        pytest.skip(reason)
    return aot.describe(name, count)


def laid(devices: list[jax.Device], *shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    mesh = Mesh(np.array(devices), ("data",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("data")))


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [("h200:8", "h200", 8), ("v5e:4", "tpu-v5e", 4), ("V6E", "tpu-v6e", 1)],
)
def test_devices_are_named_with_their_number(text, name, count):
    assert aot.parse(text) == (hardware.ACCELERATORS[name], count)


@pytest.mark.parametrize("text", ["h200:0", "h200:", "h200:x", "v9:4"])
def test_unknown_device_is_rejected(text):
    with pytest.raises(UsageError, match=text.partition(":")[0]):
        aot.parse(text)


@pytest.mark.parametrize(
    ("name", "count", "platform", "capability"),
    [
        ("h200", 16, "cuda", (9, 0)),
        ("v5e", 1, "tpu", None),
        ("v6e", 4, "tpu", None),
        ("v5p", 3, "tpu", None),
        ("tpu-v4", 4, "tpu", None),
        ("v7", 8, "tpu", None),
    ],
)
def test_described_device_determines_tracing(name, count, platform, capability):
    described = devices(name, count)
    assert len(described) == count
    assert hardware.find_accelerator(described[0].device_kind) is hardware.get_accelerator(name)
    with aot.compiling_for(described[0]):
        assert (context.platform(), context.capability()) == (platform, capability)
    assert context.platform() == "cpu"


def test_gpus_are_in_machines_of_eight():
    assert [device.process_index for device in devices("h200", 16)] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("name", "kernel"), [("h200", "__cudnn$fmhaSoftmax"), ("v5e", "all-reduce")]
)
def test_a_program_is_that_of_the_device(name, kernel):
    described = devices(name, 4)
    selected_implementations = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        selected_implementations.append(context.platform())
        if context.platform() == "cuda":
            return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")
        return (x * x).sum()

    assert jnp.isfinite(step(jnp.ones((1, 2, 1, 64)))).all()
    # The same shapes are traced again for another kind of device.
    x = laid(described, 4, 128, 2, 64)
    program = aot.compile_for(described[0], step, x)
    assert kernel in program.as_text()
    assert program.memory_analysis().argument_size_in_bytes == 2 * x.size // 4
    again = aot.compile_for(described[0], jax.jit(lambda x: step(x)), x)  # no cache has it
    assert kernel in again.as_text()
    assert selected_implementations == ["cpu", {"h200": "cuda", "v5e": "tpu"}[name]]


def test_jax_machine_checks_are_restored():
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    original = cudnn.check_cudnn_version, cudnn.check_compute_capability
    device = types.SimpleNamespace(platform="gpu", device_kind="x", compute_capability="8.0")
    with pytest.raises(ZeroDivisionError), aot.compiling_for(device):
        assert cudnn.check_compute_capability("8.0") and not cudnn.check_compute_capability("9.0")
        assert cudnn.is_cuda_compute_capability_equal("8.0") and cudnn.check_cudnn_version() > 90000
        raise ZeroDivisionError
    assert original == (cudnn.check_cudnn_version, cudnn.check_compute_capability)
    assert context.platform() == "cpu"


def test_missing_compiler_error_names_the_command(monkeypatch):
    monkeypatch.setattr(aot, "_package_folder", lambda module: None)
    for name in ("h200", "v5e"):
        with pytest.raises(aot.NoCompiler, match=r"pip install 'hfseq\[aot\]'"):
            aot.describe(name)
        assert "\n" not in aot.unavailable_reason(name)


def test_a_gpu_without_a_description_is_named_with_those_that_have_one():
    with pytest.raises(aot.NoCompiler, match=r"no description of a100 .*h200.*tpu-v5e"):
        aot.describe("a100")


def test_a_slice_larger_than_any_is_refused():
    if reason := aot.unavailable_reason("v5e"):
        pytest.skip(reason)
    with pytest.raises(aot.NoCompiler, match="257 devices exceed"):
        aot.describe("v5e", 257)


def test_a_plugin_of_another_version_is_refused(monkeypatch):
    version = aot.metadata.version
    monkeypatch.setattr(aot, "_package_folder", lambda module: aot.Path())
    monkeypatch.setattr(
        aot.metadata, "version", lambda name: "0.9.1" if "cuda" in name else version(name)
    )
    assert "jax-cuda12-plugin is 0.9.1, but jaxlib is" in aot.unavailable_reason("h200")


CODE = """
from hfseq.training import aot
try:
    print(len(aot.describe("v5e", 4)))
except aot.NoCompiler as error:
    print(error)
"""


def test_a_second_process_describes_too_unless_it_is_forbidden():
    devices("v5e", 4)  # has libtpu loaded, and kept
    environment = aot.environment()

    def said(**changes: str) -> str:
        command = [sys.executable, "-c", CODE]
        return subprocess.run(
            command, env=environment | changes, capture_output=True, text=True, timeout=120
        ).stdout.strip()

    assert said() == "4"
    holder = subprocess.Popen(
        [sys.executable, "-c", CODE + "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "0"},
    )
    with holder:
        assert holder.stdout is not None
        first = holder.stdout.readline().strip()
        assert first == "4" or "in use by another process" in first  # a concurrent run of this test
        assert "in use by another process" in said(ALLOW_MULTIPLE_LIBTPU_LOAD="0")
        holder.communicate("\n")


def test_jax_starts_quietly_where_only_the_compilers_are_installed():
    if not aot.has_only_compilers():
        pytest.skip("there are devices, or no compilers for them")
    if aot._package_folder("nvidia.cuda_runtime") is None:
        pytest.skip("the CUDA runtime, of the extra aot, is not installed")
    code = (
        "import sys; from hfseq.training import script\n"
        "def main(): import jax; print(jax.devices()[0].platform)\n"
        "sys.exit(script.run(main))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True
    )
    assert (process.stdout, process.stderr) == ("cpu\n", "")


def test_driver_or_cudnn_enables_the_device(monkeypatch, tmp_path):
    installed = {aot.CUDA_PLUGIN}
    monkeypatch.setattr(
        aot, "_package_folder", lambda name: tmp_path if name in installed else None
    )

    def load(name: str) -> None:
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(aot.ctypes, "CDLL", load)
    driver = False
    monkeypatch.setattr(aot.Path, "glob", lambda self, pattern: [])
    assert aot.has_only_compilers()
    driver = True
    assert not aot.has_only_compilers()
    driver = False
    installed.add("nvidia.cudnn")
    assert not aot.has_only_compilers()
    installed.clear()
    assert not aot.has_only_compilers()
