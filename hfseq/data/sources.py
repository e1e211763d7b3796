"""Loads documents from plugins, the Hub or files and divides them into splits.

The module also reads raw text and arrays, which are not divided into documents, and the images or
audio of datasets.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import numpy as np

from hfseq import errors
from hfseq.data import files as data_files
from hfseq.data.arguments import ARRAY_EXTENSIONS, SPLITS, TextArguments, has_arrays
from hfseq.data.store import ARROW_VERSION, StringTableWriter, write_once
from hfseq.data.tables import DelimitedTable
from hfseq.data.tokenizers import byte_ids
from hfseq.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from hfseq.plugins import Plugins
REFERENCE_COLUMN = "chinese_ref"  # the name in Transformers for whole-word reference positions
NO_SCRIPTS = (
    "`datasets` no longer supports loading scripts, which {name} uses. Use a dataset in "
    "parquet format, e.g. `--dataset_name HuggingFaceFW/fineweb-2 --dataset_config_name "
    "nob_Latn` or `--dataset_name wikimedia/wikipedia --dataset_config_name 20231101.no`, or "
    "local text with --train_file"
)
DATASETS_WITH_SCRIPTS = (
    "oscar",
    "wikipedia",
    "bookcorpus",
    "cc100",
    "mc4",
    "cc_news",
    "openwebtext",
)


#: Other names of the splits, which `datasets` recognizes too.
SPLIT_ALIASES = {
    "train": ("training",),
    "validation": ("valid", "val", "dev"),
    "test": ("testing", "evaluation"),
}

logger = logging.getLogger(__name__)


class Splits(dict[str, Any]):
    """A dictionary of the documents of each split.

    Args:
        splits: Documents by split name ("train", "validation", "test"). Any split may be absent.
        text_column: The column of the text.
    """

    def __init__(self, splits: dict[str, Any], text_column: str):
        super().__init__(splits)
        self.text_column = text_column

    def hold_out(self, arguments: TextArguments) -> None:
        """Takes missing validation and test splits from the training documents.

        The percentages of the flags refer to the training split before any document is taken.

        Raises:
            DataError: The training split has too few documents.
        """
        train, low = self["train"], 0
        for split in ("validation", "test"):
            share = getattr(arguments, f"{split}_split_percentage", 0)
            if split in self or not share:
                continue
            remaining = self["train"]
            if arguments.streaming:
                goes, stays = (
                    partial(_is_between, low=low, high=low + share, inside=inside)
                    for inside in (True, False)
                )
                self[split] = remaining.filter(goes, input_columns=self.text_column)
                self["train"] = remaining.filter(stays, input_columns=self.text_column)
            elif len(remaining) < 2:
                left = " left" if split == "test" else ""
                raise DataError(
                    f"the training text has {len(remaining)} document{left}, too few to hold out "
                    f"{share}% for {split}; use --{split}_file, --{split}_split_percentage 0, "
                    "or for a .txt file --sample_by line"
                )
            else:
                border = min(max(1, round(len(train) * share / 100)), len(remaining) - 1)
                self[split] = remaining.select(range(border))
                self["train"] = remaining.select(range(border, len(remaining)))
            low += share

    def limit_samples(self, arguments: TextArguments) -> Self:
        """Truncates each split to the number of documents that the flags specify."""
        names = {"train": "train", "validation": "eval", "test": "test"}
        for name, split in self.items():
            count = getattr(arguments, f"max_{names[name]}_samples", None)
            if count is not None and hasattr(split, "select"):
                self[name] = split.select(range(min(count, len(split))))
            elif count is not None:  # a stream, raw text or arrays
                self[name] = split.take(count)
        return self


def load_splits(arguments: TextArguments, plugins: Plugins | None = None) -> Splits:
    """Loads the documents that the flags specify.

    A dataset name is passed to the plugins' `load_dataset` hook first, and looked up on the Hub if
    no plugin handles it. Without a dataset name, files are read.

    If the validation split is missing, the first `validation_split_percentage` percent of the
    training documents are used for validation. For objectives with a test split, the documents
    after them are used for testing in the same way. The length of a stream is unknown, so its
    documents are selected by the hash of their text instead of their position. The selection is
    then the same in every run, and equal documents are in the same split.

    Args:
        arguments: The data flags.
        plugins: Plugins whose `load_dataset` hook may provide the dataset.

    Returns:
        `datasets.Dataset` splits, or `IterableDataset` with `streaming`. Raw text and arrays are
        returned as `RawText` and `ByteArrays`.

    Raises:
        UsageError: The flags specify no data, or contradict each other.
        DataError: The data cannot be read.
    """
    split_names = [split for split in SPLITS if hasattr(arguments, f"{split}_file")]
    patterns_by_split = {split: getattr(arguments, f"{split}_file") for split in split_names}
    if not (arguments.dataset_name or any(patterns_by_split.values())):
        raise UsageError("no data: give --dataset_name or --train_file")
    if is_raw(arguments):
        if arguments.dataset_name:
            raise UsageError(
                f"--dataset_name {arguments.dataset_name} contains documents, but --sample_by "
                "raw reads files: use --train_file, or drop --sample_by"
            )
        return Splits(load_raw(arguments), "text").limit_samples(arguments)
    loaded = load_dataset_splits(arguments, plugins, split_names) if arguments.dataset_name else {}
    for split, patterns in patterns_by_split.items():
        if patterns:
            loaded[split] = _load_files(patterns, f"--{split}_file", arguments)
    columns = {
        split: text_column(dataset, arguments, split)
        for split, dataset in sorted(loaded.items(), key=lambda item: split_names.index(item[0]))
    }
    column = next(iter(columns.values()))
    splits = Splits(
        {
            split: loaded[split]
            if name == column
            else loaded[split].select_columns([name]).rename_column(name, column)
            for split, name in columns.items()
        },
        column,
    )
    for split, dataset in splits.items():
        if file := getattr(arguments, f"{split}_ref_file", None):
            flag = f"--{split}_ref_file {file}"
            # The file has one JSON list of positions for each document that is not blank.
            filled_indices = [i for i, text in enumerate(dataset[column]) if not is_blank(text)]
            try:
                lines = Path(file).read_text(encoding="utf-8").splitlines()
                references = [errors.parse_json(line) for line in lines if line.strip()]
            except (OSError, ValueError) as error:
                raise DataError(f"{flag} cannot be read: {error}") from error
            if len(references) != len(filled_indices):
                raise DataError(
                    f"{flag} has {len(references)} lines for {len(filled_indices)} documents; it "
                    "must have one line per document"
                )
            splits[split] = dataset.select(filled_indices).add_column(REFERENCE_COLUMN, references)
    if "train" in splits:
        splits.hold_out(arguments)
    return splits.limit_samples(arguments)


def _is_between(text: str | None, low: int, high: int, inside: bool) -> bool:
    """Compares the position of a document, as given by its hash, with a range of percentages.

    Args:
        text: The document.
        low: Lower bound in percent (inclusive).
        high: Upper bound in percent (exclusive).
        inside: Whether to return true for documents inside of the range. Otherwise the result is
            true for documents outside of the range.
    """
    digest = blake2b((text or "").encode(errors="surrogatepass"), digest_size=8).digest()
    return (low * 100 <= int.from_bytes(digest, "little") % 10_000 < high * 100) == inside


def load_dataset_splits(
    arguments: TextArguments,
    plugins: Plugins | None,
    split_names: Sequence[str] = ("train", "validation"),
    no_scripts: str = NO_SCRIPTS,
) -> dict[str, Any]:
    """Loads the splits of the dataset in `--dataset_name`.

    Args:
        arguments: The data flags.
        plugins: Plugins whose `load_dataset` hook may provide the dataset.
        split_names: Names of the splits to return. Missing splits are ignored.
        no_scripts: Message for datasets that are distributed as loading scripts.

    Raises:
        DataError: The dataset cannot be loaded, or has none of the splits.
    """
    from datasets import load_dataset, load_from_disk

    name, config = str(arguments.dataset_name), arguments.dataset_config_name
    label = f"--dataset_name {name}" + (f" --dataset_config_name {config}" if config else "")
    dataset = (
        plugins.call_first("load_dataset", name=name, arguments=arguments) if plugins else None
    )
    try:
        if dataset is None and (Path(name) / "dataset_dict.json").exists():
            dataset = load_from_disk(name)
        elif dataset is None and (Path(name) / "state.json").exists():
            dataset = {"train": load_from_disk(name)}
        elif dataset is None:
            dataset = load_dataset(
                name,
                config,
                revision=arguments.dataset_revision,
                streaming=arguments.streaming,
                cache_dir=_datasets_cache(arguments),
            )
    except Exception as error:
        if "scripts are no longer supported" in str(error) or name in DATASETS_WITH_SCRIPTS:
            raise DataError(f"{label}: {no_scripts.format(name=name)} ({error})") from error
        if isinstance(error, ConnectionError):
            raise DataError(
                f"{label}: cannot reach the Hub ({error}); check the network connection, or use "
                "local text with --train_file"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{label}: no such dataset on the Hub or on disk ({error})") from error
        raise DataError(f"{label} cannot be loaded: {error.__cause__ or error}") from error
    splits, used = {}, set()
    for split in split_names:
        names = (split, *SPLIT_ALIASES.get(split, ()))
        if found := next((alias for alias in names if alias in dataset), None):
            splits[split] = dataset[found]
            used.add(found)
            if found != split:
                logger.info("--dataset_name %s: using the split '%s' as %s", name, found, split)
    if splits and (unused := [str(split) for split in dataset if split not in used]):
        logger.info("--dataset_name %s: the splits %s are not used", name, ", ".join(unused))
    if not splits:
        raise DataError(
            f"--dataset_name {name} has the splits {', '.join(map(str, dataset)) or 'none'}; "
            f"expected {' or '.join(map(repr, split_names))}"
        )
    return splits


def _load_files(patterns: list[str], flag: str, arguments: TextArguments) -> Any:
    files = data_files.expand_patterns(patterns, flag)
    builder = data_files.builder_of(files, flag)
    data_files.check_heads(files, builder, flag)
    if builder == "csv":
        return _load_tables(files, flag, arguments)
    options: dict[str, Any] = {}
    for file in files:
        if builder == "json":
            data_files.check_null_rows(file, flag)
        if builder == "json" and not arguments.streaming:
            # pyarrow stores invalid UTF-8 and fails when the row is read
            data_files.check_utf8(file, flag)
        elif builder == "parquet":
            data_files.check_parquet(file, flag)
        else:
            data_files.check_unpacked_size(file, flag, complete=not arguments.streaming)
    if builder == "text":
        keep = getattr(arguments, "keep_linebreaks", False)
        options = {
            "sample_by": arguments.sample_by,
            "keep_linebreaks": keep,
            "encoding": "utf-8-sig",
        }
    dataset = _build_dataset(builder, files, flag, arguments, **options)
    if builder == "json" and not {"text", arguments.text_column_name} & set(dataset.features or ()):
        # One object with the examples under "data", as in SQuAD
        entries = getattr((dataset.features or {}).get("data"), "feature", None)
        if isinstance(entries, dict):
            return _build_dataset(builder, files, flag, arguments, field="data")
    return dataset


def _build_dataset(
    builder: str, files: list[str], flag: str, arguments: TextArguments, **options: Any
) -> Any:
    """Reads files with a builder of `datasets`, whose cache key includes the files' content."""
    from datasets import load_dataset

    key = blake2b(repr([data_files.file_identity(file) for file in files]).encode(), digest_size=8)
    try:
        dataset = load_dataset(
            builder,
            key.hexdigest(),
            # `datasets` expands globs, but these are names of existing files
            data_files={"train": [f if "://" in f else glob.escape(f) for f in files]},
            split="train",
            streaming=arguments.streaming,
            cache_dir=_datasets_cache(arguments),
            download_mode="force_redownload" if arguments.overwrite_cache else None,
            **options,
        )
        first = next(iter(dataset if arguments.streaming else range(len(dataset))), None)
    except Exception as error:
        raise data_files.explain_load_error(error, files, builder, flag) from error
    if first is None:
        raise DataError(f"{flag} {files[0]} contains no documents")
    return dataset


