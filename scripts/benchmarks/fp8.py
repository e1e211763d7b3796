r"""Compare FP8 with bfloat16: step time, profiles, CoLA, learning curves, and compiled H200 steps.

    python scripts/benchmarks/fp8.py                          # the table of benchmarks/tables.md
    python scripts/benchmarks/fp8.py --widths 4096 --attention cudnn
    python scripts/benchmarks/fp8.py --models gpt2 --widths 64 --layers 1 --batch_size 2 \
        --length 32 --vocab_size 200 --output try             # small enough for a CPU
    python scripts/benchmarks/fp8.py cola --cola cola/raw --work_dir runs
    python scripts/benchmarks/fp8.py curves roberta --work_dir runs -- scripts/run_mlm_flax.py …
    python scripts/benchmarks/fp8.py h200 --target h200_target.txtpb --packages DIR

The measured step is the complete step of the training loop: loss, gradients and AdamW, with a
donated state. Each precision recipe of a model and width runs in a separate process, and the
processes take turns. Afterwards, each recipe is profiled by itself. The benchmark is meant for GPUs
with FP8 units. Other devices emulate FP8, and the table then says so. MFU is the number of model
FLOPs per second divided by the rate of a large bfloat16 matrix multiplication, so it can exceed
100 % in FP8. The command reports the cases in which FP8 is slower than bfloat16.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import training
from harness import Case, Contestant, Workload

BASELINE = "bfloat16"
FP8 = ("fp8_delayed", "fp8_current")
RECIPES = (BASELINE, *FP8)
# Layers and tokens per step by width. Three such steps fit into the 141 GB of an H200.
LAYERS = {1024: 12, 2048: 8, 4096: 4}
TOKENS = {1024: 16384, 2048: 16384, 4096: 8192}
# Required speedup by width.
AIM = {4096: 1.3}
# Linear layers whose input is constant and needs no gradient. The input of r_proj in the VQ
# Transformer consists of sinusoids.
CONSTANT_INPUT = ("r_proj",)


@functools.cache
def sites(name: str, size: training.Size) -> tuple[str, ...]:
    """Returns the paths of the linear layers that are computed in FP8.

    Projections that are fused into one matrix multiplication count as one layer. In the recipe
    ``fp8_delayed``, each such layer has one input scale. The function searches for these scales.
    """
    from hfseq.nn import trees

    module = training.prepare_sized(name, "fp8_delayed", size).module
    paths = trees.flatten(module.extra_shape_tree["fp8_params"])
    return tuple("/".join(path[:-2]) for path in paths if path[-1] == "input_scale")


def targeted(name: str, size: training.Size) -> int:
    """Returns the number of matrix multiplications of a training step that should be in FP8.

    Each linear layer has three: one in the forward pass, one for the gradient of its kernel, and
    one for the gradient of its input.
    """
    paths = sites(name, size)
    return 3 * len(paths) - sum(path.endswith(CONSTANT_INPUT) for path in paths)


# -- the workloads


def timed(
    model: str,
    recipe: str,
    size: dict[str, int],
    dropout: float,
    attention: str | None,
    profile_steps: int = 0,
) -> Workload:
    """Builds a workload whose step is a training step.

    The ``info`` of the workload includes the number of GPU kernels by kind, and the FLOPs.

    Args:
        model: Model type.
        recipe: Precision recipe.
        size: Fields of :class:`training.Size`.
        dropout: All dropout rates.
        attention: Attention implementation.
        profile_steps: If positive, a step of the workload runs this many training steps under the
            profiler and returns the share of the time spent in each kind of kernel.
    """
    import jax

    from hfseq.training import hardware, state, throughput

    shape = training.Size(**size)
    prepared = training.prepare_sized(
        model,
        recipe,
        shape,
        dropout=dropout,
        batches=training.BATCHES,
        attn_implementation=attention,
    )
    current = jax.jit(prepared.random_state)(jax.random.key(0))
    batches = jax.device_put(prepared.batches)
    if prepared.module.overwrite_with_gradient:  # the loop calibrates before the first step
        calibrate = state.make_step(
            prepared.objective, prepared.module, prepared.optimizer, 0, False, calibrate=True
        )
        current, _ = jax.jit(calibrate, donate_argnums=0)(current, {}, batches[0])
    gpu = jax.default_backend() == "gpu"
    # Without CUDA graphs, the profile contains the name of every kernel.
    options = {"xla_gpu_enable_command_buffer": ""} if profile_steps and gpu else None
    lowered = jax.jit(prepared.step, donate_argnums=0).lower(current, batches[0])
    compiled = lowered.compile(compiler_options=options)
    run = training.step_runner(compiled, current, batches)
    if profile_steps:
        run()
        kinds = training.Program(compiled.as_text()).kinds()
        return Workload(
            lambda: profiled(lambda: [run() for _ in range(profile_steps)], kinds),
            harness.jax_peak_bytes,
        )
    device = jax.devices()[0]
    accelerator, sizes = hardware.find_accelerator(device.device_kind), (shape.rows, shape.length)
    flops = throughput.run_flops(prepared.module, prepared.objective, *sizes)
    info = training.jax_info(prepared.module.params_shape_tree) | {
        "model_flops": flops,
        "flops": flops,
        "fp8_units": gpu and has_units(device),
        "datasheet_flops": None if accelerator is None else accelerator.half_flops,
        "kernels": training.Program(compiled.as_text()).counts(),
        "targeted": targeted(model, shape) if recipe in FP8 else 0,
    }
    return Workload(run, harness.jax_peak_bytes, info)


def has_units(device: Any) -> bool:
    """Returns whether a GPU has FP8 units (NVIDIA, compute capability 8.9 or higher)."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return major.isdigit() and (int(major), int(minor or 0)) >= (8, 9)


