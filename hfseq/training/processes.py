"""Several processes: a session in which they meet, agree, and end together.

Every call here is nothing where there is one process. With several, all of them make the same
calls in the same order. They speak through the key-value store of jax's coordinator, which is there
before any device is.
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
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from hfseq.errors import HfseqError, UsageError, first_line
from hfseq.training.arguments import ProcessArguments

logger = logging.getLogger(__name__)

NO_TIMEOUT = 7 * 24 * 3600 * 1000  # milliseconds; dead processes are found by their heartbeats
POLL_INTERVAL = 1.0  # seconds between two looks for another process's error
# Together less than half of the shortest --heartbeat_timeout, after which jax aborts.
SHUTDOWN_SECONDS = 3.0  # seconds that an ending coordinator gives the others to read why
LOST_CONNECTION_SECONDS = 1.0  # seconds in which a process that ended will have said why
FILE_VISIBILITY_SECONDS = (
    30.0  # seconds in which a network file system shows a new file on other machines
)
FAILURE_KEY, LEAVING_KEY = "hfseq/failure", "hfseq/leaving"
MARKER_FILE = ".hfseq-processes"
KUBERNETES_VARIABLE = "KUBERNETES_SERVICE_HOST"  # set in every pod
# Flags of a machine or a process, not of the run.
MACHINE_FLAGS = (
    *("cache_dir", "data_cache_dir", "compilation_cache_dir", "preprocessing_num_workers"),
    *("disable_tqdm", "debug"),
)
_rounds = itertools.count()


@contextlib.contextmanager
def session(processes: ProcessArguments) -> Iterator[None]:
    """Run the body in all processes that the flags speak of; they end together, well or not."""
    join(processes)
    if coordination_client() is None:
        yield
        return
    with fail_together():
        try:
            yield
        except SystemExit:  # agreed on, see `StopSignal`
            barrier()
            raise
        barrier()


def _state() -> Any:
    from jax._src.distributed import global_state

    return global_state


def coordination_client() -> Any:
    """Return jax's client of the coordinator, or None where there is one process."""
    return _state().client


def process_index() -> int:
    """Return the number of this process, without starting jax's devices."""
    return _state().process_id


def process_count() -> int:
    """Return how many processes there are, without starting jax's devices."""
    return _state().num_processes


def _read(key: str) -> str:
    """Return a value, or an empty text: not there, or no store any more (jax reports that)."""
    try:
        return coordination_client().key_value_try_get(key)
    except Exception:
        return ""


def _poll(ready: Callable[[], Any], seconds: float) -> Any:
    """Return the first true ``ready()`` within so many seconds, or its last value."""
    end = time.monotonic() + seconds
    while not (value := ready()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


# -- to meet


def join(processes: ProcessArguments) -> None:
    """Meet the other processes, if there are any; call it before jax looks at its devices."""
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
    # jax's call cannot be broken off, and would abort the process with a stack trace.
    late = threading.Timer(
        max(started + limit - time.monotonic(), 1.0),
        exit_now,
        (
            f"not all {count} processes had come to the coordinator at {address} in time: see "
            "that each was started, with its own --process_id and the same --num_processes, or "
            "give more time with --coordinator_timeout",
            1,
        ),
    )
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            number,
            local_device_ids=processes.devices,
            # All that is known is known: jax would ask for the package `kubernetes`, and with it
            # the API server, for the numbers of local devices, which neither has.
            cluster_detection_method="deactivate" if KUBERNETES_VARIABLE in os.environ else None,
            initialization_timeout=2 * limit + 60,
            heartbeat_timeout_seconds=processes.heartbeat_timeout,
            shutdown_timeout_seconds=max(60, processes.heartbeat_timeout),
        )
    except Exception as error:
        raise HfseqError(
            f"process {number} cannot take part in the run at {address} ({first_line(error)}): "
            f"is the port in use, or another process {number} there?"
        ) from error
    finally:
        late.cancel()
    if number:
        # What all of them have to say, process 0 says.
        logging.getLogger("hfseq").setLevel(logging.ERROR)
    logger.info("process %d of %d, coordinator %s", number, count, address)


