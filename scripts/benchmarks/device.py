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


def attention(toy: bool) -> Iterator[dict[str, Any]]:
    """Every implementation of this platform against the explicit form in float32.

    Short rows first: what there is no time for is said.
    """
    lengths, widths = ((64,), (16,)) if toy else ((512, 2048, 8192), (64, 128))
    time_left = harness.Allowance(3600 if toy else 0.85 * PARTS["attention"])
    for length, width, dtype, name in itertools.product(lengths, widths, LIMITS, SHAPES):
        if dtype == "float32" and length > 512:
            continue
        if time_left.left() > 0:
            yield from attention_case(length, width, dtype, name, rounds=1 if toy else 10)
        else:
            yield {"shape": name, "length": length, "width": width, "dtype": dtype,
                   "not_run": "no time was left"}  # fmt: skip


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
    candidates = (*ORDER.get(platform(), XLA)[:-1], EXPLICIT)
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


MODELS = {
    "roberta": ("mlm", "hidden_size=64,num_hidden_layers=2,num_attention_heads=2,"
                "intermediate_size=128,max_position_embeddings=130"),
    "gpt2": ("clm", "n_embd=64,n_layer=2,n_head=2,n_positions=128"),
}  # fmt: skip


#: Products of float32 as a CPU has them, and sums always in the same order.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
ALWAYS_ALIKE = "--xla_gpu_deterministic_ops=true"


def training(toy: bool) -> Iterator[dict[str, Any]]:
    """Losses of small models here and on the CPU, with and without dropout; a resumed run."""
    from hfseq.training import accelerator_flags

    given = os.environ.get("XLA_FLAGS", "")
    given += f" {ALWAYS_ALIKE}" if accelerator_flags.here() == "cuda" else ""
    for model, rate in itertools.product(list(MODELS)[: 1 if toy else None], (0.0, 0.1)):
        row: dict[str, Any] = {"model": model, "dropout": rate}
        told = json.dumps({"model": model, "rate": rate, "steps": 4 if toy else 20})
        found = []
        for platform in (None, "cpu"):
            environment = os.environ | EXACT | {"XLA_FLAGS": given}
            environment |= {"JAX_PLATFORMS": platform} if platform else {}
            command = [sys.executable, __file__, "--losses", told]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                row["failed"] = (done.stderr.strip().splitlines() or ["?"])[-1][:200]
                break
            found.append(json.loads(done.stdout.splitlines()[-1]))
        else:
            (whole, resumed), (cpu, _) = found
            far = [abs(a - b) for a, b in zip(whole, cpu, strict=True)]
            row["against_cpu"] = next((x for x in far if x != x), max(far))
            row["resumed_equal"] = resumed == whole
            row["right"] = row["against_cpu"] <= 1e-4 and row["resumed_equal"]
        yield row


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
    from training import SUBJECTS as subjects

    from hfseq.training.arguments import parse
    from hfseq.training.callbacks import StepInfo
    from hfseq.training.run import main

    given = json.loads(told)
    model, steps = given["model"], given["steps"]
    objective, sizes = MODELS[model]
    rates = ",".join(f"{rate}={given['rate']}" for rate in subjects[model].rates)
    found: list[float] = []

    def note(info: StepInfo) -> None:
        assert info.measured is not None
        found.append(float(info.measured["loss"]))

    def train(folder: str, last: int) -> None:
        flags = [
            f"--output_dir={folder}", f"--train_file={text}", f"--tokenizer_name={words}",
            f"--model_type={model}", f"--config_overrides={sizes},{rates}",
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
    return _suite("train", toy, "RoBERTa|GPT-2|T5", 0.75 * PARTS["speed"])


def fp8(toy: bool) -> Rows:
    """FP8 recipes beside bfloat16, where the device has such units."""
    if toy:
        return [{"refused": "a toy run has no FP8 units"}]
    if here()[0] != "gpu":
        return [{"refused": "no FP8 units"}]
    command = [sys.executable, str(ROOT / "scripts/benchmarks/fp8.py"), "--models", "gpt2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--output", folder], capture_output=True, text=True)
        tables = [json.loads(path.read_text()) for path in Path(folder).rglob("*.json")]
    if done.returncode:
        return [{"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}]
    return [row for table in tables for row in table.get("rows", [])]


def _suite(name: str, toy: bool, only: str, seconds: float) -> Rows:
    """Run a suite of run.py for so many seconds; its problems are rows that failed."""
    command = [sys.executable, str(ROOT / "scripts/benchmarks/run.py"), name, "--only", only]
    with tempfile.TemporaryDirectory() as folder:
        command += [
            "--output",
            folder,
            *(["--tiny"] if toy else ["--dtypes", "bfloat16", "--suite_time", f"{seconds:g}"]),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        tables = [json.loads(path.read_text()) for path in Path(folder).rglob("run_*.json")]
    if not tables:
        return [{"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}]
    keys = ("name", "case", "status", "median_seconds", "rate", "ratio", "peak_memory_gb")
    rows = [{key: row.get(key) for key in keys} for table in tables for row in table["rows"]]
    return rows + [{"failed": told} for table in tables for told in table["problems"]]


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
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
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
    shown, problems = table(results), wrong(results)
    if shown:
        harness.write_section(docs / "benchmarks.md", f"device_{kind}", shown)
    print(f"\n{shown}\n\nwritten to {path}", *problems, sep="\n", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
