"""The forward pass of an encoder in two precisions, and generation beside PyTorch's.

    python scripts/run_bert_flax.py --precision bfloat16                # its flags are here
    python scripts/benchmarks/inference.py generate --model gpt2        # greedy, sampling; 1 and 16
    python scripts/benchmarks/inference.py generate --model t5 --modes beam --beams 4
    python scripts/benchmarks/inference.py generate --model bart --layers 2 --rounds 3

When generating, every row gets the same number of new tokens, so both sides do the same work.
Greedy and beam search must give the same tokens on both sides, or the command says where they part
and fails. The suites inference and generation of run.py are here too.
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
from harness import Case, Options, Row, Rows, Running, Suite

from hfseq.data.arguments import (
    AllowedValues,
    CheckedArguments,
    NonNegativeInt,
    PositiveInt,
    option,
)
from hfseq.errors import CheckpointError, DataError, UsageError
from hfseq.pipelines import encode

if TYPE_CHECKING:
    import numpy as np

# -- an encoder in float32 and bfloat16, side by side in one process: run_bert_flax.py

PRECISIONS = ("float32", "bfloat16")
Precision = Annotated[Literal["float32", "bfloat16"], AllowedValues("one of float32, bfloat16")]
PERCENTILES = (50, 90, 99)
Batch = dict[str, "np.ndarray"]


@dataclasses.dataclass
class InferenceArguments(CheckedArguments):
    """What runs, on what, how often. The defaults are those of the old script."""

    model_name_or_path: str | None = option(
        None,
        "Directory or Hub name of a BERT-like encoder; BERT-base, randomly initialised, if none.",
    )
    precision: Precision = option(
        "bfloat16", "bfloat16 runs both precisions and compares them, float32 that one alone."
    )
    text: list[str] | None = option(
        None, "Texts to run instead of random tokens, repeated to fill the batch."
    )
    text_file: str | None = option(None, "The same, a text a line; blank lines are left out.")
    batch_size: PositiveInt = option(32, "Rows a run.")
    max_seq_length: PositiveInt = option(128, "Tokens a row; texts are cut or padded to it.")
    num_warmup: NonNegativeInt = option(5, "Untimed runs before, of each precision.")
    num_runs: PositiveInt = option(100, "Timed runs of each precision, which take turns.")
    config_overrides: str | None = option(
        None, "Without a model: changes to BERT-base, e.g. num_hidden_layers=6."
    )
    seed: int = option(0, "Seed of random weights and tokens.")
    json: str | None = option(
        None, "Write the result to this file; - prints it instead of a table."
    )
    plugin: list[str] = option([], "Plugin files to load, e.g. my_model.py.")
    debug: bool = option(False, "Show tracebacks of errors.")

    def problems(self) -> Iterator[str]:
        if self.text and self.text_file:
            yield "--text and --text_file exclude each other: give one of them"
        if (self.text or self.text_file) and not self.model_name_or_path:
            yield "text needs a tokenizer: give --model_name_or_path too"
        if self.config_overrides and self.model_name_or_path:
            builtin = "--config_overrides is for the built-in BERT-base"
            yield f"{builtin}: drop it, or --model_name_or_path"

    @property
    def precisions(self) -> tuple[str, ...]:
        return PRECISIONS if self.precision == "bfloat16" else ("float32",)


def run(arguments: InferenceArguments) -> dict[str, Any]:
    """Load, measure, compare and report; returns the result that ``--json`` writes.

    The compiled function takes parameters and inputs as arguments, so XLA can fold nothing into
    constants, and every run is waited for. Runs of the precisions take turns, each order as often
    as the other: what disturbs the machine disturbs both.
    """
    import jax
    import numpy as np

    from hfseq import plugins

    plugins.load(extra=arguments.plugin)
    models, params = load(arguments)
    model = models["float32"]
    batch = make_batch(arguments, model)
    calls = {name: compiled(models[name], params, batch) for name in arguments.precisions}
    outputs = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-arguments.num_warmup, arguments.num_runs):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            calls[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    result = {
        "benchmark": "run_bert_flax",
        "options": dataclasses.asdict(arguments),
        "model": {
            "class": type(model).__name__,
            "layers": model.config.num_hidden_layers,
            "width": model.config.hidden_size,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "weights": "random" if arguments.model_name_or_path is None else "loaded",
        },
        "machine": harness.machine_facts(),
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


def load(arguments: InferenceArguments) -> tuple[dict[str, Any], Any]:
    """Return a model of each precision, without parameters of its own, and the parameters."""
    from hfseq import FlaxAutoModel

    name = arguments.model_name_or_path
    if name is None:
        config = bert_base(arguments.config_overrides)
        params = FlaxAutoModel.from_config(config, seed=arguments.seed).params
    else:
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise CheckpointError(
                f"--model_name_or_path {name}: there is no such directory; give one that holds "
                "config.json and weights, or a name on the Hub"
            )
        loaded = FlaxAutoModel.from_pretrained(str(Path(name).expanduser()))
        config, params = loaded.config, loaded.params
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"--model_name_or_path {name} is an encoder-decoder ('{config.model_type}'): this "
            "benchmark runs encoders; scripts/benchmarks/inference.py generate measures generation"
        )
    models = {
        precision: FlaxAutoModel.from_config(config, _do_init=False, precision=precision)
        for precision in arguments.precisions
    }
    longest = models["float32"].max_length()
    if longest and arguments.max_seq_length > longest:
        raise UsageError(
            f"--max_seq_length {arguments.max_seq_length} is longer than the positions of the "
            f"model ({longest}): give at most {longest}"
        )
    return models, params


def bert_base(overrides: str | None) -> Any:
    from transformers import BertConfig

    from hfseq.checkpoints.config import apply_overrides, parse_overrides

    config = BertConfig(hidden_act="gelu_new")
    if overrides:
        apply_overrides(config, parse_overrides(overrides))
    return config


def make_batch(arguments: InferenceArguments, model: Any) -> Batch:
    """Return ``input_ids`` and ``attention_mask``, (batch_size, max_seq_length)."""
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
            f"--model_name_or_path {arguments.model_name_or_path} has no tokenizer, which text "
            f"needs ({str(error).splitlines()[0]}): leave the text out to run random tokens"
        ) from error
    filled = list(itertools.islice(itertools.cycle(texts), shape[0]))
    batch = encode(tokenizer, filled, truncation=True, max_length=shape[1])
    missing = [(0, 0), (0, shape[1] - batch["input_ids"].shape[1])]
    pads = {"input_ids": tokenizer.pad_token_id or 0}
    return {
        name: np.pad(array, missing, constant_values=pads.get(name, 0))
        for name, array in batch.items()
        if name != "token_type_ids" or model.accepts(name)
    }


def read_texts(arguments: InferenceArguments) -> list[str] | None:
    if arguments.text_file is None:
        return arguments.text
    try:
        lines = Path(arguments.text_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read --text_file {arguments.text_file}: {error}") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise DataError(f"--text_file {arguments.text_file} holds no text: give a line or more")
    return texts


def compiled(model: Any, params: Any, batch: Batch) -> Callable[[], Any]:
    """Return a run of the model that waits for its result: hidden states (rows, length, width).

    Matrices are cast once, not at every run: the results are the same, since a half precision casts
    them anyway. Norms and biases stay as they are.
    """
    import jax

    dtype = model.precision.compute_dtype
    params = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)
    inputs = jax.device_put(batch)
    forward = jax.jit(lambda params, inputs: model(**inputs, params=params).last_hidden_state)
    function = forward.lower(params, inputs).compile()
    return lambda: function(params, inputs).block_until_ready()


def latency(seconds: Sequence[float], batch: Batch) -> dict[str, Any]:
    """Return percentiles in milliseconds, and the throughput that the median makes."""
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
    """Compare bfloat16 with float32: speed (where there are units for it) and outputs.

    The ratio is the median over pairs of neighbouring runs. Outputs are compared at tokens that are
    not padding; the relative difference is to the largest value.
    """
    import numpy as np

    real = batch["attention_mask"] > 0
    exact, half = (outputs[name][real].astype(np.float64) for name in PRECISIONS)
    apart = np.abs(exact - half)
    norms = np.linalg.norm(exact, axis=-1) * np.linalg.norm(half, axis=-1)
    cosine = (exact * half).sum(-1) / np.maximum(norms, 1e-30)
    pairs = np.divide(seconds["float32"], seconds["bfloat16"])
    return {
        "speedup": float(np.median(pairs)) if units else None,
        "max_absolute_difference": float(apart.max()),
        "max_relative_difference": float(apart.max()) / max(float(np.abs(exact).max()), 1e-30),
        "mean_absolute_difference": float(apart.mean()),
        "min_cosine": float(cosine.min()),
        "mean_cosine": float(cosine.mean()),
    }


def device_units() -> list[str]:
    """Return what multiplies bfloat16 here: units of the CPU, or the accelerator itself."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return harness.bfloat16_units(harness.read_cpuinfo())
    # NVIDIA's tensor cores know bfloat16 from Ampere (8.0) on.
    return [device.device_kind] if float(getattr(device, "compute_capability", 8)) >= 8 else []