def _load_tables(files: list[str], flag: str, arguments: TextArguments) -> Any:
    """Reads CSV or TSV files. All cells are strings, and empty cells are `None`."""
    from datasets import Dataset, Features, IterableDataset, Value
    from datasets.table import MemoryMappedTable

    tables = [DelimitedTable(file, flag) for file in files]
    names, _ = tables[0].texts()
    for table in tables[1:]:
        if set(names) != set(other := table.texts()[0]):
            raise DataError(
                f"{table.origin} has the columns {', '.join(other)}, but {tables[0].origin} has "
                f"{', '.join(names)}: use files with the same columns"
            )
    if arguments.streaming:
        for file in files:
            data_files.check_unpacked_size(file, flag, complete=False)
        return IterableDataset.from_generator(
            read_rows,
            features=Features({name: Value("string") for name in names}),
            gen_kwargs={"files": files, "flag": flag, "names": tuple(names)},
        )
    content = [ARROW_VERSION, names, [data_files.file_identity(file) for file in files]]
    key = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def write(directory: Path) -> None:
        writer = StringTableWriter(directory / "rows.arrow", names)
        for row in read_rows(files, flag, names):
            writer.add(*row.values())
        (directory / "fingerprint").write_text(writer.close())
        if not writer.count:
            raise DataError(f"{flag} {files[0]} contains no documents")

    def open_rows(directory: Path) -> Dataset:
        try:
            fingerprint = (directory / "fingerprint").read_text()
            table = MemoryMappedTable.from_file(str(directory / "rows.arrow"))
        except (OSError, ValueError) as error:
            raise DataError(f"{directory} contains no rows: {error}") from error
        return Dataset(table, fingerprint=fingerprint)

    path = arguments.cache_directory / f"rows-{key}"
    return write_once(path, open_rows, write, arguments.overwrite_cache)


