"""Data files: finding, opening and unpacking them, and saying plainly what is wrong with one."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from hfseq import errors
from hfseq.errors import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
DATASET_BUILDERS = {
    **{".txt": "text", ".text": "text", ".json": "json", ".jsonl": "json"},
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet"},
}
COMPRESSED_EXTENSIONS = (".gz", ".bz2", ".xz", ".zst")
HEAD_BYTES, CHUNK_BYTES = 1 << 13, 1 << 24


def expand_patterns(patterns: str | Sequence[str], flag: str) -> list[str]:
    """Turn names, comma-separated lists and globs into the sorted list of files they name."""
    names: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        system, path = _locate(pattern, flag)
        if system.exists(path):  # also a name that has a comma or a bracket in it
            if system.isdir(path):
                advice = f"give files, e.g. '{pattern}/*.txt'"
                raise DataError(f"{flag} {pattern} is a directory; {advice}")
            names.append(pattern)
        elif "," in pattern:
            names += expand_patterns(
                [part.strip() for part in pattern.split(",") if part.strip()], flag
            )
        elif any(character in pattern for character in "*?["):
            matches = _names(system, system.glob(path), pattern)
            if not matches:
                raise DataError(f"{flag} {pattern} matches no file")
            names += matches
        else:
            raise DataError(f"{flag} {pattern} does not exist")
    return names


def is_directory(name: str, flag: str) -> bool:
    """Tell whether ``name`` is a directory, here or behind a URL."""
    system, path = _locate(name, flag)
    return system.isdir(path)


def list_files(folder: str, flag: str) -> list[str]:
    """Return all files in a directory and those below it, sorted."""
    system, path = _locate(folder, flag)
    return _names(system, system.find(path), folder)


def _names(system: AbstractFileSystem, paths: Iterable[str], given: str) -> list[str]:
    return [system.unstrip_protocol(p) if "://" in given else p for p in sorted(paths)]


def _locate(name: str, flag: str) -> tuple[AbstractFileSystem, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(name)
    except (ImportError, ValueError) as error:  # the protocol's package, or the protocol itself
        raise DataError(f"{flag} {name} cannot be opened: {error}") from error


def find_files(
    names: Iterable[str | os.PathLike[str]], endings: Sequence[str], what: str
) -> list[str]:
    """Return the local files that ``names`` name: themselves, and those below folders, by name.

    Of folders those count that end in ``endings``; ``what`` they are is for messages.

    **Raises:** DataError for a name that is nothing, and for folders without such files.
    """
    found: list[str] = []
    for name in names:
        given = os.fspath(name)
        if not os.path.isdir(given):
            if not os.path.exists(given):
                raise DataError(f"there is no file or folder '{given}'")
            found.append(given)
            continue
        inside = [
            os.fspath(path)
            for path in sorted(Path(given).rglob("*"))
            if path.suffix.lower() in endings and path.is_file()
            if not any(part.startswith(".") for part in path.relative_to(given).parts)
        ]
        if not inside:
            raise DataError(f"'{given}' holds no {what} ({', '.join(endings[:4])} …)")
        found += inside
    return found


def extension_of(file: str) -> str:
    """Return the extension in lower case, that of the compression aside (".jsonl")."""
    path = PurePosixPath(file.split("?")[0] if "://" in file else file)
    suffix = path.suffix.lower()
    return PurePosixPath(path.stem).suffix.lower() if suffix in COMPRESSED_EXTENSIONS else suffix


def file_identity(file: str) -> list:
    """Return what tells one version of a file from another: its place, size and time of change."""
    import fsspec

    system, path = fsspec.core.url_to_fs(file)
    facts = system.info(path)
    stamps = ("size", "mtime", "LastModified", "last_modified", "updated", "ETag", "etag")
    return [system.unstrip_protocol(path), *(str(facts[name]) for name in stamps if name in facts)]


def builder_of(files: Sequence[str], flag: str) -> tuple[str, dict]:
    """Return the ``datasets`` builder that reads ``files`` and its options."""
    extensions = {extension_of(file) for file in files}
    unknown = sorted(extensions - DATASET_BUILDERS.keys())
    if unknown:
        file = next(file for file in files if extension_of(file) in unknown)
        raise DataError(
            f"{flag} {file}: the extension '{unknown[0]}' is not known; use one of "
            f"{', '.join(DATASET_BUILDERS)} (also with {', '.join(COMPRESSED_EXTENSIONS)}), or --sample_by raw, "
            "which reads any file as one text"
        )
    if len(extensions) > 1 and (
        len({DATASET_BUILDERS[e] for e in extensions}) > 1 or ".tsv" in extensions
    ):
        raise DataError(
            f"{flag} mixes {' and '.join(sorted(extensions))} files; give files of one format"
        )
    builder = DATASET_BUILDERS[extensions.pop()]
    if builder != "csv":
        return builder, {}
    # "NA", "null" and "None" are words in a text column; only an empty cell is missing.
    separator = "\t" if extension_of(files[0]) == ".tsv" else ","
    return builder, {"sep": separator, "keep_default_na": False, "na_values": [""]}


def check_heads(files: Sequence[str], builder: str, flag: str) -> None:
    """Refuse files that are empty or binary, before anything is read in earnest."""
    for file in files:
        with explain_read_errors(f"{flag} {file}"), open_binary(file) as stream:
            head = stream.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES and not head.strip():
            raise DataError(f"{flag} {file} is empty; give a file with text in it")
        if builder != "parquet" and b"\0" in head:
            utf16 = " (UTF-16? `iconv -f UTF-16 -t UTF-8` converts it)"
            hint = utf16 if head[:1] in b"\xff\xfe" else ""
            raise DataError(f"{flag} {file} is binary, not UTF-8 text: it holds zero bytes{hint}")


MAX_UNPACK_RATIO = (
    100  # bytes for each packed one; text has 3 to 10, the most repetitive logs some 50
)
ALWAYS_ALLOWED_BYTES = 16 << 20  # bytes that any file may unpack to
READ_BYTES = 1 << 18  # bytes that are unpacked at once, at most


@contextlib.contextmanager
def open_binary(file: str) -> Iterator[Any]:
    """Open ``file``, unpacked where its name says it is packed, and guarded against bombs."""
    import fsspec
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    with fsspec.open(file, "rb", compression=None) as stored:
        kind = "zstd" if file.endswith(".zst") else infer_compression(file)
        if kind is None:
            yield stored
            return
        if kind not in compr:
            raise ImportError(f"no package for {kind} is installed (.zst needs zstandard)")
        with compr[kind](stored, mode="rb") as stream:
            yield io.BufferedReader(GuardedStream(stream, stored, file), READ_BYTES)


class GuardedStream(io.RawIOBase):
    """The unpacked bytes of ``stream``; a DataError where they are far more than those packed."""

    def __init__(self, stream: BinaryIO, packed: BinaryIO, name: str) -> None:
        super().__init__()
        self.stream, self.packed, self.name, self.count = stream, packed, name, 0

    def readable(self) -> bool:
        """Tell that this can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into a buffer; 0 at the end."""
        try:
            data = self.stream.read(min(len(buffer), READ_BYTES))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # each format has errors of its own
            raise OSError(f"it cannot be unpacked: {error}") from error
        buffer[: len(data)] = data
        self.count += len(data)
        packed = self.packed.tell()
        if self.count > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * packed:
            raise DataError(
                f"{self.name} unpacks to more than {MAX_UNPACK_RATIO} times its size "
                f"({self.count >> 20} MB of the first {packed} bytes): no text does. "
                "Where it is what you want, unpack it yourself and give the unpacked file"
            )
        return len(data)


@contextlib.contextmanager
def explain_read_errors(label: str) -> Iterator[None]:
    """Say of which file it is that it cannot be read."""
    try:
        yield
    except DataError:
        raise
    except (ImportError, OSError, ValueError, EOFError) as error:
        raise DataError(f"{label} cannot be read: {error}") from error


def read_lines(file: str, flag: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, ends included; only a line feed ends one."""
    try:
        with (
            open_binary(file) as binary,
            io.TextIOWrapper(binary, "utf-8-sig", newline="\n") as stream,
        ):
            yield from stream
    except UnicodeDecodeError:
        check_utf8(file, flag)  # says where
        raise
    except (ImportError, OSError, EOFError) as error:
        raise DataError(f"{flag} {file} cannot be read: {error}") from error


