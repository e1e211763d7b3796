"""Which weight files a checkpoint has, and whether its index and its shards belong together."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfseq import checkpoint_files as files
from hfseq import json_text
from hfseq.errors import CheckpointError, first_line
from hfseq.inspection.headers import NUMPY, Entry, Header, fill, read_header
from hfseq.weights import Tensor

#: A shard by its number and the number of all.
SHARD = re.compile(r"(?:model|flax_model)-(\d{5})-of-(\d{5})\.(?:safetensors|msgpack)")
LISTED = 4


@dataclasses.dataclass
class Weights:
    """The weights that loading reads, those that it does not, and what is wrong."""

    headers: list[Header]
    others: list[str]
    problems: list[str]
    folder: Path | None

    @property
    def entries(self) -> dict[str, tuple[Header, Entry]]:
        """All tensors by name."""
        return {entry.name: (head, entry) for head in self.headers for entry in head.tensors}

    @property
    def native(self) -> bool:
        """Whether the names are Flax paths."""
        return any(header.native for header in self.headers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as the weight map takes them; they are read when asked for."""
        return {name: self._tensor(*found) for name, found in self.entries.items()}

    def _tensor(self, header: Header, entry: Entry) -> Tensor:
        kind = NUMPY.get(entry.code, entry.code)

        def read(index: Any) -> np.ndarray:
            return values(self.folder, header, entry)[index]

        return Tensor(entry.shape, kind, read)


class NotHere(CheckpointError):
    """Values of a checkpoint of which only the headers were fetched."""


def values(folder: Path | None, header: Header, entry: Entry) -> np.ndarray:
    """Return the values of a tensor, mapped into memory."""
    import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)

    if folder is None:
        raise NotHere(f"only the header of {header.file} was fetched")
    if not entry.count:
        return np.empty(entry.shape, np.dtype(NUMPY[entry.code]))
    kind = np.dtype(NUMPY[entry.code])
    flat = np.memmap(folder / header.file, kind, "r", entry.begin, (entry.count,))
    return flat.reshape(entry.shape)


def local_weights(folder: Path, only: str | None = None) -> Weights:
    """Read the headers of what loading ``folder`` would read (or of the one file ``only``)."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    index = [
        name for name in names if name.endswith((".safetensors.index.json", ".msgpack.index.json"))
    ]
    chosen = only or next((name for name in files.FLAX_FILES if name in names), None)
    if chosen is None or ".bin" in chosen:
        return _nothing(folder, names)
    found = Weights([], [], [], folder)
    if chosen in index:
        _read_shards(folder, chosen, found)
    else:
        found.headers = [read_header(folder / chosen)]
    read = {header.file for header in found.headers}
    found.others = [
        name
        for name in names
        if name.endswith((".safetensors", ".msgpack", ".bin")) and _is_weights(name, read)
    ]
    found.problems += [problem for header in found.headers for problem in header.problems]
    return found


def _is_weights(name: str, read: set[str]) -> bool:
    return name not in read and name.startswith(("model", "flax_model", "pytorch_model"))


def _nothing(folder: Path, names: list[str]) -> Weights:
    bins = [name for name in names if name in files.TORCH_FILES or name.endswith(".bin")]
    shards = [name for name in names if SHARD.fullmatch(name)]
    problem = f"no weights: none of {', '.join(files.FLAX_FILES)}"
    if shards:
        problem = f"{len(shards)} shards, but no index that names them ({shards[0]} …)"
    elif set(bins) & set(files.TORCH_FILES):
        problem = (
            f"only {', '.join(bins)}, a pickle, which is not read here: `hfseq convert` reads it "
            "with torch's restricted loader and writes safetensors"
        )
    return Weights([], bins + shards, [problem], folder)


def _read_shards(folder: Path, index: str, found: Weights) -> None:
    where = _weight_map(str(folder / index), found)
    for shard in sorted(set(where.values())):
        if re.search(r"[/\\]", shard) or shard in ("", ".", ".."):
            found.problems.append(f"{index} names {shard!r}: shards must lie beside their index")
        elif not (folder / shard).is_file():
            count = sum(name == shard for name in where.values())
            found.problems.append(f"{index} names {shard} ({count} tensors), which is not there")
        else:
            found.headers.append(read_header(folder / shard))
    if where:
        total = json_text.parse((folder / index).read_bytes()).get("metadata")
        found.problems += check_index(index, where, total, found.headers)
    known = {header.file for header in found.headers}
    strays = [p.name for p in folder.iterdir() if SHARD.fullmatch(p.name) and p.name not in known]
    found.problems += [f"{name} is a shard that {index} does not name" for name in sorted(strays)]


def _weight_map(index: str, found: Weights) -> dict[str, str]:
    """Return tensor -> shard of an index; nothing, and a problem, where it is none."""
    try:
        where = dict(json_text.parse(Path(index).read_bytes())["weight_map"])
        return {str(name): str(shard) for name, shard in where.items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        name = os.path.basename(index)
        found.problems.append(f"{name} is no index of weight shards: {first_line(error)}")
        return {}


def check_index(
    index: str, where: Mapping[str, str], metadata: Any, headers: list[Header]
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
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(sorted(names)[:LISTED]) + more


def remote_weights(name: str) -> Weights:
    """Read the headers of a repository on the Hub, without its weights.

    **Raises:** :class:`~hfseq.errors.CheckpointError` where it cannot be read.
    """
    from hfseq import hub

    found = Weights([], [], [], None)
    index = hub.resolve_file(name, files.SAFETENSORS_INDEX)
    where = {} if index is None else _weight_map(index, found)
    shards = sorted(set(where.values())) if index is not None else [files.SAFETENSORS]
    try:
        found.headers = [_remote_header(name, shard) for shard in shards]
    except FileNotFoundError:
        found.problems.append(f"'{name}' has no safetensors: load it, or convert it, to see more")
    if index is not None:
        found.problems += check_index(files.SAFETENSORS_INDEX, where, None, found.headers)
    found.problems += [problem for header in found.headers for problem in header.problems]
    return found


def _remote_header(name: str, file: str) -> Header:
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    from hfseq.hub_retry import explain, is_hub_error

    cached = try_to_load_from_cache(name, file)
    if isinstance(cached, str | os.PathLike) and os.path.isfile(cached):
        return read_header(cached)
    try:
        told = HfApi().parse_safetensors_file_metadata(name, file)
    except errors.EntryNotFoundError as error:
        raise FileNotFoundError(file) from error
    except Exception as error:
        if not is_hub_error(error):
            raise CheckpointError(f"{name}/{file}: {first_line(error)}") from error
        raise CheckpointError(f"cannot read '{name}' on the Hub: {explain(error)}") from error
    parsed = {
        tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for tensor, info in told.tensors.items()
    }
    size = max((info.data_offsets[1] for info in told.tensors.values()), default=0)
    header = Header(file, size)
    fill(header, {"__metadata__": told.metadata, **parsed}, 0)
    return header


def totals(weights: Weights) -> dict[str, dict[str, int]]:
    """Return tensors, numbers and bytes by type."""
    found: dict[str, dict[str, int]] = {}
    for _, entry in weights.entries.values():
        row = found.setdefault(entry.code, {"tensors": 0, "numbers": 0, "bytes": 0})
        row["tensors"] += 1
        row["numbers"] += math.prod(entry.shape)
        row["bytes"] += entry.end - entry.begin
    return found


__all__ = ["Weights", "local_weights", "remote_weights", "totals"]