def lines(result: dict[str, Any]) -> list[str]:
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
    told = [
        f"{model['class']}: {model['layers']} layers, width {model['width']}, "
        f"{model['parameters'] / 1e6:.1f} M parameters ({model['weights']})",
        f"{options['batch_size']} x {options['max_seq_length']} tokens ({source}), "
        f"{options['num_runs']} runs after {options['num_warmup']} untimed ones",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:g}; "
        f"{result['device']}; bfloat16 units: {', '.join(result['bfloat16_units']) or 'none'}",
        "",
        harness.markdown(columns, rows),
    ]
    return told + (["", *verdict(result["comparison"])] if "comparison" in result else [])


def verdict(found: dict[str, Any]) -> list[str]:
    """Say how much faster bfloat16 is, or why nothing is said, and how far its outputs are off."""
    speedup = found["speedup"]
    if speedup is None:
        said = (
            "this processor has no bfloat16 units (avx512_bf16, amx_bf16): bfloat16 is emulated "
            "here, so no speed is claimed for it; use float32 for inference"
        )
    elif speedup >= 1:
        said = f"bfloat16 is {speedup:.2f} times as fast as float32"
    else:
        said = (
            f"bfloat16 is SLOWER here ({speedup:.2f} times as fast as float32): use float32 for "
            "this size"
        )
    return [
        said,
        f"largest difference of the outputs: {found['max_absolute_difference']:.3g}, "
        f"{found['max_relative_difference']:.2%} of the largest value; "
        f"cosine {found['mean_cosine']:.6f} (least {found['min_cosine']:.6f})",
    ]


