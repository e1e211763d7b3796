"""Command-line interface of ``hfseq plan``: its flags and the text form of a plan.

Modules that import JAX are imported only when the command runs.
"""

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

# Labels of the rows of the memory table. The keys are those of `plan["bytes"]`.
PARTS = {
    "parameters": "parameters",
    "auxiliary": "reference model or teacher",
    "optimizer": "optimizer state",
    "other": "step, log window, collections",
    "gradients": "gradients",
    "batch": "batch",
}
# Labels of the two estimates of activation memory. The keys are those of `plan["activations"]`.
CHOICES = {"kept": "without gradient checkpointing", "recomputed": "with gradient checkpointing"}
REMAT = {False: CHOICES["kept"], True: CHOICES["recomputed"]}


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq plan``, one for each field of :class:`Options`."""
    names = ("model", "devices", "run", "answer")
    groups = {name: parser.add_argument_group(name) for name in names}
    hints = typing.get_type_hints(Options)
    for field in dataclasses.fields(Options):
        if not field.metadata:
            continue
        group, metavar, text = (field.metadata[key] for key in ("group", "metavar", "help"))
        flags = [f"--{field.name}", *["--batch"] * (field.name == "per_device_train_batch_size")]
        if hints[field.name] == list[str]:
            groups[group].add_argument(field.name, nargs="*", metavar=metavar, help=text)
        elif metavar is None:
            groups[group].add_argument(*flags, action="store_true", help=text)
        else:
            value_types = typing.get_args(hints[field.name]) or (hints[field.name],)
            is_required = field.default is dataclasses.MISSING
            groups[group].add_argument(
                *flags,
                type=value_types[0],
                metavar=metavar,
                help=text,
                required=is_required,
                default=None if is_required else field.default,
            )
    add_json(groups["answer"])


def run_plan(arguments: argparse.Namespace) -> int:
    """Computes and prints the plan.

    Raises:
        HfseqError: The run does not fit into memory. The exit code of the command is then 1.
    """
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
    """Raises `HfseqError` if the run does not fit into the memory of the devices.

    The message says how much memory is missing, and which batch size fits if there is one.
    """
    fit, devices = plan["fit"], plan["devices"]
    if fit["left"] >= 0:
        return
    needed, usable = format_bytes(fit["needed"]), format_bytes(devices["usable"])
    excess = format_bytes(-fit["left"])
    requirement = f"this run needs {needed} per device, but only {usable} are usable"
    if fit["largest_rows_a_shard"]:
        raise HfseqError(
            f"{requirement}, which is {excess} too much. Use --per_device_train_batch_size "
            f"{fit['largest_rows_a_shard']}, and increase --gradient_accumulation_steps to keep "
            "the number of rows per step"
        )
    shortfall = format_bytes(fit["one_row"] - devices["usable"])
    recompute = "" if plan["run"]["gradient_checkpointing"] else "--gradient_checkpointing, "
    raise HfseqError(
        f"{requirement}. Even with a single row per device, the run needs {shortfall} too much: "
        f"try {recompute}a shorter --length, or more devices on the fsdp or tensor axis"
    )


def format_plan(plan: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of text for a plan from :func:`hfseq.cli.plan.estimate.make_plan`."""
    yield from _run_lines(plan)
    yield from _memory_lines(plan)
    yield from _attention_lines(plan)
    yield from _compiled_lines(plan)
    yield from _exchange_lines(plan)
    yield ""
    yield from _time_lines(plan)
    yield from _fit_lines(plan)


def _run_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Describes the model, the devices and one step."""
    run, devices, time = plan["run"], plan["devices"], plan["time"]
    mesh = ", ".join(f"{name}={axis_size}" for name, axis_size in devices["mesh"].items())
    target = f" and targets of {run['target_length']} tokens" if run["target_length"] else ""
    yield (
        f"{run['model_type']}, {format_quantity(run['parameters'])} parameters, "
        f"{run['objective']} on rows of {run['length']} tokens{target}, {run['precision']}, "
        f"attention {run['attention']}"
    )
    yield (
        f"{devices['count']} x {devices['name']}: {format_bytes(devices['memory'])} each, of which "
        f"JAX uses {devices['share']:.0%}, and {format_quantity(time['peak'])}FLOP/s; mesh {mesh}"
    )
    yield (
        f"one step: {run['rows']:,} rows, {time['tokens']:,} tokens; {run['rows_a_shard']} rows "
        f"per data shard x {run['micro_batches']} micro-batches"
    )


def _memory_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yields a table of the memory according to the sharding rules and the trace."""
    parts, activations = plan["bytes"], plan["activations"]
    part_rows = [
        (
            label if key != "optimizer" else f"{label} ({plan['run']['optimizer']})",
            format_bytes(parts[key]["all"]),
            format_bytes(parts[key]["device"]),
        )
        for key, label in PARTS.items()
        if parts[key]["all"] or key != "auxiliary"
    ]
    activation_rows = [
        (f"activations {CHOICES[key]}, traced", "", format_bytes(num_bytes))
        for key, num_bytes in activations.items()
    ]
    yield from _titled(
        "Memory according to the sharding rules",
        ("", "total", "per device"),
        *part_rows,
        ("unsharded parameters and moments", "", format_bytes(parts["whole"]["device"])),
        *activation_rows,
    )
    if plan["devices"]["mesh"]["tensor"] > 1 and activations:
        yield (
            "  (the tensor axis also shards some activations; this is not taken into account here)"
        )


