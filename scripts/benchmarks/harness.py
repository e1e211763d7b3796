"""One way to measure, store and print: the harness of all benchmarks, and the command run.py.

A benchmark names its contestants. One process is started for each of a group, so that no two share
threads, memory or an allocator, and they step in turn: what disturbs the machine disturbs all of
them alike. A contestant's factory is ``"module:function"`` in this folder; called with its settings
in the contestant's process, it returns a :class:`Running`.

What is only listed needs the standard library alone. Whatever a contestant needs besides is checked
first, and a row whose packages are missing says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import timeit
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [p for p in map(str, (HERE, ROOT, ROOT / "plugins")) if p not in sys.path]

DOCS = ROOT / "docs"
VERSIONS = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "numpy")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
#: Units that multiply bfloat16, as /proc/cpuinfo names them: x86 (AVX-512, AMX), then Arm.
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16", "smebf16")
GB = 1e9
#: Folders that are searched for packages behind all others, so that an image's own jax and torch
#: win over the copies there.
EXTRA_PACKAGES = "HFSEQ_BENCHMARK_PACKAGES"
#: The checkout whose hfseq and whose factories a contestant takes, instead of this one's.
CHECKOUT = "HFSEQ_BENCHMARK_CHECKOUT"
#: The suites of run.py, and the file that holds each.
SUITES = {
    "limits": "harness",
    "train": "training",
    "inference": "inference",
    "generation": "inference",
    "data": "data",
    "startup": "checkpoints",
    "checkpoint": "checkpoints",
    "memory": "training",
    "scaling": "training",
    "data_scale": "data",
    "compile": "compiled",
    "pipelines": "pipelines",
}
ALIASES = {"training": "train", "checkpoints": "checkpoint"}


@dataclasses.dataclass(frozen=True, eq=False)
class Contestant:
    """One row: a name, what runs it, and the group whose members step in turn."""

    name: str
    group: str
    factory: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    programs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        packages = [name for name in self.requires if importlib.util.find_spec(name) is None]
        return packages + [name for name in self.programs if shutil.which(name) is None]


@dataclasses.dataclass
class Running:
    """A contestant at work: ``step`` waits for the device, ``memory`` is the peak in bytes."""

    step: Callable[[], dict[str, Any]]
    memory: Callable[[], int]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Removes what it wrote.
    close: Callable[[], None] = lambda: None


@dataclasses.dataclass
class Row:
    """What one contestant did: seconds of each timed step, or the reason why there are none."""

    name: str
    group: str
    status: str = "ok"
    start_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    values: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        if len(self.seconds) < 2 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def ratio(row: Row, baseline: Row) -> float | None:
    """How many times faster than ``baseline``: the median over rounds, each within itself.

    Steps that say how much they did may differ in it: times of as much are compared.
    """
    pairs = [b / a for a, b in zip(row.seconds, baseline.seconds, strict=False) if a]
    work, other = (each.values[-1].get("work") if each.values else None for each in (row, baseline))
    return statistics.median(pairs) * (work / other if work and other else 1.0) if pairs else None


@dataclasses.dataclass(frozen=True)
class Allowance:
    """The seconds that something may take from now on; without end by default."""

    seconds: float = math.inf
    begun: float = dataclasses.field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.begun + self.seconds - time.monotonic()

    @property
    def over(self) -> str:
        return f"the {self.seconds:g} s of the suite were over"


class TimeIsOver(RuntimeError):
    """The allowance ended before an answer came."""


# -- processes


class Process:
    """The parent's end of a contestant's process: a command down the pipe, an answer up.

    One that is silent for ``patience`` seconds, or until the ``allowance`` is used up, is ended.
    """

    def __init__(
        self,
        contestant: Contestant,
        threads: int,
        patience: float | None = None,
        allowance: Allowance | None = None,
    ):
        from unittest import mock  # slow to import, and contestants import this file

        self._patience, self._allowance = patience or math.inf, allowance or Allowance()
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        given = theirs, contestant.factory, contestant.settings, threads
        self._process = spawn.Process(target=worker, args=given)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # All contestants of a group are in memory at once: none may take the whole device.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # Nothing waits for a network.
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        with mock.patch.dict(os.environ, environment | contestant.environment):
            self._process.start()
        theirs.close()

    def read(self, allowance: Allowance | None = None) -> dict[str, Any]:
        """Return the next answer; RuntimeError if the contestant failed, is gone or too slow."""
        allowance = allowance or self._allowance
        left = max(allowance.left(), 0.0)
        wait = min(self._patience, left)
        try:
            if not self._pipe.poll(None if wait == math.inf else wait):
                self._process.kill()
                if left <= self._patience:
                    raise TimeIsOver(allowance.over)
                raise RuntimeError(f"no answer within {self._patience:g} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RuntimeError(f"exit code {self._process.exitcode}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # the answer or the exit code says what is wrong
            self._pipe.send(command)
        return self.read(Allowance() if command == "memory" else None)  # which takes no time

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def run(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    warmup: int = 2,
    settle: int = 0,
    threads: int | None = None,
    report: Callable[[str], None] = lambda line: None,
    patience: float | None = None,
    allowance: Allowance | None = None,
) -> list[Row]:
    """Run each group in turn, its members step by step; returns a row for every contestant.

    Before each timed step come ``settle`` others: caches are then its own, as they are in training.
    One that lacks a package, fails, or is silent for ``patience`` seconds gets a row that says so;
    the others go on. When the ``allowance`` is used up no step begins and those at work are ended:
    a row keeps the rounds before, and one without any says that there was no time.
    """
    threads, allowance = threads or len(os.sched_getaffinity(0)), allowance or Allowance()
    rows = {c: Row(c.name, c.group) for c in contestants}
    running: dict[Contestant, Process] = {}

    @contextlib.contextmanager
    def noting(contestant: Contestant) -> Iterator[None]:
        """Write a failure down in the row, and take the contestant out."""
        try:
            yield
        except RuntimeError as error:
            row = rows[contestant]
            running.pop(contestant, None)
            if not isinstance(error, TimeIsOver):
                row.status, row.seconds = f"failed: {error}", []
            elif not row.seconds:
                row.status = f"not run: {error}"
            report(f"{row.name} {row.status}")

    for group in dict.fromkeys(c.group for c in contestants):
        running.clear()
        with contextlib.ExitStack() as stack:
            for contestant in (c for c in contestants if c.group == group):
                row, lacking = rows[contestant], contestant.missing()
                if lacking or allowance.left() <= 0:
                    why = f"no {', '.join(lacking)}" if lacking else allowance.over
                    row.status = f"not run: {why}"
                    continue
                process = Process(contestant, threads, patience, allowance)
                stack.callback(process.close)
                started = time.perf_counter()
                with noting(contestant):
                    row.facts = process.read()["facts"]
                    row.start_seconds = time.perf_counter() - started
                    running[contestant] = process
            for number in range(-warmup, rounds):
                # Each order as often as the other: no one always follows the same neighbour.
                for contestant in list(running)[:: 1 if number % 2 else -1]:
                    row = rows[contestant]
                    if row.seconds and allowance.left() <= 0:
                        continue
                    with noting(contestant):
                        for left in reversed(range(settle + 1)):
                            answer = running[contestant].ask("step")
                            row.values.append(answer["values"])
                            timed = number >= 0 and left == 0
                            row.seconds += [answer["seconds"]] if timed else []
                            label = f"round {number}" if timed else "untimed"
                            told = f"{answer['seconds']:.3f} s {answer['values']}"
                            report(f"{label}: {row.name} {told}")
            for contestant, process in list(running.items()):
                with noting(contestant):
                    rows[contestant].peak_bytes = process.ask("memory")["peak_bytes"]
    return list(rows.values())


def worker(pipe: Connection, factory: str, settings: dict[str, Any], threads: int) -> None:
    """Build a contestant and obey the commands ``step`` and ``memory`` until the pipe is closed.

    A step whose values have ``seconds`` took that long; others are timed from outside.
    """
    os.dup2(2, 1)  # standard output is for the table
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    use_extra_packages()
    if other := os.environ.get(CHECKOUT):
        sys.path[:0] = [f"{other}/scripts/benchmarks", other, f"{other}/plugins"]
    try:
        module, _, name = factory.partition(":")
        running = getattr(importlib.import_module(module), name)(**settings)
        pipe.send({"facts": running.facts})
        with contextlib.suppress(EOFError):
            while command := pipe.recv():
                if command == "memory":
                    pipe.send({"peak_bytes": running.memory()})
                    continue
                started = time.perf_counter()
                values = running.step()
                elapsed = time.perf_counter() - started
                pipe.send({"seconds": values.pop("seconds", elapsed), "values": values})
        running.close()
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]})
        traceback.print_exc()
    # Taking down thread pools and devices can take seconds, which nobody needs to wait for.
    os._exit(0)


def use_extra_packages() -> None:
    """Search the folders of ``HFSEQ_BENCHMARK_PACKAGES`` behind all others."""
    sys.path += filter(None, os.environ.get(EXTRA_PACKAGES, "").split(os.pathsep))


# -- the machine


def process_bytes(field: str, file: str = "self/status") -> int:
    """Return a size from /proc, which gives it in kB; OSError where there is none."""
    found = re.search(rf"^{field}:\s*(\d+)", Path("/proc", file).read_text(), re.M)
    if found is None:
        raise OSError(f"/proc/{file} has no {field}")
    return int(found[1]) * 1024


def host_peak_bytes() -> int:
    """Return the most memory this process ever held, its start and compilation included."""
    return process_bytes("VmHWM")


def import_torch() -> dict[str, float]:
    """Import PyTorch where it is installed, and return the bytes that it takes.

    Transformers' configuration classes import it in any case; here it is seen apart from them.
    """
    pages = Path("/proc/self/statm")
    if "torch" in sys.modules or not pages.exists():
        return {}
    before = int(pages.read_text().split()[1])
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    taken = int(pages.read_text().split()[1]) - before
    return {"torch_bytes": taken * os.sysconf("SC_PAGE_SIZE")}


def device_bytes(what: str) -> int | None:
    """Return a number of jax's own statistics of its device; a CPU has none."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get(what)