def read_rows(files: list[str], flag: str, names: Sequence[str]) -> Iterator[dict[str, str | None]]:
    """Yields the rows of CSV or TSV files as cells by column name."""
    for file in files:
        columns, rows = DelimitedTable(file, flag).texts()
        for row in rows:
            cells = dict(zip(columns, row, strict=True))
            yield {name: cells[name] for name in names}


def _datasets_cache(arguments: TextArguments) -> str | None:
    return str(Path(arguments.data_cache_dir) / "datasets") if arguments.data_cache_dir else None


def text_column(
    dataset: Dataset | IterableDataset, arguments: TextArguments, split: str = "train"
) -> str:
    """Returns the text column.

    This is the requested column, otherwise "text", otherwise the first string column whose values
    are not all numbers. If there are several such columns, a warning is logged that names the
    selected column.

    Raises:
        DataError: The column does not exist or contains no text.
    """
    if dataset.features:
        dtypes = {n: getattr(f, "dtype", type(f).__name__) for n, f in dataset.features.items()}
        types = {name: "text" if "string" in dtype else dtype for name, dtype in dtypes.items()}
    else:
        example: dict[str, Any] = next(iter(dataset), {})
        types = {n: "text" if isinstance(v, str) else type(v).__name__ for n, v in example.items()}
    requested = arguments.text_column_name
    files = getattr(arguments, f"{split}_file", None)
    source = f"--{split}_file {files[0]}" if files else f"--dataset_name {arguments.dataset_name}"
    if requested and requested not in types:
        raise DataError(
            f"--text_column_name {requested}: no such column in {source}, which has "
            f"{', '.join(types) or 'no columns'}{did_you_mean(requested, types)}"
        )
    column = requested or ("text" if "text" in types else None)
    if column is None:
        for name, values in _first_values(dataset, types).items():
            if all(NUMBER.fullmatch(value) for value in values):
                types[name] = "numbers"
        candidates = [name for name, dtype in types.items() if dtype == "text"]
        if candidates[1:]:
            logger.warning(
                "%s has no column 'text': using '%s' as the text. The other text columns are %s. "
                "Specify the column with --text_column_name",
                *(source, candidates[0], ", ".join(candidates[1:])),
            )
        column = next(iter(candidates), None)
    if column is not None and types[column] == "text":
        return column
    listing = ", ".join(f"{name} ({dtype})" for name, dtype in types.items()) or "none"
    problem = (
        f"the column '{column}' does not contain text" if column else "no column contains text"
    )
    raise DataError(
        f"{source}: {problem}; the columns are {listing}. Specify a column of strings with "
        "--text_column_name; numbers and dates must be JSON strings, or cells of a .csv file"
    )