# -- generation in the processes of both sides


def inputs_of(config: Any, rows: int, length: int) -> Batch:
    """Return random tokens, or pictures or spectrograms where the model reads them."""
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
    import torch

    return {
        name: torch.from_numpy(array).to(
            module.device, torch.long if name == "input_ids" else module.dtype
        )
        for name, array in batch.items()
    }


def generation_options(mode: str, beams: int, new_tokens: int) -> dict[str, Any]:
    """Return the options of ``generate`` that both sides get: as many new tokens in every row."""
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
) -> Running:
    taken = harness.import_torch()
    import jax

    config = training.configuration(model, size)
    module = training.hfseq_class(model).from_pretrained(weights, config=config, dtype=dtype)
    (given,) = inputs_of(config, rows, length).values()
    keys = map(jax.random.PRNGKey, itertools.count())
    options = generation_options(mode, beams, new_tokens)

    def run() -> dict[str, Any]:
        sequences = module.generate(given, prng_key=next(keys), **options).sequences
        return {"tokens": new_part(sequences, new_tokens)}

    shapes, itemsize = training.jax_shapes(module.params), training.ITEMSIZE[dtype]
    facts = training.generation_work(shapes, config, rows, beams, length, new_tokens, itemsize)
    facts |= training.jax_facts(module.params) | taken
    return Running(run, harness.jax_peak_bytes, facts)


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
) -> Running:
    import torch

    config = training.configuration(model, size)
    module, _ = training.load_torch(model, weights, config, dtype)
    given = torch_inputs(inputs_of(config, rows, length), module)
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    options = generation_options(mode, beams, new_tokens)

    @torch.inference_mode()
    def run() -> dict[str, Any]:
        return {"tokens": new_part(module.generate(**given, **options).cpu(), new_tokens)}

    shapes, itemsize = training.torch_shapes(module), training.ITEMSIZE[dtype]
    facts = training.generation_work(shapes, config, rows, beams, length, new_tokens, itemsize)
    return Running(run, harness.torch_peak_bytes, facts | training.torch_facts(module))


def new_part(sequences: Any, new_tokens: int) -> list[int]:
    import numpy as np

    return np.asarray(sequences)[:, -new_tokens:].reshape(-1).tolist()


