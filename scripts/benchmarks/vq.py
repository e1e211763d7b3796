"""Compare the VQ Transformer with quadratic attention: time, memory and learning curves.

    python scripts/benchmarks/vq.py train forward          # time per token, 1k to 64k
    python scripts/benchmarks/vq.py memory decode          # memory; 100k tokens decoded
    python scripts/benchmarks/vq.py compare --hidden_size 768 --head_dim 128 \
        --value_dim 1536 --codes 512 --window 512 --block 512     # 8k and 32k
    python scripts/benchmarks/vq.py quality --output_dir comparison \
        full=runs/full-0 full=runs/full-1 vq=runs/vq-0 vq_quadratic=runs/vq_quadratic-0

A measurement of one head type, attention type, reduction and length is called a point. Every point
runs in a separate process, which first compiles its program. If XLA plans more memory than
``--memory_gb``, the point is not measured, and the table says so. The points of the same length
take turns. A second pass visits the lengths in reverse order. The time per token of VQ attention
should not depend on the length. The command fails if this time deviates by more than 15 % from its
median for lengths of at least 4k tokens.
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
from harness import Contestant, Row, Workload

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
# The time per token must be constant from this length on, up to this relative deviation.
FLAT_FROM, FLAT_WITHIN = 4096, 0.15

# -- the workloads: a pass over one length, or decoding


def build(config: dict[str, Any], dtype: str) -> Any:
    """Returns a VQ Transformer without parameters."""
    from hfseq.nn import precision
    from hfseq_plugins.vq_transformer import configuration, modeling

    return modeling.FlaxVQTransformerForCausalLM(
        configuration.VQTransformerConfig(**config),
        _do_init=False,
        precision=precision.precision_for(dtype),
    )


def init_variables(model: Any) -> tuple[Any, Any]:
    """Returns random parameters and initial codebooks."""
    import jax

    key = jax.random.key(0)
    return model.init_weights(key), model.init_extra(key)


def pass_function(model: Any, pass_name: str) -> Callable[..., Any]:
    """Returns the function of a forward pass, or of a training step.

    The forward pass computes the loss. The training step also updates weights and codebooks.
    """
    import jax
    import jax.numpy as jnp

    from hfseq.objectives.cross_entropy import cross_entropy

    def loss(params: Any, extra: Any, ids: Any) -> Any:
        output, new_extra = model(
            ids,
            params=params,
            extra=extra,
            train=pass_name == "train",
            dropout_rng=jax.random.key(1),
        )
        labels = jnp.pad(ids[:, 1:], [(0, 0), (0, 1)], constant_values=-100)
        total, count, _ = cross_entropy(output.logits, labels)
        # Neither the forward pass nor quadratic attention updates codebooks. XLA does not compute
        # outputs that are not used.
        if pass_name == "forward" or model.config.attention_type == "full":
            return total / count, extra
        return total / count + output.auxiliary_loss / ids.size, model.finalize_extra(new_extra)

    def step(params: Any, extra: Any, ids: Any) -> Any:
        if pass_name == "forward":
            return params, extra, loss(params, extra, ids)[0]
        (value, extra), gradients = jax.value_and_grad(loss, has_aux=True)(params, extra, ids)
        params = jax.tree.map(lambda leaf, gradient: leaf - 1e-3 * gradient, params, gradients)
        return params, extra, value

    return step


def length_point(
    pass_name: str,
    config: dict[str, Any],
    rows: int,
    length: int,
    dtype: str,
    remat: bool,
    limit_bytes: float,
) -> Workload:
    """Builds the workload of one length.

    If the program needs more memory than ``limit_bytes``, the steps of the workload do nothing.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    model = build(config, dtype)
    if remat:
        model.enable_gradient_checkpointing()
    shapes = (model.params_shape_tree, model.extra_shape_tree)
    text = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    program = (
        jax.jit(pass_function(model, pass_name), donate_argnums=(0, 1))
        .lower(*shapes, text)
        .compile()
    )
    info = harness.compiled_memory(program) | {"fits": True, "device": jax.devices()[0].device_kind}
    if info["compiled_bytes"] > limit_bytes:
        return Workload(lambda: {}, lambda: 0, info | {"fits": False})
    params, extra = init_variables(model)
    ids = np.random.default_rng(0).integers(3, model.config.vocab_size, (rows, length), np.int32)

    def step() -> dict[str, float]:
        nonlocal params, extra
        params, extra, loss = program(params, extra, ids)
        return {"loss": float(loss)}

    info |= {"parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}
    return Workload(step, harness.jax_peak_bytes, info | resting_memory())


def resting_memory() -> dict[str, Any]:
    """Returns the memory in use before the first step, and resets the recorded peak if possible."""
    if num_bytes := harness.device_memory_stat("bytes_in_use"):
        return {"resting_bytes": num_bytes, "peak_of_steps": True}
    resident_bytes = harness.process_bytes("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    # If the system cannot reset the peak, the peak includes the memory of the compilation.
    return {
        "resting_bytes": resident_bytes,
        "peak_of_steps": harness.host_peak_bytes() < resident_bytes * 1.02,
    }


def decoding(
    config: dict[str, Any], rows: int, chunk: int, dtype: str, report_every: int
) -> Workload:
    """Builds a workload whose steps decode ``report_every`` tokens greedily.

    A step consists of several calls of a compiled loop, which decodes ``chunk`` tokens per call.
    """
    import jax
    import jax.numpy as jnp

    model = build(config, dtype)
    params, extra = init_variables(model)
    state, token, num_decoded = model.init_cache(rows, 0), jnp.ones((rows, 1), jnp.int32), 0

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
        nonlocal state, token, num_decoded
        for _ in range(report_every // chunk):
            state, token = program(params, extra, state, token)
        num_decoded += report_every
        jax.block_until_ready(token)
        bytes_in_use = harness.device_memory_stat("bytes_in_use")
        return {
            "tokens": num_decoded,
            "state_bytes": training.tree_bytes(state),
            "memory_bytes": bytes_in_use or harness.process_bytes("VmRSS"),
            "tokens_missing": missing_tokens(state, model.config, num_decoded),
        }

    info = {"state_bytes": training.tree_bytes(state), "fits": True} | resting_memory()
    return Workload(step, harness.jax_peak_bytes, harness.compiled_memory(program) | info)


def missing_tokens(state: Any, config: Any, num_decoded: int) -> int:
    """Returns the largest error of the token counts in the decoding state.

    The state counts the tokens that have left the attention window, and assigns each of them to
    exactly one code.
    """
    import jax

    expected = max(0, num_decoded - config.window_size)
    return max(
        abs(int(leaf.sum()) - expected * leaf.shape[-3] * leaf.shape[-2])
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if path[-1].key == "cache_count"
    )


# -- measurements


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of the command without a subcommand."""
    parser = harness.make_parser(
        __doc__,
        sizes=True,
        hidden_size=(128, "hidden size"),
        head_dim=(64, "dimension K of queries and keys"),
        value_dim=(256, "dimension V of the values of gated heads; other heads use K"),
        codes=(128, "codes per codebook"),
        window=(128, "tokens that are attended to without quantization"),
        block=(128, "tokens per block"),
        vocab_size=(259, "vocabulary size"),
        batch_size=(1, "batch size"),
        rounds=(3, "timed steps per point and pass"),
        passes=(2, "passes over all lengths, alternately ascending and descending"),
        decode_tokens=(100_000, "tokens to decode"),
        report_every=(10_000, "tokens per timed step of decoding"),
        chunk=(1000, "tokens per compiled loop"),
    )
    parser.add_argument("modes", nargs="+", choices=MODES, help="measurements to run")
    lengths_help = "lengths in tokens (default: 1k to 64k; 8k and 32k for compare)"
    parser.add_argument("--lengths", type=int, nargs="+", help=lengths_help)
    parser.add_argument(
        "--head_types",
        nargs="+",
        default=["shga"],
        choices=HEADS,
        help="head types (default: shga)",
    )
    reductions_help = "reductions of VQ attention (default: recurrent)"
    parser.add_argument(
        "--reductions", nargs="+", default=["recurrent"], choices=REDUCTIONS, help=reductions_help
    )
    dtype_help = "compute dtype (default: float32)"
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help=dtype_help
    )
    parser.add_argument("--remat", action="store_true", help="use gradient checkpointing")
    memory_help = "maximum memory per point in GB (default: 70 %% of the available memory)"
    parser.add_argument("--memory_gb", type=float, help=memory_help)
    options = parser.parse_args(arguments)
    if options.report_every % options.chunk or options.report_every > options.decode_tokens:
        parser.error("--report_every must be a multiple of --chunk and at most --decode_tokens")
    if options.memory_gb is None:
        try:
            options.memory_gb = 0.7 * harness.process_bytes("MemAvailable", "meminfo") / harness.GB
        except OSError as error:
            parser.error(f"{error}: pass --memory_gb")
    return options


def configuration(
    options: argparse.Namespace, head: str, attention: str = "vq", reduction: str = "recurrent"
) -> dict[str, Any]:
    """Returns the arguments of the model's configuration."""
    size = harness.size_from_flags(options)
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
    """Returns the contestant of each point of a mode, with the labels that its record contains."""
    variants = {f"vq {reduction}": ("vq", reduction) for reduction in options.reductions}
    variants["full"] = ("full", "recurrent")
    points, choices = {}, (PASSES[mode], options.head_types, options.lengths, variants)
    for pass_name, head, length, name in itertools.product(*choices):
        settings = {
            "pass_name": pass_name,
            "config": configuration(options, head, *variants[name]),
            "rows": options.batch_size,
            "length": length,
            "dtype": options.dtype,
            "remat": options.remat,
            "limit_bytes": options.memory_gb * harness.GB,
        }
        # In mode memory, every point runs alone.
        group = f"{pass_name} {head} {length}" + (f" {name}" if mode == "memory" else "")
        point = Contestant(name, group, "vq:length_point", settings, harness.HFSEQ)
        points[point] = {"what": pass_name, "head_type": head, "length": length}
    return points


def measure_lengths(mode: str, options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Measures all points of a mode, and computes the curves and where pairs of them cross."""
    points, memory_only = points_of(mode, options), mode == "memory"
    rows: dict[Contestant, Row] = {}
    turns = {"rounds": 1 if memory_only else options.rounds, "warmup": 1, "threads": threads}
    for number in range(1 if memory_only else options.passes):
        ordered = list(points)[:: -1 if number % 2 else 1]
        ran = harness.run(ordered, report=harness.log_progress, **turns)
        for point, row in zip(ordered, ran, strict=True):
            first_row = rows.setdefault(point, row)
            if first_row is not row:  # a failure in any pass is the status of the point
                first_row.seconds += row.seconds
                first_row.values += row.values
                first_row.peak_bytes = max(first_row.peak_bytes, row.peak_bytes)
                first_row.status = row.status if first_row.status == "ok" else first_row.status
    point_rows = [point_row(row, points[point], options.batch_size) for point, row in rows.items()]
    result = {
        "rows": point_rows,
        "what": PASSES[mode][0],
        "problems": [],
        "ratios": {} if memory_only else ratios(rows.values()),
    }
    if mode == "compare":
        return result
    members: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result_row in point_rows:
        members.setdefault((result_row["head_type"], result_row["name"]), []).append(result_row)
    curves = [curve(*key, rows_of_curve) for key, rows_of_curve in members.items()]
    result |= {"curves": curves, "crossovers": [], "state_bytes": []}
    if memory_only:
        result["state_bytes"] = state_sizes(options)
    else:
        full = {each["head_type"]: each for each in curves if each["name"] == "full"}
        vq_curves = [each for each in curves if each["name"] != "full"]
        result["crossovers"] = [crossover(each, full[each["head_type"]]) for each in vq_curves]
        result["problems"] = [] if options.no_check else not_flat(curves)
    return result


def row_of(row: Row, **extra_items: Any) -> dict[str, Any]:
    """Returns the recorded values of a row."""
    return {
        "name": row.name,
        "group": row.group,
        **extra_items,
        "status": row.status,
        "seconds": row.seconds,
        "median_seconds": row.median,
        "spread": row.spread,
        "resting_bytes": row.info.get("resting_bytes"),
        "peak_bytes": row.peak_bytes or None,
    }


def point_row(row: Row, labels: dict[str, Any], rows: int) -> dict[str, Any]:
    """Returns the recorded values of a point, including its time and memory per token."""
    info, tokens = row.info, rows * labels["length"]
    if not info.get("fits", True):
        row.status, row.seconds = "does not fit", []
    compiled_bytes = info.get("compiled_bytes")
    memory_info = {key: info.get(key) for key in ("temporary_bytes", "peak_of_steps")}
    return (
        row_of(row, **labels)
        | memory_info
        | {
            "microseconds_per_token": 1e6 * row.median / tokens if row.median else None,
            "tokens_per_second": tokens / row.median if row.median else None,
            "compiled_bytes": compiled_bytes,
            "compiled_bytes_per_token": compiled_bytes and compiled_bytes / tokens,
        }
    )


def curve(head: str, name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sorted points of a curve, its exponent, and its deviation from a constant.

    The exponent describes the time per token as a power of the length: it is 0 if the total time is
    linear, and 1 if it is quadratic. The deviation is the largest relative deviation of the time
    per token from its median. Both are computed from lengths of at least 4k tokens.
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
    """Computes the length from which ``fast`` takes less time than ``slow``.

    Between measured lengths, both curves are interpolated linearly on logarithmic axes. If they do
    not cross within the measured range, ``length`` in the result is `None`, and ``text`` names the
    faster one.
    """
    a_side, b_side = (
        dict(zip(each["lengths"], each["microseconds_per_token"], strict=True))
        for each in (fast, slow)
    )
    gaps = [(n, math.log(b_side[n] / time)) for n, time in a_side.items() if n in b_side]
    pair = f"{fast['name']} and {slow['name']} ({fast['head_type']})"
    length, text = None, f"{pair}: no common lengths were measured"
    if gaps and gaps[0][1] >= 0:
        text = f"{pair}: {fast['name']} is faster from {gaps[0][0]} tokens on, or earlier"
    elif gaps:
        text = f"{pair}: {slow['name']} is faster up to {gaps[-1][0]} tokens"
        for (a, below), (b, above) in itertools.pairwise(gaps):
            if above >= 0:
                share = below / (below - above)
                length = round(math.exp(math.log(a) + share * math.log(b / a)))
                text = f"{pair} cross at {length} tokens"
                break
    return {"pair": pair, "length": length, "text": text}


def not_flat(curves: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a message per VQ curve whose time per token is not constant from 4k tokens on."""
    return [
        f"{each['name']} ({each['head_type']}): from {FLAT_FROM} tokens on, the time per "
        f"token deviates by {each['deviation_from_flat']:.0%} from its median "
        f"(allowed: {FLAT_WITHIN:.0%})"
        for each in curves
        if each["name"].startswith("vq ") and (each["deviation_from_flat"] or 0) > FLAT_WITHIN
    ]


def ratios(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Returns the speed of each contestant relative to quadratic attention, by group."""
    full = {row.group: row for row in rows if row.name == "full"}
    pairs = [(row, full[row.group]) for row in rows if row.name != "full" and row.group in full]
    times: dict[str, dict[str, float]] = {}
    for row, other in pairs:
        if value := harness.ratio(row, other):
            times.setdefault(row.group, {})[row.name] = value
    return times


def state_sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the sizes of the decoding state and of a key-value cache, computed from shapes."""
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
    """Measures decoding with all head types."""
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
    tokens, decoding_rows = options.report_every * options.batch_size, []
    for row in harness.run(points, **turns, threads=threads, report=harness.log_progress):
        chunks = [
            values | {"seconds": seconds, "tokens_per_second": tokens / seconds}
            for values, seconds in zip(row.values, row.seconds, strict=False)
        ]
        decoding_rows.append(
            row_of(row, head_type=row.name)
            | {
                "tokens_per_second": tokens / row.median if row.median else None,
                "deviation": max((abs(s / row.median - 1) for s in row.seconds), default=None),
                "state_bytes": row.info.get("state_bytes"),
                "chunks": chunks,
            }
        )
    problems = (
        [] if options.no_check else [p for row in decoding_rows for p in decoding_problems(row)]
    )
    return {"rows": decoding_rows, "what": mode, "problems": problems}


def decoding_problems(row: dict[str, Any]) -> list[str]:
    """Returns a message for each failed check of the state's size and counts, speed and memory."""
    name, chunks, problems = row["name"], row["chunks"], []
    if len({each["state_bytes"] for each in chunks}) > 1:
        problems.append(f"{name}: the size of the state changed")
    if any(each["tokens_missing"] for each in chunks):
        problems.append(f"{name}: the token counts of the state are wrong")
    if (row["deviation"] or 0) > FLAT_WITHIN:
        problems.append(
            f"{name}: the time per step deviates by {row['deviation']:.0%} from its median"
        )
    used = [each["memory_bytes"] / 1e6 for each in chunks[1:]]
    if used and max(used) > 1.05 * min(used):
        problems.append(f"{name}: memory in use grew from {min(used):.0f} to {max(used):.0f} MB")
    return problems


# -- the report


def gigabytes(size: float | None) -> str:
    """Formats a size in bytes as GB or MB."""
    if not size:
        return harness.ABSENT
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


LENGTH_COLUMNS = [
    "",
    "pass",
    "heads",
    "tokens",
    "µs per token",
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
    """Returns the table cells of a point."""
    planned = gigabytes(row["compiled_bytes"])
    begin = [row["name"], row["what"], row["head_type"], f"{row['length']}"]
    if row["status"] != "ok":
        return [*begin, row["status"], "-", planned, "-"]
    ratio = result["ratios"].get(row["group"], {}).get(row["name"])
    steps = (row["peak_bytes"] or 0) - (row["resting_bytes"] or 0)
    return [
        *begin,
        f"{row['microseconds_per_token']:.1f}{harness.spread(row)}",
        harness.format_ratio(ratio),
        planned,
        gigabytes(steps) if row["peak_of_steps"] else "-",
    ]


def section(mode: str, result: dict[str, Any], has_plot: bool) -> str:
    """Returns the section of a mode for benchmarks/tables.md."""
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
        f"Decoding with {head} keeps {gigabytes(each['state'])} at any length; a key-value cache "
        f"of {each['length']} tokens would have {gigabytes(each['key_value_cache'])} "
        "(both computed from the shapes)."
        for head, each in longest.items()
    ]
    figure_reference = (f"vq {mode}", f"vq_{mode}.png") if has_plot else None
    return harness.format_section(result | {"remarks": lines}, table, figure_reference)


def costs(arguments: Sequence[str]) -> int:
    """Runs the measurements and returns the exit code."""
    options, exit_codes = parse(arguments), []
    lengths = options.lengths
    for mode in options.modes:
        options.lengths = lengths or ([8192, 32768] if mode == "compare" else LENGTHS)
        result = harness.result_header(f"vq_{mode}", "vq.py", arguments, options)
        measure, draw = {"decode": (measure_decoding, draw_decoding)}.get(
            mode, (measure_lengths, draw_lengths)
        )
        result |= measure(mode, options, result["threads"])
        has_plot = mode != "compare" and any(row["seconds"] for row in result["rows"])
        if has_plot:
            draw(result, options.output / "benchmarks" / f"vq_{mode}.png")
        text = section(mode, result, has_plot)
        exit_codes.append(harness.publish(result, text, options.output))
    return max(exit_codes)


# -- plots

COLORS = ("#3b76af", "#4f9d69", "#8a6bb1", "#7a7a7a")
MARKED = {"marker": "o", "markersize": 4.5}


def draw_lengths(result: dict[str, Any], path: Path) -> None:
    """Plots time and planned memory over the length."""
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
    subject = "a training step" if result["what"] == "train" else "the forward pass"
    figure, panels = harness.curves(
        f"Cost of {subject} by length of the text",
        [
            {"x": "tokens", "y": "microseconds per token", "lines": times, "style": MARKED},
            {"x": "tokens", "y": "memory planned by XLA (MB)", "lines": memory, "style": MARKED},
        ],
    )
    for panel in panels:  # mark the lengths that do not fit at the upper edge
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
        note = f"x: needs more than {result['options']['memory_gb']:.0f} GB, not run"
        panels[0].text(
            0.98,
            0.02,
            note,
            ha="right",
            fontsize=8,
            color=plots.TEXT_COLOR,
            transform=panels[0].transAxes,
        )
    plots.save_figure(figure, path)


def draw_decoding(result: dict[str, Any], path: Path) -> None:
    """Plots speed and memory over the number of decoded tokens."""
    from hfseq.reports import plots

    parts = []
    for text, key, scale in (
        ("tokens per second", "tokens_per_second", 1),
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


# -- learning curves of several runs and seeds: vq.py quality


def read_run(folder: Path) -> dict[str, Any]:
    """Reads the learning curve and the bits per byte of a run."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise UsageError(f"{folder} has no metrics.jsonl: pass the --output_dir of a finished run")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    last = {name: value for record in records for name, value in record.items()}
    if "eval_bits_per_byte" not in last:
        raise UsageError(
            f"{folder} has no eval_bits_per_byte: evaluate the run with --bits_per_byte"
        )
    steps = [record for record in records if "train_loss" in record]
    return {
        "steps": [record["step"] for record in steps],
        "train_bits_per_token": [record["train_loss"] / math.log(2) for record in steps],
        "code_perplexity": [record.get("train_code_perplexity") for record in steps],
        "bits_per_byte": last["eval_bits_per_byte"],
    }


def compare_runs(runs: Sequence[tuple[str, Path]]) -> dict[str, Any]:
    """Compares the bits per byte of runs.

    Runs with the same name differ in their seed. The result contains the runs by name, the mean
    over the runs of each name, and the ratio of this mean to the mean of the first name.
    """
    by_name: dict[str, list[dict[str, Any]]] = {}
    for name, folder in runs:
        by_name.setdefault(name, []).append(read_run(folder))
    bits = {name: [run["bits_per_byte"] for run in each] for name, each in by_name.items()}
    means = {name: statistics.mean(values) for name, values in bits.items()}
    ratio = {name: mean / means[runs[0][0]] for name, mean in means.items()}
    return {"runs": by_name, "bits_per_byte": bits, "mean": means, "ratio": ratio}


def draw_runs(result: dict[str, Any], path: Path) -> None:
    """Plots the losses and the code perplexities of all runs."""
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
                "y": "training loss (bits per token)",
                "lines": losses,
                "log": False,
            },
            {"x": "step", "y": "codes in use (perplexity)", "lines": codes, "log": False},
        ],
    )
    panels[1].set_ylim(bottom=0)
    plots.save_figure(figure, path)


def quality(arguments: Sequence[str]) -> int:
    """Runs the subcommand quality and returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Plot the learning curves of VQ and quadratic runs with several seeds. Each "
        "DIR is the --output_dir of a finished run of run_clm_flax.py with --bits_per_byte. Writes "
        "comparison.json (bits per byte of each run, means, and ratios to the first name) and "
        "comparison.png."
    )
    parser.add_argument(
        "runs", nargs="+", metavar="NAME=DIR", help="name in the plot and folder of a run"
    )
    output_help = "folder for comparison.json and comparison.png"
    parser.add_argument("--output_dir", type=Path, required=True, help=output_help)
    options, runs = parser.parse_args(arguments), []
    for run in options.runs:
        name, equals, folder = run.partition("=")
        if not equals:
            raise UsageError(f"invalid run {run!r}: expected NAME=DIR, e.g. full=runs/full-0")
        runs.append((name, Path(folder)))
    result = compare_runs(runs)
    harness.write_json(options.output_dir / "comparison.json", result)
    draw_runs(result, options.output_dir / "comparison.png")
    for name, mean in result["mean"].items():
        values = ", ".join(f"{value:.4f}" for value in result["bits_per_byte"][name])
        print(f"{name}: {mean:.4f} bits per byte, ratio {result['ratio'][name]:.4f} ({values})")
    return 0


if __name__ == "__main__":
    commands = {"": costs, "quality": quality}
    sys.exit(run_command(lambda: harness.dispatch(commands, __doc__, sys.argv[1:])))
