"""Reads the headers of weight files: names, shapes and dtypes without the values.

Reading a damaged file does not raise an error. The result contains messages about its problems
instead.

Sources of the formats: https://huggingface.co/docs/safetensors/index#format, and
flax/serialization.py. Flax stores an array in a msgpack file as extension type 1, whose content is
the packed triple (shape, dtype, bytes).
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
from hfseq.checkpoints.torch_files import TorchTensor, locate_tensors
from hfseq.checkpoints.weights import Index, Tensor
from hfseq.errors import CheckpointError, first_line, parse_json

#: Bytes per value by dtype code of safetensors.
ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
NUMPY_DTYPES = files.DTYPE_NAMES
_CODES = {name: code for code, name in NUMPY_DTYPES.items()}
MAX_HEADER_SIZE = 100_000_000  # the limit of the safetensors library

#: The msgpack extension type that Flax uses for arrays.
ARRAY_EXTENSION = 1
#: Formats of msgpack numbers for the `struct` module, by the first byte of the msgpack value.
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

#: File name of a shard, with its number and the number of shards.
SHARD_NAME = re.compile(
    r"(?:model|flax_model|pytorch_model)-(\d{5})-of-(\d{5})\.(?:safetensors|msgpack|bin)"
)


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file.

    Attributes:
        name: The name of the tensor.
        dtype_code: The dtype in the notation of safetensors files, e.g. ``"F32"``.
        shape: The shape.
        begin: Offset of the first byte from the start of the file.
        end: Offset after the last byte.
        strided: Location and strides of a tensor in a ``.bin`` file. `None` in other files, which
            store all values in order.
    """

    name: str
    dtype_code: str
    shape: tuple[int, ...]
    begin: int
    end: int
    strided: TorchTensor | None = None

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


@dataclasses.dataclass
class Header:
    """The header of a weight file.

    Attributes:
        file: The file name.
        size: Size of the file in bytes.
        tensors: The tensors, ordered by their position in the file.
        metadata: The metadata of a safetensors file.
        problems: Messages about inconsistencies.
        native: Whether the names are Flax paths instead of PyTorch names.
    """

    file: str
    size: int
    tensors: list[TensorEntry] = dataclasses.field(default_factory=list)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    native: bool = False

    def add_tensors(self, header: dict[str, Any], offset: int) -> None:
        """Adds and checks the tensors of a parsed safetensors header.

        Args:
            header: The header as parsed from JSON.
            offset: Offset of the data from the start of the file.
        """
        metadata = header.pop("__metadata__", {})
        self.metadata = metadata if isinstance(metadata, dict) else {}
        self.native = self.metadata.get("format") == "flax"
        for name, entry in header.items():
            try:
                begin, end = (int(position) for position in entry["data_offsets"])
                shape = tuple(int(size) for size in entry["shape"])
                tensor = TensorEntry(name, str(entry["dtype"]), shape, offset + begin, offset + end)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                self.problems.append(f"{self.file}: {name} has an invalid entry ({error!r})")
                continue
            self.tensors.append(tensor)
        self.tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
        end, previous = offset, "the header"
        for tensor in self.tensors:
            expected_bytes = ITEM_SIZES.get(tensor.dtype_code, 0) * tensor.count
            label = f"{self.file}: {tensor.name}"
            if tensor.dtype_code not in ITEM_SIZES:
                self.problems.append(f"{label} has the unknown dtype {tensor.dtype_code}")
            elif tensor.end - tensor.begin != expected_bytes:
                num_bytes = tensor.end - tensor.begin
                self.problems.append(
                    f"{label} has {num_bytes:,} bytes instead of {expected_bytes:,}"
                )
            if tensor.begin < end:
                self.problems.append(f"{label} overlaps with {previous}")
            elif tensor.begin > end:
                gap = f"{tensor.begin - end:,} bytes before {tensor.name}"
                self.problems.append(f"{self.file}: {gap} do not belong to a tensor")
            if tensor.end >= end:
                end, previous = tensor.end, tensor.name
        if end != self.size:
            problem = "are missing" if end > self.size else "follow the last tensor"
            text = f"{abs(end - self.size):,} bytes {problem} (truncated or damaged file)"
            self.problems.append(f"{self.file}: {text}")


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads the header of a ``.safetensors``, ``.msgpack`` or ``.bin`` file."""
    path = Path(path)
    header = Header(path.name, path.stat().st_size)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        names = collections.Counter(name for name, _ in items)
        if duplicates := sorted(name for name, count in names.items() if count > 1):
            header.problems.append(f"{header.file} contains {', '.join(duplicates)} twice")
        return dict(items)

    try:
        with path.open("rb") as file:
            if path.suffix == ".bin":
                header.tensors = [
                    TensorEntry(
                        *(name, _CODES[tensor.dtype], tensor.shape, tensor.begin),
                        tensor.begin + math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize,
                        tensor,
                    )
                    for name, tensor in locate_tensors(str(path)).items()
                ]
            elif path.suffix == ".msgpack":
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
                        f"its header length is {length:,} bytes, but the file has {header.size:,}"
                    )
                parsed = json.loads(file.read(length), object_pairs_hook=pairs)
                if not isinstance(parsed, dict):
                    raise ValueError("its header is not a JSON object")
                header.add_tensors(parsed, 8 + length)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        header.problems.append(f"{path.name} cannot be read: {error}")
    except struct.error as error:
        header.problems.append(f"{path.name} is truncated: {error}")
    header.tensors.sort(key=lambda entry: entry.begin)
    return header


# -- msgpack


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[TensorEntry]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, TensorEntry):
            yield dataclasses.replace(value, name=name)
        elif isinstance(value, dict) and "__msgpack_chunked_array__" in value:
            # Flax divides arrays of more than 2^30 bytes into flat chunks.
            parts = list(value["chunks"].values())
            code, shape = _described(parts[0].dtype_code, value["shape"].values())
            yield TensorEntry(name, code, shape, parts[0].begin, parts[-1].end)
        elif isinstance(value, dict):
            yield from _leaves(value, f"{name}.")


def _described(code: Any, shape: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype code and shape of an array, or raises `ValueError` if they are invalid."""
    sizes = tuple(shape)
    if not isinstance(code, str) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"invalid array of dtype {code!r:.80} and shape {sizes!r:.80}")
    return _CODES.get(code, code), sizes


