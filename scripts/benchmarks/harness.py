"""Runs contestants side by side, each in a process of its own, and writes down what was measured.

A benchmark names its contestants; the harness starts one process for each of a group, so that no
two share threads, memory or an allocator, and lets them step in turn: what disturbs the machine
disturbs all of them alike. It needs the standard library alone; whatever a contestant needs besides
is checked first, and a row whose packages are missing says so.

A contestant's factory is ``"module:function"`` in this folder. Called with its settings in the
contestant's process, it returns a :class:`Running`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "numpy")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
GB = 1e9
#: Folders that are searched for packages behind all others, so that an image's own jax and torch
#: win over the copies there.
EXTRA_PACKAGES = "HFSEQ_BENCHMARK_PACKAGES"


@dataclasses.dataclass(frozen=True, eq=False)
class Contestant:
    """One row: a name, what runs it, and the group whose members step in turn.

    It needs packages (``requires``) and ``programs``, e.g. a compiler.
    """

    name: str
    group: str
    factory: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    programs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return what this contestant needs and this machine lacks."""
        packages = [name for name in self.requires if importlib.util.find_spec(name) is None]
        return packages + [name for name in self.programs if shutil.which(name) is None]


@dataclasses.dataclass
class Running:
    """A contestant at work: ``step`` waits for the device, ``memory`` is the peak in bytes.

    ``close`` removes what it wrote.
    """

    step: Callable[[], dict[str, float]]
    memory: Callable[[], int]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclasses.dataclass
