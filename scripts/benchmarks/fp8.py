r"""FP8 beside bfloat16: steps and where their time goes, CoLA, curves, steps compiled for an H200.

    python scripts/benchmarks/fp8.py                          # the table of benchmarks/tables.md
    python scripts/benchmarks/fp8.py --widths 4096 --attention cudnn
    python scripts/benchmarks/fp8.py --models gpt2 --widths 64 --layers 1 --batch_size 2 \
        --length 32 --vocab_size 200 --output try             # small enough for a CPU
    python scripts/benchmarks/fp8.py cola --cola cola/raw --work_dir runs
    python scripts/benchmarks/fp8.py curves roberta --work_dir runs -- scripts/run_mlm_flax.py …
    python scripts/benchmarks/fp8.py h200 --target h200_target.txtpb --packages DIR

The step is the training loop's: loss, gradients, AdamW, donated state. The recipes of one model and
width run in processes of their own and step in turn; then each is profiled alone. It is meant for
a GPU with FP8 units; elsewhere the products are emulated, and the table says so. MFU is the share
of a large bfloat16 product's rate that goes into the FLOPs a step needs: an FP8 step may have more
than 100 %. Where FP8 is slower than bfloat16, the command says that it does not pay.
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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import training
from harness import Case, Contestant, Running

BASELINE = "bfloat16"
FP8 = ("fp8_delayed", "fp8_current")
RECIPES = (BASELINE, *FP8)
# Layers and tokens of a step by width: three steps fit into the 141 GB of an H200 together.
LAYERS = {1024: 12, 2048: 8, 4096: 4}
TOKENS = {1024: 16384, 2048: 16384, 4096: 8192}
AIM = {4096: 1.3}
# Linears that read a constant: there is no gradient of their input. The VQ Transformer's sinusoids.
CONSTANT_INPUT = ("r_proj",)


@functools.cache
def sites(name: str, size: training.Size) -> tuple[str, ...]:
    """Return the paths of the Linears with FP8 products; fused projections are one product.

    Each has one scale of its input under ``fp8_delayed``.
    """
    from hfseq.nn import trees

    module = training.prepare_sized(name, "fp8_delayed", size).module
    paths = trees.flatten(module.extra_shape_tree["fp8_params"])
    return tuple("/".join(path[:-2]) for path in paths if path[-1] == "input_scale")


def targeted(name: str, size: training.Size) -> int:
    """Return how many products of a training step should be FP8.

    Three a site: forward, and the gradients of kernel and input.
    """
    paths = sites(name, size)
    return 3 * len(paths) - sum(path.endswith(CONSTANT_INPUT) for path in paths)


# -- what runs in the processes


def timed(
    model: str,
    recipe: str,
    size: dict[str, int],
    dropout: float,
    attention: str | None,
    profile_steps: int = 0,
) -> Running:
    """The training loop's step; facts hold its kernels by kind and what it has to compute.

    With ``profile_steps`` a step is so many under the profiler, and says the share of the time in
    each kind of kernel.
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
    if prepared.module.overwrite_with_gradient:  # as the loop does before the first step
        calibrate = state.make_step(
            prepared.objective, prepared.module, prepared.optimizer, 0, False, calibrate=True
        )
        current, _ = jax.jit(calibrate, donate_argnums=0)(current, {}, batches[0])
    gpu = jax.default_backend() == "gpu"
    # One kernel after the other, so that the profile names each: no CUDA graphs.
    options = {"xla_gpu_enable_command_buffer": ""} if profile_steps and gpu else None
    lowered = jax.jit(prepared.step, donate_argnums=0).lower(current, batches[0])
    compiled = lowered.compile(compiler_options=options)
    run = training.stepping(compiled, current, batches)
    if profile_steps:
        run()
        kinds = training.Program(compiled.as_text()).kinds()
        return Running(
            lambda: profiled(lambda: [run() for _ in range(profile_steps)], kinds),
            harness.jax_peak_bytes,
        )
    device = jax.devices()[0]
    known, rows = hardware.find_accelerator(device.device_kind), (shape.rows, shape.length)
    flops = throughput.run_flops(prepared.module, prepared.objective, *rows)
    facts = training.jax_facts(prepared.module.params_shape_tree) | {
        "model_flops": flops,
        "flops": flops,
        "fp8_units": gpu and has_units(device),
        "datasheet_flops": None if known is None else known.half_flops,
        "kernels": training.Program(compiled.as_text()).counts(),
        "targeted": targeted(model, shape) if recipe in FP8 else 0,
    }
    return Running(run, harness.jax_peak_bytes, facts)


