"""The data pipeline: stage by stage, in a real run, and with ten times the text (suites of run.py).

The text is synthetic, of any size and the same for everyone: no network.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
from harness import Case, Contestant, Options, Rows, Running, Suite

LENGTH, ROWS = 128, 64
#: Bytes a token that a stage reads and writes at least, in int32 (and a byte of text or a mark of
#: a mask): ids; ids, segments and positions; ids and labels.
STAGE_BYTES = {"tokenise": 4, "pack": 16, "mask": 16, "whole batch": 28}
NEEDS = {
    "torch": ("torch", "transformers", "tokenizers", "datasets"),
    "hfseq": ("transformers", "tokenizers", "filelock"),
}
LOOP_NEEDS = ("jax", "flax", "optax", "orbax", "transformers", "tokenizers", "datasets")
OFFLINE = {"HF_DATASETS_OFFLINE": "1"}

# -- the text and its tokenizer

WORDS = 50_000
_ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou", "ee")


def write_text(path: Path, size: int, seed: int = 0) -> int:
    """Write about ``size`` bytes of text, a document a line; returns the bytes written.

    Words are made up of syllables and drawn by Zipf's law (the share of the n-th is 1/n), documents
    have 20 to 600 of them. It is written in blocks, so memory does not grow with the size.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    found: dict[str, None] = {}
    while len(found) < WORDS:
        lengths = random.integers(1, 5, WORDS)
        flat = iter(random.integers(0, len(syllables), int(lengths.sum())))
        for length in lengths:
            found["".join(syllables[next(flat)] for _ in range(length))] = None
    words = np.array(list(found)[:WORDS], dtype=object)
    shares = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            count = min(200_000, max(1000, (size - written) // 6))
            drawn = words[np.searchsorted(shares, random.random(count) * shares[-1])]
            places = np.cumsum(random.integers(20, 600, count // 20))
            for part in np.split(drawn, places[places < count]):
                if len(part):
                    written += file.write(" ".join(part) + ".\n")
    return written


def train_tokenizer(path: Path, vocab_size: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train([str(path)], vocab_size=vocab_size, special_tokens=special, show_progress=False)
    made._tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=512,
    )


def corpus(megabytes: float, vocab_size: int) -> tuple[Path, Any]:
    """Write ``text.txt``; returns its folder and a tokenizer, which learns from a part."""
    home, size = Path(tempfile.mkdtemp(prefix="hfseq-corpus-")), int(megabytes * 1e6)
    write_text(home / "text.txt", size)
    write_text(home / "sample.txt", min(size, 2_000_000))
    return home, train_tokenizer(home / "sample.txt", vocab_size)


def documents(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def parse_flags(objective: str, home: Path, **flags: Any) -> Any:
    from hfseq.training.arguments import parse

    flags |= {
        "output_dir": home / "run",
        "train_file": home / "text.txt",
        "data_cache_dir": home / "cache",
        "cache_dir": home / "hub",
        "validation_split_percentage": 0,
        "do_train": True,
    }
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return parse(given, objective=objective)


# -- stages


def data_cases(options: Options) -> list[Case]:
    megabytes = options.choose(8, 32, 1, 0.02)
    settings = {"megabytes": megabytes, "vocab_size": options.choose(8000, 8000, 2000, 300)}
    found = []
    for stage in STAGE_BYTES:
        members = tuple(
            Contestant(
                harness.NAMES[side],
                stage,
                f"data:{side}_stage",
                settings | {"stage": stage},
                NEEDS[side],
            )
            for side in ("torch", "hfseq")
            if side in options.peers
        )
        found.append(Case(stage, members, rounds=options.choose(5, 7, 3, 1)))
    width = options.choose(256, 768, 64, 32)
    for objective in ("mlm", "clm") if "hfseq" in options.peers else ():
        name = f"real loop, {objective}, width {width}"
        loop = settings | {
            "objective": objective,
            "steps": options.choose(40, 200, 20, 3),
            "width": width,
            "layers": options.choose(4, 12, 1, 1),
            "rows": options.choose(16, 64, 8, 2),
        }
        member = Contestant("hfseq", name, "data:hfseq_loop", loop, LOOP_NEEDS, OFFLINE)
        found.append(Case(name, (member,), rounds=1, warmup=0))
    return found


def hfseq_stage(stage: str, megabytes: float, vocab_size: int) -> Running:
    import numpy as np

    from hfseq.data.batches import Batches, PackedRows, RowRandom
    from hfseq.data.store import TokenStore
    from hfseq.data.tokenize import DocumentEncoder
    from hfseq.data.tokenizers import special_ids
    from hfseq.objectives.mlm import gather_masked, mask_tokens

    home, tokenizer = corpus(megabytes, vocab_size)
    texts, encode = documents(home / "text.txt"), DocumentEncoder(tokenizer)
    ids, lengths = encode(texts)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = PackedRows(TokenStore(ids, offsets, tokenizer.pad_token_id), LENGTH)
    batches = Batches(rows, min(ROWS, len(rows)), seed=0)
    special = special_ids(tokenizer, len(tokenizer))
    ready = [batches[step] for step in range(len(batches))] if stage == "mask" else []

    def mask(step: int, batch: dict[str, Any]) -> None:
        random = RowRandom(0, step, np.arange(len(batch["input_ids"])))
        _, labels = mask_tokens(
            batch,
            random,
            mask_id=tokenizer.mask_token_id,
            vocab_size=len(tokenizer),
            special=special,
        )
        gather_masked(labels, 1, 0.15)

    def pack() -> None:
        for step in range(len(batches)):
            rows.fetch(batches.indices(step)[0])

    def whole() -> None:
        for step in range(len(batches)):
            mask(step, batches[step])

    stages: dict[str, Callable[[], Any]] = {
        "tokenise": lambda: encode(texts),
        "pack": pack,
        "whole batch": whole,
        "mask": lambda: [mask(step, batch) for step, batch in enumerate(ready)],
    }
    return _stage(home, stages[stage], stage, len(ids))


def torch_stage(stage: str, megabytes: float, vocab_size: int) -> Running:
    """The same stage as the scripts of Transformers do it."""
    import datasets
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    home, tokenizer = corpus(megabytes, vocab_size)
    raw = datasets.Dataset.from_dict({"text": documents(home / "text.txt")})
    options = {"batched": True, "load_from_cache_file": False, "keep_in_memory": True}

    def tokenise() -> Any:
        return raw.map(
            lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]},
            remove_columns=["text"],
            **options,
        )

    def grouped(batch: dict[str, list]) -> dict[str, list]:
        flat = [token for row in batch["input_ids"] for token in row]
        total = len(flat) // LENGTH * LENGTH
        return {"input_ids": [flat[i : i + LENGTH] for i in range(0, total, LENGTH)]}

    tokenised = tokenise()
    packed = tokenised.map(grouped, **options)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    ready = (
        [packed[i : i + ROWS]["input_ids"] for i in range(0, len(packed), ROWS)]
        if stage == "mask"
        else []
    )

    def whole() -> None:
        for _ in DataLoader(packed, ROWS, shuffle=True, collate_fn=collate):
            pass

    stages: dict[str, Callable[[], Any]] = {
        "tokenise": tokenise,
        "pack": lambda: tokenised.map(grouped, **options),
        "mask": lambda: [collate([{"input_ids": row} for row in rows]) for rows in ready],
        "whole batch": whole,
    }
    return _stage(home, stages[stage], stage, sum(map(len, tokenised["input_ids"])))


def _stage(home: Path, stage: Callable[[], Any], name: str, tokens: int) -> Running:
    facts = {"tokens": tokens, "device": "cpu", "bytes": float(tokens * STAGE_BYTES[name])}
    step = harness.working(stage, tokens)
    return Running(step, harness.host_peak_bytes, facts, lambda: shutil.rmtree(home))


# -- the real loop


def hfseq_loop(
    objective: str,
    megabytes: float,
    vocab_size: int,
    steps: int,
    width: int,
    layers: int,
    rows: int,
) -> Running:
    """A run of the training loop; seconds are those between its first step and its last."""
    from hfseq.training.run import main

    home, tokenizer = corpus(megabytes, vocab_size)
    tokenizer.save_pretrained(home / "tokenizer")
    model, length, sizes = {
        "mlm": (
            "roberta",
            "max_seq_length",
            {
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "intermediate_size": 4 * width,
            },
        ),
        "clm": ("gpt2", "block_size", {"n_embd": width, "n_layer": layers, "n_head": 4}),
    }[objective]
    flags = {
        "model_type": model,
        "tokenizer_name": home / "tokenizer",
        length: LENGTH,
        "config_overrides": ",".join(f"{k}={v}" for k, v in sizes.items()),
        "per_device_train_batch_size": rows,
        "max_steps": steps,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }

    def step() -> dict[str, float]:
        arguments = parse_flags(objective, home, **flags)
        with timed_feed() as times:
            main(arguments, objective)
        return times.values(rows * LENGTH)

    device = {"device": harness.jax_device()}
    return Running(step, harness.jax_peak_bytes, device, lambda: shutil.rmtree(home))


class Times:
    """When the loop asked for a batch, and when it got it."""

    def __init__(self) -> None:
        self.asked, self.got = list[float](), list[float]()

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, noting both times."""
        with contextlib.closing(batches):  # type: ignore[type-var]
            while True:
                self.asked.append(time.perf_counter())
                try:
                    item = next(batches)
                except StopIteration:
                    return
                self.got.append(time.perf_counter())
                yield item

    def values(self, tokens: int) -> dict[str, float]:
        """Return seconds, tokens and the share of waiting, the first step (which compiles) apart.

        ``tokens`` are those of a step. The second batch was ready while the first step compiled,
        so counting begins with the request for the third one.
        """
        if len(self.asked) < 4:
            raise ValueError(f"{len(self.got)} steps are too few: give at least 3")
        seconds = self.asked[-1] - self.asked[2]
        waits = [b - a for a, b in zip(self.asked[2:-1], self.got[2:], strict=True)]
        return {
            "seconds": seconds,
            "waiting": sum(waits) / seconds,
            "work": float(tokens * len(waits)),
            "longest_wait": max(waits),
        }


@contextlib.contextmanager
def timed_feed() -> Iterator[Times]:
    """Let loops in the block note when they wait for data; yields their times."""
    from unittest import mock

    from hfseq.training.loader import Loader

    times, original = Times(), Loader.batches

    def batches(self: Any, start: int, stop: int) -> Iterator[Any]:
        return times.watch(original(self, start, stop))

    with mock.patch.object(Loader, "batches", batches):
        yield times


def data_remarks(rows: Rows) -> list[str]:
    remarks = []
    for row in rows:
        share = harness.median_of(row, "waiting") if row["seconds"] else None
        if share is not None:
            longest = harness.median_of(row, "longest_wait") or 0.0
            verdict = "never waits" if share < 0.01 else "waits, which it must not"
            remarks.append(
                f"{row['case']}: the step {verdict} ({share:.2%} of the time, at most "
                f"{longest * 1000:.1f} ms at once)."
            )
    return remarks


# -- ten times the text


def data_scale_cases(options: Options) -> list[Case]:
    small = options.choose(100, 100, 4, 0.05)
    found = []
    for megabytes in (small, 10 * small):
        name = f"{megabytes:g} MB"
        settings = {
            "megabytes": megabytes,
            "vocab_size": options.choose(8000, 8000, 2000, 300),
            "batches": options.choose(2000, 2000, 100, 3),
        }
        needs = ("jax", "flax", "transformers", "tokenizers", "datasets", "filelock")
        member = Contestant("hfseq", name, "data:prepare_corpus", settings, needs, OFFLINE)
        found.append(Case(name, (member,), rounds=1, warmup=0))
    return found


def prepare_corpus(megabytes: float, vocab_size: int, batches: int) -> Running:
    """Write the text, then prepare it and fetch batches in the step."""
    import numpy as np

    from hfseq import plugins
    from hfseq.data.arguments import OBJECTIVES, convert_arguments
    from hfseq.data.batches import Batches, RowRandom
    from hfseq.objectives.mlm import MaskedLM

    home, tokenizer = corpus(megabytes, vocab_size)
    arguments = parse_flags("mlm", home, max_seq_length=LENGTH)

    def step() -> dict[str, float]:
        data = convert_arguments(arguments.data, OBJECTIVES["mlm"])
        objective = MaskedLM(data, tokenizer, SimpleNamespace(vocab_size=len(tokenizer)))
        before = anonymous_bytes()
        with peak(anonymous_bytes) as preparing:
            started = time.perf_counter()
            splits = objective.load_splits(plugins.load())
            rows, facts = objective.make_rows(splits, "train", LENGTH)
            prepared = time.perf_counter() - started
        source = Batches(rows, min(ROWS, len(rows)), seed=0)
        after = anonymous_bytes()
        with peak(anonymous_bytes) as fetching:
            started = time.perf_counter()
            for number in range(batches):
                batch = source[number]
                objective.collate(batch, RowRandom(0, number, np.arange(len(batch["valid"]))), 1)
            seconds = time.perf_counter() - started
        store = sum(p.stat().st_size for p in (home / "cache").rglob("*") if p.is_file())
        tokens = float(rows.total)
        return {
            "work": tokens,
            "tokens": tokens,
            "prepare_seconds": prepared,
            "tokens_per_second": tokens / prepared,
            "batch_seconds": seconds / batches,
            "prepare_bytes": float(max(preparing) - before),
            "batch_bytes": float(max(fetching) - after),
            "store_bytes": float(store),
            "documents": float(facts.get("documents", 0)),
        }

    return Running(step, harness.host_peak_bytes, {"device": "cpu"}, lambda: shutil.rmtree(home))


def anonymous_bytes() -> int:
    """Return the resident memory of this process that belongs to no file."""
    return harness.process_bytes("RssAnon")


@contextlib.contextmanager
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


def data_scale_remarks(rows: Rows) -> list[str]:
    done = [row["values"][-1] for row in rows if row["values"]]
    if len(done) < 2:
        return []
    small, large = done[0], done[-1]
    longer = {
        key: large[key] / small[key] for key in ("tokens", "prepare_seconds", "batch_seconds")
    }
    grown = {key: (large[key] - small[key]) / 1e6 for key in ("prepare_bytes", "batch_bytes")}
    return [
        f"{longer['tokens']:.1f} times the tokens took {longer['prepare_seconds']:.1f} times as "
        f"long to prepare, and a batch {longer['batch_seconds']:.2f} times as long to make; memory "
        f"changed for preparing by {grown['prepare_bytes']:+.0f} MB, for batches by "
        f"{grown['batch_bytes']:+.0f} MB."
    ]


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


DATA = Suite(
    "Data pipeline",
    "Each stage alone on synthetic text: tokenising documents, packing them into rows of 128 "
    "tokens, masking rows (80/10/10), and all that a step needs (rows fetched, packed and masked). "
    "Beside it what the scripts of Transformers do: `datasets.map`, `group_texts`, the PyTorch "
    "collator and loader. The last rows train a model with the real loop: *waiting* is the share "
    "of the time in which the step waited for data.",
    data_cases,
    (*harness.DEFAULT[:-1], harness.value("waiting", "waiting", "{:.2%}".format), harness.MEMORY),
    "ratio",
    remarks=data_remarks,
)
DATA_SCALE = Suite(
    "Ten times the corpus",
    "Synthetic text through the real path of a run: the file is read, tokenised once into a "
    "memory-mapped store, and batches are fetched and masked in the order of training. *Memory* is "
    "the most anonymous memory of the process above what it had at the start; pages of mapped "
    "files, which the system can drop, are not in it.",
    data_scale_cases,
    (
        harness.CASE,
        harness.value("tokens", "tokens", lambda n: f"{n / 1e6:.1f} M"),
        harness.value("preparing", "prepare_seconds", "{:.1f} s".format),
        harness.value("tokens/s", "tokens_per_second", "{:.0f}".format),
        harness.value("ms a batch", "batch_seconds", lambda s: f"{s * 1000:.2f}"),
        harness.value("memory, preparing", "prepare_bytes", _megabytes),
        harness.value("memory, batches", "batch_bytes", _megabytes),
        harness.value("store", "store_bytes", _megabytes),
    ),
    remarks=data_scale_remarks,
)
