"""Translation of real sentences: hfseq beside PyTorch and CTranslate2, on the same weights.

    python scripts/benchmarks/translate.py --sentences 128            # a first look
    python scripts/benchmarks/translate.py                            # 1,000 sentences

Marian-base shapes with random weights (opus-mt's, vocabulary 54,688). Every sentence gets the same
number of new tokens, so all do the same work. Contestants take turns batch by batch; each
translates every batch once. Greedy and beam search must give PyTorch's tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import contestants
import cpu_units
import harness
import report
import translate_contestants

MODES = ("greedy", "beam")
#: Who takes part: the name in the table, the factory, the type, the packages that it needs.
SIDES = {
    "torch": ("PyTorch", "torch", "float32", contestants.PYTORCH),
    "ctranslate2": ("CTranslate2", "ctranslate2", "float32", ("ctranslate2",)),
    "hfseq": ("hfseq", "hfseq", "float32", contestants.HFSEQ),
    "hfseq_bfloat16": ("hfseq bfloat16", "hfseq", "bfloat16", contestants.HFSEQ),
}
DATA = Path(os.environ.get("HFSEQ_TEST_DATA", harness.ROOT.parent / "shared"))


def rivals(options: argparse.Namespace, folder: str) -> list[harness.Contestant]:
    """Return all sides for both ways to search."""
    shared = {"folder": folder, "size": report.size_of(options), "new_tokens": options.new_tokens}
    return [
        harness.Contestant(
            SIDES[side][0], group_name(mode, options.beams),
            f"translate_contestants:{SIDES[side][1]}_translate",
            shared | {"beams": options.beams if mode == "beam" else 1, "dtype": SIDES[side][2]},
            SIDES[side][3],
        )
        for mode in options.modes for side in options.sides
    ]  # fmt: skip


def group_name(mode: str, beams: int) -> str:
    """Return what the table calls a way to search."""
    return f"beam {beams}" if mode == "beam" else mode


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

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    rows = loaded(texts, add_special_tokens=False)["input_ids"]
    last, end = vocab_size - 2, translate_contestants.END
    unknown = translate_contestants.UNKNOWN
    return [[i if end < i <= last else unknown for i in row] + [end] for row in rows]


def batched(rows: list[list[int]], size: int) -> list[list[list[int]]]:
    """Return batches of sentences of like length, shuffled."""
    rows = sorted(rows, key=len)
    found = [rows[i : i + size] for i in range(0, len(rows), size)]
    random.Random(1).shuffle(found)
    return found


def agreement(rows: list[harness.Row]) -> dict[str, dict[str, float]]:
    """Return, by group and contestant, the share of sentences with the first one's tokens."""
    shares: dict[str, dict[str, float]] = {}
    first = report.baselines(rows)
    for row in rows:
        wanted = [tokens for value in first[row.group].values for tokens in value["tokens"]]
        found = [tokens for value in row.values for tokens in value["tokens"]]
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


def summary(row: harness.Row, rows: list[harness.Row], count: int) -> dict[str, Any]:
    """Return the numbers of a row of the table; ratios are medians over the batches."""
    rival = {other.name: other for other in rows if other.group == row.group and other.seconds}
    return {
        "name": row.name, "group": row.group, "status": row.status, "seconds": row.seconds,
        "sentences_per_second": count / sum(row.seconds) if row.seconds else None,
        "spread": row.spread, "start_seconds": row.start_seconds,
        "ratios": {
            name: harness.ratio(row, rival[name])
            for name in ("PyTorch", "CTranslate2") if name in rival
        },
        "peak_memory_gb": row.peak_bytes / harness.GB or None, "facts": row.facts,
    }  # fmt: skip


