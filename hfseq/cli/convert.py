"""Command-line interface of ``hfseq convert``: converts a checkpoint to another format.

The model class defines how names, axis orders and tied tensors of the two formats correspond.
Values are unchanged unless ``--dtype`` is given. Modules that are slow to import are imported
inside functions so that ``--help`` is fast.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

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
hfseq convert my-adapter my-model --merge
hfseq convert my-bert my-student --keep_layers 0,2,4,7,9,11"""

#: Images are copied if the model card shows them.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")

#: Files that are not copied: `save_pretrained` writes them, or they do not belong to the model.
NOT_COPIED = (
    *("config.json", ".*", "__pycache__", "previous-*"),
    *("*.tmp*", "*.log", "*.out", "*.err"),
)

#: Small files to copy in addition to the files of the tokenizer and the model card.
SIDECARS = ("fp8_params.safetensors",)

#: Maximum number of names that a warning lists.
MAX_LISTED = 8


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``hfseq convert``."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="Directory, Hub name, or weight file with config.json in the same directory.",
    )
    parser.add_argument("destination", metavar="DST", help="Output directory.")
    parser.add_argument(
        "--to",
        choices=("safetensors", "msgpack"),
        default="safetensors",
        help="Output format: safetensors for PyTorch and hfseq, or msgpack for Transformers 4's "
        "Flax classes and hfseq. Default: safetensors.",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="Data type of the parameters. Default: as stored.",
    )
    parser.add_argument(
        "--max_shard_size",
        default="5GB",
        metavar="SIZE",
        help="Maximum size of a weight file. Default: 5GB.",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="Fail and write nothing if a tensor is missing or unexpected, or its shape differs.",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--task",
        metavar="TASK",
        help="Head, e.g. ForMaskedLM. Default: the head in config.json.",
    )
    group.add_argument(
        "--model_class",
        metavar="CLASS",
        help="Model class, e.g. BertForMaskedLM. Default: the class in config.json.",
    )
    group.add_argument(
        "--base", action="store_true", help="Convert the base model without a head (--task Model)."
    )
    parser.add_argument(
        "--merge", action="store_true", help="Merge the adapter in SRC with its base model."
    )
    for flag, layers in (("keep_layers", "layers"), ("keep_decoder_layers", "decoder layers")):
        parser.add_argument(
            f"--{flag}",
            metavar="N,N,...",
            help=f"Keep only these {layers}, e.g. 0,2,4, to create a student of the model.",
        )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace the model in an existing directory."
    )
    add_json(parser)


def use_cpu() -> None:
    """Restricts JAX to CPUs, so that the command does not occupy accelerators."""
    import jax

    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Silences the warnings of a logger. The result of the command reports mismatches instead."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def run_convert(arguments: argparse.Namespace) -> int:
    """Converts the checkpoint and prints the written files and the mismatches."""
    use_cpu()
    plugins.load(arguments.plugin)
    try:
        flags = (
            "to",
            "dtype",
            "max_shard_size",
            "strict",
            "task",
            "model_class",
            "overwrite",
            "merge",
            "keep_layers",
            "keep_decoder_layers",
        )
        options = {name: getattr(arguments, name) for name in flags}
        if arguments.base:
            options["task"] = "Model"
        with _without_warnings("hfseq.modeling"):
            conversion = convert(arguments.source, arguments.destination, **options)
    except ValueError as error:
        if "max_shard_size" in str(error):
            raise UsageError(f"--{error}") from None
        raise
    if arguments.json:
        print_json(
            {"destination": arguments.destination, **dataclasses.asdict(conversion)}, one_line=True
        )
        return 0
    dtypes = ", ".join(f"{count} {name}" for name, count in sorted(conversion.dtypes.items()))
    print(
        f"wrote {arguments.destination}: {conversion.model_class}, {conversion.tensors} tensors "
        f"({dtypes})"
    )
    for name, size in conversion.files.items():
        print(f"  {size:>14,}  {name}{' (copied)' if name in conversion.carried else ''}")
    print(f"  {sum(conversion.files.values()):>14,}  bytes in {len(conversion.files)} files")
    for text, names in (
        ("missing in the source and newly initialized", conversion.initialised),
        ("in the source, but ignored because the class lacks them", conversion.dropped),
    ):
        if names:
            suffix = f" and {len(names) - MAX_LISTED} more" if names[MAX_LISTED:] else ""
            print(f"warning: {text}: {', '.join(names[:MAX_LISTED])}{suffix}", file=sys.stderr)
    return 0


