#!/usr/bin/env python
r"""Checks the results and measures the speed of hfseq on an accelerator.

    bash scripts/validate_device.sh                        # all parts, at most nine minutes
    python scripts/benchmarks/device.py --only attention   # one part
    python scripts/benchmarks/device.py --toy --output try # small sizes, on any machine

Each part runs in a separate process with a time limit, and no other process uses the device. Each
result is written to docs/benchmarks/device_KIND.json (or below --output) as soon as it is measured.
The file keeps the results of parts that are not run again. The table is written to
docs/benchmarks.md at the end. The exit code is 1 if a result is wrong or a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness

#: Time limits of the parts in seconds.
PARTS = {"facts": 20, "attention": 100, "training": 120, "speed": 200, "fp8": 60, "flags": 40}
ROOT = Path(__file__).resolve().parents[2]
#: Maximum errors of outputs and gradients, relative to the largest absolute reference value.
LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 4e-2)}
#: Dtypes in the order in which they are measured. bfloat16 is first, because training uses it.
HALF_FIRST = ("bfloat16", "float32")
Rows = list[dict[str, Any]]


def timed(call: Callable[[], Any], warmup: int = 3, rounds: int = 10) -> float:
    """Returns the median seconds of a call, including the wait for its result."""
    import jax

    seconds = []
    for number in range(-warmup, rounds):
        started = time.perf_counter()
        jax.block_until_ready(call())
        if number >= 0:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_facts(toy: bool) -> Rows:
    """Returns the device, its software, and the rates of a large matmul and of a copy."""
    import jax
    import jax.numpy as jnp

    device, size = jax.devices()[0], 512 if toy else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    product = timed(functools.partial(jax.jit(lambda x: x @ x), x))
    y = jnp.ones((size * size * 4,), jnp.float32)
    copy = timed(functools.partial(jax.jit(lambda y: y + 1), y))
    driver, cudnn = "", None
    if device.platform == "gpu":
        from jax._src.lib import cuda_versions

        cudnn = cuda_versions.cudnn_get_version() if cuda_versions else None
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return [
        {
            "device": device.device_kind,
            "count": jax.device_count(),
            "driver": driver,
            "cudnn": cudnn,
            "jax": jax.__version__,
            "client": getattr(device.client, "platform_version", ""),
            "memory_gb": ((device.memory_stats() or {}).get("bytes_limit") or 0) / 1e9,
            "tflops": 2 * size**3 / product / 1e12,
            "copy_gbs": 2 * y.nbytes / copy / 1e9,
        }
    ]


#: Options of each attention case: which keys are visible, bias, dropout rate, and the number of key
#: heads if it differs from the number of query heads, which is 12.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (128, 0)},
    "both sides": {"window": (64, 64)},
    "lengths": {"lengths": True},
    "packed": {"packed": True},
    "packed, grouped": {"packed": True, "causal": True, "kv_heads": 4},
    "bias": {"bias": True},
    "holes": {"holes": True},
    "dropout": {"packed": True, "rate": 0.1},
    "packed, to 64": {"packed": True, "max_runs": 64},
}
#: Cases whose lengths are not multiples of the block sizes of kernels.
UNEVEN = [
    (length, 64, "bfloat16", name) for length in (510, 509) for name in ("plain", "packed", "bias")
]


def measure_attention(toy: bool) -> Iterator[dict[str, Any]]:
    """Compares every implementation of this platform with the explicit one in float32.

    Short sequences come first. A case for which no time remains yields a row with ``not_run``.
    """
    lengths, widths = ((64,), (16,)) if toy else ((512, 2048, 8192), (64, 128))
    time_left = harness.TimeBudget(3600 if toy else 0.85 * PARTS["attention"])
    cases = [
        (length, width, dtype, name)
        for length, dtype, width, name in itertools.product(lengths, HALF_FIRST, widths, SHAPES)
        if dtype != "float32" or length <= 512
    ]
    first = sum(length <= 512 for length, *_ in cases)
    cases[first:first] = [(67, 16, *case[2:]) for case in UNEVEN[:2]] if toy else UNEVEN
    for length, width, dtype, name in cases:
        if time_left.remaining() > 0:
            yield from attention_case(length, width, dtype, name, rounds=1 if toy else 10)
        else:
            yield {
                "shape": name,
                "length": length,
                "width": width,
                "dtype": dtype,
                "not_run": "no time remained",
            }


def attention_case(length: int, width: int, dtype: str, name: str, rounds: int) -> Rows:
    """Compares all attention implementations for one entry of ``SHAPES`` and one size.

    Args:
        length: Number of queries and keys.
        width: Features per head.
        dtype: Dtype of queries, keys and values.
        name: Key of ``SHAPES``.
        rounds: Number of timed calls.
    """
    import jax
    import jax.numpy as jnp

    from hfseq import nn
    from hfseq.errors import UsageError
    from hfseq.nn.attention import EXPLICIT, IMPLEMENTATIONS_BY_PLATFORM, XLA
    from hfseq.nn.context import Options, platform

    shape, heads, batch = SHAPES[name], 12, min(max(1, 8192 // length), 16)
    kv_heads, rate = shape.get("kv_heads", heads), shape.get("rate", 0.0)
    keys = jax.random.split(jax.random.key(0), 5)
    counts = heads, kv_heads, kv_heads, heads
    arrays = [
        jax.random.normal(key, (batch, length, count, width), dtype)
        for key, count in zip(keys, counts, strict=False)
    ]
    arrays += [jax.random.normal(keys[4], (1, heads, length, length))] if "bias" in shape else []
    documents = jnp.broadcast_to(jnp.arange(length) * 5 // length + 1, (batch, length))
    holes = jnp.broadcast_to(jnp.arange(length) % 7 > 0, (batch, length)).astype(jnp.int32)
    visible = nn.Visibility(
        causal=shape.get("causal", False),
        window=shape.get("window"),
        query_segments=documents.at[0, -length // 9 :].set(0) if "packed" in shape else None,
        max_runs=shape.get("max_runs", 16) if "packed" in shape else None,
        key_segments=holes if "holes" in shape else None,
        key_lengths=jnp.full(batch, length - 9) if "lengths" in shape else None,
    )

    def run(attention: Any, q: Any, k: Any, v: Any, change: Any, *bias: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            bias_option = {"bias": bias[0]} if bias else {}
            rngs = nn.make_keys(jax.random.key(1))
            with nn.options(Options(attention=attention)):
                return nn.attend(
                    q, k, v, mask=visible, dropout_rate=rate, rngs=rngs, **bias_option
                )[0]

        outputs, backward = jax.vjp(attend, q, k, v, *bias)
        return outputs, *backward(change.astype(outputs.dtype))

    single = [leaf.astype(jnp.float32) for leaf in arrays]
    candidates = (*IMPLEMENTATIONS_BY_PLATFORM.get(platform(), XLA)[:-1], EXPLICIT)
    # By default, GPUs multiply float32 in TF32, whose error exceeds the limit.
    exact = "highest" if dtype == "float32" and platform() == "cuda" else None

    def compiled(job: tuple[Any, Any, str | None]) -> Any:
        """Compiles a job in a thread. Returns the program, or the exception."""
        implementation, job_arrays, precision = job
        try:
            with jax.default_matmul_precision(precision):
                return (
                    jax.jit(functools.partial(run, (implementation,))).lower(*job_arrays).compile()
                )
        except Exception as error:
            return error

    jobs = [
        (EXPLICIT, single, "highest"),
        *((candidate, arrays, exact) for candidate in candidates),
    ]
    with ThreadPoolExecutor() as pool:
        reference, *programs = pool.map(compiled, jobs)
    limits = LIMITS["bfloat16" if platform() == "tpu" else dtype]
    case = {"shape": name, "length": length, "width": width, "dtype": dtype}
    try:
        if isinstance(reference, Exception):
            raise reference
        expected = reference(*single)
    except Exception as error:  # from the compiler, or out of memory
        return [case | {"failed": f"the reference: {str(error).splitlines()[0][:200]}"}]
    rows: Rows = []
    for candidate, program in zip(candidates, programs, strict=True):
        row = {"implementation": candidate.name} | case
        rows.append(row)
        try:
            if isinstance(program, Exception):
                raise program
            errors = [
                float(abs(a.astype(jnp.float32) - b).max() / (abs(b).max() + 1e-9))
                for a, b in zip(program(*arrays), expected, strict=True)
            ]
            milliseconds = timed(functools.partial(program, *arrays), 2, rounds) * 1e3
        except UsageError as error:
            row["refused"] = str(error).split("(", 1)[-1].rsplit(").", 1)[0]
            continue
        except Exception as error:
            row["failed"] = str(error).splitlines()[0][:200]
            continue
        row |= check_errors(errors, limits) | {
            "ms": milliseconds,
            "temporary_mb": program.memory_analysis().temp_size_in_bytes / 1e6,
        }
    return rows


def check_errors(errors: list[float], limits: tuple[float, float]) -> dict[str, Any]:
    """Compares the errors of the output and of all gradients with their limits.

    A NaN at any position is wrong. `max` alone would ignore it.
    """
    output_error, *gradient_errors = errors
    right = output_error <= limits[0] and all(error <= limits[1] for error in gradient_errors)
    worst = next((error for error in gradient_errors if error != error), max(gradient_errors))
    return {"error": output_error, "gradient_error": worst, "right": right}


_LAYERS = "hidden_size=64,num_hidden_layers=2,intermediate_size=128"
#: Small models: objective, length flag, sizes and fields of dropout rates.
MODELS = {
    "roberta": ("mlm", "max_seq_length", f"{_LAYERS},num_attention_heads=2,"
                "max_position_embeddings=130",
                ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "gpt2": ("clm", "block_size", "n_embd=64,n_layer=2,n_head=2,n_positions=128",
             ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "t5": ("span_mlm", "max_seq_length", "d_model=64,d_kv=32,d_ff=128,num_layers=2,num_heads=2",
           ("dropout_rate",)),
    "llama": ("clm", "block_size", f"{_LAYERS},num_attention_heads=4,num_key_value_heads=2,"
              "head_dim=16", ("attention_dropout",)),
    "modernbert": ("mlm", "max_seq_length", f"{_LAYERS},num_attention_heads=2,local_attention=32",
                   ("attention_dropout", "mlp_dropout", "embedding_dropout")),
}  # fmt: skip

#: The first setting makes float32 matrix multiplications as exact as on a CPU. The second one turns
#: off jax's filter of tracebacks, so that a traceback ends with the exception.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_TRACEBACK_FILTERING": "off"}
DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
#: Maximum relative difference from the losses of the CPU in float32.
LOSS_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}


def measure_training(toy: bool) -> Iterator[dict[str, Any]]:
    """Compares the losses of small models on the device and on the CPU, with and without dropout.

    Also checks that a repeated run and a resumed run have the same losses. On a GPU, several models
    are trained at the same time. A TPU supports only one process.
    """
    from hfseq.training import accelerator_flags

    accelerator = accelerator_flags.local_accelerator()
    xla_flags = os.environ.get("XLA_FLAGS", "") + (
        f" {DETERMINISTIC_FLAG}" if accelerator == "cuda" else ""
    )
    environment = (
        os.environ
        | EXACT
        | {
            "XLA_FLAGS": xla_flags,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
    )
    time_left = harness.TimeBudget(3600 if toy else 0.7 * PARTS["training"])

    def child(job: dict[str, Any], **variables: str) -> dict[str, list[float]]:
        command = [sys.executable, __file__, "--losses", json.dumps(job)]
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment | variables
        )
        if process.returncode:
            raise RuntimeError((process.stderr.strip().splitlines() or ["?"])[-1][:200])
        return json.loads(process.stdout.splitlines()[-1])

    def row(model: str, rate: float) -> dict[str, Any]:
        row: dict[str, Any] = {"model": model, "dropout": rate}
        if time_left.remaining() <= 0:
            return row | {"not_run": "no time remained"}
        job = {"model": model, "rate": rate, "steps": 4 if toy else 20}
        with ThreadPoolExecutor(2 if accelerator == "cuda" else 1) as pair:
            device_run = pair.submit(child, job | {"whole_only": False})
            cpu_run = pair.submit(child, job | {"whole_only": True}, JAX_PLATFORMS="cpu")
            try:
                return row | compare_losses(device_run.result(), cpu_run.result()["whole"])
            except RuntimeError as error:
                return row | {"failed": str(error)}

    jobs = list(itertools.product(list(MODELS)[: 2 if toy else None], (0.0, 0.1)))
    processes = min(len(jobs), os.cpu_count() or 1) if accelerator == "cuda" else 1
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda job: row(*job), jobs)


def compare_losses(losses: dict[str, list[float]], cpu: list[float]) -> dict[str, Any]:
    """Compares the losses of several runs.

    Args:
        losses: Losses of the runs on the device, see :func:`losses`: ``whole``, ``again``, ``half``
            and ``resumed``.
        cpu: Losses of the run on the CPU.

    Returns:
        The largest differences from the CPU in float32 and bfloat16, whether the repeated and the
        resumed run have the same losses as the uninterrupted run, and whether all of this is
        ``right``.
    """

    def farthest(losses: list[float]) -> float:
        far = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(losses, cpu, strict=True)]
        return next((x for x in far if x != x), max(far))

    uninterrupted = losses["whole"]
    comparison = {
        "against_cpu": farthest(uninterrupted),
        "half_against_cpu": farthest(losses["half"]),
        "repeated_equal": losses["again"] == uninterrupted,
        "resumed_equal": losses["resumed"] == uninterrupted,
    }
    right = (
        comparison["against_cpu"] <= LOSS_LIMITS["float32"]
        and comparison["half_against_cpu"] <= LOSS_LIMITS["bfloat16"]
    )
    return comparison | {
        "right": right and comparison["repeated_equal"] and comparison["resumed_equal"]
    }


def save_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose vocabulary contains the numbers below 977 as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {f"{role}_token": f"<{role}>" for role in ("bos", "pad", "eos", "unk", "mask")}
    words = [*special.values(), *map(str, range(977)), *(f"<extra_id_{n}>" for n in range(50))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def losses(job_json: str) -> None:
    """Prints the losses of small runs as JSON.

    The runs are an uninterrupted run, a repetition of it, a run in half precision, and a run that
    is resumed after half of the steps. The job is a JSON object.
    """
    from hfseq.training.arguments import parse
    from hfseq.training.callbacks import StepInfo
    from hfseq.training.run import main

    job = json.loads(job_json)
    model, steps = job["model"], job["steps"]
    objective, length, sizes, rates = MODELS[model]
    dropout_overrides = ",".join(f"{rate}={job['rate']}" for rate in rates)
    step_losses: list[float] = []

    def note(info: StepInfo) -> None:
        assert info.step_metrics is not None
        step_losses.append(float(info.step_metrics["loss"]))

    def train(folder: str, last: int, precision: str = "float32") -> list[float]:
        flags = [
            f"--output_dir={root}/{folder}",
            f"--train_file={text}",
            f"--tokenizer_name={words}",
            f"--model_type={model}",
            f"--config_overrides={sizes},{dropout_overrides}",
            f"--{length}=128",
            "--per_device_train_batch_size=4",
            f"--max_steps={last}",
            "--do_train",
            f"--save_steps={steps // 2}",
            "--report_to=none",
            "--lr_scheduler_type=constant",
            f"--precision={precision}",
        ]
        step_losses.clear()
        main(parse(flags, objective=objective), objective, callbacks=[note])
        return step_losses.copy()

    with tempfile.TemporaryDirectory() as root:
        text = Path(root, "text.txt")
        lines = (" ".join(str(n * m % 977) for m in range(1, 30)) for n in range(1, 300))
        text.write_text("\n".join(lines), encoding="utf-8")
        words = Path(root, "tokenizer")
        save_tokenizer(words)
        result = {"whole": train("whole", steps)}
        if not job["whole_only"]:
            result["again"] = train("again", steps)
            result["half"] = train("half", steps, "bfloat16")
            result["resumed"] = train("parts", steps // 2) + train("parts", steps)
    print(json.dumps(result))


_T5_BASE = {
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_heads": 12,
}
#: Model, title, rows on an H200, length, target length, size.
STEPS: tuple[tuple[str, str, int, int, int, dict[str, Any]], ...] = (
    ("roberta", "RoBERTa-base", 32, 512, 0, {}),
    ("gpt2", "GPT-2 124M", 16, 1024, 0, {}),
    ("t5", "T5-base", 32, 512, 114, _T5_BASE),
    ("modernbert", "ModernBERT-base", 16, 1024, 0, {}),
    ("modernbert", "ModernBERT-base", 2, 8192, 0, {}),
)
#: Tokens per second that other projects report. They are not verified here.
PUBLISHED = {"GPT-2 124M": "468,000 (llm.c, H100)", "ModernBERT-base": "304,000 (H100)"}
#: Target tokens per second on one H100 or H200.
SPEED_TARGETS = {"GPT-2 124M": 350_000}


def speed_cases(toy: bool, gpu: bool, torch: bool) -> Iterator[harness.Case]:
    """Yields cases without attention dropout, so that all peers can use fused attention.

    Each case also has contestants for variants of hfseq: with XLA's attention, with several
    documents per row, and with attention dropout.
    """
    import training as steps

    options = harness.Options("tiny" if toy else "full", "gpu" if gpu else "cpu", dtypes=None)
    peers = harness.PEERS if torch else ("hfseq",)
    dtype = "float32" if toy else "bfloat16"
    for model, title, rows, length, targets, size in STEPS[:1] if toy else STEPS:
        if toy:
            rows, length, targets, size = 2, 32, targets and 16, options.size(model)
        # T5 has a single dropout rate, so this list is empty.
        weights = [rate for rate in steps.TRAINING_MODELS[model].dropout_keys if "att" in rate]
        case = steps.training_case(
            options,
            model,
            steps.shape_name(title, rows, length, targets, dtype),
            rows,
            length,
            targets,
            dtype,
            peers,
            size | dict.fromkeys(weights, 0.0),
            rounds=1 if toy else 20,
            warmup=1 if toy else 5,
            info={"title": title},
        )
        (ours,) = (contestant for contestant in case.contestants if contestant.name == "hfseq")
        changes: dict[str, dict[str, Any]] = {
            "hfseq, xla": {"attention": "xla"},
            "hfseq, 8 documents per row": {"documents": 8},
            "hfseq, attention dropout": {"size": size},
        }
        if not weights:
            del changes["hfseq, attention dropout"], changes["hfseq, xla"]
        variants = [
            dataclasses.replace(ours, name=name, settings=ours.settings | change)
            for name, change in changes.items()
        ]
        yield dataclasses.replace(case, contestants=(*case.contestants, *variants))


def measure_speed(toy: bool) -> Iterator[dict[str, Any]]:
    """Compares training steps with PyTorch: tokens per second, MFU, peak and planned memory."""
    from hfseq.training import hardware

    platform, device_kind = local_device()
    accelerator = hardware.find_accelerator(device_kind)
    code = "import torch; assert torch.cuda.is_available()"
    torch = toy or not subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
    time_left = harness.TimeBudget(3600 if toy else 0.85 * PARTS["speed"])
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(folder)
        cases = list(speed_cases(toy, platform == "gpu", torch))
        # Measure hfseq and its fastest peer for every model first, then the others if time remains.
        for case, first in ((case, first) for first in (True, False) for case in cases):
            contestants = [
                c
                for c in case.contestants
                if c.name == "hfseq" or (c.name == "torch.compile") == first
            ]
            rows = runner.run_case(
                dataclasses.replace(case, contestants=tuple(contestants)), time_left
            )
            flops = next((r.info["model_flops"] for r in rows if "model_flops" in r.info), None)
            for row in rows:
                if row.name == "hfseq" and not first:
                    continue  # the first run has this row
                summary = harness.summarize(row, case, rows, {})
                yield (
                    suite_row(summary)
                    | case.info
                    | {
                        "mfu": flops / row.median / accelerator.peak_flops(2)
                        if accelerator and flops and row.median
                        else None,
                        "planned_gb": row.info.get("planned_bytes", 0) / harness.GB or None,
                    }
                )


def make_runner(folder: str, suite_time: float | None = None) -> harness.Runner:
    """Returns a runner for cases.

    On a GPU, the contestants of a case start at the same time. On a TPU this is impossible, because
    only one process can use it.
    """
    return harness.Runner(
        len(os.sched_getaffinity(0)),
        Path(folder),
        suite_time=suite_time,
        start_together=local_device()[0] == "gpu",
    )


def suite_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of a harness record that are stored in the results.

    If the measurement failed, the entry ``failed`` contains a message.
    """
    keys = ("name", "case", "status", "median_seconds", "rate", "ratio", "peak_memory_gb")
    record = {key: row[key] for key in keys}
    if row["values"]:
        record["loss"] = row["values"][-1].get("loss")
    failed = row["status"].startswith("failed")
    return record | ({"failed": f"{row['case']}: {row['name']} {row['status']}"} if failed else {})


