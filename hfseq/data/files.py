"""Finds, opens and decompresses data files, and locates errors in them."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
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
    """Expands paths, comma-separated lists and globs to a list of files.

    Args:
        patterns: Paths, URLs, comma-separated lists or globs.
        flag: The flag, for messages.

    Raises:
        DataError: A file does not exist, a glob matches no file, or a name is a directory.
    """
    names: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        system, path = _locate(pattern, flag)
        if system.exists(path):  # names may contain commas and brackets
            if system.isdir(path):
                advice = f"specify files, e.g. '{pattern}/*.txt'"
                raise DataError(f"{flag} {pattern} is a directory: {advice}")
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
    """Returns whether `name` is a local or remote directory."""
    system, path = _locate(name, flag)
    return system.isdir(path)


def list_files(folder: str, flag: str) -> list[str]:
    """Returns all files in a directory and its subdirectories, sorted."""
    system, path = _locate(folder, flag)
    return _names(system, system.find(path), folder)


def _names(system: AbstractFileSystem, paths: Iterable[str], pattern: str) -> list[str]:
    return [system.unstrip_protocol(p) if "://" in pattern else p for p in sorted(paths)]


def _locate(name: str, flag: str) -> tuple[AbstractFileSystem, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(name)
    except (ImportError, ValueError) as error:  # missing package, or unknown protocol
        # fsspec replaces the text of every ImportError by advice to install the package.
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        raise DataError(f"{flag} {name} cannot be opened: {error}{cause}") from error


def find_files(
    names: Iterable[str | os.PathLike[str]], extensions: Sequence[str], label: str
) -> list[str]:
    """Returns the local files in a list of files and directories.

    The paths of files are returned unchanged. Directories are searched recursively, and the files
    found in them are sorted by name.

    Args:
        names: Files and directories.
        extensions: File extensions to look for in directories.
        label: Plural noun for the files, for messages.

    Raises:
        DataError: A path does not exist, or a directory contains no such files.
    """
    paths: list[str] = []
    for name in names:
        file_path = os.fspath(name)
        if not os.path.isdir(file_path):
            if not os.path.exists(file_path):
                raise DataError(f"no such file or directory: '{file_path}'")
            paths.append(file_path)
            continue
        inside = [
            os.fspath(path)
            for path in sorted(Path(file_path).rglob("*"))
            if path.suffix.lower() in extensions and path.is_file()
            if not any(part.startswith(".") for part in path.relative_to(file_path).parts)
        ]
        if not inside:
            raise DataError(f"'{file_path}' contains no {label} ({', '.join(extensions[:4])} …)")
        paths += inside
    return paths


def extension_of(file: str) -> str:
    """Returns the extension in lower case, ignoring a compression extension such as ".gz".

    For example, the extension of `a.jsonl.gz` is ".jsonl".
    """
    path = PurePosixPath(file.split("?")[0] if "://" in file else file)
    suffix = path.suffix.lower()
    return PurePosixPath(path.stem).suffix.lower() if suffix in COMPRESSED_EXTENSIONS else suffix


#: Local files of at most this size are hashed completely. Of larger files, `HASHED_BLOCKS` evenly
#: spaced blocks are hashed.
COMPLETE_HASH_BYTES = 1 << 26
HASHED_BLOCKS, HASHED_BLOCK_BYTES = 64, 1 << 16


def file_identity(file: str) -> list[str]:
    """Returns values that change with the content of a file, for cache keys.

    The values include the location and the size of the file. For a local file, they also include
    the modification time and a hash of the content. The hash of a large file covers its beginning,
    its end, and blocks between them. For a remote file, the values include the version (e.g. the
    ETag) or the modification time that the server reports.
    """
    import fsspec

    system, path = fsspec.core.url_to_fs(file)
    details = system.info(path)
    stamps = ("size", "mtime", "LastModified", "last_modified", "updated", "ETag", "etag")
    identity = [
        system.unstrip_protocol(path),
        *(str(details[name]) for name in stamps if name in details),
    ]
    if "file" in system.protocol:
        identity.append(_content_hash(path))
    return identity


def _content_hash(path: str) -> str:
    digest = blake2b(digest_size=16)
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= COMPLETE_HASH_BYTES:
            digest.update(stream.read())
        else:
            for block in range(HASHED_BLOCKS):
                stream.seek(block * (size - HASHED_BLOCK_BYTES) // (HASHED_BLOCKS - 1))
                digest.update(stream.read(HASHED_BLOCK_BYTES))
    return digest.hexdigest()


def builder_of(files: Sequence[str], flag: str) -> str:
    """Returns the common format of the files: "text", "json", "csv" (also for .tsv) or "parquet".

    Raises:
        DataError: An extension is unknown, or the files have different formats.
    """
    extensions = {extension_of(file) for file in files}
    unknown = sorted(extensions - DATASET_BUILDERS.keys())
    if unknown:
        file = next(file for file in files if extension_of(file) in unknown)
        raise DataError(
            f"{flag} {file}: unknown extension '{unknown[0]}'; use one of "
            f"{', '.join(DATASET_BUILDERS)} (also with {', '.join(COMPRESSED_EXTENSIONS)}), or "
            "--sample_by raw, which reads any file as one text"
        )
    if len(extensions) > 1 and (
        len({DATASET_BUILDERS[e] for e in extensions}) > 1 or ".tsv" in extensions
    ):
        raise DataError(
            f"{flag} mixes {' and '.join(sorted(extensions))} files; use files of one format"
        )
    return DATASET_BUILDERS[extensions.pop()]


def check_heads(files: Sequence[str], builder: str, flag: str) -> None:
    """Raises a `DataError` if a file is empty or binary, based on its first bytes."""
    for file in files:
        with explain_read_errors(f"{flag} {file}"), open_binary(file) as stream:
            head = stream.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES and not head.strip():
            raise DataError(f"{flag} {file} is empty; use a file that contains text")
        if builder != "parquet" and b"\0" in head:
            utf16 = " (UTF-16? Convert it with `iconv -f UTF-16 -t UTF-8`)"
            hint = utf16 if head[:1] in b"\xff\xfe" else ""
            raise DataError(
                f"{flag} {file} is binary, not UTF-8 text: it contains zero bytes{hint}"
            )


# Decompressed bytes per compressed byte. Text has 3 to 10, repetitive logs have up to 50.
MAX_UNPACK_RATIO = 100

ALWAYS_ALLOWED_BYTES = 16 << 20  # any file may decompress to this size
READ_BYTES = 1 << 18  # maximum number of bytes to decompress at once


@contextlib.contextmanager
def open_binary(file: str) -> Iterator[Any]:
    """Opens a file, and decompresses it if its name has a compression extension.

    The size of the decompressed data is limited, see `GuardedStream`.
    """
    import fsspec
    from fsspec.compression import compr
    from fsspec.utils import infer_compression

    with fsspec.open(file, "rb", compression=None) as stored:
        codec = "zstd" if file.endswith(".zst") else infer_compression(file)
        if codec is None:
            yield stored
            return
        if codec not in compr:
            raise ImportError(
                f"no package for {codec} compression is installed (.zst requires zstandard)"
            )
        with compr[codec](stored, mode="rb") as stream:
            yield io.BufferedReader(GuardedStream(stream, stored, file), READ_BYTES)


class GuardedStream(io.RawIOBase):
    """A decompressed stream that raises an error if it is much larger than the compressed data.

    Args:
        stream: The decompressed stream.
        packed: The compressed stream, whose position is the number of bytes read.
        name: Name of the file, for messages.

    Raises:
        DataError: More than `MAX_UNPACK_RATIO` bytes per compressed byte were read, in addition to
            `ALWAYS_ALLOWED_BYTES`.
    """

    def __init__(self, stream: BinaryIO, packed: BinaryIO, name: str) -> None:
        super().__init__()
        self.stream, self.packed, self.name, self.count = stream, packed, name, 0

    def readable(self) -> bool:
        """Returns true, because the stream supports reading."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads into a buffer and returns the number of bytes, 0 at the end."""
        try:
            data = self.stream.read(min(len(buffer), READ_BYTES))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # each format has different exceptions
            raise OSError(f"decompression failed: {error}") from error
        buffer[: len(data)] = data
        self.count += len(data)
        packed = self.packed.tell()
        if self.count > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * packed:
            raise DataError(
                f"{self.name} decompresses to more than {MAX_UNPACK_RATIO} times its size "
                f"({self.count >> 20} MB from the first {packed} bytes), which is unusual for "
                "text. If the file is correct, decompress it before use"
            )
        return len(data)