def has_units(device: Any) -> bool:
    """Tell whether a GPU multiplies FP8 in units of its own (NVIDIA, compute capability 8.9 on)."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return major.isdigit() and (int(major), int(minor or 0)) >= (8, 9)


# -- profiles: kernels carry the name of the instruction that they run, and the program its kind

UNKNOWN = "unknown"
KINDS = (*training.KINDS, UNKNOWN)
# Kernels that no instruction names: libraries' own, by what they call themselves.
_BY_NAME = (
    (r"nccl", training.COLLECTIVE),
    (r"memcpy|memset", training.COPY),
    (r"fmha|flash|cudnn.*sdpa", training.ATTENTION),
    (r"(gemm|nvjet|xmma|cutlass).*(e4m3|e5m2|_q[a-z]*q)", training.FP8_PRODUCT),
    (r"gemm|nvjet|xmma|cutlass", training.PRODUCT),
)


def kind_of(event: str, instruction: str | None, kinds: Mapping[str, str]) -> str:
    if instruction in kinds:
        return kinds[instruction]
    return next((kind for text, kind in _BY_NAME if re.search(text, event, re.I)), UNKNOWN)


def shares(data: Any, kinds: Mapping[str, str]) -> dict[str, float]:
    """Return the share of the devices' time in each kind, in the order of ``KINDS``.

    GPUs have a line a stream, and lines derived from them, which would count everything again. On a
    CPU instructions stand among all other events of the host; those that hold others (loops) are
    known by having no kind.
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
    return {kind: nanoseconds[kind] / total for kind in KINDS if nanoseconds.get(kind)}


def profiled(run: Callable[[], Any], kinds: Mapping[str, str]) -> dict[str, float]:
    """Run ``run``, which waits for the device, under the profiler; returns :func:`shares`.

    RuntimeError if the profile is empty. Its JSON ends after a million events: this reads the other
    file.
    """
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        found = shares(jax.profiler.ProfileData.from_file(str(files[-1])), kinds) if files else {}
    if not found:
        raise RuntimeError("the profile has no kernels: is another profiler attached?")
    return found


# -- steps: fp8.py


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = harness.parser(
        __doc__,
        layers=(int, "12, 8, 4 at widths 1024, 2048, 4096"),
        batch_size=(int, "rows; 16384 tokens, 8192 at width 4096"),
        length=(512, "tokens a row"),
        vocab_size=(32768, "size of the vocabulary"),
        dropout=(0.0, "all rates"),
        rounds=(15, "timed steps of each"),
        profile_steps=(5, "steps in a profile"),
    )
    parser.add_argument("--models", nargs="+", default=["fp8_encoder", "gpt2"], help="model types")
    parser.add_argument("--widths", nargs="+", type=int, default=list(LAYERS), help="hidden sizes")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="the first is compared")
    parser.add_argument("--attention", help="implementation of attention, e.g. cudnn")
    options = parser.parse_args(given)
    for width in options.widths:
        if width % training.HEAD and width > training.HEAD:
            parser.error(f"--widths {width} is no multiple of {training.HEAD}, a head's features")
    return options


def step_cases(options: argparse.Namespace, profile: bool = False) -> list[Case]:
    """Return a case for each model and width; to be profiled, each recipe in a group of its own."""
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
        case = Case(name, contestants, amount, dtype=BASELINE, baseline=first, facts=size, **turns)
        cases.append(case)
    return cases


