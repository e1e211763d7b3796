"""Training steps of one model: hfseq beside PyTorch, on the same batches (and masks).

    python scripts/benchmarks/train.py --model roberta       # a table of docs/benchmarks/tables.md
    python scripts/benchmarks/train.py --model gpt2 --batch_size 4 --length 512
    python scripts/benchmarks/train.py --model t5 --target_length 114
    python scripts/benchmarks/train.py --model bart --layers 2 --rounds 3 --output try

Both train with AdamW from the same weights; PyTorch gets labels of full length, as its data
collators make them. It runs from a checkout, on the CPU or on an NVIDIA GPU, with what the Python
has: rows of packages that are missing say so. First the losses of three steps without dropout must
agree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import contestants
import harness
import limits
import models
import report

# Large allocations of glibc in pages of 2 MB: a step then faults in hundreds of pages, not 300,000.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Where the first losses of two implementations may differ, relatively: sums in another order, and
# in bfloat16 rounding at other places.
TOLERANCE = {"float32": 2e-5, "bfloat16": 5e-3}


def variants(options: argparse.Namespace) -> list[tuple[str, str, dict, dict]]:
    """Return (side, addition to its name, settings, environment); the baseline first."""
    found: list[tuple[str, str, dict, dict]] = [("torch", "", {}, {})]
    if options.compile:
        found.append(("torch", ", compiled", {"compiled": True}, {}))
    found.append(("hfseq", "", {}, {}))
    if options.huge_pages:
        found += [(side, ", huge pages", {}, HUGE_PAGES) for side in ("torch", "hfseq")]
    return found


def rivals(
    options: argparse.Namespace, weights: str, dropout: float | None
) -> list[harness.Contestant]:
    """Return every variant in every precision."""
    shared = {
        "model": options.model, "rows": options.batch_size, "length": options.length,
        "targets": options.target_length, "size": report.size_of(options), "dropout": dropout,
        "weights": weights,
    }  # fmt: skip
    return [
        harness.Contestant(
            contestants.NAMES[side] + suffix, dtype, f"contestants:{side}_step",
            shared | {"dtype": dtype} | settings, contestants.PACKAGES[side], environment,
        )
        for dtype in options.dtypes
        for side, suffix, settings, environment in variants(options)
    ]  # fmt: skip


def disagreements(rows: list[harness.Row]) -> list[str]:
    """Compare the losses of every contestant with those of the first of its group."""
    problems = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group and row.values]
        for row in members[1:]:
            pairs = [
                (a["loss"], b["loss"]) for a, b in zip(row.values, members[0].values, strict=False)
            ]
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            if not worst <= TOLERANCE[group]:
                problems.append(
                    f"{group}: the losses of {row.name} and {members[0].name} differ by "
                    f"{worst:.1e} (allowed {TOLERANCE[group]:.0e}): {pairs}"
                )
    return problems


def section(result: dict) -> str:
    """Return what benchmarks/tables.md shows of a result: a table, and what it was measured on."""
    options = result["options"]
    rates = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {d}" for d, rate in result["matmul_flops"].items()
    )
    layers = "" if options["layers"] is None else f" ({options['layers']} layers)"
    changed = f" ({options['config_overrides']})" if options["config_overrides"] else ""
    targets = f" to {options['target_length']}" if options["target_length"] else ""
    dropout = "as configured" if options["dropout"] is None else f"{options['dropout']:g}"
    facts = [
        f"{models.SUBJECTS[options['model']].title}{layers}{changed}, batch "
        f"{options['batch_size']}, length {options['length']}{targets}, dropout {dropout}, "
        f"{options['rounds']} alternating rounds, an untimed step before each: medians, ± half of "
        "the interquartile range.",
        f"{report.machine_line(result)}; measured matrix products: {rates or 'none'}.",
        f"`{result['command']}`",
    ]
    table = report.as_table(result["rows"], "precision", "a step", mfu=True)
    return table + "\n\n" + "\n\n".join(facts)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the flags; sizes that are not given are the model's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="roberta", choices=list(models.SUBJECTS))
    parser.add_argument("--batch_size", type=int, default=None, help="rows a step")
    parser.add_argument("--length", type=int, default=None, help="tokens a row (of the encoder)")
    parser.add_argument(
        "--target_length", type=int, default=None, help="tokens a row of the decoder"
    )
    parser.add_argument(
        "--dropout", type=float, default=None, help="all rates; those of the configuration if none"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contestant")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--huge_pages", action="store_true", help="both with 2 MB pages, too")
    report.add_common(parser)
    options = parser.parse_args(arguments)
    subject = models.SUBJECTS[options.model]
    options.batch_size = options.batch_size or subject.batch
    options.length = options.length or subject.length
    given = options.target_length or subject.target_length
    if options.target_length and not subject.target_length:
        parser.error(f"--target_length is for encoder-decoders; {options.model} has no decoder")
    options.target_length = given
    return options


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Write weights, compare losses, then measure; returns rates, problems and rows."""
    shared = {"threads": threads, "report": report.tell}
    with tempfile.TemporaryDirectory() as folder:
        size = report.size_of(options)
        problems = contestants.written_weights(folder, options.model, size, **shared)
        if problems:
            return {"matmul_flops": {}, "model_flops": None, "problems": problems, "rows": []}
        if not options.no_check:
            pairs = rivals(options, folder, 0.0)
            problems = disagreements(harness.run(pairs, rounds=3, warmup=0, **shared))
        rates = limits.matmul_rates(options.dtypes, threads=threads)
        rows = harness.run(
            rivals(options, folder, options.dropout), rounds=options.rounds, settle=1, **shared
        )
    flops = next((r.facts["model_flops"] for r in rows if "model_flops" in r.facts), None)
    tokens = options.batch_size * (options.length + options.target_length)
    first = report.baselines(rows)
    found = [
        report.summary(r, first[r.group], tokens, flops or 0.0, rates.get(r.group, 0.0))
        | {"losses": [value["loss"] for value in r.values]}
        for r in rows
    ]
    return {"matmul_flops": rates, "model_flops": flops, "problems": problems, "rows": found}


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, print and write; exit code 1 if losses disagree or nothing ran."""
    options = parse(arguments)
    threads = options.threads or harness.machine_facts()["cores"]
    result = report.head_of(f"train_{options.model}", "train", arguments, options, threads)
    result |= measure(options, threads)
    ran = any(row["seconds"] for row in result["rows"])
    return report.publish(result, section(result), options.output, failed=not ran)


if __name__ == "__main__":
    sys.exit(main())
