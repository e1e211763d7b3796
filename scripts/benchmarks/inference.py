"""Measure the forward pass of an encoder in two precisions, and generation against PyTorch.

    python scripts/run_bert_flax.py --precision bfloat16                # defined here
    python scripts/benchmarks/inference.py generate --model gpt2        # greedy, sampling; 1 and 16
    python scripts/benchmarks/inference.py generate --model t5 --modes beam --beams 4
    python scripts/benchmarks/inference.py generate --model bart --layers 2 --rounds 3

Every prompt is continued by the same number of new tokens, so that hfseq and PyTorch do the same
work. In greedy and beam search, both must return the same tokens; otherwise the command reports the
share of prompts with equal tokens and fails. This module also defines the suites inference and
generation of run.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import harness
import training
from harness import Case, Options, Row, Rows, Suite, Workload

from hfseq.data.arguments import (
    AllowedValues,
    CheckedArguments,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option,
)
from hfseq.errors import CheckpointError, DataError, UsageError
from hfseq.pipelines import encode

if TYPE_CHECKING:
    import numpy as np

# -- an encoder in float32 and bfloat16, alternating in one process: run_bert_flax.py

PRECISIONS = ("float32", "bfloat16")
Precision = Annotated[Literal["float32", "bfloat16"], AllowedValues("one of float32, bfloat16")]
PERCENTILES = (50, 90, 99)
PROGRESS_SECONDS = 10.0  # between lines of progress
Batch = dict[str, "np.ndarray"]


@dataclasses.dataclass
class InferenceArguments(CheckedArguments):
    """Arguments of scripts/run_bert_flax.py."""

    model_name_or_path: str | None = option(
        None,
        "Directory or Hub name of a BERT-like encoder (default: randomly initialized BERT-base).",
    )
    precision: Precision = option(
        "float32", "float32 runs only float32, bfloat16 runs and compares both precisions."
    )
    text: list[str] | None = option(
        None, "Input texts instead of random tokens, repeated to fill the batch."
    )
    text_file: str | None = option(
        None, "File with one input text per line. Blank lines are ignored."
    )
    batch_size: PositiveInt = option(32, "Rows per batch.")
    max_seq_length: PositiveInt = option(
        128, "Tokens per row. Texts are truncated or padded to this length."
    )
    num_warmup: NonNegativeInt = option(5, "Untimed warm-up runs per precision.")
    num_runs: PositiveInt = option(100, "Timed runs per precision. The precisions take turns.")
    time_limit: PositiveFloat = option(
        120.0, "Seconds for warm-up and timed runs. If they take longer, there are fewer runs."
    )
    config_overrides: str | None = option(
        None, "Configuration changes to the default BERT-base, e.g. num_hidden_layers=6."
    )
    seed: int = option(0, "Seed of the random weights and tokens.")
    json: str | None = option(None, "File for the result, or - to print JSON instead of a table.")
    plugin: list[str] = option([], "Plugin files to load, e.g. my_model.py.")
    debug: bool = option(False, "Show tracebacks of errors.")

    def problems(self) -> Iterator[str]:
        """Yields messages about contradictory arguments."""
        if self.text and self.text_file:
            yield "--text and --text_file are mutually exclusive"
        if (self.text or self.text_file) and not self.model_name_or_path:
            yield "--text and --text_file require a tokenizer: also pass --model_name_or_path"
        if self.config_overrides and self.model_name_or_path:
            yield (
                "--config_overrides applies only to the default BERT-base: omit it or "
                "--model_name_or_path"
            )

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions to run."""
        return PRECISIONS if self.precision == "bfloat16" else ("float32",)