def steps(given: Sequence[str]) -> int:
    options = parse(given)
    result = harness.head("fp8", "fp8.py", given, options)
    runner = harness.Runner(result["threads"], Path())
    runner.limits = harness.matmul_rates([BASELINE], runner.threads)
    rows = runner.suite("fp8", step_cases(options))
    profiles = {
        (case.name, row.name): row.values[-1]
        for case in step_cases(options, profile=True)
        for row in runner.rows(case)
        if row.status == "ok" and row.values
    }
    for row in rows:
        row["shares"] = profiles.get((row["case"], row["name"]), {})
        flops, datasheet = (row["facts"].get(key) for key in ("flops", "datasheet_flops"))
        if datasheet and row["median_seconds"]:
            row["datasheet_mfu"] = flops / row["median_seconds"] / datasheet
    said, shown = remarks(rows, options.recipes[0]), shares_table(rows)
    device = next((r["facts"]["device"] for r in rows if r["facts"]), "no device")
    result |= {
        "limits": runner.limits,
        "rows": rows,
        "problems": [
            f"{row['name']} ({row['case']}): no profile"
            for row in rows
            if row["status"] == "ok" and not row["shares"]
        ],
        "rounds": f"{options.rounds} alternating rounds",
        "remarks": [
            *(["Share of the time in each kind of kernel:", shown] if shown else []),
            *(["\n".join(f"- {line}" for line in said)] if said else []),
            f"On {device}: rows of {options.length} tokens, vocabulary {options.vocab_size}, "
            f"dropout {options.dropout:g}, attention {options.attention or 'xla'}.",
        ],
    }
    columns = (
        harness.CASE,
        ("layers", lambda row: str(row["case_facts"]["layers"])),
        ("tokens a step", lambda row: f"{row['amount']:.0f}"),
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
    told = []
    ran = [row for row in rows if row["ratio"] and row["name"].startswith("fp8")]
    if any(not row["facts"].get("fp8_units") for row in ran):
        told.append(
            "This device has no FP8 units: the products are emulated, and the ratios say nothing "
            "about FP8 on one that has them."
        )
    for row in ran:
        who, units = f"{row['case']}: {row['name']}", row["facts"].get("fp8_units")
        times, aim = f"{row['ratio']:.2f}x of {baseline}", AIM.get(row["case_facts"]["width"])
        if row["ratio"] < 1.0:
            told.append(
                f"{who} does not pay here, {times} (± {row['spread'] or 0.0:.0%}): train with "
                f"--precision {baseline}."
            )
        elif aim and units and row["ratio"] < aim:
            told.append(f"{who} pays, {times}, but misses the aim of {aim:g}x.")
        if units and not products(row):
            told.append(f"{who} has no FP8 product in its program.")
    return told


def shares_table(rows: Sequence[dict[str, Any]]) -> str:
    measured = [row for row in rows if row["shares"]]
    kinds = [kind for kind in KINDS if any(kind in row["shares"] for row in measured)]
    lines = [
        [row["case"], row["name"], *(f"{row['shares'].get(kind, 0.0):.0%}" for kind in kinds)]
        for row in measured
    ]
    return harness.markdown(["", "recipe", *kinds], lines) if lines else ""


# -- compiled for an H200 without one: fp8.py h200


@dataclasses.dataclass
class Counts:
    """What was found in the compiled step of an architecture (``name``) in a recipe (``group``)."""

    name: str
    group: str
    targeted: int
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    status: str = "ok"

    @property
    def found(self) -> int:
        return self.kernels.get(training.FP8_PRODUCT, 0)


def parse_h200(given: Sequence[str]) -> argparse.Namespace:
    parser = training.h200_parser(
        r"""Training steps compiled for an H200 without one: is every product FP8 that should be?

--target is XLA's description of the GPU (GpuTargetConfigProto as text; its runtime_version must be
there, or XLA leaves FP8 out without a word). --packages is a folder beside the environment with
what compiles for CUDA, for the version of jax that is installed:

    pip install --no-deps --target DIR jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION \
        nvidia-cuda-nvcc-cu12

Each architecture's full step (loss, gradients, AdamW) is compiled in each recipe, and the matrix
products of the result are counted by the type of their operands. A Linear at FP8's sites has three:
forward, gradient of the input, gradient of the kernel. Exit code 1 if one of them is not FP8.
--models adds to the table of an earlier run at the same sizes.""",
        width=256,
        layers=1,
        batch_size=8,
        length=128,
        vocab_size=1024,
    )
    parser.add_argument("--models", nargs="+", help="architectures; all by default")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--cublas", action="store_true", help="products by cuBLASLt, not Triton")
    parser.add_argument("--dump", type=Path, help="folder that gets the compiled HLO")
    return parser.parse_args(given)


def h200_command(options: argparse.Namespace) -> str:
    return training.h200_command("fp8.py h200", parse_h200, options)


def count(name: str, recipe: str, options: argparse.Namespace, gpu: Any) -> Counts:
    size = training.Size(
        options.width, options.layers, options.batch_size, options.length, options.vocab_size
    )
    row, started = Counts(name, recipe, 0), time.perf_counter()
    try:
        row.targeted = targeted(name, size) if recipe in FP8 else 0
        flags = training.SEPARATE | (training.CUBLAS if options.cublas else {})
        prepared = training.prepare_sized(name, recipe, size)
        text = training.compile_for(gpu, prepared, flags).as_text()
        if options.dump is not None:
            options.dump.mkdir(parents=True, exist_ok=True)
            (options.dump / f"{name}.{recipe}.hlo").write_text(text)
        row.kernels = training.Program(text).counts()
    except Exception as error:
        row.status = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    row.seconds = round(time.perf_counter() - started, 1)
    harness.tell(f"{row}")
    return row


def kept(result: dict[str, Any], output: Path) -> dict[tuple[str, str], Counts]:
    """Return the rows of an earlier run at the same sizes, which this one adds to."""
    path = output / "benchmarks" / f"{result['benchmark']}.json"
    if not path.exists():
        return {}

    def told(run: dict[str, Any]) -> tuple[Any, ...]:
        sizes = {k: v for k, v in run["options"].items() if k not in ("models", "recipes")}
        return sizes, run.get("machine", {}).get("versions", {}).get("jax"), run["target"]

    earlier = json.loads(path.read_text())
    if told(earlier) != told(result):
        return {}
    names = [field.name for field in dataclasses.fields(Counts)]
    rows = (Counts(**{name: row[name] for name in names}) for row in earlier["rows"])
    return {(row.name, row.group): row for row in rows}


def h200_problems(rows: Sequence[Counts]) -> list[str]:
    return [
        f"{row.name} in {row.group}: {row.found} of {row.targeted} targeted products are FP8"
        for row in rows
        if row.status == "ok" and row.found != row.targeted
    ]


def h200(given: Sequence[str]) -> int:
    options, gpu, result = training.h200_begin("fp8_h200", "fp8.py h200", parse_h200, given)
    made = {
        (name, recipe): count(name, recipe, options, gpu)
        for name in options.models or training.architectures()
        for recipe in options.recipes
    }
    rows = (kept(result, options.output) | made).values()
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
            str(row.kernels.get(training.PRODUCT, 0)),
            str(sum(row.kernels.values())),
        ]
        for row in rows
    ]
    columns = ["", "recipe", "targeted", "FP8 products", "other products", "kernels"]
    text = (
        f"{harness.markdown(columns, lines)}\n\nWidth {options.width}, {options.layers} layers, "
        f"{options.batch_size} rows of {options.length}, vocabulary {options.vocab_size}; compiled "
        f"for {result['target']} without a GPU (jax {result['machine']['versions'].get('jax')}), "
        f"products by {'cuBLASLt' if options.cublas else 'Triton (no autotuning)'}, none merged "
        f"with another.\n\n`{result['command']}`"
    )
    return harness.publish(result, text, options.output, failed=False)


