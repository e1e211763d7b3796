"""Translation of real sentences: hfseq beside PyTorch and CTranslate2, on the same weights.

    python scripts/benchmarks/translation.py --sentences 128            # a first look
    python scripts/benchmarks/translation.py                            # 1,000 sentences

Marian-base shapes with random weights (opus-mt's, vocabulary 54,688). Every sentence gets the same
number of new tokens, so all do the same work. Contestants take turns batch by batch; each
translates every batch once. Greedy and beam search must give PyTorch's tokens.
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
from harness import Contestant, Row, Running

MODES = ("greedy", "beam")
#: Who takes part: the name in the table, the factory, the type, the packages that it needs.
SIDES = {
    "torch": ("PyTorch", "torch", "float32", harness.PYTORCH),
    "ctranslate2": ("CTranslate2", "ctranslate2", "float32", ("ctranslate2",)),
    "hfseq": ("hfseq", "hfseq", "float32", harness.HFSEQ),
    "hfseq_bfloat16": ("hfseq bfloat16", "hfseq", "bfloat16", harness.HFSEQ),
}
BASELINES = ("PyTorch", "CTranslate2")
DATA = Path(os.environ.get("HFSEQ_TEST_DATA", harness.ROOT.parent / "shared" / "data"))
END, UNKNOWN = 0, 1

# -- in the processes of the contestants


def configuration(size: dict[str, Any]) -> Any:
    return training.configuration("marian", size)


def names(vocab_size: int) -> list[str]:
    return ["</s>", "<unk>", *(f"t{i}" for i in range(2, vocab_size - 1)), "<pad>"]


def save_weights(folder: str, size: dict[str, Any]) -> Running:
    """Write the weights that all start from, and their conversion for CTranslate2 if it is here."""
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
    return Running(lambda: {}, harness.host_peak_bytes)


def options_of(config: Any, beams: int, new_tokens: int) -> dict[str, Any]:
    """Return the options of ``generate``: so many tokens, and never padding, as opus-mt has it."""
    return {
        "num_beams": beams,
        "do_sample": False,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "bad_words_ids": [[config.pad_token_id]],
    }


def read_batches(folder: str) -> list[list[list[int]]]:
    return json.loads((Path(folder) / "sources.json").read_text())


def padded(rows: list[list[int]], count: int, pad: int) -> tuple[Any, Any]:
    """Return ids and mask (count, longest), int32; spare rows are like the first."""
    import numpy as np

    rows = rows + rows[:1] * (count - len(rows))
    ids = np.full((count, max(map(len, rows))), pad, np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    mask = np.arange(ids.shape[1])[None] < np.array([[len(row)] for row in rows])
    return ids, mask.astype(np.int32)


def translating(
    folder: str, translate: Callable[[Any], Any], memory: Callable[[], int], facts: Any
) -> Running:
    """Return a contestant that translates the next batch at each step.

    Before the first step it translates one batch of each width, so that all is compiled.
    """
    batches = read_batches(folder)
    for batch in {max(map(len, batch)): batch for batch in batches}.values():
        translate(batch)
    turns = itertools.cycle(batches)

    def step() -> dict[str, Any]:
        return {"tokens": [[int(token) for token in row] for row in translate(next(turns))]}

    return Running(step, memory, facts)


def hfseq_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> Running:
    """hfseq's ``generate``; batches are filled up to one number of rows, so it compiles less."""
    import numpy as np

    config, rows = configuration(size), max(map(len, read_batches(folder)))
    options = options_of(config, beams, new_tokens)
    model = training.hfseq_class("marian").from_pretrained(folder, config=config, dtype=dtype)
    if dtype == "bfloat16":
        model.params = model.to_bf16(model.params)

    def translate(batch: list[list[int]]) -> Any:
        ids, mask = padded(batch, rows, config.pad_token_id)
        found = model.generate(ids, attention_mask=mask, **options).sequences
        return np.asarray(found)[: len(batch), -new_tokens:]

    facts = training.jax_facts(model.params)
    return translating(folder, translate, harness.jax_peak_bytes, facts)


def torch_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> Running:
    import torch
    from transformers import MarianMTModel

    config = configuration(size)
    options = options_of(config, beams, new_tokens)
    model = MarianMTModel.from_pretrained(folder, config=config, dtype=getattr(torch, dtype)).eval()

    def translate(batch: list[list[int]]) -> Any:
        arrays = padded(batch, len(batch), config.pad_token_id)
        ids, mask = (torch.from_numpy(array).long() for array in arrays)
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=mask, **options)
        return found[:, -new_tokens:].numpy()

    facts = training.torch_facts(model) | {"device": "cpu"}
    return translating(folder, translate, harness.torch_peak_bytes, facts)


def ctranslate2_translate(
    folder: str, size: dict[str, Any], beams: int, new_tokens: int, dtype: str
) -> Running:
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
        found = translator.translate_batch(
            [[words[token] for token in row] for row in batch],
            beam_size=beams,
            min_decoding_length=new_tokens,
            max_decoding_length=new_tokens,
            max_batch_size=0,
        )
        return [[numbers[word] for word in result.hypotheses[0]] for result in found]

    return translating(folder, translate, harness.host_peak_bytes, {"device": "cpu"})


