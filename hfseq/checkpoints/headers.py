"""The headers of weight files: names, shapes and types without the values.

Nothing raises for a damaged file: what is wrong with it is what one wants to know.

Sources: https://huggingface.co/docs/safetensors/index#format; flax/serialization.py, whose
msgpack files hold an array as extension 1, the packed triple (shape, type, bytes).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.checkpoints import files
from hfseq.checkpoints.weights import Index, Tensor
from hfseq.errors import CheckpointError, first_line, parse_json

#: Bytes of a number by the type's code in safetensors files.
ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
NUMPY_DTYPES = {code: name for name, code in _CODES.items()}
MAX_HEADER_SIZE = 100_000_000  # what the safetensors library accepts

#: Flax' extension type of an array, and msgpack's numbers by their first byte.
ARRAY_EXTENSION = 1
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}

#: A shard by its number and the number of all.
SHARD_NAME = re.compile(r"(?:model|flax_model)-(\d{5})-of-(\d{5})\.(?:safetensors|msgpack)")


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file; ``begin`` is where its bytes start, from the start of the file."""

    name: str
    dtype_code: str
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
    tensors: list[TensorEntry] = dataclasses.field(default_factory=list)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    native: bool = False

    def add_tensors(self, described: dict[str, Any], offset: int) -> None:
        """Take in the tensors of a parsed header, whose bytes start at ``offset``; check them."""
        metadata = described.pop("__metadata__", {})
        self.metadata = metadata if isinstance(metadata, dict) else {}
        self.native = self.metadata.get("format") == "flax"
        for name, entry in described.items():
            try:
                begin, end = (int(place) for place in entry["data_offsets"])
                shape = tuple(int(size) for size in entry["shape"])
                tensor = TensorEntry(name, str(entry["dtype"]), shape, offset + begin, offset + end)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                self.problems.append(f"{self.file}: {name} is described wrongly ({error!r})")
                continue
            self.tensors.append(tensor)
        self.tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
        end, before = offset, "the header"
        for tensor in self.tensors:
            due = ITEM_SIZES.get(tensor.dtype_code, 0) * tensor.count
            where = f"{self.file}: {tensor.name}"
            if tensor.dtype_code not in ITEM_SIZES:
                self.problems.append(f"{where} has the unknown type {tensor.dtype_code}")
            elif tensor.end - tensor.begin != due:
                held = tensor.end - tensor.begin
                self.problems.append(f"{where} has {held:,} bytes where {due:,} are due")
            if tensor.begin < end:
                self.problems.append(f"{where} overlaps with {before}")
            elif tensor.begin > end:
                gap = f"{tensor.begin - end:,} bytes before {tensor.name}"
                self.problems.append(f"{self.file}: {gap} are nobody's")
            if tensor.end >= end:
                end, before = tensor.end, tensor.name
        if end != self.size:
            what = "are missing" if end > self.size else "follow the last tensor"
            text = f"{abs(end - self.size):,} bytes {what} (cut off or damaged)"
            self.problems.append(f"{self.file}: {text}")


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a ``.safetensors`` or ``.msgpack`` file."""
    path = Path(path)
    header = Header(path.name, path.stat().st_size)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = collections.Counter(name for name, _ in items)
        if twice := sorted(name for name, count in names.items() if count > 1):
            header.problems.append(f"{header.file} names {', '.join(twice)} twice")
        return dict(items)

    try:
        with path.open("rb") as file:
            if path.suffix == ".msgpack":
                header.native = True
                if not header.size:
                    raise ValueError("it is empty")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                    header.tensors = list(_leaves(_Walker(view).tree(), ""))
            else:
                start = file.read(8)
                if len(start) < 8:
                    raise ValueError(f"it has {header.size} bytes, too few for a safetensors file")
                (length,) = struct.unpack("<Q", start)
                if length > min(MAX_HEADER_SIZE, header.size - 8):
                    raise ValueError(
                        f"it names a header of {length:,} bytes in a file of {header.size:,}"
                    )
                described = json.loads(file.read(length), object_pairs_hook=pairs)
                if not isinstance(described, dict):
                    raise ValueError("its header is no JSON object")
                header.add_tensors(described, 8 + length)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        header.problems.append(f"{path.name} cannot be read: {error}")
    except struct.error as error:
        header.problems.append(f"{path.name} is cut off: {error}")
    header.tensors.sort(key=lambda entry: entry.begin)
    return header


# -- msgpack


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[TensorEntry]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, TensorEntry):
            yield dataclasses.replace(value, name=name)
        elif isinstance(value, dict) and "__msgpack_chunked_array__" in value:
            # More than 2^30 bytes, which Flax cuts into flat chunks.
            parts = list(value["chunks"].values())
            code, shape = _described(parts[0].code, value["shape"].values())
            yield TensorEntry(name, code, shape, parts[0].begin, parts[-1].end)
        elif isinstance(value, dict):
            yield from _leaves(value, f"{name}.")


def _described(code: Any, shape: Any) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape that a file gives an array, if they are such."""
    sizes = tuple(shape)
    if not isinstance(code, str) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"an array of the type {code!r:.80} and the shape {sizes!r:.80}")
    return _CODES.get(code, code), sizes