NUMBER = re.compile(r"\s*[-+]?[\d.,]+\s*")


def _first_values(
    dataset: Dataset | IterableDataset, types: Mapping[str, str]
) -> dict[str, list[str]]:
    """Returns the non-empty values of the string columns in the first 100 rows."""
    rows = list(islice(dataset, 100))
    names = [name for name, dtype in types.items() if dtype == "text"]
    values = {name: [row[name] for row in rows if row[name]] for name in names}
    return {name: texts for name, texts in values.items() if texts}


def is_blank(text: str | None) -> bool:
    """Returns whether a document is empty or contains only whitespace."""
    return not text or text.isspace()


def is_raw(arguments: TextArguments) -> bool:
    """Returns whether the flags specify raw text or arrays."""
    return arguments.sample_by == "raw" or has_arrays(arguments)


def load_raw(arguments: TextArguments) -> dict[str, Any]:
    """Reads raw text or arrays, and takes missing splits from the end of the training data.

    The last `test_split_percentage` percent of the data are used for testing, and the
    `validation_split_percentage` percent before them for validation.

    Raises:
        UsageError: The objective does not support arrays.
        DataError: The files cannot be read, or a split is empty.
    """
    if has_arrays(arguments) and not hasattr(arguments, "block_size"):
        raise UsageError(
            "arrays (.npy, .npz) are only supported by run_clm_flax.py, with a byte vocabulary "
            "(train_tokenizer.py --vocabulary bytes)"
        )
    data_class = ByteArrays if has_arrays(arguments) else RawText
    splits = {}
    for split in SPLITS:
        if patterns := getattr(arguments, f"{split}_file", None):
            flag = f"--{split}_file"
            splits[split] = data_class.read(data_files.expand_patterns(patterns, flag), flag)
    if "train" not in splits:
        return splits
    train, end = splits["train"], splits["train"].stop
    for split in ("test", "validation"):
        share = getattr(arguments, f"{split}_split_percentage", 0)
        if split not in splits and share:
            start = end - round(len(train) * share / 100)
            splits[split] = dataclasses.replace(train, start=start, stop=end)
            end = start
    splits["train"] = dataclasses.replace(train, stop=end)
    empty = [name for name, part in splits.items() if not len(part)]
    if empty:
        raise DataError(
            f"{len(train)} bytes or arrays are too few for {', '.join(empty)}: use a larger "
            "file or other percentages"
        )
    return splits