# -- profiles. A profile names each GPU kernel after an HLO instruction. training.Program determines
# the kind of each instruction.

UNKNOWN = "unknown"
KINDS = (*training.KERNEL_KINDS, UNKNOWN)
# Kernels of libraries that are not named after an HLO instruction are classified by these patterns.
_BY_NAME = (
    (r"nccl", training.COLLECTIVE),
    (r"memcpy|memset", training.COPY),
    (r"fmha|flash|cudnn.*sdpa", training.ATTENTION),
    (r"(gemm|nvjet|xmma|cutlass).*(e4m3|e5m2|_q[a-z]*q)", training.FP8_PRODUCT),
    (r"gemm|nvjet|xmma|cutlass", training.OTHER_PRODUCT),
)


def kind_of(event: str, instruction: str | None, kinds: Mapping[str, str]) -> str:
    if instruction in kinds:
        return kinds[instruction]
    return next(
        (kernel_kind for pattern, kernel_kind in _BY_NAME if re.search(pattern, event, re.I)),
        UNKNOWN,
    )


def shares(data: Any, kinds: Mapping[str, str]) -> dict[str, float]:
    """Returns the share of the device time spent in each kind of kernel, in the order of ``KINDS``.

    On a GPU, only the lines of the profile that belong to streams count, because the other lines
    are derived from them. On a CPU, HLO instructions are mixed with other events of the host, and
    only instructions that have a kind count. Loops have no kind, because the instructions that they
    contain are counted.
    """
    lines = [(plane.name, line) for plane in data.planes for line in plane.lines]
    streams = [
        line
        for plane, line in lines
        if plane.startswith("/device:GPU") and line.name.startswith("Stream")
    ]
    host = [line for plane, line in lines if plane.startswith("/host:CPU")]
    nanoseconds: dict[str, float] = collections.defaultdict(float)
    for event in itertools.chain.from_iterable(line.events for line in streams or host):
        instruction = dict(event.stats).get("hlo_op")
        if streams or instruction in kinds:
            nanoseconds[kind_of(event.name, instruction, kinds)] += event.duration_ns
    total = sum(nanoseconds.values())
    return {
        kernel_kind: nanoseconds[kernel_kind] / total
        for kernel_kind in KINDS
        if nanoseconds.get(kernel_kind)
    }