def resolve_cluster(processes: ProcessArguments) -> tuple[str, int, int]:
    """Return the coordinator's address, how many processes there are, and which this one is."""
    known: list[Any] = [
        processes.address,
        processes.get_number("num_processes"),
        processes.get_number("process_id"),
    ]
    if None in known:
        from jax._src.clusters import ClusterEnv

        try:
            known = list(
                ClusterEnv.auto_detect_unset_distributed_params(
                    coordinator_address=known[0],
                    num_processes=known[1],
                    process_id=known[2],
                    local_device_ids=processes.devices,
                    cluster_detection_method=None,
                    initialization_timeout=processes.coordinator_timeout,
                )
            )
        except Exception as error:  # each cluster has errors of its own
            raise HfseqError(
                f"--distributed: the cluster does not say who is there ({first_line(error)}): give "
                "--coordinator_address, --num_processes and --process_id"
            ) from error
    flags = ("--coordinator_address", "--num_processes", "--process_id")
    absent = [flag for flag, value in zip(flags, known, strict=False) if value is None]
    if absent:
        nobody = "none of Slurm, Open MPI and Kubernetes JobSet is there to detect them from"
        if KUBERNETES_VARIABLE in os.environ:
            nobody = (
                "set COORDINATOR_ADDRESS and NUM_PROCESSES in the manifest (as "
                "scripts/launch/jobset.yaml does), or install the package kubernetes"
            )
        raise UsageError(
            f"several processes need {', '.join(absent)}: {nobody} (for one process drop the other "
            "flags, and COORDINATOR_ADDRESS from the environment)"
        )
    address, count, number = str(known[0]), int(known[1]), int(known[2])
    if number >= count:
        raise UsageError(
            f"--process_id {number}: with --num_processes {count} give 0 to {count - 1}"
        )
    return address, count, number


def check_port(address: str) -> None:
    """See that process 0 can listen; gRPC would share the port with another run's coordinator."""
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
                    f"({error.strerror or error}): start process 0, see that "
                    "--coordinator_address is the same everywhere and its port open to this "
                    "machine, or give more time with --coordinator_timeout"
                ) from error
        time.sleep(0.5)


def barrier() -> None:
    """Return when every process has come here."""
    if (client := coordination_client()) is not None:
        client.wait_at_barrier(f"hfseq/barrier/{next(_rounds)}", NO_TIMEOUT)


@contextlib.contextmanager
def main_process_first() -> Iterator[bool]:
    """Run the body in process 0 first, for which it yields True, then in the others."""
    leads = process_index() == 0
    if not leads:
        barrier()
    yield leads
    if leads:
        barrier()