def check_utf8(file: str, flag: str) -> None:
    """Raise a DataError that says where ``file`` is not UTF-8: line and byte offset."""
    decoder, start, line = codecs.getincrementaldecoder("utf-8")(), 0, 1
    with open_binary(file) as stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset = start - pending + error.start
                line += error.object.count(b"\n", 0, error.start)
                raise DataError(
                    f"{flag} {file} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset "
                    f"{offset} (line {line}); convert it, e.g. `iconv -f LATIN1 -t UTF-8`"
                ) from error
            if not chunk:
                return
            line += chunk.count(b"\n")
            start += len(chunk)


def check_null_rows(file: str, flag: str) -> None:
    """Raise a DataError for a ``null`` in the place of a row, at which pyarrow's reader crashes."""
    begin, number, whole = b"", 1, True
    with open_binary(file) as stream:
        while line := stream.readline(CHUNK_BYTES):
            row = line.strip() if whole else b""
            begin = begin or row
            if begin == b"{" or begin.startswith(b"["):  # one document over many lines
                return
            if row.startswith(b"null"):
                raise DataError(f"{flag} {file}:{number} is null where an object is due: remove it")
            whole = line.endswith(b"\n")
            number += whole


def check_unpacked_size(file: str, flag: str, whole: bool = True) -> None:
    """Unpack a packed file, or its first part, for what others are to unpack without a limit."""
    if PurePosixPath(file).suffix.lower() not in COMPRESSED_EXTENSIONS:
        return
    with explain_read_errors(f"{flag} {file}"), open_binary(file) as stream:
        left = 2 * ALWAYS_ALLOWED_BYTES  # beyond what any file may unpack to
        while left >= 0 and (chunk := stream.read(READ_BYTES)):
            left -= 0 if whole else len(chunk)


