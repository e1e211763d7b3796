"""Peak memory of training steps, plain and with layers recomputed in the backward pass."""

from __future__ import annotations

import dataclasses

import harness

from suites import tables
from suites.base import Case, Options, rivals

TITLE = "Peak memory"
SUMMARY = (
    "The most memory that a training process ever held: on a GPU that of the device, on a CPU that "
    "of the process, its libraries and compilation included. State is what must be there: "
    "parameters, two moments and gradients in float32."
)
STATE_BYTES = 16
FACTORIES = {"torch": "contestants:torch_step", "hfseq": "contestants:hfseq_step"}
#: Model, title, length, target length, rows on a CPU, rows on a GPU.
SHAPES = (
    ("roberta", "RoBERTa-base", 512, 0, 8, 64),
    ("gpt2", "GPT-2 small", 512, 0, 4, 32),
    ("t5", "T5-small", 512, 114, 8, 64),
    ("bart", "BART-base", 256, 256, 8, 64),
)
OF_CPU = ("roberta", "bart")
PICTURE = "memory"


def _state(row: dict) -> str:
    count = row["facts"].get("parameters")
    if not count or not row["peak_memory_gb"]:
        return tables.ABSENT
    state = STATE_BYTES * count / harness.GB
    return f"{state:.2f} GB, {state / row['peak_memory_gb']:.0%}"


def _against(row: dict) -> str:
    return f"{row['memory_ratio']:.2f}x" if row.get("memory_ratio") else tables.ABSENT


COLUMNS = (tables.CASE, tables.MEMORY, ("against PyTorch", _against), ("state", _state),
           tables.TIME)  # fmt: skip


def cases(options: Options) -> list[Case]:
    """Return each model plain and with recomputed layers; compiled PyTorch is left to train."""
    found = []
    for model, title, length, targets, cpu, gpu in SHAPES:
        rows = options.choose(cpu, gpu, 2, 2)
        length = options.choose(length, length, 128, 12)
        targets = targets and options.choose(targets, targets, 64, 6)
        dtype = (
            options.dtypes or options.choose(("float32",), ("bfloat16",), *[("float32",)] * 2)
        )[0]
        # The table of training steps has the peaks of the others.
        for remat in (False, True) if options.gpu or model in OF_CPU else ():
            shape = f"{rows} x {length}" + (f" to {targets}" if targets else "")
            name = f"{title}, {shape}, {dtype}" + (", recomputed" if remat else "")
            settings = {
                "model": model, "dtype": dtype, "rows": rows, "length": length, "targets": targets,
                "size": options.size(model), "dropout": None, "remat": remat,
            }  # fmt: skip
            peers = tuple(p for p in options.peers if p != "torch_compile")
            # One after the other: each has the whole memory to itself.
            contestants = tuple(
                dataclasses.replace(c, group=f"{name}, {c.name}")
                for c in rivals(options, FACTORIES, settings, name, peers)
            )
            found.append(
                Case(
                    name, contestants, rows * (length + targets), dtype=dtype, rounds=1, warmup=1,
                    weights=(model, options.size(model)),
                )
            )  # fmt: skip
    return found


def finish(rows: list[dict]) -> None:
    """Add how much memory a row takes of what PyTorch takes."""
    for row in rows:
        base = next((r for r in rows if r["case"] == row["case"] and r["name"] == "PyTorch"), None)
        if base and base["peak_memory_gb"] and row["peak_memory_gb"]:
            row["memory_ratio"] = row["peak_memory_gb"] / base["peak_memory_gb"]
