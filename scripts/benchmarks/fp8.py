"""Training steps in bfloat16, fp8_delayed and fp8_current side by side, and where their time goes.

    python scripts/benchmarks/fp8.py                          # the table of benchmarks/tables.md
    python scripts/benchmarks/fp8.py --widths 4096 --attention cudnn
    python scripts/benchmarks/fp8.py --models gpt2 --widths 64 --layers 1 --batch_size 2 \
        --length 32 --vocab_size 200 --output try             # small enough for a CPU

The step is the training loop's: loss, gradients, AdamW, donated state. The recipes of one model and
width run in processes of their own and step in turn; then each is profiled alone. It is meant for
a GPU with FP8 units; elsewhere the products are emulated, and the table says so. MFU is the share
of a large bfloat16 product's rate that goes into the FLOPs a step needs: an FP8 step may have more
than 100 %. Where FP8 is slower than bfloat16, the command says that it does not pay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import contestants
import fp8_hlo
import fp8_profile
import fp8_step
import harness
import limits
import report

BASELINE = "bfloat16"
RECIPES = (BASELINE, "fp8_delayed", "fp8_current")
# Layers and tokens of a step by width: three steps fit into the 141 GB of an H200 together.
LAYERS = {1024: 12, 2048: 8, 4096: 4}
TOKENS = {1024: 16384, 2048: 16384, 4096: 8192}
AIM = {4096: 1.3}


def size_of(options: argparse.Namespace, width: int) -> dict[str, int]:
    """Return the shape for ``width``: what flags say, else what fits."""
    rows = options.batch_size or max(1, TOKENS.get(width, 8192) // options.length)
    return {
        "width": width, "layers": options.layers or LAYERS.get(width, 4), "rows": rows,
        "length": options.length, "vocab_size": options.vocab_size,
    }  # fmt: skip


def rivals(options: argparse.Namespace, profile: bool = False) -> list[harness.Contestant]:
    """Return each recipe of each model and width; to be profiled, each in a group of its own."""
    found = []
    for model in options.models:
        for width in options.widths:
            group = f"{model}, d = {width}"
            for recipe in options.recipes:
                settings = {
                    "model": model, "recipe": recipe, "size": size_of(options, width),
                    "dropout": options.dropout, "attention": options.attention,
                }  # fmt: skip
                factory, own = "timed", group
                if profile:
                    factory, own = "profiled", f"{group}, {recipe}"
                    settings["steps"] = options.profile_steps
                found.append(
                    harness.Contestant(
                        recipe, own, f"fp8_contestants:{factory}", settings, contestants.HFSEQ
                    )
                )
    return found


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Time, then profile; returns the rate of products, the rows, and remarks on them."""
    shared = {"threads": threads, "report": report.tell}
    rates = limits.matmul_rates([BASELINE], size=options.product_size, threads=threads)
    rows = harness.run(rivals(options), rounds=options.rounds, settle=1, **shared)
    profiles = {} if options.no_profile else profile(options, shared)
    first = report.baselines(rows)
    found = []
    for row, settings in zip(rows, (c.settings for c in rivals(options)), strict=True):
        size = settings["size"]
        flops, datasheet = (row.facts.get(key) for key in ("model_flops", "datasheet_flops"))
        line = report.summary(
            row, first[row.group], size["rows"] * size["length"], flops or 0.0,
            rates.get(BASELINE, 0.0),
        )  # fmt: skip
        line |= {"size": size, "shares": profiles.get((row.group, row.name), {})}
        line["datasheet_mfu"] = (
            flops / line["median_seconds"] / datasheet
            if datasheet and line["median_seconds"] else None
        )  # fmt: skip
        found.append(line | {"losses": [value["loss"] for value in row.values]})
    lost = [row for row in found if row["status"] == "ok" and not options.no_profile]
    problems = [f"{r['name']} ({r['group']}): no profile" for r in lost if not r["shares"]]
    return {
        "matmul_flops": rates, "problems": problems, "remarks": remarks(found, options.recipes[0]),
        "rows": found,
    }  # fmt: skip


def profile(options: argparse.Namespace, shared: dict[str, Any]) -> dict[tuple[str, str], dict]:
    """Return the shares of time by (group, recipe)."""
    rows = harness.run(rivals(options, profile=True), rounds=1, warmup=0, **shared)
    return {
        (row.group.removesuffix(f", {row.name}"), row.name): row.values[-1]
        for row in rows
        if row.status == "ok" and row.values
    }


def remarks(rows: Sequence[dict[str, Any]], baseline: str = BASELINE) -> list[str]:
    """Say where FP8 pays and where it does not, and what the device cannot."""
    found = []
    ran = [row for row in rows if row["ratio"] and row["name"].startswith("fp8")]
    if any(not row["facts"].get("fp8_units") for row in ran):
        found.append(
            "This device has no FP8 units: the products are emulated, and the ratios say nothing "
            "about FP8 on one that has them."
        )
    for row in ran:
        spread = row["spread"] or 0.0
        kernels = row["facts"].get("kernels", {}).get(fp8_hlo.FP8_PRODUCT, 0)
        if row["ratio"] < 1.0:
            found.append(
                f"{row['group']}: {row['name']} does not pay here, {row['ratio']:.2f}x of "
                f"{baseline} (± {spread:.0%}): train with --precision {baseline}."
            )
        aim = AIM.get(row["size"]["width"])
        if aim and row["facts"].get("fp8_units") and 1.0 <= row["ratio"] < aim:
            found.append(
                f"{row['group']}: {row['name']} pays, {row['ratio']:.2f}x of {baseline}, but "
                f"misses the aim of {aim:g}x."
            )
        if row["facts"].get("fp8_units") and kernels == 0:
            found.append(f"{row['group']}: {row['name']} has no FP8 product in its program.")
    return found


