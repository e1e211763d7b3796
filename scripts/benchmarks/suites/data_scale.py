"""Ten times the corpus: time in proportion, memory as before."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

from suites import corpus, tables
from suites.base import NAMES, Case, Options

TITLE = "Ten times the corpus"
SUMMARY = (
    "Synthetic text through the real path of a run: the file is read, tokenised once into a "
    "memory-mapped store, and batches are fetched and masked in the order of training. *Memory* is "
    "the most anonymous memory of the process above what it had at the start; pages of mapped "
    "files, which the system can drop, are not in it."
)
PICTURE = None
NEEDS = ("jax", "flax", "transformers", "tokenizers", "datasets", "filelock")
VOCABULARY, LENGTH, ROWS = 8000, 128, 64


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


COLUMNS = (
    tables.CASE, ("tokens", tables.value("tokens", lambda n: f"{n / 1e6:.1f} M")),
    ("preparing", tables.value("prepare_seconds", lambda s: f"{s:.1f} s")),
    ("tokens/s", tables.value("tokens_per_second", lambda n: f"{n:.0f}")),
    ("ms a batch", tables.value("batch_seconds", lambda s: f"{s * 1000:.2f}")),
    ("memory, preparing", tables.value("prepare_bytes", _megabytes)),
    ("memory, batches", tables.value("batch_bytes", _megabytes)),
    ("store", tables.value("store_bytes", _megabytes)),
)  # fmt: skip


def cases(options: Options) -> list[Case]:
    """Return a corpus and one of ten times its size, each in a process of its own."""
    small = options.choose(100, 100, 4, 0.05)
    found = []
    for megabytes in (small, 10 * small):
        name = f"{megabytes:g} MB"
        settings = {
            "megabytes": megabytes, "vocab_size": options.choose(*[VOCABULARY] * 2, 2000, 300),
            "batches": options.choose(2000, 2000, 100, 3),
        }  # fmt: skip
        member = harness.Contestant(
            NAMES["hfseq"], name, "suites.data_scale:corpus_of", settings, NEEDS,
            {"HF_DATASETS_OFFLINE": "1"},
        )  # fmt: skip
        found.append(Case(name, (member,), 0.0, rounds=1, warmup=0))
    return found


def corpus_of(megabytes: float, vocab_size: int, batches: int) -> harness.Running:
    """Write the text, then prepare it and fetch batches in the step."""
    from hfseq.training.arguments import parse

    home = Path(tempfile.mkdtemp(prefix="hfseq-corpus-"))
    corpus.write(home / "text.txt", int(megabytes * 1e6))
    sample = home / "sample.txt"
    corpus.write(sample, min(int(megabytes * 1e6), 2_000_000))
    tokenizer = corpus.tokenizer(sample, vocab_size)
    flags = {
        "output_dir": home / "run", "train_file": home / "text.txt", "data_cache_dir":
        home / "cache", "cache_dir": home / "hub", "validation_split_percentage": 0,
        "max_seq_length": LENGTH, "do_train": True,
    }  # fmt: skip
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    arguments = parse(given, objective="mlm")

    def step() -> dict[str, float]:
        return _prepare_and_fetch(arguments, tokenizer, batches, home / "cache")

    return harness.Running(
        step, harness.host_peak_bytes, {"device": "cpu"}, lambda: shutil.rmtree(home)
    )


def _prepare_and_fetch(
    arguments: Any, tokenizer: Any, batches: int, cache: Path
) -> dict[str, float]:
    from types import SimpleNamespace

    import numpy as np

    from hfseq import plugins
    from hfseq.data.arguments import OBJECTIVES, convert
    from hfseq.data.batches import Batches, RowRandom
    from hfseq.objectives.mlm import MaskedLM

    data = convert(arguments.data, OBJECTIVES["mlm"])
    objective = MaskedLM(data, tokenizer, SimpleNamespace(vocab_size=len(tokenizer)))
    before = anonymous_bytes()
    with peak(anonymous_bytes) as preparing:
        started = time.perf_counter()
        rows, facts = objective.make_rows(objective.load_splits(plugins.load()), "train", LENGTH)
        prepared = time.perf_counter() - started
    source = Batches(rows, min(ROWS, len(rows)), seed=0)
    after = anonymous_bytes()
    with peak(anonymous_bytes) as fetching:
        started = time.perf_counter()
        for step in range(batches):
            fetched = source[step]
            objective.collate(fetched, RowRandom(0, step, np.arange(len(fetched["valid"]))), 1)
        seconds = time.perf_counter() - started
    store = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file())
    tokens = float(rows.total)
    return {
        "work": tokens, "tokens": tokens, "prepare_seconds": prepared,
        "tokens_per_second": tokens / prepared, "batch_seconds": seconds / batches,
        "prepare_bytes": float(max(preparing) - before),
        "batch_bytes": float(max(fetching) - after), "store_bytes": float(store),
        "documents": float(facts.get("documents", 0)),
    }  # fmt: skip


def anonymous_bytes() -> int:
    """Return the resident memory of this process that belongs to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


@contextmanager
def peak(read: Callable[[], int], every: float = 0.02) -> Iterator[list[int]]:
    """Read again and again in a thread while the block runs; yields the list of what was read."""
    found, stopped = [read()], threading.Event()

    def watch() -> None:
        while not stopped.wait(every):
            found.append(max(found.pop(), read()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stopped.set()
        thread.join()
        found.append(read())


def remarks(rows: list[dict]) -> list[str]:
    """Compare the two sizes."""
    done = [row for row in rows if row["values"]]
    if len(done) < 2:
        return []
    small, large = done[0]["values"][-1], done[-1]["values"][-1]
    times = large["tokens"] / small["tokens"]
    longer = {key: large[key] / small[key] for key in ("prepare_seconds", "batch_seconds")}
    grown = [
        f"{what} by {(large[key] - small[key]) / 1e6:+.0f} MB"
        for what, key in (("preparing", "prepare_bytes"), ("batches", "batch_bytes"))
    ]
    return [
        f"{times:.1f} times the tokens took {longer['prepare_seconds']:.1f} times as long to "
        f"prepare, and a batch {longer['batch_seconds']:.2f} times as long to make; memory changed "
        f"for {', for '.join(grown)}."
    ]
