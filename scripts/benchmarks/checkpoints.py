"""The suites of run.py that measure checkpoints and start-up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import training
from harness import Case, Contestant, Options, Rows, Suite, Workload

# -- save and restore

PLAIN = "plain file"
HFSEQ = (*harness.HFSEQ, "orbax")
TORCH = (*harness.PYTORCH, "safetensors")


def checkpoint_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite: the training state, and the weights alone."""
    size, cases = options.size("gpt2"), []
    title = options.choose(*["GPT-2 small"] * 2, "GPT-2, width 256", "GPT-2, width 32")
    for content in ("state", "weights"):
        name, settings = f"{content} of {title}", {"model": "gpt2", "size": size}
        rows = [
            (harness.PEER_NAMES[peer], f"{peer}_{content}", needs)
            for peer, needs in (("torch", TORCH), ("hfseq", HFSEQ))
            if peer in options.peers
        ]
        rows += [(PLAIN, "plain", TORCH)] if content == "state" else []
        members = tuple(
            Contestant(label, name, f"checkpoints:{factory}", settings, needs)
            for label, factory, needs in rows
        )
        cases.append(
            Case(
                name,
                members,
                1.0,
                "round trips",
                rounds=options.choose(3, 3, 3, 1),
                weights=("gpt2", size),
            )
        )
    return cases


def checkpoint_finish(rows: Rows) -> None:
    """Adds ``disk_share`` to each row: the speed of the row relative to that of a plain file.

    It is the time for writing and reading a plain file, divided by the time of the row for saving
    and restoring. Both times are seconds per gigabyte.
    """

    def seconds_per_gb(row: dict[str, Any]) -> float:
        keys = ("save_per_gb", "restore_per_gb")
        return sum(harness.median_of(row, key) or 0.0 for key in keys)

    plain = [row for row in rows if row["name"] == PLAIN and row["values"]]
    for row in rows if plain else ():
        if row["values"]:
            row["disk_share"] = seconds_per_gb(plain[0]) / seconds_per_gb(row)


def _round_trip(
    num_bytes: int,
    save: Callable[[Path], None],
    restore: Callable[[Path], None],
    memory: Callable[[], int],
    info: dict[str, Any],
    wait: Callable[[], None] = lambda: None,
) -> Workload:
    """Returns a workload that saves a state to a new folder, restores it, and removes the folder.

    Args:
        num_bytes: Size of the state in memory. The reported seconds per gigabyte refer to this
            size, because files may be compressed.
        save: Function that saves the state to a folder, possibly in the background.
        restore: Function that restores the state from a folder.
        memory: Function that returns the peak memory in bytes.
        info: Properties of the workload.
        wait: Function that waits until the state is saved.
    """

    def step() -> dict[str, float]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            marks = [time.perf_counter()]
            save(folder)
            marks.append(time.perf_counter())
            wait()
            _flush(folder)
            marks.append(time.perf_counter())
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            restore(folder)
            marks.append(time.perf_counter())
        gigabytes = num_bytes / harness.GB
        return {
            "seconds": marks[3] - marks[0],
            "gigabytes": gigabytes,
            "disk_gb": size / harness.GB,
            "blocked": marks[1] - marks[0],
            "save_per_gb": (marks[2] - marks[0]) / gigabytes,
            "restore_per_gb": (marks[3] - marks[2]) / gigabytes,
        }

    return Workload(step, memory, info)


def _flush(folder: Path) -> None:
    """Flushes the files of a folder from the page cache to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def hfseq_state(model: str, size: dict[str, Any], weights: str) -> Workload:
    """Saves the training state with the training loop's checkpointer, in the background."""
    import jax

    from hfseq.training import state
    from hfseq.training.checkpointer import Checkpointer, Progress

    config = training.make_config(model, size)
    module = training.hfseq_class(model).from_pretrained(weights, config=config)
    optimizer, sums = training.make_optimizer(), ("loss", "count")
    train_state = jax.jit(lambda p: state.make_state(p, optimizer, module.extra, sums))(
        module.params
    )
    # The moments are random, because zeros could be compressed very well.
    noise = jax.tree.map(
        lambda leaf: (
            jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype) if leaf.ndim else leaf
        ),
        train_state.opt_state,
    )
    train_state = dataclasses.replace(train_state, opt_state=noise)
    jax.block_until_ready(train_state)
    checkpoints: list[Checkpointer] = []

    def save(folder: Path) -> None:
        checkpoints[:] = [Checkpointer(folder)]
        checkpoints[0].save(train_state, Progress(step=1))

    def restore(folder: Path) -> None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract_state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            train_state,
        )
        jax.block_until_ready(Checkpointer(folder).restore(1, abstract_state))

    num_bytes, info = training.tree_bytes(train_state), training.jax_info(module.params)
    wait = lambda: checkpoints[0].wait()  # noqa: E731
    return _round_trip(num_bytes, save, restore, harness.jax_peak_bytes, info, wait)


