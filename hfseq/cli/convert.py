"""``hfseq convert``: from a checkpoint in one format to the same model in another.

Everything goes through the model's class, which knows the names, transpositions and ties of both
sides; values are not touched unless another type is asked for. What is heavy is imported inside the
functions, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hfseq import plugins
from hfseq.cli.text import add_json, print_json
from hfseq.errors import CheckpointError, UsageError, WeightsError, first_line

if TYPE_CHECKING:
    from hfseq.checkpoints.weights import LoadReport, Tensor
    from hfseq.modeling import FlaxPreTrainedModel

EXAMPLES = """hfseq convert old-flax-model new-model
hfseq convert my-roberta my-roberta-flax --to msgpack
hfseq convert my-gpt2 my-gpt2-bf16 --dtype bfloat16 --max_shard_size 2GB
hfseq convert my-bert my-encoder --base --strict
hfseq convert my-adapter my-model --merge"""

#: What is written beside the weights already, or is not the model's own.
NOT_COPIED = (
    *("config.json", ".*", "__pycache__", "previous-*"),
    *("*.tmp*", "*.log", "*.out", "*.err"),
)

#: Small files that belong to the weights although they are no tokenizer and no card.
SIDECARS = ("fp8_params.safetensors",)

#: Names that a warning lists before it counts the rest.
MAX_LISTED = 8


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hfseq convert``."""
    parser.add_argument(
        "source", metavar="SRC", help="directory, Hub name, or a weight file beside its config.json"
    )
    parser.add_argument("destination", metavar="DST", help="directory to write")
    parser.add_argument(
        "--to",
        choices=("safetensors", "msgpack"),
        default="safetensors",
        help="safetensors, which PyTorch and hfseq load, or msgpack, which Transformers 4's Flax "
        "classes and hfseq load (safetensors)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the parameters; default: as stored",
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="largest weight file (5GB)"
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="a missing, unexpected or mis-shaped name is an error, and nothing is written",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--task",
        metavar="TASK",
        help="the head, e.g. ForMaskedLM, where config.json names none or another is wanted",
    )
    group.add_argument("--model_class", metavar="CLASS", help="the same by class, BertForMaskedLM")
    group.add_argument("--base", action="store_true", help="leave the head out (--task Model)")
    parser.add_argument(
        "--merge", action="store_true", help="SRC is an adapter: add it to its base's weights"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the model in a directory that has one"
    )
    add_json(parser)


def use_cpu() -> None:
    """Keep jax off accelerators: nothing is for them here, and none is taken from their users."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert, and print what was written and what did not fit."""
    use_cpu()
    plugins.load(arguments.plugin)
    # What these would say of names is in the result.
    logging.getLogger("hfseq.modeling").setLevel(logging.ERROR)
    try:
        given = (
            "to",
            "dtype",
            "max_shard_size",
            "strict",
            "task",
            "model_class",
            "overwrite",
            "merge",
        )
        options = {name: getattr(arguments, name) for name in given}
        if arguments.base:
            options["task"] = "Model"
        done = convert(arguments.source, arguments.destination, **options)
    except ValueError as error:
        if "max_shard_size" in str(error):
            raise UsageError(f"--{error}") from None
        raise
    if arguments.json:
        print_json(
            {"destination": arguments.destination, **dataclasses.asdict(done)}, one_line=True
        )
        return 0
    types = ", ".join(f"{count} {name}" for name, count in sorted(done.dtypes.items()))
    print(f"wrote {arguments.destination}: {done.model_class}, {done.tensors} tensors ({types})")
    for name, size in done.files.items():
        print(f"  {size:>14,}  {name}{' (carried along)' if name in done.carried else ''}")
    print(f"  {sum(done.files.values()):>14,}  bytes in {len(done.files)} files")
    for text, names in (
        ("not in the source, so newly initialised", done.initialised),
        ("in the source, but not in this class, so left out", done.dropped),
    ):
        if names:
            more = f" and {len(names) - MAX_LISTED} more" if names[MAX_LISTED:] else ""
            print(f"warning: {text}: {', '.join(names[:MAX_LISTED])}{more}", file=sys.stderr)
    return 0