def profiled(run: Callable[[], Any], kinds: Mapping[str, str]) -> dict[str, float]:
    """Calls ``run``, which must wait for the device, under the profiler and returns :func:`shares`.

    The function reads the protocol buffer instead of the JSON file, because the latter contains at
    most a million events.

    Raises:
        RuntimeError: The profile is empty.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        kernel_shares = (
            shares(jax.profiler.ProfileData.from_file(str(files[-1])), kinds) if files else {}
        )
    if not kernel_shares:
        raise RuntimeError(
            "the profile contains no kernels: check that no other profiler is attached"
        )
    return kernel_shares


# -- steps: fp8.py


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of the command without a subcommand."""
    parser = harness.make_parser(
        __doc__,
        layers=(int, "number of layers (default: 12, 8, 4 for widths 1024, 2048, 4096)"),
        batch_size=(int, "rows per step (default: 16384 tokens, 8192 for width 4096)"),
        length=(512, "tokens per row"),
        vocab_size=(32768, "vocabulary size"),
        dropout=(0.0, "all dropout rates"),
        rounds=(15, "timed steps per recipe"),
        profile_steps=(5, "steps per profile"),
    )
    parser.add_argument("--models", nargs="+", default=["fp8_encoder", "gpt2"], help="model types")
    parser.add_argument("--widths", nargs="+", type=int, default=list(LAYERS), help="hidden sizes")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        help="recipes to compare; ratios are relative to the first one",
    )
    parser.add_argument("--attention", help="attention implementation, e.g. cudnn")
    options = parser.parse_args(arguments)
    for width in options.widths:
        if width % training.HEAD_DIM and width > training.HEAD_DIM:
            parser.error(
                f"--widths {width} is not a multiple of the head dimension {training.HEAD_DIM}"
            )
    return options


