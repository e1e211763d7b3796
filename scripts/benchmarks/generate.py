"""Generation with one model: hfseq beside PyTorch, on the same weights and prompts.

    python scripts/benchmarks/generate.py --model gpt2          # greedy, sampling; batch 1 and 16
    python scripts/benchmarks/generate.py --model t5 --modes beam --beams 4
    python scripts/benchmarks/generate.py --model bart --layers 2 --new_tokens 16 --rounds 3

Every row gets the same number of new tokens, so both do the same work. Greedy and beam search must
give the same tokens on both sides, or the command says where they part and fails.
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
import models
import report

MODES = ("greedy", "sampling", "beam")
DEFAULT_MODES = {"clm": ["greedy", "sampling"], "seq2seq": ["beam"]}
SIDES = ("torch", "hfseq")


def group_name(mode: str, rows: int, beams: int) -> str:
    """Return what the table calls a group: what is generated, and how many rows at once."""
    return f"{f'beam {beams}' if mode == 'beam' else mode}, batch {rows}"


def rivals(options: argparse.Namespace, weights: str) -> list[harness.Contestant]:
    """Return both sides for every mode and batch size."""
    shared = {
        "model": options.model, "beams": options.beams, "length": options.prompt_length,
        "new_tokens": options.new_tokens, "size": report.size_of(options), "weights": weights,
        "dtype": options.dtype,
    }  # fmt: skip
    return [
        harness.Contestant(
            contestants.NAMES[side], group_name(mode, rows, options.beams),
            f"contestants:{side}_generate", shared | {"mode": mode, "rows": rows},
            contestants.PACKAGES[side],
        )
        for mode in options.modes for rows in options.batch_sizes for side in SIDES
    ]  # fmt: skip


def agreement(rows: list[harness.Row], new_tokens: int) -> dict[str, float]:
    """Return, by group, the share of rows whose tokens are those of the first contestant."""
    shares = {}
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group and row.values]
        if len(members) < 2 or group.startswith("sampling"):
            continue
        first, *others = [cut(member.values[0]["tokens"], new_tokens) for member in members]
        same = [a == b for other in others for a, b in zip(first, other, strict=True)]
        shares[group] = sum(same) / len(same)
    return shares


def cut(tokens: list[int], new_tokens: int) -> list[list[int]]:
    """Return the rows that follow each other in ``tokens``."""
    return [tokens[i : i + new_tokens] for i in range(0, len(tokens), new_tokens)]


def disagreements(shares: dict[str, float], least: float) -> list[str]:
    """Name the groups in which fewer rows agree than ``least``."""
    return [
        f"{group}: only {share:.0%} of the rows have the tokens of PyTorch"
        for group, share in shares.items()
        if share < least
    ]


def section(result: dict) -> str:
    """Return what benchmarks/tables.md shows of a result: a table, and what it was measured on."""
    options = result["options"]
    layers = "" if options["layers"] is None else f" ({options['layers']} layers)"
    changed = f" ({options['config_overrides']})" if options["config_overrides"] else ""
    shares = "; ".join(
        f"{group}: {share:.0%} of the rows" for group, share in result["agreement"].items()
    )
    facts = [
        f"{models.SUBJECTS[options['model']].title}{layers}{changed}, random weights, "
        f"{options['dtype']}, prompts (or sources) of {options['prompt_length']} tokens, "
        f"{options['new_tokens']} new ones a row, {options['rounds']} alternating rounds after "
        "two untimed calls, the first of which compiles: medians, ± half of the interquartile "
        f"range. Rows whose tokens equal PyTorch's: {shares or 'not compared'}.",
        f"{report.machine_line(result)}.",
        f"`{result['command']}`",
    ]
    return report.as_table(result["rows"], "generation", "a call") + "\n\n" + "\n\n".join(facts)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    able = [name for name, subject in models.SUBJECTS.items() if subject.objective != "mlm"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2", choices=able)
    parser.add_argument("--modes", nargs="+", default=None, choices=MODES)
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--beams", type=int, default=4, help="beams of beam search")
    parser.add_argument("--prompt_length", type=int, default=64, help="tokens a prompt or source")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7, help="timed calls of each contestant")
    parser.add_argument(
        "--least_agreement", type=float, default=1.0,
        help="share of the rows that must agree in greedy and beam search",
    )  # fmt: skip
    report.add_common(parser)
    options = parser.parse_args(arguments)
    options.modes = options.modes or DEFAULT_MODES[models.SUBJECTS[options.model].objective]
    return options


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Write weights, then measure; returns agreement, problems and rows."""
    shared = {"threads": threads, "report": lambda line: report.tell(line.split(" {")[0])}
    with tempfile.TemporaryDirectory() as folder:
        size = report.size_of(options)
        problems = contestants.written_weights(folder, options.model, size, **shared)
        if problems:
            return {"agreement": {}, "problems": problems, "rows": []}
        rows = harness.run(rivals(options, folder), rounds=options.rounds, **shared)
    shares = agreement(rows, options.new_tokens)
    if not options.no_check:
        problems = disagreements(shares, options.least_agreement)
    first = report.baselines(rows)
    batches = {
        group_name(mode, batch, options.beams): batch
        for mode in options.modes for batch in options.batch_sizes
    }  # fmt: skip
    found = [
        report.summary(r, first[r.group], batches[r.group] * options.new_tokens, 0.0, 0.0)
        for r in rows
    ]
    return {"agreement": shares, "problems": problems, "rows": found}


def main(arguments: list[str] | None = None) -> int:
    """Measure, compare, print and write; exit code 1 if tokens disagree or nothing ran."""
    options = parse(arguments)
    threads = options.threads or harness.machine_facts()["cores"]
    result = report.head_of(f"generate_{options.model}", "generate", arguments, options, threads)
    result |= measure(options, threads)
    ran = any(row["seconds"] for row in result["rows"])
    return report.publish(result, section(result), options.output, failed=not ran)


if __name__ == "__main__":
    sys.exit(main())
