"""The flags of a run in several processes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hfseq.data.arguments import option
from hfseq.errors import UsageError

#: What stands for a flag that is not given, first name first.
VARIABLES = {
    "coordinator_address": ("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
    "num_processes": ("NUM_PROCESSES",),
    # An indexed Job or JobSet of Kubernetes numbers its pods itself.
    "process_id": ("PROCESS_ID", "JOB_COMPLETION_INDEX"),
}


@dataclass
class ProcessArguments:
    """How the processes of a run find each other; without any of these a run is one process."""

    distributed: bool = option(
        False, "One of several processes that Slurm, Open MPI or a Kubernetes JobSet started."
    )
    coordinator_address: str | None = option(
        None, "host:port on which process 0 listens, e.g. node1:1234 (or COORDINATOR_ADDRESS)."
    )
    num_processes: int | None = option(
        None, "How many processes there are, where nothing detects it (or NUM_PROCESSES)."
    )
    process_id: int | None = option(
        None, "The number of this process, from 0 (or PROCESS_ID)."
    )  # fmt: skip
    local_device_ids: str | None = option(
        None, "Accelerators of this machine that are this process's, e.g. 0 or 0,1; by default all."
    )
    coordinator_timeout: int = option(
        300, "Seconds to wait for the coordinator and for the other processes at the start."
    )
    heartbeat_timeout: int = option(
        100, "Seconds after which a process that gives no sign of life has ended the run."
    )

    def __post_init__(self) -> None:
        problems = [text for wrong, text in self._problems() if wrong]
        if problems:
            raise UsageError("; ".join(problems))

    def _problems(self) -> list[tuple[bool, str]]:
        count, number, ids = self.num_processes, self.process_id, self.local_device_ids
        return [
            (self.coordinator_timeout < 1,
             f"--coordinator_timeout {self.coordinator_timeout}: give at least 1 second"),
            (self.heartbeat_timeout < 10,
             f"--heartbeat_timeout {self.heartbeat_timeout}: give at least 10 seconds"),
            (count is not None and count < 1, f"--num_processes {count}: give at least 1"),
            (number is not None and number < 0, f"--process_id {number}: they count from 0"),
            (ids is not None and not re.fullmatch(r"\d+(,\d+)*", ids),
             f"--local_device_ids {ids}: give numbers with commas between them, e.g. 0,1"),
        ]  # fmt: skip

    @property
    def several(self) -> bool:
        """Whether flags, or an address in the environment, speak of more than one process."""
        given = (self.address, self.num_processes, self.process_id)
        return self.distributed or any(value is not None for value in given)

    @property
    def address(self) -> str | None:
        """The coordinator's host and port, from the flag or the environment."""
        found, source = self.coordinator_address, "--coordinator_address"
        if found is None and (name := _variable("coordinator_address")):
            found, source = os.environ[name], f"{name} in the environment,"
        if found and not re.fullmatch(r".+:\d+", found):
            raise UsageError(f"{source} {found}: give host:port, e.g. node1:1234")
        return found or None

    @property
    def count(self) -> int | None:
        """How many processes there are, if that was said."""
        return _number("num_processes", self.num_processes)

    @property
    def number(self) -> int | None:
        """Which of them this is, if that was said."""
        return _number("process_id", self.process_id)

    @property
    def devices(self) -> list[int] | None:
        """The local devices of this process, if that was said."""
        ids = self.local_device_ids
        return None if ids is None else [int(part) for part in ids.split(",")]


def _number(flag: str, given: int | None) -> int | None:
    if given is not None:
        return given
    name = _variable(flag)
    if name is None:
        return None
    if not os.environ[name].isdigit():
        raise UsageError(
            f"{name} in the environment is '{os.environ[name]}': give a number, or --{flag}"
        )
    return int(os.environ[name])


def _variable(flag: str) -> str | None:
    """Return the name of the variable that stands for a flag, if one is set."""
    return next((name for name in VARIABLES[flag] if os.environ.get(name)), None)
