"""Saving, restoring and starting up: two suites of run.py."""

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
from harness import Case, Contestant, Options, Rows, Running, Suite

# -- save and restore

PLAIN = "plain file"
HFSEQ = (*harness.HFSEQ, "orbax")
TORCH = (*harness.PYTORCH, "safetensors")


def checkpoint_cases(options: Options) -> list[Case]:
    size, cases = options.size("gpt2"), []
    title = options.choose(*["GPT-2 small"] * 2, "GPT-2, width 256", "GPT-2, width 32")
    for what in ("state", "weights"):
        name, settings = f"{what} of {title}", {"model": "gpt2", "size": size}
        rows = [
            (harness.NAMES[peer], f"{peer}_{what}", needs)
            for peer, needs in (("torch", TORCH), ("hfseq", HFSEQ))
            if peer in options.peers
        ]
        rows += [(PLAIN, "plain", TORCH)] if what == "state" else []
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
    """Add the share of a plain file's rate, there and back, that a row reaches."""

    def both(row: dict[str, Any]) -> float:
        keys = ("save_per_gb", "restore_per_gb")
        return sum(harness.median_of(row, key) or 0.0 for key in keys)

    plain = [row for row in rows if row["name"] == PLAIN and row["values"]]
    for row in rows if plain else ():
        if row["values"]:
            row["disk_share"] = both(plain[0]) / both(row)


def _round_trip(
    held: int,
    save: Callable[[Path], None],
    restore: Callable[[Path], None],
    memory: Callable[[], int],
    facts: dict[str, Any],
    wait: Callable[[], None] = lambda: None,
) -> Running:
    """Return a contestant that saves to a new folder, waits, restores and removes the folder.

    ``held`` are the bytes in memory: a compressed file is no smaller a checkpoint.
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
        gigabytes = held / harness.GB
        return {
            "seconds": marks[3] - marks[0],
            "gigabytes": gigabytes,
            "disk_gb": size / harness.GB,
            "blocked": marks[1] - marks[0],
            "save_per_gb": (marks[2] - marks[0]) / gigabytes,
            "restore_per_gb": (marks[3] - marks[2]) / gigabytes,
        }

    return Running(step, memory, facts)


def _flush(folder: Path) -> None:
    """Have the system write what it still holds of these files."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def hfseq_state(model: str, size: dict[str, Any], weights: str) -> Running:
    """The loop's checkpoints: written in the background."""
    import jax

    from hfseq.training import state
    from hfseq.training.checkpointer import Checkpointer, Progress

    config = training.configuration(model, size)
    module = training.hfseq_class(model).from_pretrained(weights, config=config)
    optimizer, sums = training.make_optimizer(), ("loss", "count")
    held = jax.jit(lambda p: state.make_state(p, optimizer, module.extra, sums))(module.params)
    # Moments are noise, as in training: zeros are compressed to nothing.
    noise = jax.tree.map(
        lambda leaf: (
            jax.random.normal(jax.random.key(0), leaf.shape, leaf.dtype) if leaf.ndim else leaf
        ),
        held.opt_state,
    )
    held = dataclasses.replace(held, opt_state=noise)
    jax.block_until_ready(held)
    checkpoints: list[Checkpointer] = []

    def save(folder: Path) -> None:
        checkpoints[:] = [Checkpointer(folder)]
        checkpoints[0].save(held, Progress(step=1))

    def restore(folder: Path) -> None:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), held
        )
        jax.block_until_ready(Checkpointer(folder).restore(1, like))

    count, facts = training.tree_bytes(held), training.jax_facts(module.params)
    wait = lambda: checkpoints[0].wait()  # noqa: E731
    return _round_trip(count, save, restore, harness.jax_peak_bytes, facts, wait)


