#!/usr/bin/env python
r"""What a device does with hfseq: is it right, and how fast.

    bash scripts/validate_device.sh                        # all parts, at most nine minutes
    python scripts/benchmarks/device.py --only attention   # one of them
    python scripts/benchmarks/device.py --toy --output try # anywhere, in small

Each part is a process with a time limit of its own. What it found is written at once to
docs/benchmarks/device_KIND.json (or below --output), the table at the end to docs/benchmarks.md.
Exit code 1 where a result is wrong or a part failed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

#: Seconds that each part may take.
PARTS = {"facts": 30, "attention": 120, "training": 120, "speed": 210, "fp8": 60}
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
    driver = ""
    if device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return [{
        "device": device.device_kind, "count": jax.device_count(), "driver": driver,
        "jax": jax.__version__, "client": getattr(device.client, "platform_version", ""),
        "memory_gb": ((device.memory_stats() or {}).get("bytes_limit") or 0) / 1e9,
        "tflops": 2 * size**3 / product / 1e12, "copy_gbs": 2 * y.nbytes / copy / 1e9,
    }]  # fmt: skip


#: What is visible, and how many heads of keys there are to twelve of queries.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (128, 0)},
    "both sides": {"window": (64, 64)}, "lengths": {"lengths": True}, "packed": {"packed": True},
    "packed, grouped": {"packed": True, "causal": True, "kv_heads": 4}, "bias": {"bias": True},
    "holes": {"holes": True}, "dropout": {"packed": True, "rate": 0.1},
}  # fmt: skip


def attention(toy: bool) -> Rows:
    """Every implementation of this platform against the explicit form in float32."""
    lengths, widths = ((64,), (16,)) if toy else ((512, 2048, 8192), (64, 128))
    rows: Rows = []
    for length, width, dtype, name in itertools.product(lengths, widths, LIMITS, SHAPES):
        if dtype == "bfloat16" or length <= 2048:
            rows += attention_case(length, width, dtype, name, rounds=1 if toy else 10)
    return rows


def attention_case(length: int, width: int, dtype: str, name: str, rounds: int) -> Rows:
    """All implementations on one kind of rows."""
    import jax
    import jax.numpy as jnp

    from hfseq import nn
    from hfseq.errors import UsageError
    from hfseq.nn.attention import EXPLICIT, ORDER, XLA
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
    visible = nn.Visible(
        causal=shape.get("causal", False), window=shape.get("window"),
        query_segments=documents.at[0, -length // 9 :].set(0) if "packed" in shape else None,
        max_runs=16 if "packed" in shape else None,
        key_segments=holes if "holes" in shape else None,
        key_lengths=jnp.full(batch, length - 9) if "lengths" in shape else None,
    )  # fmt: skip

    def run(attention: Any, q: Any, k: Any, v: Any, change: Any, *bias: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, *bias: Any) -> Any:
            given = {"bias": bias[0]} if bias else {}
            rngs = nn.make_keys(jax.random.key(1))
            with nn.options(Options(attention=attention)):
                return nn.attend(q, k, v, mask=visible, dropout_rate=rate, rngs=rngs, **given)[0]

        mixed, back = jax.vjp(attend, q, k, v, *bias)
        return mixed, *back(change.astype(mixed.dtype))

    single = [leaf.astype(jnp.float32) for leaf in arrays]
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(run, (EXPLICIT,)))(*single)
    limits = LIMITS["bfloat16" if platform() == "tpu" else dtype]
    rows: Rows = []
    for candidate in (*ORDER.get(platform(), XLA)[:-1], EXPLICIT):
        row = {"implementation": candidate.name, "shape": name, "length": length, "width": width,
               "dtype": dtype}  # fmt: skip
        rows.append(row)
        try:
            program = jax.jit(functools.partial(run, (candidate,))).lower(*arrays).compile()
            found = program(*arrays)
        except UsageError as error:
            row["refused"] = str(error).split("(", 1)[-1].rsplit(");", 1)[0]
            continue
        except Exception as error:  # of the compiler, or memory: the others go on
            row["failed"] = str(error).splitlines()[0][:200]
            continue
        first, *others = (
            float(abs(a.astype(jnp.float32) - b).max() / (abs(b).max() + 1e-9))
            for a, b in zip(found, wanted, strict=True)
        )
        row |= {
            "error": first, "gradient_error": max(others),
            "right": first <= limits[0] and max(others) <= limits[1],
            "ms": timed(functools.partial(program, *arrays), 2, rounds) * 1e3,
            "temporary_mb": program.memory_analysis().temp_size_in_bytes / 1e6,
        }  # fmt: skip
    return rows


MODELS = {
    "roberta": ("mlm", "attention_probs_dropout_prob", "hidden_size=64,num_hidden_layers=2,"
                "num_attention_heads=2,intermediate_size=128,max_position_embeddings=130"),
    "gpt2": ("clm", "attn_pdrop", "n_embd=64,n_layer=2,n_head=2,n_positions=128"),
}  # fmt: skip


def training(toy: bool) -> Rows:
    """Losses of small models here and on the CPU, with and without dropout; a resumed run."""
    rows: Rows = []
    for model, rate in itertools.product(list(MODELS)[: 1 if toy else None], (0.0, 0.1)):
        row: dict[str, Any] = {"model": model, "dropout": rate}
        rows.append(row)
        told = json.dumps({"model": model, "rate": rate, "steps": 4 if toy else 20})
        found = []
        for platform in (None, "cpu"):
            environment = os.environ | ({"JAX_PLATFORMS": platform} if platform else {})
            command = [sys.executable, __file__, "--losses", told]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                row["failed"] = (done.stderr.strip().splitlines() or ["?"])[-1][:200]
                break
            found.append(json.loads(done.stdout.splitlines()[-1]))
        else:
            (whole, resumed), (cpu, _) = found
            row["against_cpu"] = max(abs(a - b) for a, b in zip(whole, cpu, strict=True))
            row["resumed_equal"] = resumed == whole
            row["right"] = row["against_cpu"] <= 1e-4 and row["resumed_equal"]
    return rows


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the numbers below 977."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {f"{role}_token": f"<{role}>" for role in ("bos", "pad", "eos", "unk", "mask")}
    words = [*special.values(), *map(str, range(977))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def losses(told: str) -> None:
    """Print the losses of a small run, and of the same one ended and resumed half way."""
    from hfseq.training.arguments import parse
    from hfseq.training.callbacks import StepInfo
    from hfseq.training.run import main

    given = json.loads(told)
    model, steps = given["model"], given["steps"]
    objective, flag, sizes = MODELS[model]
    found: list[float] = []

    def note(info: StepInfo) -> None:
        assert info.measured is not None
        found.append(float(info.measured["loss"]))

    def train(folder: str, last: int) -> None:
        flags = [
            f"--output_dir={folder}", f"--train_file={text}", f"--tokenizer_name={words}",
            f"--model_type={model}", f"--config_overrides={sizes},{flag}={given['rate']}",
            f"--{'max_seq_length' if objective == 'mlm' else 'block_size'}=128",
            "--per_device_train_batch_size=4", f"--max_steps={last}", "--do_train",
            f"--save_steps={steps // 2}", "--report_to=none", "--lr_scheduler_type=constant",
        ]  # fmt: skip
        main(parse(flags, objective=objective), objective, callbacks=[note])

    with tempfile.TemporaryDirectory() as root:
        text = Path(root, "text.txt")
        lines = (" ".join(str(n * m % 977) for m in range(1, 30)) for n in range(1, 300))
        text.write_text("\n".join(lines), encoding="utf-8")
        words = Path(root, "tokenizer")
        save_tokenizer(words)
        train(f"{root}/whole", steps)
        whole = found.copy()
        found.clear()
        train(f"{root}/parts", steps // 2)
        train(f"{root}/parts", steps)
    print(json.dumps([whole, found]))


def speed(toy: bool) -> Rows:
    """Training steps beside torch.compile: the benchmark's own suite, as JSON."""
    return _suite("train", toy, "RoBERTa|GPT-2|T5")


