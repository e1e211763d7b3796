"""Where documents come from: a plugin, the Hub, or files, as a training and a validation split."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hfseq import json_text
from hfseq.data import files as data_files
from hfseq.data import parquet_files, raw
from hfseq.data.arguments import TextArguments
from hfseq.errors import DataError, UsageError, nearest

REFERENCE_COLUMN = "chinese_ref"  # transformers' name for whole-word reference positions
NO_SCRIPTS = (
    "`datasets` no longer runs loading scripts, which is how {name} was distributed. Use a corpus "
    "stored as parquet, e.g. `--dataset_name HuggingFaceFW/fineweb-2 --dataset_config_name "
    "nob_Latn` or `--dataset_name wikimedia/wikipedia --dataset_config_name 20231101.no`, or your "
    "own text with --train_file"
)
SCRIPT_DATASETS = ("oscar", "wikipedia", "bookcorpus", "cc100", "mc4", "cc_news", "openwebtext")


class Splits(dict[str, Any]):
    """The splits by name ("train", "validation", "test"; any may be absent) and the text column."""

    def __init__(self, splits: dict[str, Any], text_column: str):
        super().__init__(splits)
        self.text_column = text_column


def load_splits(arguments: TextArguments, plugins: Any = None) -> Splits:
    """Load the documents that the flags ask for.

    A dataset name is offered to the plugins' ``load_dataset`` hook first and looked up on the Hub
    then; without one the files are read. Without a validation split the first
    ``validation_split_percentage`` percent of the documents validate; of a stream, whose length
    nobody knows, those whose hash falls below that share (the same ones in every run, and equal
    documents always on the same side). Where the flags know a test split, the documents after
    those of validation are set aside for it.

    Returns ``datasets.Dataset`` splits, or ``IterableDataset`` with ``streaming``; what has no
    documents comes as :mod:`hfseq.data.raw` has it.

    Raises:
        UsageError: neither a dataset nor a file is given.
        DataError: the data is missing, unreadable, empty, or has no text column.
    """
    known = [split for split in raw.SPLITS if hasattr(arguments, f"{split}_file")]
    files = [getattr(arguments, f"{split}_file") for split in known]
    if not (arguments.dataset_name or any(files)):
        raise UsageError("no data: give --dataset_name or --train_file")
    if raw.is_raw(arguments):
        return _limited(_raw(arguments), "text", arguments)
    splits: dict[str, Any] = {}
    if arguments.dataset_name:
        splits = load_named(arguments, plugins, known)
    for split, patterns in zip(known, files, strict=True):
        if patterns:
            splits[split] = _load_files(patterns, f"--{split}_file", arguments)
    column = text_column(next(splits[split] for split in known if split in splits), arguments)
    for split in splits:
        if reference := getattr(arguments, f"{split}_ref_file", None):
            splits[split] = _with_references(
                splits[split], column, reference, f"--{split}_ref_file"
            )
    if "train" in splits:
        _set_aside(splits, column, arguments)
    return _limited(splits, column, arguments)


def _set_aside(splits: dict[str, Any], column: str, arguments: TextArguments) -> None:
    """Cut what has no split of its own off the training text; shares are those of all of it."""
    whole, low = splits["train"], 0
    for split in ("validation", "test"):
        share = getattr(arguments, f"{split}_split_percentage", 0)
        if split in splits or not share:
            continue
        if arguments.streaming:
            cut = _split_stream(splits["train"], column, low, share)
        else:
            cut = _split(splits["train"], round(len(whole) * share / 100), split, share)
        splits[split], splits["train"] = cut
        low += share


def _raw(arguments: TextArguments) -> dict[str, Any]:
    if arguments.dataset_name:
        raise UsageError(
            f"--dataset_name {arguments.dataset_name} has documents, which --sample_by raw does "
            "not read: give files with --train_file, or drop --sample_by"
        )
    return raw.load_raw(arguments)


def _limited(splits: dict[str, Any], column: str, arguments: TextArguments) -> Splits:
    names = {"train": "train", "validation": "eval", "test": "test"}
    limits = {s: getattr(arguments, f"max_{name}_samples", None) for s, name in names.items()}
    return Splits({name: _first(split, limits[name]) for name, split in splits.items()}, column)


def load_named(
    arguments: TextArguments,
    plugins: Any,
    wanted: Sequence[str] = ("train", "validation"),
    no_scripts: str = NO_SCRIPTS,
) -> dict[str, Any]:
    """Load those of the splits ``wanted`` that ``--dataset_name`` has.

    ``no_scripts`` is what to say of a dataset that is a loading script.

    Raises:
        DataError: the dataset cannot be loaded, or has none of the splits.
    """
    name = arguments.dataset_name
    found = plugins.call_first("load_dataset", name=name, arguments=arguments) if plugins else None
    if found is None:
        found = _load_hub(arguments, no_scripts)
    splits = {split: found[split] for split in wanted if split in found}
    if not splits:
        raise DataError(
            f"--dataset_name {name} has the splits {', '.join(map(str, found)) or 'none'}; "
            f"{' or '.join(map(repr, wanted))} is needed"
        )
    return splits


def _load_hub(arguments: TextArguments, no_scripts: str) -> Any:
    from datasets import load_dataset, load_from_disk

    name, config = str(arguments.dataset_name), arguments.dataset_config_name
    label = f"--dataset_name {name}" + (f" --dataset_config_name {config}" if config else "")
    try:
        if (Path(name) / "dataset_dict.json").exists():
            return load_from_disk(name)
        return load_dataset(
            name,
            config,
            revision=arguments.dataset_revision,
            streaming=arguments.streaming,
            cache_dir=_datasets_cache(arguments),
        )
    except Exception as error:
        if "scripts are no longer supported" in str(error) or name in SCRIPT_DATASETS:
            raise DataError(f"{label}: {no_scripts.format(name=name)} ({error})") from error
        if isinstance(error, ConnectionError):
            raise DataError(
                f"{label}: the Hub cannot be reached ({error}); check the network, or give local "
                "text with --train_file"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{label}: no such dataset on the Hub or on disk ({error})") from error
        raise DataError(f"{label} cannot be loaded: {error.__cause__ or error}") from error


def _load_files(patterns: list[str], flag: str, arguments: TextArguments) -> Any:
    from datasets import load_dataset

    files = data_files.expand(patterns, flag)
    builder, options = data_files.builder_of(files, flag)
    data_files.check_heads(files, builder, flag)
    for file in files:
        if builder == "json" and not arguments.streaming:
            # pyarrow stores what is not UTF-8 and only fails when the row is read
            data_files.check_utf8(file, flag)
        elif builder == "parquet":
            parquet_files.check(file, flag)
        else:
            data_files.check_unpacks(file, flag, whole=not arguments.streaming)
    if builder == "text":
        keep = getattr(arguments, "keep_linebreaks", False)
        options = {"sample_by": arguments.sample_by, "keep_linebreaks": keep}
    try:
        dataset = load_dataset(
            builder,
            data_files={"train": files},
            split="train",
            streaming=arguments.streaming,
            cache_dir=_datasets_cache(arguments),
            **options,
        )
        if arguments.streaming:
            next(iter(dataset))
    except StopIteration:
        raise DataError(f"{flag} {files[0]} holds no documents") from None
    except Exception as error:
        raise data_files.explain(error, files, builder, flag) from error
    if not arguments.streaming and not len(dataset):
        raise DataError(f"{flag} {files[0]} holds no documents")
    return dataset


def _datasets_cache(arguments: TextArguments) -> str | None:
    return str(Path(arguments.data_cache_dir) / "datasets") if arguments.data_cache_dir else None


def text_column(dataset: Any, arguments: TextArguments) -> str:
    """Return the column to read: the one asked for, else "text", else the first one of strings."""
    types = _column_types(dataset)
    asked = arguments.text_column_name
    if asked and asked not in types:
        raise DataError(
            f"--text_column_name {asked}: no such column; the data has "
            f"{', '.join(types) or 'no columns'}{nearest(asked, types)}"
        )
    texts = [name for name, kind in types.items() if kind == "text"]
    column = asked or ("text" if "text" in texts else next(iter(texts), None))
    if column not in texts:
        listing = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        if asked:
            raise DataError(f"--text_column_name {asked} holds no text; the columns are {listing}")
        raise DataError(f"no column holds text; the columns are {listing or 'none'}")
    return column


def _column_types(dataset: Any) -> dict[str, str]:
    if dataset.features:
        kinds = {
            name: getattr(f, "dtype", type(f).__name__) for name, f in dataset.features.items()
        }
        return {name: "text" if "string" in kind else kind for name, kind in kinds.items()}
    example: dict[str, Any] = next(iter(dataset), {})
    return {
        name: "text" if isinstance(value, str) else type(value).__name__
        for name, value in example.items()
    }


def _with_references(dataset: Any, column: str, file: str, flag: str) -> Any:
    """Add the reference positions, one JSON list per document that is not blank."""
    filled = [i for i, text in enumerate(dataset[column]) if not is_blank(text)]
    dataset = dataset.select(filled)
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        references = [json_text.parse(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{flag} {file} cannot be read: {error}") from error
    if len(references) != len(dataset):
        raise DataError(
            f"{flag} {file} has {len(references)} lines for {len(dataset)} documents; "
            "give one line a document"
        )
    return dataset.add_column(REFERENCE_COLUMN, references)


def is_blank(text: str | None) -> bool:
    """True for a document that holds nothing to train on."""
    return not text or text.isspace()


def _split(dataset: Any, count: int, split: str, percentage: int) -> tuple[Any, Any]:
    if len(dataset) < 2:
        left = " left" if split == "test" else ""
        raise DataError(
            f"the training text has {len(dataset)} document{left}, too few to split off "
            f"{percentage}% for {split}; give --{split}_file, --{split}_split_percentage 0, or for "
            "a .txt file --sample_by line"
        )
    border = min(max(1, count), len(dataset) - 1)
    return dataset.select(range(border)), dataset.select(range(border, len(dataset)))


def _split_stream(dataset: Any, column: str, low: int, share: int) -> tuple[Any, Any]:
    """Cut off the documents whose hash is ``low`` to ``low + share`` percent of the way."""

    def goes(text: str | None) -> bool:
        digest = blake2b((text or "").encode(errors="surrogatepass"), digest_size=8).digest()
        place = int.from_bytes(digest, "little") % 10_000
        return low * 100 <= place < (low + share) * 100

    def stays(text: str | None) -> bool:
        return not goes(text)

    return tuple(dataset.filter(keep, input_columns=column) for keep in (goes, stays))


def _first(dataset: Any, count: int | None) -> Any:
    if count is None:
        return dataset
    if isinstance(dataset, raw.RawText | raw.Images):
        return dataset.take(count)
    return (
        dataset.select(range(min(count, len(dataset))))
        if hasattr(dataset, "__len__")
        else dataset.take(count)
    )
