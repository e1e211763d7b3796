"""From the start of a process to the end of its first training step, with cold and warm caches."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from suites import tables
from suites.base import BASELINE, PACKAGES, Case, Options, compilers

TITLE = "Start-up and compilation"
SUMMARY = (
    "A new process each time: importing, building the model with its optimizer, and the first "
    "training step, which compiles. *Cold* begins with an empty cache of compiled programs, *warm* "
    "with what an earlier process left there (hfseq's loop keeps one by default)."
)
PICTURE = "seconds"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


COLUMNS = (
    tables.CASE, ("seconds", lambda row: _seconds(row["median_seconds"])),
    ("imports", tables.value("imports", _seconds)), ("model", tables.value("build", _seconds)),
    ("first step", tables.value("first_step", _seconds)),
    ("second step", tables.value("second_step", _seconds)), tables.RATIO, tables.MEMORY,
)  # fmt: skip
MODELS = (("gpt2", "GPT-2 small", 512), ("roberta", "RoBERTa-base", 128))
CACHES = {"torch": "TORCHINDUCTOR_CACHE_DIR", "hfseq": "JAX_COMPILATION_CACHE_DIR"}
HELP = "hfseq --help"
CHILD = (
    f"import sys; sys.path[:0] = [{str(harness.HERE)!r}, {str(harness.ROOT)!r}, "
    f"{str(harness.ROOT / 'plugins')!r}]; from suites import startup; startup.main()"
)


def cases(options: Options) -> list[Case]:
    """Return every model with each peer, cold and warm, and the command line by itself."""
    found = []
    rounds = options.choose(2, 3, 2, 1)
    for model, title, length in MODELS[: options.choose(1, 2, 2, 1)]:
        rows = options.choose(2, 8, 2, 2)
        length = options.choose(length, length, min(length, 128), 12)
        name = f"{title}, {rows} x {length}"
        settings = {
            "model": model, "dtype": "float32", "rows": rows, "length": length, "targets": 0,
            "size": options.size(model), "dropout": None,
        }  # fmt: skip
        members = []
        for peer in options.peers:
            side, compiled = peer.removesuffix("_compile"), peer.endswith("_compile")
            for state in ("",) if peer == "torch" else (", cold", ", warm"):
                title_of = {"torch": BASELINE, "torch_compile": "torch.compile", "hfseq": "hfseq"}
                given = {
                    "side": side, "warm": state == ", warm",
                    "settings": settings | ({"compiled": True} if compiled else {}),
                }  # fmt: skip
                members.append(
                    harness.Contestant(
                        title_of[peer] + state, name, "suites.startup:process", given,
                        PACKAGES[peer], programs=compilers(options) if compiled else (),
                    )
                )  # fmt: skip
        # A process of its own for every step: nothing is warmed up but the caches that should be.
        found.append(
            Case(name, tuple(members), 1.0, "starts", rounds=rounds, warmup=0,
                 weights=(model, options.size(model)))
        )  # fmt: skip
    if "hfseq" in options.peers:
        alone = harness.Contestant(HELP, HELP, "suites.startup:help_command")
        found.append(Case("the command line", (alone,), 1.0, "starts", rounds=rounds, warmup=1))
    return found


def process(side: str, warm: bool, settings: dict[str, Any], weights: str) -> harness.Running:
    """Start a process a step; a warm cache is filled by one more at the beginning."""
    home = Path(tempfile.mkdtemp(prefix="hfseq-start-"))
    settings = settings | {"weights": weights}
    peak = 0

    def start(cache: Path) -> dict[str, float]:
        nonlocal peak
        started = time.time()
        given = json.dumps({"side": side, "settings": settings, "started": started})
        done = subprocess.run(
            [sys.executable, "-c", CHILD, given], text=True, check=False,
            env=os.environ | {CACHES[side]: str(cache)}, stdout=subprocess.PIPE,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"the process ended with exit code {done.returncode}")
        found = json.loads(done.stdout.splitlines()[-1])
        peak = max(peak, int(found.pop("peak_bytes")))
        return found | {"seconds": sum(found[k] for k in ("imports", "build", "first_step"))}

    if warm:
        start(home / "warm")
    done = 0

    def step() -> dict[str, float]:
        nonlocal done
        done += 1
        return start(home / ("warm" if warm else f"cold{done}"))

    facts = {"side": side, "warm": warm}
    return harness.Running(step, lambda: peak, facts, lambda: shutil.rmtree(home))


def help_command() -> harness.Running:
    """The time until the command line has answered."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def step() -> dict[str, float]:
        subprocess.run(
            [sys.executable, "-m", "hfseq.cli", "--help"], check=True, env=environment,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return {}

    return harness.Running(step, _children_peak_bytes)


def _children_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def child(side: str, settings: dict[str, Any], started: float) -> dict[str, float]:
    """Import, build and step twice; returns the seconds of each and the peak memory."""
    import contestants

    if side == "torch":
        import torch  # noqa: F401
        import transformers  # noqa: F401
    else:
        import hfseq

        hfseq.FlaxAutoModel  # noqa: B018  (the classes are found when they are first used)
    marks = [started, time.time()]
    running = getattr(contestants, f"{side}_step")(**settings)
    marks.append(time.time())
    for _ in range(2):
        running.step()
        marks.append(time.time())
    phases = ("imports", "build", "first_step", "second_step")
    steps = itertools.pairwise(marks)
    taken = {name: b - a for name, (a, b) in zip(phases, steps, strict=True)}
    return taken | {"peak_bytes": float(running.memory())}


def main() -> None:
    """Be the process that is measured."""
    given = json.loads(sys.argv[1])
    sys.path += filter(None, os.environ.get(harness.EXTRA_PACKAGES, "").split(os.pathsep))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(child(**given)), file=answers, flush=True)
    os._exit(0)