def measure_fp8(toy: bool) -> Iterator[dict[str, Any]]:
    """Compares FP8 recipes with bfloat16: speed and losses. Requires FP8 units."""
    import fp8 as recipes

    from hfseq.training import hardware

    accelerator = hardware.find_accelerator(local_device()[1])
    if not toy and (
        accelerator is None or not accelerator.fp8_flops or accelerator.name.startswith("tpu")
    ):
        yield {"refused": "no FP8 units that these recipes use"}
        return
    size = "--widths 64 --layers 1 --batch_size 2 --length 32 --vocab_size 200 --rounds 1"
    large = "--widths 4096 --layers 2 --rounds 20"
    options = recipes.parse(["--models", "gpt2", *(size if toy else large).split()])
    runner = make_runner("", suite_time=3600 if toy else 0.85 * PARTS["fp8"])
    for row in runner.run_suite("fp8", recipes.step_cases(options)):
        yield suite_row(row)


#: Flags that may improve the speed, in addition to the recommended ones.
OTHER_FLAGS = (
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_enable_cudnn_layer_norm=true",
    "xla_gpu_deterministic_ops=true",
    "xla_gpu_enable_command_buffer=",
)


def measure_flags(toy: bool) -> Rows:
    """Measures a step of a two-layer GPT-2 with one XLA flag at a time.

    On a GPU, all processes compile at the same time.
    """
    import training as steps

    from hfseq.training import accelerator_flags

    platform, _ = local_device()
    candidate_flags = {
        "gpu": (*accelerator_flags.GPU_FLAGS, *OTHER_FLAGS),
        "tpu": accelerator_flags.TPU_FLAGS,
        "cpu": ("xla_gpu_deterministic_ops=true",),
    }[platform]
    options = harness.Options("tiny" if toy else "full", platform)
    size = options.size("gpt2") if toy else {"n_layer": 2}
    rows, length = (2, 32) if toy else (16, 1024)
    name = "GPT-2, 2 layers"
    case = steps.training_case(
        options,
        "gpt2",
        name,
        rows,
        length,
        0,
        "float32" if toy else "bfloat16",
        ("hfseq",),
        size,
        rounds=2 if toy else 20,
        warmup=2,
    )
    (default_contestant,) = case.contestants
    members = [default_contestant]
    for flag in candidate_flags:
        variable = accelerator_flags.variable_for(flag)
        value = f"{os.environ.get(variable, '')} --{flag}".strip()
        members.append(
            dataclasses.replace(
                default_contestant,
                name=flag,
                environment={variable: value},
                group=name if platform == "gpu" else f"{name}, {flag}",  # one process per TPU
            )
        )
    case = dataclasses.replace(case, contestants=tuple(members), baseline="hfseq")
    time_left = harness.TimeBudget(3600 if toy else 0.85 * PARTS["flags"])
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(folder)
        rows_of_case = runner.run_case(case, time_left)
    records = [suite_row(harness.summarize(row, case, rows_of_case, {})) for row in rows_of_case]
    for row in records[1:]:
        if problem := row.pop("failed", None):  # XLA exits on an unknown flag
            row["refused"] = problem
    return records


