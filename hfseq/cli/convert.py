"""From a checkpoint in one format to the same model in another: ``hfseq convert``.

Everything goes through the model's class, which knows the names, transpositions and ties of both
sides; values are not touched unless another type is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hfseq.checkpoints import config as resolve
from hfseq.checkpoints import files, weights
from hfseq.checkpoints.storage import PREPARED, matches
from hfseq.errors import CheckpointError, UsageError, WeightsError, first_line
from hfseq.modeling.auto import Source, find_class, read_config

#: What is written beside the weights already, or is not the model's own.
LEFT_BEHIND = (
    "config.json",
    ".*",
    "__pycache__",
    "previous-*",
    "*.tmp*",
    "*.log",
    "*.out",
    "*.err",
)


SIDECARS = ("fp8_params.safetensors",)


@dataclasses.dataclass
class Done:
    """What a conversion wrote."""

    model_class: str
    files: dict[str, int]
    tensors: int
    dtypes: dict[str, int]
    carried: list[str]
    initialised: list[str]
    dropped: list[str]


def structure(cls: Any, place: str, opened: files.OpenedWeights) -> Any:
    """Return the model of a checkpoint without parameters."""
    config, _ = resolve.load_config(cls, place, None, {}, {})
    return cls(config, _do_init=False, **cls.checkpoint_options(opened.tensors))


def problems(model: Any, report: weights.LoadReport) -> list[str]:
    """Say of every name that is missing, left over or of another shape or type what is wrong."""
    name = type(model).__name__
    found = [
        f"{given}: {shape} in the file, {expected} in {name}"
        for given, shape, expected in report.mismatched
    ]
    found += [f"missing:{line[1:]}" for line in weights.describe_missing(report).splitlines()]
    found += [f"unexpected: {left}" for left in sorted(report.unexpected)]
    return found + [f"{left}: type {code} is no parameter" for left, code in report.untyped.items()]


def convert(
    source: str,
    destination: str | os.PathLike[str],
    *,
    to: str = "safetensors",
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    strict: bool = False,
    task: str | None = None,
    model_class: str | None = None,
    overwrite: bool = False,
) -> Done:
    """Write the model at ``source`` to ``destination``, whole or not at all.

    **Arguments:** ``source`` a directory, a Hub name or a weight file beside its config.json;
    ``to`` "safetensors" (PyTorch's names) or "msgpack" (Transformers 4's Flax); ``dtype`` of the
    parameters, those of the files by default; ``strict`` makes every missing, unexpected or
    mis-shaped name an error; ``overwrite`` replaces the model in a directory that is not empty.

    **Raises:** UsageError, CheckpointError and WeightsError, each before anything is written.
    """
    import jax.numpy as jnp

    found, target = Source.of(source), Path(destination)
    check_destination(target, overwrite)
    files.parse_size(max_shard_size)
    stored = read_config(found.place)
    cls = find_class(stored, found.place, task=task, model_class=model_class)
    opened = resolve.open_source(found.weights, {}, from_pt=True)
    model = structure(cls, found.place, opened)
    _, report = model.file_map.match(opened.tensors, native=opened.native)
    if strict and (wrong := problems(model, report)):
        lines = "".join(f"\n  {line}" for line in wrong)
        raise WeightsError(f"{opened.source} does not fit {cls.__name__} (--strict):{lines}")
    model = cls.from_pretrained(
        found.weights,
        config=model.config,
        from_pt=True,
        param_dtype=None if dtype is None else jnp.dtype(dtype),
    )
    if found.file:
        model.load_generation_config(found.place)
    if dtype is not None:
        model.config.dtype = dtype
    origin = Path(found.place) if Path(found.place).is_dir() else _downloaded(found.place)
    with _written(target) as folder:
        model.save_pretrained(
            folder, max_shard_size=max_shard_size, safe_serialization=to == "safetensors"
        )
        carried = _carry(origin, folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    kept = files.open_weights(lambda name: _existing(target / name), str(target)).tensors
    types: dict[str, int] = {}
    for tensor in kept.values():
        types[tensor.dtype] = types.get(tensor.dtype, 0) + 1
    lost = [] if strict else sorted(report.unexpected)
    fresh = sorted(".".join(path) for path in report.missing)
    return Done(cls.__name__, sizes, len(kept), types, carried, fresh, lost)


def check_destination(target: Path, overwrite: bool) -> None:
    """Refuse a file, and a directory with anything in it unless that may be overwritten."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: give a directory to write to")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UsageError(
            f"{target} is not empty: give another directory, or --overwrite to replace its model"
        )


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Give a directory whose files come to ``target`` together, if all of them were written."""
    try:
        with _staged(target) as stage:
            yield stage
    except CheckpointError as error:
        reason: BaseException = error
        while isinstance(reason, CheckpointError) and reason.__cause__ is not None:
            reason = reason.__cause__  # what the directories under way are called helps nobody
        raise CheckpointError(
            f"cannot write {target} ({first_line(reason)}): what was there is untouched; free "
            "some space or give another directory"
        ) from error


@contextlib.contextmanager
def _staged(target: Path) -> Iterator[Path]:
    if target.is_dir() and any(target.iterdir()):
        with files.staged(target) as stage:
            yield stage
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    try:
        fresh = Path(parent) / target.name
        fresh.mkdir()
        with files.staged(fresh) as stage:
            yield stage
        os.replace(fresh, target)
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _carry(origin: Path, folder: Path) -> list[str]:
    """Copy tokenizer, card and what else is small and the model's own; returns the names."""
    carried = []
    for path in sorted(origin.iterdir()):
        own = matches(path, PREPARED) and not matches(path, LEFT_BEHIND)
        if (own or path.name in SIDECARS) and path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
            carried.append(path.name)
    return carried


def _downloaded(name: str) -> Path:
    """Return a snapshot of a repository's small files."""
    from huggingface_hub import snapshot_download

    wanted = [pattern for pattern in (*PREPARED, *SIDECARS) if pattern not in LEFT_BEHIND]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, library_name="hfseq"))
    except Exception as error:  # the client's own, and those of its HTTP library
        raise CheckpointError(
            f"cannot load the tokenizer files of '{name}': {first_line(error)}"
        ) from error


def _existing(path: Path) -> str | None:
    return str(path) if path.is_file() else None


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
    from hfseq import plugins

    plugins.load(arguments.plugin)
    # What these would say of names is in the result.
    logging.getLogger("hfseq.modeling").setLevel(logging.ERROR)
    try:
        done = convert(
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