def hfseq_weights(model: str, size: dict[str, Any], weights: str) -> Workload:
    """Saves with ``save_pretrained`` and restores with ``from_pretrained``."""
    import jax

    config, model_class = training.make_config(model, size), training.hfseq_class(model)
    module = model_class.from_pretrained(weights, config=config)

    def restore(folder: Path) -> None:
        jax.block_until_ready(model_class.from_pretrained(folder, config=config).params)

    num_bytes, info = training.tree_bytes(module.params), training.jax_info(module.params)
    return _round_trip(num_bytes, module.save_pretrained, restore, harness.jax_peak_bytes, info)


def torch_state(model: str, size: dict[str, Any], weights: str) -> Workload:
    """Saves PyTorch's model and optimizer in one file."""
    import torch

    module, device = training.load_torch(model, weights, training.make_config(model, size))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for moments in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.nn.init.normal_(moments[name])

    def save(folder: Path) -> None:
        checkpoint = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, folder / "state.pt")
        _flush(folder)

    def restore(folder: Path) -> None:
        checkpoint = torch.load(folder / "state.pt", map_location=device, weights_only=True)
        module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    num_bytes, info = 3 * _torch_bytes(module), training.torch_info(module)
    return _round_trip(num_bytes, save, restore, harness.torch_peak_bytes, info)


def torch_weights(model: str, size: dict[str, Any], weights: str) -> Workload:
    """Saves with Transformers' ``save_pretrained`` and restores with ``from_pretrained``."""
    config = training.make_config(model, size)
    module, _ = training.load_torch(model, weights, config)

    def restore(folder: Path) -> None:
        training.load_torch(model, str(folder), config)

    num_bytes, info = _torch_bytes(module), training.torch_info(module)
    return _round_trip(num_bytes, module.save_pretrained, restore, harness.torch_peak_bytes, info)