class _Walker:
    """Reads one value after the other, stepping over the bytes of arrays."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view, self.at = view, 0

    def tree(self) -> dict[str, Any]:
        tree = self.value()
        if self.at != len(self.view):
            raise ValueError(f"{len(self.view) - self.at:,} bytes follow the tree")
        if not isinstance(tree, dict):
            raise ValueError("it holds no parameter tree")
        return tree

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
        if kind != ARRAY_EXTENSION:
            return self._skip(size)
        shape, code, (begin, stop) = self.value()
        if stop != end:
            raise ValueError(f"an array at byte {begin:,} is not as long as it says")
        return TensorEntry("", *_described(code, shape), begin, stop)

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


# -- the weights of a checkpoint


@dataclasses.dataclass
class WeightFiles:
    """The weights that loading reads, those that it does not, and what is wrong."""

    folder: Path | None = None
    headers: list[Header] = dataclasses.field(default_factory=list)
    unread_files: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def entries(self) -> dict[str, tuple[Header, TensorEntry]]:
        """All tensors by name."""
        return {entry.name: (head, entry) for head in self.headers for entry in head.tensors}

    @property
    def native(self) -> bool:
        """Whether the names are Flax paths."""
        return any(header.native for header in self.headers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as the weight map takes them; they are read when asked for."""

        def tensor(header: Header, entry: TensorEntry) -> Tensor:
            def read(index: Index) -> np.ndarray:
                return read_tensor(self.folder, header, entry)[index]

            return Tensor(entry.shape, NUMPY_DTYPES.get(entry.dtype_code, entry.dtype_code), read)

        return {name: tensor(*held) for name, held in self.entries.items()}


class WeightsNotDownloaded(CheckpointError):
    """Values of a checkpoint of which only the headers were fetched."""


def read_tensor(folder: Path | None, header: Header, entry: TensorEntry) -> np.ndarray:
    """Return the values of a tensor, mapped into memory."""
    import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)

    if folder is None:
        raise WeightsNotDownloaded(f"only the header of {header.file} was fetched")
    if not entry.count:
        return np.empty(entry.shape, np.dtype(NUMPY_DTYPES[entry.dtype_code]))
    kind = np.dtype(NUMPY_DTYPES[entry.dtype_code])
    flat = np.memmap(folder / header.file, kind, "r", entry.begin, (entry.count,))
    return flat.reshape(entry.shape)


