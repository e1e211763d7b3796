"""Where documents come from: a plugin, the Hub, files, or one raw text or array, as splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import numpy as np

from hfseq import errors
from hfseq.data import files as data_files
from hfseq.data.arguments import ARRAY_EXTENSIONS, SPLITS, TextArguments, has_arrays
from hfseq.data.tokenizers import byte_ids
from hfseq.errors import DataError, UsageError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

    from hfseq.plugins import Plugins
REFERENCE_COLUMN = "chinese_ref"  # transformers' name for whole-word reference positions
NO_SCRIPTS = (
    "`datasets` no longer runs loading scripts, which is how {name} was distributed. Use a corpus "
    "stored as parquet, e.g. `--dataset_name HuggingFaceFW/fineweb-2 --dataset_config_name "
    "nob_Latn` or `--dataset_name wikimedia/wikipedia --dataset_config_name 20231101.no`, or your "
    "own text with --train_file"
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


class Splits(dict[str, Any]):
    """The splits by name ("train", "validation", "test"; any may be absent) and the text column."""

    def __init__(self, splits: dict[str, Any], text_column: str):
        super().__init__(splits)
        self.text_column = text_column

    def hold_out(self, arguments: TextArguments) -> None:
        """Cut what has no split of its own off the training text; shares are those of all of it."""
        whole, low = self["train"], 0
        for split in ("validation", "test"):
            share = getattr(arguments, f"{split}_split_percentage", 0)
            if split in self or not share:
                continue
            rest = self["train"]
            if arguments.streaming:
                goes, stays = (
                    partial(_is_between, low=low, high=low + share, wanted=wanted)
                    for wanted in (True, False)
                )
                self[split] = rest.filter(goes, input_columns=self.text_column)
                self["train"] = rest.filter(stays, input_columns=self.text_column)
            elif len(rest) < 2:
                left = " left" if split == "test" else ""
                raise DataError(
                    f"the training text has {len(rest)} document{left}, too few to split off "
                    f"{share}% for {split}; give --{split}_file, --{split}_split_percentage 0, or "
                    "for a .txt file --sample_by line"
                )
            else:
                border = min(max(1, round(len(whole) * share / 100)), len(rest) - 1)
                self[split] = rest.select(range(border))
                self["train"] = rest.select(range(border, len(rest)))
            low += share

    def limit_samples(self, arguments: TextArguments) -> Self:
        """Keep as many documents of each split as the flags say."""
        names = {"train": "train", "validation": "eval", "test": "test"}
        for name, split in self.items():
            count = getattr(arguments, f"max_{names[name]}_samples", None)
            if count is not None and hasattr(split, "select"):
                self[name] = split.select(range(min(count, len(split))))
            elif count is not None:  # a stream, text or arrays
                self[name] = split.take(count)
        return self


def load_splits(arguments: TextArguments, plugins: Plugins | None = None) -> Splits:
    """Load the documents that the flags ask for.

    A dataset name is offered to the plugins' ``load_dataset`` hook first and looked up on the Hub
    then; without one the files are read. Without a validation split the first
    ``validation_split_percentage`` percent of the documents validate; of a stream, whose length
    nobody knows, those whose hash falls below that share (the same ones in every run, and equal
    documents always on the same side). Where the flags know a test split, the documents after
    those of validation are set aside for it.

    Returns ``datasets.Dataset`` splits, or ``IterableDataset`` with ``streaming``; what has no
    documents comes as :mod:`hfseq.data.sources` has it.
    """
    known = [split for split in SPLITS if hasattr(arguments, f"{split}_file")]
    given = {split: getattr(arguments, f"{split}_file") for split in known}
    if not (arguments.dataset_name or any(given.values())):
        raise UsageError("no data: give --dataset_name or --train_file")
    if is_raw(arguments):
        if arguments.dataset_name:
            raise UsageError(
                f"--dataset_name {arguments.dataset_name} has documents, which --sample_by raw "
                "does not read: give files with --train_file, or drop --sample_by"
            )
        return Splits(load_raw(arguments), "text").limit_samples(arguments)
    loaded = load_dataset_splits(arguments, plugins, known) if arguments.dataset_name else {}
    for split, patterns in given.items():
        if patterns:
            loaded[split] = _load_files(patterns, f"--{split}_file", arguments)
    column = text_column(next(loaded[split] for split in known if split in loaded), arguments)
    splits = Splits(loaded, column)
    for split, dataset in splits.items():
        if file := getattr(arguments, f"{split}_ref_file", None):
            flag = f"--{split}_ref_file {file}"
            # One JSON list of positions for each document that is not blank.
            filled = [i for i, text in enumerate(dataset[column]) if not is_blank(text)]
            try:
                lines = Path(file).read_text(encoding="utf-8").splitlines()
                references = [errors.parse_json(line) for line in lines if line.strip()]
            except (OSError, ValueError) as error:
                raise DataError(f"{flag} cannot be read: {error}") from error
            if len(references) != len(filled):
                raise DataError(
                    f"{flag} has {len(references)} lines for {len(filled)} documents; "
                    "give one line a document"
                )
            splits[split] = dataset.select(filled).add_column(REFERENCE_COLUMN, references)
    if "train" in splits:
        splits.hold_out(arguments)
    return splits.limit_samples(arguments)


def _is_between(text: str | None, low: int, high: int, wanted: bool) -> bool:
    """Tell whether the hash of a document is ``low`` to ``high`` percent of the way."""
    digest = blake2b((text or "").encode(errors="surrogatepass"), digest_size=8).digest()
    return (low * 100 <= int.from_bytes(digest, "little") % 10_000 < high * 100) == wanted


def load_dataset_splits(
    arguments: TextArguments,
    plugins: Plugins | None,
    split_names: Sequence[str] = ("train", "validation"),
    no_scripts: str = NO_SCRIPTS,
) -> dict[str, Any]:
    """Load those of the splits ``wanted`` that ``--dataset_name`` has.

    ``no_scripts`` is what to say of a dataset that is a loading script.
    """
    from datasets import load_dataset, load_from_disk

    name, config = str(arguments.dataset_name), arguments.dataset_config_name
    label = f"--dataset_name {name}" + (f" --dataset_config_name {config}" if config else "")
    whole = plugins.call_first("load_dataset", name=name, arguments=arguments) if plugins else None
    try:
        if whole is None and (Path(name) / "dataset_dict.json").exists():
            whole = load_from_disk(name)
        elif whole is None:
            whole = load_dataset(
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
                f"{label}: the Hub cannot be reached ({error}); check the network, or give local "
                "text with --train_file"
            ) from error
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{label}: no such dataset on the Hub or on disk ({error})") from error
        raise DataError(f"{label} cannot be loaded: {error.__cause__ or error}") from error
    splits = {split: whole[split] for split in split_names if split in whole}
    if not splits:
        raise DataError(
            f"--dataset_name {name} has the splits {', '.join(map(str, whole)) or 'none'}; "
            f"{' or '.join(map(repr, split_names))} is needed"
        )
    return splits


def _load_files(patterns: list[str], flag: str, arguments: TextArguments) -> Any:
    from datasets import load_dataset

    files = data_files.expand_patterns(patterns, flag)
    builder, options = data_files.builder_of(files, flag)
    data_files.check_heads(files, builder, flag)
    for file in files:
        if builder == "json":
            data_files.check_null_rows(file, flag)
        if builder == "json" and not arguments.streaming:
            # pyarrow stores what is not UTF-8 and only fails when the row is read
            data_files.check_utf8(file, flag)
        elif builder == "parquet":
            data_files.check_parquet(file, flag)
        else:
            data_files.check_unpacked_size(file, flag, whole=not arguments.streaming)
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
        first = next(iter(dataset if arguments.streaming else range(len(dataset))), None)
    except Exception as error:
        raise data_files.explain_load_error(error, files, builder, flag) from error
    if first is None:
        raise DataError(f"{flag} {files[0]} holds no documents")
    return dataset


def _datasets_cache(arguments: TextArguments) -> str | None:
    return str(Path(arguments.data_cache_dir) / "datasets") if arguments.data_cache_dir else None


def text_column(dataset: Dataset | IterableDataset, arguments: TextArguments) -> str:
    """Return the column to read: the one asked for, else "text", else the first one of strings."""
    if dataset.features:
        kinds = {n: getattr(f, "dtype", type(f).__name__) for n, f in dataset.features.items()}
        types = {name: "text" if "string" in kind else kind for name, kind in kinds.items()}
    else:
        example: dict[str, Any] = next(iter(dataset), {})
        types = {n: "text" if isinstance(v, str) else type(v).__name__ for n, v in example.items()}
    asked = arguments.text_column_name
    if asked and asked not in types:
        raise DataError(
            f"--text_column_name {asked}: no such column; the data has "
            f"{', '.join(types) or 'no columns'}{did_you_mean(asked, types)}"
        )
    texts = [name for name, kind in types.items() if kind == "text"]
    column = asked or ("text" if "text" in texts else next(iter(texts), None))
    if column not in texts:
        listing = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        if asked:
            raise DataError(f"--text_column_name {asked} holds no text; the columns are {listing}")
        raise DataError(f"no column holds text; the columns are {listing or 'none'}")
    return str(column)


def is_blank(text: str | None) -> bool:
    """True for a document that holds nothing to train on."""
    return not text or text.isspace()


def is_raw(arguments: TextArguments) -> bool:
    """Tell whether the flags name one long text, or arrays."""
    return arguments.sample_by == "raw" or has_arrays(arguments)


def load_raw(arguments: TextArguments) -> dict[str, Any]:
    """Read the files that the flags name and cut off what has no file of its own, by position.

    The text is training first, then validation, then test: the shares are
    ``validation_split_percentage`` and ``test_split_percentage``.
    """
    if has_arrays(arguments) and not hasattr(arguments, "block_size"):
        raise UsageError(
            "arrays (.npy, .npz) are no text: run_clm_flax.py trains on them, with a vocabulary "
            "that train_tokenizer.py --vocabulary bytes makes without any data"
        )
    kind = ByteArrays if has_arrays(arguments) else RawText
    splits = {}
    for split in SPLITS:
        if patterns := getattr(arguments, f"{split}_file", None):
            flag = f"--{split}_file"
            splits[split] = kind.read(data_files.expand_patterns(patterns, flag), flag)
    if "train" not in splits:
        return splits
    whole, end = splits["train"], splits["train"].stop
    for split in ("test", "validation"):
        share = getattr(arguments, f"{split}_split_percentage", 0)
        if split not in splits and share:
            start = end - round(len(whole) * share / 100)
            splits[split] = dataclasses.replace(whole, start=start, stop=end)
            end = start
    splits["train"] = dataclasses.replace(whole, stop=end)
    empty = [name for name, part in splits.items() if not len(part)]
    if empty:
        raise DataError(
            f"{len(whole)} bytes or arrays leave nothing for {', '.join(empty)}: give a larger "
            "file, or other percentages"
        )
    return splits


# -- examples, which are rows for themselves


Load = TypeVar("Load", bound=Callable[..., Any])


def cached_on_arguments(load: Load) -> Load:
    """Let ``load(arguments, ...)`` return what it returned before for the same ``arguments``."""
    name = f"_{load.__name__}"  # beside the fields, so logs and cards do not see it

    @wraps(load)
    def again(arguments: TextArguments, *others: Any, **options: Any) -> Any:
        kept = vars(arguments)
        if name not in kept:
            kept[name] = load(arguments, *others, **options)
        return kept[name]

    return cast(Load, again)


def complete_splits(splits: dict[str, Any], arguments: TextArguments) -> None:
    """Cut what has no split of its own off the training examples, and all to the counts asked for.

    A share is of examples by the hash of what they are (``contents()``), so equal ones are on one
    side, and the same ones in every run; ``select(rows)`` has to return some of a split.
    """
    shares = {split: getattr(arguments, f"{split}_split_percentage", 0) for split in SPLITS[1:]}
    shares = {split: share for split, share in shares.items() if share and split not in splits}
    if "train" in splits and shares:
        whole = splits["train"]
        contents = (text.encode("utf-8", "replace") for text in whole.contents())
        digests = (blake2b(content, digest_size=8).digest() for content in contents)
        # Where each example lies between 0 and 1, always the same.
        positions = np.array([int.from_bytes(digest, "little") / 2**64 for digest in digests])
        kept = np.ones(len(whole), bool)
        for split, share in shares.items():
            left = np.sort(positions[kept])
            count = min(max(1, round(len(whole) * share / 100)), len(left))
            taken = kept & (positions <= left[count - 1])
            kept &= ~taken
            if not kept.any():
                raise DataError(
                    f"the training data has {len(whole)} examples, too few to split off {share}% "
                    f"for {split}; give --{split}_file or --{split}_split_percentage 0"
                )
            splits[split] = whole.select(np.flatnonzero(taken))
        splits["train"] = whole.select(np.flatnonzero(kept))
    for split, name in (("train", "train"), ("validation", "eval"), ("test", "predict")):
        most = getattr(arguments, f"max_{name}_samples", None)
        if split in splits and most is not None and most < len(splits[split]):
            splits[split] = splits[split].select(np.arange(most))


class MediaSource(NamedTuple):
    """Where a picture or sound is: a file or URL, or its bytes; ``name`` is for messages."""

    name: str
    data: bytes | None = None


class UnreadableError(Exception):
    """A picture or sound that is left out, and why."""


class MediaColumn(Sequence[MediaSource]):
    """A column of pictures or sound of ``datasets``, not decoded: bytes are read when asked for.

    Its own decoders are not used: that of sound needs PyTorch, and what one cannot read would end
    the run.
    """

    def __init__(self, dataset: Dataset, column: str, origin: str):
        kind: Any = (dataset.features or {}).get(column)
        if hasattr(kind, "decode"):
            dataset = dataset.cast_column(column, type(kind)(decode=False))
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


PIECE_BYTES = 1 << 20  # bytes that are tokenised at once
BYTE_VOCABULARY_ADVICE = (
    "a vocabulary of bytes (train_tokenizer.py --vocabulary bytes) takes any file"
)


@dataclasses.dataclass
class _Stretch:
    """What lies from ``start`` to ``stop`` of ``content``, which was read whole."""

    content: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, count: int) -> Self:
        """Return the beginning, ``count`` long."""
        return dataclasses.replace(self, stop=min(self.stop, self.start + count))


class RawText(_Stretch):
    """Bytes of a text."""

    @classmethod
    def read(cls, names: Sequence[str], flag: str) -> Self:
        """Read files one after the other."""
        parts = []
        for name in names:
            with (
                data_files.explain_read_errors(f"{flag} {name}"),
                data_files.open_binary(name) as stream,
            ):
                parts.append(np.frombuffer(stream.read(), np.uint8))
        content = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not len(content):
            raise DataError(f"{flag} {names[0]} is empty; give a file with text in it")
        return cls(content, 0, len(content))

    @property
    def bytes(self) -> np.ndarray:
        """The bytes of this part, uint8."""
        return self.content[self.start : self.stop]

    def pieces(
        self, flag: str = "--sample_by raw", advice: str = BYTE_VOCABULARY_ADVICE
    ) -> Iterator[str]:
        """Yield the text in pieces that end with a line where lines are not huge.

        A character that a border cuts belongs to the part before it. ``flag`` and ``advice`` are
        what an error says of bytes that are not text.
        """
        start, last = self._character(self.start), self._character(self.stop)
        if start >= last:
            raise DataError(
                f"{flag}: bytes {self.start} to {self.stop} of the text hold no whole character: "
                "give a larger file, or a larger share"
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

    def _character(self, place: int) -> int:
        """The first place from ``place`` on that is not inside a character (of 4 bytes at most)."""
        if not place:
            return place  # what continues nothing is an error, not a part of a character
        inside = self.content[place : place + 3] & 0xC0 == 0x80
        return place + (len(inside) if inside.all() else int(inside.argmin()))

    def count_words(self, line_ends: bool = True) -> int:
        """Count words between whitespace, and line ends, see ``tokenize.count_words``."""
        text = "".join(self.pieces("--word_perplexity", "words are those of text: drop the flag"))
        ends = text.count("\n") + (not text.endswith("\n")) if line_ends else 0
        return len(text.split()) + ends


def _load_array(name: str, label: str) -> np.ndarray:
    if name.lower().endswith(".npy"):
        array = np.load(name, mmap_mode="r", allow_pickle=False)
        if isinstance(array, np.ndarray):
            return array
        array.close()  # an archive under a wrong name
        raise DataError(f"{label} is an archive of arrays: call it .npz")
    with Path(name).open("rb") as stream:  # .npz: an archive of named arrays
        archive = np.load(stream, allow_pickle=False)
        if isinstance(archive, np.ndarray):  # under a wrong name
            return archive
        for member in archive.zip.infolist():
            if (
                member.file_size
                > data_files.ALWAYS_ALLOWED_BYTES
                + data_files.MAX_UNPACK_RATIO * member.compress_size
            ):
                raise DataError(
                    f"{label} unpacks to {member.file_size >> 20} MB, more than {data_files.MAX_UNPACK_RATIO} "
                    "times its size: save it with numpy.savez, which does not pack"
                )
        if len(archive.files) != 1:
            held = ", ".join(archive.files) or "nothing"
            raise DataError(f"{label} holds {held}: give a file with one array")
        return archive[archive.files[0]]


class ByteArrays(_Stretch):
    """Arrays of bytes, all of one shape: uint8 (N, ...), memory-mapped where the file allows it."""

    @classmethod
    def read(cls, names: Sequence[str], flag: str) -> Self:
        """Open the one file of arrays that a flag names."""
        label = f"{flag} {' '.join(names)}"
        if len(names) > 1:
            raise DataError(f"{label}: give one file of arrays, .npy or .npz")
        if not names[0].lower().endswith(ARRAY_EXTENSIONS) or "://" in names[0]:
            raise DataError(
                f"{label} beside files of arrays: give one local .npy or .npz file here, too"
            )
        try:
            arrays = _load_array(names[0], label)
        except DataError:
            raise
        except Exception as error:  # what reads headers of arrays raises a dozen types
            raise DataError(f"{label} cannot be read as an array: {error}") from error
        if not arrays.size:
            raise DataError(f"{label} is empty, of shape {arrays.shape}: give one with arrays")
        if arrays.dtype != np.uint8 or arrays.ndim < 2:
            raise DataError(
                f"{label} holds {arrays.dtype} of shape {arrays.shape}: give uint8 of shape "
                "(number of arrays, ...)"
            )
        return cls(arrays, 0, len(arrays))

    @property
    def size(self) -> int:
        """Bytes of one array."""
        return int(np.prod(self.content.shape[1:]))


class ByteArrayRows:
    """Row *i* is array *i*, flattened in row-major order, a token a byte."""

    max_runs = 1

    def __init__(self, images: ByteArrays, tokenizer: PreTrainedTokenizerBase, length: int):
        table = byte_ids(tokenizer)
        if table is None:
            raise UsageError(
                "arrays of bytes need a vocabulary of bytes: make one with "
                "train_tokenizer.py --model_type vq_transformer --vocabulary bytes"
            )
        if length != images.size:
            raise UsageError(
                f"rows have {length} tokens and arrays of shape {images.content.shape[1:]} have "
                f"{images.size} bytes: give --block_size {images.size}"
            )
        self.images, self.length, self.table = images, length, table

    def __len__(self) -> int:
        return len(self.images)

    def width(self, indices: np.ndarray) -> int:
        """Columns of a batch: always the length."""
        return self.length

    def fetch(self, indices: np.ndarray, width: int | None = None) -> dict[str, np.ndarray]:
        """Copy these rows out; see ``Rows``."""
        arrays = self.images.content[self.images.start + np.asarray(indices)]
        ids = self.table[arrays.reshape(len(arrays), -1)]
        return {
            "input_ids": ids,
            "segment_ids": np.ones_like(ids),
            "position_ids": np.tile(np.arange(self.length, dtype=np.int32), (len(ids), 1)),
            "next_ids": np.full(len(ids), -1, np.int32),
        }
