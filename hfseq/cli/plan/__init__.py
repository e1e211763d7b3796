"""``hfseq plan``: its flags, and the plan as text. What is heavy is imported when it runs."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from hfseq.cli.convert import use_cpu
from hfseq.cli.plan.options import Options
from hfseq.cli.text import (
    add_json,
    format_bytes,
    format_quantity,
    format_seconds,
    format_table,
    print_json,
)
from hfseq.errors import HfseqError

PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "other": "step, log window, collections",
    "gradients": "gradients",
    "batch": "batch",
}
CHOICES = {"kept": "without gradient checkpointing", "recomputed": "with gradient checkpointing"}
REMAT = {False: CHOICES["kept"], True: CHOICES["recomputed"]}


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags, which are the fields of :class:`Options`."""
    names = ("model", "devices", "run", "answer")
    groups = {name: parser.add_argument_group(name) for name in names}
    hints = typing.get_type_hints(Options)
    for field in dataclasses.fields(Options):
        if not field.metadata:
            continue
        group, metavar, text = (field.metadata[key] for key in ("group", "metavar", "help"))
        words = [f"--{field.name}", *["--batch"] * (field.name == "per_device_train_batch_size")]
        if hints[field.name] == list[str]:
            groups[group].add_argument(field.name, nargs="*", metavar=metavar, help=text)
        elif metavar is None:
            groups[group].add_argument(*words, action="store_true", help=text)
        else:
            kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
            needed = field.default is dataclasses.MISSING
            groups[group].add_argument(
                *words,
                type=kinds[0],
                metavar=metavar,
                help=text,
                required=needed,
                default=None if needed else field.default,
            )
    add_json(groups["answer"])


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 1 where the run does not fit."""
    use_cpu()
    from hfseq.cli.plan.estimate import make_plan

    names = {field.name for field in dataclasses.fields(Options)}
    plan = make_plan(Options(**{k: v for k, v in vars(arguments).items() if k in names}))
    if arguments.json:
        print_json(plan)
    else:
        print("\n".join(format_plan(plan)), flush=True)
    check_fit(plan)
    return 0


def check_fit(plan: dict[str, Any]) -> None:
    """Raise an error where the run does not fit, which says by how much and what would."""
    fit, devices = plan["fit"], plan["devices"]
    if fit["left"] >= 0:
        return
    what = f"needs {format_bytes(fit['needed'])} a device and {format_bytes(devices['usable'])} are usable"
    if fit["largest_rows_a_shard"]:
        raise HfseqError(
            f"this run {what}: {format_bytes(-fit['left'])} too much; give --per_device_train_batch_size "
            f"{fit['largest_rows_a_shard']}, and more --gradient_accumulation_steps for the same "
            "rows a step"
        )
    lacking = format_bytes(fit["one_row"] - devices["usable"])
    recompute = "" if plan["run"]["gradient_checkpointing"] else "--gradient_checkpointing, "
    raise HfseqError(
        f"this run {what}, and with a single row a device it still lacks {lacking}: try "
        f"{recompute}a shorter --length, more devices on fsdp or tensor"
    )


def format_plan(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a plan that :func:`hfseq.cli.plan.estimate.make_plan` made."""
    run, devices, time, fit = (plan[name] for name in ("run", "devices", "time", "fit"))
    parts, compiled, exchange = (plan[name] for name in ("bytes", "compiled", "exchange"))
    mesh = ", ".join(f"{name}={ways}" for name, ways in devices["mesh"].items())
    target = f" and targets of {run['target_length']}" if run["target_length"] else ""
    yield (
        f"{run['model_type']}, {format_quantity(run['parameters'])} parameters, {run['objective']} on "
        f"rows of {run['length']} tokens{target}, {run['precision']}, attention {run['attention']}"
    )
    yield (
        f"{devices['count']} x {devices['name']}: {format_bytes(devices['memory'])} each, of which jax "
        f"uses {devices['share']:.0%}, and {format_quantity(time['peak'])}FLOP/s; mesh {mesh}"
    )
    yield (
        f"a step: {run['rows']:,} rows, {time['tokens']:,} tokens; {run['rows_a_shard']} rows a "
        f"data shard x {run['micro_batches']} micro-batches"
    )
    yield from _titled(
        "Memory by the sharding rules",
        ("", "in all", "a device"),
        *(
            (
                name if key != "optimizer" else f"{name} ({run['optimizer']})",
                format_bytes(parts[key]["all"]),
                format_bytes(parts[key]["device"]),
            )
            for key, name in PARTS.items()
        ),
        ("parameters and moments that no axis splits", "", format_bytes(parts["whole"]["device"])),
        *(
            (f"kept for the backward pass, {CHOICES[key]}, by the trace", "", format_bytes(amount))
            for key, amount in plan["activations"].items()
        ),
    )
    if devices["mesh"]["tensor"] > 1 and plan["activations"]:
        yield "  (tensor divides a part of what is kept, which is not taken off here)"
    if plan["attention"]:
        yield ""
        yield "Attention"
        for one in plan["attention"]:
            yield f"  {one['of']}: {one['name']}"
            yield from (f"    not {name}: {why}" for name, why in one["refused"].items())
    if compiled["programs"]:
        place = "" if compiled["real"] else f" as {devices['count']} host devices"
        yield from _titled(
            f"The step compiled by {compiled['compiler']}{place}, bytes a device",
            ("", "rows", "state and batch", "temporary", "both", "peak", "seconds"),
            *(
                (
                    REMAT[one["remat"]],
                    str(one["rows"]),
                    format_bytes(one["arguments"]),
                    format_bytes(one["temporary"]),
                    format_bytes(one["arguments"] + one["temporary"]),
                    format_bytes(one["peak"]) if one["peak"] else "unknown",
                    f"{one['seconds']:.0f}",
                )
                for one in compiled["programs"]
            ),
        )
        if compiled["problem"]:
            yield f"  {compiled['problem']}"
        if any(one.get("cudnn") for one in compiled["programs"]):
            yield "  (cuDNN's own workspace is not included)"
        if not compiled["real"]:
            yield (
                "  (a CPU's program: attention is stood in for by one that keeps as little; the "
                f"accelerator's own compiler was not asked: {compiled['passed_over']})"
            )
    else:
        reasons = "; ".join(filter(None, (compiled["passed_over"], compiled["problem"])))
        yield ""
        yield f"Not compiled ({reasons}): what is needed is estimated from the trace"
    if not exchange["rules"]:
        yield ""
        yield "The devices exchange nothing that a rule asks for"
    remark = "" if compiled["real"] else " (XLA for CPUs sums where others scatter)"
    for key, title in (
        ("rules", "What devices exchange in a step, by the sharding rules"),
        ("compiled", f"The same in the compiled step{remark}"),
    ):
        if exchange[key]:
            yield from _titled(
                title,
                ("kind", "over", "count", "bytes a device", "wire time"),
                *(
                    (
                        one["kind"],
                        "x".join(one["axes"]),
                        f"{one['count']:,}",
                        format_bytes(one["bytes"]),
                        "unknown" if one["seconds"] is None else format_seconds(one["seconds"]),
                    )
                    for one in exchange[key]
                ),
            )
    yield ""
    wires = time["wire_seconds"]
    told = "unknown" if wires is None else format_seconds(wires)
    yield (
        f"{format_quantity(time['flops'])}FLOP a step: {format_seconds(time['seconds'])} at an MFU of "
        f"{time['mfu']:.0%} ({format_quantity(time['tokens_per_second'])} tokens/s); the exchange takes "
        f"{told} of wire time, as far as it is not hidden behind products"
    )
    if time["days"]:
        yield f"all tokens: {time['days']:.3g} days"
    word = "left" if fit["left"] >= 0 else "too much"
    yield (
        f"needed: {format_bytes(fit['needed'])} of {format_bytes(devices['usable'])} usable, "
        f"{format_bytes(abs(fit['left']))} {word}"
    )
    speaker = compiled["compiler"] if fit["source"] == "compiled" else "the rules and the trace"
    how = "a line through two programs" if fit["row_source"] == "compiled" else "the trace"
    yield (
        f"largest batch: {fit['largest_rows_a_shard']} rows a data shard and micro-batch "
        f"({format_bytes(fit['row'])} a row; by {how})"
    )
    yield f"memory is that of {speaker}"


def _titled(title: str, *rows: Sequence[str]) -> Iterator[str]:
    yield ""
    yield title
    yield from (f"  {line}" for line in format_table(rows))
