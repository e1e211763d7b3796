"""Runs with several processes: startup, checks that all processes agree, and shutdown.

With one process, the functions of this module return immediately. With several processes, all of
them must call the functions in the same order. The processes communicate through the key-value
store of jax's coordinator, which is available before jax initializes its devices.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib.util
import itertools
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from hfseq.checkpoints import hub
from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.plugins import manager
from hfseq.training.arguments import ProcessArguments

logger = logging.getLogger(__name__)

NO_TIMEOUT = 7 * 24 * 3600 * 1000  # milliseconds; heartbeats detect dead processes earlier
POLL_INTERVAL = 1.0  # seconds between checks for an error of another process
# jax aborts a process after --heartbeat_timeout seconds without a heartbeat. The sum of the next
# two times must be less than half of the smallest --heartbeat_timeout that is allowed.
SHUTDOWN_SECONDS = 3.0  # time for other processes to read the error before the coordinator ends
LOST_CONNECTION_SECONDS = 1.0  # time to wait for the error message of a process that has ended
FILE_VISIBILITY_SECONDS = 30.0  # time until a file on a network drive is visible everywhere
FAILURE_KEY, LEAVING_KEY = "hfseq/failure", "hfseq/leaving"
MARKER_FILE = ".hfseq-processes"
KUBERNETES_VARIABLE = "KUBERNETES_SERVICE_HOST"  # set in every pod
# Flags that may differ between machines and processes.
MACHINE_FLAGS = (
    *("cache_dir", "data_cache_dir", "compilation_cache_dir", "preprocessing_num_workers"),
    *("disable_tqdm", "json", "debug"),
)
_rounds = itertools.count()


@contextlib.contextmanager
def session(processes: ProcessArguments) -> Iterator[None]:
    """Context manager that connects the processes of a run, and ends them together.

    At the end of the context, each process waits for all other processes. If one process fails, all
    processes end with the error message of that process.
    """
    join(processes)
    if coordination_client() is None:
        yield
        return
    with fail_together():
        try:
            yield
        except SystemExit:  # a signal stopped all processes, see `StopSignal`
            barrier()
            raise
        barrier()


def _state() -> Any:
    from jax._src.distributed import global_state

    return global_state


def coordination_client() -> Any:
    """Returns jax's client of the coordinator, or `None` with one process."""
    return _state().client


def process_index() -> int:
    """Returns the index of this process, without initializing jax's devices."""
    return _state().process_id


def process_count() -> int:
    """Returns the number of processes, without initializing jax's devices."""
    return _state().num_processes


def _read(key: str) -> str:
    """Returns the value of a key, or an empty string if the key or the store does not exist.

    If the connection to the store is lost, this function raises no error, because jax reports it.
    """
    try:
        return coordination_client().key_value_try_get(key)
    except Exception:
        return ""


def _poll(ready: Callable[[], Any], seconds: float) -> Any:
    """Calls `ready()` until its value is true or `seconds` have passed, and returns the value."""
    end = time.monotonic() + seconds
    while not (value := ready()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


# -- startup


def join(processes: ProcessArguments) -> None:
    """Connects to the other processes, if there are any.

    Must be called before jax initializes its devices.

    Raises:
        HfseqError: The coordinator does not answer, or the connection fails.
        UsageError: The flags are incomplete or invalid.
    """
    if not processes.is_distributed or coordination_client() is not None:
        return
    address, count, number = resolve_cluster(processes)
    if count == 1:
        return
    started, limit = time.monotonic(), processes.coordinator_timeout
    if number:
        _await_coordinator(address, limit)
    else:
        check_port(address)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # jax.distributed.initialize cannot be interrupted, and aborts the process with a stack trace if
    # it times out. The timer ends the process earlier and with a clear message.
    startup_timer = threading.Timer(
        max(started + limit - time.monotonic(), 1.0),
        exit_now,
        (
            f"not all {count} processes connected to the coordinator at {address} in time: check "
            "that each was started with a unique --process_id and the same --num_processes, or "
            "increase --coordinator_timeout",
            1,
        ),
    )
    startup_timer.daemon = True
    startup_timer.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            local_device_ids=processes.devices,
            # All values are already known, so jax need not detect the cluster. On Kubernetes, it
            # would require the package `kubernetes`, and ask the API server for the local devices,
            # which the server does not know.
            cluster_detection_method="deactivate" if KUBERNETES_VARIABLE in os.environ else None,
            initialization_timeout=2 * limit + 60,
            heartbeat_timeout_seconds=processes.heartbeat_timeout,
            shutdown_timeout_seconds=max(60, processes.heartbeat_timeout),
        )
    except Exception as error:
        raise HfseqError(
            f"process {number} cannot join the run at {address} ({first_line(error)}): check "
            f"whether the port is in use, and whether another process has --process_id {number}"
        ) from error
    finally:
        startup_timer.cancel()
    if number:
        # Log on process 0 only.
        logging.getLogger("hfseq").setLevel(logging.ERROR)
    logger.info("process %d of %d, coordinator %s", number, count, address)