class _Walker:
    """Reads the values of a msgpack file one after the other, but skips the bytes of arrays."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view, self.at = view, 0

    def tree(self) -> dict[str, Any]:
        tree = self.value()
        if self.at != len(self.view):
            raise ValueError(f"{len(self.view) - self.at:,} bytes follow the parameter tree")
        if not isinstance(tree, dict):
            raise ValueError("it does not contain a parameter tree")
        return tree

    def value(self) -> Any:
        type_byte = self._take(1)[0]
        if type_byte <= 0x7F or type_byte >= 0xE0:
            return type_byte if type_byte <= 0x7F else type_byte - 256
        if 0x80 <= type_byte <= 0x8F or type_byte in (0xDE, 0xDF):
            count = self._count(type_byte, 0xDE, 0x0F)
            return {self.value(): self.value() for _ in range(count)}
        if 0x90 <= type_byte <= 0x9F or type_byte in (0xDC, 0xDD):
            return [self.value() for _ in range(self._count(type_byte, 0xDC, 0x0F))]
        if 0xA0 <= type_byte <= 0xBF:
            return self._take(type_byte & 0x1F).decode()
        if type_byte in (0xD9, 0xDA, 0xDB):
            return self._take(self._size(type_byte - 0xD9)).decode()
        if type_byte in (0xC4, 0xC5, 0xC6):
            return self._skip(self._size(type_byte - 0xC4))
        if type_byte in (0xC7, 0xC8, 0xC9):
            return self._extension(self._size(type_byte - 0xC7))
        if 0xD4 <= type_byte <= 0xD8:
            return self._extension(1 << (type_byte - 0xD4))
        if type_byte in _NUMBERS:
            (number,) = struct.unpack(
                _NUMBERS[type_byte], self._take(struct.calcsize(_NUMBERS[type_byte]))
            )
            return number
        if type_byte in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[type_byte]
        raise ValueError(f"byte {self.at - 1:,} (0x{type_byte:02x}) is not valid msgpack")

    def _extension(self, size: int) -> Any:
        extension_type, end = self._take(1)[0], self.at + size
        if end > len(self.view):
            raise ValueError("it is truncated")
        if extension_type != ARRAY_EXTENSION:
            return self._skip(size)
        shape, code, (begin, stop) = self.value()
        if stop != end:
            raise ValueError(f"the array at byte {begin:,} has a wrong length")
        return TensorEntry("", *_described(code, shape), begin, stop)

    def _skip(self, size: int) -> tuple[int, int]:
        begin = self.at
        self.at += size
        if self.at > len(self.view):
            raise ValueError("it is truncated")
        return begin, self.at

    def _take(self, size: int) -> bytes:
        begin, end = self._skip(size)
        return self.view[begin:end]

    def _count(self, type_byte: int, wide: int, mask: int) -> int:
        return (
            self._size(type_byte - wide + 1) if type_byte in (wide, wide + 1) else type_byte & mask
        )

    def _size(self, power: int) -> int:
        """Reads a big-endian count of 1, 2 or 4 bytes."""
        return int.from_bytes(self._take(1 << power), "big")


# -- the weights of a checkpoint


@dataclasses.dataclass
class WeightFiles:
    """The weight files of a checkpoint.

    Attributes:
        folder: The directory, or `None` if only headers from the Hub are available.
        headers: Headers of the files that loading the checkpoint reads.
        unread_files: Names of weight files that loading does not read.
        problems: Messages about inconsistencies.
    """

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
        """Whether the names are Flax paths instead of PyTorch names."""
        return any(header.native for header in self.headers)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name, as `WeightMap` expects them. Values are read on demand."""

        def tensor(header: Header, entry: TensorEntry) -> Tensor:
            def read(index: Index) -> np.ndarray:
                return read_tensor(self.folder, header, entry)[index]

            return Tensor(entry.shape, NUMPY_DTYPES.get(entry.dtype_code, entry.dtype_code), read)

        return {name: tensor(*location) for name, location in self.entries.items()}