def run(arguments: InferenceArguments) -> dict[str, Any]:
    """Measures and compares the precisions, prints a table, and returns the result of ``--json``.

    Parameters and inputs are arguments of the compiled function, so XLA cannot fold them into
    constants. Progress is printed to stderr.
    """
    name = arguments.model_name_or_path or ""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise CheckpointError(
            f"--model_name_or_path {name}: no such directory; pass a directory with config.json "
            "and weights, or a name on the Hub"
        )
    harness.log_progress(announcement(arguments))
    import jax
    import numpy as np

    from hfseq import plugins

    plugins.load(extra=arguments.plugin)
    models, params = load(arguments)
    model = models["float32"]
    batch = make_batch(arguments, model)
    calls = {name: compiled(models[name], params, batch) for name in arguments.precisions}
    outputs = {}
    started = time.perf_counter()
    for name, call in calls.items():
        outputs[name] = np.asarray(call(), np.float32)
    plan = plan_runs(arguments, time.perf_counter() - started)
    seconds = time_runs(calls, plan, arguments.time_limit)
    result = {
        "benchmark": "run_bert_flax",
        "options": dataclasses.asdict(arguments),
        "num_warmup": plan[0],
        "num_runs": len(seconds["float32"]),
        "model": {
            "class": type(model).__name__,
            "layers": model.config.num_hidden_layers,
            "width": model.config.hidden_size,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "weights": "random" if arguments.model_name_or_path is None else "loaded",
        },
        "machine": harness.machine_info(),
        "device": harness.jax_device(),
        "bfloat16_units": device_units(),
        "rows": {name: latency(times, batch) for name, times in seconds.items()},
    }
    if "bfloat16" in calls:
        result["comparison"] = compare(outputs, seconds, batch, result["bfloat16_units"])
    print(json.dumps(result, indent=1) if arguments.json == "-" else "\n".join(lines(result)))
    if arguments.json not in (None, "-"):
        harness.write_json(Path(arguments.json), result)
    return result


def announcement(arguments: InferenceArguments) -> str:
    """Returns a sentence about the runs, which is printed before jax is imported."""
    model = arguments.model_name_or_path or "BERT-base with random weights"
    inputs = "texts" if arguments.text or arguments.text_file else "random tokens"
    return (
        f"{model}, {arguments.batch_size} x {arguments.max_seq_length} tokens ({inputs}): "
        f"{arguments.num_warmup} warm-up and {arguments.num_runs} timed runs in "
        f"{' and '.join(arguments.precisions)}, of at most {arguments.time_limit:g} s in total "
        "(--time_limit). Loading and compiling the model ..."
    )


def plan_runs(arguments: InferenceArguments, seconds: float) -> tuple[int, int]:
    """Returns the numbers of warm-up and timed runs that fit into ``--time_limit``.

    At most a tenth of the runs are warm-up runs if not all requested runs fit. At least one run is
    timed.

    Args:
        arguments: The flags.
        seconds: Duration of a run in each precision.
    """
    from hfseq.cli.text import format_seconds

    requested = arguments.num_warmup + arguments.num_runs
    possible = int(arguments.time_limit / seconds)
    warmup, runs = arguments.num_warmup, arguments.num_runs
    if possible < requested:
        warmup = min(warmup, possible // 10)
        runs = min(runs, max(1, possible - warmup))
    reason = "" if possible >= requested else f", because --time_limit is {arguments.time_limit:g}"
    harness.log_progress(
        f"the first run in {' and '.join(arguments.precisions)} took {format_seconds(seconds)}: "
        f"{warmup} warm-up and {runs} timed runs will take about "
        f"{format_seconds((warmup + runs) * seconds)}{reason}"
    )
    return warmup, runs


def time_runs(
    calls: dict[str, Callable[[], Any]], plan: tuple[int, int], time_limit: float
) -> dict[str, list[float]]:
    """Returns the duration of each timed run in seconds, by precision.

    Every run waits for its result. The precisions take turns in alternating order, so other load on
    the machine affects both equally.

    Args:
        calls: Functions by precision.
        plan: Numbers of warm-up and timed runs.
        time_limit: Seconds after which no further run starts, except the first timed run.
    """
    from hfseq.cli.text import format_seconds

    warmup, runs = plan
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    started = reported = time.perf_counter()
    for number in range(-warmup, runs):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            run_start = time.perf_counter()
            calls[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - run_start)
        now = time.perf_counter()
        if 0 <= number < runs - 1 and now - started > time_limit:
            harness.log_progress(f"stopped after {number + 1} of {runs} runs (--time_limit)")
            break
        if now - reported > PROGRESS_SECONDS and number + 1 < runs:
            remaining = (now - started) / (number + 1 + warmup) * (runs - number - 1)
            harness.log_progress(
                f"{number + 1 + warmup} of {warmup + runs} runs, {format_seconds(remaining)} left"
            )
            reported = now
    return seconds


def load(arguments: InferenceArguments) -> tuple[dict[str, Any], Any]:
    """Returns a model without parameters for each precision, and the parameters that they share."""
    from hfseq import FlaxAutoModel

    name = arguments.model_name_or_path
    if name is None:
        config = bert_base(arguments.config_overrides)
        params = FlaxAutoModel.from_config(config, seed=arguments.seed).params
    else:
        loaded = FlaxAutoModel.from_pretrained(str(Path(name).expanduser()))
        config, params = loaded.config, loaded.params
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"--model_name_or_path {name} is an encoder-decoder ('{config.model_type}'): this "
            "benchmark supports encoders; use scripts/benchmarks/inference.py generate instead"
        )
    models = {
        precision: FlaxAutoModel.from_config(config, _do_init=False, precision=precision)
        for precision in arguments.precisions
    }
    longest = models["float32"].max_length()
    if longest and arguments.max_seq_length > longest:
        raise UsageError(
            f"--max_seq_length {arguments.max_seq_length} exceeds the model's {longest} "
            f"positions: use at most {longest}"
        )
    return models, params