def jax_peak_bytes() -> int:
    return device_bytes("peak_bytes_in_use") or host_peak_bytes()


def planned_bytes(program: Any) -> dict[str, int]:
    """Return what XLA says a compiled program needs: its temporary arrays, and all of it."""
    found = program.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    temporary = found.temp_size_in_bytes
    return {"temporary_bytes": temporary, "compiled_bytes": temporary + held}


def torch_peak_bytes() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else host_peak_bytes()


def torch_wait() -> None:
    """Wait for what PyTorch's GPU still does, where there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def jax_device() -> str:
    import jax

    return f"{jax.devices()[0].platform} {jax.devices()[0].device_kind}"


def torch_device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def read_cpuinfo() -> str:
    path = Path("/proc/cpuinfo")  # where there is no such file, no units are known
    return path.read_text() if path.exists() else ""


def cpu_flags(cpuinfo: str) -> list[str]:
    found = re.search(r"^(?:flags|features)\s*:(.*)", cpuinfo, re.M | re.I)  # x86, Arm
    return found[1].split() if found else []


def bfloat16_units(cpuinfo: str) -> list[str]:
    flags = cpu_flags(cpuinfo)
    return [flag for flag in BFLOAT16_FLAGS if flag in flags]


def machine_facts() -> dict[str, Any]:
    info = read_cpuinfo()
    model = re.search(r"^model name\s*:\s*(.*\S)", info, re.M)
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in CPU_FLAGS if flag in cpu_flags(info)],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
    }


# -- what a suite is made of

PROFILES = ("full", "quick", "tiny")
PEERS = ("torch", "torch_compile", "hfseq")
NAMES = {"torch": "PyTorch", "torch_compile": "torch.compile", "hfseq": "hfseq"}
PYTORCH = ("torch", "transformers")
HFSEQ = ("jax", "flax", "optax", "transformers", "safetensors", "pluggy")
PACKAGES = {"torch": PYTORCH, "torch_compile": PYTORCH, "hfseq": HFSEQ}


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``run.py`` was asked for; ``tiny`` is for tests: the numbers mean nothing."""

    profile: str = "full"
    device: str = "cpu"
    peers: tuple[str, ...] = PEERS
    dtypes: tuple[str, ...] | None = None
    rounds: int | None = None
    threads: int = 1

    @property
    def tiny(self) -> bool:
        return self.profile == "tiny"

    @property
    def gpu(self) -> bool:
        return self.device == "gpu"

    @property
    def eager(self) -> tuple[str, ...]:
        return tuple(peer for peer in self.peers if peer != "torch_compile")

    def choose(self, cpu: Any, gpu: Any, quick: Any, tiny: Any) -> Any:
        return {"full": gpu if self.gpu else cpu, "quick": quick, "tiny": tiny}[self.profile]

    def size(self, model: str) -> dict[str, Any]:
        """Return what makes a configuration small (minutes on a CPU; tests): nothing where full.

        ``NAMES`` of training.py has the names that all configurations share.
        """
        if self.profile == "full":
            return {}
        width, wide, layers, vocab = (32, 64, 1, 120) if self.tiny else (256, 1024, 2, 8000)
        own = {
            "t5": {"d_kv": 8 if self.tiny else 64},
            "llama": {"num_key_value_heads": 2, "head_dim": width // 4},
        }.get(model, {})
        words = {} if model == "vit" else {"vocab_size": vocab}
        return {"width": width, "wide": wide, "heads": 4, "layers": layers} | words | own

    def types(self, *default: str) -> tuple[str, ...]:
        """Return the types to measure: those asked for, else ``default``, or the device's own."""
        return self.dtypes or default or (self.choose("float32", "bfloat16", *["float32"] * 2),)


@dataclasses.dataclass(frozen=True)
class Case:
    """Contestants that step in turn, and what a step of them does.

    ``amount`` counts ``unit`` in a step, and ``baseline`` is whom the others are compared with;
    ``weights`` is the model and size whose weights are written first and named to the contestants
    in ``settings["weights"]``.
    """

    name: str
    contestants: tuple[Contestant, ...]
    amount: float = 0.0
    unit: str = "tokens"
    dtype: str = "float32"
    rounds: int = 3
    warmup: int = 1
    settle: int = 0
    weights: tuple[str, dict[str, Any]] | None = None
    baseline: str = NAMES["torch"]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


#: A title, and what a row shows below it.
Column = tuple[str, Callable[[dict[str, Any]], str]]
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A part of run.py: its cases by the options, what is shown of their rows, what must hold.

    ``summary`` is what benchmarks/tables.md says above the table. ``picture`` is a key of ``BARS``,
    or "curves" of what ``curves`` returns; ``finish`` adds to the rows.
    """

    title: str
    summary: str
    cases: Callable[[Options], list[Case]]
    columns: Sequence[Column] = ()
    picture: str | None = None
    finish: Callable[[Rows], None] = lambda rows: None
    problems: Callable[[Rows], list[str]] = lambda rows: []
    remarks: Callable[[Rows], list[str]] = lambda rows: []
    curves: Callable[[Rows], list[dict[str, Any]]] = lambda rows: []


def suite(name: str) -> Suite:
    return getattr(importlib.import_module(SUITES[name]), name.upper())


def rivals(
    options: Options,
    factories: Mapping[str, str],
    settings: dict[str, Any],
    group: str,
    peers: Sequence[str] | None = None,
) -> tuple[Contestant, ...]:
    """Return a contestant for each wanted peer; PyTorch, if there, first.

    The factory of ``torch`` serves ``torch_compile``, too, with ``compiled=True``.
    """
    members = []
    for peer in options.peers if peers is None else peers:
        compiled = peer == "torch_compile"
        given = settings | ({"compiled": True} if compiled else {})
        # What torch.compile starts: C for Triton on a GPU, C++ on a CPU.
        programs = ("gcc" if options.gpu else "g++",) if compiled else ()
        factory = factories[peer.removesuffix("_compile")]
        contestant = Contestant(NAMES[peer], group, factory, given, PACKAGES[peer], {}, programs)
        members.append(contestant)
    return tuple(members)


def compared(
    options: Options,
    factories: Mapping[str, str],
    settings: dict[str, Any],
    name: str,
    amount: float,
    peers: Sequence[str] | None = None,
    **turns: Any,
) -> Case:
    """Return a case of rivals that begin with the same weights of ``settings``' model and size."""
    return Case(
        name,
        rivals(options, factories, settings, name, peers),
        amount,
        dtype=settings["dtype"],
        weights=(settings["model"], settings["size"]),
        **turns,
    )


# -- what is measured of a case


def write_weights(folder: str, model: str, size: dict[str, Any], **options: Any) -> list[str]:
    """Write weights in a process of their own, which no memory shows; returns what went wrong."""
    settings = {"folder": folder, "model": model, "size": size}
    writer = Contestant("weights", "", "training:save_weights", settings, ("transformers",))
    (row,) = run([writer], rounds=0, warmup=0, **options)
    if row.status == "ok":
        return []
    return [f"{row.status.partition(':')[0]}: no weights could be written: {row.status}"]


@dataclasses.dataclass
class Runner:
    """Runs cases; ``folder`` gets the weights, each written once."""

    threads: int
    folder: Path
    patience: float | None = None
    suite_time: float | None = None
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    written: dict[str, tuple[str, list[str]]] = dataclasses.field(default_factory=dict)

    def suite(self, name: str, cases: Sequence[Case]) -> Rows:
        allowance, shown = Allowance(self.suite_time or math.inf), Rows()
        for number, case in enumerate(cases, 1):
            tell(f"{name} {number}/{len(cases)}: {case.name}")
            rows = self.rows(case, allowance)
            if name == "limits":
                self.limits |= rates(rows)
            shown += [summary(row, case, rows, self.limits) for row in rows]
        return shown

    def rows(self, case: Case, allowance: Allowance | None = None) -> list[Row]:
        contestants, allowance = case.contestants, allowance or Allowance()
        shared: dict[str, Any] = {
            "threads": self.threads,
            "report": tell,
            "patience": self.patience,
            "allowance": allowance,
        }
        absent = {c: c.missing() for c in contestants}
        if case.weights and allowance.left() > 0 and not all(absent.values()):
            key = json.dumps(case.weights, sort_keys=True)
            if key not in self.written:
                folder = str(self.folder / f"weights{len(self.written)}")
                self.written[key] = folder, write_weights(folder, *case.weights, **shared)
            folder, problems = self.written[key]
            if problems:
                if problems[0].startswith("not run"):  # for another suite there may be time
                    del self.written[key]
                return [
                    Row(c.name, c.group, f"not run: no {', '.join(no)}" if no else problems[0])
                    for c, no in absent.items()
                ]
            contestants = tuple(
                dataclasses.replace(c, settings=c.settings | {"weights": folder})
                for c in contestants
            )
        turns = {"rounds": case.rounds, "warmup": case.warmup, "settle": case.settle}
        return run(contestants, **turns, **shared)


def summary(
    row: Row, case: Case, rows: Sequence[Row], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Return the numbers of a row, as JSON; what did not run has ``None``.

    FLOPs and bytes of a step are those that the row states, or another one of its case: what has to
    be done is the same for all.
    """
    first = next((other for other in rows if other.name == case.baseline and other.seconds), None)
    facts = {}
    for other in (*rows, row):
        facts |= {k: v for k, v in other.facts.items() if k in ("flops", "bytes")}
    amount = case.amount or (row.values[-1].get("work", 0.0) if row.values else 0.0)
    return {
        "name": row.name,
        "case": case.name,
        "dtype": case.dtype,
        "unit": case.unit,
        "amount": amount,
        "status": row.status,
        "seconds": row.seconds,
        "median_seconds": row.median,
        "spread": row.spread,
        "start_seconds": row.start_seconds,
        "rate": amount / row.median if row.median and amount else None,
        "ratio": ratio(row, first) if first else None,
        "limit": limit(facts, case.dtype, row.median, limits),
        "peak_memory_gb": row.peak_bytes / GB or None,
        # What is no number is left out: tokens of a generation.
        "values": [
            {k: v for k, v in values.items() if isinstance(v, int | float)}
            for values in row.values[-len(row.seconds) or None :]
        ],
        "facts": row.facts,
        "case_facts": case.facts,
    }


def limit(
    facts: Mapping[str, float], dtype: str, seconds: float | None, limits: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return which limit binds and the share of it that was reached, if both are known.

    A step needs ``flops`` at the rate of a large product, and moves at least ``bytes`` at the rate
    of the triad; the longer of the two times is the least that the step could take.
    """
    pairs = {"compute": ("flops", dtype), "bandwidth": ("bytes", "bandwidth")}
    least = {
        name: facts[work] / limits[rate]
        for name, (work, rate) in pairs.items()
        if facts.get(work) and limits.get(rate)
    }
    if not least or not seconds:
        return None
    binding = max(least, key=lambda name: least[name])
    return {
        "binding": binding,
        "share": least[binding] / seconds,
        "least_seconds": least[binding],
        "of": {k: v / seconds for k, v in least.items()},
    }


# -- the limits of the machine: a large product and STREAM's triad, by whichever library is faster


def working(call: Callable[[], Any], work: float | None = None) -> Callable[[], dict[str, float]]:
    """Return a step that says how much ``call`` does, if that is known."""

    def step() -> dict[str, float]:
        call()
        return {} if work is None else {"work": float(work)}

    return step


#: Most rows of a matrix, or bytes of an array (far above any cache), on a CPU and on a GPU.
LIMIT_SIZES = {"matmul": (2048, 8192), "triad": (1 << 28, 1 << 30)}
#: The most seconds that a product of that size may take; else it has fewer rows.
LONGEST_PRODUCT = 1.0


def rows_of_product(seconds: Callable[[int], float], most: int, least: int = 256) -> int:
    """Return how many rows, up to ``most``, a product has that takes no longer than a second.

    ``seconds`` measures one. Bfloat16 without units for it is emulated, a hundred times as slow.
    """
    rows = min(least, most)
    while 2 * rows <= most and 8 * seconds(rows) <= LONGEST_PRODUCT:
        rows *= 2
    return rows


def limit_of(
    kind: str,
    size: int | None,
    most: int,
    product: Callable[[int], Callable[[], Any]],
    triad: Callable[[int], Callable[[], Any]],
) -> Callable[[], dict[str, float]]:
    """Return a step of the limit ``kind``; product and triad make what is called for a size."""
    if kind == "triad":
        size = size or most
        return working(triad(size // 4), 3 * size)

    def seconds(rows: int) -> float:
        call = product(rows)
        call()  # which compiles
        return timeit.timeit(call, number=1)

    size = size or rows_of_product(seconds, most)
    return working(product(size), 2 * size**3)


def jax_limit(kind: str, size: int | None, dtype: str = "float32") -> Running:
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    add = jax.jit(lambda a, b, c: b + 3.0 * c, donate_argnums=0, keep_unused=True)

    def product(rows: int) -> Callable[[], Any]:
        x = jax.random.normal(jax.random.key(0), (rows, rows), dtype)
        return lambda: multiply(x).block_until_ready()

    def triad(count: int) -> Callable[[], Any]:
        arrays = [jnp.full(count, value, jnp.float32) for value in (0.0, 1.0, 2.0)]

        def call() -> None:
            arrays[0] = add(*arrays).block_until_ready()

        return call

    most = LIMIT_SIZES[kind][jax.default_backend() == "gpu"]
    step = limit_of(kind, size, most, product, triad)
    return Running(step, jax_peak_bytes, {"device": jax_device()})


def torch_limit(kind: str, size: int | None, dtype: str = "float32") -> Running:
    """The same in PyTorch; float32 may use the TF32 units."""
    import torch

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    def product(rows: int) -> Callable[[], Any]:
        x = torch.randn((rows, rows), device=device).to(getattr(torch, dtype))
        return lambda: (torch.matmul(x, x), torch_wait())

    def triad(count: int) -> Callable[[], Any]:
        a, b, c = (torch.full((count,), value, device=device) for value in (0.0, 1.0, 2.0))
        return lambda: (torch.add(b, c, alpha=3.0, out=a), torch_wait())

    step = limit_of(kind, size, LIMIT_SIZES[kind][cuda], product, triad)
    return Running(step, torch_peak_bytes, {"device": torch_device()})


def limit_cases(
    dtypes: Sequence[str], rounds: int, size: int | None = None, triad_bytes: int | None = None
) -> list[Case]:
    """Return a product in each of ``dtypes`` and the triad; the work of a step says what it does.

    The name of a group is that of the limit: a type, or bandwidth.
    """

    def case(name: str, group: str, unit: str, **settings: Any) -> Case:
        members = tuple(
            Contestant(shown, group, f"harness:{library}_limit", settings, (library,))
            for library, shown in (("torch", "PyTorch"), ("jax", "jax"))
        )
        return Case(name, members, unit=unit, rounds=rounds, warmup=2)

    products = [
        case(f"product, {dtype}", dtype, "FLOP", kind="matmul", dtype=dtype, size=size)
        for dtype in dtypes
    ]
    return [*products, case("memory", "bandwidth", "B", kind="triad", size=triad_bytes)]


def rates(rows: Sequence[Row]) -> dict[str, float]:
    best: dict[str, float] = {}
    for row in (row for row in rows if row.seconds):
        rate = row.values[-1]["work"] / min(row.seconds)
        best[row.group] = max(best.get(row.group, 0.0), rate)
    return best


def matmul_rates(dtypes: Sequence[str], threads: int) -> dict[str, float]:
    """Measure the FLOP/s of a large product in each type, the best of the libraries there are."""
    contestants = [c for case in limit_cases(dtypes, 20)[:-1] for c in case.contestants]
    return rates(run(contestants, rounds=20, threads=threads))


# -- tables

ABSENT = "-"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = [":---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        if row["status"] != "ok" or not row["seconds"]:
            why = row["status"] if row["status"] != "ok" else "not timed"
            named = f"{row['name']} ({why})".replace("|", "/")
            return [named, columns[0][1](row), *[ABSENT] * (len(columns) - 1)]
        return [row["name"], *(show(row) for _, show in columns)]

    return markdown(["", *(title for title, _ in columns)], [cells(row) for row in rows])


def spread(row: dict[str, Any]) -> str:
    return f" ± {row['spread']:.0%}" if row["spread"] is not None else ""


def rate(row: dict[str, Any]) -> str:
    """Units a second, with the unit where it is not tokens."""
    unit, value = "" if row["unit"] == "tokens" else f" {row['unit']}", row["rate"]
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def milliseconds(row: dict[str, Any]) -> str:
    value = row["median_seconds"] * 1000
    return f"{value:.{0 if value >= 10 else 2}f}{spread(row)}"


def times(value: float | None) -> str:
    return f"{value:.2f}x" if value else ABSENT


def share(row: dict[str, Any]) -> str:
    """The share of the limit that binds, and its name."""
    limit = row["limit"]
    return f"{limit['share']:.0%} of {limit['binding']}" if limit else ABSENT


def median_of(row: dict[str, Any], name: str) -> float | None:
    found = [values[name] for values in row["values"] if values.get(name) is not None]
    return statistics.median(found) if found else None


def value(title: str, name: str, show: Callable[[float], str]) -> Column:
    """Return a column of the median of what each step said under ``name``."""
    return title, lambda row: ABSENT if (x := median_of(row, name)) is None else show(x)


def gigabytes(size: float | None) -> str:
    return f"{size / GB:.2f} GB" if size else ABSENT


def beside_first(rows: Rows, have: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each row that has something under ``have``, and the first such of its case."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row[have]:
            yield row, first.setdefault(row["case"], row)


CASE: Column = ("case", lambda row: row["case"])
TOKENS: Column = ("tokens/s", rate)
TIME: Column = ("ms a step", milliseconds)
RATIO: Column = ("against PyTorch", lambda row: times(row["ratio"]))
SHARE: Column = ("share of the limit", share)
#: The share of the rate of a large product.
MFU: Column = (
    "MFU",
    lambda row: f"{row['limit']['of']['compute']:.0%}" if row["limit"] else ABSENT,
)
MEMORY: Column = ("peak memory", lambda row: gigabytes(GB * (row["peak_memory_gb"] or 0)))


TORCH_MEMORY: Column = (
    "of it PyTorch's",
    lambda row: gigabytes(row.get("facts", {}).get("torch_bytes")),
)
DEFAULT = (CASE, TOKENS, TIME, RATIO, SHARE, MEMORY)


# -- what is stored and printed


def tell(line: str) -> None:
    """Print progress where it does not mix with the result; lists of tokens are left out."""
    print(line.split(" {'tokens")[0], file=sys.stderr, flush=True)


def head(
    name: str, script: str, given: Sequence[str], options: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """Return how a result begins: what ran (without places of this machine), and on what."""
    machine = machine_facts()
    return {
        "benchmark": name,
        "command": command(script, given),
        "machine": machine,
        "threads": options.threads or machine["cores"],
        "options": options_dict(options),
        **more,
    }


def command(script: str, given: Sequence[str], leave_out: Sequence[str] = ("--output",)) -> str:
    """Return the command to repeat, without places of this machine (``leave_out``)."""
    words = list(given)
    for flag in leave_out:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return shlex.join(["python", *f"scripts/benchmarks/{script}".split(), *words])


def machine_line(result: dict[str, Any]) -> str:
    """Say what the numbers were measured on, and what it can do at most."""
    machine, limits = result["machine"], ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    devices = {row["facts"]["device"] for row in result["rows"] if "device" in row.get("facts", {})}
    on = f"on {', '.join(sorted(devices))}; " if devices - {"cpu"} else ""
    if "limits" in result:
        can = [
            f"{rate / 1e9:.0f} {'GB/s' if kind == 'bandwidth' else f'GFLOP/s in {kind}'}"
            for kind, rate in result["limits"].items()
        ]
        limits = f"; measured limits: {', '.join(can) or 'none'}"
    return (
        f"{machine['cpu']}, {result['threads']} threads, load {machine['load']:g} at the start "
        f"({', '.join(machine['features']) or 'no AVX2'}); {on}{versions}{limits}."
    )


def section(
    result: dict[str, Any], columns: Sequence[Column], picture: tuple[str, str] | None = None
) -> str:
    """Return what benchmarks/tables.md shows of a result; ``picture`` is a title and a path."""
    return page(result, table(result["rows"], columns), picture)


def page(result: dict[str, Any], shown: str, picture: tuple[str, str] | None = None) -> str:
    """Return the same around a table that is ``shown``."""
    parts = [shown]
    if picture:
        parts.append(f"![{picture[0]}]({picture[1]})")
    parts += result.get("remarks", [])
    if result.get("profile", "full") != "full":
        parts.append(f"Small models (--{result['profile']}): this is not the speed of real ones.")
    if "rounds" in result and any(row.get("ratio") for row in result["rows"]):
        parts.append(
            f"{result['rounds']}: medians, ± half of the interquartile range; a ratio is the "
            "median over rounds, each compared within itself."
        )
    return "\n\n".join([*parts, machine_line(result), f"`{result['command']}`"])


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as readable JSON, whole or not at all."""
    from hfseq.errors import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def write_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` in ``path``.

    A file without the markers, or no file, gets them at its end. ValueError if only one is there.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text() if path.exists() else ""
    if (start in old) != (end in old):
        raise ValueError(f"{path} has only one of the markers {start} and {end}: add the other")
    if start not in old:
        old = (f"{old.rstrip()}\n\n" if old.strip() else "") + f"{start}{end}\n"
    before, rest = old.split(start, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.split(end, 1)[1]}")


def publish(
    result: dict[str, Any], text: str, output: Path | None, failed: bool | None = None
) -> int:
    """Write JSON and the section of the docs, print it and the problems; returns the exit code.

    A contestant that fails is a problem, one whose packages are missing is none; it has failed if
    nothing ran, unless ``failed`` says otherwise.
    """
    if failed is None:
        failed = not any(row["seconds"] for row in result["rows"])
    result["problems"] += [
        f"{row.get('case') or row['group']}: {row['name']} {row['status']}"
        for row in result["rows"]
        if row["status"].startswith("failed")
    ]
    if output is not None:
        write_json(output / "benchmarks" / f"{result['benchmark']}.json", result)
        write_section(output / "benchmarks" / "tables.md", result["benchmark"], text)
    print(text, flush=True)
    for problem in result["problems"]:
        tell(problem)
    return 1 if failed or result["problems"] else 0


# -- pictures

COLORS = ("#9a9a9a", "#b08a3e", "#3b76af", "#4f9d69", "#8a6bb1")
#: What a suite's ``picture`` may name: the number of a row, and what the axis says.
BARS = {
    "ratio": ("ratio", "times as fast as PyTorch"),
    "seconds": ("median_seconds", "seconds"),
    "memory": ("peak_memory_gb", "peak memory (GB)"),
}


def figure(title: str, size: tuple[float, float], *shape: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    from hfseq.reports import plots

    made = Figure(figsize=size, facecolor="white", layout="constrained")
    panels = made.subplots(*shape, squeeze=False, **options).reshape(-1)
    for panel in panels:
        plots.style_axes(panel)
    made.suptitle(title, x=0.01, ha="left", fontsize=12, color=plots.TEXT_COLOR, weight="bold")
    return made, panels


def draw(made: Suite, result: dict[str, Any], path: Path) -> Path | str | None:
    """Draw what the suite asks for; returns the path, or the reason why there is no picture."""
    rows = [row for row in result["rows"] if row["median_seconds"]]
    if made.picture is None:
        return None
    try:
        if made.picture == "curves":
            panels = made.curves(rows)
            if not panels:
                return "too few rows"
            drawn, _ = curves(made.title, panels)
        else:
            rows = [row for row in rows if row[BARS[made.picture][0]]]
            if not rows:
                return "nothing to compare"
            drawn = _bars(made.title, rows, *BARS[made.picture])
    except ImportError:
        return "matplotlib is not installed"
    from hfseq.reports import plots

    return plots.save_figure(drawn, path)


def _bars(title: str, rows: Rows, number: str, label: str) -> Any:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    height = 0.8 / len(names)
    drawn, (panel,) = figure(title, (9, 1.3 + 0.26 * len(cases) * max(len(names), 2)), 1, 1)
    panel.grid(False)
    for rank, name in enumerate(names):
        members = [row for row in rows if row["name"] == name]
        ys = [cases.index(r["case"]) + (rank - (len(names) - 1) / 2) * height for r in members]
        bars = panel.barh(
            ys,
            [row[number] for row in members],
            height * 0.9,
            color=COLORS[rank % len(COLORS)],
            label=name,
        )
        panel.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    if number == "ratio":
        panel.axvline(1.0, linewidth=0.8, linestyle="--", color="#333333")
    panel.set_yticks(range(len(cases)), cases)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel(label)
    drawn.legend(loc="outside lower left", ncols=len(names), frameon=False, fontsize=9)
    return drawn


def curves(
    title: str,
    parts: Sequence[dict[str, Any]],
    size: tuple[float, float] | None = None,
    shape: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Return a figure of lines and its panels.

    A part has ``x``, ``y`` (what the axes say) and ``lines``: name to (xs, ys), or (xs, ys, style).
    Names that begin with "_" stay out of the legend; ``log`` False has both axes linear.
    """
    from hfseq.reports.plots import TEXT_COLOR

    shape = shape or (1, len(parts))
    drawn, panels = figure(title, size or (4.6 * len(parts), 3.8), *shape, **options)
    for panel, part in zip(panels, parts, strict=True):
        log, lines = part.get("log", True), part["lines"]
        for place, (name, (xs, ys, *style)) in enumerate(lines.items()):
            usual = {"color": COLORS[(place + 2) % len(COLORS)], "linewidth": 1.5}
            panel.plot(xs, ys, label=name, **usual | part.get("style", {}) | dict(*style))
        if log:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            ticks = sorted({x for xs, *_ in lines.values() for x in xs})
            names = [f"{x / 1024:g}k" if x >= 1024 else f"{x:g}" for x in ticks]
            panel.set_xticks(ticks, names)
            panel.minorticks_off()
            panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_xlabel(part["x"], color=TEXT_COLOR)
        panel.set_ylabel(part["y"], color=TEXT_COLOR)
        if any(not name.startswith("_") for name in lines):
            place = "upper left" if log else "upper right"  # searching for the best one is slow
            panel.legend(loc=place, frameon=False, fontsize=9, labelcolor=TEXT_COLOR)
    return drawn, panels


# -- flags


def parser(about: str, sizes: bool = False, **numbers: tuple[Any, str]) -> argparse.ArgumentParser:
    """Return a parser with the flags that benchmarks share.

    ``numbers`` are more, each by its default (or a type, if it has none) and its help; ``sizes``
    adds those that change a model.
    """
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, text) in numbers.items():
        if isinstance(default, type):
            made.add_argument(f"--{name}", type=default, help=text)
        else:
            told = f"{text} ({default})"
            made.add_argument(f"--{name}", type=type(default), default=default, help=told)
    if sizes:
        made.add_argument("--layers", type=int, help="layers of every stack")
        overrides = "changes to the configuration, e.g. hidden_size=256,n_inner=512"
        made.add_argument("--config_overrides", help=overrides)
        made.add_argument("--no_check", action="store_true", help="do not compare results first")
    made.add_argument("--threads", type=int, help="cores for each; all by default")
    told = "gets benchmarks/tables.md and benchmarks/*.json"
    made.add_argument("--output", type=Path, default=DOCS, help=told)
    return made


def size_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what ``--layers`` and ``--config_overrides`` change in the configuration."""
    from hfseq.checkpoints.config import parse_overrides
    from hfseq.errors import UsageError

    size = {} if options.layers is None else {"layers": options.layers}
    try:
        return size | parse_overrides(options.config_overrides)
    except UsageError as error:
        raise SystemExit(str(error)) from None


def size_text(options: Mapping[str, Any]) -> str:
    layers, overrides = options["layers"], options["config_overrides"]
    told = "" if layers is None else f" ({layers} layers)"
    return told + (f" ({overrides})" if overrides else "")


def options_dict(options: argparse.Namespace, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    return {k: v for k, v in vars(options).items() if k not in ("output", *leave_out)}


def dispatch(
    commands: Mapping[str, Callable[[list[str]], int]], about: str, given: Sequence[str]
) -> int:
    """Run the command that the first word names, or else the one without a name."""
    words = list(given)
    name = words.pop(0) if words and words[0] in commands else ""
    if name in commands:
        return commands[name](words)
    asked = bool({"--help", "-h"} & set(words))
    print(about.strip(), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


# -- run.py


def parse(given: Sequence[str], about: str = "") -> argparse.Namespace:
    made = parser(
        about,
        rounds=(int, "timed steps of each contestant"),
        suite_time=(float, "seconds that a suite may take; what is at work then is ended"),
        patience=(900.0, "seconds after which a silent contestant is ended"),
    )
    made.set_defaults(output=None)
    add = made.add_argument
    add("suites", nargs="*", metavar="suite", help=", ".join(SUITES))
    add("--list", action="store_true", help="print the rows and run nothing")
    add("--only", metavar="REGEX", help="rows whose 'suite/case/name' matches")
    sizes = made.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small models, minutes on a CPU")
    sizes.add_argument("--tiny", action="store_true", help="tests only: the numbers mean nothing")
    add("--peers", nargs="+", choices=PEERS, default=PEERS, help="who takes part")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="types to compute in")
    add("--device", choices=["cpu", "gpu"], help="whose sizes; found by default")
    add("--packages", help="folder of packages that this Python lacks, behind its own")
    add("--tag", help="a word in the names of what is written, e.g. h200")
    add("--against", metavar="DIR", help="another checkout, whose hfseq takes part, too")
    add("--join", action="store_true", help="keep what an earlier run here measured beside it")
    flags = made.parse_args(given)
    flags.suites = [ALIASES.get(name, name) for name in flags.suites]
    unknown = [name for name in flags.suites if name not in SUITES]
    if unknown:
        made.error(f"no suite {', '.join(unknown)}: there are {', '.join(SUITES)}")
    for name in ("rounds", "threads", "suite_time", "patience"):
        if getattr(flags, name) is not None and getattr(flags, name) <= 0:
            made.error(f"--{name} {getattr(flags, name)}: give a number above 0")
    try:
        re.compile(flags.only or "")
    except re.error as error:
        made.error(f"--only {flags.only}: {error}")
    if flags.tag and not re.fullmatch(r"\w+", flags.tag):
        made.error(f"--tag {flags.tag}: give letters, digits and _")
    for name in ("packages", "against"):
        if (folder := getattr(flags, name)) and not Path(folder).is_dir():
            made.error(f"--{name} {folder}: there is no such directory")
    if flags.against and not Path(flags.against, "scripts/benchmarks/training.py").is_file():
        made.error(f"--against {flags.against}: that is no checkout of hfseq of this layout")
    if flags.against:  # another table than that beside PyTorch
        flags.tag = flags.tag or "against"
    return flags


def chosen(name: str, options: Options, only: str | None) -> list[Case]:
    """Return the cases of a suite with the contestants that ``only`` lets through."""
    cases = []
    for case in suite(name).cases(options):
        begin = f"{name}/{case.name}/"
        kept = tuple(c for c in case.contestants if re.search(only or "", begin + c.name))
        if kept:
            rounds = options.rounds or case.rounds
            cases.append(dataclasses.replace(case, contestants=kept, rounds=rounds))
    return cases


def against(case: Case, checkout: Path) -> Case:
    """Return the case with hfseq of ``checkout`` beside each of this one; it is the baseline."""
    members: list[Contestant] = []
    for one in case.contestants:
        if one.name.startswith("hfseq"):
            environment = one.environment | {CHECKOUT: str(checkout.resolve())}
            name = f"{one.name}, {checkout.name}"
            members.append(dataclasses.replace(one, name=name, environment=environment))
        members.append(one)
    baseline = next((one.name for one in members if CHECKOUT in one.environment), case.baseline)
    return dataclasses.replace(case, contestants=tuple(members), baseline=baseline)


def earlier_run(path: Path, begun: dict[str, Any]) -> dict[str, Any] | None:
    """Return what ``path`` holds of an earlier run, if that was on this machine."""
    if not path.exists():
        return None
    earlier = json.loads(path.read_text(encoding="utf-8"))
    same = ("cpu", "cores", "versions")
    if any(earlier["machine"].get(key) != begun["machine"].get(key) for key in same):
        tell(f"--join: {path} comes from another machine or other versions: leave --join out")
        raise SystemExit(2)
    return earlier


def join(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Put the rows of cases that only an earlier run measured before those of ``result``."""
    measured = {row["case"] for row in result["rows"]}
    kept = [row for row in earlier["rows"] if row["case"] not in measured and row["seconds"]]
    result["rows"] = kept + result["rows"]
    result["command"] = f"{earlier['command']}, then {result['command']}"
    limits = earlier["limits"].items() | result["limits"].items()
    result["limits"] = {name: max(v for n, v in limits if n == name) for name, _ in limits}


def main(arguments: Sequence[str] | None = None, about: str = "") -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    flags = parse(given, about)
    if flags.packages:
        os.environ[EXTRA_PACKAGES] = str(Path(flags.packages).resolve())
        use_extra_packages()
    with contextlib.suppress(ImportError):
        from hfseq.training import aot

        aot.start_quietly()  # processes of contestants inherit it
    # Told apart without loading any library.
    nvidia = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    options = Options(
        profile="quick" if flags.quick else "tiny" if flags.tiny else "full",
        device=flags.device or ("gpu" if nvidia else "cpu"),
        peers=tuple(flags.peers),
        dtypes=tuple(flags.dtypes) if flags.dtypes else None,
        rounds=flags.rounds,
        threads=flags.threads or len(os.sched_getaffinity(0)),
    )
    wanted = {name: chosen(name, options, flags.only) for name in flags.suites or SUITES}
    wanted = {name: cases for name, cases in wanted.items() if cases}
    if flags.against:
        other = Path(flags.against)
        wanted = {name: [against(case, other) for case in cases] for name, cases in wanted.items()}
    if not wanted:
        tell(f"--only {flags.only} matches no row: see --list")
        return 2
    if flags.list:
        for name, cases in wanted.items():
            print(
                *(f"{name}/{case.name}/{c.name}" for case in cases for c in case.contestants),
                sep="\n",
            )
        return 0
    output = flags.output or (DOCS if options.profile == "full" else None)
    begun = {
        "command": command("run.py", given, ("--output", "--packages", "--against")),
        "machine": machine_facts(),
        "threads": options.threads,
        "tag": flags.tag,
        "profile": options.profile,
        "device": options.device,
    }
    titles = {name: f"run_{name}" + (f"_{flags.tag}" if flags.tag else "") for name in wanted}
    before = {
        name: earlier_run(output / "benchmarks" / f"{title}.json", begun)
        for name, title in titles.items()
        if flags.join and output is not None
    }
    failed, ran = False, False
    with tempfile.TemporaryDirectory(prefix="hfseq-benchmarks-") as folder:
        os.environ["TMPDIR"] = folder  # what an ended contestant leaves behind goes with it
        runner = Runner(options.threads, Path(folder), flags.patience, flags.suite_time)
        if "limits" not in wanted and any(SHARE in suite(name).columns for name in wanted):
            tell("measuring the limits of the machine")
            runner.suite("limits", chosen("limits", options, None))
        for name, cases in wanted.items():
            made, turns = suite(name), [case.rounds for case in cases]
            rows = runner.suite(name, cases)
            made.finish(rows)
            result = begun | {
                "benchmark": titles[name],
                "suite": name,
                "limits": runner.limits,
                "rows": rows,
                "rounds": "Alternating rounds: "
                + " to ".join(dict.fromkeys(map(str, (min(turns), max(turns))))),
                "remarks": made.remarks(rows),
                "problems": made.problems(rows),
            }
            if earlier := before.get(name):
                join(result, earlier)
            drawn = None
            if output is not None:
                drawn = draw(made, result, output / "benchmarks" / f"{titles[name]}.png")
            if isinstance(drawn, str):
                result["remarks"].append(f"No picture: {drawn}.")
            picture = (made.title, drawn.name) if isinstance(drawn, Path) else None
            print(f"\n## {made.title}\n\n{made.summary}\n")
            columns = made.columns
            if flags.against:
                other = f"against {Path(flags.against).name}"
                columns = [
                    (other if column is RATIO else column[0], column[1]) for column in made.columns
                ]
            text = section(result, columns, picture)
            failed |= publish(result, text, output, failed=False) != 0
            ran |= any(row["seconds"] for row in rows)
    return 1 if failed or not ran else 0


LIMITS = Suite(
    "Limits of the machine",
    "The rate of a large matrix product in each type, and of memory by the triad a = b + s c "
    "(STREAM). The best of each is the limit that the other tables refer to. Takes jax or PyTorch "
    "and nothing else.",
    lambda options: limit_cases(
        options.types("float32", "bfloat16"),
        options.choose(20, 20, 10, 2),
        *((256, 1 << 22) if options.tiny else ()),
    ),
    (CASE, ("rate", lambda row: f"{row['rate'] / 1e9:.0f} G{row['unit']}/s"), TIME, MEMORY),
)