# -- Transformer Engine's encoder example on CoLA, in its four ways, against its limits: fp8.py cola

_COLA = (
    *("--model_type", "fp8_encoder", "--preset", "te", "--vocabulary", "words"),
    *("--learning_rate", "1e-4", "--lr_scheduler_type", "constant", "--weight_decay", "1e-4"),
)


def _way(
    flags: str, devices: int, processes: int, *limits: tuple[float, float], epochs: int = 5
) -> tuple[tuple[str, ...], int, int, dict[str, tuple[float, float]]]:
    words = (*flags.split(), "--num_train_epochs", str(epochs))
    return words, devices, processes, dict(zip(RECIPES, limits, strict=True))


_GATED = (
    "--config_overrides hidden_act=geglu,flatten_length=64 --max_seq_length 64 --mesh "
    "data=4,tensor=2 {}--per_device_train_batch_size 64 --logging_steps 34"
)
_TENSOR = ((0.36, 0.84), (0.362, 0.84), (0.37, 0.83))
# Flags, devices of a process, processes, and (loss at most, accuracy at least) by recipe: what the
# example's own tests assert of the last training epoch (specification, table 3.3; where it has none
# for a recipe, that of bfloat16 plus 0.01).
WAYS = {
    "single": _way(
        "--max_seq_length 32 --per_device_train_batch_size 64 --logging_steps 134",
        1,
        1,
        (0.452, 0.788),
        (0.457, 0.784),
        (0.461, 0.784),
        epochs=3,
    ),
    "dp": _way(
        "--max_seq_length 32 --mesh data=8 --per_device_train_batch_size 64 --logging_steps 17",
        8,
        1,
        (0.51, 0.75),
        (0.51, 0.75),
        (0.51, 0.749),
    ),
    "tp": _way(_GATED.format(""), 8, 1, *_TENSOR),
    "tp-sp": _way(_GATED.format("--sequence_parallel "), 8, 1, *_TENSOR),
    "multiprocess": _way(
        "--config_overrides flatten_length=64 --max_seq_length 64 --mesh data=2,tensor=2 "
        "--per_device_train_batch_size 128 --logging_steps 34",
        1,
        4,
        (0.43, 0.80),
        (0.43, 0.80),
        (0.432, 0.80),
    ),
}