def section(result: dict[str, Any]) -> str:
    """Return what benchmarks/tables.md shows: rates, shares of time, remarks."""
    options = result["options"]
    rates = ", ".join(f"{r / 1e12:.2f} TFLOP/s in {d}" for d, r in result["matmul_flops"].items())
    device = next((r["facts"]["device"] for r in result["rows"] if r["facts"]), "no device")
    parts = [rates_table(result["rows"], options["recipes"][0])]
    if shown := shares_table(result["rows"]):
        parts += ["Share of the time in each kind of kernel:", shown]
    parts += ["\n".join(f"- {line}" for line in result["remarks"])] if result["remarks"] else []
    dropout, attention = options["dropout"], options["attention"] or "xla"
    parts += [
        f"On {device}: rows of {options['length']} tokens, vocabulary {options['vocab_size']}, "
        f"dropout {dropout:g}, attention {attention}, {options['rounds']} alternating rounds: "
        f"medians, ± half of the interquartile range; measured products: {rates or 'none'}.",
        f"{report.machine_line(result)}.",
        f"`{result['command']}`",
    ]
    return "\n\n".join(parts)


def rates_table(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    """Return the table of tokens/s."""
    columns = [
        "", "recipe", "layers", "tokens a step", "tokens/s", "ms a step", f"against {baseline}",
        "MFU", "FP8 products", "peak memory",
    ]  # fmt: skip

    def shown(row: dict[str, Any]) -> list[str]:
        size, facts = row["size"], row["facts"]
        head = [row["group"], row["name"], str(size["layers"]), str(size["rows"] * size["length"])]
        if row["status"] != "ok":
            return [*head, row["status"], *["-"] * 5]
        products = facts["kernels"].get(fp8_hlo.FP8_PRODUCT, 0)
        spread = f" ± {row['spread']:.0%}" if row["spread"] is not None else ""
        return [
            *head, f"{row['tokens_per_second']:.0f}",
            f"{row['median_seconds'] * 1000:.1f}{spread}", f"{row['ratio']:.2f}x",
            f"{row['mfu']:.0%}" if row["mfu"] else "-",
            f"{products} of {facts['targeted']}" if facts["targeted"] else "-",
            f"{row['peak_memory_gb']:.2f} GB",
        ]  # fmt: skip

    return harness.table(columns, [shown(row) for row in rows])


def shares_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of shares of time; empty without a profile."""
    measured = [row for row in rows if row["shares"]]
    order = (*fp8_hlo.KINDS, fp8_profile.UNKNOWN)
    kinds = [kind for kind in order if any(kind in row["shares"] for row in measured)]
    lines = [
        [row["group"], row["name"], *(f"{row['shares'].get(kind, 0.0):.0%}" for kind in kinds)]
        for row in measured
    ]
    return harness.table(["", "recipe", *kinds], lines) if lines else ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["fp8_encoder", "gpt2"], help="model types")
    parser.add_argument("--widths", nargs="+", type=int, default=list(LAYERS), help="hidden sizes")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="the first is compared")
    parser.add_argument("--layers", type=int, help="12, 8, 4 at widths 1024, 2048, 4096")
    parser.add_argument("--batch_size", type=int, help="rows; 16384 tokens, 8192 at width 4096")
    parser.add_argument("--length", type=int, default=512, help="tokens a row (512)")
    parser.add_argument("--vocab_size", type=int, default=32768, help="(32768)")
    parser.add_argument("--dropout", type=float, default=0.0, help="all rates (0)")
    parser.add_argument("--attention", help="implementation of attention, e.g. cudnn")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each (15)")
    parser.add_argument("--product_size", type=int, help="of the product that MFU refers to")
    parser.add_argument("--profile_steps", type=int, default=5, help="steps in a profile (5)")
    parser.add_argument("--no_profile", action="store_true", help="tokens/s only")
    parser.add_argument("--threads", type=int, default=None, help="cores for each; all by default")
    parser.add_argument(
        "--output", type=Path, default=harness.ROOT / "docs",
        help="gets benchmarks/tables.md and fp8.json",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for width in options.widths:
        if width % fp8_step.HEAD and width > fp8_step.HEAD:
            parser.error(f"--widths {width} is no multiple of {fp8_step.HEAD}, a head's features")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit code 1 if nothing ran or something failed."""
    options = parse(arguments)
    threads = options.threads or harness.machine_facts()["cores"]
    given = None if arguments is None else list(arguments)
    result = report.head_of("fp8", "fp8", given, options, threads)
    result |= measure(options, threads)
    ran = any(row["seconds"] for row in result["rows"])
    return report.publish(result, section(result), options.output, failed=not ran)


if __name__ == "__main__":
    sys.exit(main())
