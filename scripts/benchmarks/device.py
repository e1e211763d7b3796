#!/usr/bin/env python
r"""What a device does with hfseq: is it right, and how fast.

    bash scripts/validate_device.sh                        # all parts, at most nine minutes
    python scripts/benchmarks/device.py --only attention   # one of them
    python scripts/benchmarks/device.py --toy --output try # anywhere, in small

Each part is a process with a time limit of its own, and no other holds the device meanwhile. Each
row is written at once to docs/benchmarks/device_KIND.json (or below --output), beside what other
parts found before, the table at the end to docs/benchmarks.md. Exit code 1 where a result is wrong
or a part failed.
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

#: Seconds that each part may take.
PARTS = {"facts": 20, "attention": 100, "training": 120, "speed": 200, "fp8": 60, "flags": 40}
ROOT = Path(__file__).resolve().parents[2]
#: Largest errors relative to the largest number of the reference: outputs, then gradients.
LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (2e-2, 4e-2)}
Rows = list[dict[str, Any]]


def timed(call: Callable[[], Any], warmup: int = 3, rounds: int = 10) -> float:
    """Return the median seconds of a call that is waited for."""
    import jax

    seconds = []
    for number in range(-warmup, rounds):
        started = time.perf_counter()
        jax.block_until_ready(call())
        if number >= 0:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def facts(toy: bool) -> Rows:
    """The device, and the rates of a large product and of a copy."""
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


#: What is visible, and how many heads of keys there are to twelve of queries.
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
#: Lengths that kernels are not made for.
UNEVEN = [
    (length, 64, "bfloat16", name) for length in (510, 509) for name in ("plain", "packed", "bias")
]


def attention(toy: bool) -> Iterator[dict[str, Any]]:
    """Every implementation of this platform against the explicit form in float32.

    Short rows first: what there is no time for is said.
    """
    lengths, widths = ((64,), (16,)) if toy else ((512, 2048, 8192), (64, 128))
    time_left = harness.Allowance(3600 if toy else 0.85 * PARTS["attention"])
    cases = [
        (length, width, dtype, name)
        for length, width, dtype, name in itertools.product(lengths, widths, LIMITS, SHAPES)
        if dtype != "float32" or length <= 512
    ]
    first = sum(length <= 512 for length, *_ in cases)
    cases[first:first] = [(67, 16, *case[2:]) for case in UNEVEN[:2]] if toy else UNEVEN
    for length, width, dtype, name in cases:
        if time_left.left() > 0:
            yield from attention_case(length, width, dtype, name, rounds=1 if toy else 10)
        else:
            yield {
                "shape": name,
                "length": length,
                "width": width,
                "dtype": dtype,
                "not_run": "no time was left",
            }


def attention_case(length: int, width: int, dtype: str, name: str, rounds: int) -> Rows:
    """All implementations on one kind of rows."""
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
            given = {"bias": bias[0]} if bias else {}
            rngs = nn.make_keys(jax.random.key(1))
            with nn.options(Options(attention=attention)):
                return nn.attend(q, k, v, mask=visible, dropout_rate=rate, rngs=rngs, **given)[0]

        mixed, back = jax.vjp(attend, q, k, v, *bias)
        return mixed, *back(change.astype(mixed.dtype))

    single = [leaf.astype(jnp.float32) for leaf in arrays]
    candidates = (*IMPLEMENTATIONS_BY_PLATFORM.get(platform(), XLA)[:-1], EXPLICIT)
    # By default GPUs multiply float32 in TF32, which is off by more than the limit.
    exact = "highest" if dtype == "float32" and platform() == "cuda" else None

    def compiled(job: tuple[Any, Any, str | None]) -> Any:
        """Return the program, or why there is none; compilers work beside each other."""
        implementation, given, precision = job
        try:
            with jax.default_matmul_precision(precision):
                return jax.jit(functools.partial(run, (implementation,))).lower(*given).compile()
        except Exception as error:
            return error

    jobs = [(EXPLICIT, single, "highest"), *((one, arrays, exact) for one in candidates)]
    with ThreadPoolExecutor() as pool:
        reference, *programs = pool.map(compiled, jobs)
    limits = LIMITS["bfloat16" if platform() == "tpu" else dtype]
    case = {"shape": name, "length": length, "width": width, "dtype": dtype}
    try:
        if isinstance(reference, Exception):
            raise reference
        wanted = reference(*single)
    except Exception as error:  # of the compiler, or memory
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
                for a, b in zip(program(*arrays), wanted, strict=True)
            ]
            milliseconds = timed(functools.partial(program, *arrays), 2, rounds) * 1e3
        except UsageError as error:
            row["refused"] = str(error).split("(", 1)[-1].rsplit(");", 1)[0]
            continue
        except Exception as error:
            row["failed"] = str(error).splitlines()[0][:200]
            continue
        row |= judged(errors, limits) | {
            "ms": milliseconds,
            "temporary_mb": program.memory_analysis().temp_size_in_bytes / 1e6,
        }
    return rows


def judged(errors: list[float], limits: tuple[float, float]) -> dict[str, Any]:
    """Say whether the errors of the output and of all gradients are within their limits.

    One that is no number is not, wherever it stands: ``max`` would pass over it.
    """
    first, *others = errors
    right = first <= limits[0] and all(error <= limits[1] for error in others)
    worst = next((error for error in others if error != error), max(others))
    return {"error": first, "gradient_error": worst, "right": right}


_LAYERS = "hidden_size=64,num_hidden_layers=2,intermediate_size=128"
#: A small model of every kind: its objective, the flag of its length, sizes, rates of dropout.
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

#: Products of float32 as a CPU has them, and sums always in the same order.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
ALWAYS_ALIKE = "--xla_gpu_deterministic_ops=true"
#: How far losses may be from the CPU's in float32.
FAR = {"float32": 1e-4, "bfloat16": 2e-2}


def training(toy: bool) -> Iterator[dict[str, Any]]:
    """Losses of small models here and on the CPU, with and without dropout; repeated and resumed.

    Several at a time on a GPU; a TPU has one holder.
    """
    from hfseq.training import accelerator_flags

    kind = accelerator_flags.local_accelerator()
    given = os.environ.get("XLA_FLAGS", "") + (f" {ALWAYS_ALIKE}" if kind == "cuda" else "")
    environment = (
        os.environ
        | EXACT
        | {
            "XLA_FLAGS": given,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
    )
    time_left = harness.Allowance(3600 if toy else 0.7 * PARTS["training"])

    def child(told: dict[str, Any], **more: str) -> dict[str, list[float]]:
        command = [sys.executable, __file__, "--losses", json.dumps(told)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | more)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["?"])[-1][:200])
        return json.loads(done.stdout.splitlines()[-1])

    def row(model: str, rate: float) -> dict[str, Any]:
        row: dict[str, Any] = {"model": model, "dropout": rate}
        if time_left.left() <= 0:
            return row | {"not_run": "no time was left"}
        told = {"model": model, "rate": rate, "steps": 4 if toy else 20}
        try:
            found = child(told | {"whole_only": False})
            cpu = child(told | {"whole_only": True}, JAX_PLATFORMS="cpu")["whole"]
        except RuntimeError as error:
            return row | {"failed": str(error)}
        return row | compared_losses(found, cpu)

    jobs = list(itertools.product(list(MODELS)[: 2 if toy else None], (0.0, 0.1)))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1) if kind == "cuda" else 1) as pool:
        yield from pool.map(lambda job: row(*job), jobs)


def compared_losses(found: dict[str, list[float]], cpu: list[float]) -> dict[str, Any]:
    """Compare a run with the CPU's, with itself in half precision, repeated, and resumed."""

    def farthest(losses: list[float]) -> float:
        far = [abs(a - b) / max(abs(b), 1.0) for a, b in zip(losses, cpu, strict=True)]
        return next((x for x in far if x != x), max(far))

    whole = found["whole"]
    told = {
        "against_cpu": farthest(whole),
        "half_against_cpu": farthest(found["half"]),
        "repeated_equal": found["again"] == whole,
        "resumed_equal": found["resumed"] == whole,
    }
    right = told["against_cpu"] <= FAR["float32"] and told["half_against_cpu"] <= FAR["bfloat16"]
    return told | {"right": right and told["repeated_equal"] and told["resumed_equal"]}


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the numbers below 977."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {f"{role}_token": f"<{role}>" for role in ("bos", "pad", "eos", "unk", "mask")}
    words = [*special.values(), *map(str, range(977)), *(f"<extra_id_{n}>" for n in range(50))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def losses(told: str) -> None:
    """Print the losses of a small run; repeated, ended and resumed half way, in half precision."""
    from hfseq.training.arguments import parse
    from hfseq.training.callbacks import StepInfo
    from hfseq.training.run import main

    given = json.loads(told)
    model, steps = given["model"], given["steps"]
    objective, length, sizes, rates = MODELS[model]
    dropped = ",".join(f"{rate}={given['rate']}" for rate in rates)
    found: list[float] = []

    def note(info: StepInfo) -> None:
        assert info.step_metrics is not None
        found.append(float(info.step_metrics["loss"]))

    def train(folder: str, last: int, precision: str = "float32") -> list[float]:
        flags = [
            f"--output_dir={root}/{folder}",
            f"--train_file={text}",
            f"--tokenizer_name={words}",
            f"--model_type={model}",
            f"--config_overrides={sizes},{dropped}",
            f"--{length}=128",
            "--per_device_train_batch_size=4",
            f"--max_steps={last}",
            "--do_train",
            f"--save_steps={steps // 2}",
            "--report_to=none",
            "--lr_scheduler_type=constant",
            f"--precision={precision}",
        ]
        found.clear()
        main(parse(flags, objective=objective), objective, callbacks=[note])
        return found.copy()

    with tempfile.TemporaryDirectory() as root:
        text = Path(root, "text.txt")
        lines = (" ".join(str(n * m % 977) for m in range(1, 30)) for n in range(1, 300))
        text.write_text("\n".join(lines), encoding="utf-8")
        words = Path(root, "tokenizer")
        save_tokenizer(words)
        made = {"whole": train("whole", steps)}
        if not given["whole_only"]:
            made["again"] = train("again", steps)
            made["half"] = train("half", steps, "bfloat16")
            made["resumed"] = train("parts", steps // 2) + train("parts", steps)
    print(json.dumps(made))


_T5_BASE = {
    "d_model": 768,
    "d_ff": 3072,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_heads": 12,
}
#: Model, title, rows on an H200, length, length of targets, size.
STEPS: tuple[tuple[str, str, int, int, int, dict[str, Any]], ...] = (
    ("roberta", "RoBERTa-base", 32, 512, 0, {}),
    ("gpt2", "GPT-2 124M", 16, 1024, 0, {}),
    ("t5", "T5-base", 32, 512, 114, _T5_BASE),
    ("modernbert", "ModernBERT-base", 16, 1024, 0, {}),
    ("modernbert", "ModernBERT-base", 2, 8192, 0, {}),
)
#: What others say they reach, tokens a second; not measured here, nor checked.
PUBLISHED = {"GPT-2 124M": "468,000 (llm.c, H100)", "ModernBERT-base": "304,000 (H100)"}
#: Tokens a second of one H100 or H200.
AIMS = {"GPT-2 124M": 350_000}


def speed_cases(toy: bool, gpu: bool, torch: bool) -> Iterator[harness.Case]:
    """Steps without dropout of attention weights, which all can fuse; documents; and with it."""
    import training as steps

    options = harness.Options("tiny" if toy else "full", "gpu" if gpu else "cpu", dtypes=None)
    peers = harness.PEERS if torch else ("hfseq",)
    dtype = "float32" if toy else "bfloat16"
    for model, title, rows, length, targets, size in STEPS[:1] if toy else STEPS:
        if toy:
            rows, length, targets, size = 2, 32, targets and 16, options.size(model)
        # T5 has one rate for everything.
        weights = [rate for rate in steps.SUBJECTS[model].rates if "att" in rate]
        case = steps.case_of(
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
            facts={"title": title},
        )
        (ours,) = (one for one in case.contestants if one.name == "hfseq")
        changes: dict[str, dict[str, Any]] = {
            "hfseq, xla": {"attention": "xla"},
            "hfseq, 8 documents a row": {"documents": 8},
            "hfseq, weights dropped": {"size": size},
        }
        if not weights:
            del changes["hfseq, weights dropped"], changes["hfseq, xla"]
        more = [
            dataclasses.replace(ours, name=name, settings=ours.settings | change)
            for name, change in changes.items()
        ]
        yield dataclasses.replace(case, contestants=(*case.contestants, *more))


def speed(toy: bool) -> Iterator[dict[str, Any]]:
    """Training steps beside PyTorch: tokens a second, MFU, memory and what the compiler said."""
    from hfseq.training import hardware

    platform, kind = here()
    known = hardware.find_accelerator(kind)
    ask = "import torch; assert torch.cuda.is_available()"
    torch = toy or not subprocess.run([sys.executable, "-c", ask], capture_output=True).returncode
    time_left = harness.Allowance(3600 if toy else 0.85 * PARTS["speed"])
    with tempfile.TemporaryDirectory() as folder:
        runner = harness.Runner(len(os.sched_getaffinity(0)), Path(folder))
        for case in speed_cases(toy, platform == "gpu", torch):
            rows = runner.rows(case, time_left)
            flops = next((r.facts["model_flops"] for r in rows if "model_flops" in r.facts), None)
            for row in rows:
                told = harness.summary(row, case, rows, {})
                yield (
                    suite_row(told)
                    | case.facts
                    | {
                        "mfu": flops / row.median / known.peak_flops(2)
                        if known and flops and row.median
                        else None,
                        "planned_gb": row.facts.get("planned_bytes", 0) / harness.GB or None,
                    }
                )


def suite_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a row of the harness; one that failed says so."""
    keys = ("name", "case", "status", "median_seconds", "rate", "ratio", "peak_memory_gb")
    kept = {key: row[key] for key in keys}
    if row["values"]:
        kept["loss"] = row["values"][-1].get("loss")
    failed = row["status"].startswith("failed")
    return kept | ({"failed": f"{row['case']}: {row['name']} {row['status']}"} if failed else {})


def fp8(toy: bool) -> Iterator[dict[str, Any]]:
    """FP8 recipes beside bfloat16, where the device has such units: tokens a second and losses."""
    import fp8 as recipes

    from hfseq.training import hardware

    known = hardware.find_accelerator(here()[1])
    if not toy and (known is None or not known.fp8_flops or known.name.startswith("tpu")):
        yield {"refused": "no FP8 units that these recipes use"}
        return
    size = "--widths 64 --layers 1 --batch_size 2 --length 32 --vocab_size 200 --rounds 1"
    large = "--widths 4096 --layers 2 --rounds 20"
    options = recipes.parse(["--models", "gpt2", *(size if toy else large).split()])
    runner = harness.Runner(
        len(os.sched_getaffinity(0)), Path(), suite_time=3600 if toy else 0.85 * PARTS["fp8"]
    )
    for row in runner.suite("fp8", recipes.step_cases(options)):
        yield suite_row(row)


#: Beside those that are recommended: what else the binaries know and may pay.
OTHER_FLAGS = (
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_enable_cudnn_layer_norm=true",
    "xla_gpu_deterministic_ops=true",
    "xla_gpu_enable_command_buffer=",
)


def flags(toy: bool) -> Rows:
    """GPT-2's step with one flag at a time; two layers, all processes compile at once."""
    import training as steps

    from hfseq.training import accelerator_flags

    platform, _ = here()
    tried = {
        "gpu": (*accelerator_flags.GPU_FLAGS, *OTHER_FLAGS),
        "tpu": accelerator_flags.TPU_FLAGS,
        "cpu": ("xla_gpu_deterministic_ops=true",),
    }[platform]
    options = harness.Options("tiny" if toy else "full", platform)
    size = options.size("gpt2") if toy else {"n_layer": 2}
    rows, length = (2, 32) if toy else (16, 1024)
    name = "GPT-2, 2 layers"
    case = steps.case_of(
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
    (plain,) = case.contestants
    members = [plain]
    for flag in tried:
        variable = accelerator_flags.variable_for(flag)
        value = f"{os.environ.get(variable, '')} --{flag}".strip()
        members.append(
            dataclasses.replace(
                plain,
                name=flag,
                environment={variable: value},
                group=name if platform == "gpu" else f"{name}, {flag}",  # a TPU has one holder
            )
        )
    case = dataclasses.replace(case, contestants=tuple(members), baseline="hfseq")
    time_left = harness.Allowance(3600 if toy else 0.85 * PARTS["flags"])
    with tempfile.TemporaryDirectory() as folder:
        runner = harness.Runner(len(os.sched_getaffinity(0)), Path(folder))
        found = runner.rows(case, time_left)
    told = [suite_row(harness.summary(row, case, found, {})) for row in found]
    for row in told[1:]:
        if problem := row.pop("failed", None):  # XLA ends at a flag that it does not know
            row["refused"] = problem
    return told


# -- all parts


def wrong(results: dict[str, Any]) -> list[str]:
    """Say what is not right, and what failed."""
    found = []
    for part, result in results.items():
        if problem := result.get("problem"):
            found.append(f"{part}: {problem}")
        for row in result.get("rows", []):
            name = " ".join(str(row[k]) for k in ("implementation", "shape", "model") if k in row)
            if row.get("right") is False:
                found.append(f"{part}: {name} is wrong: {json.dumps(row)}")
            if "failed" in row:
                found.append(f"{part}: {name} failed: {row['failed']}")
    return found


def table(results: dict[str, Any]) -> str:
    """Return what was found as Markdown."""
    lines = []
    (fact,) = results.get("facts", {}).get("rows") or [{}]
    if fact:
        lines += [
            f"{fact['count']} x {fact['device']}, jax {fact['jax']}: a product of bfloat16 at "
            f"{fact['tflops']:.1f} TFLOP/s, a copy at {fact['copy_gbs']:.0f} GB/s.",
            "",
        ]
    rows = [row for row in results.get("attention", {}).get("rows", []) if "ms" in row]
    if rows:
        lines += [
            "| attention | visible | length x width | type | error | of gradients | ms |",
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
            "| training step | who | tokens/s | MFU | GB | as compiled | published |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['case']} | {r['name']} | {r['rate']:,.0f} | {shown(r['mfu'], '.1%')} | "
            f"{shown(r['peak_memory_gb'], '.2f')} | {shown(r['planned_gb'], '.2f')} | "
            f"{PUBLISHED.get(r['title'], '–')} |"
            for r in rows
        ] + [""]
    for part, first in (("fp8", "recipe"), ("flags", "flag")):
        rows = [r for r in results.get(part, {}).get("rows", []) if r.get("rate")]
        if rows:
            lines += [
                f"| {first} | of | tokens/s | times the first | last loss |",
                "|---|---|---:|---:|---:|",
            ]
            lines += [
                f"| {r['name']} | {r['case']} | {r['rate']:,.0f} | {shown(r['ratio'], '.2f')} | "
                f"{shown(r.get('loss'), '.4f')} |"
                for r in rows
            ] + [""]
    lines += [f"Missed: {told}." for told in missed(results)]
    return "\n".join(lines).strip()


def equal(value: bool) -> str:
    return "equal" if value else "NOT equal"


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def missed(results: dict[str, Any]) -> list[str]:
    """Say which aims of speed were missed: of H100 and H200, beside torch.compile and XLA."""
    (fact,) = results.get("facts", {}).get("rows") or [{}]
    rows = [row for row in results.get("speed", {}).get("rows", []) if row.get("rate")]
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {row["name"]: row["rate"] for row in rows if row["case"] == case}
        title = next(row["title"] for row in rows if row["case"] == case)
        ours, aim = rates.get("hfseq"), AIMS.get(title)
        if ours is None:
            continue
        if aim and ours < aim and re.search("H[12]00", fact.get("device", "")):
            found.append(f"{case}: {ours:,.0f} tokens/s of {aim:,}")
        for other, least in (("torch.compile", 0.9), ("hfseq, xla", 0.97)):
            if other in rates and ours < least * rates[other]:
                found.append(f"{case}: {ours / rates[other]:.2f} times {other}")
    return found


def here() -> tuple[str, str]:
    """Return platform and kind of the first device; asked elsewhere, as a device has one holder."""
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind, sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["jax does not start"])[-1])
    platform, _, kind = done.stdout.strip().splitlines()[-1].partition("|")
    return platform, kind


def run_part(part: str, toy: bool, result: dict[str, Any], keep: Callable[[], Any]) -> None:
    """Add what a part says to ``result``, kept row by row; its whole family ends with its time."""
    command = [sys.executable, __file__, "--part", part, *(["--toy"] if toy else [])]
    started, over = time.perf_counter(), threading.Event()
    # A program that was compiled once serves again: also, its kernels are then the same ones.
    cached = {
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
            env=cached | os.environ,
        ) as process,
    ):

        def end() -> None:
            over.set()
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
        if over.is_set():
            result["problem"] = f"took more than {PARTS[part]} seconds"
        elif code:
            last = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            result["problem"] = last[:300]
    result["seconds"] = time.perf_counter() - started
    keep()


