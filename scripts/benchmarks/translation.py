"""Compare the translation of real sentences with hfseq, PyTorch and CTranslate2.

    python scripts/benchmarks/translation.py --sentences 128            # a quick check
    python scripts/benchmarks/translation.py                            # 1,000 sentences

All contestants use the same random weights, with the shapes of Marian-base (opus-mt, vocabulary
size 54,688), and generate the same number of new tokens per sentence. Each contestant translates
every batch once, and the contestants take turns after each batch. Greedy and beam search must
return the same tokens as PyTorch.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import training
from harness import Contestant, Row, Workload

MODES = ("greedy", "beam")
#: Contestants: name in the table, prefix of the factory, dtype, required packages.
SIDES = {
    "torch": ("PyTorch", "torch", "float32", harness.PYTORCH),
    "ctranslate2": ("CTranslate2", "ctranslate2", "float32", ("ctranslate2",)),
    "hfseq": ("hfseq", "hfseq", "float32", harness.HFSEQ),
    "hfseq_bfloat16": ("hfseq bfloat16", "hfseq", "bfloat16", harness.HFSEQ),
}
BASELINES = ("PyTorch", "CTranslate2")
DATA = Path(os.environ.get("HFSEQ_TEST_DATA", harness.ROOT.parent / "shared" / "data"))
END, UNKNOWN = 0, 1

# -- the workloads


def configuration(size: dict[str, Any]) -> Any:
    """Returns the configuration of a Marian model with changed sizes."""
    return training.make_config("marian", size)


def names(vocab_size: int) -> list[str]:
    """Returns the tokens of a vocabulary of the given size, as strings."""
    return ["</s>", "<unk>", *(f"t{i}" for i in range(2, vocab_size - 1)), "<pad>"]


def save_weights(folder: str, size: dict[str, Any]) -> Workload:
    """Writes the shared weights and, if CTranslate2 is installed, converts them."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import MarianMTModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = configuration(size)
    MarianMTModel(config).save_pretrained(folder)
    words = {word: number for number, word in enumerate(names(config.vocab_size))}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)
    if not Contestant("", "", "", requires=("ctranslate2",)).missing():
        import ctranslate2

        converter = ctranslate2.converters.TransformersConverter(folder)
        converter.convert(str(Path(folder) / "ctranslate2"))
    return Workload(lambda: {}, harness.host_peak_bytes)


def options_of(config: Any, beams: int, new_tokens: int) -> dict[str, Any]:
    """Returns the arguments of ``generate``.

    All outputs have the same length, and padding tokens are not generated, as with opus-mt models.
    """
    return {
        "num_beams": beams,
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "bad_words_ids": [[config.pad_token_id]],
    }


def read_batches(folder: str) -> list[list[list[int]]]:
    """Returns the token IDs of all batches."""
    return json.loads((Path(folder) / "sources.json").read_text())


def padded(rows: list[list[int]], count: int, pad: int) -> tuple[Any, Any]:
    """Returns int32 token IDs and an attention mask, ``(count, longest)``.

    If there are fewer than ``count`` sentences, the first one is repeated.
    """
    import numpy as np

    rows = rows + rows[:1] * (count - len(rows))
    ids = np.full((count, max(map(len, rows))), pad, np.int32)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    mask = np.arange(ids.shape[1])[None] < np.array([[len(row)] for row in rows])
    return ids, mask.astype(np.int32)


def translation_workload(
    folder: str, translate: Callable[[Any], Any], memory: Callable[[], int], info: Any
) -> Workload:
    """Returns a workload that translates the next batch in each step.

    This function first translates one batch of each width, so that all shapes are compiled.
    """
    batches = read_batches(folder)
    for batch in {max(map(len, batch)): batch for batch in batches}.values():
        translate(batch)
    batch_cycle = itertools.cycle(batches)

    def step() -> dict[str, Any]:
        return {"tokens": [[int(token) for token in row] for row in translate(next(batch_cycle))]}

    return Workload(step, memory, info)


def hfseq_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> Workload:
    """Translates with hfseq. All batches are padded to the same batch size to compile less."""
    import numpy as np

    config, rows = configuration(size), max(map(len, read_batches(folder)))
    options = options_of(config, beams, new_tokens)
    model = training.hfseq_class("marian").from_pretrained(folder, config=config, dtype=dtype)
    if dtype == "bfloat16":
        model.params = model.to_bf16(model.params)

    def translate(batch: list[list[int]]) -> Any:
        ids, mask = padded(batch, rows, config.pad_token_id)
        sequences = model.generate(ids, attention_mask=mask, **options).sequences
        return np.asarray(sequences)[: len(batch), -new_tokens:]

    info = training.jax_info(model.params)
    return translation_workload(folder, translate, harness.jax_peak_bytes, info)