def cola(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Train Transformer Engine's encoder example on CoLA in its four ways, against "
        "its limits. Validation is on both development files together, as in GLUE."
    )
    parser.add_argument("--cola", type=Path, required=True, help="the folder raw/ of CoLA")
    parser.add_argument("--work_dir", type=Path, required=True, help="where the runs go")
    parser.add_argument("--rows", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--output_dir", type=Path, default=harness.DOCS / "benchmarks")
    options = parser.parse_args(given)
    path = options.output_dir / "fp8_cola.json"
    # What was measured before and is not run now stays.
    known = json.loads(path.read_text()) if path.exists() else []
    rows = {(row["row"], row["recipe"]): row for row in known}
    for way, recipe in itertools.product(options.rows, options.recipes):
        folder = options.work_dir / f"{way}-{recipe}"
        if not (folder / "eval_results.json").exists():
            cola_run(way, recipe, folder, options.cola)
        rows[way, recipe] = cola_row(way, recipe, folder)
    results = [rows[key] for key in itertools.product(WAYS, RECIPES) if key in rows]
    harness.write_json(path, results)
    lines = [
        [
            one["row"],
            one["recipe"],
            *(
                f"{one[f'train_{name}']:.3f} ({one[f'{name}_limit']:g})"
                for name in ("loss", "accuracy")
            ),
            f"{one['eval_accuracy']:.3f}",
            f"{one['eval_matthews_correlation']:.3f}",
        ]
        for one in results
    ]
    columns = [
        "Way",
        "Recipe",
        "Loss (at most)",
        "Accuracy (at least)",
        "Validation accuracy",
        "Matthews",
    ]
    print(harness.markdown(columns, lines))
    return 0 if all(result["within"] for result in results) else 1


def cola_command(way: str, recipe: str, folder: Path | str, data: Path | str) -> list[str]:
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
        *WAYS[way][0],
    ]