# -- the command


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__,
        sizes=True,
        beams=(4, "beams of beam search"),
        batch_size=(64, "sentences at once"),
        sentences=(1000, "how many to translate"),
        new_tokens=(24, "tokens of each translation"),
        least_agreement=(
            0.98,
            "share of the sentences that must have PyTorch's tokens; random weights make ties",
        ),
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=list(SIDES),
        help="all by default; bfloat16 only where the processor multiplies it",
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=DATA / "en-es-tatoeba" / "english-spanish.csv",
        help="a CSV with a column english, or a file with a sentence a line",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=DATA / "tokenizers" / "t5-base",
        help="any that AutoTokenizer reads; opus-mt's need the package sentencepiece",
    )
    options = parser.parse_args(given)
    if options.sides is None:
        slow = not harness.bfloat16_units(harness.read_cpuinfo())
        options.sides = [side for side in SIDES if not (slow and side.endswith("bfloat16"))]
    return options


def rivals(options: argparse.Namespace, folder: str) -> list[Contestant]:
    shared = {"folder": folder, "size": harness.size_of(options), "new_tokens": options.new_tokens}
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
    """Return different sentences, drawn from a column ``english`` of a CSV or a file of lines."""
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            found = {row["english"] for row in csv.DictReader(lines)}
        else:
            found = {line.strip() for line in lines if line.strip()}
    return random.Random(0).sample(sorted(found), min(count, len(found)))


def tokenized(texts: list[str], tokenizer: Path, vocab_size: int) -> list[list[int]]:
    """Return the ids of a real tokenizer with the end; what the model lacks becomes unknown."""
    from transformers import AutoTokenizer

    rows = AutoTokenizer.from_pretrained(tokenizer)(texts, add_special_tokens=False)["input_ids"]
    return [[i if END < i < vocab_size - 1 else UNKNOWN for i in row] + [END] for row in rows]


def batched(rows: list[list[int]], size: int) -> list[list[list[int]]]:
    rows = sorted(rows, key=len)
    found = [rows[i : i + size] for i in range(0, len(rows), size)]
    random.Random(1).shuffle(found)
    return found


def agreement(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, by group and contestant, the share of sentences with the first one's tokens."""
    shares: dict[str, dict[str, float]] = {}
    first = {row.group: row for row in reversed(rows)}
    for row in rows:
        wanted, found = (
            [tokens for value in each.values for tokens in value["tokens"]]
            for each in (first[row.group], row)
        )
        if found and len(found) == len(wanted):
            same = sum(a == b for a, b in zip(found, wanted, strict=True))
            shares.setdefault(row.group, {})[row.name] = same / len(found)
    return shares


def disagreements(shares: dict[str, dict[str, float]], least: float) -> list[str]:
    """Name the groups in which hfseq's float32 has PyTorch's tokens in fewer sentences."""
    return [
        f"{group}: only {found['hfseq']:.1%} of the sentences have the tokens of PyTorch"
        for group, found in shares.items()
        if found.get("hfseq", 1.0) < least
    ]


def summary(row: Row, rows: Sequence[Row], count: int) -> dict[str, Any]:
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
        "facts": row.facts,
    }


COLUMNS: tuple[harness.Column, ...] = (
    ("search", lambda row: row["group"]),
    ("sentences/s", lambda row: f"{row['sentences_per_second']:.1f}"),
    ("against PyTorch", lambda row: harness.times(row["ratios"].get("PyTorch"))),
    ("against CTranslate2", lambda row: harness.times(row["ratios"].get("CTranslate2"))),
    harness.MEMORY,
)


def section(result: dict[str, Any]) -> str:
    options = result["options"]
    shares = "; ".join(
        f"{group}: " + ", ".join(f"{name} {share:.1%}" for name, share in list(found.items())[1:])
        for group, found in result["agreement"].items()
    )
    told = (
        f"Marian-base shapes{harness.size_text(options)}, random weights, {result['sentences']} "
        f"sentences of {result['source_tokens']:.1f} tokens in batches of {options['batch_size']}, "
        f"{options['new_tokens']} new tokens each; float32 where nothing else is said; ratios are "
        f"medians over the batches. Sentences with PyTorch's tokens: {shares or 'not compared'}."
    )
    return harness.section(result | {"remarks": [told]}, COLUMNS)


def main(given: Sequence[str]) -> int:
    options = parse(given)
    # Names only: where the files lie is nobody's business.
    places = {"file": options.file.name, "tokenizer": options.tokenizer.name}
    size = harness.size_of(options)
    vocab_size = configuration(size).vocab_size
    ids = tokenized(sentences(options.file, options.sentences), options.tokenizer, vocab_size)
    batches = batched(ids, options.batch_size)
    result = harness.head(
        "translate",
        "translation.py",
        given,
        options,
        sentences=len(ids),
        source_tokens=sum(map(len, ids)) / len(ids),
        agreement={},
        problems=[],
        rows=[],
    )
    result["options"] |= places
    shared = {"threads": result["threads"], "report": harness.tell, "warmup": 0}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "size": size}
        writer = Contestant("weights", "", "translation:save_weights", settings, harness.PYTORCH)
        (made,) = harness.run([writer], rounds=0, **shared)
        if made.status != "ok":
            result["problems"] = [f"no weights could be written: {made.status}"]
        else:
            (Path(folder) / "sources.json").write_text(json.dumps(batches))
            rows = harness.run(rivals(options, folder), rounds=len(batches), **shared)
            result["agreement"] = shares = agreement(rows)
            if not options.no_check:
                result["problems"] = disagreements(shares, options.least_agreement)
            result["rows"] = [summary(row, rows, len(ids)) for row in rows]
    return harness.publish(result, section(result), options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
