"""The plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hfseq.cli.text import quantity, seconds, size, table
from hfseq.errors import HfseqError

PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "other": "step, log window, collections",
    "gradients": "gradients",
    "batch": "batch",
}


CHOICES = {"kept": "without gradient checkpointing", "recomputed": "with gradient checkpointing"}


def describe(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a plan that :func:`hfseq.cli.plan.estimate.make_plan` made."""
    yield from _head(plan)
    yield from _memory(plan)
    yield from _compiled(plan)
    yield from _exchange(plan)
    yield from _time(plan)
    yield from _verdict(plan)


def check_fit(plan: dict[str, Any]) -> None:
    """Raise an error where the run does not fit, which says by how much and what would."""
    fit, devices = plan["fit"], plan["devices"]
    if fit["left"] >= 0:
        return
    what = f"needs {size(fit['needed'])} a device and {size(devices['usable'])} are usable"
    if fit["largest_rows_a_shard"]:
        raise HfseqError(
            f"this run {what}: {size(-fit['left'])} too much; give --per_device_train_batch_size "
            f"{fit['largest_rows_a_shard']}, and more --gradient_accumulation_steps for the same "
            "rows a step"
        )
    lacking = size(fit["one_row"] - devices["usable"])
    recompute = "" if plan["run"]["gradient_checkpointing"] else "--gradient_checkpointing, "
    raise HfseqError(
        f"this run {what}, and with a single row a device it still lacks {lacking}: try "
        f"{recompute}a shorter --length, more devices on fsdp or tensor"
    )


def _head(plan: dict[str, Any]) -> Iterator[str]:
    run, devices, time = plan["run"], plan["devices"], plan["time"]
    mesh = ", ".join(f"{name}={ways}" for name, ways in devices["mesh"].items())
    target = f" and targets of {run['target_length']}" if run["target_length"] else ""
    yield (
        f"{run['model_type']}, {quantity(run['parameters'])} parameters, {run['objective']} on "
        f"rows of {run['length']} tokens{target}, {run['precision']}, attention {run['attention']}"
    )
    yield (
        f"{devices['count']} x {devices['name']}: {size(devices['memory'])} each, of which jax "
        f"uses {devices['share']:.0%}, and {quantity(time['peak'])}FLOP/s; mesh {mesh}"
    )
    yield (
        f"a step: {run['rows']:,} rows, {time['tokens']:,} tokens; {run['rows_a_shard']} rows a "
        f"data shard x {run['micro_batches']} micro-batches"
    )


def _memory(plan: dict[str, Any]) -> Iterator[str]:
    parts = plan["bytes"]
    yield ""
    yield "Memory by the sharding rules"
    rows: list[Sequence[str]] = [("", "in all", "a device")]
    rows += [
        (name if key != "optimizer" else f"{name} ({plan['run']['optimizer']})",
         size(parts[key]["all"]), size(parts[key]["device"]))
        for key, name in PARTS.items()
    ]  # fmt: skip
    rows.append(("parameters and moments that no axis splits", "", size(parts["whole"]["device"])))
    rows += [
        (f"kept for the backward pass, {text}", "", size(plan["activations"][key]))
        for key, text in CHOICES.items()
    ]
    yield from (f"  {line}" for line in table(rows))
    if plan["devices"]["mesh"]["tensor"] > 1:
        yield "  (tensor divides a part of what is kept, which is not taken off here)"


def _compiled(plan: dict[str, Any]) -> Iterator[str]:
    found, count = plan["compiled"], plan["devices"]["count"]
    yield ""
    if not found["programs"]:
        yield f"Not compiled ({found['problem']}): what is needed is estimated from the trace"
        return
    yield f"The step compiled for {count} host devices, bytes a device"
    rows: list[Sequence[str]] = [("", "rows", "state and batch", "temporary", "both", "seconds")]
    for one in found["programs"]:
        both = one["arguments"] + one["temporary"]
        choice = CHOICES["recomputed" if one["remat"] else "kept"]
        rows.append((choice, str(one["rows"]), size(one["arguments"]), size(one["temporary"]),
                     size(both), f"{one['seconds']:.0f}"))  # fmt: skip
    yield from (f"  {line}" for line in table(rows))
    if found["problem"]:
        yield f"  {found['problem']}"
    if plan["run"]["attention"] == "cudnn":
        yield "  (cuDNN's attention is stood in for by one that keeps the same)"


def _exchange(plan: dict[str, Any]) -> Iterator[str]:
    for key, title in (
        ("rules", "What devices exchange in a step, by the sharding rules"),
        ("compiled", "The same in the compiled step (XLA for CPUs sums where others scatter)"),
    ):
        found = plan["exchange"][key]
        if not found:
            if key == "rules":
                yield ""
                yield "The devices exchange nothing that a rule asks for"
            continue
        yield ""
        yield title
        rows: list[Sequence[str]] = [("kind", "over", "count", "bytes a device", "wire time")]
        rows += [
            (one["kind"], "x".join(one["axes"]), f"{one['count']:,}", size(one["bytes"]),
             "unknown" if one["seconds"] is None else seconds(one["seconds"]))
            for one in found
        ]  # fmt: skip
        yield from (f"  {line}" for line in table(rows))


def _time(plan: dict[str, Any]) -> Iterator[str]:
    time = plan["time"]
    yield ""
    wires = time["wire_seconds"]
    told = "unknown" if wires is None else seconds(wires)
    yield (
        f"{quantity(time['flops'])}FLOP a step: {seconds(time['seconds'])} at an MFU of "
        f"{time['mfu']:.0%} ({quantity(time['tokens_per_second'])} tokens/s); the exchange takes "
        f"{told} of wire time, as far as it is not hidden behind products"
    )
    if time["days"]:
        yield f"all tokens: {time['days']:.3g} days"


def _verdict(plan: dict[str, Any]) -> Iterator[str]:
    fit, devices = plan["fit"], plan["devices"]
    how = "a line through two programs" if fit["source"] == "compiled" else "the trace"
    word = "left" if fit["left"] >= 0 else "too much"
    yield (
        f"needed: {size(fit['needed'])} of {size(devices['usable'])} usable, "
        f"{size(abs(fit['left']))} {word}"
    )
    yield (
        f"largest batch: {fit['largest_rows_a_shard']} rows a data shard and micro-batch "
        f"({size(fit['row'])} a row; by {how})"
    )