def open_connections(mesh: Mesh) -> None:
    """Open the connections between the devices of a CPU mesh, in all processes at once.

    gloo opens them where a group of devices first meets and gives the partners 30 seconds, which
    compiling or writing files takes easily; what comes later may take its time.
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
    jax.block_until_ready(meeting(np.zeros((), np.float32)))


# -- to agree


def check_flags_agree(
    flags: Mapping[str, object], objective: str, plugin_files: Sequence[str] = ()
) -> None:
    """Compare flags, objective, code and versions; what belongs to a machine may differ."""
    if coordination_client() is None:
        return
    values = {f"--{name}": value for name, value in flags.items() if name not in MACHINE_FLAGS}
    versions = {f"the version of {name}": metadata.version(name) for name in ("hfseq", "jax")}
    counts = {"--num_processes": process_count(), "the objective": objective}
    facts = values | versions | program_digests(plugin_files) | counts
    check_agreement(facts, "give all of them the same flags and the same code")


def check_agreement(facts: Mapping[str, object], advice: str) -> None:
    """Compare what should be the same in every process; what differs is an error in all of them."""
    if (client := coordination_client()) is None:
        return
    folder, me = f"hfseq/agree/{next(_rounds)}", process_index()
    own = {name: json.dumps(value, default=str) for name, value in facts.items()}
    client.key_value_set(f"{folder}/facts/{me}", json.dumps(own), False)
    if me == 0:
        theirs = {
            number: json.loads(
                client.blocking_key_value_get(f"{folder}/facts/{number}", NO_TIMEOUT)
            )
            for number in range(1, process_count())
        }
        client.key_value_set(f"{folder}/verdict", json.dumps(differences(own, theirs)), False)
    if problems := json.loads(client.blocking_key_value_get(f"{folder}/verdict", NO_TIMEOUT)):
        raise UsageError(f"the processes disagree: {'; '.join(problems)}: {advice}")


def differences(own: dict[str, str], theirs: dict[int, dict[str, str]]) -> list[str]:
    """Say how the facts of other processes differ from those of process 0, a fact once."""
    told: dict[str, str] = {}
    for number, facts in theirs.items():
        for name in own | facts:
            mine, other = own.get(name, "absent"), facts.get(name, "absent")
            if mine != other:
                text = f"{name} is {mine} in process 0 and {other} in process {number}"
                told.setdefault(name, text)
    return [told[name] for name in sorted(told)]


def program_digests(plugin_files: Sequence[str] = ()) -> dict[str, str]:
    """Return a digest of each part of the program, named as a message calls it.

    The parts are hfseq, installed plugins, the script (a ``.py`` file; what pip writes into
    ``bin`` names its machine), and the given plugin files with a project's ``hfseqfile.py``.
    Nothing is imported for it; a file that is not there is left out.
    """
    points = metadata.entry_points(group="hfseq")
    digests = {}
    for name in ("hfseq", *(point.value.partition(":")[0].partition(".")[0] for point in points)):
        digest, spec = "absent", importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            roots = map(Path, spec.submodule_search_locations)
            digest = " ".join(files_digest(root, root.rglob("*.py")) for root in roots)
        elif spec is not None:
            file = Path(spec.origin or "")
            digest = files_digest(file.parent, [file])
        digests[f"the code of {name}"] = digest
    for path in map(Path, (sys.argv[0], "hfseqfile.py", *plugin_files)):
        if path.suffix == ".py" and path.is_file():
            digests[f"the code of {path.name}"] = files_digest(path.parent, [path])
    return digests


def files_digest(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of names, relative to ``root``, and contents."""
    digest = blake2b(digest_size=6)
    for file in sorted(files):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def check_writable(folder: Path) -> None:
    """See that a file can be made in ``folder``, or where it will be made; none stays there."""
    for wanted in (folder, folder / "checkpoints"):
        present = next(path for path in (wanted, *wanted.absolute().parents) if path.exists())
        try:
            if present.is_dir():
                tempfile.TemporaryFile(dir=present).close()
        except OSError as error:
            raise UsageError(
                f"--output_dir {folder} cannot be written on {socket.gethostname()} "
                f"({error.strerror}: {present}): checkpoints and the model go there, so mount the "
                "volume for writing, or give another directory"
            ) from error


def check_shared(folder: Path) -> None:
    """See that ``folder``, in which process 0 leaves a mark for a moment, is one for all."""
    if (client := coordination_client()) is None:
        return
    key, path = f"hfseq/mark/{next(_rounds)}", folder / MARKER_FILE
    leads = process_index() == 0
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text := f"{os.getpid()} {time.time_ns()}")
        client.key_value_set(key, text, False)
    wanted = client.blocking_key_value_get(key, NO_TIMEOUT)

    def is_there() -> bool:
        try:
            os.listdir(folder)  # makes NFS look again
            return path.read_text() == wanted
        except OSError:
            return False

    if not _poll(is_there, FILE_VISIBILITY_SECONDS):
        raise UsageError(
            f"--output_dir {folder} on {socket.gethostname()} is not the folder that process 0 "
            "writes: checkpoints are written by all processes, so give a directory of a file "
            "system that all machines share"
        )
    barrier()
    if leads:
        path.unlink(missing_ok=True)


