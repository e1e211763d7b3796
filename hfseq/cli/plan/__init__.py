"""``hfseq plan``: its flags. What is heavy is imported when it runs."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from hfseq.cli.convert import use_cpu
from hfseq.cli.text import add_json, print_json


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those of training have the names that they have there."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    real: dict[str, Any] = {"type": float, "metavar": "X"}
    group = parser.add_argument_group("model")
    group.add_argument(
        "--config", required=True, metavar="MODEL",
        help="a directory, a JSON file, a Hub name or a model type, e.g. gpt2",
    )  # fmt: skip
    group.add_argument("--preset", metavar="NAME", help="a size that the architecture names")
    group.add_argument("--config_overrides", metavar="A=1,B=2", help="changes to the configuration")
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--devices", required=True, metavar="NAME:N", help="accelerator and how many, e.g. h200:64"
    )
    group.add_argument("--mesh", metavar="MESH", help="e.g. data=8,fsdp=8; default: all on data")
    group.add_argument("--memory_gb", help="memory of a device; default: its data sheet", **real)
    group.add_argument(
        "--memory_share", help="what jax may use of it; default: 0.75 on GPUs, its own", **real
    )
    group.add_argument(
        "--peak_tflops", help="peak of a device, 10^12 FLOP/s; default: its data sheet", **real
    )
    group.add_argument(
        "--network_gbs", help="GB/s that a device has between machines; default: a DGX's", **real
    )
    _add_run(parser, number)
    group = parser.add_argument_group("answer")
    group.add_argument("--mfu", default=0.4, help="the MFU to expect (0.4)", **real)
    group.add_argument("--tokens", help="tokens to train on, e.g. 3e11: how many days", **real)
    add_json(group)
    group.add_argument(
        "--no_compile", action="store_true", help="rules and a trace only, in seconds"
    )
    group.add_argument(
        "--compile_timeout", default=1800.0, help="seconds for compiling (1800)", **real
    )


def _add_run(parser: argparse.ArgumentParser, number: dict[str, Any]) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--objective", metavar="NAME", help="default: that of the model's script")
    group.add_argument("--length", help="tokens a row; default: as the script chooses", **number)
    group.add_argument("--target_length", help="tokens of a target (translation)", **number)
    group.add_argument(
        "--per_device_train_batch_size",
        "--batch",
        default=8,
        help="rows a data shard (8)",
        **number,
    )
    group.add_argument("--global_batch_size", help="rows a step, instead", **number)
    group.add_argument("--gradient_accumulation_steps", default=1, help="(1)", **number)
    group.add_argument("--optim", default="adamw", metavar="NAME", help="optimizer (adamw)")
    group.add_argument("--precision", default="bfloat16", metavar="NAME", help="(bfloat16)")
    group.add_argument("--param_dtype", default="float32", metavar="TYPE", help="(float32)")
    group.add_argument("--attn_implementation", metavar="NAME", help="xla (default), cudnn, yours")
    for name, text in {
        "gradient_checkpointing": "recompute layers in the backward pass",
        "scan_layers": "scan the layers; compiles much faster",
        "sequence_parallel": "split hidden states over tensor, too",
    }.items():
        group.add_argument(f"--{name}", action="store_true", help=text)
    group.add_argument(
        "training", nargs="*", metavar="FLAG", help="after --: other flags of the training script"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 1 where the run does not fit."""
    use_cpu()
    from hfseq.cli.plan.estimate import make_plan
    from hfseq.cli.plan.run import Options
    from hfseq.cli.plan.text import check_fit, describe

    names = {field.name for field in dataclasses.fields(Options)}
    plan = make_plan(Options(**{k: v for k, v in vars(arguments).items() if k in names}))
    if arguments.json:
        print_json(plan)
    else:
        print("\n".join(describe(plan)), flush=True)
    check_fit(plan)
    return 0