def bert_base(overrides: str | None) -> Any:
    """Returns the configuration of BERT-base with ``--config_overrides`` applied."""
    from transformers import BertConfig

    from hfseq.checkpoints.config import apply_overrides, parse_overrides

    config = BertConfig(hidden_act="gelu_new")
    if overrides:
        apply_overrides(config, parse_overrides(overrides))
    return config


def make_batch(arguments: InferenceArguments, model: Any) -> Batch:
    """Returns ``input_ids`` and ``attention_mask``, ``(batch_size, max_seq_length)``."""
    import numpy as np

    shape = (arguments.batch_size, arguments.max_seq_length)
    texts = read_texts(arguments)
    if texts is None:
        random = np.random.default_rng(arguments.seed)
        ids = random.integers(0, model.config.vocab_size, shape, dtype=np.int32)
        return {"input_ids": ids, "attention_mask": np.ones(shape, np.int32)}
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"--model_name_or_path {arguments.model_name_or_path} has no tokenizer for the "
            f"text ({str(error).splitlines()[0]}): omit the text to use random tokens"
        ) from error
    rows = list(itertools.islice(itertools.cycle(texts), shape[0]))
    batch = encode(tokenizer, rows, truncation=True, max_length=shape[1])
    padding = [(0, 0), (0, shape[1] - batch["input_ids"].shape[1])]
    pads = {"input_ids": tokenizer.pad_token_id or 0}
    return {
        name: np.pad(array, padding, constant_values=pads.get(name, 0))
        for name, array in batch.items()
        if name != "token_type_ids" or model.accepts(name)
    }


def read_texts(arguments: InferenceArguments) -> list[str] | None:
    """Returns the input texts, or ``None`` for random tokens."""
    if arguments.text_file is None:
        return arguments.text
    try:
        lines = Path(arguments.text_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read --text_file {arguments.text_file}: {error}") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise DataError(
            f"--text_file {arguments.text_file} contains no text: at least one line is required"
        )
    return texts


def compiled(model: Any, params: Any, batch: Batch) -> Callable[[], Any]:
    """Returns a function that computes the hidden states, ``(rows, length, width)``, and waits.

    The matrices are cast to the compute dtype once instead of in every run. This does not change
    the results. Norms and biases keep their dtype.
    """
    import jax

    dtype = model.precision.compute_dtype
    params = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)
    inputs = jax.device_put(batch)
    forward = jax.jit(lambda params, inputs: model(**inputs, params=params).last_hidden_state)
    function = forward.lower(params, inputs).compile()
    return lambda: function(params, inputs).block_until_ready()


