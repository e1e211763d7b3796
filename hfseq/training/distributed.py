"""Several processes: a session in which they start together, agree, and end together.

Every call here is nothing where there is one process. With several, all of them make the same
calls in the same order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from hfseq.errors import UsageError
from hfseq.training import coordinator, failures, fingerprint, rendezvous
from hfseq.training.process_arguments import ProcessArguments

if TYPE_CHECKING:
    from hfseq.training.arguments import Arguments

# Flags of a machine or a process, not of the run.
OWN_FLAGS = (
    *("cache_dir", "data_cache_dir", "compilation_cache_dir", "preprocessing_num_workers"),
    *("disable_tqdm", "debug"),
)
MARK = ".hfseq-processes"
VISIBLE = 30.0  # seconds in which a network file system shows a new file on other machines

_rounds = itertools.count()


@contextlib.contextmanager
def session(processes: ProcessArguments) -> Iterator[None]:
    """Run the body in all processes that the flags speak of; they end together, well or not."""
    rendezvous.join(processes)
    if coordinator.client() is None:
        yield
        return
    with failures.shared():
        try:
            yield
        except SystemExit:  # agreed on, see `survival`
            wait()
            raise
        wait()


def wait() -> None:
    """Return when every process has come here."""
    if (client := coordinator.client()) is not None:
        client.wait_at_barrier(f"hfseq/barrier/{next(_rounds)}", coordinator.FOREVER)


@contextlib.contextmanager
def first() -> Iterator[bool]:
    """Run the body in process 0 first, for which it yields True, then in the others."""
    leads = coordinator.process_index() == 0
    if not leads:
        wait()
    yield leads
    if leads:
        wait()


def connect(mesh: Mesh) -> None:
    """Open the connections between the devices of a CPU mesh, in all processes at once.

    gloo opens them where a group of devices first meets and gives the partners 30 seconds, which
    compiling or writing files takes easily; what comes later may take its time.
    """
    if coordinator.client() is None or jax.default_backend() != "cpu":
        return
    axes = [name for name, size in mesh.shape.items() if size > 1]
    groups = [g for n in range(1, len(axes) + 1) for g in itertools.combinations(axes, n)]

    def meet(x: jax.Array) -> jax.Array:
        for group in groups:
            x = x + jax.lax.psum(x, group)
        return x

    everywhere = jax.sharding.PartitionSpec()
    meeting = jax.jit(jax.shard_map(meet, mesh=mesh, in_specs=everywhere, out_specs=everywhere))
    wait()
    jax.block_until_ready(meeting(np.zeros((), np.float32)))


def agree_on_flags(arguments: Arguments, objective: str) -> None:
    """Compare flags, objective, code and versions; what belongs to a machine may differ."""
    if coordinator.client() is None:
        return
    values = {f"--{name}": v for name, v in arguments.as_dict().items() if name not in OWN_FLAGS}
    versions = {f"the version of {name}": metadata.version(name) for name in ("hfseq", "jax")}
    counts = {"--num_processes": coordinator.process_count(), "the objective": objective}
    code = fingerprint.of_program(arguments.training.plugin)
    agree(values | versions | code | counts, "give all of them the same flags and the same code")


def agree(facts: dict[str, Any], advice: str) -> None:
    """Compare what should be the same in every process.

    Raises:
        UsageError: in all of them, with the names, the values and the processes that differ.
    """
    if coordinator.client() is None:
        return
    folder, me = f"hfseq/agree/{next(_rounds)}", coordinator.process_index()
    own = {name: json.dumps(value, default=str) for name, value in facts.items()}
    coordinator.write(f"{folder}/facts/{me}", json.dumps(own))
    if me == 0:
        theirs = {
            number: json.loads(coordinator.wait_for(f"{folder}/facts/{number}"))
            for number in range(1, coordinator.process_count())
        }
        coordinator.write(f"{folder}/verdict", json.dumps(differences(own, theirs)))
    if problems := json.loads(coordinator.wait_for(f"{folder}/verdict")):
        raise UsageError(f"the processes disagree: {'; '.join(problems)}: {advice}")


def differences(own: dict[str, str], theirs: dict[int, dict[str, str]]) -> list[str]:
    """Say how the facts of other processes differ from those of process 0, a fact once."""
    found: dict[str, str] = {}
    for number, facts in theirs.items():
        for name in own | facts:
            mine, other = own.get(name, "absent"), facts.get(name, "absent")
            if mine != other:
                text = f"{name} is {mine} in process 0 and {other} in process {number}"
                found.setdefault(name, text)
    return [found[name] for name in sorted(found)]


def check_writable(folder: Path) -> None:
    """See that a file can be made in ``folder``, or where it will be made; none stays there.

    Raises:
        UsageError: the volume is read-only, full of files, or not this user's.
    """
    for wanted in (folder, folder / "checkpoints"):
        place = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
        try:
            if place.is_dir():
                tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise UsageError(
                f"--output_dir {folder} cannot be written on {socket.gethostname()} "
                f"({error.strerror}: {place}): checkpoints and the model go there, so mount the "
                "volume for writing, or give another directory"
            ) from error


def check_shared(folder: Path) -> None:
    """See that ``folder``, in which process 0 leaves a mark for a moment, is one for all.

    Raises:
        UsageError: this process does not see the mark.
    """
    if coordinator.client() is None:
        return
    key, path = f"hfseq/mark/{next(_rounds)}", folder / MARK
    leads = coordinator.process_index() == 0
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text := f"{os.getpid()} {time.time_ns()}")
        coordinator.write(key, text)
    wanted = coordinator.wait_for(key)
    if not coordinator.poll(lambda: _text(path) == wanted, VISIBLE):
        raise UsageError(
            f"--output_dir {folder} on {socket.gethostname()} is not the folder that process 0 "
            "writes: checkpoints are written by all processes, so give a directory of a file "
            "system that all machines share"
        )
    wait()
    if leads:
        path.unlink(missing_ok=True)


def _text(path: Path) -> str:
    try:
        os.listdir(path.parent)  # makes NFS look again
        return path.read_text()
    except OSError:
        return ""


def agreed_to_stop(step: int) -> bool:
    """Return whether some process got a SIGTERM and ``step`` is where all of them stop."""
    if coordinator.client() is None:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)