def cola_run(way: str, recipe: str, folder: Path, data: Path) -> None:
    """Run one command, in as many processes as its way has; runs that are there are kept."""
    _, devices, processes, _ = WAYS[way]
    where = dict(os.environ)
    if where.get("JAX_PLATFORMS") == "cpu":
        where["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    with socket.socket() as server:  # a port that nobody listens on
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, *cola_command(way, recipe, folder.absolute(), data.absolute())]
    shared = ("--coordinator_address", address, "--num_processes", str(processes))
    started = [
        subprocess.Popen(
            command if processes == 1 else [*command, *shared, "--process_id", str(number)],
            cwd=harness.ROOT,
            env=where,
        )
        for number in range(processes)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"{way} {recipe}: a process failed")


def cola_row(way: str, recipe: str, folder: Path) -> dict[str, Any]:
    train, evaluation = (
        json.loads((folder / f"{part}_results.json").read_text()) for part in ("train", "eval")
    )
    _, devices, processes, limits = WAYS[way]
    loss, accuracy = limits[recipe]
    command = cola_command(way, recipe, "OUT", "$COLA/raw")
    return {
        "row": way,
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


# -- curves of a training script in bfloat16 and in both recipes: fp8.py curves

RUNS = {
    "bfloat16": ("bfloat16", 42),
    "bfloat16, another seed": ("bfloat16", 43),
    "fp8_delayed": ("fp8_delayed", 42),
    "fp8_current": ("fp8_current", 42),
}
# Steps over which a curve is averaged before it is compared.
WINDOW = 20


def curves(given: Sequence[str]) -> int:
    import numpy as np

    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        description="Train the same model in bfloat16 and in both FP8 recipes, and lay the curves "
        "over each other. What follows -- is a training script with its flags; --precision, "
        "--output_dir, --seed and --logging_steps are added. bfloat16 is trained with two seeds: "
        "what lies between them is chance. Runs that are finished are not run again."
    )
    parser.add_argument("name", help="of the files, e.g. roberta")
    parser.add_argument("--work_dir", type=Path, required=True, help="where the runs go")
    parser.add_argument("--output_dir", type=Path, default=harness.DOCS / "benchmarks")
    options, command = parser.parse_args(given[:cut]), list(given[cut + 1 :])
    if not command:
        parser.error("give the training script and its flags after --")
    losses = {}
    for label, (precision, seed) in RUNS.items():
        folder = options.work_dir / f"{precision}-{seed}"
        more = (
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
            subprocess.run([sys.executable, *command, *more], check=True)
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[label] = [record["train_loss"] for record in records if "train_loss" in record]
    smooth = {}
    for label, values in losses.items():
        width = min(WINDOW, len(values))
        smooth[label] = np.convolve(values, np.ones(width) / width, mode="valid")
    apart = {
        label: float(abs(curve - smooth["bfloat16"]).mean())
        for label, curve in smooth.items()
        if label != "bfloat16"
    }
    result = {
        "name": options.name,
        "command": shlex.join(command),
        "window": WINDOW,
        "apart": apart,
        "final_loss": {label: float(curve[-1]) for label, curve in smooth.items()},
        "losses": losses,
    }
    path = options.output_dir / f"fp8_curves_{options.name}"
    harness.write_json(path.with_suffix(".json"), result)
    draw_curves(result, smooth, path.with_suffix(".png"))
    for label, distance in apart.items():
        print(f"{options.name}: {label} is {distance:.4f} nats from bfloat16 on average")
    return 0


def draw_curves(result: dict[str, Any], smooth: dict[str, Any], path: Path) -> None:
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
            "x": f"step (means of {result['window']})",
            "y": "minus bfloat16",
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
