"""The headers of weight files: names, shapes and types without the values.

Nothing raises for a damaged file: what is wrong with it is what one wants to know.

Sources: https://huggingface.co/docs/safetensors/index#format; flax/serialization.py, whose
msgpack files hold an array as extension 1, the packed triple (shape, type, bytes).
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Bytes of a number by the type's code in safetensors files.
SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
NUMPY = {code: name for name, code in _CODES.items()}
LONGEST_HEADER = 100_000_000  # what the safetensors library accepts
ARRAY = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file; ``begin`` is where its bytes start, from the start of the file."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclasses.dataclass
class Header:
    """A weight file: its tensors in order of their bytes, and what is wrong with it."""

    file: str
    size: int
    tensors: list[Entry] = dataclasses.field(default_factory=list)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    native: bool = False


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a ``.safetensors`` or ``.msgpack`` file."""
    path = Path(path)
    header = Header(path.name, path.stat().st_size)
    try:
        if path.suffix == ".msgpack":
            header.native = True
            header.tensors = list(_msgpack(path))
        else:
            _safetensors(path, header)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        header.problems.append(f"{path.name} cannot be read: {error}")
    except struct.error as error:
        header.problems.append(f"{path.name} is cut off: {error}")
    header.tensors.sort(key=lambda entry: entry.begin)
    return header


# -- safetensors


def _safetensors(path: Path, header: Header) -> None:
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"it has {header.size} bytes, too few for a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if length > min(LONGEST_HEADER, header.size - 8):
            raise ValueError(f"it names a header of {length:,} bytes in a file of {header.size:,}")
        content = file.read(length)
    fill(header, parse(content, header), 8 + length)