@dataclasses.dataclass
class Conversion:
    """The result of a conversion, which ``--json`` prints.

    Attributes:
        model_class: Name of the model class.
        files: Sizes in bytes by file name.
        tensors: Number of tensors.
        dtypes: Number of tensors by data type.
        carried: Names of the copied files.
        initialised: Names of parameters that the source lacks and that were initialized.
        dropped: Names of source tensors that the class does not have.
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
    keep_layers: str | None = None,
    keep_decoder_layers: str | None = None,
) -> Conversion:
    """Converts the model at ``source`` and writes it to ``destination``.

    The destination is unchanged if the conversion fails.

    Args:
        source: Directory, Hub name, or weight file with config.json in the same directory.
        destination: Output directory.
        to: ``"safetensors"`` (names as in PyTorch) or ``"msgpack"`` (Transformers 4's Flax format).
        dtype: Data type of the parameters. Default: as stored.
        max_shard_size: Maximum size of a weight file, in bytes or as a string such as ``"5GB"``.
        strict: Whether a missing, unexpected or mismatching tensor is an error.
        task: Head, e.g. ``"ForMaskedLM"``. Default: the head in config.json.
        model_class: Model class name, as an alternative to ``task``.
        overwrite: Whether to replace the model in a directory that is not empty.
        merge: Whether ``source`` is an adapter to merge with its base model.
        keep_layers: Numbers of the layers to keep, separated by commas, for a student in
            distillation. In encoder-decoder models, these are layers of the encoder.
        keep_decoder_layers: Numbers of the decoder layers to keep.

    Raises:
        UsageError: The arguments do not fit the source or the destination.
        CheckpointError: The source cannot be read or the destination cannot be written.
        WeightsError: The weights do not match the class.
    """
    import jax.numpy as jnp

    from hfseq.checkpoints.config import Source, open_checkpoint, read_config
    from hfseq.checkpoints.files import parse_size
    from hfseq.modeling import layers, lora
    from hfseq.modeling.auto import find_class

    checkpoint, target = Source.parse(source), Path(destination)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file: the destination must be a directory")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise UsageError(
            f"{target} is not empty: use another directory, or --overwrite to replace its model"
        )
    parse_size(max_shard_size)
    adapter, location, download = lora.find_base(checkpoint.location, {})
    if merge and adapter is None:
        raise UsageError(
            f"--merge: {source} is not an adapter, because it has no {lora.CONFIG_NAME}"
        )
    if adapter is not None and not merge:
        raise UsageError(f"{source} is an adapter: use --merge to merge it with its base model")
    folders = [checkpoint.location]
    if adapter is not None:
        folders.append(location)
        task = task or (None if model_class else adapter.head)
    config_dict = read_config(location, download)
    cls = find_class(config_dict, location, task=task, model_class=model_class)
    weights = checkpoint.weights if adapter is None else location
    opened = open_checkpoint(weights, download)
    options = {} if adapter is None else {"peft_config": adapter.config}
    model, tensors = build_abstract_model(cls, location, opened.tensors, download, **options)
    if adapter is not None:
        opened.tensors = tensors
        tensors = lora.combine_tensors(adapter, opened, model.file_map, model.vocab_size())
    _, report = model.match_tensors(tensors, native=opened.native)
    if strict and (mismatches := describe_mismatches(model, report, opened.native)):
        lines = "".join(f"\n  {line}" for line in mismatches)
        raise WeightsError(f"{opened.source} does not fit {cls.__name__} (--strict):{lines}")
    model = cls.from_pretrained(
        checkpoint.weights,
        config=model.config,
        param_dtype=None if dtype is None else jnp.dtype(dtype),
        **model.checkpoint_arguments,
    )
    if adapter is not None:
        model = model.merge_adapter()
    if keep_layers is not None or keep_decoder_layers is not None:
        model = layers.keep_layers(
            model,
            _numbers("keep_layers", keep_layers),
            _numbers("keep_decoder_layers", keep_decoder_layers),
        )
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
        sizes = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    saved = open_checkpoint(str(target), {}).tensors
    return Conversion(
        model_class=cls.__name__,
        files=sizes,
        tensors=len(saved),
        dtypes=dict(collections.Counter(tensor.dtype for tensor in saved.values())),
        carried=carried,
        initialised=sorted(".".join(path) for path in report.missing),
        dropped=sorted(
            {*report.unexpected, *report.derived, *(other for _, other in report.unused_biases)}
        ),
    )


def _numbers(flag: str, text: str | None) -> list[int] | None:
    """Parses numbers separated by commas."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--{flag} {text}: use numbers separated by commas, e.g. 0,2,4")
    return [int(part) for part in parts]


