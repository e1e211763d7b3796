"""What a VQ Transformer costs as texts grow, beside quadratic attention of the same shapes.

    python scripts/benchmarks/vq_length.py train forward          # time per token, 1k to 64k
    python scripts/benchmarks/vq_length.py memory decode          # memory; 100k tokens decoded
    python scripts/benchmarks/vq_length.py compare --hidden_size 768 --head_dim 128 \
        --value_dim 1536 --codes 512 --window 512 --block 512     # 8k and 32k

Every point (head type, attention, reduction, length) has a process of its own. It is compiled
first, and one that needs more than ``--memory_gb`` by XLA's plan is marked instead of run. Points
of a length step in turn; a second pass goes over the lengths in the other order. Time per token of
VQ has to be constant to 15 % from 4k on, or the command fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import contestants
import harness
import report
import vq_curves
import vq_plot

PASSES = {
    "train": ("train",), "forward": ("forward",), "memory": ("train",),
    "compare": ("train", "forward"),
}  # fmt: skip
MODES = (*PASSES, "decode")
LENGTHS = [1024 * 2**n for n in range(7)]
REDUCTIONS = ("recurrent", "serial", "matmul", "associative_scan")
HEADS = ("shga", "mhga", "mha", "mqa", "gqa")


def configuration(
    options: argparse.Namespace, head: str, attention: str = "vq", reduction: str = "recurrent"
) -> dict[str, Any]:
    """Return the options of the model's configuration."""
    size = report.size_of(options)
    value = {"value_dim": options.value_dim} if head in ("shga", "mhga") else {}
    return {
        "hidden_size": options.hidden_size, "num_hidden_layers": size.pop("layers", 2),
        "head_dim": options.head_dim, "num_codes": options.codes, "window_size": options.window,
        "block_size": options.block, "vocab_size": options.vocab_size, "head_type": head,
        "attention_type": attention, "reduction": reduction, **value, **size,
    }  # fmt: skip