def hfseq_weights(model: str, size: dict[str, Any], weights: str) -> Running:
    """``save_pretrained`` and ``from_pretrained``, through the two-way map of names."""
    import jax

    config, kind = training.configuration(model, size), training.hfseq_class(model)
    module = kind.from_pretrained(weights, config=config)

    def restore(folder: Path) -> None:
        jax.block_until_ready(kind.from_pretrained(folder, config=config).params)

    count, facts = training.tree_bytes(module.params), training.jax_facts(module.params)
    return _round_trip(count, module.save_pretrained, restore, harness.jax_peak_bytes, facts)


def torch_state(model: str, size: dict[str, Any], weights: str) -> Running:
    """PyTorch's model and optimizer in one file."""
    import torch

    module, device = training.load_torch(model, weights, training.configuration(model, size))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for moments in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.nn.init.normal_(moments[name])

    def save(folder: Path) -> None:
        held = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(held, folder / "state.pt")
        _flush(folder)

    def restore(folder: Path) -> None:
        held = torch.load(folder / "state.pt", map_location=device, weights_only=True)
        module.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])

    count, facts = 3 * _torch_bytes(module), training.torch_facts(module)
    return _round_trip(count, save, restore, harness.torch_peak_bytes, facts)


def torch_weights(model: str, size: dict[str, Any], weights: str) -> Running:
    config = training.configuration(model, size)
    module, _ = training.load_torch(model, weights, config)

    def restore(folder: Path) -> None:
        training.load_torch(model, str(folder), config)

    count, facts = _torch_bytes(module), training.torch_facts(module)
    return _round_trip(count, module.save_pretrained, restore, harness.torch_peak_bytes, facts)


