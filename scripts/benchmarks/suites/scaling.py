"""How the time of a training step grows with the batch, and that of a token with the width."""

from __future__ import annotations

import math
from typing import Any

from suites import tables
from suites.base import Case, Options, rivals

TITLE = "Scaling on one device"
SUMMARY = (
    "Training steps of RoBERTa over the batch (time should grow linearly from where the machine is "
    "full) and over the width (the FLOPs of a token grow with its square, its time less so until "
    "the machine's rate is reached)."
)
COLUMNS = tables.DEFAULT
PICTURE = "curves"
FACTORIES = {"hfseq": "contestants:hfseq_step"}
MODEL = "roberta"


def cases(options: Options) -> list[Case]:
    """Return the batches at one width and the widths at one batch."""
    tiny = options.tiny
    batches = options.choose((1, 2, 4, 8, 16), (4, 16, 64, 256), (1, 2, 4, 8), (1, 2, 4))
    widths = options.choose(
        (128, 256, 512, 1024), (256, 512, 1024, 2048, 4096), (64, 128, 256), (16, 32, 64)
    )
    width, rows = options.choose(512, 1024, 128, 32), options.choose(8, 64, 4, 2)
    length, layers = options.choose(128, 512, 64, 8), options.choose(4, 4, 2, 1)
    found = []
    points = [("batch", b, width, b) for b in batches] + [("width", w, w, rows) for w in widths]
    for over, value, own_width, own_rows in points:
        dtype = options.types(options.choose(("float32",), ("bfloat16",), *[("float32",)] * 2))[0]
        size: dict[str, Any] = {
            "layers": layers, "hidden_size": own_width, "intermediate_size": 4 * own_width,
            "num_attention_heads": max(own_width // 64, 2), "vocab_size": 120 if tiny else 8000,
        }  # fmt: skip
        name = f"{over} {value}"
        settings = {
            "model": MODEL, "dtype": dtype, "rows": own_rows, "length": length, "targets": 0,
            "size": size, "dropout": None,
        }  # fmt: skip
        found.append(
            Case(
                name, rivals(options, FACTORIES, settings, name), own_rows * length,
                dtype=dtype, rounds=options.choose(5, 20, 3, 1), warmup=1,
                weights=(MODEL, size), facts={"over": over, "value": value},
            )
        )  # fmt: skip
    return found


def points(rows: list[dict], over: str) -> dict[str, list[tuple[float, float]]]:
    """Return by contestant (batch, seconds a step), or (width, seconds a token)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["case_facts"].get("over") == over and row["median_seconds"]:
            seconds = row["median_seconds"] / (row["amount"] if over == "width" else 1)
            found.setdefault(row["name"], []).append((row["case_facts"]["value"], seconds))
    return found


def exponent(pairs: list[tuple[float, float]]) -> float:
    """Return the slope of the line through the logarithms: 1 is linear growth."""
    xs, ys = zip(*((math.log(x), math.log(y)) for x, y in pairs), strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def remarks(rows: list[dict]) -> list[str]:
    """State the exponents, and what linear growth would be."""
    found = []
    for over, what, line in (
        ("batch", "time of a step over the batch", "1 is linear"),
        ("width", "time of a token over the width", "FLOPs alone would give up to 2"),
    ):
        told = [
            f"{name} {exponent(pairs):.2f}" + (
                f" ({exponent(pairs[-2:]):.2f} between the last two)" if len(pairs) > 2 else ""
            )
            for name, pairs in points(rows, over).items() if len(pairs) > 1
        ]  # fmt: skip
        if told:
            found.append(f"Exponent of the {what} ({line}): {', '.join(told)}.")
    return found


def curves(rows: list[dict]) -> list[dict[str, Any]]:
    """Return the panels of the picture."""
    labels = {"batch": ("rows", "seconds a step"), "width": ("width", "microseconds a token")}
    found = []
    for over, (x, y) in labels.items():
        scale = 1e6 if over == "width" else 1.0
        lines = {
            name: ([a for a, _ in pairs], [b * scale for _, b in pairs])
            for name, pairs in points(rows, over).items()
        }
        if lines:
            found.append({"x": x, "y": y, "lines": lines})
    return found
