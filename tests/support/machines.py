"""Starts the processes of a run, optionally on simulated machines.

A simulated machine is a network namespace with its own address, host name and hosts file. A bridge
connects the machines. The simulation requires root permissions and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Every interpreter runs this code at startup. It hides PyTorch, because the import of PyTorch takes
# longer than the run.
WITHOUT_TORCH = """\
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""


def environment(folder: Path, devices: int = 1, **overrides: object) -> dict[str, str]:
    """Returns the environment variables of a process with CPU devices.

    Args:
        folder: A folder for the `sitecustomize.py` of the process, which is written there.
        devices: Number of CPU devices.
        **overrides: Further environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(WITHOUT_TORCH)
    defaults = {
        "XLA_FLAGS": "",
        "JAX_NUM_CPU_DEVICES": devices,
        "OMP_NUM_THREADS": 1,
        "USE_TORCH": 0,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "plugins"), *sys.path]),
        "PYTHON": sys.executable,
    }
    return os.environ | {name: str(value) for name, value in (defaults | overrides).items()}


def missing_requirements() -> str:
    """Returns why machines cannot be simulated on this system, or an empty string."""
    if os.geteuid():
        return "network namespaces require root permissions"
    absent = [name for name in ("ip", "unshare", "hostname") if not shutil.which(name)]
    if absent:
        return f"network namespaces require the commands {', '.join(absent)}"
    name = f"hfseq-probe-{os.getpid()}"
    process = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"cannot create a network namespace: {process.stderr}" if process.returncode else ""


class Machines:
    """Simulated machines, which exist while the context is active.

    Args:
        names: The host name of each machine, optionally followed by a space and aliases.
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.number = names, os.getpid() % 50_000
        self.bridge = f"hfb{self.number}"
        self.namespaces = [f"hf{self.number}-{index}" for index in range(len(names))]
        net = f"10.{64 + self.number // 250 % 64}.{self.number % 250}"
        self.addresses = [f"{net}.{index + 1}" for index in range(len(names))]

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        _ip("link", "add", self.bridge, "type", "bridge")
        _ip("link", "set", self.bridge, "up")
        hosts = [
            "127.0.0.1 localhost",
            *map(" ".join, zip(self.addresses, self.names, strict=True)),
        ]
        for index, (space, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            outer = f"hf{self.number}v{index}"
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", outer, "master", self.bridge, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            folder = Path("/etc/netns") / space  # `ip netns exec` mounts these files over /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(hosts) + "\n")
            (folder / "resolv.conf").write_text("")

    def __exit__(self, *_: object) -> None:
        for space in self.namespaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def command_prefix(self, index: int) -> list[str]:
        """Returns the words to put before a command to run it on the machine `index`."""
        name = self.names[index].split()[0]
        script = f'hostname {name} && exec "$@"'
        return [
            "ip",
            "netns",
            "exec",
            self.namespaces[index],
            "unshare",
            "--uts",
            "sh",
            "-c",
            script,
            "_",
        ]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Starts a process. `wait_for_all` returns its output."""
    return subprocess.Popen(
        command,
        env=dict(environment),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for_all(
    running: Sequence[subprocess.Popen[str]], *codes: int, within: float = 900
) -> list[str]:
    """Waits until all processes have ended, and asserts that they have the expected exit codes.

    Args:
        running: The processes.
        *codes: The expected exit code of each process, or a single one for all of them.
        within: Timeout in seconds for each process.

    Returns:
        The outputs of the processes.
    """
    try:
        texts = [process.communicate(timeout=within)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    exit_codes = [process.returncode for process in running]
    assert exit_codes == (list(codes) * len(exit_codes))[: len(exit_codes)], "\n---\n".join(texts)
    return texts