def torch_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> Workload:
    """Translates with Transformers."""
    import torch
    from transformers import MarianMTModel

    config = configuration(size)
    options = options_of(config, beams, new_tokens)
    model = MarianMTModel.from_pretrained(folder, config=config, dtype=getattr(torch, dtype)).eval()

    def translate(batch: list[list[int]]) -> Any:
        arrays = padded(batch, len(batch), config.pad_token_id)
        ids, mask = (torch.from_numpy(array).long() for array in arrays)
        with torch.inference_mode():
            sequences = model.generate(ids, attention_mask=mask, **options)
        return sequences[:, -new_tokens:].numpy()

    info = training.torch_info(model) | {"device": "cpu"}
    return translation_workload(folder, translate, harness.torch_peak_bytes, info)


def ctranslate2_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> Workload:
    """Translates with CTranslate2."""
    import ctranslate2

    words = names(configuration(size).vocab_size)
    numbers = {word: number for number, word in enumerate(words)}
    translator = ctranslate2.Translator(
        str(Path(folder) / "ctranslate2"),
        device="cpu",
        compute_type=dtype,
        inter_threads=1,
        intra_threads=len(os.sched_getaffinity(0)),
    )

    def translate(batch: list[list[int]]) -> Any:
        results = translator.translate_batch(
            [[words[token] for token in row] for row in batch],
            beam_size=beams,
            min_decoding_length=new_tokens,
            max_decoding_length=new_tokens,
            max_batch_size=0,
        )
        return [[numbers[word] for word in result.hypotheses[0]] for result in results]

    return translation_workload(folder, translate, harness.host_peak_bytes, {"device": "cpu"})


# -- the command


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags."""
    parser = harness.make_parser(
        __doc__,
        sizes=True,
        beams=(4, "number of beams in beam search"),
        batch_size=(64, "sentences per batch"),
        sentences=(1000, "number of sentences"),
        new_tokens=(24, "tokens to generate per sentence"),
        least_agreement=(
            0.98,
            "minimum share of sentences with the same tokens as with PyTorch (random weights cause "
            "ties)",
        ),
    )
    modes_help = "search modes (default: all)"
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help=modes_help)
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=list(SIDES),
        help="contestants (default: all; hfseq_bfloat16 only if the CPU has bfloat16 units)",
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=DATA / "en-es-tatoeba" / "english-spanish.csv",
        help="CSV file with a column named english, or text file with one sentence per line",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=DATA / "tokenizers" / "t5-base",
        help="folder of a tokenizer; tokenizers of opus-mt require the package sentencepiece",
    )
    options = parser.parse_args(arguments)
    if options.sides is None:
        slow = not harness.bfloat16_units(harness.read_cpuinfo())
        options.sides = [side for side in SIDES if not (slow and side.endswith("bfloat16"))]
    return options


def contestants(options: argparse.Namespace, folder: str) -> list[Contestant]:
    """Returns a contestant for each search mode in ``--modes`` and each entry of ``--sides``."""
    shared = {
        "folder": folder,
        "size": harness.size_from_flags(options),
        "new_tokens": options.new_tokens,
    }
    return [
        Contestant(
            name,
            f"beam {options.beams}" if mode == "beam" else mode,
            f"translation:{side}_translate",
            shared | {"beams": options.beams if mode == "beam" else 1, "dtype": dtype},
            packages,
        )
        for mode in options.modes
        for name, side, dtype, packages in (SIDES[side] for side in options.sides)
    ]


def sentences(path: Path, count: int) -> list[str]:
    """Returns a fixed random sample of distinct sentences from a CSV or text file."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            texts = {row["english"] for row in csv.DictReader(lines)}
        else:
            texts = {line.strip() for line in lines if line.strip()}
    return random.Random(0).sample(sorted(texts), min(count, len(texts)))


def tokenized(texts: list[str], tokenizer: Path, vocab_size: int) -> list[list[int]]:
    """Returns token IDs with EOS. IDs outside of the model's vocabulary become unknown tokens."""
    from transformers import AutoTokenizer

    rows = AutoTokenizer.from_pretrained(tokenizer)(texts, add_special_tokens=False)["input_ids"]
    return [[i if END < i < vocab_size - 1 else UNKNOWN for i in row] + [END] for row in rows]