def resolve_cluster(processes: ProcessArguments) -> tuple[str, int, int]:
    """Determines the processes of the run from the flags, the environment or the cluster.

    Returns:
        The address of the coordinator, the number of processes, and the index of this process.

    Raises:
        UsageError: Flags are missing or invalid.
        HfseqError: The cluster could not be queried.
    """
    values: list[Any] = [
        processes.address,
        processes.get_number("num_processes"),
        processes.get_number("process_id"),
    ]
    if None in values:
        from jax._src.clusters import ClusterEnv

        try:
            values = list(
                ClusterEnv.auto_detect_unset_distributed_params(
                    coordinator_address=values[0],
                    num_processes=values[1],
                    process_id=values[2],
                    local_device_ids=processes.devices,
                    cluster_detection_method=None,
                    initialization_timeout=processes.coordinator_timeout,
                )
            )
        except Exception as error:  # the types depend on the cluster
            raise HfseqError(
                f"--distributed: cannot detect the processes ({first_line(error)}): use "
                "--coordinator_address, --num_processes and --process_id"
            ) from error
    flags = ("--coordinator_address", "--num_processes", "--process_id")
    missing = [flag for flag, value in zip(flags, values, strict=False) if value is None]
    if missing:
        hint = "Slurm, Open MPI or a Kubernetes JobSet was not detected"
        if KUBERNETES_VARIABLE in os.environ:
            hint = (
                "set COORDINATOR_ADDRESS and NUM_PROCESSES in the manifest (as "
                "scripts/launch/jobset.yaml does), or install the package kubernetes"
            )
        raise UsageError(
            f"runs with several processes require {', '.join(missing)}: {hint} (for a run with one "
            "process, drop all flags for distributed training, and remove COORDINATOR_ADDRESS from "
            "the environment)"
        )
    address, count, number = str(values[0]), int(values[1]), int(values[2])
    if number >= count:
        raise UsageError(
            f"--process_id {number} is too large: with --num_processes {count}, use 0 to "
            f"{count - 1}"
        )
    return address, count, number


def check_port(address: str) -> None:
    """Checks that process 0 can listen on the port of the coordinator.

    gRPC would silently share a port with the coordinator of another run.

    Raises:
        HfseqError: The port is in use.
    """
    # With this variable, the coordinator only listens on one interface, so the check below, which
    # listens on all interfaces, does not apply.
    if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
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
                    f"port {port} of --coordinator_address {address} is in use on this machine, so "
                    "process 0 cannot listen on it: use a free port in all processes, and check "
                    "whether an earlier run is still active"
                ) from error


def _await_coordinator(address: str, limit: float) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(limit, 5)).close()
            return
        except OSError as error:
            if time.monotonic() + 0.5 > end:
                raise HfseqError(
                    f"the coordinator at {address} did not answer within {limit:g} s "
                    f"({error.strerror or error}): start process 0, check that "
                    "--coordinator_address is the same everywhere and that its port is reachable "
                    "from this machine, or increase --coordinator_timeout"
                ) from error
        time.sleep(0.5)


def barrier() -> None:
    """Waits until all processes have called this function."""
    if (client := coordination_client()) is not None:
        client.wait_at_barrier(f"hfseq/barrier/{next(_rounds)}", NO_TIMEOUT)


@contextlib.contextmanager
def main_process_first() -> Iterator[bool]:
    """Runs the body in process 0 first, and then in the other processes.

    Yields:
        Whether this is process 0.
    """
    leads = process_index() == 0
    if not leads:
        barrier()
    yield leads
    if leads:
        barrier()