def _torch_bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def plain(model: str, size: dict[str, Any], weights: str) -> Running:
    """As many bytes as the state has, in one file."""
    count = 3 * (Path(weights) / "model.safetensors").stat().st_size
    content = (os.urandom(min(count, 1 << 20)) * (count // (1 << 20) + 1))[:count]

    def save(folder: Path) -> None:
        (folder / "plain").write_bytes(content)
        _flush(folder)

    def restore(folder: Path) -> None:
        with open(folder / "plain", "rb") as file:
            while file.read(1 << 24):
                pass

    return _round_trip(count, save, restore, harness.host_peak_bytes, {"device": "cpu"})


# -- from the start of a process to the end of its first training step

CACHES = {"torch": "TORCHINDUCTOR_CACHE_DIR", "hfseq": "JAX_COMPILATION_CACHE_DIR"}
HELP = "hfseq --help"


def startup_cases(options: Options) -> list[Case]:
    found = []
    rounds = options.choose(2, 3, 2, 1)
    models = (("gpt2", "GPT-2 small", 512), ("roberta", "RoBERTa-base", 128))
    for model, title, length in models[: options.choose(1, 2, 2, 1)]:
        rows, length = options.choose(2, 8, 2, 2), options.choose(length, length, 128, 12)
        name, members = f"{title}, {rows} x {length}", []
        # A process of its own for every step: nothing is warmed up but the caches that should be.
        case = training.case_of(
            options, model, name, rows, length, 0, "float32", unit="starts", rounds=rounds, warmup=0
        )
        for one in case.contestants:
            side = "hfseq" if one.name == "hfseq" else "torch"
            for state in ("",) if one.name == harness.NAMES["torch"] else (", cold", ", warm"):
                given = {"side": side, "warm": state == ", warm", "settings": one.settings}
                members.append(
                    dataclasses.replace(
                        one, name=one.name + state, factory="checkpoints:process", settings=given
                    )
                )
        found.append(dataclasses.replace(case, contestants=tuple(members), amount=1.0))
    if "hfseq" in options.peers:
        alone = Contestant(HELP, HELP, "checkpoints:help_command")
        found.append(Case("the command line", (alone,), 1.0, "starts", rounds=rounds))
    return found


def process(side: str, warm: bool, settings: dict[str, Any], weights: str) -> Running:
    """Start a process a step; a warm cache is filled by one more at the beginning."""
    home = Path(tempfile.mkdtemp(prefix="hfseq-start-"))
    code = f"import sys; sys.path.insert(0, {str(harness.HERE)!r}); import checkpoints; "
    peak = done = 0

    def start(cache: Path) -> dict[str, float]:
        nonlocal peak
        given = {"side": side, "settings": settings | {"weights": weights}, "started": time.time()}
        ended = subprocess.run(
            [sys.executable, "-c", code + "checkpoints.child()", json.dumps(given)],
            text=True,
            check=False,
            env=os.environ | {CACHES[side]: str(cache)},
            stdout=subprocess.PIPE,
        )
        if ended.returncode:
            raise RuntimeError(f"the process ended with exit code {ended.returncode}")
        found = json.loads(ended.stdout.splitlines()[-1])
        peak = max(peak, int(found.pop("peak_bytes")))
        return found | {"seconds": sum(found[k] for k in ("imports", "build", "first_step"))}

    if warm:
        start(home / "warm")

    def step() -> dict[str, float]:
        nonlocal done
        done += 1
        return start(home / ("warm" if warm else f"cold{done}"))

    facts = {"side": side, "warm": warm}
    return Running(step, lambda: peak, facts, lambda: shutil.rmtree(home))


def child() -> None:
    """Be the process that is measured: import, build and step twice, and say how long each took."""
    given = json.loads(sys.argv[1])
    harness.use_extra_packages()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if given["side"] == "torch":
        import torch  # noqa: F401
        import transformers  # noqa: F401
    else:
        import hfseq

        hfseq.FlaxAutoModel  # noqa: B018  (the classes are found when they are first used)
    marks = [given["started"], time.time()]
    running = getattr(training, f"{given['side']}_step")(**given["settings"])
    marks.append(time.time())
    for _ in range(2):
        running.step()
        marks.append(time.time())
    phases = ("imports", "build", "first_step", "second_step")
    taken = {n: b - a for n, (a, b) in zip(phases, itertools.pairwise(marks), strict=True)}
    taken["peak_bytes"] = float(running.memory())
    print(json.dumps(taken), file=answers, flush=True)
    os._exit(0)


def help_command() -> Running:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    start = functools.partial(
        subprocess.run,
        [sys.executable, "-m", "hfseq.cli", "--help"],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    return Running(
        harness.working(start),
        lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    )


_SECONDS = "{:.2f} s".format
CHECKPOINT = Suite(
    "Checkpoints",
    "The whole training state (parameters and both moments of AdamW) to disk and back, flushed to "
    "the device. *Blocked* is the time until the training loop may go on: hfseq writes in the "
    "background. PyTorch is `torch.save` and `torch.load` of the same state; a plain file of as "
    "many bytes shows what the disk can do. Weights alone are what `save_pretrained` and "
    "`from_pretrained` handle.",
    checkpoint_cases,
    (
        harness.CASE,
        harness.value("GB", "gigabytes", "{:.2f}".format),
        harness.value("on disk", "disk_gb", "{:.2f}".format),
        harness.value("save, s/GB", "save_per_gb", "{:.2f}".format),
        harness.value("restore, s/GB", "restore_per_gb", "{:.2f}".format),
        harness.value("blocked", "blocked", lambda s: f"{s * 1000:.0f} ms"),
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
    "A new process each time: importing, building the model with its optimizer, and the first "
    "training step, which compiles. *Cold* begins with an empty cache of compiled programs, *warm* "
    "with what an earlier process left there (hfseq's loop keeps one by default).",
    startup_cases,
    (
        harness.CASE,
        ("seconds", lambda row: _SECONDS(row["median_seconds"])),
        harness.value("imports", "imports", _SECONDS),
        harness.value("model", "build", _SECONDS),
        harness.value("first step", "first_step", _SECONDS),
        harness.value("second step", "second_step", _SECONDS),
        harness.RATIO,
        harness.MEMORY,
    ),
    "seconds",
)
