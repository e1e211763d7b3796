"""Measure training steps of native model classes and of the same models through the bridge.

Both models have the same parameters and inputs. Each step computes the gradients of a small loss
and updates the parameters. The steps of the two models alternate, so that both see the same load.
The table contains the time for tracing and compilation, the minimum and the median time of a step,
and the ratios of the bridge to the native class. The step times are compared by their minima. The
ten families take at most eight minutes on two quiet cores.

    python scripts/benchmarks/bridge.py --output bridge.json
    python scripts/benchmarks/bridge.py --families bert llama --steps 30
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import transformers

import hfseq

TEXT = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = TEXT | {"num_key_value_heads": 4, "pad_token_id": 0}
SEQ2SEQ = {
    "vocab_size": 2000,
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
    "max_position_embeddings": 256,
    "dropout": 0.0,
}
IMAGE = {name: value for name, value in TEXT.items() if name[:3] in ("hid", "num", "int")}
#: Task and configuration of each family.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("ForMaskedLM", TEXT | NO_DROPOUT),
    "roberta": ("ForMaskedLM", TEXT | NO_DROPOUT | {"max_position_embeddings": 258}),
    "electra": ("ForMaskedLM", TEXT | NO_DROPOUT),
    "llama": ("ForCausalLM", DECODER),
    "qwen2": ("ForCausalLM", DECODER),
    "gemma2": ("ForCausalLM", DECODER | {"head_dim": 64}),
    "gpt2": (
        "ForCausalLM",
        {
            "vocab_size": 2000,
            "n_embd": 256,
            "n_layer": 4,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "bart": ("ForSeq2SeqLM", SEQ2SEQ),
    "t5": (
        "ForSeq2SeqLM",
        {
            "vocab_size": 2000,
            "d_model": 256,
            "d_kv": 64,
            "d_ff": 1024,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
    ),
    "vit": ("ForImageClassification", IMAGE | NO_DROPOUT | {"image_size": 128, "patch_size": 16}),
}


def make_inputs(task: str, rows: int, length: int) -> dict[str, np.ndarray]:
    """Returns inputs of a model."""
    random = np.random.default_rng(0)
    if task == "ForImageClassification":
        return {"pixel_values": random.normal(size=(rows, 3, 128, 128)).astype(np.float32)}
    ids = random.integers(5, 2000, (rows, length)).astype(np.int32)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return inputs | ({"decoder_input_ids": ids} if task == "ForSeq2SeqLM" else {})


def compile_step(model: Any, inputs: dict[str, np.ndarray]) -> tuple[Callable[[], object], float]:
    """Returns a function that runs a training step, and the seconds to trace and compile it."""

    def step(params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model(**inputs, params=params).logits
            return jax.nn.log_softmax(logits)[..., 0].mean()

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda x, g: x + 1e-3 * g, params, gradients)

    params = model.params
    start = time.perf_counter()
    compiled = jax.jit(step).lower(params).compile()
    return lambda: jax.block_until_ready(compiled(params)), time.perf_counter() - start


def measure(family: str, steps: int, seconds: float, rows: int, length: int) -> dict[str, Any]:
    """Measures the native and the bridged model of a family.

    Args:
        family: A key of `FAMILIES`.
        steps: Maximum number of measured steps per model.
        seconds: Time after which no further step begins. Three steps are always measured.
        rows: Examples per step.
        length: Tokens per row.
    """
    task, sizes = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **sizes)
    auto_class = getattr(hfseq, f"FlaxAutoModel{task}")
    with tempfile.TemporaryDirectory() as folder:
        native = auto_class.from_config(config)
        native.save_pretrained(folder)
        bridged = auto_class.from_pretrained(folder, bridge=True)
    inputs = make_inputs(task, rows, length)
    programs: dict[str, Callable[[], object]] = {}
    result: dict[str, Any] = {"family": family}
    for name, model in (("native", native), ("bridge", bridged)):
        programs[name], result[f"{name}_compile_s"] = compile_step(model, inputs)
    times: dict[str, list[float]] = {name: [] for name in programs}
    end = time.perf_counter() + seconds
    for number in range(steps + 1):  # the first step is not counted
        if number > 3 and time.perf_counter() > end:
            break
        for name, program in programs.items():
            start = time.perf_counter()
            program()
            times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        result[f"{name}_min_ms"] = 1e3 * min(values[1:])
        result[f"{name}_median_ms"] = 1e3 * float(np.median(values[1:]))
    result["steps"] = len(times["native"]) - 1
    result["step_ratio"] = result["bridge_min_ms"] / result["native_min_ms"]
    result["compile_ratio"] = result["bridge_compile_s"] / result["native_compile_s"]
    expected = np.asarray(native(**inputs).logits)
    difference = np.abs(expected - np.asarray(bridged(**inputs).logits)).max()
    result["difference"] = float(difference / max(1.0, np.abs(expected).max()))
    return result


#: Columns of the printed table: title, entry of the result and format.
COLUMNS = (
    ("compile native (s)", "native_compile_s", ".1f"),
    ("compile bridge (s)", "bridge_compile_s", ".1f"),
    ("ratio", "compile_ratio", ".2f"),
    ("step native (ms)", "native_min_ms", ".0f"),
    ("step bridge (ms)", "bridge_min_ms", ".0f"),
    ("ratio", "step_ratio", ".2f"),
    ("logits differ by", "difference", ".1e"),
)


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results as a Markdown table."""
    lines = [f"| family | {' | '.join(title for title, _, _ in COLUMNS)} |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for result in results:
        cells = [format(result[name], style) for _, name, style in COLUMNS]
        lines.append(f"| {result['family']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures the families and prints a table."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=20, help="Steps per model (default: 20).")
    parser.add_argument(
        "--seconds", type=float, default=30, help="Duration of the steps per family (default: 30)."
    )
    parser.add_argument("--rows", type=int, default=8, help="Examples per step (default: 8).")
    parser.add_argument("--length", type=int, default=128, help="Tokens per row (default: 128).")
    parser.add_argument("--output", type=Path, help="JSON file for the results.")
    arguments = parser.parse_args()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(8)))  # starts the compiler
    results = []
    for family in arguments.families:
        result = measure(
            family, arguments.steps, arguments.seconds, arguments.rows, arguments.length
        )
        results.append(result)
        values = (f"{name} {value:.3g}" for name, value in result.items() if name != "family")
        print(f"{family}: {', '.join(values)}", flush=True)
    print(f"\n{table(results)}\n")
    step_ratio, compile_ratio, difference = (
        max(result[name] for result in results)
        for name in ("step_ratio", "compile_ratio", "difference")
    )
    print(
        f"largest ratios: step {step_ratio:.2f} (goal: 1.1), tracing and compilation "
        f"{compile_ratio:.2f} (goal: 2); largest difference {difference:.1e} (goal: 1e-5); "
        f"{(time.perf_counter() - began) / 60:.1f} minutes"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