def open_connections(mesh: Mesh) -> None:
    """Opens the connections between the devices of a CPU mesh, in all processes at the same time.

    gloo connects the devices of a group when they communicate for the first time. This fails if a
    process arrives more than 30 seconds after another one, for instance because it compiles a
    program or writes files. Later communication has no such timeout.
    """
    if coordination_client() is None or jax.default_backend() != "cpu":
        return
    axes = [name for name, size in mesh.shape.items() if size > 1]
    groups = [g for n in range(1, len(axes) + 1) for g in itertools.combinations(axes, n)]

    def meet(x: jax.Array) -> jax.Array:
        for group in groups:
            x = x + jax.lax.psum(x, group)
        return x

    everywhere = jax.sharding.PartitionSpec()
    meeting = jax.jit(jax.shard_map(meet, mesh=mesh, in_specs=everywhere, out_specs=everywhere))
    barrier()
    with _without_gloo_lines():
        jax.block_until_ready(meeting(np.zeros((), np.float32)))


@contextlib.contextmanager
def _without_gloo_lines() -> Iterator[None]:
    """Removes the lines that gloo prints for each connection from the standard output.

    gloo is C++ code, so the output is redirected for the whole process.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile() as redirected:
        original = os.dup(1)
        os.dup2(redirected.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(original, 1)
            os.close(original)
            redirected.seek(0)
            for line in redirected:
                if not line.startswith(b"[Gloo]"):
                    os.write(1, line)


# -- agreement


def check_flags_agree(
    flags: Mapping[str, object], objective: str, plugin_files: Sequence[str] = ()
) -> None:
    """Checks that all processes have the same flags, objective, code and versions.

    The flags in `MACHINE_FLAGS`, which describe a machine, may differ.

    Args:
        flags: The flags by name.
        objective: Name of the objective.
        plugin_files: The files of `--plugin`.

    Raises:
        UsageError: A value differs between the processes.
    """
    if coordination_client() is None:
        return
    values = {f"--{name}": value for name, value in flags.items() if name not in MACHINE_FLAGS}
    versions = {f"the version of {name}": metadata.version(name) for name in ("hfseq", "jax")}
    counts = {"--num_processes": process_count(), "the objective": objective}
    agreed_values = values | versions | program_digests(plugin_files) | counts
    check_agreement(agreed_values, "use the same flags and the same code in all processes")


def check_agreement(values: Mapping[str, object], advice: str) -> None:
    """Checks that values are the same in all processes.

    Args:
        values: The values by name.
        advice: How to fix a difference, for the error message.

    Raises:
        UsageError: A value differs between the processes. All processes raise the error.
    """
    if (client := coordination_client()) is None:
        return
    own_values = {name: json.dumps(value, default=str) for name, value in values.items()}
    problems = _combine(client, f"hfseq/agree/{next(_rounds)}", own_values, differences)
    if problems:
        raise UsageError(f"the processes disagree: {'; '.join(problems)}: {advice}")


def exchange(value: Any) -> list[Any]:
    """Sends a JSON value to all processes.

    Returns:
        The values of all processes, in the order of the processes.
    """
    if (client := coordination_client()) is None:
        return [value]
    return _combine(client, f"hfseq/exchange/{next(_rounds)}", value, list)


class SharedMaximum:
    """Computes the maximum of numbers over all processes.

    Each process may call the object in a background thread. All processes must create the object
    and call it the same number of times, with the same names in each call.
    """

    def __init__(self) -> None:
        self._folder, self._round = f"hfseq/maximum/{next(_rounds)}", 0
        self._closed = threading.Event()

    def __call__(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Returns the largest number of each name in any process.

        Args:
            numbers: The numbers of this process by name.

        Raises:
            CancelledError: `close` was called while this process waited for another one.
        """
        client = coordination_client()
        if client is None or not numbers:
            return dict(numbers)
        folder = f"{self._folder}/{self._round}"
        maximum = _combine(client, folder, dict(numbers), _largest, self._wait)
        # All processes have started this round, so they have read the result of the previous round.
        if self._round and process_index() == 0:
            client.key_value_delete(f"{self._folder}/{self._round - 1}/")
        self._round += 1
        return maximum

    def _wait(self, client: Any, key: str) -> str:
        while not self._closed.is_set():
            try:
                return client.blocking_key_value_get(key, 200)  # milliseconds
            except Exception:  # a timeout, or the loss of the store, which jax itself reports
                self._closed.wait(0.01)
        raise CancelledError

    def close(self) -> None:
        """Cancels the calls that are waiting for other processes."""
        self._closed.set()