def read_local_headers(folder: Path, only: str | None = None) -> WeightFiles:
    """Read the headers of what loading ``folder`` would read (or of the one file ``only``)."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    chosen = only or next((name for name in files.FLAX_FILES if name in names), None)
    if chosen is None or ".bin" in chosen:
        bins = [name for name in names if name.endswith(".bin") or name in files.TORCH_FILES]
        shards = [name for name in names if SHARD_NAME.fullmatch(name)]
        problem = f"no weights: none of {', '.join(files.FLAX_FILES)}"
        if shards:
            problem = f"{len(shards)} shards, but no index that names them ({shards[0]} …)"
        elif set(bins) & set(files.TORCH_FILES):
            problem = (
                f"only {', '.join(bins)}, a pickle, which is not read here: `hfseq convert` reads "
                "it with torch's restricted loader and writes safetensors"
            )
        return WeightFiles(folder, unread_files=bins + shards, problems=[problem])
    weights = WeightFiles(folder)
    if chosen.endswith((".safetensors.index.json", ".msgpack.index.json")):
        where = _weight_map(folder / chosen, weights)
        for shard in sorted(set(where.values())):
            if re.search(r"[/\\]", shard) or shard in ("", ".", ".."):
                problem = f"names {shard!r}: shards must lie beside their index"
            elif not (folder / shard).is_file():
                count = sum(name == shard for name in where.values())
                problem = f"names {shard} ({count} tensors), which is not there"
            else:
                weights.headers.append(read_header(folder / shard))
                continue
            weights.problems.append(f"{chosen} {problem}")
        if where:
            metadata = parse_json((folder / chosen).read_bytes()).get("metadata")
            weights.problems += check_index(chosen, where, metadata, weights.headers)
        known = {header.file for header in weights.headers}
        strays = [name for name in names if SHARD_NAME.fullmatch(name) and name not in known]
        weights.problems += [f"{name} is a shard that {chosen} does not name" for name in strays]
    else:
        weights.headers = [read_header(folder / chosen)]
    read = {header.file for header in weights.headers}
    weights.unread_files = [
        name
        for name in names
        if name.endswith((".safetensors", ".msgpack", ".bin"))
        and name.startswith(("model", "flax_model", "pytorch_model"))
        and name not in read
    ]
    weights.problems += [problem for header in weights.headers for problem in header.problems]
    return weights


def _weight_map(index: Path, weights: WeightFiles) -> dict[str, str]:
    """Return tensor -> shard of an index; nothing, and a problem, where it is none."""
    try:
        return {str(name): str(shard) for name, shard in files.read_index(index).items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        weights.problems.append(f"{index.name} is no index of weight shards: {first_line(error)}")
        return {}


def check_index(
    index: str, where: Mapping[str, str], metadata: object, headers: list[Header]
) -> list[str]:
    """Say where an index and its shards disagree."""
    holds = {
        (entry.name.replace(".", "/") if head.native else entry.name): (head.file, entry)
        for head in headers
        for entry in head.tensors
    }
    there = {header.file for header in headers}
    native = any(header.native for header in headers)
    named = {(name.replace(".", "/") if native else name): shard for name, shard in where.items()}
    absent = [n for n, shard in named.items() if shard in there and holds.get(n, ("",))[0] != shard]
    unnamed = [name for name in holds if name not in named]
    problems = []
    if absent:
        problems.append(f"{index} names tensors that their shards do not hold: {_listed(absent)}")
    if unnamed:
        problems.append(f"{index} does not name {_listed(unnamed)}, which its shards hold")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    whole = there == set(where.values()) and not absent
    actual = sum(entry.end - entry.begin for _, entry in holds.values())
    if whole and isinstance(total, int) and total != actual:
        problems.append(f"{index} says {total:,} bytes in all; the shards hold {actual:,}")
    return problems


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more


def read_remote_headers(name: str) -> WeightFiles:
    """Read the headers of a repository on the Hub, without its weights.

    **Raises:** :class:`~hfseq.errors.CheckpointError` where it cannot be read.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    from hfseq.checkpoints import hub

    weights = WeightFiles()
    index = hub.resolve_file(name, files.SAFETENSORS_INDEX)
    where = {} if index is None else _weight_map(Path(index), weights)
    shards = sorted(set(where.values())) if index is not None else [files.SAFETENSORS]
    for shard in shards:
        cached = try_to_load_from_cache(name, shard)
        if isinstance(cached, str | os.PathLike) and os.path.isfile(cached):
            weights.headers.append(read_header(cached))
            continue
        try:
            told = HfApi().parse_safetensors_file_metadata(name, shard)
        except errors.EntryNotFoundError:
            what = f"'{name}' has no safetensors: load it, or convert it, to see more"
            weights.problems.append(what)
            weights.headers = []
            break
        except Exception as error:
            if not hub.is_hub_error(error):
                raise CheckpointError(f"{name}/{shard}: {first_line(error)}") from error
            raise CheckpointError(
                f"cannot read '{name}' on the Hub: {hub.describe_hub_error(error)}"
            ) from error
        described: dict[str, Any] = {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for tensor, info in told.tensors.items()
        }
        ends = [info.data_offsets[1] for info in told.tensors.values()]
        header = Header(shard, max(ends, default=0))
        header.add_tensors({"__metadata__": told.metadata, **described}, 0)
        weights.headers.append(header)
    if index is not None:
        weights.problems += check_index(files.SAFETENSORS_INDEX, where, None, weights.headers)
    weights.problems += [problem for header in weights.headers for problem in header.problems]
    return weights


def count_by_dtype(weights: WeightFiles) -> dict[str, dict[str, int]]:
    """Return tensors, numbers and bytes by type."""
    by_type: dict[str, dict[str, int]] = {}
    for _, entry in weights.entries.values():
        row = by_type.setdefault(entry.dtype_code, {"tensors": 0, "numbers": 0, "bytes": 0})
        row["tensors"] += 1
        row["numbers"] += math.prod(entry.shape)
        row["bytes"] += entry.end - entry.begin
    return by_type