def latency(seconds: Sequence[float], batch: Batch) -> dict[str, Any]:
    """Returns percentiles in milliseconds, and the throughput at the median."""
    import numpy as np

    rows, length = batch["input_ids"].shape
    cuts = {f"p{p}_ms": 1e3 * float(np.percentile(seconds, p)) for p in PERCENTILES}
    rate = 1e3 / cuts["p50_ms"]
    return cuts | {
        "mean_ms": 1e3 * float(np.mean(seconds)),
        "examples_per_second": rows * rate,
        "tokens_per_second": rows * length * rate,
        "real_tokens_per_second": int(batch["attention_mask"].sum()) * rate,
        "seconds": list(seconds),
    }


def compare(
    outputs: dict[str, np.ndarray],
    seconds: dict[str, list[float]],
    batch: Batch,
    units: Sequence[str],
) -> dict[str, Any]:
    """Compares the outputs of both precisions, and their speed if the device has bfloat16 units.

    Padding is excluded from the comparison of outputs. Relative differences are relative to the
    largest absolute value of the float32 outputs.

    Args:
        outputs: Hidden states by precision.
        seconds: Seconds of all timed runs by precision. The runs of the precisions took turns.
        batch: The inputs.
        units: Names of the bfloat16 units of the device.

    Returns:
        The speedup of bfloat16, absolute and relative differences of the outputs, and their cosine
        similarity. The speedup is the median of the ratios of neighboring float32 and bfloat16
        runs. It is `None` if the device has no bfloat16 units.
    """
    import numpy as np

    real = batch["attention_mask"] > 0
    exact, half = (outputs[name][real].astype(np.float64) for name in PRECISIONS)
    differences = np.abs(exact - half)
    norms = np.linalg.norm(exact, axis=-1) * np.linalg.norm(half, axis=-1)
    cosine = (exact * half).sum(-1) / np.maximum(norms, 1e-30)
    pairs = np.divide(seconds["float32"], seconds["bfloat16"])
    return {
        "speedup": float(np.median(pairs)) if units else None,
        "max_absolute_difference": float(differences.max()),
        "max_relative_difference": float(differences.max())
        / max(float(np.abs(exact).max()), 1e-30),
        "mean_absolute_difference": float(differences.mean()),
        "min_cosine": float(cosine.min()),
        "mean_cosine": float(cosine.mean()),
    }