# -- one model: inference.py generate

GENERATE = {"torch": "inference:torch_generate", "hfseq": "inference:hfseq_generate"}
MODES = ("greedy", "sampling", "beam")


def parse(given: Sequence[str]) -> argparse.Namespace:
    able = [name for name, subject in training.SUBJECTS.items() if subject.objective != "mlm"]
    able += training.WRITING
    parser = harness.parser(
        __doc__,
        sizes=True,
        beams=(4, "beams of beam search"),
        prompt_length=(64, "tokens a prompt or source"),
        new_tokens=(64, "tokens to generate"),
        rounds=(7, "timed calls of each contestant"),
        least_agreement=(1.0, "share of the rows that must agree in greedy and beam search"),
    )
    parser.add_argument("--model", default="gpt2", choices=able)
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(given)
    kind = training.subject_of(options.model).objective
    options.modes = options.modes or {"clm": ["greedy", "sampling"], "seq2seq": ["beam"]}[kind]
    return options


def generate_cases(options: argparse.Namespace) -> list[Case]:
    shared = {
        "model": options.model,
        "length": options.prompt_length,
        "dtype": options.dtype,
        "new_tokens": options.new_tokens,
        "size": harness.size_of(options),
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
    """Return a search in batches of ``rows``; a ``title`` names the model and its type, too."""
    search, beams = (f"beam {beams}", beams) if mode == "beam" else (mode, 1)
    name = f"{search}, batch {rows}"
    return harness.compared(
        Options(),
        GENERATE,
        settings | {"mode": mode, "rows": rows, "beams": beams},
        f"{title}, {name}, {settings['dtype']}" if title else name,
        rows * settings["new_tokens"],
        peers,
        **turns,
    )


def agreement(rows: Sequence[Row], new_tokens: int) -> dict[str, float]:
    """Return, by group, the share of rows whose tokens are those of the first contestant."""
    import numpy as np

    shares = {}
    for group in dict.fromkeys(row.group for row in rows):
        members = [row.values[0]["tokens"] for row in rows if row.group == group and row.values]
        if len(members) > 1 and not group.startswith("sampling"):
            first, *others = np.reshape(members, (len(members), -1, new_tokens))
            shares[group] = float((others == first).all(-1).mean())
    return shares


def disagreements(shares: dict[str, float], least: float) -> list[str]:
    return [
        f"{group}: only {share:.0%} of the rows have the tokens of PyTorch"
        for group, share in shares.items()
        if share < least
    ]


def generate(given: Sequence[str]) -> int:
    options = parse(given)
    name = f"generate_{options.model}"
    result = harness.head(name, "inference.py generate", given, options)
    with tempfile.TemporaryDirectory() as folder:
        runner = harness.Runner(result["threads"], Path(folder))
        measured = [(case, runner.rows(case)) for case in generate_cases(options)]
    shares = agreement([row for _, rows in measured for row in rows], options.new_tokens)
    rows = [harness.summary(row, case, found, {}) for case, found in measured for row in found]
    told = "; ".join(f"{group}: {share:.0%} of the rows" for group, share in shares.items())
    result |= {
        "agreement": shares,
        "rows": rows,
        "problems": [] if options.no_check else disagreements(shares, options.least_agreement),
        "rounds": f"{options.rounds} alternating rounds after two untimed calls, the first of "
        "which compiles",
        "remarks": [
            f"{training.subject_of(options.model).title}{harness.size_text(result['options'])}, "
            f"random weights, {options.dtype}, prompts (or sources) of {options.prompt_length} "
            f"tokens, {options.new_tokens} new ones a row. Rows whose tokens equal PyTorch's: "
            f"{told or 'not compared'}."
        ],
    }
    return harness.publish(result, harness.section(result, COLUMNS), options.output)


CALL: harness.Column = ("ms a call", harness.milliseconds)
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
    factories = {"torch": "inference:torch_forward", "hfseq": "inference:hfseq_forward"}
    turns = {"rounds": options.choose(5, 30, 5, 1), "warmup": options.choose(1, 5, 1, 1)}
    counts = options.choose((1, 8, 32), (1, 8, 64, 256), (1, 8), (1, 2))
    cases = []
    for model, subject in training.FORWARD.items():
        # A picture is read whole.
        length = subject.length if model == "vit" else options.choose(*[subject.length] * 3, 12)
        whole = model == "encoder"
        types = options.types("float32", *["bfloat16"] * whole)
        for dtype, rows in itertools.product(types, counts if whole else counts[1:2]):
            name = training.shape_name(subject.title, rows, length, 0, dtype)
            settings = {
                "model": model,
                "dtype": dtype,
                "rows": rows,
                "length": length,
                "size": options.size(model),
            }
            case = harness.compared(options, factories, settings, name, rows * length, **turns)
            cases.append(case)
    return cases


def inference_problems(rows: Rows) -> list[str]:
    """Name the contestants whose results are not those of the first of their case."""
    # How far means may be apart, relatively.
    tolerance = {"float32": 1e-4, "bfloat16": 3e-2}
    problems = []
    for row, base in harness.beside_first([row for row in rows if "mean" in row["facts"]], "facts"):
        value, wanted = row["facts"]["mean"], base["facts"]["mean"]
        if not abs(value - wanted) <= tolerance[row["dtype"]] * abs(wanted):
            problems.append(
                f"{row['case']}: {row['name']} returns numbers of mean size {value:.6g}, "
                f"{base['name']} {wanted:.6g}"
            )
    return problems


def hfseq_forward(
    model: str, dtype: str, rows: int, length: int, size: dict[str, Any], weights: str
) -> Running:
    """hfseq's model, jitted, parameters and inputs being arguments."""
    import jax.numpy as jnp

    config = training.configuration(model, size)
    module = training.hfseq_class(model).from_pretrained(weights, config=config, dtype=dtype)
    params = module.to_bf16(module.params) if dtype == "bfloat16" else module.params
    inputs = inputs_of(config, rows, length)
    if "input_ids" in inputs:
        inputs["attention_mask"] = jnp.ones_like(inputs["input_ids"])
    run = compiled(module, params, inputs)
    shapes = training.jax_shapes(params)
    facts = training.jax_facts(params)
    facts |= training.forward_work(shapes, config, rows, length, training.ITEMSIZE[dtype])
    facts["mean"] = float(jnp.abs(run().astype(jnp.float32)).mean())
    return Running(harness.working(run), harness.jax_peak_bytes, facts)


def torch_forward(
    model: str,
    dtype: str,
    rows: int,
    length: int,
    size: dict[str, Any],
    weights: str,
    compiled: bool = False,
) -> Running:
    import torch

    config = training.configuration(model, size)
    module, _ = training.load_torch(model, weights, config, dtype)
    given = torch_inputs(inputs_of(config, rows, length), module)  # no mask: it would hide nothing
    forward = torch.compile(module) if compiled else module

    @torch.inference_mode()
    def run() -> Any:
        hidden = forward(**given).last_hidden_state
        harness.torch_wait()
        return hidden

    shapes = training.torch_shapes(module)
    facts = training.torch_facts(module)
    facts |= training.forward_work(shapes, config, rows, length, training.ITEMSIZE[dtype])
    facts["mean"] = float(run().float().abs().mean())
    return Running(harness.working(run), harness.torch_peak_bytes, facts)


def generation_cases(options: Options) -> list[Case]:
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
        # Thirty seconds of speech are a hundred tokens or so.
        length, count = (1500, 3 * new) if model == "whisper" else (prompt, new)
        counts = options.choose(cpu, gpu, cpu[:1], (2,))
        for dtype, rows in itertools.product(options.types(), counts):
            settings = {
                "model": model,
                "length": length,
                "new_tokens": count,
                "dtype": dtype,
                "size": options.size(model),
            }
            cases.append(generation_case(settings, mode, 4, rows, options.eager, title, **turns))
    return cases


INFERENCE = Suite(
    "Inference",
    "BERT-base without a head on rows of 128 random tokens; two layers of CLIP-text-base on 77 "
    "tokens, of ViT-base on pictures of 197 places, of DistilBERT, OPT-125m and a Llama of 1B on "
    "128 tokens. Parameters are of the type computed in, on "
    "both sides. Every contestant also sums up what it returns, and the sums must agree.",
    inference_cases,
    harness.DEFAULT,
    "ratio",
    problems=inference_problems,
)
GENERATION = Suite(
    "Generation",
    "`generate` of both sides, on the same weights and prompts; every row gets the same number of "
    "new tokens. The limit counts the weights and caches that each token has to read. "
    "`inference.py generate` compares the tokens, too.",
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
