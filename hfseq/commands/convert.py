"""``hfseq convert``: its flags, and what it says about what it wrote."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from typing import TYPE_CHECKING

from hfseq.errors import UsageError

if TYPE_CHECKING:
    from hfseq.conversion import Done

EXAMPLES = """hfseq convert old-flax-model new-model
hfseq convert my-roberta my-roberta-flax --to msgpack
hfseq convert my-gpt2 my-gpt2-bf16 --dtype bfloat16 --max_shard_size 2GB
hfseq convert my-bert my-encoder --base --strict"""
FORMATS = ("safetensors", "msgpack")
TYPES = ("float32", "bfloat16", "float16")


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "source", metavar="SRC", help="directory, Hub name, or a weight file beside its config.json"
    )
    parser.add_argument("destination", metavar="DST", help="directory to write")
    parser.add_argument(
        "--to", choices=FORMATS, default="safetensors",
        help="safetensors, which PyTorch and hfseq load, or msgpack, which Transformers 4's Flax "
        "classes and hfseq load (safetensors)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=TYPES, help="type of the parameters; default: as stored")
    parser.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="largest weight file (5GB)"
    )
    parser.add_argument(
        "--strict", action="store_true",
        help="a missing, unexpected or mis-shaped name is an error, and nothing is written",
    )  # fmt: skip
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--task", metavar="TASK",
        help="the head, e.g. ForMaskedLM, where config.json names none or another is wanted",
    )  # fmt: skip
    group.add_argument("--model_class", metavar="CLASS", help="the same by class, BertForMaskedLM")
    group.add_argument("--base", action="store_true", help="leave the head out (--task Model)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model in a directory that has one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert, and print what was written and what did not fit."""
    import jax

    # Nothing here is for an accelerator, and none is to be taken from those who use it.
    jax.config.update("jax_platforms", "cpu")
    from hfseq import conversion, plugins

    plugins.load(arguments.plugin)
    # What these would say of names is in the result.
    logging.getLogger("hfseq.modeling").setLevel(logging.ERROR)
    try:
        done = conversion.convert(
            arguments.source,
            arguments.destination,
            to=arguments.to,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            strict=arguments.strict,
            task="Model" if arguments.base else arguments.task,
            model_class=arguments.model_class,
            overwrite=arguments.overwrite,
        )
    except ValueError as error:
        if "max_shard_size" in str(error):
            raise UsageError(f"--{error}") from None
        raise
    if arguments.json:
        print(json.dumps({"destination": arguments.destination, **dataclasses.asdict(done)}))
    else:
        _tell(done, arguments.destination)
    return 0


def _tell(done: Done, destination: str) -> None:
    types = ", ".join(f"{count} {name}" for name, count in sorted(done.dtypes.items()))
    total = sum(done.files.values())
    print(f"wrote {destination}: {done.model_class}, {done.tensors} tensors ({types})")
    for name, size in done.files.items():
        print(f"  {size:>14,}  {name}{' (carried along)' if name in done.carried else ''}")
    print(f"  {total:>14,}  bytes in {len(done.files)} files")
    for text, names in (
        ("not in the source, so newly initialised", done.initialised),
        ("in the source, but not in this class, so left out", done.dropped),
    ):
        if names:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if names[8:] else "")
            print(f"warning: {text}: {shown}", file=sys.stderr)