def device_units() -> list[str]:
    """Returns the names of the bfloat16 units: CPU features, or the accelerator."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return harness.bfloat16_units(harness.read_cpuinfo())
    # NVIDIA's tensor cores support bfloat16 since Ampere (8.0).
    return [device.device_kind] if float(getattr(device, "compute_capability", 8)) >= 8 else []


def lines(result: dict[str, Any]) -> list[str]:
    """Returns the lines of the printed report."""
    model, options, machine = result["model"], result["options"], result["machine"]
    source = "text" if options["text"] or options["text_file"] else "random tokens"
    columns = ["", *(f"p{p} ms" for p in PERCENTILES), "examples/s", "tokens/s"]
    rows = [
        [
            name,
            *(f"{row[f'p{p}_ms']:.1f}" for p in PERCENTILES),
            f"{row['examples_per_second']:.1f}",
            f"{row['tokens_per_second']:.0f}",
        ]
        for name, row in result["rows"].items()
    ]
    text_lines = [
        f"{model['class']}: {model['layers']} layers, width {model['width']}, "
        f"{model['parameters'] / 1e6:.1f} M parameters ({model['weights']})",
        f"{options['batch_size']} x {options['max_seq_length']} tokens ({source}), "
        f"{result['num_runs']} runs after {result['num_warmup']} warm-up runs",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:g}; "
        f"{result['device']}; bfloat16 units: {', '.join(result['bfloat16_units']) or 'none'}",
        "",
        harness.markdown(columns, rows),
    ]
    return text_lines + (["", *verdict(result["comparison"])] if "comparison" in result else [])


def verdict(comparison: dict[str, Any]) -> list[str]:
    """Returns sentences about the speedup of bfloat16 and the differences of its outputs."""
    speedup = comparison["speedup"]
    if speedup is None:
        speed_line = (
            "this processor has no bfloat16 units (avx512_bf16, amx_bf16) and emulates bfloat16. "
            "Its speed is not reported. Use float32 for inference"
        )
    elif speedup >= 1:
        speed_line = f"bfloat16 is {speedup:.2f} times as fast as float32"
    else:
        speed_line = (
            f"bfloat16 is SLOWER on this machine ({speedup:.2f} times as fast as float32): use "
            "float32 for this size"
        )
    return [
        speed_line,
        f"largest difference between the outputs: {comparison['max_absolute_difference']:.3g}, "
        f"{comparison['max_relative_difference']:.2%} of the largest value; "
        f"cosine {comparison['mean_cosine']:.6f} (minimum {comparison['min_cosine']:.6f})",
    ]


# -- generation workloads


def inputs_of(config: Any, rows: int, length: int) -> Batch:
    """Returns random tokens, images or spectrograms, depending on the model."""
    import numpy as np

    random = np.random.default_rng(0)
    if hasattr(config, "image_size"):
        shape = (rows, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": random.normal(size=shape).astype(np.float32)}
    if hasattr(config, "num_mel_bins"):
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": random.normal(size=shape).astype(np.float32)}
    return {"input_ids": random.integers(5, config.vocab_size, (rows, length), dtype=np.int32)}


def torch_inputs(batch: Batch, module: Any) -> dict[str, Any]:
    """Returns the inputs as tensors on the device and in the dtype of a module."""
    import torch

    return {
        name: torch.from_numpy(array).to(
            module.device, torch.long if name == "input_ids" else module.dtype
        )
        for name, array in batch.items()
    }


def generation_options(mode: str, beams: int, new_tokens: int) -> dict[str, Any]:
    """Returns the arguments of ``generate``, with which all outputs have the same length."""
    modes: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
        "beam": {"do_sample": False, "num_beams": beams},
    }
    return modes[mode] | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}


def hfseq_generate(
    model: str,
    mode: str,
    beams: int,
    rows: int,
    length: int,
    new_tokens: int,
    size: dict[str, Any],
    weights: str,
    dtype: str = "float32",
) -> Workload:
    """Generates with hfseq."""
    torch_info = harness.import_torch()
    import jax

    config = training.make_config(model, size)
    module = training.hfseq_class(model).from_pretrained(weights, config=config, dtype=dtype)
    (prompts,) = inputs_of(config, rows, length).values()
    keys = map(jax.random.PRNGKey, itertools.count())
    options = generation_options(mode, beams, new_tokens)

    def run() -> dict[str, Any]:
        sequences = module.generate(prompts, prng_key=next(keys), **options).sequences
        return {"tokens": new_part(sequences, new_tokens)}

    shapes, itemsize = training.jax_shapes(module.params), training.ITEMSIZE[dtype]
    info = training.generation_work(shapes, config, rows, beams, length, new_tokens, itemsize)
    info |= training.jax_info(module.params) | torch_info
    return Workload(run, harness.jax_peak_bytes, info)


def torch_generate(
    model: str,
    mode: str,
    beams: int,
    rows: int,
    length: int,
    new_tokens: int,
    size: dict[str, Any],
    weights: str,
    dtype: str = "float32",
) -> Workload:
    """Generates with Transformers."""
    import torch

    config = training.make_config(model, size)
    module, _ = training.load_torch(model, weights, config, dtype)
    inputs = torch_inputs(inputs_of(config, rows, length), module)
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    options = generation_options(mode, beams, new_tokens)

    @torch.inference_mode()
    def run() -> dict[str, Any]:
        return {"tokens": new_part(module.generate(**inputs, **options).cpu(), new_tokens)}

    shapes, itemsize = training.torch_shapes(module), training.ITEMSIZE[dtype]
    info = training.generation_work(shapes, config, rows, beams, length, new_tokens, itemsize)
    return Workload(run, harness.torch_peak_bytes, info | training.torch_info(module))


def new_part(sequences: Any, new_tokens: int) -> list[int]:
    """Returns the generated tokens of all prompts as one flat list."""
    import numpy as np

    return np.asarray(sequences)[:, -new_tokens:].reshape(-1).tolist()


# -- one model: inference.py generate

GENERATE = {"torch": "inference:torch_generate", "hfseq": "inference:hfseq_generate"}
MODES = ("greedy", "sampling", "beam")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of the subcommand generate."""
    model_names = [
        name for name, subject in training.TRAINING_MODELS.items() if subject.objective != "mlm"
    ]
    model_names += training.GENERATION_MODELS
    parser = harness.make_parser(
        __doc__,
        sizes=True,
        beams=(4, "number of beams in beam search"),
        prompt_length=(64, "tokens per prompt or source"),
        new_tokens=(64, "tokens to generate per prompt"),
        rounds=(7, "timed calls per contestant"),
        least_agreement=(1.0, "minimum share of prompts with equal tokens (greedy, beam search)"),
    )
    parser.add_argument(
        "--model", default="gpt2", choices=model_names, help="model type (default: gpt2)"
    )
    modes_help = "search modes (default: greedy and sampling, or beam for encoder-decoders)"
    parser.add_argument("--modes", nargs="+", choices=MODES, help=modes_help)
    parser.add_argument(
        "--batch_sizes", nargs="+", type=int, default=[1, 16], help="batch sizes (default: 1 16)"
    )
    dtype_help = "dtype of the weights (default: float32)"
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help=dtype_help
    )
    options = parser.parse_args(arguments)
    objective = training.model_spec(options.model).objective
    options.modes = options.modes or {"clm": ["greedy", "sampling"], "seq2seq": ["beam"]}[objective]
    return options


