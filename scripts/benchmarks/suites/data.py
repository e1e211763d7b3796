"""The data pipeline alone, stage by stage, and how long a real training step waits for it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import limits

from suites import corpus, tables
from suites.base import NAMES, Case, Options

TITLE = "Data pipeline"
SUMMARY = (
    "Each stage alone on synthetic text: tokenising documents, packing them into rows of 128 "
    "tokens, masking rows (80/10/10), and all that a step needs (rows fetched, packed and masked). "
    "Beside it what the scripts of Transformers do: `datasets.map`, `group_texts`, the PyTorch "
    "collator and loader. The last rows train a model with the real loop: *waiting* is the share "
    "of the time in which the step waited for data."
)
PICTURE = "ratio"
LENGTH, ROWS = 128, 64


def _waiting(row: dict) -> str:
    found = tables.values_of(row, "waiting")
    return f"{found:.2%}" if found is not None else tables.ABSENT


COLUMNS = (tables.CASE, tables.TOKENS, tables.TIME, tables.RATIO, tables.LIMIT,
           ("waiting", _waiting), tables.MEMORY)  # fmt: skip
#: Bytes a token that a stage reads and writes at least, in int32 (and a byte of text or a mark of
#: a mask): ids; ids, segments and positions; ids and labels.
STAGE_BYTES = {"tokenise": 4, "pack": 16, "mask": 16, "whole batch": 28}
STAGES = ("tokenise", "pack", "mask", "whole batch")
NEEDS = {
    "torch": ("torch", "transformers", "tokenizers", "datasets"),
    "hfseq": ("transformers", "tokenizers", "filelock"),
}
LOOP_NEEDS = ("jax", "flax", "optax", "orbax", "transformers", "tokenizers", "datasets")


def cases(options: Options) -> list[Case]:
    """Return the stages, whose steps say how many tokens they did, and real loops."""
    megabytes = options.choose(8, 32, 1, 0.02)
    settings = {"megabytes": megabytes, "vocab_size": options.choose(8000, 8000, 2000, 300)}
    found = []
    for stage in STAGES:
        members = tuple(
            harness.Contestant(
                NAMES[side], stage, f"suites.data:{side}_stage", settings | {"stage": stage},
                NEEDS[side],
            )
            for side in ("torch", "hfseq") if side in options.peers
        )  # fmt: skip
        found.append(Case(stage, members, 0.0, rounds=options.choose(5, 7, 3, 1), warmup=1))
    if "hfseq" in options.peers:
        width = options.choose(256, 768, 64, 32)
        for objective in ("mlm", "clm"):
            name = f"real loop, {objective}, width {width}"
            loop = settings | {
                "objective": objective, "steps": options.choose(40, 200, 20, 3), "width": width,
                "layers": options.choose(4, 12, 1, 1), "rows": options.choose(16, 64, 8, 2),
            }  # fmt: skip
            member = harness.Contestant(
                "hfseq", name, "suites.data:hfseq_loop", loop, LOOP_NEEDS,
                {"HF_DATASETS_OFFLINE": "1"},
            )  # fmt: skip
            found.append(Case(name, (member,), 0.0, rounds=1, warmup=0))
    return found


def _texts(megabytes: float, vocab_size: int) -> tuple[Path, list[str], Any]:
    """Write the text; returns its folder, documents and tokenizer, which learns from a part."""
    folder = Path(tempfile.mkdtemp(prefix="hfseq-corpus-"))
    path = folder / "text.txt"
    corpus.write(path, int(megabytes * 1e6))
    sample = folder / "sample.txt"
    corpus.write(sample, min(int(megabytes * 1e6), 2_000_000))
    return folder, corpus.lines(path), corpus.tokenizer(sample, vocab_size)


def hfseq_stage(stage: str, megabytes: float, vocab_size: int) -> harness.Running:
    """A stage of hfseq's pipeline over the whole text."""
    import numpy as np

    from hfseq.data.batches import Batches, PackedRows, RowRandom
    from hfseq.data.store import TokenStore
    from hfseq.data.tokenize import Encoder
    from hfseq.data.tokenizers import special_ids
    from hfseq.objectives.mlm import gather_masked, mask_tokens

    folder, texts, tokenizer = _texts(megabytes, vocab_size)
    encode = Encoder(tokenizer)
    ids, lengths = encode(texts)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = PackedRows(TokenStore(ids, offsets, tokenizer.pad_token_id), LENGTH)
    batches = Batches(rows, min(ROWS, len(rows)), seed=0)
    special = special_ids(tokenizer, len(tokenizer))
    ready = [batches[step] for step in range(len(batches))] if stage == "mask" else []

    def mask(step: int, batch: dict[str, Any]) -> None:
        random = RowRandom(0, step, np.arange(len(batch["input_ids"])))
        _, labels = mask_tokens(
            batch, random, mask_id=tokenizer.mask_token_id, vocab_size=len(tokenizer),
            special=special,
        )  # fmt: skip
        gather_masked(labels, 1, 0.15)

    def pack() -> None:
        for step in range(len(batches)):
            rows.fetch(batches.indices(step)[0])

    def whole() -> None:
        for step in range(len(batches)):
            mask(step, batches[step])

    stages: dict[str, Callable[[], Any]] = {
        "tokenise": lambda: encode(texts), "pack": pack, "whole batch": whole,
        "mask": lambda: [mask(step, batch) for step, batch in enumerate(ready)],
    }  # fmt: skip
    return _running(folder, stages[stage], stage, len(ids))