def batched(rows: list[list[int]], size: int) -> list[list[list[int]]]:
    """Groups sentences of similar length into batches and shuffles the batches."""
    rows = sorted(rows, key=len)
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    random.Random(1).shuffle(batches)
    return batches


def agreement(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Returns the share of sentences with the same tokens as the first contestant.

    The result is a dictionary by group and contestant.
    """
    shares: dict[str, dict[str, float]] = {}
    first = {row.group: row for row in reversed(rows)}
    for row in rows:
        expected, tokens = (
            [sentence for value in side.values for sentence in value["tokens"]]
            for side in (first[row.group], row)
        )
        if tokens and len(tokens) == len(expected):
            same = sum(a == b for a, b in zip(tokens, expected, strict=True))
            shares.setdefault(row.group, {})[row.name] = same / len(tokens)
    return shares


def disagreements(shares: dict[str, dict[str, float]], least: float) -> list[str]:
    """Returns a message for each group in which hfseq's share of equal sentences is too small."""
    return [
        f"{group}: only {by_contestant['hfseq']:.1%} of the sentences have the same tokens as with "
        "PyTorch"
        for group, by_contestant in shares.items()
        if by_contestant.get("hfseq", 1.0) < least
    ]


def summary(row: Row, rows: Sequence[Row], count: int) -> dict[str, Any]:
    """Returns the recorded values of a contestant."""
    rival = {other.name: other for other in rows if other.group == row.group and other.seconds}
    return {
        "name": row.name,
        "group": row.group,
        "status": row.status,
        "seconds": row.seconds,
        "sentences_per_second": count / sum(row.seconds) if row.seconds else None,
        "spread": row.spread,
        "start_seconds": row.start_seconds,
        "ratios": {name: harness.ratio(row, rival[name]) for name in BASELINES if name in rival},
        "peak_memory_gb": row.peak_bytes / harness.GB or None,
        "facts": row.info,
    }


COLUMNS: tuple[harness.Column, ...] = (
    ("search", lambda row: row["group"]),
    ("sentences/s", lambda row: f"{row['sentences_per_second']:.1f}"),
    ("against PyTorch", lambda row: harness.format_ratio(row["ratios"].get("PyTorch"))),
    ("against CTranslate2", lambda row: harness.format_ratio(row["ratios"].get("CTranslate2"))),
    harness.MEMORY,
)


def section(result: dict[str, Any]) -> str:
    """Returns the section of the benchmark for benchmarks/tables.md."""
    options = result["options"]
    shares = "; ".join(
        f"{group}: "
        + ", ".join(f"{name} {share:.1%}" for name, share in list(by_contestant.items())[1:])
        for group, by_contestant in result["agreement"].items()
    )
    remark = (
        f"Marian-base shapes{harness.size_text(options)}, random weights, {result['sentences']} "
        f"sentences of {result['source_tokens']:.1f} tokens in batches of {options['batch_size']}, "
        f"{options['new_tokens']} new tokens each; float32 unless stated otherwise; ratios are "
        "medians over the batches. Sentences with the same tokens as with PyTorch: "
        f"{shares or 'not compared'}."
    )
    return harness.section(result | {"remarks": [remark]}, COLUMNS)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    options = parse(arguments)
    # Record file names without their folders.
    file_names = {"file": options.file.name, "tokenizer": options.tokenizer.name}
    size = harness.size_from_flags(options)
    vocab_size = configuration(size).vocab_size
    ids = tokenized(sentences(options.file, options.sentences), options.tokenizer, vocab_size)
    batches = batched(ids, options.batch_size)
    result = harness.result_header(
        "translate",
        "translation.py",
        arguments,
        options,
        sentences=len(ids),
        source_tokens=sum(map(len, ids)) / len(ids),
        agreement={},
        problems=[],
        rows=[],
    )
    result["options"] |= file_names
    shared = {"threads": result["threads"], "report": harness.log_progress, "warmup": 0}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "size": size}
        writer = Contestant("weights", "", "translation:save_weights", settings, harness.PYTORCH)
        (weights_row,) = harness.run([writer], rounds=0, **shared)
        if weights_row.status != "ok":
            result["problems"] = [f"could not write the weights: {weights_row.status}"]
        else:
            (Path(folder) / "sources.json").write_text(json.dumps(batches))
            rows = harness.run(contestants(options, folder), rounds=len(batches), **shared)
            result["agreement"] = shares = agreement(rows)
            if not options.no_check:
                result["problems"] = disagreements(shares, options.least_agreement)
            result["rows"] = [summary(row, rows, len(ids)) for row in rows]
    return harness.publish(result, section(result), options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