def _largest(values: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: max(value[name] for value in values) for name in values[0]}


def _wait_for(client: Any, key: str) -> str:
    return client.blocking_key_value_get(key, NO_TIMEOUT)


def _combine(
    client: Any,
    folder: str,
    value: Any,
    combine: Callable[[list[Any]], Any],
    wait: Callable[[Any, str], str] = _wait_for,
) -> Any:
    """Combines a JSON value of each process to one result, in process 0.

    Args:
        client: The client of the coordinator.
        folder: Unique prefix of the keys in the key-value store.
        value: The value of this process.
        combine: Function of the list of values, in the order of the processes, that returns the
            result.
        wait: Function that waits until a key exists, and returns its value.

    Returns:
        The result, in all processes.
    """
    if number := process_index():
        client.key_value_set(f"{folder}/{number}", json.dumps(value), False)
        return json.loads(wait(client, f"{folder}/result"))
    keys = [f"{folder}/{number}" for number in range(1, process_count())]
    result = combine([value, *(json.loads(wait(client, key)) for key in keys)])
    client.key_value_set(f"{folder}/result", json.dumps(result), False)
    return result


def differences(values: Sequence[Mapping[str, str]]) -> list[str]:
    """Describes how the values of other processes differ from those of process 0.

    Each name is reported once, for the first process whose value differs.

    Args:
        values: The values of all processes by name.
    """
    messages: dict[str, str] = {}
    for number, others in enumerate(values):
        for name in [*values[0], *others]:
            mine, other = values[0].get(name, "absent"), others.get(name, "absent")
            if mine != other:
                text = f"{name} is {mine} in process 0 and {other} in process {number}"
                messages.setdefault(name, text)
    return [messages[name] for name in sorted(messages)]


def program_digests(plugin_files: Sequence[str] = ()) -> dict[str, str]:
    """Returns a digest of the code of each part of the program.

    The parts are hfseq, its model families, the installed plugins, the plugin files and the script.
    The script is only included if it is a `.py` file, because entry points in `bin` depend on the
    machine. The code is read but not imported. Missing files are ignored.

    Returns:
        The digests by the name of the part in error messages, such as "the code of hfseq".
    """
    points = metadata.entry_points(group="hfseq")
    digests = {}
    for name in (
        "hfseq",
        manager.FAMILIES,
        *(point.value.partition(":")[0].partition(".")[0] for point in points),
    ):
        digest, spec = "absent", importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            roots = map(Path, spec.submodule_search_locations)
            digest = " ".join(files_digest(root, root.rglob("*.py")) for root in roots)
        elif spec is not None:
            file = Path(spec.origin or "")
            digest = files_digest(file.parent, [file])
        digests[f"the code of {name}"] = digest
    files = [Path(sys.argv[0]), *manager.plugin_files(), *map(Path, plugin_files)]
    for path in files:
        if path.suffix == ".py" and path.is_file():
            digests[f"the code of {path.name}"] = files_digest(path.parent, [path])
    return digests


def files_digest(root: Path, files: Iterable[Path]) -> str:
    """Returns a digest of the paths of files relative to `root`, and of their contents."""
    digest = blake2b(digest_size=6)
    for file in sorted(files):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def check_writable(folder: Path) -> None:
    """Checks that files can be created in the output directory and its checkpoint directory.

    If a directory does not exist yet, its closest existing parent directory is checked.

    Raises:
        UsageError: The directory cannot be written.
    """
    for target in (folder, folder / hub.CHECKPOINT_DIR):
        existing = next(path for path in (target, *target.absolute().parents) if path.exists())
        try:
            if existing.is_dir():
                tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            raise UsageError(
                f"--output_dir {folder} cannot be written on {socket.gethostname()} "
                f"({error.strerror}: {existing}): checkpoints and the model are saved there. Mount "
                "the volume as writable, or use another directory"
            ) from error


def check_shared(folder: Path) -> None:
    """Checks that the output directory is the same in all processes.

    Process 0 writes a temporary file, and the other processes check that they can read it.

    Raises:
        UsageError: The directory of this process is not the directory of process 0.
    """
    if (client := coordination_client()) is None:
        return
    key, path = f"hfseq/mark/{next(_rounds)}", folder / MARKER_FILE
    leads = process_index() == 0
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text := f"{os.getpid()} {time.time_ns()}")
        client.key_value_set(key, text, False)
    expected = client.blocking_key_value_get(key, NO_TIMEOUT)

    def is_there() -> bool:
        try:
            os.listdir(folder)  # makes NFS refresh its cache
            return path.read_text() == expected
        except OSError:
            return False

    if not _poll(is_there, FILE_VISIBILITY_SECONDS):
        raise UsageError(
            f"--output_dir {folder} on {socket.gethostname()} is not the folder that process 0 "
            "writes: all processes write checkpoints, so use a directory on a file system that all "
            "machines share"
        )
    barrier()
    if leads:
        path.unlink(missing_ok=True)


