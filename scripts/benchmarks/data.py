"""The suites data and data_scale of run.py.

They measure the stages of the data pipeline, the pipeline within a real training run, and the
pipeline with ten times as much text. The text is synthetic and deterministic, so no network is
required.
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
from harness import Case, Contestant, Options, Rows, Suite, Workload

LENGTH, ROWS = 128, 64
#: Minimum number of bytes per token that each stage of the pipeline reads and writes. Token IDs,
#: segment IDs, positions and labels are int32. The text, or the selection of a masked token, takes
#: an additional byte.
STAGE_BYTES = {"tokenise": 4, "pack": 16, "mask": 16, "whole batch": 28}
STAGE_PACKAGES = {
    "torch": ("torch", "transformers", "tokenizers", "datasets"),
    "hfseq": ("transformers", "tokenizers", "filelock"),
}
LOOP_PACKAGES = ("jax", "flax", "optax", "orbax", "transformers", "tokenizers", "datasets")
OFFLINE = {"HF_DATASETS_OFFLINE": "1"}

# -- the text and its tokenizer

WORDS = 50_000
_ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou", "ee")


def write_text(path: Path, size: int, seed: int = 0) -> int:
    """Writes about ``size`` bytes of text with one document per line.

    Words consist of random syllables and follow Zipf's law: the frequency of the n-th word is
    proportional to 1/n. A document has 20 to 600 words. The text is written in blocks, so memory
    does not grow with the size.

    Returns:
        The number of bytes written.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    vocabulary: dict[str, None] = {}
    while len(vocabulary) < WORDS:
        lengths = random.integers(1, 5, WORDS)
        flat = iter(random.integers(0, len(syllables), int(lengths.sum())))
        for length in lengths:
            vocabulary["".join(syllables[next(flat)] for _ in range(length))] = None
    words = np.array(list(vocabulary)[:WORDS], dtype=object)
    shares = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    bytes_written = 0
    with open(path, "w", encoding="utf-8") as file:
        while bytes_written < size:
            count = min(200_000, max(1000, (size - bytes_written) // 6))
            tokens = words[np.searchsorted(shares, random.random(count) * shares[-1])]
            boundaries = np.cumsum(random.integers(20, 600, count // 20))
            for part in np.split(tokens, boundaries[boundaries < count]):
                if len(part):
                    bytes_written += file.write(" ".join(part) + ".\n")
    return bytes_written


def train_tokenizer(path: Path, vocab_size: int) -> Any:
    """Trains a byte-level BPE tokenizer on a text file."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train([str(path)], vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer._tokenizer.post_processor = RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=512,
    )


def make_corpus(megabytes: float, vocab_size: int) -> tuple[Path, Any]:
    """Writes ``text.txt``. Returns its folder and a tokenizer that is trained on a similar text."""
    folder, size = Path(tempfile.mkdtemp(prefix="hfseq-corpus-")), int(megabytes * 1e6)
    write_text(folder / "text.txt", size)
    write_text(folder / "sample.txt", min(size, 2_000_000))
    return folder, train_tokenizer(folder / "sample.txt", vocab_size)


def read_documents(path: Path) -> list[str]:
    """Returns the documents of a text file, one per line."""
    return path.read_text(encoding="utf-8").splitlines()


def parse_flags(objective: str, folder: Path, **flags: Any) -> Any:
    """Parses the flags of a training script for the corpus in ``folder``."""
    from hfseq.training.arguments import parse

    flags |= {
        "output_dir": folder / "run",
        "train_file": folder / "text.txt",
        "data_cache_dir": folder / "cache",
        "cache_dir": folder / "hub",
        "validation_split_percentage": 0,
        "do_train": True,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return parse(arguments, objective=objective)


# -- stages


def data_cases(options: Options) -> list[Case]:
    """Returns a case for each stage of the pipeline, and the cases that run the training loop."""
    megabytes = options.choose(8, 32, 1, 0.02)
    settings = {"megabytes": megabytes, "vocab_size": options.choose(8000, 8000, 2000, 300)}
    cases = []
    for stage in STAGE_BYTES:
        members = tuple(
            Contestant(
                harness.PEER_NAMES[side],
                stage,
                f"data:{side}_stage",
                settings | {"stage": stage},
                STAGE_PACKAGES[side],
            )
            for side in ("torch", "hfseq")
            if side in options.peers
        )
        cases.append(Case(stage, members, rounds=options.choose(5, 7, 3, 1)))
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
        member = Contestant("hfseq", name, "data:hfseq_loop", loop, LOOP_PACKAGES, OFFLINE)
        cases.append(Case(name, (member,), rounds=1, warmup=0))
    return cases


def hfseq_stage(stage: str, megabytes: float, vocab_size: int) -> Workload:
    """Builds a stage of the data pipeline of hfseq."""
    import numpy as np

    from hfseq.data.batches import Batches, PackedRows, RowRandom
    from hfseq.data.store import TokenStore
    from hfseq.data.tokenize import DocumentEncoder
    from hfseq.data.tokenizers import special_ids
    from hfseq.objectives.mlm import gather_masked, mask_tokens

    folder, tokenizer = make_corpus(megabytes, vocab_size)
    texts, encode = read_documents(folder / "text.txt"), DocumentEncoder(tokenizer)
    ids, lengths = encode(texts)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = PackedRows(TokenStore(ids, offsets, tokenizer.pad_token_id), LENGTH)
    batches = Batches(rows, min(ROWS, len(rows)), seed=0)
    special_mask = special_ids(tokenizer, len(tokenizer))
    ready = [batches[step] for step in range(len(batches))] if stage == "mask" else []

    def mask(step: int, batch: dict[str, Any]) -> None:
        random = RowRandom(0, step, np.arange(len(batch["input_ids"])))
        _, labels = mask_tokens(
            batch,
            random,
            mask_id=tokenizer.mask_token_id,
            vocab_size=len(tokenizer),
            special=special_mask,
        )
        gather_masked(labels, 1, 0.15)

    def pack() -> None:
        for step in range(len(batches)):
            rows.fetch(batches.indices(step)[0])

    def whole_batch() -> None:
        for step in range(len(batches)):
            mask(step, batches[step])

    stages: dict[str, Callable[[], Any]] = {
        "tokenise": lambda: encode(texts),
        "pack": pack,
        "whole batch": whole_batch,
        "mask": lambda: [mask(step, batch) for step, batch in enumerate(ready)],
    }
    return _stage(folder, stages[stage], stage, len(ids))


def torch_stage(stage: str, megabytes: float, vocab_size: int) -> Workload:
    """Builds the same stage with the method of the example scripts of Transformers."""
    import datasets
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    folder, tokenizer = make_corpus(megabytes, vocab_size)
    raw = datasets.Dataset.from_dict({"text": read_documents(folder / "text.txt")})
    options = {"batched": True, "load_from_cache_file": False, "keep_in_memory": True}

    def tokenize() -> Any:
        return raw.map(
            lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]},
            remove_columns=["text"],
            **options,
        )

    def group_texts(batch: dict[str, list]) -> dict[str, list]:
        flat = [token for row in batch["input_ids"] for token in row]
        total = len(flat) // LENGTH * LENGTH
        return {"input_ids": [flat[i : i + LENGTH] for i in range(0, total, LENGTH)]}

    tokenized = tokenize()
    packed = tokenized.map(group_texts, **options)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    ready = (
        [packed[i : i + ROWS]["input_ids"] for i in range(0, len(packed), ROWS)]
        if stage == "mask"
        else []
    )

    def whole_batch() -> None:
        for _ in DataLoader(packed, ROWS, shuffle=True, collate_fn=collate):
            pass

    stages: dict[str, Callable[[], Any]] = {
        "tokenise": tokenize,
        "pack": lambda: tokenized.map(group_texts, **options),
        "mask": lambda: [collate([{"input_ids": row} for row in rows]) for rows in ready],
        "whole batch": whole_batch,
    }
    return _stage(folder, stages[stage], stage, sum(map(len, tokenized["input_ids"])))


def _stage(folder: Path, stage: Callable[[], Any], name: str, tokens: int) -> Workload:
    info = {"tokens": tokens, "device": "cpu", "bytes": float(tokens * STAGE_BYTES[name])}
    step = harness.make_step(stage, tokens)
    return Workload(step, harness.host_peak_bytes, info, lambda: shutil.rmtree(folder))


# -- the real loop


def hfseq_loop(
    objective: str,
    megabytes: float,
    vocab_size: int,
    steps: int,
    width: int,
    layers: int,
    rows: int,
) -> Workload:
    """Builds a run of the training loop. The time of a run excludes the compilation."""
    from hfseq.training.run import main

    folder, tokenizer = make_corpus(megabytes, vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
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
        "tokenizer_name": folder / "tokenizer",
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
        arguments = parse_flags(objective, folder, **flags)
        with timed_feed() as times:
            main(arguments, objective)
        return times.values(rows * LENGTH)

    device = {"device": harness.jax_device()}
    return Workload(step, harness.jax_peak_bytes, device, lambda: shutil.rmtree(folder))


class BatchTimes:
    """Records when the loop requested each batch, and when the batch was ready."""

    def __init__(self) -> None:
        self.request_times, self.ready_times = list[float](), list[float]()

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields ``batches`` and records both times."""
        with contextlib.closing(batches):  # type: ignore[type-var]
            while True:
                self.request_times.append(time.perf_counter())
                try:
                    item = next(batches)
                except StopIteration:
                    return
                self.ready_times.append(time.perf_counter())
                yield item

    def values(self, tokens: int) -> dict[str, float]:
        """Returns the seconds, the tokens and the share of waiting.

        The first step is excluded because it includes compilation. The second batch is loaded
        during this compilation, so the measured time starts when the loop requests the third
        batch.

        Args:
            tokens: Tokens per step.

        Raises:
            ValueError: The run has fewer than 3 steps.
        """
        if len(self.request_times) < 4:
            raise ValueError(f"{len(self.ready_times)} steps are too few, at least 3 are required")
        seconds = self.request_times[-1] - self.request_times[2]
        waits = [b - a for a, b in zip(self.request_times[2:-1], self.ready_times[2:], strict=True)]
        return {
            "seconds": seconds,
            "waiting": sum(waits) / seconds,
            "work": float(tokens * len(waits)),
            "longest_wait": max(waits),
        }


@contextlib.contextmanager
def timed_feed() -> Iterator[BatchTimes]:
    """Records when training loops wait for data while the `with` block runs.

    Yields:
        The recorded times.
    """
    from unittest import mock

    from hfseq.training.loader import Loader

    times, original = BatchTimes(), Loader.batches

    def batches(self: Any, start: int, stop: int) -> Iterator[Any]:
        return times.watch(original(self, start, stop))

    with mock.patch.object(Loader, "batches", batches):
        yield times


def data_remarks(rows: Rows) -> list[str]:
    """Returns a sentence for each measured training run that says how long it waited for data."""
    remarks = []
    for row in rows:
        share = harness.median_of(row, "waiting") if row["seconds"] else None
        if share is not None:
            longest = harness.median_of(row, "longest_wait") or 0.0
            verdict = "does not wait" if share < 0.01 else "waits too long"
            remarks.append(
                f"{row['case']}: the step {verdict} for data ({share:.2%} of the time, at most "
                f"{longest * 1000:.1f} ms per step)."
            )
    return remarks


# -- ten times the text


def data_scale_cases(options: Options) -> list[Case]:
    """Returns the cases for a corpus and for one that is ten times as large."""
    small = options.choose(100, 100, 4, 0.05)
    cases = []
    for megabytes in (small, 10 * small):
        name = f"{megabytes:g} MB"
        settings = {
            "megabytes": megabytes,
            "vocab_size": options.choose(8000, 8000, 2000, 300),
            "batches": options.choose(2000, 2000, 100, 3),
        }
        packages = ("jax", "flax", "transformers", "tokenizers", "datasets", "filelock")
        member = Contestant("hfseq", name, "data:prepare_corpus", settings, packages, OFFLINE)
        cases.append(Case(name, (member,), rounds=1, warmup=0))
    return cases


def prepare_corpus(megabytes: float, vocab_size: int, batches: int) -> Workload:
    """Writes the text, and builds a workload whose step prepares the text and fetches batches."""
    import numpy as np

    from hfseq import plugins
    from hfseq.data.arguments import OBJECTIVES, convert_arguments
    from hfseq.data.batches import Batches, RowRandom
    from hfseq.objectives.mlm import MaskedLM

    folder, tokenizer = make_corpus(megabytes, vocab_size)
    arguments = parse_flags("mlm", folder, max_seq_length=LENGTH)

    def step() -> dict[str, float]:
        data = convert_arguments(arguments.data, OBJECTIVES["mlm"])
        objective = MaskedLM(data, tokenizer, SimpleNamespace(vocab_size=len(tokenizer)))
        bytes_at_start = anonymous_bytes()
        with track_peak(anonymous_bytes) as preparing:
            start = time.perf_counter()
            splits = objective.load_splits(plugins.load())
            rows, info = objective.make_rows(splits, "train", LENGTH)
            prepared = time.perf_counter() - start
        source = Batches(rows, min(ROWS, len(rows)), seed=0)
        bytes_when_prepared = anonymous_bytes()
        with track_peak(anonymous_bytes) as fetching:
            start = time.perf_counter()
            for number in range(batches):
                batch = source[number]
                objective.collate(batch, RowRandom(0, number, np.arange(len(batch["valid"]))), 1)
            seconds = time.perf_counter() - start
        store = sum(p.stat().st_size for p in (folder / "cache").rglob("*") if p.is_file())
        tokens = float(rows.total)
        return {
            "work": tokens,
            "tokens": tokens,
            "prepare_seconds": prepared,
            "tokens_per_second": tokens / prepared,
            "batch_seconds": seconds / batches,
            "prepare_bytes": float(max(preparing) - bytes_at_start),
            "batch_bytes": float(max(fetching) - bytes_when_prepared),
            "store_bytes": float(store),
            "documents": float(info.get("documents", 0)),
        }

    return Workload(step, harness.host_peak_bytes, {"device": "cpu"}, lambda: shutil.rmtree(folder))


def anonymous_bytes() -> int:
    """Returns the resident memory of this process without the pages of mapped files."""
    return harness.process_bytes("RssAnon")


@contextlib.contextmanager
def track_peak(read: Callable[[], int], interval: float = 0.02) -> Iterator[list[int]]:
    """Tracks the maximum of a value in a thread while the `with` block runs.

    Args:
        read: Function that returns the current value.
        interval: Seconds between calls.

    Yields:
        A list with the maximum. At the end of the block, the last value is appended.
    """
    sizes, stopped = [read()], threading.Event()

    def watch() -> None:
        while not stopped.wait(interval):
            sizes.append(max(sizes.pop(), read()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        stopped.set()
        thread.join()
        sizes.append(read())


def data_scale_remarks(rows: Rows) -> list[str]:
    """Returns a sentence that compares the measurements of the small and the large corpus."""
    measured = [row["values"][-1] for row in rows if row["values"]]
    if len(measured) < 2:
        return []
    small, large = measured[0], measured[-1]
    ratios = {
        key: large[key] / small[key] for key in ("tokens", "prepare_seconds", "batch_seconds")
    }
    growth = {key: (large[key] - small[key]) / 1e6 for key in ("prepare_bytes", "batch_bytes")}
    return [
        f"With {ratios['tokens']:.1f} times the tokens, the preparation took "
        f"{ratios['prepare_seconds']:.1f} times as long, and a batch {ratios['batch_seconds']:.2f} "
        f"times as long. The memory for the preparation changed by "
        f"{growth['prepare_bytes']:+.0f} MB, and the memory for batches by "
        f"{growth['batch_bytes']:+.0f} MB."
    ]


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


DATA = Suite(
    "Data pipeline",
    "Each stage of the data pipeline is measured separately on synthetic text: tokenizing "
    "documents, packing them into rows of 128 tokens, and masking tokens (80/10/10). *whole batch* "
    "measures everything that happens in each training step: fetching, packing and masking. "
    "PyTorch uses the method of the example scripts of Transformers: `datasets.map`, "
    "`group_texts`, and PyTorch's collator and data loader. The cases *real loop* train a model. "
    "*waiting* is the share of the time that training waits for data.",
    data_cases,
    (
        *harness.DEFAULT_COLUMNS[:-1],
        harness.median_column("waiting", "waiting", "{:.2%}".format),
        harness.MEMORY,
    ),
    "ratio",
    remarks=data_remarks,
)
DATA_SCALE = Suite(
    "Ten times the corpus",
    "Synthetic text is processed as in a training run. The file is read and tokenized once, and "
    "the tokens are written to a memory-mapped file. Batches are then fetched and masked in the "
    "order of training. *Memory* is the peak of the anonymous memory of the process minus its "
    "value at the start. It excludes memory-mapped file pages, which the system can drop.",
    data_scale_cases,
    (
        harness.CASE,
        harness.median_column("tokens", "tokens", lambda n: f"{n / 1e6:.1f} M"),
        harness.median_column("preparing", "prepare_seconds", "{:.1f} s".format),
        harness.median_column("tokens/s", "tokens_per_second", "{:.0f}".format),
        harness.median_column("ms per batch", "batch_seconds", lambda s: f"{s * 1000:.2f}"),
        harness.median_column("memory, preparing", "prepare_bytes", _megabytes),
        harness.median_column("memory, batches", "batch_bytes", _megabytes),
        harness.median_column("store", "store_bytes", _megabytes),
    ),
    remarks=data_scale_remarks,
)