def _torch_bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def plain(model: str, size: dict[str, Any], weights: str) -> Workload:
    """Writes and reads one file of the same size as the training state."""
    num_bytes = 3 * (Path(weights) / "model.safetensors").stat().st_size
    content = (os.urandom(min(num_bytes, 1 << 20)) * (num_bytes // (1 << 20) + 1))[:num_bytes]

    def save(folder: Path) -> None:
        (folder / "plain").write_bytes(content)
        _flush(folder)

    def restore(folder: Path) -> None:
        with open(folder / "plain", "rb") as file:
            while file.read(1 << 24):
                pass

    return _round_trip(num_bytes, save, restore, harness.host_peak_bytes, {"device": "cpu"})


# -- from the start of a process to the end of its first training step

CACHES = {"torch": "TORCHINDUCTOR_CACHE_DIR", "hfseq": "JAX_COMPILATION_CACHE_DIR"}
HELP = "hfseq --help"
#: Other commands whose start is measured. The values are the arguments of Python. The last command
#: only imports the library that `hfseq train mlm --help` needs.
COMMANDS = {
    "hfseq train --list": ("-m", "hfseq.cli", "train", "--list"),
    "hfseq train mlm --help": ("-m", "hfseq.cli", "train", "mlm", "--help"),
    "import HfArgumentParser": ("-c", "from transformers import HfArgumentParser"),
}


def startup_cases(options: Options) -> list[Case]:
    """Returns the cases that measure first training steps and the start of commands."""
    cases = []
    rounds = options.choose(2, 3, 2, 1)
    models = (("gpt2", "GPT-2 small", 512), ("roberta", "RoBERTa-base", 128))
    for model, title, length in models[: options.choose(1, 2, 2, 1)]:
        rows, length = options.choose(2, 8, 2, 2), options.choose(length, length, 128, 12)
        name, members = f"{title}, {rows} x {length}", []
        # Every step runs in a new process, so only the compilation cache can be warm.
        case = training.training_case(
            options, model, name, rows, length, 0, "float32", unit="starts", rounds=rounds, warmup=0
        )
        for contestant in case.contestants:
            side = "hfseq" if contestant.name == "hfseq" else "torch"
            for state in (
                ("",) if contestant.name == harness.PEER_NAMES["torch"] else (", cold", ", warm")
            ):
                child_settings = {
                    "side": side,
                    "warm": state == ", warm",
                    "settings": contestant.settings,
                }
                members.append(
                    dataclasses.replace(
                        contestant,
                        name=contestant.name + state,
                        factory="checkpoints:process",
                        settings=child_settings,
                    )
                )
        cases.append(dataclasses.replace(case, contestants=tuple(members), amount=1.0))
    if "hfseq" in options.peers:
        starts = [Contestant(HELP, HELP, "checkpoints:help_command")]
        for name, arguments in COMMANDS.items():
            settings = {"arguments": list(arguments)}
            starts.append(Contestant(name, name, "checkpoints:start_python", settings))
        cases.append(Case("the command line", tuple(starts), 1.0, "starts", rounds=rounds))
    return cases


def process(side: str, warm: bool, settings: dict[str, Any], weights: str) -> Workload:
    """Builds a workload whose steps start one process each.

    If ``warm`` is true, an additional process fills the compilation cache before the first step.
    """
    home = Path(tempfile.mkdtemp(prefix="hfseq-start-"))
    code = f"import sys; sys.path.insert(0, {str(harness.BENCHMARKS_DIR)!r}); import checkpoints; "
    peak = num_started = 0

    def start(cache: Path) -> dict[str, float]:
        nonlocal peak
        child_arguments = {
            "side": side,
            "settings": settings | {"weights": weights},
            "started": time.time(),
        }
        completed = subprocess.run(
            [sys.executable, "-c", code + "checkpoints.child()", json.dumps(child_arguments)],
            text=True,
            check=False,
            env=os.environ | {CACHES[side]: str(cache)},
            stdout=subprocess.PIPE,
        )
        if completed.returncode:
            raise RuntimeError(f"the process failed with exit code {completed.returncode}")
        times = json.loads(completed.stdout.splitlines()[-1])
        peak = max(peak, int(times.pop("peak_bytes")))
        return times | {"seconds": sum(times[k] for k in ("imports", "build", "first_step"))}

    if warm:
        start(home / "warm")

    def step() -> dict[str, float]:
        nonlocal num_started
        num_started += 1
        return start(home / ("warm" if warm else f"cold{num_started}"))

    info = {"side": side, "warm": warm}
    return Workload(step, lambda: peak, info, lambda: shutil.rmtree(home))


def child() -> None:
    """Runs in the measured process: imports, builds, trains two steps and prints the times."""
    arguments = json.loads(sys.argv[1])
    harness.use_extra_packages()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if arguments["side"] == "torch":
        import torch  # noqa: F401
        import transformers  # noqa: F401
    else:
        import hfseq

        hfseq.FlaxAutoModel  # noqa: B018  (classes are loaded on first access)
    marks = [arguments["started"], time.time()]
    running = getattr(training, f"{arguments['side']}_step")(**arguments["settings"])
    marks.append(time.time())
    for _ in range(2):
        running.step()
        marks.append(time.time())
    phases = ("imports", "build", "first_step", "second_step")
    seconds = {n: b - a for n, (a, b) in zip(phases, itertools.pairwise(marks), strict=True)}
    seconds["peak_bytes"] = float(running.memory())
    print(json.dumps(seconds), file=answers, flush=True)
    os._exit(0)


def help_command() -> Workload:
    """Builds a workload whose step runs ``hfseq --help`` in a new process."""
    return start_python(["-m", "hfseq.cli", "--help"])


def start_python(arguments: list[str]) -> Workload:
    """Builds a workload whose step runs Python with these arguments in a new process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    start = functools.partial(
        subprocess.run,
        [sys.executable, *arguments],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    return Workload(
        harness.make_step(start),
        lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    )


_SECONDS = "{:.2f} s".format
CHECKPOINT = Suite(
    "Checkpoints",
    "Saving and restoring the complete training state, which consists of the parameters and both "
    "moments of AdamW. Files are flushed to the disk. *Blocked* is the time for which the training "
    "loop waits; hfseq writes in the background. PyTorch saves and restores the same state with "
    "`torch.save` and `torch.load`. A plain file of the same size shows the speed of the disk. The "
    "rows for weights measure `save_pretrained` and `from_pretrained`.",
    checkpoint_cases,
    (
        harness.CASE,
        harness.median_column("GB", "gigabytes", "{:.2f}".format),
        harness.median_column("on disk", "disk_gb", "{:.2f}".format),
        harness.median_column("save, s/GB", "save_per_gb", "{:.2f}".format),
        harness.median_column("restore, s/GB", "restore_per_gb", "{:.2f}".format),
        harness.median_column("blocked", "blocked", lambda s: f"{s * 1000:.0f} ms"),
        harness.RATIO,
        (
            "share of the disk",
            lambda row: f"{row['disk_share']:.0%}" if row.get("disk_share") else harness.ABSENT,
        ),
        harness.MEMORY,
    ),
    finish=checkpoint_finish,
)
STARTUP = Suite(
    "Start-up and compilation",
    "Every measurement starts a new process, which imports the libraries, builds the model and "
    "its optimizer, and runs the first training step, including compilation. *Cold* starts with "
    "an empty compilation cache, *warm* with the cache of an earlier process (hfseq's training "
    "loop uses a persistent cache by default).",
    startup_cases,
    (
        harness.CASE,
        ("seconds", lambda row: _SECONDS(row["median_seconds"])),
        harness.median_column("imports", "imports", _SECONDS),
        harness.median_column("model", "build", _SECONDS),
        harness.median_column("first step", "first_step", _SECONDS),
        harness.median_column("second step", "second_step", _SECONDS),
        harness.RATIO,
        harness.MEMORY,
    ),
    "seconds",
)