def parse(content: bytes, header: Header) -> dict[str, Any]:
    """Parse the JSON of a safetensors header; names that occur twice are noted as a problem."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(items)
        if len(seen) < len(items):
            names = [name for name, _ in items]
            twice = sorted({name for name in names if names.count(name) > 1})
            header.problems.append(f"{header.file} names {', '.join(twice)} twice")
        return seen

    found = json.loads(content, object_pairs_hook=pairs)
    if not isinstance(found, dict):
        raise ValueError("its header is no JSON object")
    return found


def fill(header: Header, found: dict[str, Any], offset: int) -> None:
    """Put the tensors of a parsed header in, whose bytes start at ``offset``, and check them."""
    metadata = found.pop("__metadata__", {})
    header.metadata = metadata if isinstance(metadata, dict) else {}
    header.native = header.metadata.get("format") == "flax"
    for name, entry in found.items():
        try:
            begin, end = (int(place) for place in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            tensor = Entry(name, str(entry["dtype"]), shape, offset + begin, offset + end)
        except (KeyError, TypeError, ValueError) as error:
            header.problems.append(f"{header.file}: {name} is described wrongly ({error!r})")
            continue
        header.tensors.append(tensor)
    header.tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    header.problems += _misplaced(header, offset)


def _misplaced(header: Header, offset: int) -> Iterator[str]:
    end, before = offset, "the header"
    for tensor in header.tensors:
        due = SIZES.get(tensor.code, 0) * tensor.count
        where = f"{header.file}: {tensor.name}"
        if tensor.code not in SIZES:
            yield f"{where} has the unknown type {tensor.code}"
        elif tensor.end - tensor.begin != due:
            yield f"{where} has {tensor.end - tensor.begin:,} bytes where {due:,} are due"
        if tensor.begin < end:
            yield f"{where} overlaps with {before}"
        elif tensor.begin > end:
            yield f"{header.file}: {tensor.begin - end:,} bytes before {tensor.name} are nobody's"
        if tensor.end >= end:
            end, before = tensor.end, tensor.name
    if end != header.size:
        what = "are missing" if end > header.size else "follow the last tensor"
        yield f"{header.file}: {abs(end - header.size):,} bytes {what} (cut off or damaged)"


# -- msgpack


def _msgpack(path: Path) -> Iterator[Entry]:
    if not path.stat().st_size:
        raise ValueError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        walker = _Walker(view)
        tree = walker.value()
        if walker.at != len(view):
            raise ValueError(f"{len(view) - walker.at:,} bytes follow the tree")
        if not isinstance(tree, dict):
            raise ValueError("it holds no parameter tree")
        yield from _leaves(tree, "")


def _leaves(tree: dict[Any, Any], prefix: str) -> Iterator[Entry]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Entry):
            yield dataclasses.replace(value, name=name)
        elif isinstance(value, dict) and "__msgpack_chunked_array__" in value:
            yield _joined(name, value)
        elif isinstance(value, dict):
            yield from _leaves(value, f"{name}.")


def _joined(name: str, value: dict[Any, Any]) -> Entry:
    """An array of more than 2^30 bytes, which Flax cuts into flat chunks."""
    shape, chunks = value["shape"], value["chunks"]
    parts, sizes = list(chunks.values()), list(shape.values())
    return Entry(name, parts[0].code, tuple(sizes), parts[0].begin, parts[-1].end)


class _Walker:
    """Reads one value after the other, stepping over the bytes of arrays."""

    def __init__(self, view: Any) -> None:
        self.view, self.at = view, 0

    def value(self) -> Any:
        kind = self._take(1)[0]
        if kind <= 0x7F or kind >= 0xE0:
            return kind if kind <= 0x7F else kind - 256
        if 0x80 <= kind <= 0x8F or kind in (0xDE, 0xDF):
            count = self._count(kind, 0xDE, 0x0F)
            return {self.value(): self.value() for _ in range(count)}
        if 0x90 <= kind <= 0x9F or kind in (0xDC, 0xDD):
            return [self.value() for _ in range(self._count(kind, 0xDC, 0x0F))]
        if 0xA0 <= kind <= 0xBF:
            return self._take(kind & 0x1F).decode()
        if kind in (0xD9, 0xDA, 0xDB):
            return self._take(self._size(kind - 0xD9)).decode()
        if kind in (0xC4, 0xC5, 0xC6):
            return self._skip(self._size(kind - 0xC4))
        if kind in (0xC7, 0xC8, 0xC9):
            return self._extension(self._size(kind - 0xC7))
        if 0xD4 <= kind <= 0xD8:
            return self._extension(1 << (kind - 0xD4))
        if kind in _NUMBERS:
            (number,) = struct.unpack(_NUMBERS[kind], self._take(struct.calcsize(_NUMBERS[kind])))
            return number
        if kind in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[kind]
        raise ValueError(f"byte {self.at - 1:,} (0x{kind:02x}) is no msgpack")

    def _extension(self, size: int) -> Any:
        kind, end = self._take(1)[0], self.at + size
        if end > len(self.view):
            raise ValueError("it is cut off")
        if kind != ARRAY:
            return self._skip(size)
        shape, code, (begin, stop) = self.value()
        if stop != end:
            raise ValueError(f"an array at byte {begin:,} is not as long as it says")
        return Entry("", _CODES.get(code, code), tuple(shape), begin, stop)

    def _skip(self, size: int) -> tuple[int, int]:
        begin = self.at
        self.at += size
        if self.at > len(self.view):
            raise ValueError("it is cut off")
        return begin, self.at

    def _take(self, size: int) -> bytes:
        begin, end = self._skip(size)
        return self.view[begin:end]

    def _count(self, kind: int, wide: int, mask: int) -> int:
        return self._size(kind - wide + 1) if kind in (wide, wide + 1) else kind & mask

    def _size(self, power: int) -> int:
        """Read a big-endian count of 1, 2 or 4 bytes."""
        return int.from_bytes(self._take(1 << power), "big")


_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip


__all__ = ["Entry", "Header", "read_header"]