def generate_cases(options: argparse.Namespace) -> list[Case]:
    """Returns a case for each search mode and batch size."""
    shared = {
        "model": options.model,
        "length": options.prompt_length,
        "dtype": options.dtype,
        "new_tokens": options.new_tokens,
        "size": harness.size_from_flags(options),
    }
    return [
        generation_case(shared, mode, options.beams, rows, rounds=options.rounds, warmup=2)
        for mode, rows in itertools.product(options.modes, options.batch_sizes)
    ]


def generation_case(
    settings: dict[str, Any],
    mode: str,
    beams: int,
    rows: int,
    peers: Sequence[str] = ("torch", "hfseq"),
    title: str = "",
    **turns: int,
) -> Case:
    """Returns the case of one search mode and batch size.

    If ``title`` is not empty, the name of the case begins with it.
    """
    search, beams = (f"beam {beams}", beams) if mode == "beam" else (mode, 1)
    name = f"{search}, batch {rows}"
    return harness.comparison_case(
        Options(),
        GENERATE,
        settings | {"mode": mode, "rows": rows, "beams": beams},
        f"{title}, {name}, {settings['dtype']}" if title else name,
        rows * settings["new_tokens"],
        peers,
        **turns,
    )


def agreement(rows: Sequence[Row], new_tokens: int) -> dict[str, float]:
    """Returns the share of prompts with the same tokens as for the first contestant of the group.

    The result maps each group to the mean of this share over the other contestants of the group.
    Groups of the mode "sampling" are left out, because sampled tokens differ.
    """
    import numpy as np

    shares = {}
    for group in dict.fromkeys(row.group for row in rows):
        members = [row.values[0]["tokens"] for row in rows if row.group == group and row.values]
        if len(members) > 1 and not group.startswith("sampling"):
            first_tokens, *other_tokens = np.reshape(members, (len(members), -1, new_tokens))
            shares[group] = float((other_tokens == first_tokens).all(-1).mean())
    return shares


def disagreements(shares: dict[str, float], least: float) -> list[str]:
    """Returns a message for each group in which too few prompts have equal tokens.

    ``least`` is the minimum share.
    """
    return [
        f"{group}: only {share:.0%} of the prompts have the same tokens as with PyTorch"
        for group, share in shares.items()
        if share < least
    ]