def fp8(toy: bool) -> Rows:
    """FP8 recipes beside bfloat16, where the device has such units."""
    import jax

    if jax.devices()[0].platform != "gpu" and not toy:
        return [{"refused": "no FP8 units"}]
    if toy:
        return [{"refused": "a toy run has no FP8 units"}]
    command = [sys.executable, str(ROOT / "scripts/benchmarks/fp8.py"), "--models", "gpt2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--output", folder], capture_output=True, text=True)
        tables = [json.loads(path.read_text()) for path in Path(folder).rglob("*.json")]
    if done.returncode:
        return [{"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}]
    return [row for table in tables for row in table.get("rows", [])]


def _suite(name: str, toy: bool, only: str) -> Rows:
    command = [sys.executable, str(ROOT / "scripts/benchmarks/run.py"), name, "--only", only]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--output", folder, *(["--tiny"] if toy else ["--dtypes", "bfloat16"])]
        done = subprocess.run(command, capture_output=True, text=True)
        tables = [json.loads(path.read_text()) for path in Path(folder).rglob("run_*.json")]
    if not tables:
        return [{"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}]
    keys = ("name", "case", "status", "median_seconds", "rate", "ratio", "peak_memory_gb")
    return [{key: row.get(key) for key in keys} for table in tables for row in table["rows"]]


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
            f"{fact['tflops']:.1f} TFLOP/s, a copy at {fact['copy_gbs']:.0f} GB/s.", "",
        ]  # fmt: skip
    rows = [row for row in results.get("attention", {}).get("rows", []) if "ms" in row]
    if rows:
        lines += ["| attention | visible | length x width | type | error | of gradients | ms |",
                  "|---|---|---|---|---:|---:|---:|"]  # fmt: skip
        lines += [
            f"| {r['implementation']} | {r['shape']} | {r['length']} x {r['width']} | {r['dtype']} "
            f"| {r['error']:.1e} | {r['gradient_error']:.1e} | {r['ms']:.2f} |" for r in rows
        ] + [""]  # fmt: skip
    rows = [r for r in results.get("training", {}).get("rows", []) if "against_cpu" in r]
    if rows:
        lines += ["| training | dropout | losses against the CPU | resumed equal |",
                  "|---|---:|---:|---|"]  # fmt: skip
        lines += [
            f"| {r['model']} | {r['dropout']:g} | {r['against_cpu']:.1e} | "
            f"{'yes' if r['resumed_equal'] else 'no'} |" for r in rows
        ] + [""]  # fmt: skip
    rows = [r for r in results.get("speed", {}).get("rows", []) if r.get("rate")]
    if rows:
        lines += ["| training | who | tokens/s | memory |", "|---|---|---:|---:|"]
        lines += [
            f"| {r['case']} | {r['name']} | {r['rate']:,.0f} | {r['peak_memory_gb'] or 0:.2f} GB |"
            for r in rows
        ]  # fmt: skip
    return "\n".join(lines).strip()


def main(given: list[str] | None = None) -> int:
    """Run the parts, each in a process, and write what they found."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                      help=", ".join(PARTS))  # fmt: skip
    made.add_argument("--toy", action="store_true", help="small, also without a device")
    made.add_argument("--output", type=Path, help="a folder instead of docs/")
    for name in ("--part", "--losses"):
        made.add_argument(name, help=argparse.SUPPRESS)
    options = made.parse_args(given)
    if options.losses:
        losses(options.losses)
        return 0
    if options.part:
        print(json.dumps(globals()[options.part](options.toy)))
        return 0
    import jax

    toy = options.toy or jax.devices()[0].platform == "cpu"
    if toy and not options.toy:
        print("no accelerator is here: a toy run, whose numbers mean nothing", flush=True)
    kind = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower()).strip("_")
    docs = options.output or (Path(tempfile.mkdtemp()) if toy else ROOT / "docs")
    path, results = docs / "benchmarks" / f"device_{kind}.json", {}
    for part in options.only:
        started = time.perf_counter()
        command = [sys.executable, __file__, "--part", part, *(["--toy"] if toy else [])]
        results[part] = result = {"rows": []}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS[part])
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                result["problem"] = last[:300]
            else:
                result["rows"] = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            result["problem"] = f"took more than {PARTS[part]} seconds"
        result["seconds"] = time.perf_counter() - started
        harness.write_json(path, results)
        print(f"{part}: {len(result['rows'])} rows in {result['seconds']:.0f} s", flush=True)
    shown, problems = table(results), wrong(results)
    if shown:
        harness.write_section(docs / "benchmarks.md", f"device_{kind}", shown)
    print(f"\n{shown}\n\nwritten to {path}", *problems, sep="\n", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