def main(given: list[str] | None = None) -> int:
    """Run the parts, each in a process, and write what they found."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    made.add_argument("--toy", action="store_true", help="small, also without a device")
    made.add_argument("--output", type=Path, help="a folder instead of docs/")
    for name in ("--part", "--losses"):
        made.add_argument(name, help=argparse.SUPPRESS)
    options = made.parse_args(given)
    if options.losses:
        losses(options.losses)
        return 0
    if options.part:
        for row in globals()[options.part](options.toy):
            print(json.dumps(row), flush=True)
        return 0
    platform, device = here()
    toy = options.toy or platform == "cpu"
    if toy and not options.toy:
        print("no accelerator is here: a toy run, whose numbers mean nothing", flush=True)
    kind = re.sub(r"\W+", "_", device.lower()).strip("_")
    docs = options.output or (Path(tempfile.mkdtemp()) if toy else ROOT / "docs")
    path = docs / "benchmarks" / f"device_{kind}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for part in options.only:
        results[part] = result = {"rows": []}
        run_part(part, toy, result, functools.partial(harness.write_json, path, results))
        told = f"{part}: {len(result['rows'])} rows in {result['seconds']:.0f} s"
        print(told, flush=True)
    tables, problems = table(results), wrong(results)
    if tables:
        harness.write_section(docs / "benchmarks.md", f"device_{kind}", tables)
    print(f"\n{tables}\n\nwritten to {path}", *problems, sep="\n", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
