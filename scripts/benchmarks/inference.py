"""Inference of an encoder in float32 and bfloat16, side by side in one process.

The compiled function takes parameters and inputs as arguments, so XLA can fold nothing into
constants, and every run is waited for. Runs of the precisions take turns, each order as often as
the other: what disturbs the machine disturbs both.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cpu_units import bfloat16_units, read_cpuinfo
from harness import machine_facts, table, write_json
from inference_flags import InferenceArguments

from hfseq import FlaxAutoModel, plugins
from hfseq.errors import CheckpointError, DataError, UsageError
from hfseq.nn.compat import prepare_jax

prepare_jax()

import jax
import numpy as np

PERCENTILES = (50, 90, 99)
Batch = dict[str, np.ndarray]


def run(arguments: InferenceArguments) -> dict[str, Any]:
    """Load, measure, compare and report; returns the result that ``--json`` writes."""
    plugins.load(extra=arguments.plugin)
    models, params = load(arguments)
    model = models["float32"]
    batch = make_batch(arguments, model)
    calls = {name: compiled(models[name], params, batch) for name in arguments.precisions}
    outputs = {name: np.asarray(call(), np.float32) for name, call in calls.items()}
    seconds = measure(calls, arguments.num_warmup, arguments.num_runs)
    result = describe(arguments, model, params) | {
        "rows": {name: latency(times, batch) for name, times in seconds.items()}
    }
    if "bfloat16" in calls:
        result["comparison"] = compare(outputs, seconds, batch, result["bfloat16_units"])
    report(result, arguments.json)
    return result


# -- what runs


def load(arguments: InferenceArguments) -> tuple[dict[str, Any], Any]:
    """Return a model of each precision, without parameters of its own, and the parameters."""
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
            "benchmark runs encoders; scripts/benchmarks/generate.py measures generation"
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
    """Return BERT-base's configuration with the old script's activation, changed as asked."""
    from transformers import BertConfig

    from hfseq.checkpoints.config import override, parse_overrides

    config = BertConfig(hidden_act="gelu_new")
    if overrides:
        override(config, parse_overrides(overrides))
    return config


def make_batch(arguments: InferenceArguments, model: Any) -> Batch:
    """Return ``input_ids`` and ``attention_mask``, (batch_size, max_seq_length)."""
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
    filled = [texts[i % len(texts)] for i in range(shape[0])]
    encoded = tokenizer(
        filled, padding="max_length", truncation=True, max_length=shape[1], return_tensors="np"
    )
    taken = ("input_ids", "attention_mask", "token_type_ids")
    return {name: encoded[name].astype(np.int32) for name in taken if name in encoded}


def read_texts(arguments: InferenceArguments) -> list[str] | None:
    """Return the texts to run, or nothing where random tokens are wanted."""
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


def compiled(model: Any, params: Any, batch: Batch) -> Callable[[], jax.Array]:
    """Return a run of the model that waits for its result: hidden states (rows, length, width).

    Matrices are cast once, not at every run: the results are the same, since a half precision casts
    them anyway. Norms and biases stay as they are.
    """
    dtype = model.precision.compute_dtype
    params = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, params)
    inputs = jax.device_put(batch)

    def forward(params: Any, inputs: Any) -> jax.Array:
        return model(**inputs, params=params).last_hidden_state

    function = jax.jit(forward).lower(params, inputs).compile()
    return lambda: function(params, inputs).block_until_ready()


# -- what is measured


def measure(calls: dict[str, Callable[[], Any]], warmup: int, runs: int) -> dict[str, list[float]]:
    """Time the calls in turn; returns seconds of every timed run."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-warmup, runs):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            calls[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def latency(seconds: Sequence[float], batch: Batch) -> dict[str, Any]:
    """Return percentiles in milliseconds, and the throughput that the median makes."""
    rows, length = batch["input_ids"].shape
    cuts = {f"p{p}_ms": 1e3 * float(np.percentile(seconds, p)) for p in PERCENTILES}
    rate = 1e3 / cuts["p50_ms"]
    real = int(batch["attention_mask"].sum())
    return cuts | {
        "mean_ms": 1e3 * float(np.mean(seconds)), "examples_per_second": rows * rate,
        "tokens_per_second": rows * length * rate, "real_tokens_per_second": real * rate,
        "seconds": list(seconds),
    }  # fmt: skip


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
    real = batch["attention_mask"] > 0
    exact, half = (outputs[name][real].astype(np.float64) for name in ("float32", "bfloat16"))
    worst = float(np.abs(exact - half).max())
    norms = np.linalg.norm(exact, axis=-1) * np.linalg.norm(half, axis=-1)
    cosine = (exact * half).sum(-1) / np.maximum(norms, 1e-30)
    pairs = [a / b for a, b in zip(seconds["float32"], seconds["bfloat16"], strict=True)]
    return {
        "speedup": float(np.median(pairs)) if units else None,
        "max_absolute_difference": worst,
        "max_relative_difference": worst / max(float(np.abs(exact).max()), 1e-30),
        "mean_absolute_difference": float(np.abs(exact - half).mean()),
        "min_cosine": float(cosine.min()),
        "mean_cosine": float(cosine.mean()),
    }


def device_units() -> list[str]:
    """Return what multiplies bfloat16 here: units of the CPU, or the accelerator itself."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return bfloat16_units(read_cpuinfo())
    # NVIDIA's tensor cores know bfloat16 from Ampere (8.0) on.
    if float(getattr(device, "compute_capability", 8.0)) < 8.0:
        return []
    return [device.device_kind]


# -- what is told


def describe(arguments: InferenceArguments, model: Any, params: Any) -> dict[str, Any]:
    """Return what the numbers depend on."""
    config, device = model.config, jax.devices()[0]
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {
        "benchmark": "run_bert_flax",
        "options": dataclasses.asdict(arguments),
        "model": {
            "class": type(model).__name__, "layers": config.num_hidden_layers,
            "width": config.hidden_size, "parameters": count,
            "weights": "random" if arguments.model_name_or_path is None else "loaded",
        },
        "machine": machine_facts(),
        "device": f"{device.platform} {device.device_kind}",
        "bfloat16_units": device_units(),
    }  # fmt: skip


def report(result: dict[str, Any], place: str | None) -> None:
    """Print the table and what it means; write JSON where asked."""
    if place == "-":
        print(json.dumps(result, indent=1))
        return
    print("\n".join(lines(result)))
    if place:
        write_json(Path(place), result)


def lines(result: dict[str, Any]) -> list[str]:
    """Return the report."""
    model, options, machine = result["model"], result["options"], result["machine"]
    source = "text" if options["text"] or options["text_file"] else "random tokens"
    columns = ["", *(f"p{p} ms" for p in PERCENTILES), "examples/s", "tokens/s"]
    rows = [
        [name, *(f"{row[f'p{p}_ms']:.1f}" for p in PERCENTILES),
         f"{row['examples_per_second']:.1f}", f"{row['tokens_per_second']:.0f}"]
        for name, row in result["rows"].items()
    ]  # fmt: skip
    told = [
        f"{model['class']}: {model['layers']} layers, width {model['width']}, "
        f"{model['parameters'] / 1e6:.1f} M parameters ({model['weights']})",
        f"{options['batch_size']} x {options['max_seq_length']} tokens ({source}), "
        f"{options['num_runs']} runs after {options['num_warmup']} untimed ones",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:g}; "
        f"{result['device']}; bfloat16 units: {', '.join(result['bfloat16_units']) or 'none'}",
        "", table(columns, rows),
    ]  # fmt: skip
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