def _attention_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Lists the implementation for each type of attention call, and why others are unsupported."""
    if not plan["attention"]:
        return
    yield ""
    yield "Attention"
    for choice in plan["attention"]:
        yield f"  {choice['of']}: {choice['name']}"
        yield from (f"    not {name}: {reason}" for name, reason in choice["refused"].items())


def _compiled_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yields a table of the memory of the compiled programs, or why no program was compiled."""
    compiled = plan["compiled"]
    if not compiled["programs"]:
        reasons = "; ".join(filter(None, (compiled["passed_over"], compiled["problem"])))
        yield ""
        yield f"Not compiled ({reasons}): memory is estimated from the trace"
        return
    target = "" if compiled["real"] else f" for {plan['devices']['count']} host devices"
    yield from _titled(
        f"The step compiled by {compiled['compiler']}{target}, bytes per device",
        ("", "rows", "state and batch", "temporary", "both", "peak", "seconds"),
        *(
            (
                REMAT[program["remat"]],
                str(program["rows"]),
                format_bytes(program["arguments"]),
                format_bytes(program["temporary"]),
                format_bytes(program["arguments"] + program["temporary"]),
                format_bytes(program["peak"]) if program["peak"] else "unknown",
                f"{program['seconds']:.0f}",
            )
            for program in compiled["programs"]
        ),
    )
    if compiled["problem"]:
        yield f"  {compiled['problem']}"
    if any(program.get("cudnn") for program in compiled["programs"]):
        yield "  (the workspace of cuDNN is not included)"
    if not compiled["real"]:
        yield (
            "  (this program was compiled for CPUs. In place of the attention kernel, it contains "
            "a substitute that uses the same amount of memory. The compiler of the accelerator was "
            f"not used: {compiled['passed_over']})"
        )


def _exchange_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yields two tables of collectives: those of the sharding rules, and those in the program."""
    exchange = plan["exchange"]
    if not exchange["rules"]:
        yield ""
        yield "The sharding rules require no communication between devices"
    remark = (
        ""
        if plan["compiled"]["real"]
        else " (XLA for CPUs uses all-reduce where other compilers use reduce-scatter)"
    )
    for key, title in (
        ("rules", "Communication per step according to the sharding rules"),
        ("compiled", f"Communication per step in the compiled program{remark}"),
    ):
        if exchange[key]:
            yield from _titled(
                title,
                ("kind", "over", "count", "bytes per device", "transfer time"),
                *(
                    (
                        collective["kind"],
                        "x".join(collective["axes"]),
                        f"{collective['count']:,}",
                        format_bytes(collective["bytes"]),
                        _format_wire_time(collective["seconds"]),
                    )
                    for collective in exchange[key]
                ),
            )


def _time_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Describes the time of a step and, if ``--tokens`` is set, the time of the whole run."""
    time = plan["time"]
    yield (
        f"{format_quantity(time['flops'])}FLOP per step: {format_seconds(time['seconds'])} at an "
        f"MFU of {time['mfu']:.0%} ({format_quantity(time['tokens_per_second'])} tokens/s); "
        f"communication needs {_format_wire_time(time['wire_seconds'])} of transfer time, which "
        "may overlap with computation"
    )
    if time["days"]:
        yield f"all tokens: {time['days']:.3g} days"


def _fit_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Says whether the run fits, which batch is the largest, and where these numbers come from."""
    fit, usable = plan["fit"], plan["devices"]["usable"]
    word = "left" if fit["left"] >= 0 else "too much"
    yield (
        f"needed: {format_bytes(fit['needed'])} of {format_bytes(usable)} usable, "
        f"{format_bytes(abs(fit['left']))} {word}"
    )
    method = "two compiled programs" if fit["row_source"] == "compiled" else "the trace"
    yield (
        f"largest batch: {fit['largest_rows_a_shard']} rows per data shard and micro-batch "
        f"({format_bytes(fit['row'])} per row, from {method})"
    )
    compiled = fit["source"] == "compiled"
    source = plan["compiled"]["compiler"] if compiled else "the sharding rules and the trace"
    yield f"memory according to {source}"


def _format_wire_time(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)


def _titled(title: str, *rows: Sequence[str]) -> Iterator[str]:
    """Yields an empty line, the title and an indented table."""
    yield ""
    yield title
    yield from (f"  {line}" for line in format_table(rows))