# -- to end


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Run the body; an exception in any process ends it in all of them.

    Where the connection to another one broke, that process's error is raised, if it had time to
    tell it.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_INTERVAL):
            failure = _read(FAILURE_KEY)
            if failure and not done.is_set():
                _note_leaving()
                exit_now(**json.loads(failure))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except SystemExit:  # of all processes
        raise
    except BaseException as error:
        done.set()
        who = f"process {process_index()} on {socket.gethostname()}"
        failure: dict[str, Any] = {
            "text": f"{who}: {first_line(error)}",
            "code": getattr(error, "exit_code", 1),
        }
        words = str(error).lower()
        lost = (
            isinstance(error, RuntimeError | ValueError)
            and not isinstance(error, HfseqError)
            and any(word in words for word in ("gloo", "nccl", "coordination", "closed by peer"))
        )
        if lost:
            text = (
                "the connection to another process was lost, which does not say why (killed? out "
                f"of memory?): see its log. jax: {first_line(error)}"
            )
            told = _poll(lambda: _read(FAILURE_KEY), LOST_CONNECTION_SECONDS)
            failure = json.loads(told) if told else {"text": text, "code": 1}
        with contextlib.suppress(Exception):  # the first error counts, and the store may be gone
            coordination_client().key_value_set(FAILURE_KEY, json.dumps(failure), False)
        _note_leaving()
        if process_index() == 0:  # the store goes with this process
            leaving = [f"{LEAVING_KEY}/{number}" for number in range(process_count())]
            _poll(lambda: all(map(_read, leaving)), SHUTDOWN_SECONDS)
        atexit.register(_leave, failure["code"])
        if lost:
            raise HfseqError(failure["text"]) from error
        raise
    finally:
        done.set()


def _note_leaving() -> None:
    with contextlib.suppress(Exception):
        coordination_client().key_value_set(f"{LEAVING_KEY}/{process_index()}", "1", True)


def _leave(code: int) -> None:
    """Leave at exit, but not by jax's way out, where this process would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_now(text: str, code: int) -> None:
    """End this process from a thread, whatever the main thread waits for."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    _leave(code)


def reached_stop_step(step: int) -> bool:
    """Return whether some process got a SIGTERM and ``step`` is where all of them stop."""
    if coordination_client() is None:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


class StopSignal:
    """Catches SIGTERM and SIGINT while in force; ``received`` is the signal's number, or 0.

    Of several processes one signal stops all, after the same step: jax's preemption service, which
    then has SIGTERM to itself, agrees on it, and ``received`` is set when that step is done.
    """

    def __init__(self) -> None:
        self.received = 0
        self._together = process_count() > 1
        self._interrupted = self._at_once = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(ValueError):  # not in the main thread: the caller has the signals
            for number in numbers:
                self._old[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def should_stop_after(self, step: int) -> bool:
        """Return whether to stop now that ``step`` is done; call it after every step."""
        if self._together and not self.received and reached_stop_step(step):
            self.received = signal.SIGINT if self._interrupted else signal.SIGTERM
            logger.warning("a signal was received: all processes save and stop at step %d", step)
        return bool(self.received)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the next signal interrupt the body: KeyboardInterrupt, with ``received`` set."""
        terminate = None
        if self._together and self._old:  # jax has it, and nothing more to agree on
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
        logger.warning("%s received: saving after this step (Ctrl-C again leaves at once)", name)
        if self._together:
            self._interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)  # to jax, which tells the others
        else:
            self.received = number