def kinds(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Return what is compared: a name, the attention, and how blocks are reduced."""
    vq = {f"vq {reduction}": ("vq", reduction) for reduction in options.reductions}
    return vq if options.no_full else {**vq, "full": ("full", "recurrent")}


def contestants_of(
    mode: str, options: argparse.Namespace
) -> dict[harness.Contestant, dict[str, Any]]:
    """Return the points of a mode, and which each of them is."""
    found = {}
    for what in PASSES[mode]:
        for head in options.head_types:
            for length in options.lengths:
                for name, (attention, reduction) in kinds(options).items():
                    config = configuration(options, head, attention, reduction)
                    settings = {
                        "what": what, "config": config, "rows": options.batch_size,
                        "length": length, "dtype": options.dtype, "remat": options.remat,
                        "limit_bytes": options.memory_gb * harness.GB,
                    }  # fmt: skip
                    # Where memory is measured nothing else is in memory.
                    group = f"{what} {head} {length}" + (f" {name}" if mode == "memory" else "")
                    point = harness.Contestant(
                        name, group, "vq_points:length_point", settings, contestants.HFSEQ
                    )
                    found[point] = {"what": what, "head_type": head, "length": length}
    return found


def measure_lengths(mode: str, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Run the points of a mode; returns rows, curves and what does not hold."""
    points = contestants_of(mode, options)
    places = {(c.group, c.name): place for c, place in points.items()}
    once = mode == "memory"
    passes = []
    for number in range(1 if once else options.passes):
        ordered = list(points)[:: -1 if number % 2 else 1]
        passes.append(
            harness.run(
                ordered, rounds=1 if once else options.rounds, warmup=1, threads=threads,
                report=report.tell,
            )
        )  # fmt: skip
    merged = vq_curves.merged(passes)
    found = [vq_curves.point(r, places[r.group, r.name], options.batch_size) for r in merged]
    result = {"rows": found, "what": PASSES[mode][0], "problems": []}
    if mode == "compare":
        return result | {"ratios": vq_curves.ratios(merged)}
    curves = vq_curves.curves(found)
    flat = [] if once or options.no_check else vq_curves.not_flat(curves)
    return result | {
        "curves": curves, "problems": flat, "ratios": {} if once else vq_curves.ratios(merged),
        "crossovers": [] if once else vq_curves.crossovers(curves),
        "state_bytes": state_sizes(options) if once else [],
    }  # fmt: skip


def state_sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what decoding keeps of a text by length: computed from the shapes, not measured."""
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

    found = []
    for head in options.head_types:
        config = VQTransformerConfig(**configuration(options, head))
        modules = config.num_hidden_layers * (2 if config.gated else 1)
        heads = options.batch_size * config.key_heads * modules
        pair = 4 * (config.head_dim + config.value_width)
        window = config.window_size * (pair + 4)
        state = heads * (window + config.num_codes * 4 * (config.value_width + 1))
        state += 4 * options.batch_size * modules
        found += [
            {"head_type": head, "length": n, "state": state, "key_value_cache": heads * pair * n}
            for n in options.lengths
        ]
    return found


def measure_decoding(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Decode with every head type, one process each; returns rows and what does not hold."""
    points = [
        harness.Contestant(
            head, "decode", "vq_points:decoding",
            {"config": configuration(options, head), "rows": options.batch_size,
             "chunk": options.chunk, "dtype": options.dtype, "report_every": options.report_every},
            contestants.HFSEQ,
        )
        for head in options.head_types
    ]  # fmt: skip
    rounds = max(1, options.decode_tokens // options.report_every)
    rows = harness.run(points, rounds=rounds, warmup=0, threads=threads, report=report.tell)
    found = [decoded(row, options.report_every * options.batch_size) for row in rows]
    problems = [] if options.no_check else [p for row in found for p in decoding_problems(row)]
    return {"rows": found, "what": "decode", "problems": problems}


def decoded(row: harness.Row, tokens: int) -> dict[str, Any]:
    """Return what decoding with one head type did, stretch by stretch."""
    chunks = [
        values | {"seconds": seconds, "tokens_per_second": tokens / seconds}
        for values, seconds in zip(row.values, row.seconds, strict=False)
    ]
    return {
        "name": row.name, "group": row.group, "head_type": row.name, "status": row.status,
        "seconds": row.seconds, "median_seconds": row.median, "spread": row.spread,
        "tokens_per_second": tokens / row.median if row.median else None,
        "deviation": max((abs(s / row.median - 1) for s in row.seconds), default=None),
        "state_bytes": row.facts.get("state_bytes"), "peak_bytes": row.peak_bytes or None,
        "resting_bytes": row.facts.get("resting_bytes"), "chunks": chunks,
    }  # fmt: skip


def decoding_problems(row: dict[str, Any]) -> list[str]:
    """Say what of a state of fixed size does not hold."""
    chunks, found = row["chunks"], []
    if len({each["state_bytes"] for each in chunks}) > 1:
        found.append(f"{row['name']}: the state changed its size")
    if any(each["tokens_missing"] for each in chunks):
        found.append(f"{row['name']}: the state lost count of tokens")
    if (row["deviation"] or 0) > vq_curves.FLAT_WITHIN:
        found.append(f"{row['name']}: the speed deviates by {row['deviation']:.0%}")
    used = [each["memory_bytes"] for each in chunks[1:]]
    if used and max(used) > 1.05 * min(used):
        found.append(
            f"{row['name']}: memory in use grew from {min(used) / 1e6:.0f} to "
            f"{max(used) / 1e6:.0f} MB"
        )
    return found


# -- what is written down


def section(mode: str, result: dict[str, Any], picture: bool) -> str:
    """Return what benchmarks/tables.md shows: table, picture, conclusions, machine, command."""
    lines = [decoding_table(result) if mode == "decode" else length_table(result)]
    if picture:
        name = result["benchmark"]
        lines.append(f"![{name.replace('_', ' ')}]({name}.png)")
    lines += [sizes_line(result["options"]), *conclusions(result)]
    return "\n\n".join([*lines, f"{report.machine_line(result)}.", f"`{result['command']}`"])


def length_table(result: dict[str, Any]) -> str:
    """Return a row for each point."""
    columns = ["", "pass", "heads", "tokens", "µs a token", "against full", "planned memory",
               "memory of the steps"]  # fmt: skip

    def shown(row: dict[str, Any]) -> list[str]:
        planned = gigabytes(row["compiled_bytes"])
        place = [row["name"], row["what"], row["head_type"], f"{row['length']}"]
        if row["status"] != "ok":
            return [*place, row["status"], "-", planned, "-"]
        ratio = result["ratios"].get(row["group"], {}).get(row["name"])
        spread = f" ± {row['spread']:.0%}" if row["spread"] is not None else ""
        steps = (row["peak_bytes"] or 0) - (row["resting_bytes"] or 0)
        return [
            *place, f"{row['microseconds_per_token']:.1f}{spread}",
            f"{ratio:.2f}x" if ratio else "-", planned,
            gigabytes(steps) if row["peak_of_steps"] else "-",
        ]  # fmt: skip

    return harness.table(columns, [shown(row) for row in result["rows"]])


def decoding_table(result: dict[str, Any]) -> str:
    """Return a row for each head type."""
    columns = ["", "tokens", "tokens/s", "largest deviation", "state", "memory, start", "and end"]

    def shown(row: dict[str, Any]) -> list[str]:
        if row["status"] != "ok":
            return [f"{row['name']} ({row['status']})", *["-"] * 6]
        first, last = row["chunks"][0], row["chunks"][-1]
        return [
            row["name"], f"{last['tokens']}", f"{row['tokens_per_second']:.0f}",
            f"{row['deviation']:.0%}", gigabytes(row["state_bytes"]),
            gigabytes(first["memory_bytes"]), gigabytes(last["memory_bytes"]),
        ]  # fmt: skip

    return harness.table(columns, [shown(row) for row in result["rows"]])


def gigabytes(size: float | None) -> str:
    """Write a size, small ones in MB."""
    if not size:
        return "-"
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def sizes_line(options: dict[str, Any]) -> str:
    """Say which shapes were measured, and how."""
    changed = f" ({options['config_overrides']})" if options["config_overrides"] else ""
    return (
        f"Width {options['hidden_size']}, {options['layers'] or 2} layers{changed}, K "
        f"{options['head_dim']}, V {options['value_dim']} (gated heads), {options['codes']} codes, "
        f"window {options['window']}, block {options['block']}, batch {options['batch_size']}, "
        f"{options['dtype']}{', remat' if options['remat'] else ''}; medians of "
        f"{options['rounds']} rounds in {options['passes']} passes, ± half of the interquartile "
        f"range; limit {options['memory_gb']:.1f} GB."
    )


def conclusions(result: dict[str, Any]) -> list[str]:
    """Say how steep the curves are, where they cross, and how large the state is."""
    start = vq_curves.FLAT_FROM
    steep = [
        f"{each['name']} ({each['head_type']}): exponent {each['exponent']:+.2f}, "
        f"largest deviation {each['deviation_from_flat']:.0%}"
        for each in result.get("curves", [])
        if each["exponent"] is not None
    ]
    found = [f"Time per token from {start} tokens on: {'; '.join(steep)}."] if steep else []
    found += [f"Crossover: {each['text']}." for each in result.get("crossovers", [])]
    longest = {each["head_type"]: each for each in result.get("state_bytes", [])}
    return found + [
        f"Decoding with {head} keeps {gigabytes(each['state'])} whatever the length; keys and "
        f"values of {each['length']} tokens would be {gigabytes(each['key_value_cache'])} "
        "(both computed from the shapes)."
        for head, each in longest.items()
    ]


# -- the command


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="+", choices=MODES)
    for name, value, text in (
        ("hidden_size", 128, "width"), ("head_dim", 64, "K, width of queries and keys"),
        ("value_dim", 256, "V of gated heads; the others have K"),
        ("codes", 128, "codes of a codebook"), ("window", 128, "tokens seen one by one"),
        ("block", 128, "tokens of a block"), ("vocab_size", 259, "size of the vocabulary"),
        ("batch_size", 1, "rows"), ("rounds", 3, "timed steps of each point in a pass"),
        ("passes", 2, "passes over all lengths, in turn up and down"),
        ("decode_tokens", 100_000, "tokens to decode"),
        ("report_every", 10_000, "tokens of a timed stretch of decoding"),
        ("chunk", 1000, "tokens of a compiled loop"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value})")
    parser.add_argument("--lengths", type=int, nargs="+", help="1k to 64k; compare: 8k and 32k")
    parser.add_argument("--head_types", nargs="+", default=["shga"], choices=HEADS)
    parser.add_argument("--reductions", nargs="+", default=["recurrent"], choices=REDUCTIONS)
    parser.add_argument("--no_full", action="store_true", help="leave quadratic attention out")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--remat", action="store_true", help="recompute layers in backward passes")
    parser.add_argument(
        "--memory_gb", type=float, help="most that a point may need; 70 %% of what is free"
    )
    report.add_common(parser)
    options = parser.parse_args(arguments)
    if options.report_every % options.chunk or options.report_every > options.decode_tokens:
        parser.error("--report_every has to be a multiple of --chunk, --decode_tokens no less")
    if options.memory_gb is None:
        options.memory_gb = 0.7 * available_bytes() / harness.GB
    return options


def available_bytes() -> int:
    """Return the memory that is free for use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable: give --memory_gb")


def run_mode(mode: str, arguments: list[str] | None, options: argparse.Namespace) -> int:
    """Measure one mode, draw, print and write; returns the exit code."""
    threads = options.threads or harness.machine_facts()["cores"]
    chosen = argparse.Namespace(**vars(options))
    chosen.lengths = options.lengths or ([8192, 32768] if mode == "compare" else LENGTHS)
    result = report.head_of(f"vq_{mode}", "vq_length", arguments, chosen, threads)
    decodes = mode == "decode"
    if decodes:
        result |= measure_decoding(chosen, threads)
    else:
        result |= measure_lengths(mode, chosen, threads)
    ran = any(row["seconds"] for row in result["rows"])
    picture = ran and mode != "compare"
    if picture:
        draw = vq_plot.draw_decoding if decodes else vq_plot.draw
        draw(result, options.output / "benchmarks" / f"vq_{mode}.png")
    return report.publish(result, section(mode, result, picture), options.output, failed=not ran)


def main(arguments: list[str] | None = None) -> int:
    """Run every mode; exit code 1 if nothing ran or something that must hold does not."""
    options = parse(arguments)
    return max([run_mode(mode, arguments, options) for mode in options.modes])


if __name__ == "__main__":
    sys.exit(main())
