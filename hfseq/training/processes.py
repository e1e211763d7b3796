"""Several processes: a session in which they start together, agree, and end together.

Every call here is nothing where there is one process. With several, all of them make the same
calls in the same order.
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

FOREVER = 7 * 24 * 3600 * 1000  # milliseconds; dead processes are found by their heartbeats


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


def detect(processes: ProcessArguments) -> list[Any]:
    """Return address, count and number; a cluster that jax knows fills in what was not said."""
    from jax._src.clusters import ClusterEnv

    found = ClusterEnv.auto_detect_unset_distributed_params(
        coordinator_address=processes.address, num_processes=processes.count,
        process_id=processes.number, local_device_ids=processes.devices,
        cluster_detection_method=None, initialization_timeout=processes.coordinator_timeout,
    )  # fmt: skip
    return list(found[:3])


def write(key: str, value: str, overwrite: bool = False) -> None:
    """Put a value (not empty) into the store; without ``overwrite`` a second one is an error."""
    coordination_client().key_value_set(key, value, overwrite)


def wait_for(key: str) -> str:
    """Return a value when some process has written it."""
    return coordination_client().blocking_key_value_get(key, FOREVER)


def read(key: str) -> str:
    """Return a value, or an empty text: not there, or no store any more (jax reports that)."""
    try:
        return coordination_client().key_value_try_get(key)
    except Exception:
        return ""


def count(folder: str) -> int:
    """Return how many keys begin with ``folder``."""
    try:
        return len(coordination_client().key_value_dir_get(folder))
    except Exception:
        return 0


def poll(ready: Callable[[], Any], seconds: float) -> Any:
    """Return the first true ``ready()`` within so many seconds, or its last value."""
    end = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


FAILURE, LEAVING = "hfseq/failure", "hfseq/leaving"


INTERVAL = 1.0  # seconds between two looks for another process's error


# Together less than half of the shortest --heartbeat_timeout, after which jax aborts.
LEAVE_TIME = 3.0  # seconds that an ending coordinator gives the others to read why


LOST_TIME = 1.0  # seconds in which a process that ended will have said why


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Run the body; an exception in any process ends it in all of them.

    Raises:
        HfseqError: the connection to another process broke; with that process's error, if it had
            time to tell it.
    """
    done = threading.Event()
    threading.Thread(target=_watch, args=(done,), daemon=True).start()
    try:
        yield
    except SystemExit:  # of all processes
        raise
    except BaseException as error:
        done.set()
        text, code = _reason(error)
        _tell(text, code)
        atexit.register(_leave, code)
        if _is_lost_connection(error):
            raise HfseqError(text) from error
        raise
    finally:
        done.set()


def _watch(done: threading.Event) -> None:
    while not done.wait(INTERVAL):
        failure = read(FAILURE)
        if failure and not done.is_set():
            _note_leaving()
            end_now(**json.loads(failure))


def _reason(error: BaseException) -> tuple[str, int]:
    """Return what the others are to read, and the exit code of all."""
    if _is_lost_connection(error):
        told = poll(lambda: read(FAILURE), LOST_TIME)
        if told:
            known = json.loads(told)
            return known["text"], known["code"]
        return (
            "the connection to another process was lost, which does not say why (killed? out of "
            f"memory?): see its log. jax: {first_line(error)}", 1,
        )  # fmt: skip
    who = f"process {process_index()} on {socket.gethostname()}"
    return f"{who}: {first_line(error)}", getattr(error, "exit_code", 1)


def _tell(text: str, code: int) -> None:
    with contextlib.suppress(Exception):  # the first error counts, and the store may be gone
        write(FAILURE, json.dumps({"text": text, "code": code}))
    _note_leaving()
    if process_index() == 0:  # the store goes with this process
        everyone = process_count()
        poll(lambda: count(LEAVING) >= everyone, LEAVE_TIME)


def _note_leaving() -> None:
    with contextlib.suppress(Exception):
        write(f"{LEAVING}/{process_index()}", "1", overwrite=True)


def _leave(code: int) -> None:
    """Leave at exit, but not by jax's way out, where this process would wait for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_now(text: str, code: int) -> None:
    """End this process from a thread, whatever the main thread waits for."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    _leave(code)


def _is_lost_connection(error: BaseException) -> bool:
    if isinstance(error, HfseqError) or not isinstance(error, RuntimeError | ValueError):
        return False
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "coordination", "closed by peer"))