# -- all parts


def find_problems(results: dict[str, Any]) -> list[str]:
    """Returns a message per wrong result, failed row and failed part."""
    problems = []
    for part, result in results.items():
        if problem := result.get("problem"):
            problems.append(f"{part}: {problem}")
        for row in result.get("rows", []):
            name = " ".join(str(row[k]) for k in ("implementation", "shape", "model") if k in row)
            if row.get("right") is False:
                problems.append(f"{part}: {name} is wrong: {json.dumps(row)}")
            if "failed" in row:
                problems.append(f"{part}: {name} failed: {row['failed']}")
    return problems


def table(results: dict[str, Any]) -> str:
    """Returns the results as Markdown tables."""
    lines = []
    (device_facts,) = results.get("facts", {}).get("rows") or [{}]
    if device_facts:
        lines += [
            f"{device_facts['count']} x {device_facts['device']}, jax {device_facts['jax']}: "
            f"bfloat16 matmul at {device_facts['tflops']:.1f} TFLOP/s, copy at "
            f"{device_facts['copy_gbs']:.0f} GB/s.",
            "",
        ]
    rows = [row for row in results.get("attention", {}).get("rows", []) if "ms" in row]
    if rows:
        lines += [
            "| attention | visibility | length x width | dtype | error | gradient error | ms |",
            "|---|---|---|---|---:|---:|---:|",
        ]
        lines += [
            f"| {r['implementation']} | {r['shape']} | {r['length']} x {r['width']} | {r['dtype']} "
            f"| {r['error']:.1e} | {r['gradient_error']:.1e} | {r['ms']:.2f} |"
            for r in rows
        ] + [""]
    rows = [r for r in results.get("training", {}).get("rows", []) if "against_cpu" in r]
    if rows:
        lines += [
            "| training | dropout | losses against the CPU | in bfloat16 | repeated, resumed |",
            "|---|---:|---:|---:|---|",
        ]
        lines += [
            f"| {r['model']} | {r['dropout']:g} | {r['against_cpu']:.1e} | "
            f"{r['half_against_cpu']:.1e} | {equal(r['repeated_equal'])}, "
            f"{equal(r['resumed_equal'])} |"
            for r in rows
        ] + [""]
    rows = [r for r in results.get("speed", {}).get("rows", []) if r.get("rate")]
    if rows:
        lines += [
            "| training step | contestant | tokens/s | MFU | peak GB | planned GB | published |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['case']} | {r['name']} | {r['rate']:,.0f} | {format_value(r['mfu'], '.1%')} | "
            f"{format_value(r['peak_memory_gb'], '.2f')} | "
            f"{format_value(r['planned_gb'], '.2f')} | "
            f"{PUBLISHED.get(r['title'], '–')} |"
            for r in rows
        ] + [""]
    for part, first in (("fp8", "recipe"), ("flags", "flag")):
        rows = [r for r in results.get(part, {}).get("rows", []) if r.get("rate")]
        if rows:
            lines += [
                f"| {first} | model | tokens/s | relative speed | last loss |",
                "|---|---|---:|---:|---:|",
            ]
            lines += [
                f"| {r['name']} | {r['case']} | {r['rate']:,.0f} | "
                f"{format_value(r['ratio'], '.2f')} | {format_value(r.get('loss'), '.4f')} |"
                for r in rows
            ] + [""]
    lines += [f"Missed: {target}." for target in missed_targets(results)]
    return "\n".join(lines).strip()