def generate(arguments: Sequence[str]) -> int:
    """Runs the subcommand generate and returns the exit code."""
    options = parse(arguments)
    name = f"generate_{options.model}"
    result = harness.result_header(name, "inference.py generate", arguments, options)
    with tempfile.TemporaryDirectory() as folder:
        runner = harness.Runner(result["threads"], Path(folder))
        measured = [(case, runner.run_case(case)) for case in generate_cases(options)]
    shares = agreement([row for _, rows in measured for row in rows], options.new_tokens)
    rows = [
        harness.summarize(row, case, case_rows, {})
        for case, case_rows in measured
        for row in case_rows
    ]
    agreement_text = "; ".join(f"{group}: {share:.0%}" for group, share in shares.items())
    result |= {
        "agreement": shares,
        "rows": rows,
        "problems": [] if options.no_check else disagreements(shares, options.least_agreement),
        "rounds": f"{options.rounds} alternating rounds after two untimed calls (compilation and "
        "warm-up)",
        "remarks": [
            f"{training.model_spec(options.model).title}{harness.size_text(result['options'])}, "
            f"random weights, {options.dtype}, prompts (or sources) of {options.prompt_length} "
            f"tokens, {options.new_tokens} new tokens per prompt. Prompts with the same tokens as "
            f"with PyTorch: {agreement_text or 'not compared'}."
        ],
    }
    return harness.publish(result, harness.section(result, COLUMNS), options.output)


CALL: harness.Column = ("ms per call", harness.milliseconds)
COLUMNS = (
    ("generation", harness.CASE[1]),
    harness.TOKENS,
    CALL,
    harness.RATIO,
    harness.MEMORY,
    harness.TORCH_MEMORY,
)

# -- the suites of run.py


def inference_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite inference."""
    factories = {"torch": "inference:torch_forward", "hfseq": "inference:hfseq_forward"}
    turns = {"rounds": options.choose(5, 30, 5, 1), "warmup": options.choose(1, 5, 1, 1)}
    counts = options.choose((1, 8, 32), (1, 8, 64, 256), (1, 8), (1, 2))
    cases = []
    for model, subject in training.FORWARD_MODELS.items():
        # The number of patches of an image is fixed.
        length = subject.length if model == "vit" else options.choose(*[subject.length] * 3, 12)
        is_encoder = model == "encoder"
        types = options.dtypes_or_default("float32", *["bfloat16"] * is_encoder)
        for dtype, rows in itertools.product(types, counts if is_encoder else counts[1:2]):
            name = training.shape_name(subject.title, rows, length, 0, dtype)
            settings = {
                "model": model,
                "dtype": dtype,
                "rows": rows,
                "length": length,
                "size": options.size(model),
            }
            case = harness.comparison_case(
                options, factories, settings, name, rows * length, **turns
            )
            cases.append(case)
    return cases


def inference_problems(rows: Rows) -> list[str]:
    """Returns a message for each contestant whose result differs from the first of its case."""
    # Maximum relative difference of the means.
    tolerance = {"float32": 1e-4, "bfloat16": 3e-2}
    problems = []
    for row, base in harness.rows_with_baseline(
        [row for row in rows if "mean" in row["facts"]], "facts"
    ):
        value, expected = row["facts"]["mean"], base["facts"]["mean"]
        if not abs(value - expected) <= tolerance[row["dtype"]] * abs(expected):
            problems.append(
                f"{row['case']}: the mean absolute output of {row['name']} is {value:.6g}, but for "
                f"{base['name']} it is {expected:.6g}"
            )
    return problems


def hfseq_forward(
    model: str, dtype: str, rows: int, length: int, size: dict[str, Any], weights: str
) -> Workload:
    """Runs hfseq's jitted model with parameters and inputs as arguments."""
    import jax.numpy as jnp

    config = training.make_config(model, size)
    module = training.hfseq_class(model).from_pretrained(weights, config=config, dtype=dtype)
    params = module.to_bf16(module.params) if dtype == "bfloat16" else module.params
    inputs = inputs_of(config, rows, length)
    if "input_ids" in inputs:
        inputs["attention_mask"] = jnp.ones_like(inputs["input_ids"])
    run = compiled(module, params, inputs)
    shapes = training.jax_shapes(params)
    info = training.jax_info(params)
    info |= training.forward_work(shapes, config, rows, length, training.ITEMSIZE[dtype])
    info["mean"] = float(jnp.abs(run().astype(jnp.float32)).mean())
    return Workload(harness.make_step(run), harness.jax_peak_bytes, info)