# -- separate examples


Load = TypeVar("Load", bound=Callable[..., Any])


def cached_on_arguments(load: Load) -> Load:
    """Decorator that caches the result of `load(arguments, ...)` on the `arguments` object.

    Later calls with the same object return the same result, even if other arguments differ.
    """
    # Not a dataclass field, so that logs and model cards do not include it.
    name = f"_{load.__name__}"

    @wraps(load)
    def again(arguments: TextArguments, *args: Any, **options: Any) -> Any:
        attributes = vars(arguments)
        if name not in attributes:
            attributes[name] = load(arguments, *args, **options)
        return attributes[name]

    return cast(Load, again)


def complete_splits(splits: dict[str, Any], arguments: TextArguments) -> None:
    """Takes missing splits from the training examples, and truncates splits as the flags specify.

    Examples are selected by the hash of their content, so that the selection is the same in every
    run and equal examples are in the same split.

    Args:
        splits: Examples by split, with the methods `contents()` and `select(rows)`. Modified in
            place.
        arguments: The data flags.

    Raises:
        DataError: The training split has too few examples.
    """
    shares = {split: getattr(arguments, f"{split}_split_percentage", 0) for split in SPLITS[1:]}
    shares = {split: share for split, share in shares.items() if share and split not in splits}
    if "train" in splits and shares:
        train = splits["train"]
        contents = (text.encode("utf-8", "replace") for text in train.contents())
        digests = (blake2b(content, digest_size=8).digest() for content in contents)
        # The hash of an example gives its position between 0 and 1.
        positions = np.array([int.from_bytes(digest, "little") / 2**64 for digest in digests])
        in_train = np.ones(len(train), bool)
        for split, share in shares.items():
            positions_left = np.sort(positions[in_train])
            count = min(max(1, round(len(train) * share / 100)), len(positions_left))
            selected = in_train & (positions <= positions_left[count - 1])
            in_train &= ~selected
            if not in_train.any():
                raise DataError(
                    f"the training data has {len(train)} examples, too few to hold out {share}% "
                    f"for {split}; use --{split}_file or --{split}_split_percentage 0"
                )
            splits[split] = train.select(np.flatnonzero(selected))
        splits["train"] = train.select(np.flatnonzero(in_train))
    for split, name in (("train", "train"), ("validation", "eval"), ("test", "predict")):
        most = getattr(arguments, f"max_{name}_samples", None)
        if split in splits and most is not None and most < len(splits[split]):
            splits[split] = splits[split].select(np.arange(most))


class MediaSource(NamedTuple):
    """The location or the content of an image or audio file.

    Attributes:
        name: Path or URL of the file. If `data` is set, this is only a name that messages use.
        data: The content, if it is in memory: encoded bytes, or a Pillow image.
    """

    name: str
    data: bytes | Any = None


