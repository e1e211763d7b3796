"""Weight files on disk: which ones a directory holds, reading them by slices, writing them atomically.

Formats: ``model.safetensors`` and its shards (PyTorch or Flax names), the legacy ``flax_model.msgpack``
and its shards, and ``pytorch_model.bin`` where torch is installed (never unpickled without its restricted
loader).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hfseq.errors import CheckpointError
from hfseq.weights import Tensor

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
MSGPACK = "flax_model.msgpack"
MSGPACK_INDEX = "flax_model.msgpack.index.json"
TORCH_BIN = "pytorch_model.bin"
TORCH_BIN_INDEX = "pytorch_model.bin.index.json"

# v4's order: what a Flax user saved wins over what a PyTorch user saved.
FLAX_FILES = (MSGPACK, MSGPACK_INDEX, SAFETENSORS, SAFETENSORS_INDEX)
TORCH_FILES = (TORCH_BIN, TORCH_BIN_INDEX)

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass
class OpenedWeights:
    """The tensors of a checkpoint by name; ``native`` if the names are Flax paths already."""

    tensors: dict[str, Tensor]
    native: bool
    source: str


Fetch = Callable[[str], str | None]


def open_weights(fetch: Fetch, source: str, *, from_pt: bool = False) -> OpenedWeights:
    """Find and open the weights that ``fetch`` offers (it maps a file name to a local path or None)."""
    for name in (*FLAX_FILES, *(TORCH_FILES if from_pt else ())):
        path = fetch(name)
        if path is not None:
            return open_file(path, fetch=fetch)
    if not from_pt and any(fetch(name) for name in TORCH_FILES):
        raise CheckpointError(
            f"{source} holds only PyTorch .bin weights. Use `from_pt=True` to load this model from those "
            "weights (needs torch), or save them as safetensors"
        )
    raise CheckpointError(
        f"Error no file named {', '.join(FLAX_FILES)} found in {source}: give a directory or a repository "
        "with a saved model"
    )


def open_file(path: str, *, fetch: Fetch | None = None) -> OpenedWeights:
    """Open one weight file, or all shards that an index file names."""
    name = os.path.basename(path)
    if name.endswith(".index.json"):
        fetch = fetch or _sibling(path)
        parts = [open_file(_shard(fetch, path, shard)) for shard in _shards(path)]
        tensors = {key: tensor for part in parts for key, tensor in part.tensors.items()}
        return OpenedWeights(tensors, parts[0].native, path)
    if name.endswith(".msgpack"):
        return OpenedWeights(_read_msgpack(path), True, path)
    if name.endswith((".bin", ".pt", ".pth")):
        return OpenedWeights(_read_torch(path), False, path)
    return _read_safetensors(path)


def _sibling(path: str) -> Fetch:
    folder = os.path.dirname(path)
    return lambda name: os.path.join(folder, name)


def _shards(index: str) -> list[str]:
    try:
        with open(index, encoding="utf-8") as file:
            shards = sorted(set(json.load(file)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weight shards: {error}") from error
    for shard in shards:
        if not isinstance(shard, str) or os.path.basename(shard) != shard:
            raise CheckpointError(f"{index} names the shard {shard!r}: shards must lie beside their index")
    if not shards:
        raise CheckpointError(f"{index} names no shards")
    return shards


def _shard(fetch: Fetch, index: str, name: str) -> str:
    path = fetch(name)
    if path is None or not os.path.exists(path):
        raise CheckpointError(f"{index} names {name}, which is not there: download or save it again")
    return path


# -- reading ----------------------------------------------------------------------------------------


def _read_safetensors(path: str) -> OpenedWeights:
    import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16, which safetensors then returns)
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
        form = (file.metadata() or {}).get("format", "pt")
        tensors = {name: _lazy(file, name, path) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({error}): download or save it again"
        ) from error
    if form not in ("pt", "flax", "np", "tf", "mlx"):
        raise CheckpointError(f"{path} has the unknown metadata format '{form}' (known: pt, flax)")
    return OpenedWeights(tensors, form == "flax", path)


def _lazy(file: Any, name: str, path: str) -> Tensor:
    view = file.get_slice(name)
    code = view.get_dtype()
    if code not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has type {code}, which hfseq cannot load as a parameter "
            f"(loadable: {', '.join(_DTYPES)})"
        )

    def read(index: Any) -> np.ndarray:
        return file.get_tensor(name) if index is ... or not index else np.asarray(view[index])

    return Tensor(tuple(view.get_shape()), _DTYPES[code], read)


def _read_msgpack(path: str) -> dict[str, Tensor]:
    from flax.serialization import msgpack_restore
    from flax.traverse_util import flatten_dict

    try:
        with open(path, "rb") as file:
            tree = msgpack_restore(file.read())
        flat = flatten_dict(tree) if isinstance(tree, dict) else None
    except Exception as error:  # msgpack raises a dozen types for a damaged file
        raise CheckpointError(f"{path} is damaged or not a Flax msgpack file: {error}") from error
    if flat is None:
        raise CheckpointError(f"{path} holds no parameter tree")
    return {".".join(map(str, key)): in_memory(value) for key, value in flat.items()}


def _read_torch(path: str) -> dict[str, Tensor]:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(f"{path} needs PyTorch to be read: pip install 'hfseq[torch]'") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises anything
        raise CheckpointError(f"{path} is damaged or not a plain PyTorch state dict: {error}") from error
    return {name: in_memory(from_torch_tensor(value)) for name, value in state.items()}


def from_torch_tensor(value: Any) -> np.ndarray:
    """Return a PyTorch tensor as NumPy, bfloat16 included."""
    import ml_dtypes

    if str(value.dtype) == "torch.bfloat16":
        return value.detach().cpu().view(dtype=__import__("torch").int16).numpy().view(ml_dtypes.bfloat16)
    return value.detach().cpu().numpy()


def in_memory(array: Any) -> Tensor:
    """Wrap an array that is already in memory."""
    array = np.asarray(array)
    return Tensor(array.shape, array.dtype.name, lambda index: array[index])


# -- writing ----------------------------------------------------------------------------------------


def parse_size(size: int | str) -> int:
    """Return bytes for 1000, ``"10GB"``, ``"200kB"``, ``"150kiB"`` …"""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]\s*", size)
    if not match:
        raise ValueError(f"max_shard_size '{size}' is not a size such as '5GB' or '200MiB'")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def split_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cut names into shards of at most ``limit`` bytes in order; a larger tensor stands alone."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_safetensors(
    folder: Path,
    sizes: Mapping[str, int],
    load: Callable[[Iterable[str]], Mapping[str, np.ndarray]],
    max_shard_size: int | str,
    metadata: Mapping[str, str],
) -> list[Path]:
    """Write tensors as ``model.safetensors`` or as shards with an index; nothing old goes before all is there.

    ``load`` returns the tensors of one shard by name, so that one shard at a time is in memory.
    """
    from safetensors.numpy import save_file

    shards = split_shards(sizes, parse_size(max_shard_size))
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    folder.mkdir(parents=True, exist_ok=True)
    with staged(folder) as stage:
        for name, keys in zip(names, shards, strict=True):
            save_file(dict(load(keys)), stage(name), metadata=dict(metadata))
        if len(shards) > 1:
            where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
            Path(stage(SAFETENSORS_INDEX)).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            names.append(SAFETENSORS_INDEX)
    _remove_others(folder, keep=set(names))
    return [folder / name for name in names]


def write_msgpack(folder: Path, tree: Mapping[str, Any]) -> Path:
    """Write the legacy ``flax_model.msgpack``."""
    from flax.serialization import msgpack_serialize

    folder.mkdir(parents=True, exist_ok=True)
    with staged(folder) as stage:
        Path(stage(MSGPACK)).write_bytes(msgpack_serialize(tree))
    _remove_others(folder, keep={MSGPACK})
    return folder / MSGPACK


@contextlib.contextmanager
def staged(folder: Path) -> Any:
    """Give temporary names in ``folder``; on success rename all, on failure remove all.

    A full disk, a Ctrl-C or a kill during writing leaves the previous files as they were.
    """
    pending: dict[str, Path] = {}

    def stage(name: str) -> str:
        pending[name] = folder / f".{name}.{os.getpid()}.tmp"
        return str(pending[name])

    try:
        yield stage
        for path in pending.values():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    except BaseException as error:
        for path in pending.values():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(
                f"could not write {', '.join(pending)} to {folder} ({error}); the files that were there "
                "are untouched: free some space or give another directory"
            ) from error
        raise
    for name, path in pending.items():
        os.replace(path, folder / name)


def _remove_others(folder: Path, keep: set[str]) -> None:
    """Remove weights of an earlier save in another format or shard count: a reader would prefer them."""
    pattern = re.compile(
        r"(model|flax_model)(-\d{5}-of-\d{5})?\.(safetensors|msgpack)(\.index\.json)?$"
    )
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path.name not in keep:
            path.unlink()