def step_cases(options: argparse.Namespace, profile: bool = False) -> list[Case]:
    """Returns a case for each model and width. With ``profile``, recipes are in separate groups."""
    cases = []
    turns = (
        {"rounds": 1, "warmup": 0}
        if profile
        else {
            "rounds": options.rounds,
            "warmup": 2,
            "settle": 1,
        }
    )
    for model, width in itertools.product(options.models, options.widths):
        rows = options.batch_size or max(1, TOKENS.get(width, 8192) // options.length)
        size = {
            "width": width,
            "layers": options.layers or LAYERS.get(width, 4),
            "rows": rows,
            "length": options.length,
            "vocab_size": options.vocab_size,
        }
        settings = {
            "model": model,
            "size": size,
            "dropout": options.dropout,
            "attention": options.attention,
        } | ({"profile_steps": options.profile_steps} if profile else {})
        name = f"{model}, d = {width}"
        contestants = tuple(
            Contestant(
                recipe,
                f"{name}, {recipe}" if profile else name,
                "fp8:timed",
                settings | {"recipe": recipe},
                harness.HFSEQ,
            )
            for recipe in options.recipes
        )
        amount, first = rows * options.length, options.recipes[0]
        case = Case(name, contestants, amount, dtype=BASELINE, baseline=first, info=size, **turns)
        cases.append(case)
    return cases


def steps(arguments: Sequence[str]) -> int:
    """Measures and profiles the steps of all recipes and returns the exit code."""
    options = parse(arguments)
    result = harness.result_header("fp8", "fp8.py", arguments, options)
    runner = harness.Runner(result["threads"], Path())
    runner.limits = harness.matmul_rates([BASELINE], runner.threads)
    rows = runner.run_suite("fp8", step_cases(options))
    profiles = {
        (case.name, row.name): row.values[-1]
        for case in step_cases(options, profile=True)
        for row in runner.run_case(case)
        if row.status == "ok" and row.values
    }
    for row in rows:
        row["shares"] = profiles.get((row["case"], row["name"]), {})
        flops, datasheet = (row["facts"].get(key) for key in ("flops", "datasheet_flops"))
        if datasheet and row["median_seconds"]:
            row["datasheet_mfu"] = flops / row["median_seconds"] / datasheet
    remark_lines, shares_text = remarks(rows, options.recipes[0]), shares_table(rows)
    device = next((r["facts"]["device"] for r in rows if r["facts"]), "no device")
    result |= {
        "limits": runner.limits,
        "rows": rows,
        "problems": [
            f"{row['name']} ({row['case']}): profile missing"
            for row in rows
            if row["status"] == "ok" and not row["shares"]
        ],
        "rounds": f"{options.rounds} alternating rounds",
        "remarks": [
            *(
                ["Share of the time spent in each kind of kernel:", shares_text]
                if shares_text
                else []
            ),
            *(["\n".join(f"- {line}" for line in remark_lines)] if remark_lines else []),
            f"On {device}: rows of {options.length} tokens, vocabulary size {options.vocab_size}, "
            f"dropout {options.dropout:g}, attention {options.attention or 'xla'}.",
        ],
    }
    columns = (
        harness.CASE,
        ("layers", lambda row: str(row["case_facts"]["layers"])),
        ("tokens per step", lambda row: f"{row['amount']:.0f}"),
        harness.TOKENS,
        harness.TIME,
        (f"against {options.recipes[0]}", harness.RATIO[1]),
        harness.MFU,
        (
            "FP8 products",
            lambda row: (
                f"{products(row)} of {row['facts']['targeted']}"
                if row["facts"]["targeted"]
                else harness.ABSENT
            ),
        ),
        harness.MEMORY,
    )
    return harness.publish(result, harness.section(result, columns), options.output)


def products(row: dict[str, Any]) -> int:
    return row["facts"].get("kernels", {}).get(training.FP8_PRODUCT, 0)


def remarks(rows: Sequence[dict[str, Any]], baseline: str = BASELINE) -> list[str]:
    """Returns sentences about measurements in which FP8 is emulated, slow or not used."""
    lines = []
    ran = [row for row in rows if row["ratio"] and row["name"].startswith("fp8")]
    if any(not row["facts"].get("fp8_units") for row in ran):
        lines.append(
            "This device has no FP8 units and emulates FP8. The ratios do not apply to devices "
            "with FP8 units."
        )
    for row in ran:
        label, units = f"{row['case']}: {row['name']}", row["facts"].get("fp8_units")
        times = f"{row['ratio']:.2f}x the speed of {baseline}"
        aim = AIM.get(row["case_facts"]["width"])
        if row["ratio"] < 1.0:
            lines.append(
                f"{label} is not faster on this device: {times} (± {row['spread'] or 0.0:.0%}). "
                f"Train with --precision {baseline}."
            )
        elif aim and units and row["ratio"] < aim:
            lines.append(f"{label} reaches {times}, less than the required {aim:g}x.")
        if units and not products(row):
            lines.append(f"{label} has no FP8 matrix multiplications in its compiled program.")
    return lines


def shares_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table with the share of the time spent in each kind of GPU kernel.

    The result is an empty string if there are no profiles.
    """
    measured = [row for row in rows if row["shares"]]
    kinds = [
        kernel_kind
        for kernel_kind in KINDS
        if any(kernel_kind in row["shares"] for row in measured)
    ]
    lines = [
        [
            row["case"],
            row["name"],
            *(f"{row['shares'].get(kernel_kind, 0.0):.0%}" for kernel_kind in kinds),
        ]
        for row in measured
    ]
    return harness.markdown(["", "recipe", *kinds], lines) if lines else ""


# -- steps compiled for an absent H200: fp8.py h200


@dataclasses.dataclass
class Counts:
    """Kernel counts of a compiled training step.

    Attributes:
        name: Architecture.
        group: Precision recipe.
        targeted: Number of matrix multiplications that should be in FP8.
        kernels: Number of kernels by kind.
        seconds: Time of compilation.
        status: ``"ok"``, or the error of the compilation.
    """

    name: str
    group: str
    targeted: int
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    status: str = "ok"

    @property
    def found(self) -> int:
        """Number of matrix multiplications in FP8."""
        return self.kernels.get(training.FP8_PRODUCT, 0)


def parse_h200(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of the subcommand h200."""
    parser = training.h200_parser(
        r"""Compile training steps for an absent H200 and check that they use FP8 where intended.

--target is XLA's description of the GPU (GpuTargetConfigProto in text format). It must contain
runtime_version: without it, XLA silently disables FP8. --packages is a folder outside of the
environment with the CUDA compiler for the installed version of jax:

    pip install --no-deps --target DIR jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION \
        nvidia-cuda-nvcc-cu12

The complete training step (loss, gradients, AdamW) of each architecture is compiled in each recipe,
and the matrix multiplications of the compiled program are counted by the dtype of their operands.
Every linear layer that is computed in FP8 has three: one in the forward pass, one for the gradient
of the input, and one for the gradient of the kernel. The exit code is 1 if one of them is not in
FP8. With --models, the results are added to those of an earlier run with the same sizes.""",
        width=256,
        layers=1,
        batch_size=8,
        length=128,
        vocab_size=1024,
    )
    parser.add_argument("--models", nargs="+", help="architectures (default: all)")
    recipes_help = "precision recipes (default: all)"
    parser.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, help=recipes_help
    )
    parser.add_argument(
        "--cublas", action="store_true", help="use cuBLASLt instead of Triton for matmuls"
    )
    parser.add_argument("--dump", type=Path, help="folder for the compiled HLO")
    return parser.parse_args(arguments)