class UnreadableError(Exception):
    """An image or audio file cannot be read. The message contains the reason."""


class MediaColumn(Sequence[MediaSource]):
    """A column of encoded images or audio of a `datasets.Dataset`. Items are read on access.

    The decoders of `datasets` are not used, because its audio decoder requires PyTorch, and because
    they raise an error for an unreadable item, which would stop the run.
    """

    def __init__(self, dataset: Dataset, column: str, origin: str):
        feature: Any = (dataset.features or {}).get(column)
        if hasattr(feature, "decode"):
            dataset = dataset.cast_column(column, type(feature)(decode=False))
        self.dataset, self.column, self.origin = dataset, column, origin

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        cell, name = self.dataset[int(index)][self.column], f"{self.origin}, row {int(index) + 1}"
        if isinstance(cell, Mapping):
            data, path = cell.get("bytes"), cell.get("path")
            if data is None and path:
                return MediaSource(str(path))
            return MediaSource(f"{name} ({path})" if path else name, data or b"")
        return MediaSource(str(cell)) if isinstance(cell, str) else MediaSource(name, b"")


# -- text and arrays without documents


PIECE_BYTES = 1 << 20  # maximum number of bytes to tokenize at once
BYTE_VOCABULARY_ADVICE = (
    "a byte vocabulary (train_tokenizer.py --vocabulary bytes) supports any file"
)


@dataclasses.dataclass
class _ArrayRange:
    """The items of `content` from `start` to `stop`. Base class of raw text and arrays."""

    content: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, count: int) -> Self:
        """Returns the first `count` items."""
        return dataclasses.replace(self, stop=min(self.stop, self.start + count))


class RawText(_ArrayRange):
    """The bytes of a text without document boundaries."""

    @classmethod
    def read(cls, names: Sequence[str], flag: str) -> Self:
        """Reads and concatenates files."""
        parts = []
        for name in names:
            with (
                data_files.explain_read_errors(f"{flag} {name}"),
                data_files.open_binary(name) as stream,
            ):
                parts.append(np.frombuffer(stream.read(), np.uint8))
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not len(content):
            raise DataError(f"{flag} {names[0]} is empty; use a file that contains text")
        return cls(content, 0, len(content))

    @property
    def bytes(self) -> np.ndarray:
        """The bytes from `start` to `stop`, uint8."""
        return self.content[self.start : self.stop]

    def pieces(
        self, flag: str = "--sample_by raw", advice: str = BYTE_VOCABULARY_ADVICE
    ) -> Iterator[str]:
        """Yields the text in pieces of limited size, for tokenization.

        Pieces end after a line feed, unless a line is longer than a piece. If a multi-byte
        character crosses the boundary between two splits, it belongs to the split in which it
        starts.

        Args:
            flag: The flag, for messages.
            advice: What to do about bytes that are not UTF-8, for messages.

        Raises:
            DataError: The bytes are not UTF-8, or contain no complete character.
        """
        start, last = self._character(self.start), self._character(self.stop)
        if start >= last:
            raise DataError(
                f"{flag}: bytes {self.start} to {self.stop} of the text contain no complete "
                "character: use a larger file or a larger percentage"
            )
        while start < last:
            stop = self._character(min(start + PIECE_BYTES, last))
            breaks = np.flatnonzero(self.content[start:stop] == ord("\n"))
            if stop < last and len(breaks):
                stop = start + int(breaks[-1]) + 1
            try:
                yield self.content[start:stop].tobytes().decode()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{flag}: byte {start + error.start} of the text is not UTF-8; {advice}"
                ) from error
            start = stop

    def _character(self, position: int) -> int:
        """Returns the start of the first UTF-8 character at or after `position`."""
        if not position:
            return position  # a continuation byte here is an error
        inside = self.content[position : position + 3] & 0xC0 == 0x80
        return position + (len(inside) if inside.all() else int(inside.argmin()))

    def count_words(self, line_ends: bool = True) -> int:
        """Counts whitespace-separated words and, optionally, line ends.

        See `tokenize.count_words`.
        """
        advice = "counting words requires text: drop --word_perplexity"
        text = "".join(self.pieces("--word_perplexity", advice))
        ends = text.count("\n") + (not text.endswith("\n")) if line_ends else 0
        return len(text.split()) + ends