def torch_stage(stage: str, megabytes: float, vocab_size: int) -> harness.Running:
    """The same stage as the scripts of Transformers do it."""
    import datasets
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    folder, texts, tokenizer = _texts(megabytes, vocab_size)
    raw = datasets.Dataset.from_dict({"text": texts})
    options = {"batched": True, "load_from_cache_file": False, "keep_in_memory": True}

    def tokenise() -> Any:
        return raw.map(lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]},
                       remove_columns=["text"], **options)  # fmt: skip

    def grouped(batch: dict[str, list]) -> dict[str, list]:
        flat = [token for row in batch["input_ids"] for token in row]
        total = len(flat) // LENGTH * LENGTH
        return {"input_ids": [flat[i : i + LENGTH] for i in range(0, total, LENGTH)]}

    tokenised = tokenise()
    packed = tokenised.map(grouped, **options)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    ready = (
        [packed[i : i + ROWS]["input_ids"] for i in range(0, len(packed), ROWS)]
        if stage == "mask" else []
    )  # fmt: skip

    def whole() -> None:
        for _ in DataLoader(packed, ROWS, shuffle=True, collate_fn=collate):
            pass

    stages: dict[str, Callable[[], Any]] = {
        "tokenise": tokenise, "pack": lambda: tokenised.map(grouped, **options),
        "mask": lambda: [collate([{"input_ids": row} for row in rows]) for rows in ready],
        "whole batch": whole,
    }  # fmt: skip
    return _running(folder, stages[stage], stage, sum(map(len, tokenised["input_ids"])))


def _running(folder: Path, stage: Callable[[], Any], name: str, tokens: int) -> harness.Running:
    def step() -> dict[str, float]:
        stage()
        return {"work": float(tokens)}

    facts = {"tokens": tokens, "device": "cpu", "bytes": float(tokens * STAGE_BYTES[name])}
    return harness.Running(step, harness.host_peak_bytes, facts, lambda: shutil.rmtree(folder))


# -- the real loop


def hfseq_loop(
    objective: str, megabytes: float, vocab_size: int, steps: int, width: int, layers: int,
    rows: int,
) -> harness.Running:  # fmt: skip
    """A run of the training loop; seconds are those between its first step and its last."""
    from hfseq.training.arguments import parse
    from hfseq.training.run import Loop

    home, _, tokenizer = _texts(megabytes, vocab_size)
    tokenizer.save_pretrained(home / "tokenizer")
    model, sizes = {
        "mlm": ("roberta", {"hidden_size": width, "num_hidden_layers": layers,
                            "num_attention_heads": 4, "intermediate_size": 4 * width}),
        "clm": ("gpt2", {"n_embd": width, "n_layer": layers, "n_head": 4}),
    }[objective]  # fmt: skip
    length = "max_seq_length" if objective == "mlm" else "block_size"
    flags = {
        "output_dir": home / "run", "model_type": model, "tokenizer_name": home / "tokenizer",
        "config_overrides": ",".join(f"{k}={v}" for k, v in sizes.items()),
        "train_file": home / "text.txt", "validation_split_percentage": 0,
        "data_cache_dir": home / "cache", "cache_dir": home / "hub", length: LENGTH,
        "per_device_train_batch_size": rows, "max_steps": steps, "save_strategy": "no",
        "eval_strategy": "no", "report_to": "none", "do_train": True, "disable_tqdm": True,
    }  # fmt: skip
    given = [text for name, value in flags.items() for text in (f"--{name}", str(value))]

    def step() -> dict[str, float]:
        loop = Loop(parse(given, objective=objective), objective)
        with timed_feed() as times:
            loop.run()
        return times.values(rows * LENGTH)

    device = {"device": limits.jax_device()}
    return harness.Running(step, harness.jax_peak_bytes, device, lambda: shutil.rmtree(home))


class Times:
    """When the loop asked for a batch, and when it got it."""

    def __init__(self) -> None:
        self.asked, self.got = list[float](), list[float]()

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, noting both times."""
        import time

        try:
            while True:
                self.asked.append(time.perf_counter())
                try:
                    item = next(batches)
                except StopIteration:
                    return
                self.got.append(time.perf_counter())
                yield item
        finally:
            batches.close()  # type: ignore[attr-defined]

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
            "seconds": seconds, "waiting": sum(waits) / seconds, "work": float(tokens * len(waits)),
            "longest_wait": max(waits),
        }  # fmt: skip


def timed_feed() -> Any:
    """Let loops in the block note when they wait for data; yields their times."""
    import contextlib

    from hfseq.training import loader

    @contextlib.contextmanager
    def patched() -> Iterator[Times]:
        times, original = Times(), loader.Loader.batches

        def batches(self: Any, start: int, stop: int) -> Iterator[Any]:
            return times.watch(original(self, start, stop))

        loader.Loader.batches = batches  # type: ignore[method-assign]
        try:
            yield times
        finally:
            loader.Loader.batches = original  # type: ignore[method-assign]

    return patched()


def remarks(rows: list[dict]) -> list[str]:
    """Say whether a step ever waits for data."""
    found = []
    for row in rows:
        share = tables.values_of(row, "waiting") if row["seconds"] else None
        if share is not None:
            longest = tables.values_of(row, "longest_wait") or 0.0
            verdict = "never waits" if share < 0.01 else "waits, which it must not"
            found.append(
                f"{row['case']}: the step {verdict} ({share:.2%} of the time, at most "
                f"{longest * 1000:.1f} ms at once)."
            )
    return found