def section(result: dict) -> str:
    """Return what benchmarks/tables.md shows: the table, and what it was measured on."""
    columns = ["", "search", "sentences/s", "against PyTorch", "against CTranslate2", "peak memory"]

    def shown(row: dict) -> list[str]:
        if row["status"] != "ok":
            return [f"{row['name']} ({row['status']})", row["group"], *["-"] * 4]
        ratios = [row["ratios"].get(name) for name in ("PyTorch", "CTranslate2")]
        return [
            row["name"], row["group"], f"{row['sentences_per_second']:.1f}",
            *(f"{ratio:.2f}x" if ratio else "-" for ratio in ratios),
            f"{row['peak_memory_gb']:.2f} GB",
        ]  # fmt: skip

    options = result["options"]
    shares = "; ".join(
        f"{group}: " + ", ".join(f"{name} {share:.1%}" for name, share in list(found.items())[1:])
        for group, found in result["agreement"].items()
    )
    changed = f" ({options['config_overrides']})" if options["config_overrides"] else ""
    layers = "" if options["layers"] is None else f" ({options['layers']} layers)"
    facts = [
        f"Marian-base shapes{layers}{changed}, random weights, {result['sentences']} sentences of "
        f"{result['source_tokens']:.1f} tokens in batches of {options['batch_size']}, "
        f"{options['new_tokens']} new tokens each; float32 where nothing else is said; ratios are "
        f"medians over the batches. Sentences with PyTorch's tokens: {shares or 'not compared'}.",
        f"{report.machine_line(result)}.",
        f"`{result['command']}`",
    ]
    table = harness.table(columns, [shown(row) for row in result["rows"]])
    return table + "\n\n" + "\n\n".join(facts)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument(
        "--sides", nargs="+", default=None, choices=list(SIDES),
        help="all by default; bfloat16 only where the processor multiplies it",
    )  # fmt: skip
    parser.add_argument("--beams", type=int, default=4, help="beams of beam search")
    parser.add_argument("--batch_size", type=int, default=64, help="sentences at once")
    parser.add_argument("--sentences", type=int, default=1000, help="how many to translate")
    parser.add_argument("--new_tokens", type=int, default=24, help="tokens of each translation")
    parser.add_argument(
        "--file",
        type=Path,
        default=DATA / "data" / "en-es-tatoeba" / "english-spanish.csv",
        help="a CSV with a column english, or a file with a sentence a line",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=DATA / "data" / "tokenizers" / "t5-base",
        help="any that AutoTokenizer reads; opus-mt's need the package sentencepiece",
    )
    parser.add_argument(
        "--least_agreement", type=float, default=0.98,
        help="share of the sentences that must have PyTorch's tokens; random weights make ties",
    )  # fmt: skip
    report.add_common(parser)
    options = parser.parse_args(arguments)
    if options.sides is None:
        slow = not cpu_units.bfloat16_units(cpu_units.read_cpuinfo())
        options.sides = [side for side in SIDES if not (slow and side.endswith("bfloat16"))]
    return options


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Write weights and sources, then measure; returns what the section needs."""
    shared = {"threads": threads, "report": lambda line: report.tell(line.split(" {")[0])}
    size = report.size_of(options)
    texts = sentences(options.file, options.sentences)
    vocab_size = translate_contestants.configuration(size).vocab_size
    ids = tokenized(texts, options.tokenizer, vocab_size)
    batches = batched(ids, options.batch_size)
    head = {"sentences": len(ids), "source_tokens": sum(map(len, ids)) / len(ids)}
    with tempfile.TemporaryDirectory() as folder:
        writer = harness.Contestant(
            "weights", "", "translate_contestants:save_weights", {"folder": folder, "size": size},
            contestants.PYTORCH,
        )  # fmt: skip
        (made,) = harness.run([writer], rounds=0, warmup=0, **shared)
        if made.status != "ok":
            problem = f"no weights could be written: {made.status}"
            return {**head, "agreement": {}, "problems": [problem], "rows": []}
        (Path(folder) / "sources.json").write_text(json.dumps(batches))
        rows = harness.run(rivals(options, folder), rounds=len(batches), warmup=0, **shared)
    shares = agreement(rows)
    problems = [] if options.no_check else disagreements(shares, options.least_agreement)
    found = [summary(row, rows, len(ids)) for row in rows]
    return {**head, "agreement": shares, "problems": problems, "rows": found}


def main(arguments: list[str] | None = None) -> int:
    """Measure, compare, print and write; exit code 1 if tokens disagree or nothing ran."""
    options = parse(arguments)
    threads = options.threads or harness.machine_facts()["cores"]
    result = report.head_of("translate", "translate", arguments, options, threads)
    # Names only: where the files lie is nobody's business.
    result["options"] |= {"file": options.file.name, "tokenizer": options.tokenizer.name}
    result |= measure(options, threads)
    ran = any(row["seconds"] for row in result["rows"])
    return report.publish(result, section(result), options.output, failed=not ran)


if __name__ == "__main__":
    sys.exit(main())