def torch_forward(
    model: str,
    dtype: str,
    rows: int,
    length: int,
    size: dict[str, Any],
    weights: str,
    compiled: bool = False,
) -> Workload:
    """Runs the PyTorch model, optionally compiled."""
    import torch

    config = training.make_config(model, size)
    module, _ = training.load_torch(model, weights, config, dtype)
    inputs = torch_inputs(inputs_of(config, rows, length), module)  # a mask would have no effect
    forward = torch.compile(module) if compiled else module

    @torch.inference_mode()
    def run() -> Any:
        hidden = forward(**inputs).last_hidden_state
        harness.torch_synchronize()
        return hidden

    shapes = training.torch_shapes(module)
    info = training.torch_info(module)
    info |= training.forward_work(shapes, config, rows, length, training.ITEMSIZE[dtype])
    info["mean"] = float(run().float().abs().mean())
    return Workload(harness.make_step(run), harness.torch_peak_bytes, info)


def generation_cases(options: Options) -> list[Case]:
    """Returns the cases of the suite generation."""
    new, prompt = options.choose(32, 128, 16, 4), options.choose(64, 128, 32, 6)
    turns = {"rounds": options.choose(3, 7, 3, 1), "warmup": options.choose(2, 2, 1, 1)}
    cases = []
    for model, title, mode, cpu, gpu in (
        ("gpt2", "GPT-2 small", "greedy", (1, 16), (1, 64)),
        ("gpt2", "GPT-2 small", "sampling", (1, 16), (1, 64)),
        ("t5", "T5-small", "beam", (4,), (32,)),
        ("bart", "BART-base", "beam", (4,), (32,)),
        ("whisper", "Whisper tiny", "greedy", (1, 8), (1, 32)),
    ):
        # 30 seconds of speech have about 100 tokens.
        length, count = (1500, 3 * new) if model == "whisper" else (prompt, new)
        counts = options.choose(cpu, gpu, cpu[:1], (2,))
        for dtype, rows in itertools.product(options.dtypes_or_default(), counts):
            settings = {
                "model": model,
                "length": length,
                "new_tokens": count,
                "dtype": dtype,
                "size": options.size(model),
            }
            cases.append(
                generation_case(settings, mode, 4, rows, options.eager_peers, title, **turns)
            )
    return cases


INFERENCE = Suite(
    "Inference",
    "The forward pass of models without a head: BERT-base on 128 random tokens, and models with "
    "two layers (CLIP-text-base on 77 tokens, ViT-base on images of 197 positions, DistilBERT, "
    "OPT-125m and a Llama with the sizes of 1B on 128 tokens). The parameters have the same dtype "
    "as the computation in hfseq and in PyTorch. The mean absolute outputs of all "
    "contestants must agree.",
    inference_cases,
    harness.DEFAULT_COLUMNS,
    "ratio",
    problems=inference_problems,
)
GENERATION = Suite(
    "Generation",
    "`generate` of hfseq and of PyTorch with the same weights and prompts. Every prompt is "
    "continued by the same number of new tokens. The share of the limit refers to the weights and "
    "caches that are read for each token. `inference.py generate` also compares the tokens.",
    generation_cases,
    (
        harness.CASE,
        ("new tokens/s", harness.rate),
        CALL,
        harness.RATIO,
        harness.SHARE,
        harness.MEMORY,
    ),
    "ratio",
)

if __name__ == "__main__":
    sys.exit(harness.dispatch({"generate": generate}, __doc__, sys.argv[1:]))