def h200_command(options: argparse.Namespace) -> str:
    """Returns the command that reproduces the whole table."""
    return training.h200_command("fp8.py h200", parse_h200, options)


def count(name: str, recipe: str, options: argparse.Namespace, gpu: Any) -> Counts:
    """Compiles the step of an architecture in a recipe and counts its kernels."""
    size = training.Size(
        options.width, options.layers, options.batch_size, options.length, options.vocab_size
    )
    row, started = Counts(name, recipe, 0), time.perf_counter()
    try:
        row.targeted = targeted(name, size) if recipe in FP8 else 0
        flags = training.NO_DOT_MERGER | (training.CUBLAS if options.cublas else {})
        prepared = training.prepare_sized(name, recipe, size)
        text = training.compile_for(gpu, prepared, flags).as_text()
        if options.dump is not None:
            options.dump.mkdir(parents=True, exist_ok=True)
            (options.dump / f"{name}.{recipe}.hlo").write_text(text)
        row.kernels = training.Program(text).counts()
    except Exception as error:
        row.status = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    row.seconds = round(time.perf_counter() - started, 1)
    harness.log_progress(f"{row}")
    return row


def earlier_rows(result: dict[str, Any], output: Path) -> dict[tuple[str, str], Counts]:
    """Returns the rows of an earlier run with the same sizes, jax version and target."""
    path = output / "benchmarks" / f"{result['benchmark']}.json"
    if not path.exists():
        return {}

    def run_key(run: dict[str, Any]) -> tuple[Any, ...]:
        sizes = {k: v for k, v in run["options"].items() if k not in ("models", "recipes")}
        return sizes, run.get("machine", {}).get("versions", {}).get("jax"), run["target"]

    earlier = json.loads(path.read_text())
    if run_key(earlier) != run_key(result):
        return {}
    names = [field.name for field in dataclasses.fields(Counts)]
    rows = (Counts(**{name: row[name] for name in names}) for row in earlier["rows"])
    return {(row.name, row.group): row for row in rows}


def h200_problems(rows: Sequence[Counts]) -> list[str]:
    """Returns a message for each row in which a targeted multiplication is not in FP8."""
    return [
        f"{row.name} in {row.group}: {row.found} of {row.targeted} targeted matrix multiplications "
        "are in FP8"
        for row in rows
        if row.status == "ok" and row.found != row.targeted
    ]


