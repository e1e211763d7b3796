"""`hfseq launch`: starts several processes of one run on this machine."""

from __future__ import annotations

import argparse
import glob
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from hfseq.errors import UsageError

EXAMPLES = """hfseq launch --num_processes 2 train clm --output_dir my-gpt2 --mesh fsdp=2 ...
hfseq launch --num_processes 8 scripts/run_mlm_flax.py flags.yaml"""
#: Flags that the command sets in each process, as environment variables.
PROCESS_FLAGS = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
# After a process has failed, the other processes end by themselves within seconds, unless they are
# still waiting for the failed process to connect.
GRACE_SECONDS, KILL_SECONDS = 15.0, 10.0


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `hfseq launch`."""
    parser.add_argument(
        "--num_processes",
        type=int,
        required=True,
        metavar="N",
        help="Number of processes. The GPUs of this machine are divided among them.",
    )
    parser.add_argument(
        "--port",
        type=int,
        help="Port on which process 0 listens for the other processes. Default: a free port.",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM ...",
        help="A hfseq command, such as `train mlm`, or a Python script, with its flags.",
    )


def run_launch(arguments: argparse.Namespace) -> int:
    """Starts the processes, waits for them, and returns the exit code of the first that failed.

    Signals are passed on to the processes. Process 0 prints to the standard output of this command.
    The output of each other process is printed to the standard error output, with the number of the
    process before each line.
    """
    count, words = arguments.num_processes, arguments.program
    if count < 1:
        raise UsageError(f"--num_processes {count} must be at least 1")
    if not words:
        raise UsageError("no program: add a command, e.g. hfseq launch --num_processes 2 train mlm")
    for word in words:
        if word.startswith("--") and word[2:].partition("=")[0] in PROCESS_FLAGS:
            raise UsageError(f"{word}: hfseq launch sets this flag in each process; drop it")
    script = words[0].endswith(".py")
    if script and not os.path.isfile(words[0]):
        raise UsageError(f"the script {words[0]} does not exist")
    command = [sys.executable, *([] if script else ["-m", "hfseq.cli"]), *words]
    address = f"localhost:{arguments.port or free_port()}"
    devices = divide_gpus(count)
    with Children(
        command,
        [
            {
                "COORDINATOR_ADDRESS": address,
                "NUM_PROCESSES": str(count),
                "PROCESS_ID": str(number),
                **({"LOCAL_DEVICE_IDS": devices[number]} if devices else {}),
            }
            for number in range(count)
        ],
    ) as children:
        return children.wait()


def free_port() -> int:
    """Returns a port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def divide_gpus(count: int) -> list[str]:
    """Returns the GPUs of each process, as values of `--local_device_ids`.

    The list is empty if this machine has no NVIDIA GPU.

    Raises:
        UsageError: There are fewer GPUs than processes.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    total = len(glob.glob("/dev/nvidia[0-9]*"))
    if visible is not None:
        total = min(total, len([name for name in visible.split(",") if name.strip()]))
    if not total or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    if total < count:
        raise UsageError(
            f"--num_processes {count}: this machine has {total} GPUs; use at most {total}, or set "
            "JAX_PLATFORMS=cpu to train on the CPU"
        )
    each = total // count
    return [
        ",".join(str(number * each + position) for position in range(each))
        for number in range(count)
    ]


class Children:
    """The started processes. They are stopped when the context ends.

    Each process has its own session, so that Ctrl-C in a terminal reaches only this command. This
    command passes the first signal on to process 0, which stops all processes after the same step.
    It passes further signals on to all processes.

    Args:
        command: The command of all processes.
        environments: The environment variables of each process.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]]):
        self.running: list[subprocess.Popen[str]] = []
        self._printers: list[threading.Thread] = []
        self._signals = 0
        self._handlers = {
            number: signal.signal(number, self._forward)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            for number, variables in enumerate(environments):
                self._start(command, number, variables)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, command: Sequence[str], number: int, variables: dict[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=None if number == 0 else subprocess.PIPE,
            stderr=None if number == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.running.append(process)
        if process.stdout is not None:
            printer = threading.Thread(
                target=print_lines, args=(process.stdout, f"[{number}] "), daemon=True
            )
            printer.start()
            self._printers.append(printer)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        for process in self.running[:1] if self._signals == 1 else self.running:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Waits until all processes have ended.

        Returns:
            0, or the exit code of the first process that failed (128 plus the number of the signal
            that killed it).
        """
        code, end = 0, float("inf")
        while any(process.poll() is None for process in self.running) and time.monotonic() < end:
            failed = [process.returncode for process in self.running if process.returncode]
            if failed and not code:
                code, end = failed[0], time.monotonic() + GRACE_SECONDS
            time.sleep(0.05)
        code = code or next((p.returncode for p in self.running if p.returncode), 0)
        return 128 - code if code < 0 else code

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        """Stops the processes that are still running, and restores the signal handlers."""
        for process in self.running:
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + KILL_SECONDS
        for process in self.running:
            try:
                process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
        for printer in self._printers:
            printer.join(1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def print_lines(stream: IO[str], prefix: str) -> None:
    """Prints the lines of a process to the standard error output, each with a prefix."""
    for line in stream:
        sys.stderr.write(prefix + line)
        sys.stderr.flush()
