"""The harness that measures, stores and prints all benchmarks, and the command run.py.

A benchmark compares contestants, which are implementations of the same computation, for example in
hfseq and in PyTorch. Contestants that are compared with each other form a group. Each contestant of
a group runs in a separate process, so that no two of them share threads, memory or an allocator.
The contestants of a group take their steps in turn, so that a disturbance of the machine affects
all of them.

The attribute ``factory`` of a contestant refers to a function in this folder, as
``"module:function"``. The process of the contestant calls this function with the settings of the
contestant. The function returns a :class:`Workload`, whose steps are timed.

``run.py --list`` requires only the standard library. Before the harness starts a contestant, it
checks whether the required packages are installed. If packages are missing, the row of the
contestant in the table lists them.
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

BENCHMARKS_DIR = Path(__file__).resolve().parent
ROOT = BENCHMARKS_DIR.parent.parent
sys.path[:0] = [p for p in map(str, (BENCHMARKS_DIR, ROOT, ROOT / "plugins")) if p not in sys.path]

DOCS = ROOT / "docs"
VERSIONS = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "numpy")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
#: Flags in /proc/cpuinfo of bfloat16 multiplication units: x86 (AVX-512, AMX), then Arm.
BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16", "smebf16")
GB = 1e9
#: Environment variable with folders of additional packages. They come last in the search path, so
#: that jax and torch of the installed environment take precedence over copies in these folders.
EXTRA_PACKAGES = "HFSEQ_BENCHMARK_PACKAGES"
#: Environment variable with another checkout, whose hfseq and factories replace those of this one.
CHECKOUT = "HFSEQ_BENCHMARK_CHECKOUT"
#: Suites of run.py and the module that defines each of them.
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
    "retrieval": "retrieval",
}
ALIASES = {"training": "train", "checkpoints": "checkpoint"}


@dataclasses.dataclass(frozen=True, eq=False)
class Contestant:
    """An implementation that a benchmark measures. It becomes one row of the table.

    Attributes:
        name: Name in the table.
        group: Name of the group. The contestants of a group take their steps in turn.
        factory: Function that builds the workload, ``"module:function"``.
        settings: Keyword arguments of the factory.
        requires: Packages that must be installed.
        environment: Additional environment variables of the process.
        programs: Programs that must be on the ``PATH``.
    """

    name: str
    group: str
    factory: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    requires: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    programs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Returns the names of the missing packages and programs."""
        packages = [name for name in self.requires if importlib.util.find_spec(name) is None]
        return packages + [name for name in self.programs if shutil.which(name) is None]


@dataclasses.dataclass
class Workload:
    """The computation of a contestant, which its factory has built in the contestant's process.

    Attributes:
        step: Runs a step, waits for the device, and returns values such as the loss.
        memory: Returns the peak memory in bytes.
        info: Properties of the workload, such as its device and the FLOPs of a step.
        close: Removes the files that the workload has written.
    """

    step: Callable[[], dict[str, Any]]
    memory: Callable[[], int]
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    close: Callable[[], None] = lambda: None