# -- shutdown


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Context manager that ends all processes if an exception is raised in one of them.

    If this process fails because another process has ended, the error of the other process is
    raised instead, provided that the other process has reported it.
    """
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_INTERVAL):
            failure = _read(FAILURE_KEY)
            if failure and not finished.is_set():
                _note_leaving()
                exit_now(**json.loads(failure))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except SystemExit:  # raised in all processes
        raise
    except BaseException as error:
        finished.set()
        process_name = f"process {process_index()} on {socket.gethostname()}"
        failure: dict[str, Any] = {
            "text": f"{process_name}: {first_line(error)}",
            "code": getattr(error, "exit_code", 1),
        }
        words = str(error).lower()
        connection_lost = (
            isinstance(error, RuntimeError | ValueError)
            and not isinstance(error, HfseqError)
            and any(word in words for word in ("gloo", "nccl", "coordination", "closed by peer"))
        )
        if connection_lost:
            text = (
                "the connection to another process was lost, and that process reported no error "
                "(was it killed, or out of memory?): check its log. The error of jax is: "
                f"{first_line(error)}"
            )
            reported = _poll(lambda: _read(FAILURE_KEY), LOST_CONNECTION_SECONDS)
            failure = json.loads(reported) if reported else {"text": text, "code": 1}
        # Reporting the error fails if another process has already reported one, or if the store is
        # lost.
        with contextlib.suppress(Exception):
            coordination_client().key_value_set(FAILURE_KEY, json.dumps(failure), False)
        _note_leaving()
        if process_index() == 0:  # the store ends with this process
            leaving = [f"{LEAVING_KEY}/{number}" for number in range(process_count())]
            _poll(lambda: all(map(_read, leaving)), SHUTDOWN_SECONDS)
        atexit.register(_leave, failure["code"])
        if connection_lost:
            raise HfseqError(failure["text"]) from error
        raise
    finally:
        finished.set()


def _note_leaving() -> None:
    with contextlib.suppress(Exception):
        coordination_client().key_value_set(f"{LEAVING_KEY}/{process_index()}", "1", True)


def _leave(code: int) -> None:
    """Exits without jax's exit handler, which would wait for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_now(text: str, code: int) -> None:
    """Ends this process from a thread, even if the main thread is blocked."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    _leave(code)


def reached_stop_step(step: int) -> bool:
    """Returns whether all processes must stop at `step`, because one of them received SIGTERM."""
    if coordination_client() is None:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


class StopSignal:
    """Context manager that handles SIGTERM and SIGINT, so that the run can stop after a step.

    With several processes, a signal to one of them stops all of them after the same step. jax's
    preemption service handles SIGTERM and determines this step. `received` is set after this step.

    Attributes:
        received: The number of the received signal, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._together = process_count() > 1
        self._interrupted = self._at_once = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(ValueError):  # outside of the main thread, the caller handles them
            for number in numbers:
                self._old[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def should_stop_after(self, step: int) -> bool:
        """Returns whether to stop after `step`. Must be called after each step."""
        if self._together and not self.received and reached_stop_step(step):
            self.received = signal.SIGINT if self._interrupted else signal.SIGTERM
            logger.warning("received a signal: all processes save and stop at step %d", step)
        return bool(self.received)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context manager in which the next signal sets `received` and raises KeyboardInterrupt."""
        terminate = None
        # Replace jax's handler, because the processes no longer need to stop at the same step.
        if self._together and self._old:
            terminate = signal.signal(signal.SIGTERM, self._catch)
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False
            if terminate is not None:
                signal.signal(signal.SIGTERM, terminate)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self._at_once:
            self.received = number
            raise KeyboardInterrupt
        if (self.received or self._interrupted) and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        logger.warning(
            "%s received: saving after this step (press Ctrl-C again to exit at once)", name
        )
        if self._together:
            self._interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)  # jax handles it and notifies the other processes
        else:
            self.received = number