class WeightsNotDownloaded(CheckpointError):
    """The values are not available because only the headers were downloaded."""


def read_tensor(folder: Path | None, header: Header, entry: TensorEntry) -> np.ndarray:
    """Returns the values of a tensor as a memory map.

    Args:
        folder: The directory of the file.
        header: The header of the file.
        entry: The tensor.

    Raises:
        WeightsNotDownloaded: ``folder`` is `None`.
    """
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

    if folder is None:
        raise WeightsNotDownloaded(f"only the header of {header.file} was downloaded")
    if not entry.count:
        return np.empty(entry.shape, np.dtype(NUMPY_DTYPES[entry.dtype_code]))
    if entry.strided is not None:
        return entry.strided.map(folder / header.file)
    dtype = np.dtype(NUMPY_DTYPES[entry.dtype_code])
    flat = np.memmap(folder / header.file, dtype, "r", entry.begin, (entry.count,))
    return flat.reshape(entry.shape)


def read_local_headers(folder: Path, file_name: str | None = None) -> WeightFiles:
    """Reads the headers of the weight files that loading a directory would read.

    Args:
        folder: The directory.
        file_name: A single weight file to read instead.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    selected = file_name or next((name for name in files.WEIGHTS_FILES if name in names), None)
    if selected is None:
        shards = [name for name in names if SHARD_NAME.fullmatch(name)]
        problem = f"no weights: none of the files {', '.join(files.WEIGHTS_FILES)} exists"
        if shards:
            problem = f"{len(shards)} shards, but no index that lists them ({shards[0]} …)"
        return WeightFiles(folder, unread_files=shards, problems=[problem])
    weights = WeightFiles(folder)
    if selected.endswith(".index.json"):
        weight_map = _weight_map(folder / selected, weights)
        for shard in sorted(set(weight_map.values())):
            if re.search(r"[/\\]", shard) or shard in ("", ".", ".."):
                problem = f"lists {shard!r}: shards must be in the directory of the index"
            elif not (folder / shard).is_file():
                count = sum(name == shard for name in weight_map.values())
                problem = f"lists {shard} ({count} tensors), which does not exist"
            else:
                weights.headers.append(read_header(folder / shard))
                continue
            weights.problems.append(f"{selected} {problem}")
        if weight_map:
            metadata = parse_json((folder / selected).read_bytes()).get("metadata")
            weights.problems += check_index(selected, weight_map, metadata, weights.headers)
        listed_files = {header.file for header in weights.headers}
        prefix = f"{selected.partition('.')[0]}-"  # of shards of the same format
        unlisted = [
            name
            for name in names
            if SHARD_NAME.fullmatch(name) and name.startswith(prefix) and name not in listed_files
        ]
        weights.problems += [
            f"{name} is a shard that {selected} does not list" for name in unlisted
        ]
    else:
        weights.headers = [read_header(folder / selected)]
    read_files = {header.file for header in weights.headers}
    weights.unread_files = [
        name
        for name in names
        if name.endswith((".safetensors", ".msgpack", ".bin"))
        and name.startswith(("model", "flax_model", "pytorch_model"))
        and name not in read_files
    ]
    weights.problems += [problem for header in weights.headers for problem in header.problems]
    return weights


def _weight_map(index: Path, weights: WeightFiles) -> dict[str, str]:
    """Returns the map from tensor names to shards.

    If the index is invalid, adds a message to the problems of ``weights`` and returns ``{}``.
    """
    try:
        return {str(name): str(shard) for name, shard in files.read_index(index).items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        weights.problems.append(
            f"{index.name} is not an index of weight shards: {first_line(error)}"
        )
        return {}


def check_index(
    index: str, weight_map: Mapping[str, str], metadata: object, headers: list[Header]
) -> list[str]:
    """Returns messages about inconsistencies between an index and its shards.

    Args:
        index: File name of the index.
        weight_map: Maps the name of each tensor to the file name of its shard, as in the index.
        metadata: The metadata of the index.
        headers: The headers of the shards.
    """
    stored = {
        (entry.name.replace(".", "/") if head.native else entry.name): (head.file, entry)
        for head in headers
        for entry in head.tensors
    }
    shard_files = {header.file for header in headers}
    native = any(header.native for header in headers)
    indexed = {
        (name.replace(".", "/") if native else name): shard for name, shard in weight_map.items()
    }
    missing = [
        n
        for n, shard in indexed.items()
        if shard in shard_files and stored.get(n, ("",))[0] != shard
    ]
    unlisted = [name for name in stored if name not in indexed]
    problems = []
    if missing:
        problems.append(f"{index} lists tensors that are not in their shards: {_listed(missing)}")
    if unlisted:
        problems.append(f"{index} does not list {_listed(unlisted)}, but the shards contain them")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    complete = shard_files == set(weight_map.values()) and not missing
    # Tied tensors in .bin files share their bytes, and the index counts these bytes once.
    places = {(file, entry.begin, entry.end) for file, entry in stored.values()}
    actual = sum(end - begin for _, begin, end in places)
    if complete and isinstance(total, int) and total != actual:
        problems.append(
            f"{index} lists a total size of {total:,} bytes, but the shards contain {actual:,}"
        )
    return problems


def _listed(names: list[str]) -> str:
    suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + suffix


def read_remote_headers(name: str) -> WeightFiles:
    """Downloads the headers of a repository on the Hub, without the weights.

    Raises:
        CheckpointError: The repository cannot be read.
    """
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    from hfseq.checkpoints import hub

    weights = WeightFiles()
    no_safetensors = f"'{name}' has no safetensors file: load or convert it to inspect it"
    repository = hub.Repository(name)
    index = repository(files.SAFETENSORS_INDEX)
    weight_map = {} if index is None else _weight_map(Path(index), weights)
    shards = sorted(set(weight_map.values()))
    if index is None:
        shards = [files.SAFETENSORS]
        if not repository.may_contain(files.SAFETENSORS):
            return WeightFiles(problems=[no_safetensors])
    for shard in shards:
        cached = try_to_load_from_cache(name, shard)
        if isinstance(cached, str | os.PathLike) and os.path.isfile(cached):
            weights.headers.append(read_header(cached))
            continue
        try:
            metadata = HfApi().parse_safetensors_file_metadata(name, shard)
        except errors.EntryNotFoundError:
            weights.problems.append(no_safetensors)
            weights.headers = []
            break
        except Exception as error:
            if not hub.is_hub_error(error):
                raise CheckpointError(f"{name}/{shard}: {first_line(error)}") from error
            raise CheckpointError(
                f"cannot read '{name}' on the Hub: {hub.describe_hub_error(error)}"
            ) from error
        entries: dict[str, Any] = {
            tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
            for tensor, info in metadata.tensors.items()
        }
        ends = [info.data_offsets[1] for info in metadata.tensors.values()]
        header = Header(shard, max(ends, default=0))
        header.add_tensors({"__metadata__": metadata.metadata, **entries}, 0)
        weights.headers.append(header)
    if index is not None:
        weights.problems += check_index(files.SAFETENSORS_INDEX, weight_map, None, weights.headers)
    weights.problems += [problem for header in weights.headers for problem in header.problems]
    return weights


def count_by_dtype(weights: WeightFiles) -> dict[str, dict[str, int]]:
    """Returns the number of tensors, values and bytes for each dtype code."""
    by_type: dict[str, dict[str, int]] = {}
    for _, entry in weights.entries.values():
        row = by_type.setdefault(entry.dtype_code, {"tensors": 0, "numbers": 0, "bytes": 0})
        row["tensors"] += 1
        row["numbers"] += math.prod(entry.shape)
        row["bytes"] += entry.end - entry.begin
    return by_type