SMALL_PARQUET_BYTES = (
    64 << 20
)  # bytes of a file that is looked through; larger ones only if they have odd counts
MIN_BYTES_PER_ROW = 4  # text packs to more
PARQUET_BATCH_ROWS = 1 << 16  # rows that are counted at once


def check_parquet(file: str, flag: str) -> None:
    """Refuse a parquet file whose values take more memory than text of its size does.

    Values are counted, not unpacked. What is no parquet file is left to the reader to say.
    """
    import pyarrow

    try:
        with open_binary(file) as stream:
            size, total = _measure(stream)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError):
        return
    if total > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * size:
        raise DataError(
            f"{flag} {file} unpacks to more than {MAX_UNPACK_RATIO} times its size ({total >> 20} MB of "
            f"{size} bytes): no text does. Where it is what you want, give it as .txt or .jsonl"
        )


def _measure(stream: BinaryIO) -> tuple[int, int]:
    """Return the bytes of the file and, where they are in doubt, those of its values."""
    import pyarrow
    from pyarrow import compute
    from pyarrow.parquet import ParquetFile

    size = stream.seek(0, 2)
    stream.seek(0)
    plain = ParquetFile(stream)
    rows, leaves = plain.metadata.num_rows, range(plain.metadata.num_columns)
    total = rows * len(leaves)
    if total > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * size or (
        size > SMALL_PARQUET_BYTES and rows * MIN_BYTES_PER_ROW < size
    ):
        return size, total if total > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * size else 0
    texts = [
        plain.schema.column(i).path
        for i in leaves
        if plain.schema.column(i).physical_type == "BYTE_ARRAY"
    ]
    stream.seek(0)
    file = ParquetFile(stream, read_dictionary=texts)
    for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=texts):
        columns = list(batch.columns)
        while columns:
            column = columns.pop()
            if pyarrow.types.is_struct(column.type):
                columns += column.flatten()
            elif pyarrow.types.is_dictionary(column.type):  # a value counts as often as it is there
                lengths = compute.binary_length(column.dictionary).cast("int64")
                total += compute.sum(lengths.take(column.indices)).as_py() or 0
            else:
                total += column.nbytes
        if total > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * size:
            break
    return size, total


def explain_load_error(
    error: Exception, files: Sequence[str], builder: str, flag: str
) -> DataError:
    """Find which of ``files`` made ``datasets`` fail, and say where and why."""
    for file in files:
        try:
            if builder != "parquet":
                check_utf8(file, flag)
            if builder != "json":
                continue
            with open_binary(file) as stream:
                array = stream.readline().lstrip().startswith(b"[")  # one array of objects
            with open_binary(file) as stream:
                for number, text in enumerate([stream.read()] if array else stream, 1):
                    where = f"{flag} {file}" if array else f"{flag} {file}, line {number}"
                    try:
                        record = errors.parse_json(text) if text.strip() else {}
                    except json.JSONDecodeError as problem:
                        reason = str(problem) if array else problem.msg
                        raise DataError(f"{where} is not valid JSON: {reason}") from problem
                    if not (array or isinstance(record, dict)):
                        raise DataError(f"{where} is not a JSON object with named columns")
        except DataError as refused:
            return refused
    cause = error.__cause__ or error.__context__ or error
    where = files[0] if len(files) == 1 else f"one of {files[0]} … {files[-1]}"
    return DataError(
        f"{flag} {where} is not valid {builder}: {str(cause).strip() or type(cause).__name__}"
    )