def h200(arguments: Sequence[str]) -> int:
    """Compiles all steps, writes the table and returns the exit code."""
    options, gpu, result = training.h200_setup("fp8_h200", "fp8.py h200", parse_h200, arguments)
    counts = {
        (name, recipe): count(name, recipe, options, gpu)
        for name in options.models or training.architectures()
        for recipe in options.recipes
    }
    rows = (earlier_rows(result, options.output) | counts).values()
    rows = sorted(rows, key=lambda row: (row.name, RECIPES.index(row.group)))
    result["rows"] = [dataclasses.asdict(row) | {"fp8_products": row.found} for row in rows]
    result["problems"] = h200_problems(rows)
    lines = [
        [row.name, row.group, row.status, *["-"] * 3]
        if row.status != "ok"
        else [
            row.name,
            row.group,
            str(row.targeted),
            str(row.found),
            str(row.kernels.get(training.OTHER_PRODUCT, 0)),
            str(sum(row.kernels.values())),
        ]
        for row in rows
    ]
    columns = ["", "recipe", "targeted", "FP8 products", "other products", "kernels"]
    text = (
        f"{harness.markdown(columns, lines)}\n\nWidth {options.width}, {options.layers} layers, "
        f"{options.batch_size} rows of {options.length}, vocabulary size {options.vocab_size}; "
        f"compiled for {result['target']} without a GPU "
        f"(jax {result['machine']['versions'].get('jax')}), matrix multiplications (products) by "
        f"{'cuBLASLt' if options.cublas else 'Triton (no autotuning)'}, merging of them "
        f"disabled.\n\n`{result['command']}`"
    )
    return harness.publish(result, text, options.output, failed=False)


# -- Transformer Engine's encoder example on CoLA, with its limits: fp8.py cola

_COLA = (
    *("--model_type", "fp8_encoder", "--preset", "te", "--vocabulary", "words"),
    *("--learning_rate", "1e-4", "--lr_scheduler_type", "constant", "--weight_decay", "1e-4"),
)


def _variant(
    flags: str, devices: int, processes: int, *limits: tuple[float, float], epochs: int = 5
) -> tuple[tuple[str, ...], int, int, dict[str, tuple[float, float]]]:
    arguments = (*flags.split(), "--num_train_epochs", str(epochs))
    return arguments, devices, processes, dict(zip(RECIPES, limits, strict=True))


_GATED = (
    "--config_overrides hidden_act=geglu,flatten_length=64 --max_seq_length 64 --mesh "
    "data=4,tensor=2 {}--per_device_train_batch_size 64 --logging_steps 34"
)
_TENSOR = ((0.36, 0.84), (0.362, 0.84), (0.37, 0.83))
# Flags, devices per process, number of processes, and the limits (maximum loss, minimum accuracy)
# of the last training epoch for each recipe. The limits come from Transformer Engine's tests of the
# example (specification, table 3.3). If these tests have no limits for a recipe, the limits of
# bfloat16 are used, relaxed by 0.01.
VARIANTS = {
    "single": _variant(
        "--max_seq_length 32 --per_device_train_batch_size 64 --logging_steps 134",
        1,
        1,
        (0.452, 0.788),
        (0.457, 0.784),
        (0.461, 0.784),
        epochs=3,
    ),
    "dp": _variant(
        "--max_seq_length 32 --mesh data=8 --per_device_train_batch_size 64 --logging_steps 17",
        8,
        1,
        (0.51, 0.75),
        (0.51, 0.75),
        (0.51, 0.749),
    ),
    "tp": _variant(_GATED.format(""), 8, 1, *_TENSOR),
    "tp-sp": _variant(_GATED.format("--sequence_parallel "), 8, 1, *_TENSOR),
    "multiprocess": _variant(
        "--config_overrides flatten_length=64 --max_seq_length 64 --mesh data=2,tensor=2 "
        "--per_device_train_batch_size 128 --logging_steps 34",
        1,
        4,
        (0.43, 0.80),
        (0.43, 0.80),
        (0.432, 0.80),
    ),
}