@dataclasses.dataclass
class Conversion:
    """What a conversion wrote.

    ``files`` are sizes in bytes by name, ``dtypes`` numbers of tensors by type, ``carried`` the
    files that were copied, ``initialised`` parameters that the source lacked, ``dropped`` names in
    the source that the class has no place for.
    """

    model_class: str
    files: dict[str, int]
    tensors: int
    dtypes: dict[str, int]
    carried: list[str]
    initialised: list[str]
    dropped: list[str]


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
    merge: bool = False,
) -> Conversion:
    """Write the model at ``source`` to ``destination``, whole or not at all.

    **Arguments:** ``source`` a directory, a Hub name or a weight file beside its config.json;
    ``to`` "safetensors" (PyTorch's names) or "msgpack" (Transformers 4's Flax); ``dtype`` of the
    parameters, those of the files by default; ``strict`` makes every missing, unexpected or
    mis-shaped name an error; ``overwrite`` replaces the model in a directory that is not empty;
    ``merge`` says that ``source`` is an adapter, which is added to its base.

    **Raises:** UsageError, CheckpointError and WeightsError, each before anything is written.
    """
    import jax.numpy as jnp

    from hfseq.checkpoints.config import Source, open_checkpoint, read_config
    from hfseq.checkpoints.files import parse_size
    from hfseq.checkpoints.weights import LoadReport
    from hfseq.modeling import lora
    from hfseq.modeling.auto import find_class

    checkpoint, target = Source.parse(source), Path(destination)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: give a directory to write to")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UsageError(
            f"{target} is not empty: give another directory, or --overwrite to replace its model"
        )
    parse_size(max_shard_size)
    adapter = lora.find_adapter(checkpoint.location, {})
    if merge and adapter is None:
        raise UsageError(f"--merge: {source} is no adapter: it has no {lora.CONFIG_NAME}")
    if adapter is not None and not merge:
        raise UsageError(f"{source} is an adapter: --merge adds it to its base's weights")
    place, folders, report = checkpoint.location, [checkpoint.location], LoadReport()
    if adapter is not None:
        place = adapter.base
        folders.append(place)
        task = task or (None if model_class else adapter.head)
    stored = read_config(place)
    cls = find_class(stored, place, task=task, model_class=model_class)
    weights = checkpoint.weights if adapter is None else place
    opened = open_checkpoint(weights, {}, from_pt=True)
    model = build_abstract_model(cls, place, opened.tensors)
    if adapter is None:
        _, report = model.file_map.match(opened.tensors, native=opened.native)
    if strict and (wrong := describe_mismatches(model, report)):
        lines = "".join(f"\n  {line}" for line in wrong)
        raise WeightsError(f"{opened.source} does not fit {cls.__name__} (--strict):{lines}")
    model = cls.from_pretrained(
        checkpoint.weights,
        config=model.config,
        from_pt=True,
        param_dtype=None if dtype is None else jnp.dtype(dtype),
    )
    if adapter is not None:
        model = model.merge_adapter()
    if checkpoint.file:
        model.load_generation_config(checkpoint.location)
    if dtype is not None:
        model.config.dtype = dtype
    carried: list[str] = []
    small_files = [path for folder in folders for path in _small_files(folder)]
    with _whole(target) as folder:
        model.save_pretrained(
            folder, max_shard_size=max_shard_size, safe_serialization=to == "safetensors"
        )
        for path in small_files:
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
                carried.append(path.name)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    written = open_checkpoint(str(target), {}, from_pt=False).tensors
    return Conversion(
        model_class=cls.__name__,
        files=sizes,
        tensors=len(written),
        dtypes=dict(collections.Counter(tensor.dtype for tensor in written.values())),
        carried=carried,
        initialised=sorted(".".join(path) for path in report.missing),
        dropped=[] if strict else sorted(report.unexpected),
    )


def build_abstract_model(
    cls: type[FlaxPreTrainedModel], place: str, tensors: Mapping[str, Tensor]
) -> FlaxPreTrainedModel:
    """Return the model of the checkpoint in ``place``, which holds ``tensors``, without values."""
    from hfseq.checkpoints.config import load_config
    from hfseq.checkpoints.headers import WeightsNotDownloaded

    config, _ = load_config(cls, place, None, {}, {})
    try:
        options = cls.checkpoint_options(tensors)
    except WeightsNotDownloaded:  # of a model on the Hub only the headers are read
        options = {}
    return cls(config, _do_init=False, **options)


def describe_mismatches(model: FlaxPreTrainedModel, report: LoadReport) -> list[str]:
    """Say of every name that is missing, left over or of another shape or type what is wrong."""
    from hfseq.checkpoints.weights import describe_missing

    name = type(model).__name__
    return [
        *(
            f"{given}: {shape} in the file, {expected} in {name}"
            for given, shape, expected in report.mismatched
        ),
        *(f"missing:{line[1:]}" for line in describe_missing(report).splitlines()),
        *(f"unexpected: {left}" for left in sorted(report.unexpected)),
        *(
            f"{left}: type {code} is no parameter"
            for left, code in report.unsupported_dtypes.items()
        ),
    ]


def _small_files(place: str) -> list[Path]:
    """Return tokenizer, card and what else lies beside the weights and is the model's own."""
    from hfseq.checkpoints.storage import PREPARED_FILES, matches_any

    folder = Path(place)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [
            pattern for pattern in (*PREPARED_FILES, *SIDECARS) if pattern not in NOT_COPIED
        ]
        try:
            folder = Path(snapshot_download(place, allow_patterns=patterns, library_name="hfseq"))
        except Exception as error:  # the client's own, and those of its HTTP library
            raise CheckpointError(
                f"cannot load the tokenizer files of '{place}': {first_line(error)}"
            ) from error
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and (
            path.name in SIDECARS
            or (matches_any(path, PREPARED_FILES) and not matches_any(path, NOT_COPIED))
        )
    ]


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Give a directory whose files come to ``target`` together, if all of them were written."""
    from hfseq.checkpoints.files import staging_directory

    folder, parent = target, None
    try:
        if not (target.is_dir() and any(target.iterdir())):  # then the directory comes whole, too
            target.parent.mkdir(parents=True, exist_ok=True)
            parent = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            folder = parent / target.name
            folder.mkdir()
        with staging_directory(folder) as stage:
            yield stage
        if folder != target:
            os.replace(folder, target)
    except OSError as error:  # CheckpointError is one
        reason: BaseException = error
        while isinstance(reason, CheckpointError) and reason.__cause__ is not None:
            reason = reason.__cause__  # what the directories under way are called helps nobody
        raise CheckpointError(
            f"cannot write {target} ({first_line(reason)}): what was there is untouched; free "
            "some space or give another directory"
        ) from error
    finally:
        if parent is not None:
            shutil.rmtree(parent, ignore_errors=True)