def _load_array(name: str, label: str) -> np.ndarray:
    if name.lower().endswith(".npy"):
        array = np.load(name, mmap_mode="r", allow_pickle=False)
        if isinstance(array, np.ndarray):
            return array
        array.close()  # an archive with the wrong extension
        raise DataError(f"{label} is an archive of arrays: rename it to .npz")
    with Path(name).open("rb") as stream:  # .npz: an archive of named arrays
        archive = np.load(stream, allow_pickle=False)
        if isinstance(archive, np.ndarray):  # an array with the wrong extension
            return archive
        for member in archive.zip.infolist():
            if (
                member.file_size
                > data_files.ALWAYS_ALLOWED_BYTES
                + data_files.MAX_UNPACK_RATIO * member.compress_size
            ):
                raise DataError(
                    f"{label} decompresses to {member.file_size >> 20} MB, more than "
                    f"{data_files.MAX_UNPACK_RATIO} times its size: save it with numpy.savez, "
                    "which does not compress"
                )
        if len(archive.files) != 1:
            contents = ", ".join(archive.files) or "nothing"
            raise DataError(f"{label} contains {contents}: use a file with one array")
        return archive[archive.files[0]]


class ByteArrays(_ArrayRange):
    """Arrays of bytes, e.g. images, with equal shapes.

    `content` is uint8 of shape `(number of arrays, ...)`. It is memory-mapped for .npy files.
    """

    @classmethod
    def read(cls, names: Sequence[str], flag: str) -> Self:
        """Opens the array file that a flag specifies.

        Raises:
            DataError: There are several files, or the file does not contain an array of bytes.
        """
        label = f"{flag} {' '.join(names)}"
        if len(names) > 1:
            raise DataError(
                f"{label}: there are {len(names)} files, but only one array file (.npy or .npz) is "
                "supported"
            )
        if not names[0].lower().endswith(ARRAY_EXTENSIONS) or "://" in names[0]:
            raise DataError(
                f"{label} is not a local .npy or .npz file, but all splits must be arrays if one "
                "of them is"
            )
        try:
            arrays = _load_array(names[0], label)
        except DataError:
            raise
        except Exception as error:  # NumPy raises many types of exceptions for damaged headers
            raise DataError(f"{label} cannot be read as an array: {error}") from error
        if not arrays.size:
            raise DataError(
                f"{label} is empty (shape {arrays.shape}): use a file that contains arrays"
            )
        if arrays.dtype != np.uint8 or arrays.ndim < 2:
            raise DataError(
                f"{label} contains {arrays.dtype} of shape {arrays.shape}: expected uint8 of "
                "shape (number of arrays, ...)"
            )
        return cls(arrays, 0, len(arrays))

    @property
    def size(self) -> int:
        """The number of bytes of each array."""
        return int(np.prod(self.content.shape[1:]))


class ByteArrayRows:
    """One array per row, flattened in row-major order, with one token per byte.

    Args:
        arrays: The arrays.
        tokenizer: A tokenizer with a byte vocabulary.
        length: Row length in tokens.

    Raises:
        UsageError: The vocabulary or the row length does not match the arrays.
    """

    max_runs = 1

    def __init__(self, arrays: ByteArrays, tokenizer: PreTrainedTokenizerBase, length: int):
        table = byte_ids(tokenizer)
        if table is None:
            raise UsageError(
                "arrays require a byte vocabulary: create one with train_tokenizer.py "
                "--model_type vq_transformer --vocabulary bytes"
            )
        if length != arrays.size:
            raise UsageError(
                f"rows have {length} tokens, but arrays of shape {arrays.content.shape[1:]} "
                f"have {arrays.size} bytes: use --block_size {arrays.size}"
            )
        self.arrays, self.length, self.table = arrays, length, table

    def __len__(self) -> int:
        return len(self.arrays)

    def width(self, indices: np.ndarray) -> int:
        """Returns the number of columns of a batch, which is always the row length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Returns the arrays of these rows; see `Rows`."""
        selected = self.arrays.content[self.arrays.start + np.asarray(indices)]
        ids = self.table[selected.reshape(len(selected), -1)]
        return {
            "input_ids": ids,
            "segment_ids": np.ones_like(ids),
            "position_ids": np.tile(np.arange(self.length, dtype=np.int32), (len(ids), 1)),
            "next_ids": np.full(len(ids), -1, np.int32),
        }