def cola(arguments: Sequence[str]) -> int:
    """Runs the subcommand cola, which trains the variants in all recipes.

    Returns:
        The exit code, which is 1 if a run does not meet its limits.
    """
    parser = argparse.ArgumentParser(
        description="Train Transformer Engine's encoder example on CoLA in all variants and check "
        "the limits of its tests. Both development files are used for validation, as in GLUE."
    )
    parser.add_argument("--cola", type=Path, required=True, help="directory raw/ of CoLA")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for the runs")
    parser.add_argument(
        "--rows",
        nargs="*",
        default=list(VARIANTS),
        choices=list(VARIANTS),
        help="variants to train (default: all)",
    )
    recipes_help = "precision recipes (default: all)"
    parser.add_argument(
        "--recipes", nargs="*", default=list(RECIPES), choices=RECIPES, help=recipes_help
    )
    output_help = "folder for the results (default: docs/benchmarks)"
    parser.add_argument(
        "--output_dir", type=Path, default=harness.DOCS / "benchmarks", help=output_help
    )
    options = parser.parse_args(arguments)
    path = options.output_dir / "fp8_cola.json"
    # Keep earlier results that are not measured now.
    earlier = json.loads(path.read_text()) if path.exists() else []
    rows = {(row["row"], row["recipe"]): row for row in earlier}
    for variant, recipe in itertools.product(options.rows, options.recipes):
        folder = options.work_dir / f"{variant}-{recipe}"
        if not (folder / "eval_results.json").exists():
            cola_run(variant, recipe, folder, options.cola)
        rows[variant, recipe] = cola_row(variant, recipe, folder)
    results = [rows[key] for key in itertools.product(VARIANTS, RECIPES) if key in rows]
    harness.write_json(path, results)
    lines = [
        [
            result["row"],
            result["recipe"],
            *(
                f"{result[f'train_{name}']:.3f} ({result[f'{name}_limit']:g})"
                for name in ("loss", "accuracy")
            ),
            f"{result['eval_accuracy']:.3f}",
            f"{result['eval_matthews_correlation']:.3f}",
        ]
        for result in results
    ]
    columns = [
        "Variant",
        "Recipe",
        "Loss (upper bound)",
        "Accuracy (lower bound)",
        "Validation accuracy",
        "Matthews correlation",
    ]
    print(harness.markdown(columns, lines))
    return 0 if all(result["within"] for result in results) else 1


def cola_command(variant: str, recipe: str, folder: Path | str, data: Path | str) -> list[str]:
    """Returns the command that trains a variant in a recipe."""
    development = [f"{data}/{name}_dev.tsv" for name in ("in_domain", "out_of_domain")]
    return [
        "scripts/run_classification_flax.py",
        "--output_dir",
        str(folder),
        "--train_file",
        f"{data}/in_domain_train.tsv",
        "--validation_file",
        *development,
        "--precision",
        recipe,
        *_COLA,
        *VARIANTS[variant][0],
    ]


def cola_run(variant: str, recipe: str, folder: Path, data: Path) -> None:
    """Trains with one variant of the parallel setup and one FP8 recipe.

    The variant determines the number of processes.
    """
    from hfseq.cli.launch import free_port

    _, devices, processes, _ = VARIANTS[variant]
    environment = dict(os.environ)
    if environment.get("JAX_PLATFORMS") == "cpu":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    address = f"localhost:{free_port()}"
    command = [sys.executable, *cola_command(variant, recipe, folder.absolute(), data.absolute())]
    shared = ("--coordinator_address", address, "--num_processes", str(processes))
    started = [
        subprocess.Popen(
            command if processes == 1 else [*command, *shared, "--process_id", str(number)],
            cwd=harness.ROOT,
            env=environment,
        )
        for number in range(processes)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"{variant} {recipe}: a process failed")


def cola_row(variant: str, recipe: str, folder: Path) -> dict[str, Any]:
    """Returns the results of a finished run and its limits."""
    train, evaluation = (
        json.loads((folder / f"{part}_results.json").read_text()) for part in ("train", "eval")
    )
    _, devices, processes, limits = VARIANTS[variant]
    loss, accuracy = limits[recipe]
    command = cola_command(variant, recipe, "OUT", "$COLA/raw")
    return {
        "row": variant,
        "recipe": recipe,
        "command": " ".join(command),
        "processes": processes,
        "devices": devices * processes,
        "train_loss": train["train_loss"],
        "loss_limit": loss,
        "train_accuracy": train["train_accuracy"],
        "accuracy_limit": accuracy,
        "eval_accuracy": evaluation["eval_accuracy"],
        "eval_matthews_correlation": evaluation["eval_matthews_correlation"],
        "within": train["train_loss"] <= loss and train["train_accuracy"] >= accuracy,
    }


# -- learning curves of a training script in bfloat16 and in both FP8 recipes: fp8.py curves