def of_program(plugin_files: Sequence[str] = ()) -> dict[str, str]:
    """Return a digest of each part of the program, named as a message calls it.

    The parts are hfseq, installed plugins, the script (a ``.py`` file; what pip writes into
    ``bin`` names its machine), and the given plugin files with a project's ``hfseqfile.py``.
    Nothing is imported for it; a file that is not there is left out.
    """
    groups = metadata.entry_points(group="hfseq")
    packages = {"hfseq", *(point.value.partition(":")[0].partition(".")[0] for point in groups)}
    found = {f"the code of {name}": _of_package(name) for name in packages}
    for path in map(Path, (sys.argv[0], "hfseqfile.py", *plugin_files)):
        if path.suffix == ".py" and path.is_file():
            found[f"the code of {path.name}"] = of_files(path.parent, [path])
    return found


def of_files(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of names, relative to ``root``, and contents."""
    digest = blake2b(digest_size=6)
    for file in sorted(files):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _of_package(name: str) -> str:
    found = importlib.util.find_spec(name)
    if found is None:
        return "absent"
    if not found.submodule_search_locations:
        return of_files(Path(found.origin or "").parent, [Path(found.origin or "")])
    roots = [Path(root) for root in found.submodule_search_locations]
    return " ".join(of_files(root, root.rglob("*.py")) for root in roots)


IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # set in every pod


def join(processes: ProcessArguments) -> None:
    """Meet the other processes, if there are any; call it before jax looks at its devices.

    Raises:
        UsageError: something needed is neither given nor detected.
        HfseqError: the coordinator does not answer, or cannot listen.
    """
    if not processes.several or coordination_client() is not None:
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
            found = detect(processes)
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
            end_now(text, 1)

    def over(self) -> None:
        """Stop waiting."""
        self._met.set()


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
    join(processes)
    if coordination_client() is None:
        yield
        return
    with shared():
        try:
            yield
        except SystemExit:  # agreed on, see `survival`
            wait()
            raise
        wait()


def wait() -> None:
    """Return when every process has come here."""
    if (client := coordination_client()) is not None:
        client.wait_at_barrier(f"hfseq/barrier/{next(_rounds)}", FOREVER)


@contextlib.contextmanager
def first() -> Iterator[bool]:
    """Run the body in process 0 first, for which it yields True, then in the others."""
    leads = process_index() == 0
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
    wait()
    jax.block_until_ready(meeting(np.zeros((), np.float32)))


def agree_on_flags(
    flags: Mapping[str, object], objective: str, plugin_files: Sequence[str] = ()
) -> None:
    """Compare flags, objective, code and versions; what belongs to a machine may differ."""
    if coordination_client() is None:
        return
    values = {f"--{name}": value for name, value in flags.items() if name not in OWN_FLAGS}
    versions = {f"the version of {name}": metadata.version(name) for name in ("hfseq", "jax")}
    counts = {"--num_processes": process_count(), "the objective": objective}
    facts = values | versions | of_program(plugin_files) | counts
    agree(facts, "give all of them the same flags and the same code")


def agree(facts: Mapping[str, object], advice: str) -> None:
    """Compare what should be the same in every process.

    Raises:
        UsageError: in all of them, with the names, the values and the processes that differ.
    """
    if coordination_client() is None:
        return
    folder, me = f"hfseq/agree/{next(_rounds)}", process_index()
    own = {name: json.dumps(value, default=str) for name, value in facts.items()}
    write(f"{folder}/facts/{me}", json.dumps(own))
    if me == 0:
        theirs = {
            number: json.loads(wait_for(f"{folder}/facts/{number}"))
            for number in range(1, process_count())
        }
        write(f"{folder}/verdict", json.dumps(differences(own, theirs)))
    if problems := json.loads(wait_for(f"{folder}/verdict")):
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
    if coordination_client() is None:
        return
    key, path = f"hfseq/mark/{next(_rounds)}", folder / MARK
    leads = process_index() == 0
    if leads:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text := f"{os.getpid()} {time.time_ns()}")
        write(key, text)
    wanted = wait_for(key)
    if not poll(lambda: _text(path) == wanted, VISIBLE):
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
        self._interrupted = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT,) if self._together else (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            try:
                self._old[number] = signal.signal(number, self._catch)
            except ValueError:  # not in the main thread: the caller has the signals
                break
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def after(self, step: int) -> bool:
        """Return whether to stop now that ``step`` is done; call it after every step."""
        if self._together and not self.received and agreed_to_stop(step):
            self.received = signal.SIGINT if self._interrupted else signal.SIGTERM
            logger.warning("a signal was received: all processes save and stop at step %d", step)
        return bool(self.received)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if (self.received or self._interrupted) and number == signal.SIGINT:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        logger.warning("%s received: saving after this step (Ctrl-C again leaves at once)", name)
        if self._together:
            self._interrupted = True
            os.kill(os.getpid(), signal.SIGTERM)  # to jax, which tells the others
        else:
            self.received = number
