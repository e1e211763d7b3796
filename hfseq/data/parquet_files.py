"""Parquet files whose values unpack to much more than their bytes are refused before they are read.

Parquet stores equal values once and counts them, so a file of a few kB can hold gigabytes.
"""

from __future__ import annotations

from typing import Any

from hfseq.data import files as data_files
from hfseq.data.unpacked import FREE, RATIO
from hfseq.errors import DataError

SMALL = 64 << 20  # bytes of a file that is looked through; larger ones only if they have odd counts
BYTES_A_ROW = 4  # text packs to more
BATCH = 1 << 16


def check(file: str, flag: str) -> None:
    """Refuse a file whose values take more memory than text of its size does.

    Values are counted, not unpacked. What is no parquet file is left to the reader to say.

    Raises:
        DataError: they take more than ``FREE`` and ``RATIO`` bytes for each one of the file.
    """
    import pyarrow

    try:
        with data_files.open_binary(file) as stream:
            size, total = _measure(stream)
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError):
        return
    if total > FREE + RATIO * size:
        raise DataError(
            f"{flag} {file} unpacks to more than {RATIO} times its size ({total >> 20} MB of "
            f"{size} bytes): no text does. Where it is what you want, give it as .txt or .jsonl"
        )


def _measure(stream: Any) -> tuple[int, int]:
    """Return the bytes of the file and, where they are in doubt, those of its values."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    size = stream.seek(0, 2)
    stream.seek(0)
    plain = ParquetFile(stream)
    rows, leaves = plain.metadata.num_rows, range(plain.metadata.num_columns)
    total = rows * len(leaves)
    if total > FREE + RATIO * size or (size > SMALL and rows * BYTES_A_ROW < size):
        return size, total if total > FREE + RATIO * size else 0
    texts = [
        plain.schema.column(i).path for i in leaves
        if plain.schema.column(i).physical_type == "BYTE_ARRAY"
    ]  # fmt: skip
    stream.seek(0)
    file = ParquetFile(stream, read_dictionary=texts)
    for batch in file.iter_batches(BATCH, columns=texts):
        columns = list(batch.columns)
        while columns:
            column = columns.pop()
            if pyarrow.types.is_struct(column.type):
                columns += column.flatten()
            else:
                total += _bytes(column)
        if total > FREE + RATIO * size:
            break
    return size, total


def _bytes(column: Any) -> int:
    """Return the bytes of a column's values, each counted as often as it stands there."""
    import pyarrow
    import pyarrow.compute as compute

    if not pyarrow.types.is_dictionary(column.type):
        return column.nbytes
    lengths = compute.binary_length(column.dictionary).cast("int64")
    return compute.sum(lengths.take(column.indices)).as_py() or 0
