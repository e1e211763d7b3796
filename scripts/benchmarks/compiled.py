"""The suite compile of run.py: training steps compiled for accelerators that are not present."""

from __future__ import annotations

import re
from typing import Any

import harness
from harness import Case, Contestant, Options, Rows, Suite, Workload

#: Model type, length, rows per device, and the configuration field of the attention dropout rate,
#: which is 0.1 by default.
MODELS = {
    "RoBERTa base, mlm": ("roberta", 512, 8, "attention_probs_dropout_prob"),
    "GPT-2 124M, clm": ("gpt2", 1024, 4, "attn_pdrop"),
    "T5 base, span_mlm": ("t5", 512, 8, "dropout_rate"),
    "BART base, denoising": ("bart", 512, 8, "attention_dropout"),
}
SIZES = {
    "roberta": "vocab_size=50265,max_position_embeddings=514",
    "gpt2": "",
    "t5": "d_model=768,d_kv=64,d_ff=3072,num_layers=12,num_heads=12",
    "bart": "d_model=768,encoder_layers=6,decoder_layers=6,encoder_attention_heads=12,"
    "decoder_attention_heads=12,encoder_ffn_dim=3072,decoder_ffn_dim=3072",
}
TINY = {
    "roberta": "hidden_size=128,num_hidden_layers=2,num_attention_heads=2,intermediate_size=256,"
    "max_position_embeddings=514",
    "gpt2": "n_embd=128,n_layer=2,n_head=2",
    "t5": "d_model=128,d_kv=64,d_ff=256,num_layers=2,num_heads=2",
    "bart": "d_model=128,encoder_layers=2,decoder_layers=2,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=256,decoder_ffn_dim=256",
}
TARGETS = {
    "H200": ("h200", 1, "jax_plugins"),
    "8 x H200": ("h200", 8, "jax_plugins"),
    "v5e 2x2": ("tpu-v5e", 4, "libtpu"),
    "v6e 2x2": ("tpu-v6e", 4, "libtpu"),
}


def compile_cases(options: Options) -> list[Case]:
    """Returns a case per model and attention dropout rate."""
    titles = list(MODELS)[:1] if options.profile != "full" else list(MODELS)
    cases = []
    for title in titles:
        model, length, rows, flag = MODELS[title]
        for rate in (0.1, 0.0):
            name = f"{title}, attention dropout {rate:g}"
            settings = {
                "model": model,
                "length": length,
                "rows": rows,
                "rate": f"{flag}={rate}",
                "sizes": (SIZES if options.profile == "full" else TINY)[model],
            }
            members = tuple(
                Contestant(
                    label,
                    name,
                    "compiled:program",
                    settings | {"target": target, "count": count},
                    (*harness.HFSEQ, package),
                    {"JAX_PLATFORMS": "cpu"},
                )
                for label, (target, count, package) in TARGETS.items()
                # TPUs have no fused attention with dropout.
                if rate == 0 or target == "h200"
            )
            cases.append(Case(name, members, rounds=1, warmup=0))
    return cases


def program(
    model: str, length: int, rows: int, rate: str, sizes: str, target: str, count: int
) -> Workload:
    """Builds a workload that compiles the step of the training loop.

    The compilation for TPUs uses few optimizations, because a full compilation takes minutes.
    """
    from hfseq.cli.plan.options import Options as Plan
    from hfseq.cli.plan.run import abstract_batch, build
    from hfseq.nn.context import RowGuarantees
    from hfseq.training import aot, collectives

    devices = aot.describe(target, count)

    def step() -> dict[str, Any]:
        tpu = target.startswith("tpu")
        overrides = ",".join(filter(None, (sizes, rate)))
        plan = Plan(
            config=model,
            devices=f"{target}:{count}",
            mesh=f"fsdp={count}" if tpu else None,
            length=length,
            precision="bfloat16",
            per_device_train_batch_size=rows,
            config_overrides=overrides,
        )
        run = build(plan, devices, scan_layers=True)
        run.objective.row_guarantees = RowGuarantees(max_runs=16)
        compiled = aot.compile_for(
            devices[0],
            run.step_function(),
            run.abstract_state(),
            run.frozen,
            abstract_batch(run, rows),
            fast_compile=tpu,
        )
        memory, text = compiled.memory_analysis(), compiled.as_text() or ""
        targets = re.findall(r'custom_call_target="([^"]+)"', text)
        shapes = re.findall(r"\w+\[([\d,]+)\]", text)
        exchanged = collectives.find_collectives(text, run.mesh)
        return {
            "arguments": memory.argument_size_in_bytes,
            "temporary": None if tpu else memory.temp_size_in_bytes,
            "cuDNN": sum(name.startswith("__cudnn$fmha") for name in targets),
            "Triton": sum(name.endswith("gpu.triton") for name in targets),
            "splash": targets.count("tpu_custom_call"),
            "squares": sum(shape.split(",").count(str(length)) > 1 for shape in shapes),
            "exchanged": sum(collective.size * collective.times for collective in exchanged),
        }

    return Workload(step, lambda: 0, {"device": f"{count} x {target}, described"})


def _value(name: str, show: Any) -> Any:
    def format_cell(row: dict[str, Any]) -> str:
        number = row["values"][-1].get(name) if row["values"] else None
        return "" if number is None else show(number)

    return format_cell


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['median_seconds']:.0f} s" if row["median_seconds"] else ""


def _kernels(row: dict[str, Any]) -> str:
    counts = row["values"][-1] if row["values"] else {}
    return ", ".join(f"{counts[k]} {k}" for k in ("cuDNN", "Triton", "splash") if counts.get(k))


def _size(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count else "–"


def compile_problems(rows: Rows) -> list[str]:
    """Returns a message for each program that stores the attention scores of all position pairs.

    T5 is not checked, because its learned position bias has the same shape as the scores.
    """
    return [
        f"{row['name']}: {row['values'][-1]['squares']} arrays of all pairs in {row['case']}"
        for row in rows
        if row["values"] and row["values"][-1]["squares"] and not row["case"].startswith("T5")
    ]


COMPILE = Suite(
    "Training steps compiled for accelerators that are not present",
    "The step of the training loop is compiled by the compilers of the accelerators (extra `aot`) "
    "and is not run. It trains in bfloat16 with AdamW and scanned layers, on rows that contain up "
    "to 16 packed documents. GPUs use data parallelism and TPUs use `fsdp`. The table reports the "
    "memory per device, the attention kernels of the program (those of one layer, because all "
    "layers use the same code), and the bytes that devices exchange. The workspace of cuDNN is not "
    "included in the memory. TPU programs are compiled with few optimizations, so their temporary "
    "memory is not meaningful.",
    compile_cases,
    (
        harness.CASE,
        ("state and batch", _value("arguments", _size)),
        ("temporary", _value("temporary", _size)),
        ("kernels", _kernels),
        ("exchanged", _value("exchanged", _size)),
        ("compiled in", _seconds),
    ),
    problems=compile_problems,
)