class Row:
    """What one contestant did: seconds of each timed step, or the reason why there are none."""

    name: str
    group: str
    status: str = "ok"
    start_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    values: list[dict[str, float]] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float | None:
        """Median seconds of a step, or ``None`` without any."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """Half of the interquartile range of the seconds, as a share of the median."""
        if len(self.seconds) < 2 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def ratio(row: Row, baseline: Row) -> float | None:
    """How many times faster than ``baseline``: the median over rounds, each within itself."""
    pairs = [b / a for a, b in zip(row.seconds, baseline.seconds, strict=False) if a]
    return statistics.median(pairs) if pairs else None


# -- the parent


class Process:
    """The parent's end of a contestant's process: a command a line down, an answer a line up.

    A contestant that is silent for ``patience`` seconds is ended.
    """

    def __init__(self, contestant: Contestant, threads: int, patience: float | None = None):
        self._patience = patience
        numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        # All contestants of a group are in memory at once: none may take the whole device.
        env = {**os.environ, **numbers, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        env.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, so nothing waits for a network
        env |= contestant.environment
        given = {"factory": contestant.factory, "settings": contestant.settings, "threads": threads}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "harness.py"), json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """Return the next answer; RuntimeError if the contestant failed or is gone."""
        assert self._process.stdout is not None
        with _impatient(self._patience, self._process.kill) as gave_up:
            line = self._process.stdout.readline()
        if gave_up.is_set():
            raise RuntimeError(f"no answer within {self._patience:g} s")
        answer = json.loads(line) if line else {"error": f"exit code {self._process.wait()}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what went wrong is in the answer, or in the exit code
        return self.read()

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _impatient(seconds: float | None, give_up: Callable[[], None]) -> Iterator[threading.Event]:
    """Call ``give_up`` unless the block ends within ``seconds``; yields whether it was called."""
    gave_up = threading.Event()
    if seconds is None:
        yield gave_up
        return

    def over() -> None:
        gave_up.set()
        give_up()

    timer = threading.Timer(seconds, over)
    timer.start()
    try:
        yield gave_up
    finally:
        timer.cancel()


def run(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    warmup: int = 2,
    settle: int = 0,
    threads: int | None = None,
    report: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    patience: float | None = None,
) -> list[Row]:
    """Run each group in turn, its members step by step; returns a row for every contestant.

    Before each timed step come ``settle`` others: caches are then its own, as they are in training.
    One that lacks a package, fails, or is silent for ``patience`` seconds gets a row that says so;
    the others go on. After the first round ``stop`` ends the rounds of a group.
    """
    threads = threads or len(os.sched_getaffinity(0))
    rows = {c: Row(c.name, c.group) for c in contestants}
    for group in dict.fromkeys(c.group for c in contestants):
        members = [c for c in contestants if c.group == group]
        with contextlib.ExitStack() as stack:
            running = dict(_start(members, rows, threads, stack, report, patience))
            for number in range(-warmup, rounds):
                if number > 0 and stop():
                    break
                # Each order as often as the other: no one always follows the same neighbour.
                turns = list(running)[:: 1 if number % 2 else -1]
                for contestant in turns:
                    _turn(contestant, running, rows[contestant], number, settle, report)
            for contestant, process in running.items():
                with _recorded(rows[contestant], report):
                    rows[contestant].peak_bytes = process.ask("memory")["peak_bytes"]
    return list(rows.values())


def _start(
    members: Sequence[Contestant],
    rows: dict[Contestant, Row],
    threads: int,
    stack: contextlib.ExitStack,
    report: Callable[[str], None],
    patience: float | None,
) -> Iterator[tuple[Contestant, Process]]:
    for contestant in members:
        row, lacking = rows[contestant], contestant.missing()
        if lacking:
            row.status = f"not run: no {', '.join(lacking)}"
            continue
        process = Process(contestant, threads, patience)
        stack.callback(process.close)
        started = time.perf_counter()
        with _recorded(row, report):
            row.facts = process.read()["facts"]
            row.start_seconds = time.perf_counter() - started
        if row.status == "ok":
            yield contestant, process


def _turn(
    contestant: Contestant,
    running: dict[Contestant, Process],
    row: Row,
    number: int,
    settle: int,
    report: Callable[[str], None],
) -> None:
    with _recorded(row, report):
        for left in reversed(range(settle + 1)):
            answer = running[contestant].ask("step")
            row.values.append(answer["values"])
            timed = number >= 0 and left == 0
            if timed:
                row.seconds.append(answer["seconds"])
            label = f"round {number}" if timed else "untimed"
            report(f"{label}: {row.name} {answer['seconds']:.3f} s {answer['values']}")
    if row.status != "ok":
        del running[contestant]


@contextlib.contextmanager
def _recorded(row: Row, report: Callable[[str], None]) -> Iterator[None]:
    """Note a failure in the row instead of ending the run."""
    try:
        yield
    except RuntimeError as error:
        row.status, row.seconds = f"failed: {error}", []
        report(f"{row.name} {row.status}")


# -- the contestant's process


def worker(given: dict[str, Any]) -> None:
    """Build a contestant and obey the commands ``step`` and ``memory`` until the input ends.

    A step whose values have ``seconds`` took that long; others are timed from outside.
    """
    # Answers have the pipe to themselves: what libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given["threads"]])
    sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "plugins")]
    sys.path += filter(None, os.environ.get(EXTRA_PACKAGES, "").split(os.pathsep))

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        module, _, name = given["factory"].partition(":")
        running = getattr(importlib.import_module(module), name)(**given["settings"])
        answer({"facts": running.facts})
        for line in sys.stdin:
            if line.strip() == "memory":
                answer({"peak_bytes": running.memory()})
                continue
            started = time.perf_counter()
            values = running.step()
            elapsed = time.perf_counter() - started
            answer({"seconds": values.pop("seconds", elapsed), "values": values})
        running.close()
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]})
        raise


def host_peak_bytes() -> int:
    """Return the most memory this process ever held (VmHWM), its start and compilation included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def jax_peak_bytes() -> int:
    """Return the peak memory of the first jax device, or of this process where it is a CPU."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use") or host_peak_bytes()


def torch_peak_bytes() -> int:
    """Return the peak memory of the CUDA device, or of this process where there is none."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else host_peak_bytes()


# -- the machine


def machine_facts() -> dict[str, Any]:
    """Return what the numbers depend on: processor, cores, its matrix units, memory, versions."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(
        (part.strip() for part in line.split(":", 1)) for line in info.splitlines() if ":" in line
    )
    flags = fields.get("flags", "").split()
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in CPU_FLAGS if flag in flags],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
    }


# -- what is written down


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, numbers to the right."""
    rule = [":---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as readable JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` in ``path``.

    A file without the markers, or no file, gets them at its end. ValueError if only one is there.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text() if path.exists() else ""
    if (start in old) != (end in old):
        raise ValueError(f"{path} has only one of the markers {start} and {end}: add the other")
    block = f"{start}\n\n{text.strip()}\n\n{end}"
    if start in old:
        head, rest = old.split(start, 1)
        new = head + block + rest.split(end, 1)[1]
    else:
        new = (old.rstrip() + "\n\n" if old.strip() else "") + block + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new)


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
    # Taking down thread pools and devices can take seconds, which nobody needs to wait for.
    os._exit(0)