@dataclasses.dataclass
class Row:
    """The result of a contestant.

    Attributes:
        name: Name of the contestant.
        group: Group of the contestant.
        status: ``"ok"``, or the reason why the times are missing.
        start_seconds: Seconds from the start of the process until the workload was built.
        seconds: Seconds of each timed step.
        values: The values that each step returned, including untimed steps.
        peak_bytes: Peak memory in bytes.
        info: Properties of the workload.
    """

    name: str
    group: str
    status: str = "ok"
    start_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)
    values: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float | None:
        """Median time of a step in seconds, or `None` if no step was timed."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def spread(self) -> float | None:
        """Half of the interquartile range of the step times, divided by their median."""
        if len(self.seconds) < 2 or not self.median:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def ratio(row: Row, baseline: Row) -> float | None:
    """Returns the speed of a row relative to ``baseline``.

    For each round, the time of ``baseline`` is divided by the time of ``row``. The result is the
    median of these ratios. If both rows report the amount of work of a step, the ratio refers to
    the same amount of work.
    """
    pairs = [b / a for a, b in zip(row.seconds, baseline.seconds, strict=False) if a]
    work, baseline_work = (
        each.values[-1].get("work") if each.values else None for each in (row, baseline)
    )
    return (
        statistics.median(pairs) * (work / baseline_work if work and baseline_work else 1.0)
        if pairs
        else None
    )


@dataclasses.dataclass(frozen=True)
class TimeBudget:
    """A time limit in seconds, counted from the creation of the object. Unlimited by default."""

    seconds: float = math.inf
    start: float = dataclasses.field(default_factory=time.monotonic)

    def remaining(self) -> float:
        """Returns the remaining seconds, which are negative after the end."""
        return self.start + self.seconds - time.monotonic()

    @property
    def exhausted_message(self) -> str:
        """The status of rows for which no time remained."""
        return f"the time limit of the suite ({self.seconds:g} s) was reached"


class TimeBudgetExceeded(RuntimeError):
    """The time budget ended before the process answered."""


# -- processes


class Process:
    """Starts the process of a contestant and communicates with it.

    The process runs :func:`worker`: it builds the workload of the contestant, and then executes the
    commands that it receives through a pipe. It sends an answer after each command.

    Args:
        contestant: The contestant to run.
        threads: Number of CPU threads.
        patience: Seconds to wait for an answer. After this time, the process is killed.
        time_budget: Time limit of all commands together. After this time, the process is killed.
    """

    def __init__(
        self,
        contestant: Contestant,
        threads: int,
        patience: float | None = None,
        time_budget: TimeBudget | None = None,
    ):
        from unittest import mock  # slow to import, and contestants import this file

        self._patience, self._time_budget = patience or math.inf, time_budget or TimeBudget()
        spawn = multiprocessing.get_context("spawn")
        self._pipe, worker_pipe = spawn.Pipe()
        worker_args = worker_pipe, contestant.factory, contestant.settings, threads
        self._process = spawn.Process(target=worker, args=worker_args)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            # All contestants of a group share the device, so none may preallocate its memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        }
        with mock.patch.dict(os.environ, environment | contestant.environment):
            self._process.start()
        worker_pipe.close()

    def read(self, time_budget: TimeBudget | None = None) -> dict[str, Any]:
        """Waits for the next answer of the process and returns it.

        Raises:
            TimeBudgetExceeded: The time budget ended. The process was killed.
            RuntimeError: The contestant failed, its process ended, or ``patience`` was exceeded.
        """
        time_budget = time_budget or self._time_budget
        left = max(time_budget.remaining(), 0.0)
        wait = min(self._patience, left)
        try:
            if not self._pipe.poll(None if wait == math.inf else wait):
                self._process.kill()
                if left <= self._patience:
                    raise TimeBudgetExceeded(time_budget.exhausted_message)
                raise RuntimeError(f"no answer within {self._patience:g} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RuntimeError(f"exit code {self._process.exitcode}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        """Sends the command ``"step"`` or ``"memory"`` to the process and returns the answer."""
        with contextlib.suppress(OSError):  # `read` reports the error or the exit code
            self._pipe.send(command)
        # Reading the peak memory is fast, so it has no time limit.
        return self.read(TimeBudget() if command == "memory" else None)

    def close(self) -> None:
        """Ends the process, which is killed if it does not end within 20 seconds."""
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
    time_budget: TimeBudget | None = None,
    start_together: bool = False,
) -> list[Row]:
    """Runs one group after the other. The contestants of a group take their steps in turn.

    If a contestant lacks a package, fails, or exceeds ``patience``, its row contains the reason,
    and the other contestants continue. When the time budget ends, no further step starts, and
    running contestants are killed. Rows keep their completed rounds. If a row has no completed
    round, its status contains the reason.

    Args:
        contestants: The contestants of all groups.
        rounds: Timed steps per contestant.
        warmup: Untimed steps per contestant before the timed steps.
        settle: Untimed steps directly before each timed step. They fill the caches of the CPU with
            the contestant's own data, as in a training run.
        threads: CPU threads per contestant. All cores by default.
        report: Function that receives a line of progress per step.
        patience: Seconds without an answer after which a contestant is killed.
        time_budget: Time limit for all groups.
        start_together: Whether the contestants of a group build their workloads at the same time.
            This is faster on a machine with an accelerator and many cores.

    Returns:
        A row per contestant.
    """
    threads, time_budget = threads or len(os.sched_getaffinity(0)), time_budget or TimeBudget()
    rows = {c: Row(c.name, c.group) for c in contestants}
    processes: dict[Contestant, Process] = {}

    @contextlib.contextmanager
    def record_failure(contestant: Contestant) -> Iterator[None]:
        """Records a failure in the row and removes the contestant."""
        try:
            yield
        except RuntimeError as error:
            row = rows[contestant]
            processes.pop(contestant, None)
            if not isinstance(error, TimeBudgetExceeded):
                row.status, row.seconds = f"failed: {error}", []
            elif not row.seconds:
                row.status = f"not run: {error}"
            report(f"{row.name} {row.status}")

    starting: list[tuple[Contestant, Process, float]] = []

    def finish_starting() -> None:
        for contestant, process, start in starting:
            with record_failure(contestant):
                rows[contestant].info = process.read()["facts"]
                rows[contestant].start_seconds = time.perf_counter() - start
                processes[contestant] = process
        starting.clear()

    for group in dict.fromkeys(c.group for c in contestants):
        processes.clear()
        with contextlib.ExitStack() as stack:
            for contestant in (c for c in contestants if c.group == group):
                row, missing = rows[contestant], contestant.missing()
                if missing or time_budget.remaining() <= 0:
                    reason = (
                        f"no {', '.join(missing)}" if missing else time_budget.exhausted_message
                    )
                    row.status = f"not run: {reason}"
                    continue
                process = Process(contestant, threads, patience, time_budget)
                stack.callback(process.close)
                starting.append((contestant, process, time.perf_counter()))
                if not start_together:
                    finish_starting()
            finish_starting()
            for round_number in range(-warmup, rounds):
                # The order alternates, so that no contestant always follows the same one.
                for contestant in list(processes)[:: 1 if round_number % 2 else -1]:
                    row = rows[contestant]
                    if row.seconds and time_budget.remaining() <= 0:
                        continue
                    with record_failure(contestant):
                        for steps_left in reversed(range(settle + 1)):
                            answer = processes[contestant].ask("step")
                            row.values.append(answer["values"])
                            timed = round_number >= 0 and steps_left == 0
                            row.seconds += [answer["seconds"]] if timed else []
                            label = f"round {round_number}" if timed else "untimed"
                            result_text = f"{answer['seconds']:.3f} s {answer['values']}"
                            report(f"{label}: {row.name} {result_text}")
            for contestant, process in list(processes.items()):
                with record_failure(contestant):
                    rows[contestant].peak_bytes = process.ask("memory")["peak_bytes"]
    return list(rows.values())


def worker(pipe: Connection, factory: str, settings: dict[str, Any], threads: int) -> None:
    """Builds a workload and answers the commands ``step`` and ``memory`` until the pipe is closed.

    If the values that a step returns contain ``seconds``, this number is used as the time of the
    step. Otherwise this function measures the time.
    """
    os.dup2(2, 1)  # standard output is reserved for the table
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    use_extra_packages()
    if checkout := os.environ.get(CHECKOUT):
        sys.path[:0] = [f"{checkout}/scripts/benchmarks", checkout, f"{checkout}/plugins"]
        sys.modules.pop("harness", None)  # the other checkout has its own
    try:
        module, _, name = factory.partition(":")
        workload = getattr(importlib.import_module(module), name)(**settings)
        # In older checkouts, which --against can select, this attribute is named `facts`.
        info = workload.info if hasattr(workload, "info") else workload.facts
        pipe.send({"facts": info})
        with contextlib.suppress(EOFError):
            while command := pipe.recv():
                if command == "memory":
                    pipe.send({"peak_bytes": workload.memory()})
                    continue
                start = time.perf_counter()
                values = workload.step()
                elapsed = time.perf_counter() - start
                pipe.send({"seconds": values.pop("seconds", elapsed), "values": values})
        workload.close()
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]})
        traceback.print_exc()
    # Skip the shutdown of thread pools and devices, which can take seconds.
    os._exit(0)


def use_extra_packages() -> None:
    """Appends the folders of ``HFSEQ_BENCHMARK_PACKAGES`` to the search path."""
    sys.path += filter(None, os.environ.get(EXTRA_PACKAGES, "").split(os.pathsep))


# -- the machine


def process_bytes(field: str, file: str = "self/status") -> int:
    """Returns a size from /proc in bytes.

    Raises:
        OSError: The file does not exist or does not contain the field.
    """
    match = re.search(rf"^{field}:\s*(\d+)", Path("/proc", file).read_text(), re.M)
    if match is None:
        raise OSError(f"/proc/{file} contains no field {field}")
    return int(match[1]) * 1024


def host_peak_bytes() -> int:
    """Returns the peak resident memory of this process, including startup and compilation."""
    return process_bytes("VmHWM")


def import_torch() -> dict[str, float]:
    """Imports PyTorch if it is installed, and returns the memory that the import takes.

    The configuration classes of Transformers import PyTorch if it is installed. This function
    imports it first, so that its memory can be reported separately.

    Returns:
        ``{"torch_bytes": bytes}``, or an empty dictionary if PyTorch was already imported.
    """
    pages = Path("/proc/self/statm")
    if "torch" in sys.modules or not pages.exists():
        return {}
    pages_before = int(pages.read_text().split()[1])
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    new_pages = int(pages.read_text().split()[1]) - pages_before
    return {"torch_bytes": new_pages * os.sysconf("SC_PAGE_SIZE")}


def device_memory_stat(key: str) -> int | None:
    """Returns an entry of the memory statistics of the first jax device.

    The result is `None` if the device has no such statistics, as on CPUs.

    Args:
        key: Name of the entry, such as ``"peak_bytes_in_use"``.
    """
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get(key)


def jax_peak_bytes() -> int:
    """Returns the peak memory of the device, or on a CPU the peak memory of the process."""
    return device_memory_stat("peak_bytes_in_use") or host_peak_bytes()


def compiled_memory(program: Any) -> dict[str, int]:
    """Returns the memory that a compiled program needs according to XLA.

    Returns:
        A dictionary with two numbers of bytes: ``temporary_bytes`` for the temporary arrays, and
        ``compiled_bytes``, which also includes arguments and outputs.
    """
    memory = program.memory_analysis()
    array_bytes = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    temporary = memory.temp_size_in_bytes
    return {"temporary_bytes": temporary, "compiled_bytes": temporary + array_bytes}


def torch_peak_bytes() -> int:
    """Returns the peak memory of the GPU, or without a GPU the peak memory of the process."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else host_peak_bytes()


