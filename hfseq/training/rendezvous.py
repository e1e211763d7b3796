"""How the processes of a run meet: jax does it, and this gives its time-outs a readable end."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from typing import Any

import jax

from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.training import coordinator, failures
from hfseq.training.process_arguments import ProcessArguments

logger = logging.getLogger(__name__)

IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in every pod


def join(processes: ProcessArguments) -> None:
    """Meet the other processes, if there are any; call it before jax looks at its devices.

    Raises:
        UsageError: something needed is neither given nor detected.
        HfseqError: the coordinator does not answer, or cannot listen.
    """
    if not processes.several or coordinator.client() is not None:
        return
    address, count, number = whereabouts(processes)
    if count == 1:
        return
    started, limit = time.monotonic(), processes.coordinator_timeout
    if number:
        await_coordinator(address, limit)
    else:
        check_port(address)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    waiting = _Deadline(started + limit, address, count)
    try:
        jax.distributed.initialize(
            address, count, number, local_device_ids=processes.devices,
            # All that is known is known: jax would ask for the package `kubernetes`, and with it
            # the API server, for the numbers of local devices, which neither has.
            cluster_detection_method="deactivate" if IN_KUBERNETES in os.environ else None,
            # The deadline ends the process before; jax would abort it with a stack trace.
            initialization_timeout=2 * limit + 60,
            heartbeat_timeout_seconds=processes.heartbeat_timeout,
            shutdown_timeout_seconds=max(60, processes.heartbeat_timeout),
        )  # fmt: skip
    except Exception as error:
        raise HfseqError(
            f"process {number} cannot take part in the run at {address} ({first_line(error)}): "
            f"is the port in use, or another process {number} there?"
        ) from error
    finally:
        waiting.over()
    if number:
        # What all of them have to say, process 0 says.
        logging.getLogger("hfseq").setLevel(logging.ERROR)
    logger.info("process %d of %d, coordinator %s", number, count, address)


def whereabouts(processes: ProcessArguments) -> tuple[str, int, int]:
    """Return the coordinator's address, how many processes there are, and which this one is.

    Raises:
        UsageError: one of them is neither given nor detected, or the number is none of the count.
    """
    found: list[Any] = [processes.address, processes.count, processes.number]
    if None in found:
        try:
            found = coordinator.detect(processes)
        except Exception as error:  # each cluster has errors of its own
            raise HfseqError(
                f"--distributed: the cluster does not say who is there ({first_line(error)}): give "
                "--coordinator_address, --num_processes and --process_id"
            ) from error
    flags = ("--coordinator_address", "--num_processes", "--process_id")
    absent = [flag for flag, value in zip(flags, found, strict=True) if value is None]
    if absent:
        nobody = "none of Slurm, Open MPI and Kubernetes JobSet is there to detect them from"
        if IN_KUBERNETES in os.environ:
            nobody = (
                "set COORDINATOR_ADDRESS and NUM_PROCESSES in the manifest (as "
                "scripts/launch/jobset.yaml does), or install the package kubernetes"
            )
        raise UsageError(
            f"several processes need {', '.join(absent)}: {nobody} (for one process drop the other "
            "flags, and COORDINATOR_ADDRESS from the environment)"
        )
    address, count, number = str(found[0]), int(found[1]), int(found[2])
    if number >= count:
        raise UsageError(
            f"--process_id {number}: with --num_processes {count} give 0 to {count - 1}"
        )
    return address, count, number


def check_port(address: str) -> None:
    """See that process 0 can listen; gRPC would share the port with another run's coordinator.

    Raises:
        HfseqError: something on this machine listens there.
    """
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:  # not the port of all interfaces
        return
    port = int(address.rpartition(":")[2])
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise HfseqError(
                    f"port {port} of --coordinator_address {address} is in use on this machine, "
                    "on which process 0 has to listen: give a free one to all processes (or is an "
                    "earlier run still there?)"
                ) from error


def await_coordinator(address: str, limit: float) -> None:
    """Try to reach the coordinator's port for ``limit`` seconds.

    Raises:
        HfseqError: it does not answer.
    """
    host, _, port = address.rpartition(":")
    end, problem = time.monotonic() + limit, ""
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=min(limit, 5)):
                return
        except OSError as error:
            problem = str(error.strerror or error)
        if time.monotonic() + 0.5 > end:
            break
        time.sleep(0.5)
    raise HfseqError(
        f"the coordinator at {address} did not answer within {limit:g} s ({problem}): start "
        "process 0, see that --coordinator_address is the same everywhere and its port open to "
        "this machine, or give more time with --coordinator_timeout"
    )


class _Deadline:
    """Ends this process if the others have not come by ``end``: jax's call cannot be broken off."""

    def __init__(self, end: float, address: str, count: int):
        self._met = threading.Event()
        text = (
            f"not all {count} processes had come to the coordinator at {address} in time: see "
            "that each was started, with its own --process_id and the same --num_processes, or "
            "give more time with --coordinator_timeout"
        )
        threading.Thread(target=self._watch, args=(end, text), daemon=True).start()

    def _watch(self, end: float, text: str) -> None:
        if not self._met.wait(max(end - time.monotonic(), 1.0)):
            failures.end_now(text, 1)

    def over(self) -> None:
        """Stop waiting."""
        self._met.set()
