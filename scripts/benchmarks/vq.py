"""What a VQ Transformer costs as texts grow, beside quadratic attention, and how well it learns.

    python scripts/benchmarks/vq.py train forward          # time per token, 1k to 64k
    python scripts/benchmarks/vq.py memory decode          # memory; 100k tokens decoded
    python scripts/benchmarks/vq.py compare --hidden_size 768 --head_dim 128 \
        --value_dim 1536 --codes 512 --window 512 --block 512     # 8k and 32k
    python scripts/benchmarks/vq.py quality --output_dir comparison \
        full=runs/full-0 full=runs/full-1 vq=runs/vq-0 vq_quadratic=runs/vq_quadratic-0

Every point (head type, attention, reduction, length) has a process of its own. It is compiled
first, and one that needs more than ``--memory_gb`` by XLA's plan is marked instead of run. Points
of a length step in turn; a second pass goes over the lengths in the other order. Time per token of
VQ has to be constant to 15 % from 4k on, or the command fails.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import harness
import training
from harness import Contestant, Row, Running

from hfseq.errors import UsageError, run_command

PASSES = {
    "train": ("train",),
    "forward": ("forward",),
    "memory": ("train",),
    "compare": ("train", "forward"),
}
MODES = (*PASSES, "decode")
LENGTHS = [1024 * 2**n for n in range(7)]
REDUCTIONS = ("recurrent", "serial", "matmul", "associative_scan")
HEADS = ("shga", "mhga", "mha", "mqa", "gqa")
# From here on the time per token of VQ has to be constant, to within this share.
FLAT_FROM, FLAT_WITHIN = 4096, 0.15

# -- in the processes: a pass over one length, or decoding


def build(config: dict[str, Any], dtype: str) -> Any:
    from hfseq.nn import precision
    from hfseq_plugins.vq_transformer import configuration, modeling

    return modeling.FlaxVQTransformerForCausalLM(
        configuration.VQTransformerConfig(**config),
        _do_init=False,
        precision=precision.precision_for(dtype),
    )


def fresh(model: Any) -> tuple[Any, Any]:
    import jax

    key = jax.random.key(0)
    return model.init_weights(key), model.init_extra(key)


def pass_over(model: Any, what: str) -> Callable[..., Any]:
    """Return the scoring of a text, or a step of plain gradient descent and of the codebooks."""
    import jax
    import jax.numpy as jnp

    from hfseq.objectives.cross_entropy import cross_entropy

    def loss(params: Any, extra: Any, ids: Any) -> Any:
        output, after = model(
            ids, params=params, extra=extra, train=what == "train", dropout_rng=jax.random.key(1)
        )
        labels = jnp.pad(ids[:, 1:], [(0, 0), (0, 1)], constant_values=-100)
        total, count, _ = cross_entropy(output.logits, labels)
        # Quadratic attention uses no codes: what is not asked for is not computed.
        if what == "forward" or model.config.attention_type == "full":
            return total / count, extra
        return total / count + output.auxiliary_loss / ids.size, model.finalize_extra(after)

    def step(params: Any, extra: Any, ids: Any) -> Any:
        if what == "forward":
            return params, extra, loss(params, extra, ids)[0]
        (value, extra), slopes = jax.value_and_grad(loss, has_aux=True)(params, extra, ids)
        params = jax.tree.map(lambda leaf, slope: leaf - 1e-3 * slope, params, slopes)
        return params, extra, value

    return step


def length_point(
    what: str,
    config: dict[str, Any],
    rows: int,
    length: int,
    dtype: str,
    remat: bool,
    limit_bytes: float,
) -> Running:
    """One length: compiled first, and run only if what it needs is within ``limit_bytes``."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    model = build(config, dtype)
    if remat:
        model.enable_gradient_checkpointing()
    shapes = (model.params_shape_tree, model.extra_shape_tree)
    text = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    program = jax.jit(pass_over(model, what), donate_argnums=(0, 1)).lower(*shapes, text).compile()
    facts = harness.planned_bytes(program) | {"fits": True, "device": jax.devices()[0].device_kind}
    if facts["compiled_bytes"] > limit_bytes:
        return Running(lambda: {}, lambda: 0, facts | {"fits": False})
    params, extra = fresh(model)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, length), np.int32)

    def step() -> dict[str, float]:
        nonlocal params, extra
        params, extra, loss = program(params, extra, ids)
        return {"loss": float(loss)}

    facts |= {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
    return Running(step, harness.jax_peak_bytes, facts | resting())


def resting() -> dict[str, Any]:
    """Return what the process holds before its first step, and forget the peak until here."""
    if held := harness.device_bytes("bytes_in_use"):
        return {"resting_bytes": held, "peak_of_steps": True}
    before = harness.process_bytes("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    # Where the system does not forget, the peak is that of compilation, too.
    return {"resting_bytes": before, "peak_of_steps": harness.host_peak_bytes() < before * 1.02}


def decoding(
    config: dict[str, Any], rows: int, chunk: int, dtype: str, report_every: int
) -> Running:
    """Decode greedily; a step is ``report_every`` tokens, in compiled loops of ``chunk``."""
    import jax
    import jax.numpy as jnp

    model = build(config, dtype)
    params, extra = fresh(model)
    state, token, done = model.init_cache(rows, 0), jnp.ones((rows, 1), jnp.int32), 0

    def loop(params: Any, extra: Any, state: Any, token: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            state, token = carry
            output, _ = model(token, params=params, extra=extra, past_key_values=state)
            following = output.logits.argmax(-1).astype(jnp.int32)
            return (output.past_key_values, following), None

        return jax.lax.scan(step, (state, token), None, length=chunk)[0]

    program = jax.jit(loop, donate_argnums=2).lower(params, extra, state, token).compile()
    missing_tokens(program(params, extra, model.init_cache(rows, 0), token)[0], model.config, chunk)

    def step() -> dict[str, Any]:
        nonlocal state, token, done
        for _ in range(report_every // chunk):
            state, token = program(params, extra, state, token)
        done += report_every
        jax.block_until_ready(token)
        held = harness.device_bytes("bytes_in_use")
        return {
            "tokens": done,
            "state_bytes": training.tree_bytes(state),
            "memory_bytes": held or harness.process_bytes("VmRSS"),
            "tokens_missing": missing_tokens(state, model.config, done),
        }

    facts = {"state_bytes": training.tree_bytes(state), "fits": True} | resting()
    return Running(step, harness.jax_peak_bytes, harness.planned_bytes(program) | facts)


def missing_tokens(state: Any, config: Any, done: int) -> int:
    """Return how many tokens the state should know of and does not: all are counted somewhere."""
    import jax

    expected = max(0, done - config.window_size)
    return max(
        abs(int(leaf.sum()) - expected * leaf.shape[-3] * leaf.shape[-2])
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if path[-1].key == "cache_count"
    )


# -- what is measured


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__,
        sizes=True,
        hidden_size=(128, "width"),
        head_dim=(64, "K, width of queries and keys"),
        value_dim=(256, "V of gated heads; the others have K"),
        codes=(128, "codes of a codebook"),
        window=(128, "tokens seen one by one"),
        block=(128, "tokens of a block"),
        vocab_size=(259, "size of the vocabulary"),
        batch_size=(1, "rows"),
        rounds=(3, "timed steps of each point in a pass"),
        passes=(2, "passes over all lengths, in turn up and down"),
        decode_tokens=(100_000, "tokens to decode"),
        report_every=(10_000, "tokens of a timed stretch of decoding"),
        chunk=(1000, "tokens of a compiled loop"),
    )
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument("--lengths", type=int, nargs="+", help="1k to 64k; compare: 8k and 32k")
    parser.add_argument("--head_types", nargs="+", default=["shga"], choices=HEADS)
    parser.add_argument("--reductions", nargs="+", default=["recurrent"], choices=REDUCTIONS)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--remat", action="store_true", help="recompute layers in backward passes")
    parser.add_argument(
        "--memory_gb", type=float, help="most that a point may need; 70 %% of what is free"
    )
    options = parser.parse_args(given)
    if options.report_every % options.chunk or options.report_every > options.decode_tokens:
        parser.error("--report_every has to be a multiple of --chunk, --decode_tokens no less")
    if options.memory_gb is None:
        try:
            options.memory_gb = 0.7 * harness.process_bytes("MemAvailable", "meminfo") / harness.GB
        except OSError as error:
            parser.error(f"{error}: give --memory_gb")
    return options


def configuration(
    options: argparse.Namespace, head: str, attention: str = "vq", reduction: str = "recurrent"
) -> dict[str, Any]:
    size = harness.size_of(options)
    value = {"value_dim": options.value_dim} if head in ("shga", "mhga") else {}
    return {
        "hidden_size": options.hidden_size,
        "num_hidden_layers": size.pop("layers", 2),
        "head_dim": options.head_dim,
        "num_codes": options.codes,
        "window_size": options.window,
        "block_size": options.block,
        "vocab_size": options.vocab_size,
        "head_type": head,
        "attention_type": attention,
        "reduction": reduction,
        **value,
        **size,
    }


def points_of(mode: str, options: argparse.Namespace) -> dict[Contestant, dict[str, Any]]:
    kinds = {f"vq {reduction}": ("vq", reduction) for reduction in options.reductions}
    kinds["full"] = ("full", "recurrent")
    points, choices = {}, (PASSES[mode], options.head_types, options.lengths, kinds)
    for what, head, length, name in itertools.product(*choices):
        settings = {
            "what": what,
            "config": configuration(options, head, *kinds[name]),
            "rows": options.batch_size,
            "length": length,
            "dtype": options.dtype,
            "remat": options.remat,
            "limit_bytes": options.memory_gb * harness.GB,
        }
        # Where memory is measured nothing else is in memory.
        group = f"{what} {head} {length}" + (f" {name}" if mode == "memory" else "")
        point = Contestant(name, group, "vq:length_point", settings, harness.HFSEQ)
        points[point] = {"what": what, "head_type": head, "length": length}
    return points


def measure_lengths(mode: str, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    points, once = points_of(mode, options), mode == "memory"
    rows: dict[Contestant, Row] = {}
    turns = {"rounds": 1 if once else options.rounds, "warmup": 1, "threads": threads}
    for number in range(1 if once else options.passes):
        ordered = list(points)[:: -1 if number % 2 else 1]
        ran = harness.run(ordered, report=harness.tell, **turns)
        for point, row in zip(ordered, ran, strict=True):
            kept = rows.setdefault(point, row)
            if kept is not row:  # a failure in one pass is a failure
                kept.seconds += row.seconds
                kept.values += row.values
                kept.peak_bytes = max(kept.peak_bytes, row.peak_bytes)
                kept.status = row.status if kept.status == "ok" else kept.status
    shown = [point_row(row, points[point], options.batch_size) for point, row in rows.items()]
    result = {
        "rows": shown,
        "what": PASSES[mode][0],
        "problems": [],
        "ratios": {} if once else ratios(rows.values()),
    }
    if mode == "compare":
        return result
    members: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in shown:
        members.setdefault((each["head_type"], each["name"]), []).append(each)
    curves = [curve(*key, each) for key, each in members.items()]
    result |= {"curves": curves, "crossovers": [], "state_bytes": []}
    if once:
        result["state_bytes"] = state_sizes(options)
    else:
        full = {each["head_type"]: each for each in curves if each["name"] == "full"}
        others = [each for each in curves if each["name"] != "full"]
        result["crossovers"] = [crossover(each, full[each["head_type"]]) for each in others]
        result["problems"] = [] if options.no_check else not_flat(curves)
    return result


def row_of(row: Row, **more: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "group": row.group,
        **more,
        "status": row.status,
        "seconds": row.seconds,
        "median_seconds": row.median,
        "spread": row.spread,
        "resting_bytes": row.facts.get("resting_bytes"),
        "peak_bytes": row.peak_bytes or None,
    }


def point_row(row: Row, place: dict[str, Any], rows: int) -> dict[str, Any]:
    facts, tokens = row.facts, rows * place["length"]
    if not facts.get("fits", True):
        row.status, row.seconds = "does not fit", []
    planned = facts.get("compiled_bytes")
    known = {key: facts.get(key) for key in ("temporary_bytes", "peak_of_steps")}
    return (
        row_of(row, **place)
        | known
        | {
            "microseconds_per_token": 1e6 * row.median / tokens if row.median else None,
            "tokens_per_second": tokens / row.median if row.median else None,
            "compiled_bytes": planned,
            "compiled_bytes_per_token": planned and planned / tokens,
        }
    )


def curve(head: str, name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a curve: its points in order, how steep it is, and how flat from 4k on.

    The exponent of time per token over length is 0 where time is linear, 1 where it is quadratic;
    the deviation is the largest from the median.
    """
    points = sorted(points, key=lambda each: each["length"])
    pairs = [(p["length"], p["microseconds_per_token"]) for p in points]
    pairs = [(length, time) for length, time in pairs if time]
    long = [(length, time) for length, time in pairs if length >= FLAT_FROM]
    exponent = deviation = None
    if len(long) > 1:
        exponent = training.exponent(long)
        middle = statistics.median(time for _, time in long)
        deviation = max(abs(time / middle - 1) for _, time in long)
    planned = [each for each in points if each["compiled_bytes"]]
    return {
        "head_type": head,
        "name": name,
        "lengths": [length for length, _ in pairs],
        "microseconds_per_token": [time for _, time in pairs],
        "does_not_fit": [p["length"] for p in points if p["status"] == "does not fit"],
        "memory_lengths": [each["length"] for each in planned],
        "compiled_bytes": [each["compiled_bytes"] for each in planned],
        "exponent": exponent,
        "deviation_from_flat": deviation,
    }


def crossover(fast: dict[str, Any], slow: dict[str, Any]) -> dict[str, Any]:
    """Say from which length ``fast`` takes less time than ``slow``.

    Between two measured lengths both are straight lines in logarithms. ``length`` is None where
    they do not cross within what was measured, and ``text`` says on which side they are.
    """
    a_side, b_side = (
        dict(zip(each["lengths"], each["microseconds_per_token"], strict=True))
        for each in (fast, slow)
    )
    gaps = [(n, math.log(b_side[n] / time)) for n, time in a_side.items() if n in b_side]
    pair = f"{fast['name']} and {slow['name']} ({fast['head_type']})"
    length, text = None, f"{pair}: no length was measured for both"
    if gaps and gaps[0][1] >= 0:
        text = f"{pair}: {fast['name']} is ahead from {gaps[0][0]} tokens, or less"
    elif gaps:
        text = f"{pair}: {slow['name']} is ahead up to {gaps[-1][0]} tokens"
        for (a, below), (b, above) in itertools.pairwise(gaps):
            if above >= 0:
                share = below / (below - above)
                length = round(math.exp(math.log(a) + share * math.log(b / a)))
                text = f"{pair} cross at {length} tokens"
                break
    return {"pair": pair, "length": length, "text": text}


def not_flat(curves: Sequence[dict[str, Any]]) -> list[str]:
    """Name the VQ curves whose time per token is not constant from 4k on."""
    return [
        f"{each['name']} ({each['head_type']}): time per token from {FLAT_FROM} tokens on deviates "
        f"by {each['deviation_from_flat']:.0%} from its median (allowed {FLAT_WITHIN:.0%})"
        for each in curves
        if each["name"].startswith("vq ") and (each["deviation_from_flat"] or 0) > FLAT_WITHIN
    ]


def ratios(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return by group how many times as fast as quadratic attention each other one is."""
    full = {row.group: row for row in rows if row.name == "full"}
    pairs = [(row, full[row.group]) for row in rows if row.name != "full" and row.group in full]
    times: dict[str, dict[str, float]] = {}
    for row, other in pairs:
        if value := harness.ratio(row, other):
            times.setdefault(row.group, {})[row.name] = value
    return times


def state_sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what decoding keeps of a text by length: computed from the shapes, not measured."""
    from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig

    sizes = []
    for head in options.head_types:
        config = VQTransformerConfig(**configuration(options, head))
        modules = config.num_hidden_layers * (2 if config.gated else 1)
        heads = options.batch_size * config.key_heads * modules
        pair = 4 * (config.head_dim + config.value_width)
        codes = config.num_codes * 4 * (config.value_width + 1)
        state = heads * (config.window_size * (pair + 4) + codes) + 4 * options.batch_size * modules
        sizes += [
            {"head_type": head, "length": n, "state": state, "key_value_cache": heads * pair * n}
            for n in options.lengths
        ]
    return sizes


def measure_decoding(mode: str, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    shared = {
        "rows": options.batch_size,
        "chunk": options.chunk,
        "dtype": options.dtype,
        "report_every": options.report_every,
    }
    points = [
        Contestant(
            head,
            "decode",
            "vq:decoding",
            shared | {"config": configuration(options, head)},
            harness.HFSEQ,
        )
        for head in options.head_types
    ]
    turns = {"rounds": max(1, options.decode_tokens // options.report_every), "warmup": 0}
    tokens, shown = options.report_every * options.batch_size, []
    for row in harness.run(points, **turns, threads=threads, report=harness.tell):
        chunks = [
            values | {"seconds": seconds, "tokens_per_second": tokens / seconds}
            for values, seconds in zip(row.values, row.seconds, strict=False)
        ]
        shown.append(
            row_of(row, head_type=row.name)
            | {
                "tokens_per_second": tokens / row.median if row.median else None,
                "deviation": max((abs(s / row.median - 1) for s in row.seconds), default=None),
                "state_bytes": row.facts.get("state_bytes"),
                "chunks": chunks,
            }
        )
    problems = [] if options.no_check else [p for row in shown for p in decoding_problems(row)]
    return {"rows": shown, "what": mode, "problems": problems}


def decoding_problems(row: dict[str, Any]) -> list[str]:
    name, chunks, found = row["name"], row["chunks"], []
    if len({each["state_bytes"] for each in chunks}) > 1:
        found.append(f"{name}: the state changed its size")
    if any(each["tokens_missing"] for each in chunks):
        found.append(f"{name}: the state lost count of tokens")
    if (row["deviation"] or 0) > FLAT_WITHIN:
        found.append(f"{name}: the speed deviates by {row['deviation']:.0%}")
    used = [each["memory_bytes"] / 1e6 for each in chunks[1:]]
    if used and max(used) > 1.05 * min(used):
        found.append(f"{name}: memory in use grew from {min(used):.0f} to {max(used):.0f} MB")
    return found


# -- what is written down


def gigabytes(size: float | None) -> str:
    if not size:
        return harness.ABSENT
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


LENGTH_COLUMNS = [
    "",
    "pass",
    "heads",
    "tokens",
    "µs a token",
    "against full",
    "planned memory",
    "memory of the steps",
]
DECODING_COLUMNS: tuple[harness.Column, ...] = (
    ("tokens", lambda row: f"{row['chunks'][-1]['tokens']}" if row["chunks"] else harness.ABSENT),
    ("tokens/s", lambda row: f"{row['tokens_per_second']:.0f}"),
    ("largest deviation", lambda row: f"{row['deviation']:.0%}"),
    ("state", lambda row: gigabytes(row["state_bytes"])),
    ("memory, start", lambda row: gigabytes(row["chunks"][0]["memory_bytes"])),
    ("and end", lambda row: gigabytes(row["chunks"][-1]["memory_bytes"])),
)


def length_cells(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    planned = gigabytes(row["compiled_bytes"])
    begin = [row["name"], row["what"], row["head_type"], f"{row['length']}"]
    if row["status"] != "ok":
        return [*begin, row["status"], "-", planned, "-"]
    ratio = result["ratios"].get(row["group"], {}).get(row["name"])
    steps = (row["peak_bytes"] or 0) - (row["resting_bytes"] or 0)
    return [
        *begin,
        f"{row['microseconds_per_token']:.1f}{harness.spread(row)}",
        harness.times(ratio),
        planned,
        gigabytes(steps) if row["peak_of_steps"] else "-",
    ]


def section(mode: str, result: dict[str, Any], picture: bool) -> str:
    if mode == "decode":
        table = harness.table(result["rows"], DECODING_COLUMNS)
    else:
        rows = [length_cells(row, result) for row in result["rows"]]
        table = harness.markdown(LENGTH_COLUMNS, rows)
    options = result["options"]
    changed = f" ({options['config_overrides']})" if options["config_overrides"] else ""
    lines = [
        f"Width {options['hidden_size']}, {options['layers'] or 2} layers{changed}, K "
        f"{options['head_dim']}, V {options['value_dim']} (gated heads), {options['codes']} codes, "
        f"window {options['window']}, block {options['block']}, batch {options['batch_size']}, "
        f"{options['dtype']}{', remat' if options['remat'] else ''}; medians of "
        f"{options['rounds']} rounds in {options['passes']} passes, ± half of the interquartile "
        f"range; limit {options['memory_gb']:.1f} GB."
    ]
    steep = [
        f"{each['name']} ({each['head_type']}): exponent {each['exponent']:+.2f}, "
        f"largest deviation {each['deviation_from_flat']:.0%}"
        for each in result.get("curves", [])
        if each["exponent"] is not None
    ]
    lines += [f"Time per token from {FLAT_FROM} tokens on: {'; '.join(steep)}."] if steep else []
    lines += [f"Crossover: {each['text']}." for each in result.get("crossovers", [])]
    longest = {each["head_type"]: each for each in result.get("state_bytes", [])}
    lines += [
        f"Decoding with {head} keeps {gigabytes(each['state'])} whatever the length; keys and "
        f"values of {each['length']} tokens would be {gigabytes(each['key_value_cache'])} "
        "(both computed from the shapes)."
        for head, each in longest.items()
    ]
    shown = (f"vq {mode}", f"vq_{mode}.png") if picture else None
    return harness.page(result | {"remarks": lines}, table, shown)


def costs(given: Sequence[str]) -> int:
    options, codes = parse(given), []
    lengths = options.lengths
    for mode in options.modes:
        options.lengths = lengths or ([8192, 32768] if mode == "compare" else LENGTHS)
        result = harness.head(f"vq_{mode}", "vq.py", given, options)
        measure, draw = {"decode": (measure_decoding, draw_decoding)}.get(
            mode, (measure_lengths, draw_lengths)
        )
        result |= measure(mode, options, result["threads"])
        picture = mode != "compare" and any(row["seconds"] for row in result["rows"])
        if picture:
            draw(result, options.output / "benchmarks" / f"vq_{mode}.png")
        text = section(mode, result, picture)
        codes.append(harness.publish(result, text, options.output))
    return max(codes)


# -- pictures

COLORS = ("#3b76af", "#4f9d69", "#8a6bb1", "#7a7a7a")
MARKED = {"marker": "o", "markersize": 4.5}


def draw_lengths(result: dict[str, Any], path: Path) -> None:
    from hfseq.reports import plots

    vq = iter(COLORS * len(result["curves"]))
    times: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    crosses = []
    for each in result["curves"]:
        label = f"{each['name']}, {each['head_type']}"
        color = plots.EVAL_COLOR if each["name"] == "full" else next(vq)
        times[label] = each["lengths"], each["microseconds_per_token"], {"color": color}
        planned = [size / 1e6 for size in each["compiled_bytes"]]
        memory[label] = each["memory_lengths"], planned, {"color": color}
        crosses += [(length, color) for length in each["does_not_fit"]]
    what = "a training step" if result["what"] == "train" else "the forward pass"
    figure, panels = harness.curves(
        f"Cost of {what} over the length of the text",
        [
            {"x": "tokens", "y": "microseconds a token", "lines": times, "style": MARKED},
            {"x": "tokens", "y": "memory by XLA's plan (MB)", "lines": memory, "style": MARKED},
        ],
    )
    for panel in panels:  # a cross on the upper edge for each length that does not fit
        for length, color in crosses:
            panel.plot(
                [length],
                [0.985],
                marker="x",
                color=color,
                clip_on=False,
                markersize=7,
                transform=panel.get_xaxis_transform(),
            )
    if crosses:
        told = f"x: needs more than {result['options']['memory_gb']:.0f} GB, not run"
        panels[0].text(
            0.98,
            0.02,
            told,
            ha="right",
            fontsize=8,
            color=plots.TEXT_COLOR,
            transform=panels[0].transAxes,
        )
    plots.save_figure(figure, path)


def draw_decoding(result: dict[str, Any], path: Path) -> None:
    from hfseq.reports import plots

    parts = []
    for text, key, scale in (
        ("tokens a second", "tokens_per_second", 1),
        ("memory in use (MB)", "memory_bytes", 1e6),
    ):
        lines = {
            row["head_type"]: (
                [each["tokens"] for each in row["chunks"]],
                [each[key] / scale for each in row["chunks"]],
            )
            for row in result["rows"]
        }
        part = {"x": "tokens decoded", "y": text, "log": False, "style": MARKED, "lines": lines}
        parts.append(part)
    figure, panels = harness.curves("Decoding with a state of fixed size", parts)
    for panel in panels:
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0, top=panel.get_ylim()[1] * 1.15)
        panel.xaxis.set_major_formatter(lambda n, _: plots.format_count(n))
    plots.save_figure(figure, path)


# -- learning curves of runs, with the spread of their seeds: vq.py quality


def read_run(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UsageError(f"{folder} has no metrics.jsonl: give the --output_dir of a finished run")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = {name: value for record in records for name, value in record.items()}
    if "eval_bits_per_byte" not in last:
        raise UsageError(f"{folder} was not evaluated with --bits_per_byte")
    steps = [record for record in records if "train_loss" in record]
    return {
        "steps": [record["step"] for record in steps],
        "train_bits_per_token": [record["train_loss"] / math.log(2) for record in steps],
        "code_perplexity": [record.get("train_code_perplexity") for record in steps],
        "bits_per_byte": last["eval_bits_per_byte"],
    }


def compare_runs(runs: Sequence[tuple[str, Path]]) -> dict[str, Any]:
    """Return the runs by name, and each name's mean beside that of the first."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for name, folder in runs:
        by_name.setdefault(name, []).append(read_run(folder))
    bits = {name: [run["bits_per_byte"] for run in each] for name, each in by_name.items()}
    means = {name: statistics.mean(values) for name, values in bits.items()}
    ratio = {name: mean / means[runs[0][0]] for name, mean in means.items()}
    return {"runs": by_name, "bits_per_byte": bits, "mean": means, "ratio": ratio}


def draw_runs(result: dict[str, Any], path: Path) -> None:
    from hfseq.reports import plots

    losses: dict[str, Any] = {}
    codes: dict[str, Any] = {}
    for number, (name, runs) in enumerate(result["runs"].items()):
        for seed, run in enumerate(runs):
            style = {
                "color": (plots.EVAL_COLOR, *COLORS)[number % 4],
                "alpha": 0.45 if seed else 1.0,
                "linestyle": "--" if number == 2 else "-",
                "linewidth": 1.4,
            }
            label = f"_{name} {seed}" if seed else f"{name} ({result['mean'][name]:.3f})"
            losses[label] = run["steps"][1:], run["train_bits_per_token"][1:], style
            if name != "full" and None not in run["code_perplexity"]:
                codes[f"_{name} {seed}"] = run["steps"], run["code_perplexity"], style
    figure, panels = harness.curves(
        "",
        [
            {
                "x": "step (in brackets: bits per byte, validation)",
                "y": "training loss (bits a token)",
                "lines": losses,
                "log": False,
            },
            {"x": "step", "y": "codes in use (perplexity)", "lines": codes, "log": False},
        ],
    )
    panels[1].set_ylim(bottom=0)
    plots.save_figure(figure, path)


def quality(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Lay the learning curves of VQ and quadratic runs over each other, with the "
        "spread of their seeds. Each DIR is the --output_dir of a finished run of run_clm_flax.py "
        "with --bits_per_byte. Writes comparison.json (bits per byte of each run, means, the ratio "
        "to the first name) and comparison.png."
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=DIR")
    parser.add_argument("--output_dir", type=Path, required=True)
    options, runs = parser.parse_args(given), []
    for run in options.runs:
        name, equals, folder = run.partition("=")
        if not equals:
            raise UsageError(f"{run} is not NAME=DIR, such as full=runs/full-0")
        runs.append((name, Path(folder)))
    result = compare_runs(runs)
    harness.write_json(options.output_dir / "comparison.json", result)
    draw_runs(result, options.output_dir / "comparison.png")
    for name, mean in result["mean"].items():
        values = ", ".join(f"{value:.4f}" for value in result["bits_per_byte"][name])
        print(f"{name}: {mean:.4f} bits per byte, {result['ratio'][name]:.4f} times ({values})")
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(run_command(lambda: harness.dispatch({"": costs, "quality": quality}, __doc__, given)))