@contextlib.contextmanager
def explain_read_errors(label: str) -> Iterator[None]:
    """Context manager that converts read errors to a `DataError`.

    Args:
        label: Flag and name of the file, for the message.
    """
    try:
        yield
    except DataError:
        raise
    except (ImportError, OSError, ValueError, EOFError) as error:
        raise DataError(f"{label} cannot be read: {error}") from error


def read_lines(file: str, flag: str) -> Iterator[str]:
    """Yields the lines of a UTF-8 file, including their line feeds.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    try:
        with (
            open_binary(file) as binary,
            io.TextIOWrapper(binary, "utf-8-sig", newline="\n") as stream,
        ):
            yield from stream
    except UnicodeDecodeError:
        check_utf8(file, flag)  # raises an error with the position
        raise
    except (ImportError, OSError, EOFError) as error:
        raise DataError(f"{flag} {file} cannot be read: {error}") from error


def check_utf8(file: str, flag: str) -> None:
    """Raises a `DataError` with line and byte offset if the file is not UTF-8."""
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
    """Raises a `DataError` if a line of a JSON Lines file is `null`.

    pyarrow's JSON reader would crash on such a line.
    """
    begin, number, is_line_start = b"", 1, True
    with open_binary(file) as stream:
        while line := stream.readline(CHUNK_BYTES):
            row = line.strip() if is_line_start else b""
            begin = begin or row
            if begin == b"{" or begin.startswith(b"["):  # one JSON document over many lines
                return
            if row.startswith(b"null"):
                raise DataError(
                    f"{flag} {file}:{number} is null instead of an object: remove the line"
                )
            is_line_start = line.endswith(b"\n")
            number += is_line_start


def check_unpacked_size(file: str, flag: str, complete: bool = True) -> None:
    """Decompresses a file to check its size, before a reader without a size limit reads it.

    Args:
        file: The file. Uncompressed files are not read.
        flag: The flag, for messages.
        complete: Whether to check the complete file instead of its beginning.
    """
    if PurePosixPath(file).suffix.lower() not in COMPRESSED_EXTENSIONS:
        return
    with explain_read_errors(f"{flag} {file}"), open_binary(file) as stream:
        remaining = 2 * ALWAYS_ALLOWED_BYTES  # enough to exceed the limit of `GuardedStream`
        while remaining >= 0 and (chunk := stream.read(READ_BYTES)):
            remaining -= 0 if complete else len(chunk)


# The values of larger files are measured only if there are unusually many rows for the file size.
SMALL_PARQUET_BYTES = 64 << 20
MIN_BYTES_PER_ROW = 4  # rows of text need more, even if they are compressed
PARQUET_BATCH_ROWS = 1 << 16


def check_parquet(file: str, flag: str) -> None:
    """Raises a `DataError` for a parquet file whose values are much larger than the file.

    Reading such a file would need far more memory than its size suggests. The size of the values is
    determined without decompressing all of them. No error is raised for files that are not valid
    parquet, because the reader reports them.
    """
    import pyarrow

    try:
        with open_binary(file) as stream:
            size, total = _measure(stream)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError):
        return
    if total > ALWAYS_ALLOWED_BYTES + MAX_UNPACK_RATIO * size:
        raise DataError(
            f"{flag} {file} decompresses to more than {MAX_UNPACK_RATIO} times its size "
            f"({total >> 20} MB from {size} bytes), which is unusual for text. If the file is "
            "correct, convert it to .txt or .jsonl"
        )


def _measure(stream: BinaryIO) -> tuple[int, int]:
    """Returns the size of a parquet file and the size of its values, both in bytes.

    The values of a large file with an ordinary number of rows are not measured: their size is
    returned as 0. Measuring stops as soon as the size exceeds the limit.
    """
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
            elif pyarrow.types.is_dictionary(column.type):  # count repeated values
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
    """Returns an error that says in which of `files`, and in which line, `datasets` failed."""
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
                    source_label = f"{flag} {file}" if array else f"{flag} {file}, line {number}"
                    try:
                        record = errors.parse_json(text) if text.strip() else {}
                    except json.JSONDecodeError as problem:
                        reason = str(problem) if array else problem.msg
                        raise DataError(f"{source_label} is not valid JSON: {reason}") from problem
                    if not (array or isinstance(record, dict)):
                        raise DataError(f"{source_label} is not a JSON object with named columns")
        except DataError as data_error:
            return data_error
    cause = error.__cause__ or error.__context__ or error
    path = getattr(cause, "filename", None) if isinstance(cause, OSError) else None
    if path is not None and str(path) not in files:
        return DataError(
            f"cannot write the cache of `datasets` ({cause}): set HF_HOME to a writable directory, "
            "or use --data_cache_dir"
        )
    if builder == "json" and (difference := _column_difference(files, flag)):
        return DataError(difference)
    source_label = files[0] if len(files) == 1 else f"one of {files[0]} … {files[-1]}"
    return DataError(
        f"{flag} {source_label} is not valid {builder}: "
        f"{str(cause).strip() or type(cause).__name__}"
    )


def _column_difference(files: Sequence[str], flag: str) -> str | None:
    """Returns a message if the first rows of JSON files have different columns."""
    columns: dict[str, list[str]] = {}
    for file in files:
        with open_binary(file) as stream:
            text = stream.readline().strip()
        with contextlib.suppress(json.JSONDecodeError):
            record = errors.parse_json(text)
            columns[file] = sorted(record) if isinstance(record, dict) else []
    first = next(iter(columns.values()), [])
    for file, names in columns.items():
        if names != first:
            return (
                f"{flag} {file} has the columns {', '.join(names) or 'none'}, but {files[0]} has "
                f"{', '.join(first) or 'none'}: use files with the same columns"
            )
    return None
