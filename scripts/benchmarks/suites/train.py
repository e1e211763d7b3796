"""Training steps: the loop's step beside PyTorch's, eager and compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

from suites import tables
from suites.base import NAMES, Case, Options, rivals

TITLE = "Training step"
SUMMARY = (
    "The step that the training loop compiles (objective, AdamW, gradient norm, donated state) "
    "beside PyTorch's class with sdpa attention and fused AdamW, eager and with `torch.compile`; "
    "bfloat16 is `torch.autocast` there. Same weights, batches, masks and dropout rates; "
    "losses must be within 5 % (`train.py` compares them to 2e-5, without dropout)."
)
COLUMNS = tables.DEFAULT
PICTURE = "ratio"

#: Model, title, length, target length, rows on a CPU, rows on a GPU.
SHAPES = (
    ("roberta", "RoBERTa-base", 128, 0, 8, 128),
    ("roberta", "RoBERTa-base", 512, 0, 2, 32),
    ("gpt2", "GPT-2 small", 512, 0, 2, 32),
    ("gpt2", "GPT-2 small", 1024, 0, 1, 16),
    ("t5", "T5-small", 512, 114, 2, 64),
    ("bart", "BART-base", 256, 256, 2, 32),
    ("wmt", "WMT base", 64, 64, 16, 256),
)
#: The rate of attention weights: jax has no flash attention that drops them, PyTorch has.
ATTENTION_RATES = {
    "roberta": "attention_probs_dropout_prob", "gpt2": "attn_pdrop", "bart": "attention_dropout",
    "wmt": "attention_dropout",
}  # fmt: skip
#: On a CPU bfloat16 is measured for the rows that the aims name; --dtypes measures all.
BFLOAT16_ON_CPU = ("roberta 128", "gpt2 512")
FACTORIES = {"torch": "contestants:torch_step", "hfseq": "contestants:hfseq_step"}


#: How far the loss of one batch may be from PyTorch's, relatively: dropout differs.
TOLERANCE = 0.05


def cases(options: Options) -> list[Case]:
    """Return a case for each shape and type."""
    found = []
    for model, title, length, targets, cpu, gpu in SHAPES:
        rows = options.choose(cpu, gpu, 2, 2)
        full, parts = length, options.choose(1, 1, 4, 32)
        length, targets = max(length // parts, 4), targets // parts
        some = ("float32", "bfloat16") if f"{model} {full}" in BFLOAT16_ON_CPU else ("float32",)
        default = options.choose(some, ("bfloat16",), ("float32",), ("float32",))
        for dtype in options.types(default):
            shape = f"{rows} x {length}" + (f" to {targets}" if targets else "")
            name = f"{title}, {shape}, {dtype}"
            settings = {
                "model": model, "dtype": dtype, "rows": rows, "length": length, "targets": targets,
                "size": options.size(model), "dropout": None,
            }  # fmt: skip
            case = Case(
                name, rivals(options, FACTORIES, settings, name), rows * (length + targets),
                dtype=dtype, rounds=options.choose(3, 20, 3, 1),
                warmup=options.choose(0, 3, 1, 1), settle=options.choose(1, 1, 0, 0),
                weights=(model, options.size(model)),
            )  # fmt: skip
            found.append(case)
            if options.gpu and dtype == "bfloat16" and model in ATTENTION_RATES:
                found.append(_flash(case, options, settings, ATTENTION_RATES[model]))
    return found


def _flash(case: Case, options: Options, settings: dict[str, Any], rate: str) -> Case:
    """Return the case without dropout of attention weights, so that both sides can use flash."""
    name = f"{case.name}, attention weights kept"
    kept = settings | {"size": settings["size"] | {rate: 0.0}}
    members = [*rivals(options, FACTORIES, kept, name)]
    if "hfseq" in options.peers:
        fused = {"attention": "cudnn"}
        members += [
            dataclasses.replace(one, name=f"{one.name}, cuDNN", settings=one.settings | fused)
            for one in members
            if one.name == NAMES["hfseq"]
        ]
    return dataclasses.replace(case, name=name, contestants=tuple(members))


def problems(rows: list[dict]) -> list[str]:
    """Name the contestants whose losses are far from those of the first of their case."""
    found = []
    first: dict[str, dict] = {}
    for row in (row for row in rows if row["seconds"]):
        base = first.setdefault(row["case"], row)
        pairs = [
            (a["loss"], b["loss"]) for a, b in zip(row["values"], base["values"], strict=False)
        ]
        worst = max(abs(a - b) / abs(b) for a, b in pairs)
        if not worst <= TOLERANCE:
            found.append(
                f"{row['case']}: the losses of {row['name']} and {base['name']} differ by "
                f"{worst:.1%}: {pairs[-1]}"
            )
    return found