RUNS = {
    "bfloat16": ("bfloat16", 42),
    "bfloat16, another seed": ("bfloat16", 43),
    "fp8_delayed": ("fp8_delayed", 42),
    "fp8_current": ("fp8_current", 42),
}
# Width of the moving average of a curve, in steps.
WINDOW = 20


def curves(arguments: Sequence[str]) -> int:
    """Trains all runs, writes and plots their curves, and returns the exit code."""
    import numpy as np

    separator = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description="Train a model in bfloat16 and in both FP8 recipes, and plot the curves. "
        "Pass a training script with its flags after --. The flags --precision, --output_dir, "
        "--seed, --logging_steps and --report_to are added. bfloat16 is trained with two seeds to "
        "show the variation between seeds. Finished runs are reused."
    )
    parser.add_argument("name", help="name of the written files, e.g. roberta")
    parser.add_argument("--work_dir", type=Path, required=True, help="folder for the runs")
    output_help = "folder for the results (default: docs/benchmarks)"
    parser.add_argument(
        "--output_dir", type=Path, default=harness.DOCS / "benchmarks", help=output_help
    )
    options, command = parser.parse_args(arguments[:separator]), list(arguments[separator + 1 :])
    if not command:
        parser.error("pass the training script and its flags after --")
    losses = {}
    for label, (precision, seed) in RUNS.items():
        folder = options.work_dir / f"{precision}-{seed}"
        added_flags = (
            "--precision",
            precision,
            "--seed",
            str(seed),
            "--logging_steps",
            "1",
            "--output_dir",
            str(folder),
            "--report_to",
            "jsonl",
        )
        if not (folder / "train_results.json").exists():
            subprocess.run([sys.executable, *command, *added_flags], check=True)
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[label] = [record["train_loss"] for record in records if "train_loss" in record]
    smooth = {}
    for label, values in losses.items():
        width = min(WINDOW, len(values))
        smooth[label] = np.convolve(values, np.ones(width) / width, mode="valid")
    differences = {
        label: float(abs(curve - smooth["bfloat16"]).mean())
        for label, curve in smooth.items()
        if label != "bfloat16"
    }
    result = {
        "name": options.name,
        "command": shlex.join(command),
        "window": WINDOW,
        "apart": differences,
        "final_loss": {label: float(curve[-1]) for label, curve in smooth.items()},
        "losses": losses,
    }
    path = options.output_dir / f"fp8_curves_{options.name}"
    harness.write_json(path.with_suffix(".json"), result)
    draw_curves(result, smooth, path.with_suffix(".png"))
    for label, distance in differences.items():
        print(f"{options.name}: {label} differs from bfloat16 by {distance:.4f} nats on average")
    return 0


def draw_curves(result: dict[str, Any], smooth: dict[str, Any], path: Path) -> None:
    """Plots the smoothed losses and their differences from bfloat16."""
    from hfseq.reports import plots

    colors = dict(
        zip(RUNS, ("#444444", "#b0b0b0", plots.TRAIN_COLOR, plots.EVAL_COLOR), strict=True)
    )
    plain = smooth["bfloat16"]
    steps = range(result["window"], result["window"] + len(plain))
    upper = {
        f"{label}: {curve[-1]:.3f}": (steps, curve, {"color": colors[label]})
        for label, curve in smooth.items()
    }
    lower = {
        f"_{label}": (steps, curve - plain, {"color": colors[label]})
        for label, curve in smooth.items()
    }
    parts = [
        {"x": "", "y": "training loss (nats)", "lines": upper, "log": False},
        {
            "x": f"step (moving average of {result['window']})",
            "y": "difference from bfloat16",
            "lines": lower,
            "log": False,
        },
    ]
    figure, _ = harness.curves(
        f"{result['name']} in FP8 and bfloat16",
        parts,
        (8, 6),
        (2, 1),
        height_ratios=[3, 2],
        sharex=True,
    )
    plots.save_figure(figure, path)


if __name__ == "__main__":
    commands = {"": steps, "h200": h200, "cola": cola, "curves": curves}
    sys.exit(harness.dispatch(commands, __doc__, sys.argv[1:]))