def torch_synchronize() -> None:
    """Waits until PyTorch's GPU, if there is one, has finished all work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def jax_device() -> str:
    """Returns the platform and the kind of the first jax device."""
    import jax

    return f"{jax.devices()[0].platform} {jax.devices()[0].device_kind}"


def torch_device() -> str:
    """Returns the name of PyTorch's GPU, or ``"cpu"``."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def read_cpuinfo() -> str:
    """Returns /proc/cpuinfo, or an empty string if it does not exist."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def cpu_flags(cpuinfo: str) -> list[str]:
    """Returns the feature flags of the CPU."""
    match = re.search(r"^(?:flags|features)\s*:(.*)", cpuinfo, re.M | re.I)  # x86, Arm
    return match[1].split() if match else []


def bfloat16_units(cpuinfo: str) -> list[str]:
    """Returns those feature flags of the CPU that indicate bfloat16 units."""
    flags = cpu_flags(cpuinfo)
    return [flag for flag in BFLOAT16_FLAGS if flag in flags]


def machine_info() -> dict[str, Any]:
    """Returns the properties of the machine and the versions that affect the measurements."""
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


# -- suites and cases

PROFILES = ("full", "quick", "tiny")
PEERS = ("torch", "torch_compile", "hfseq")
PEER_NAMES = {"torch": "PyTorch", "torch_compile": "torch.compile", "hfseq": "hfseq"}
PYTORCH = ("torch", "transformers")
HFSEQ = ("jax", "flax", "optax", "transformers", "safetensors", "pluggy")
PACKAGES = {"torch": PYTORCH, "torch_compile": PYTORCH, "hfseq": HFSEQ}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of ``run.py``.

    Attributes:
        profile: Size of the models. ``tiny`` is for tests, and its times are not meaningful.
        device: ``cpu`` or ``gpu``. The sizes of the models and batches depend on it.
        peers: Libraries to compare.
        dtypes: Dtypes to measure. `None` selects the defaults of each suite.
        rounds: Timed steps per contestant, or `None` for the default of each case.
        threads: CPU threads per contestant.
    """

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
    def eager_peers(self) -> tuple[str, ...]:
        """The peers without ``torch_compile``."""
        return tuple(peer for peer in self.peers if peer != "torch_compile")

    def choose(self, cpu: Any, gpu: Any, quick: Any, tiny: Any) -> Any:
        """Returns the value for the profile. For the profile ``full``, it depends on the device."""
        return {"full": gpu if self.gpu else cpu, "quick": quick, "tiny": tiny}[self.profile]

    def size(self, model: str) -> dict[str, Any]:
        """Returns the size of a model for the profile.

        The profile ``full`` does not change the size of a model, so the dictionary is empty. The
        keys are those of ``SIZE_KEYS`` in training.py, which maps them to fields of configurations.
        """
        if self.profile == "full":
            return {}
        width, wide, layers, vocab = (32, 64, 1, 120) if self.tiny else (256, 1024, 2, 8000)
        model_size = {
            "t5": {"d_kv": 8 if self.tiny else 64},
            "llama": {"num_key_value_heads": 2, "head_dim": width // 4},
        }.get(model, {})
        vocabulary = {} if model == "vit" else {"vocab_size": vocab}
        return (
            {"width": width, "wide": wide, "heads": 4, "layers": layers} | vocabulary | model_size
        )

    def dtypes_or_default(self, *default: str) -> tuple[str, ...]:
        """Returns the dtypes to measure.

        The result is ``--dtypes`` if this flag is set, otherwise ``default``. If ``default`` is
        empty too, the result is the usual dtype of the device.
        """
        return self.dtypes or default or (self.choose("float32", "bfloat16", *["float32"] * 2),)


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation with one size, and the contestants that are measured with it.

    Attributes:
        name: Name of the case in the table.
        contestants: The contestants, in the order of the table.
        amount: Number of units (tokens, for example) that a step processes.
        unit: Name of the unit.
        dtype: Dtype of the computation.
        rounds: Timed steps per contestant.
        warmup: Untimed steps per contestant before the timed steps.
        settle: Untimed steps directly before each timed step.
        weights: Name and size of the model whose weights are saved before the case starts. The
            contestants receive the folder of the weights as ``settings["weights"]``.
        baseline: Name of the contestant that the others are compared with.
        info: Properties of the case, which are stored with its rows.
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
    baseline: str = PEER_NAMES["torch"]
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


#: Title of a table column, and the function that formats its cell for a row.
Column = tuple[str, Callable[[dict[str, Any]], str]]
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Suite:
    """A suite of run.py.

    Attributes:
        title: Title of the section in benchmarks/tables.md.
        summary: Text above the table.
        cases: Function from the options to the cases.
        columns: Columns of the table.
        plot: Key of ``BARS``, or ``"curves"`` to plot the result of ``curves``.
        finish: Function that adds derived values to the rows.
        problems: Function that checks the rows and returns a message for each failed check.
        remarks: Function that returns paragraphs to print below the table.
        curves: Function that returns the panels of the plot, see :func:`curves`.
    """

    title: str
    summary: str
    cases: Callable[[Options], list[Case]]
    columns: Sequence[Column] = ()
    plot: str | None = None
    finish: Callable[[Rows], None] = lambda rows: None
    problems: Callable[[Rows], list[str]] = lambda rows: []
    remarks: Callable[[Rows], list[str]] = lambda rows: []
    curves: Callable[[Rows], list[dict[str, Any]]] = lambda rows: []


def load_suite(name: str) -> Suite:
    """Imports a suite by its name."""
    return getattr(importlib.import_module(SUITES[name]), name.upper())


def make_contestants(
    options: Options,
    factories: Mapping[str, str],
    settings: dict[str, Any],
    group: str,
    peers: Sequence[str] | None = None,
) -> tuple[Contestant, ...]:
    """Returns a contestant per peer. PyTorch, if it takes part, comes first.

    Args:
        options: Options of the command.
        factories: Factories of ``torch`` and ``hfseq``. The peer ``torch_compile`` uses the factory
            of ``torch`` with ``compiled=True``.
        settings: Settings of all contestants.
        group: Group of the contestants.
        peers: Peers that take part. The default is ``options.peers``.
    """
    members = []
    for peer in options.peers if peers is None else peers:
        compiled = peer == "torch_compile"
        peer_settings = settings | ({"compiled": True} if compiled else {})
        # torch.compile requires a C compiler for Triton on a GPU, and a C++ compiler on a CPU.
        programs = ("gcc" if options.gpu else "g++",) if compiled else ()
        factory = factories[peer.removesuffix("_compile")]
        contestant = Contestant(
            PEER_NAMES[peer], group, factory, peer_settings, PACKAGES[peer], {}, programs
        )
        members.append(contestant)
    return tuple(members)


def comparison_case(
    options: Options,
    factories: Mapping[str, str],
    settings: dict[str, Any],
    name: str,
    amount: float,
    peers: Sequence[str] | None = None,
    **turns: Any,
) -> Case:
    """Returns a case whose contestants start with the same weights.

    Args:
        options: Options of the command.
        factories: See :func:`make_contestants`.
        settings: Settings of all contestants. They include ``model``, ``size`` and ``dtype``.
        name: Name of the case.
        amount: Number of units that a step processes.
        peers: See :func:`make_contestants`.
        **turns: Other attributes of the case, such as ``rounds`` and ``warmup``.
    """
    return Case(
        name,
        make_contestants(options, factories, settings, name, peers),
        amount,
        dtype=settings["dtype"],
        weights=(settings["model"], settings["size"]),
        **turns,
    )


# -- measurement of a case


def write_weights(folder: str, model: str, size: dict[str, Any], **options: Any) -> list[str]:
    """Saves random weights in a separate process.

    The peak memory of the contestants therefore does not include the memory that this takes.

    Returns:
        Messages about problems. The list is empty on success.
    """
    settings = {"folder": folder, "model": model, "size": size}
    writer = Contestant("weights", "", "training:save_weights", settings, ("transformers",))
    (row,) = run([writer], rounds=0, warmup=0, **options)
    if row.status == "ok":
        return []
    return [f"{row.status.partition(':')[0]}: could not write the weights: {row.status}"]


@dataclasses.dataclass
class Runner:
    """Runs cases.

    Attributes:
        threads: CPU threads per contestant.
        folder: Folder for weights. Each model is saved once.
        patience: Seconds without an answer after which a contestant is killed.
        suite_time: Time limit of a suite in seconds.
        limits: Measured limits of the machine, see :func:`best_rates`.
        start_together: Whether the contestants of a group start at the same time.
        weights_folders: Folder and problems of the weights that have been saved, by model and size.
    """

    threads: int
    folder: Path
    patience: float | None = None
    suite_time: float | None = None
    limits: dict[str, float] = dataclasses.field(default_factory=dict)
    start_together: bool = False
    weights_folders: dict[str, tuple[str, list[str]]] = dataclasses.field(default_factory=dict)

    def run_suite(self, name: str, cases: Sequence[Case]) -> Rows:
        """Runs the cases of a suite and returns the rows of its record."""
        time_budget, results = TimeBudget(self.suite_time or math.inf), Rows()
        for number, case in enumerate(cases, 1):
            log_progress(f"{name} {number}/{len(cases)}: {case.name}")
            rows = self.run_case(case, time_budget)
            if name == "limits":
                self.limits |= best_rates(rows)
            results += [summarize(row, case, rows, self.limits) for row in rows]
        return results

    def run_case(self, case: Case, time_budget: TimeBudget | None = None) -> list[Row]:
        """Saves the weights of a case, if necessary, and runs its contestants."""
        contestants, time_budget = case.contestants, time_budget or TimeBudget()
        shared: dict[str, Any] = {
            "threads": self.threads,
            "report": log_progress,
            "patience": self.patience,
            "time_budget": time_budget,
            "start_together": self.start_together,
        }
        absent = {c: c.missing() for c in contestants}
        if case.weights and time_budget.remaining() > 0 and not all(absent.values()):
            key = json.dumps(case.weights, sort_keys=True)
            if key not in self.weights_folders:
                folder = str(self.folder / f"weights{len(self.weights_folders)}")
                self.weights_folders[key] = folder, write_weights(folder, *case.weights, **shared)
            folder, problems = self.weights_folders[key]
            if problems:
                if problems[0].startswith("not run"):  # another suite may have time
                    del self.weights_folders[key]
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


def summarize(
    row: Row, case: Case, rows: Sequence[Row], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the record of a row, which is written to the JSON file.

    Missing measurements are `None`.

    The FLOPs and bytes of a step are taken from the row. If the row does not have them, they are
    taken from another row of its case, since all contestants of a case do the same computation.
    """
    baseline = next(
        (other for other in rows if other.name == case.baseline and other.seconds), None
    )
    needs = {}
    for other in (*rows, row):
        needs |= {k: v for k, v in other.info.items() if k in ("flops", "bytes")}
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
        "ratio": ratio(row, baseline) if baseline else None,
        "limit": binding_limit(needs, case.dtype, row.median, limits),
        "peak_memory_gb": row.peak_bytes / GB or None,
        # Only numbers are stored, not the generated tokens.
        "values": [
            {k: v for k, v in values.items() if isinstance(v, int | float)}
            for values in row.values[-len(row.seconds) or None :]
        ],
        "facts": row.info,
        "case_facts": case.info,
    }


def binding_limit(
    needs: Mapping[str, float], dtype: str, seconds: float | None, limits: Mapping[str, float]
) -> dict[str, Any] | None:
    """Returns which limit of the machine determines the speed of a step, and how close the step is.

    A step computes its ``flops`` at most at the rate of a large matrix multiplication, and moves
    its ``bytes`` at most at the memory bandwidth. The longer of these two times is a lower bound of
    the time of the step, and the corresponding limit is called the binding limit.

    Returns:
        ``binding`` (the name of the binding limit), ``share`` (the share of it that the step
        reaches), ``least_seconds`` (the lower bound) and ``of`` (the share of each limit), or
        `None` if the limits or the time are unknown.
    """
    quantities = {"compute": ("flops", dtype), "bandwidth": ("bytes", "bandwidth")}
    least_seconds = {
        name: needs[work] / limits[rate]
        for name, (work, rate) in quantities.items()
        if needs.get(work) and limits.get(rate)
    }
    if not least_seconds or not seconds:
        return None
    binding = max(least_seconds, key=lambda name: least_seconds[name])
    return {
        "binding": binding,
        "share": least_seconds[binding] / seconds,
        "least_seconds": least_seconds[binding],
        "of": {k: v / seconds for k, v in least_seconds.items()},
    }


# -- the limits of the machine: the rate of a large matrix multiplication, and the memory bandwidth,
# which is measured with the triad of the STREAM benchmark (a = b + s c). Both are measured with
# PyTorch and with jax, and the higher rate counts.


def make_step(call: Callable[[], Any], work: float | None = None) -> Callable[[], dict[str, float]]:
    """Returns a step that runs ``call`` and reports its amount of work, if that is known."""

    def step() -> dict[str, float]:
        call()
        return {} if work is None else {"work": float(work)}

    return step


#: Maximum number of rows of the matrix, and size in bytes of an array of the triad (far larger than
#: any cache). The first value is for CPUs, the second for GPUs.
LIMIT_SIZES = {"matmul": (2048, 8192), "triad": (1 << 28, 1 << 30)}
#: Maximum seconds of a matrix multiplication. If it takes longer, a smaller matrix is used.
MAX_PRODUCT_SECONDS = 1.0


def product_rows(seconds: Callable[[int], float], most: int, least: int = 256) -> int:
    """Returns the largest size of a square matrix whose multiplication takes at most a second.

    Without bfloat16 units, a bfloat16 multiplication is emulated and about a hundred times slower.

    Args:
        seconds: Function that multiplies two square matrices with the given number of rows, and
            returns the time in seconds.
        most: Maximum number of rows.
        least: Minimum number of rows.
    """
    rows = min(least, most)
    while 2 * rows <= most and 8 * seconds(rows) <= MAX_PRODUCT_SECONDS:
        rows *= 2
    return rows


def limit_step(
    resource: str,
    size: int | None,
    most: int,
    product: Callable[[int], Callable[[], Any]],
    triad: Callable[[int], Callable[[], Any]],
) -> Callable[[], dict[str, float]]:
    """Returns a step that measures a limit.

    Args:
        resource: ``"matmul"`` or ``"triad"``.
        size: Number of rows of the matrix, or size of an array in bytes. By default, it is
            ``most`` for the triad, and :func:`product_rows` determines it for the matrix.
        most: Maximum size.
        product: Function that takes a number of rows and returns a callable that multiplies
            matrices.
        triad: Function that takes a number of elements and returns a callable that computes the
            triad.
    """
    if resource == "triad":
        size = size or most
        return make_step(triad(size // 4), 3 * size)

    def seconds(rows: int) -> float:
        call = product(rows)
        call()  # compiles
        return timeit.timeit(call, number=1)

    size = size or product_rows(seconds, most)
    return make_step(product(size), 2 * size**3)


def jax_limit(resource: str, size: int | None, dtype: str = "float32") -> Workload:
    """Builds the measurement of a limit in jax."""
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

    most = LIMIT_SIZES[resource][jax.default_backend() == "gpu"]
    step = limit_step(resource, size, most, product, triad)
    return Workload(step, jax_peak_bytes, {"device": jax_device()})


def torch_limit(resource: str, size: int | None, dtype: str = "float32") -> Workload:
    """Builds a workload that measures a limit of the hardware with PyTorch.

    Matrix multiplications in float32 may use TF32 units."""
    import torch

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")

    def product(rows: int) -> Callable[[], Any]:
        x = torch.randn((rows, rows), device=device).to(getattr(torch, dtype))
        return lambda: (torch.matmul(x, x), torch_synchronize())

    def triad(count: int) -> Callable[[], Any]:
        a, b, c = (torch.full((count,), value, device=device) for value in (0.0, 1.0, 2.0))
        return lambda: (torch.add(b, c, alpha=3.0, out=a), torch_synchronize())

    step = limit_step(resource, size, LIMIT_SIZES[resource][cuda], product, triad)
    return Workload(step, torch_peak_bytes, {"device": torch_device()})


def limit_cases(
    dtypes: Sequence[str], rounds: int, size: int | None = None, triad_bytes: int | None = None
) -> list[Case]:
    """Returns a case per dtype for matrix multiplications, and one for the memory bandwidth.

    A step reports its work in FLOPs or bytes. The group is the name of the limit, which is the
    dtype or ``bandwidth``.
    """

    def case(name: str, group: str, unit: str, **settings: Any) -> Case:
        members = tuple(
            Contestant(label, group, f"harness:{library}_limit", settings, (library,))
            for library, label in (("torch", "PyTorch"), ("jax", "jax"))
        )
        return Case(name, members, unit=unit, rounds=rounds, warmup=2)

    products = [
        case(f"product, {dtype}", dtype, "FLOP", resource="matmul", dtype=dtype, size=size)
        for dtype in dtypes
    ]
    return [*products, case("memory", "bandwidth", "B", resource="triad", size=triad_bytes)]


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the highest measured rate per limit, in FLOP/s or bytes per second."""
    best: dict[str, float] = {}
    for row in (row for row in rows if row.seconds):
        rate = row.values[-1]["work"] / min(row.seconds)
        best[row.group] = max(best.get(row.group, 0.0), rate)
    return best


def matmul_rates(dtypes: Sequence[str], threads: int) -> dict[str, float]:
    """Measures the FLOP/s of a large matrix multiplication for each dtype.

    The rate is that of the faster one of the installed libraries, PyTorch and jax.
    """
    contestants = [c for case in limit_cases(dtypes, 20)[:-1] for c in case.contestants]
    return best_rates(run(contestants, rounds=20, threads=threads))


# -- tables

ABSENT = "-"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. All columns except the first one are right-aligned."""
    rule = [":---", *["---:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """Returns the Markdown table of records. A row without times shows its status."""

    def cells(row: dict[str, Any]) -> list[str]:
        if row["status"] != "ok" or not row["seconds"]:
            reason = row["status"] if row["status"] != "ok" else "not timed"
            label = f"{row['name']} ({reason})".replace("|", "/")
            return [label, columns[0][1](row), *[ABSENT] * (len(columns) - 1)]
        return [row["name"], *(show(row) for _, show in columns)]

    return markdown(["", *(title for title, _ in columns)], [cells(row) for row in rows])


def spread(row: dict[str, Any]) -> str:
    """Formats the relative spread of the step times of a record."""
    return f" ± {row['spread']:.0%}" if row["spread"] is not None else ""


def rate(row: dict[str, Any]) -> str:
    """Formats the rate of a record per second. The unit is omitted if it is tokens."""
    unit, value = "" if row["unit"] == "tokens" else f" {row['unit']}", row["rate"]
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}{unit}"


def milliseconds(row: dict[str, Any]) -> str:
    """Formats the median time of a step in milliseconds, and the spread of the times."""
    value = row["median_seconds"] * 1000
    return f"{value:.{0 if value >= 10 else 2}f}{spread(row)}"


def format_ratio(value: float | None) -> str:
    """Formats a ratio as ``1.23x``."""
    return f"{value:.2f}x" if value else ABSENT


def share(row: dict[str, Any]) -> str:
    """Formats the result of :func:`binding_limit`, such as `45% of bandwidth`."""
    limit = row["limit"]
    return f"{limit['share']:.0%} of {limit['binding']}" if limit else ABSENT


def median_of(row: dict[str, Any], name: str) -> float | None:
    """Returns the median of a value over the steps of a record, or `None` without values."""
    numbers = [values[name] for values in row["values"] if values.get(name) is not None]
    return statistics.median(numbers) if numbers else None


def median_column(title: str, name: str, show: Callable[[float], str]) -> Column:
    """Returns a column with the median of the value ``name`` over the steps of a record."""
    return title, lambda row: ABSENT if (x := median_of(row, name)) is None else show(x)


def gigabytes(size: float | None) -> str:
    """Formats bytes as gigabytes."""
    return f"{size / GB:.2f} GB" if size else ABSENT


def rows_with_baseline(rows: Rows, key: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields pairs of records: each record with a non-empty ``key``, and the first such record of
    the same case.
    """
    baselines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row[key]:
            yield row, baselines.setdefault(row["case"], row)


CASE: Column = ("case", lambda row: row["case"])
TOKENS: Column = ("tokens/s", rate)
TIME: Column = ("ms per step", milliseconds)
RATIO: Column = ("against PyTorch", lambda row: format_ratio(row["ratio"]))
SHARE: Column = ("share of the limit", share)
#: Model FLOPs utilization, relative to the rate of a large matrix multiplication.
MFU: Column = (
    "MFU",
    lambda row: f"{row['limit']['of']['compute']:.0%}" if row["limit"] else ABSENT,
)
MEMORY: Column = ("peak memory", lambda row: gigabytes(GB * (row["peak_memory_gb"] or 0)))


TORCH_MEMORY: Column = (
    "PyTorch import",
    lambda row: gigabytes(row.get("facts", {}).get("torch_bytes")),
)
DEFAULT_COLUMNS = (CASE, TOKENS, TIME, RATIO, SHARE, MEMORY)


# -- stored and printed results


def log_progress(line: str) -> None:
    """Prints a line of progress to stderr, without lists of tokens."""
    print(line.split(" {'tokens")[0], file=sys.stderr, flush=True)


def result_header(
    name: str, script: str, arguments: Sequence[str], options: argparse.Namespace, **extra: Any
) -> dict[str, Any]:
    """Returns the first entries of a result: the command, the machine and the options."""
    machine = machine_info()
    return {
        "benchmark": name,
        "command": command(script, arguments),
        "machine": machine,
        "threads": options.threads or machine["cores"],
        "options": options_dict(options),
        **extra,
    }


def command(script: str, arguments: Sequence[str], leave_out: Sequence[str] = ("--output",)) -> str:
    """Returns the command that repeats a benchmark.

    Args:
        script: Name of the script, with its subcommand.
        arguments: Command-line arguments.
        leave_out: Flags to omit with their value, such as paths on this machine.
    """
    words = list(arguments)
    for flag in leave_out:
        if flag in words:
            index = words.index(flag)
            del words[index : index + 2]
    return shlex.join(["python", *f"scripts/benchmarks/{script}".split(), *words])


def machine_line(result: dict[str, Any]) -> str:
    """Returns a sentence with the machine, the versions and the measured limits."""
    machine, limits = result["machine"], ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    devices = {row["facts"]["device"] for row in result["rows"] if "device" in row.get("facts", {})}
    device_text = f"on {', '.join(sorted(devices))}; " if devices - {"cpu"} else ""
    if "limits" in result:
        limit_texts = [
            f"{rate / 1e9:.0f} {'GB/s' if resource == 'bandwidth' else f'GFLOP/s in {resource}'}"
            for resource, rate in result["limits"].items()
        ]
        limits = f"; measured limits: {', '.join(limit_texts) or 'none'}"
    return (
        f"{machine['cpu']}, {result['threads']} threads, load {machine['load']:g} at the start "
        f"({', '.join(machine['features']) or 'no AVX2'}); {device_text}{versions}{limits}."
    )


def section(
    result: dict[str, Any], columns: Sequence[Column], plot: tuple[str, str] | None = None
) -> str:
    """Returns the section of benchmarks/tables.md for a result.

    Args:
        result: The result.
        columns: Columns of the table.
        plot: Title and path of a plot.
    """
    return format_section(result, table(result["rows"], columns), plot)


def format_section(
    result: dict[str, Any], table_text: str, plot: tuple[str, str] | None = None
) -> str:
    """Returns the section of a result with a table that is already formatted."""
    parts = [table_text]
    if plot:
        parts.append(f"![{plot[0]}]({plot[1]})")
    parts += result.get("remarks", [])
    if result.get("profile", "full") != "full":
        parts.append(
            f"Small models (--{result['profile']}), so these are not the speeds of real models."
        )
    if "rounds" in result and any(row.get("ratio") for row in result["rows"]):
        parts.append(
            f"{result['rounds']}. Times are medians ± half of the interquartile range. The ratio "
            "is computed in each round; the table has the median."
        )
    return "\n\n".join([*parts, machine_line(result), f"`{result['command']}`"])


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` as indented JSON, atomically."""
    from hfseq.errors import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def write_section(path: Path, name: str, text: str) -> None:
    """Replaces the text between ``<!-- name -->`` and ``<!-- /name -->`` in a file.

    If the file lacks the markers or does not exist, the section is appended.

    Raises:
        ValueError: The file has only one of the markers.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text() if path.exists() else ""
    if (start in old) != (end in old):
        raise ValueError(f"{path} has only one of the markers {start} and {end}: add the other")
    if start not in old:
        old = (f"{old.rstrip()}\n\n" if old.strip() else "") + f"{start}{end}\n"
    head, tail = old.split(start, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}{start}\n\n{text.strip()}\n\n{end}{tail.split(end, 1)[1]}")


def publish(
    result: dict[str, Any], text: str, output: Path | None, failed: bool | None = None
) -> int:
    """Writes the JSON file and the section of the docs, and prints the section and the problems.

    A contestant that failed counts as a problem. A contestant whose packages are missing does not.

    Args:
        result: The result.
        text: The section.
        output: Folder that contains ``benchmarks``. Nothing is written if it is `None`.
        failed: Whether the benchmark failed. By default, it failed if no contestant ran.

    Returns:
        The exit code.
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
        log_progress(problem)
    return 1 if failed or result["problems"] else 0


# -- plots

COLORS = ("#9a9a9a", "#b08a3e", "#3b76af", "#4f9d69", "#8a6bb1")
#: Bar charts by ``Suite.plot``: key of a record, and label of the axis.
BARS = {
    "ratio": ("ratio", "times as fast as PyTorch"),
    "seconds": ("median_seconds", "seconds"),
    "memory": ("peak_memory_gb", "peak memory (GB)"),
}


def figure(title: str, size: tuple[float, float], *shape: int, **options: Any) -> tuple[Any, Any]:
    """Returns a titled matplotlib figure of ``size`` inches and the flat array of its axes."""
    from matplotlib.figure import Figure

    from hfseq.reports import plots

    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    panels = figure.subplots(*shape, squeeze=False, **options).reshape(-1)
    for panel in panels:
        plots.style_axes(panel)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=plots.TEXT_COLOR, weight="bold")
    return figure, panels


def plot_suite(suite: Suite, result: dict[str, Any], path: Path) -> Path | str | None:
    """Plots a result of a suite.

    Returns:
        The path of the plot, or the reason why the plot cannot be drawn. The result is `None` if
        the suite has no plot.
    """
    rows = [row for row in result["rows"] if row["median_seconds"]]
    if suite.plot is None:
        return None
    try:
        if suite.plot == "curves":
            panels = suite.curves(rows)
            if not panels:
                return "too few rows"
            figure, _ = curves(suite.title, panels)
        else:
            rows = [row for row in rows if row[BARS[suite.plot][0]]]
            if not rows:
                return "nothing to compare"
            figure = _bars(suite.title, rows, *BARS[suite.plot])
    except ImportError:
        return "matplotlib is not installed"
    from hfseq.reports import plots

    return plots.save_figure(figure, path)


def _bars(title: str, rows: Rows, number: str, label: str) -> Any:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    height = 0.8 / len(names)
    chart, (panel,) = figure(title, (9, 1.3 + 0.26 * len(cases) * max(len(names), 2)), 1, 1)
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
    chart.legend(loc="outside lower left", ncols=len(names), frameon=False, fontsize=9)
    return chart


def curves(
    title: str,
    parts: Sequence[dict[str, Any]],
    size: tuple[float, float] | None = None,
    shape: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns a figure of line plots and its axes.

    Args:
        title: Title of the figure.
        parts: One dictionary per panel: the axis labels ``x`` and ``y``, and ``lines``, which maps
            a name to ``(xs, ys)`` or ``(xs, ys, style)``. Names that begin with ``_`` are not in
            the legend. Both axes are logarithmic unless ``log`` is false.
        size: Size in inches.
        shape: Rows and columns of panels. One row by default.
        **options: Options of ``Figure.subplots``.
    """
    from hfseq.reports.plots import TEXT_COLOR

    shape = shape or (1, len(parts))
    chart, panels = figure(title, size or (4.6 * len(parts), 3.8), *shape, **options)
    for panel, part in zip(panels, parts, strict=True):
        log, lines = part.get("log", True), part["lines"]
        for number, (name, (xs, ys, *style)) in enumerate(lines.items()):
            defaults = {"color": COLORS[(number + 2) % len(COLORS)], "linewidth": 1.5}
            panel.plot(xs, ys, label=name, **defaults | part.get("style", {}) | dict(*style))
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
            location = "upper left" if log else "upper right"  # "best" is slow to compute
            panel.legend(loc=location, frameon=False, fontsize=9, labelcolor=TEXT_COLOR)
    return chart, panels


# -- flags


def make_parser(
    description: str, sizes: bool = False, **flags: tuple[Any, str]
) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all benchmarks share.

    Args:
        description: Description of the command.
        sizes: Whether to add the flags that change a model.
        **flags: Additional flags. The value of a flag is a pair of its default and its help text.
            For a flag without a default, the first element is its type.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, text) in flags.items():
        if isinstance(default, type):
            parser.add_argument(f"--{name}", type=default, help=text)
        else:
            help_text = f"{text} (default: {default})"
            parser.add_argument(f"--{name}", type=type(default), default=default, help=help_text)
    if sizes:
        parser.add_argument("--layers", type=int, help="number of layers per stack")
        overrides = "configuration changes, e.g. hidden_size=256,n_inner=512"
        parser.add_argument("--config_overrides", help=overrides)
        parser.add_argument(
            "--no_check", action="store_true", help="skip the initial comparison of results"
        )
    parser.add_argument("--threads", type=int, help="CPU cores per contestant (default: all)")
    help_text = "folder for benchmarks/tables.md and benchmarks/*.json"
    parser.add_argument("--output", type=Path, default=DOCS, help=help_text)
    return parser


def size_from_flags(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the configuration changes of ``--layers`` and ``--config_overrides``."""
    from hfseq.checkpoints.config import parse_overrides
    from hfseq.errors import UsageError

    size = {} if options.layers is None else {"layers": options.layers}
    try:
        return size | parse_overrides(options.config_overrides)
    except UsageError as error:
        raise SystemExit(str(error)) from None


def size_text(options: Mapping[str, Any]) -> str:
    """Returns the changed size of a model for the remarks of a table."""
    layers, overrides = options["layers"], options["config_overrides"]
    text = "" if layers is None else f" ({layers} layers)"
    return text + (f" ({overrides})" if overrides else "")


def options_dict(options: argparse.Namespace, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the options to record, without ``--output`` and the flags in ``leave_out``."""
    return {k: v for k, v in vars(options).items() if k not in ("output", *leave_out)}


def dispatch(
    commands: Mapping[str, Callable[[list[str]], int]], usage: str, arguments: Sequence[str]
) -> int:
    """Runs a subcommand.

    Args:
        commands: Functions by subcommand. The empty name is the command without a subcommand.
        usage: Text to print if the subcommand does not exist.
        arguments: Command-line arguments.

    Returns:
        The exit code.
    """
    words = list(arguments)
    name = words.pop(0) if words and words[0] in commands else ""
    if name in commands:
        return commands[name](words)
    help_requested = bool({"--help", "-h"} & set(words))
    print(usage.strip(), file=sys.stdout if help_requested else sys.stderr)
    return 0 if help_requested else 2


# -- run.py


def parse(arguments: Sequence[str], description: str = "") -> argparse.Namespace:
    parser = make_parser(
        description,
        rounds=(int, "timed steps per contestant"),
        suite_time=(float, "time limit of a suite in seconds; running contestants are killed"),
        patience=(900.0, "seconds without an answer after which a contestant is killed"),
    )
    parser.set_defaults(output=None)
    add = parser.add_argument
    add("suites", nargs="*", metavar="suite", help=", ".join(SUITES))
    add("--list", action="store_true", help="list the rows without running them")
    add("--only", metavar="REGEX", help="run only rows whose 'suite/case/name' matches")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", action="store_true", help="small models that take minutes on a CPU"
    )
    sizes.add_argument(
        "--tiny", action="store_true", help="tiny models for tests; the times are not meaningful"
    )
    add("--peers", nargs="+", choices=PEERS, default=PEERS, help="libraries to compare")
    add("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="dtypes of the computation")
    add("--device", choices=["cpu", "gpu"], help="use the sizes for this device (default: detect)")
    add("--packages", help="folder with additional packages; installed packages take precedence")
    add("--tag", help="suffix for the names of the written files and sections, e.g. h200")
    add("--against", metavar="DIR", help="another checkout of hfseq to compare with")
    add("--join", action="store_true", help="keep rows of an earlier run that are not measured now")
    flags = parser.parse_args(arguments)
    flags.suites = [ALIASES.get(name, name) for name in flags.suites]
    unknown = [name for name in flags.suites if name not in SUITES]
    if unknown:
        parser.error(f"unknown suite {', '.join(unknown)} (available: {', '.join(SUITES)})")
    for name in ("rounds", "threads", "suite_time", "patience"):
        if getattr(flags, name) is not None and getattr(flags, name) <= 0:
            parser.error(f"--{name} {getattr(flags, name)}: must be greater than 0")
    try:
        re.compile(flags.only or "")
    except re.error as error:
        parser.error(f"--only {flags.only}: {error}")
    if flags.tag and not re.fullmatch(r"\w+", flags.tag):
        parser.error(f"--tag {flags.tag}: use only letters, digits and _")
    for name in ("packages", "against"):
        if (folder := getattr(flags, name)) and not Path(folder).is_dir():
            parser.error(f"--{name} {folder}: no such directory")
    if flags.against and not Path(flags.against, "scripts/benchmarks/training.py").is_file():
        parser.error(
            f"--against {flags.against}: not an hfseq checkout with scripts/benchmarks/training.py"
        )
    if flags.against:  # do not overwrite the comparison with PyTorch
        flags.tag = flags.tag or "against"
    return flags


def select_cases(name: str, options: Options, only: str | None) -> list[Case]:
    """Returns the cases of a suite with the contestants whose full name matches ``only``."""
    cases = []
    for case in load_suite(name).cases(options):
        prefix = f"{name}/{case.name}/"
        contestants = tuple(c for c in case.contestants if re.search(only or "", prefix + c.name))
        if contestants:
            rounds = options.rounds or case.rounds
            cases.append(dataclasses.replace(case, contestants=contestants, rounds=rounds))
    return cases


def add_checkout(case: Case, checkout: Path) -> Case:
    """Returns a case that also measures hfseq from another checkout, which becomes the baseline."""
    members: list[Contestant] = []
    for contestant in case.contestants:
        if contestant.name.startswith("hfseq"):
            environment = contestant.environment | {CHECKOUT: str(checkout.resolve())}
            name = f"{contestant.name}, {checkout.name}"
            members.append(dataclasses.replace(contestant, name=name, environment=environment))
        members.append(contestant)
    baseline = next(
        (contestant.name for contestant in members if CHECKOUT in contestant.environment),
        case.baseline,
    )
    return dataclasses.replace(case, contestants=tuple(members), baseline=baseline)


def load_earlier_result(path: Path, header: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the result of an earlier run, or `None` if the file does not exist.

    Raises:
        SystemExit: The earlier run used another machine or other versions.
    """
    if not path.exists():
        return None
    earlier = json.loads(path.read_text(encoding="utf-8"))
    keys = ("cpu", "cores", "versions")
    if any(earlier["machine"].get(key) != header["machine"].get(key) for key in keys):
        log_progress(
            f"--join: {path} was measured on another machine or with other versions. Omit --join"
        )
        raise SystemExit(2)
    return earlier


def join_results(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Adds the rows of an earlier run to ``result``, for cases that were not measured again."""
    measured = {row["case"] for row in result["rows"]}
    earlier_rows = [
        row for row in earlier["rows"] if row["case"] not in measured and row["seconds"]
    ]
    result["rows"] = earlier_rows + result["rows"]
    result["command"] = f"{earlier['command']}, then {result['command']}"
    limits = earlier["limits"].items() | result["limits"].items()
    result["limits"] = {name: max(v for n, v in limits if n == name) for name, _ in limits}


def main(arguments: Sequence[str] | None = None, description: str = "") -> int:
    """Runs run.py.

    Args:
        arguments: Command-line arguments, `sys.argv` by default.
        description: Description for the help.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = parse(words, description)
    if flags.packages:
        os.environ[EXTRA_PACKAGES] = str(Path(flags.packages).resolve())
        use_extra_packages()
    with contextlib.suppress(ImportError):
        from hfseq.training import aot

        aot.start_quietly()  # inherited by the processes of contestants
    # Detect the device without importing a library.
    nvidia = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    options = Options(
        profile="quick" if flags.quick else "tiny" if flags.tiny else "full",
        device=flags.device or ("gpu" if nvidia else "cpu"),
        peers=tuple(flags.peers),
        dtypes=tuple(flags.dtypes) if flags.dtypes else None,
        rounds=flags.rounds,
        threads=flags.threads or len(os.sched_getaffinity(0)),
    )
    selected = {name: select_cases(name, options, flags.only) for name in flags.suites or SUITES}
    selected = {name: cases for name, cases in selected.items() if cases}
    if flags.against:
        other = Path(flags.against)
        selected = {
            name: [add_checkout(case, other) for case in cases] for name, cases in selected.items()
        }
    if not selected:
        log_progress(f"--only {flags.only} matches no row. See --list")
        return 2
    if flags.list:
        for name, cases in selected.items():
            print(
                *(f"{name}/{case.name}/{c.name}" for case in cases for c in case.contestants),
                sep="\n",
            )
        return 0
    output = flags.output or (DOCS if options.profile == "full" else None)
    header = {
        "command": command("run.py", words, ("--output", "--packages", "--against")),
        "machine": machine_info(),
        "threads": options.threads,
        "tag": flags.tag,
        "profile": options.profile,
        "device": options.device,
    }
    titles = {name: f"run_{name}" + (f"_{flags.tag}" if flags.tag else "") for name in selected}
    earlier_results = {
        name: load_earlier_result(output / "benchmarks" / f"{title}.json", header)
        for name, title in titles.items()
        if flags.join and output is not None
    }
    failed, ran = False, False
    with tempfile.TemporaryDirectory(prefix="hfseq-benchmarks-") as folder:
        os.environ["TMPDIR"] = folder  # so that files of killed contestants are removed
        runner = Runner(options.threads, Path(folder), flags.patience, flags.suite_time)
        if "limits" not in selected and any(SHARE in load_suite(name).columns for name in selected):
            log_progress("measuring the limits of the machine")
            runner.run_suite("limits", select_cases("limits", options, None))
        for name, cases in selected.items():
            suite, rounds = load_suite(name), [case.rounds for case in cases]
            rows = runner.run_suite(name, cases)
            suite.finish(rows)
            result = header | {
                "benchmark": titles[name],
                "suite": name,
                "limits": runner.limits,
                "rows": rows,
                "rounds": "Alternating rounds: "
                + " to ".join(dict.fromkeys(map(str, (min(rounds), max(rounds))))),
                "remarks": suite.remarks(rows),
                "problems": suite.problems(rows),
            }
            if earlier := earlier_results.get(name):
                join_results(result, earlier)
            plot_result = None
            if output is not None:
                plot_result = plot_suite(
                    suite, result, output / "benchmarks" / f"{titles[name]}.png"
                )
            if isinstance(plot_result, str):
                result["remarks"].append(f"No plot: {plot_result}.")
            plot = (suite.title, plot_result.name) if isinstance(plot_result, Path) else None
            print(f"\n## {suite.title}\n\n{suite.summary}\n")
            columns = suite.columns
            if flags.against:
                other = f"against {Path(flags.against).name}"
                columns = [
                    (other if column is RATIO else column[0], column[1]) for column in suite.columns
                ]
            text = section(result, columns, plot)
            failed |= publish(result, text, output, failed=False) != 0
            ran |= any(row["seconds"] for row in rows)
    return 1 if failed or not ran else 0


LIMITS = Suite(
    "Limits of the machine",
    "The rate of a large matrix multiplication for each dtype, and the memory bandwidth. The "
    "bandwidth is measured with the triad of the STREAM benchmark, a = b + s c. The other tables "
    "refer to the highest of these rates. Requires only jax or PyTorch.",
    lambda options: limit_cases(
        options.dtypes_or_default("float32", "bfloat16"),
        options.choose(20, 20, 10, 2),
        *((256, 1 << 22) if options.tiny else ()),
    ),
    (CASE, ("rate", lambda row: f"{row['rate'] / 1e9:.0f} G{row['unit']}/s"), TIME, MEMORY),
)