def build_abstract_model(
    cls: type[FlaxPreTrainedModel],
    location: str,
    tensors: Mapping[str, Tensor],
    download: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> tuple[FlaxPreTrainedModel, dict[str, Tensor]]:
    """Returns the model of a checkpoint without parameter values, and its dequantized tensors.

    Args:
        cls: The model class.
        location: Directory or Hub name of the checkpoint.
        tensors: The tensors of the checkpoint by name.
        download: Download options.
        **arguments: Further arguments of the class.
    """
    from hfseq.checkpoints.config import load_config
    from hfseq.checkpoints.headers import WeightsNotDownloaded
    from hfseq.checkpoints.quantized import dequantize

    config, _ = load_config(cls, location, None, download or {}, {})
    dequantized = dequantize(tensors, config, location)
    try:
        options = cls.checkpoint_options(dequantized, config)
    except WeightsNotDownloaded:  # only the headers of models on the Hub are read
        options = {}
    return cls(config, _do_init=False, **{**options, **arguments}), dequantized


def describe_mismatches(model: FlaxPreTrainedModel, report: LoadReport, native: bool) -> list[str]:
    """Returns a message for each tensor that is missing, unexpected or does not fit the model.

    Args:
        model: The model.
        report: The report of `FlaxPreTrainedModel.match_tensors`.
        native: Whether the tensors have the names of the model's parameters. Otherwise they have
            PyTorch's names.
    """
    from hfseq.checkpoints.weights import describe_missing

    name = type(model).__name__
    slots = () if native else model.file_map.slots
    names = {slot.path: slot.name for slot in slots if slot.layer is None}
    return [
        *(
            f"{key}: {shape} in the file, {expected} in {name}"
            for key, shape, expected in report.mismatched
        ),
        *(f"missing:{line[1:]}" for line in describe_missing(report, names).splitlines()),
        *(f"unexpected: {key}" for key in sorted(report.unexpected)),
        *(
            f"{key} and {other} have different values, but are one parameter of {name}"
            for key, other in (*report.conflicts, *report.unused_biases)
        ),
        *(
            f"{key}: the values in the file differ from those that {name} computes"
            for key in report.derived
        ),
        *(
            f"{key}: unsupported dtype {dtype} of a parameter"
            for key, dtype in report.unsupported_dtypes.items()
        ),
    ]


def _small_files(location: str) -> list[Path]:
    """Returns the files of the tokenizer, the model card and other small files of the model."""
    from hfseq.checkpoints.storage import PREPARED_FILES, matches_any

    folder = Path(location)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = [
            pattern for pattern in (*PREPARED_FILES, *SIDECARS) if pattern not in NOT_COPIED
        ]
        try:
            folder = Path(
                snapshot_download(location, allow_patterns=patterns, library_name="hfseq")
            )
        except Exception as error:  # raised by the client or its HTTP library
            raise CheckpointError(
                f"cannot load the tokenizer files of '{location}': {first_line(error)}"
            ) from error
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and (
            path.name in SIDECARS
            or (matches_any(path, PREPARED_FILES) and not matches_any(path, NOT_COPIED))
            or (path.suffix in IMAGE_SUFFIXES and quote(path.name) in text)  # shown in the card
        )
    ]


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yields a temporary directory whose files are moved to ``target`` together on success."""
    from hfseq.checkpoints.files import is_full, staging_directory

    folder, parent = target, None
    try:
        # A new directory is created atomically.
        if not (target.is_dir() and any(target.iterdir())):
            target.parent.mkdir(parents=True, exist_ok=True)
            parent = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            folder = parent / target.name
            folder.mkdir()
        with staging_directory(folder) as stage:
            yield stage
        if folder != target:
            os.replace(folder, target)
    except OSError as error:  # includes CheckpointError
        reason: BaseException = error
        while isinstance(reason, CheckpointError) and reason.__cause__ is not None:
            reason = reason.__cause__  # does not contain the name of the temporary directory
        raise CheckpointError(
            f"cannot write {target} ({first_line(reason)}). Its files are unchanged. "
            f"{'Free disk space' if is_full(reason) else 'Check its permissions'} or use another "
            "directory"
        ) from error
    finally:
        if parent is not None:
            shutil.rmtree(parent, ignore_errors=True)