def equal(value: bool) -> str:
    return "equal" if value else "NOT equal"


def format_value(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def missed_targets(results: dict[str, Any]) -> list[str]:
    """Returns a message per missed speed target.

    Targets are tokens per second on H100 and H200, and the speed relative to torch.compile and to
    XLA's attention.
    """
    (device_facts,) = results.get("facts", {}).get("rows") or [{}]
    rows = [row for row in results.get("speed", {}).get("rows", []) if row.get("rate")]
    missed = []
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {row["name"]: row["rate"] for row in rows if row["case"] == case}
        title = next(row["title"] for row in rows if row["case"] == case)
        ours, target = rates.get("hfseq"), SPEED_TARGETS.get(title)
        if ours is None:
            continue
        if target and ours < target and re.search("H[12]00", device_facts.get("device", "")):
            missed.append(f"{case}: {ours:,.0f} tokens/s of {target:,}")
        for other, minimum in (("torch.compile", 0.9), ("hfseq, xla", 0.97)):
            if other in rates and ours < minimum * rates[other]:
                missed.append(f"{case}: {ours / rates[other]:.2f} times {other}")
    return missed


def local_device() -> tuple[str, str]:
    """Returns the platform and the kind of the first device.

    A separate process determines them, since a device may only support one process at a time.
    """
    code = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if process.returncode:
        raise SystemExit((process.stderr.strip().splitlines() or ["jax could not start"])[-1])
    platform, _, device_kind = process.stdout.strip().splitlines()[-1].partition("|")
    return platform, device_kind


def run_part(part: str, toy: bool, result: dict[str, Any], keep: Callable[[], Any]) -> None:
    """Runs a part in a process and adds its rows to ``result``.

    At the time limit, the process and all its children are killed.

    Args:
        part: Name of the part.
        toy: Whether to use small sizes.
        result: Result of the part. Gets ``rows``, ``seconds`` and, on failure, ``problem``.
        keep: Function that saves the results. Called after each row.
    """
    command = [sys.executable, __file__, "--part", part, *(["--toy"] if toy else [])]
    started, timed_out = time.perf_counter(), threading.Event()
    # With a compilation cache, repeated runs are faster and use the same kernels.
    cache_variables = {
        "JAX_COMPILATION_CACHE_DIR": f"{tempfile.gettempdir()}/hfseq-device-{os.getuid()}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=cache_variables | os.environ,
        ) as process,
    ):

        def end() -> None:
            timed_out.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(PARTS[part], end)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and line.endswith("}\n"):
                result["rows"].append(json.loads(line))
                keep()
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        if timed_out.is_set():
            result["problem"] = f"took more than {PARTS[part]} seconds"
        elif code:
            last = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            result["problem"] = last[:300]
    result["seconds"] = time.perf_counter() - started
    keep()


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts and writes their results. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--toy", action="store_true", help="small sizes, also without an accelerator"
    )
    parser.add_argument("--output", type=Path, help="output folder instead of docs/")
    for name in ("--part", "--losses"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.losses:
        losses(options.losses)
        return 0
    if options.part:
        for row in globals()[f"measure_{options.part}"](options.toy):
            print(json.dumps(row), flush=True)
        return 0
    platform, device = local_device()
    toy = options.toy or platform == "cpu"
    if toy and not options.toy:
        print(
            "no accelerator found: running with toy sizes, whose times are not meaningful",
            flush=True,
        )
    device_name = re.sub(r"\W+", "_", device.lower()).strip("_")
    docs = options.output or (Path(tempfile.mkdtemp()) if toy else ROOT / "docs")
    path = docs / "benchmarks" / f"device_{device_name}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for part in options.only:
        results[part] = result = {"rows": []}
        run_part(part, toy, result, functools.partial(harness.write_json, path, results))
        summary = f"{part}: {len(result['rows'])} rows in {result['seconds']:.0f} s"
        print(summary, flush=True)
    tables, problems = table(results), find_problems(results)
    if tables:
        harness.write_section(docs / "benchmarks.md", f"device_{device_name}", tables)
    print(f"\n{tables}\n\nwritten to {path}", *problems, sep="\n", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
