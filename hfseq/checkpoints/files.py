"""Weight files on disk: finding them, reading them by slices, writing them atomically.

Formats: ``model.safetensors`` and its shards (PyTorch or Flax names), the legacy
``flax_model.msgpack`` and its shards, and ``pytorch_model.bin`` where torch is installed (never
unpickled without its restricted loader).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hfseq.checkpoints.weights import Index, Tensor
from hfseq.errors import CheckpointError, parse_json

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from safetensors import safe_open as SafetensorsFile

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
MSGPACK, MSGPACK_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
TORCH_BIN, TORCH_BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# v4's order: what a Flax user saved wins over what a PyTorch user saved.
FLAX_FILES = (MSGPACK, MSGPACK_INDEX, SAFETENSORS, SAFETENSORS_INDEX)
TORCH_FILES = (TORCH_BIN, TORCH_BIN_INDEX)
_WEIGHTS = re.compile(
    r"(model|flax_model)(-\d{5}-of-\d{5})?\.(safetensors|msgpack)(\.index\.json)?"
    r"|fp8_params\.safetensors|adapter_model\.safetensors"
)
_STAGE = ".hfseq-save-"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass
class OpenedWeights:
    """The tensors of a checkpoint by name; ``native`` if the names are Flax paths already."""

    tensors: dict[str, Tensor]
    native: bool
    source: str


Fetch = Callable[[str], str | None]


def open_weights(fetch: Fetch, source: str, *, from_pt: bool = False) -> OpenedWeights:
    """Open the weights that ``fetch`` offers (it maps a file name to a local path or None)."""
    for name in (*FLAX_FILES, *(TORCH_FILES if from_pt else ())):
        path = fetch(name)
        if path is not None:
            return open_file(path, fetch=fetch)
    if not from_pt and any(fetch(name) for name in TORCH_FILES):
        raise CheckpointError(
            f"{source} holds only PyTorch .bin weights. Use `from_pt=True` to load this model from "
            "those weights (needs torch), or save them as safetensors"
        )
    raise CheckpointError(
        f"Error no file named {', '.join(FLAX_FILES)} found in {source}: give a directory or a "
        "repository with a saved model"
    )


def open_file(path: str, *, fetch: Fetch | None = None) -> OpenedWeights:
    """Open one weight file, or all shards that an index file names."""
    name = os.path.basename(path)
    if name.endswith(".index.json"):
        return _open_shards(path, fetch or (lambda shard: os.path.join(path[: -len(name)], shard)))
    if name.endswith(".msgpack"):
        from flax.serialization import msgpack_restore
        from flax.traverse_util import flatten_dict

        try:
            tree = msgpack_restore(Path(path).read_bytes())
            flat = flatten_dict(tree) if isinstance(tree, dict) else {}
            tensors = {
                ".".join(map(str, key)): tensor_from_array(leaf) for key, leaf in flat.items()
            }
        except Exception as error:  # msgpack raises a dozen types for a damaged file
            raise CheckpointError(
                f"{path} is damaged or not a Flax msgpack file: {error}"
            ) from error
        if not isinstance(tree, dict):
            raise CheckpointError(f"{path} holds no parameter tree")
        return OpenedWeights(tensors, True, path)
    if name.endswith((".bin", ".pt", ".pth")):
        try:
            import torch
        except ImportError as error:
            raise CheckpointError(
                f"{path} needs PyTorch to be read: pip install 'hfseq[torch]'"
            ) from error
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            tensors = {
                key: tensor_from_array(torch_to_numpy(value)) for key, value in state.items()
            }
        except Exception as error:  # unpickling raises anything
            raise CheckpointError(
                f"{path} is damaged or not a plain PyTorch state dict: {error}"
            ) from error
        return OpenedWeights(tensors, False, path)
    return _read_safetensors(path)


def _open_shards(index: str, fetch: Fetch) -> OpenedWeights:
    try:
        where = read_index(index, unique=True)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight shards ({type(error).__name__}: {error})"
        ) from error
    for shard in where.values():
        if not isinstance(shard, str) or re.search(r"[/\\]|\.index\.json$|^\.*$", shard):
            raise CheckpointError(
                f"{index} names the shard {shard!r}: shards must lie beside their index"
            )
    if not where:
        raise CheckpointError(f"{index} names no shards")
    parts: dict[str, OpenedWeights] = {}
    for shard in sorted(set(where.values())):
        path = fetch(shard)
        if path is None or not os.path.exists(path):
            raise CheckpointError(
                f"{index} names {shard}, which is not there: download or save it again"
            )
        parts[shard] = open_file(path)
    absent = [
        name for name, shard in where.items() if name.replace("/", ".") not in parts[shard].tensors
    ]
    if absent:
        raise CheckpointError(
            f"{index} says that {where[absent[0]]} holds {absent[0]}, which it does not "
            f"({len(absent)} such tensors): the shards are of another save, download or save them "
            "again"
        )
    tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
    return OpenedWeights(tensors, next(iter(parts.values())).native, index)


def read_index(index: str | os.PathLike[str], unique: bool = False) -> dict[str, str]:
    """Return tensor name -> shard of an index file, just as it stands there.

    Of equal names Python takes the last shard, other readers the first: ``unique`` refuses them.

    **Raises:** OSError, ValueError, LookupError or TypeError for a file that is no index.
    """
    return dict(parse_json(Path(index).read_bytes(), unique_keys=unique)["weight_map"])


# -- reading


def _read_safetensors(path: str) -> OpenedWeights:
    import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16, which safetensors then returns)
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
        form = (file.metadata() or {}).get("format", "pt")
        with open(path, "rb") as content:
            size = int.from_bytes(content.read(8), "little")
            # A name that stands twice is refused, since each reader would take another tensor.
            entries = parse_json(content.read(size), unique_keys=True)
        data = 8 + size
        tensors = {
            name: _lazy(file, name, path, data + entries[name]["data_offsets"][0])
            for name in file.keys()  # noqa: SIM118
        }
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({error}): download or save it again"
        ) from error
    if form not in ("pt", "flax", "np", "tf", "mlx"):
        raise CheckpointError(f"{path} has the unknown metadata format '{form}' (known: pt, flax)")
    return OpenedWeights(tensors, form == "flax", path)


def _lazy(opened: SafetensorsFile, name: str, path: str, begin: int) -> Tensor:
    view = opened.get_slice(name)
    code, shape = view.get_dtype(), tuple(view.get_shape())

    def read(index: Index) -> np.ndarray:
        if index is not ... and index:
            return np.asarray(view[index])
        if code not in _DTYPES:
            return opened.get_tensor(name)
        # Into memory that XLA can take over: it wants addresses that 64 divides. Not through the
        # map of the file, whose pages would count as memory beside the array.
        dtype = np.dtype(_DTYPES[code])
        size = math.prod(shape) * dtype.itemsize
        room = np.empty(size + 64, np.uint8)
        start = -room.ctypes.data % 64
        content = room[start : start + size]
        with open(path, "rb") as file:
            file.seek(begin)
            if file.readinto(content) < size:  # type: ignore[arg-type]
                raise CheckpointError(
                    f"{path} was cut while it was read: download or save it again"
                )
        return content.view(dtype).reshape(shape)

    # Buffers of other types are ignored by name, so a type is judged only where it is wanted.
    return Tensor(shape, _DTYPES.get(code, code), read)


def torch_to_numpy(value: torch.Tensor) -> np.ndarray:
    """Return a PyTorch tensor as NumPy, bfloat16 included."""
    import ml_dtypes
    import torch

    tensor = value.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(dtype=torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensor_from_array(values: npt.ArrayLike) -> Tensor:
    """Wrap an array that is already in memory."""
    array = np.asarray(values)
    return Tensor(array.shape, array.dtype.name, lambda index: array[index])


# -- writing


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
) -> None:
    """Write tensors as ``model.safetensors`` or as shards with an index.

    ``load`` returns the tensors of one shard by name, so that one shard at a time is in memory.
    """
    from safetensors.numpy import save_file

    shards = split_shards(sizes, parse_size(max_shard_size))
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, keys in zip(names, shards, strict=True):
        save_file(dict(load(keys)), folder / name, metadata=dict(metadata))
    if len(shards) > 1:
        where = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        _write_index(folder / SAFETENSORS_INDEX, where, sizes)


def write_msgpack(
    folder: Path, flat: Mapping[tuple[str, ...], np.ndarray], max_shard_size: int | str
) -> None:
    """Write the legacy ``flax_model.msgpack``, or v4's shards of it with their index."""
    from flax.serialization import msgpack_serialize
    from flax.traverse_util import unflatten_dict

    sizes = {"/".join(path): leaf.nbytes for path, leaf in flat.items()}
    shards = split_shards(sizes, parse_size(max_shard_size))
    many = len(shards) > 1
    where: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        name = f"flax_model-{number:05}-of-{len(shards):05}.msgpack" if many else MSGPACK
        part = {tuple(key.split("/")): flat[tuple(key.split("/"))] for key in keys}
        (folder / name).write_bytes(msgpack_serialize(unflatten_dict(part)))
        where |= dict.fromkeys(keys, name)
    if many:
        _write_index(folder / MSGPACK_INDEX, where, sizes)


def _write_index(path: Path, where: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def staging_directory(folder: Path) -> Iterator[Path]:
    """Give a hidden directory in ``folder``; on success its files move up, else they go.

    A full disk, a Ctrl-C or a kill during writing leaves the previous files as they were. Weights
    of an earlier save in another format or number of shards are removed at the end: a reader might
    prefer them.
    """
    stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=folder))
    os.umask(umask := os.umask(0))
    try:
        yield stage
        names = sorted(path.name for path in stage.iterdir())
        for name in names:
            with open(stage / name, "rb+") as file:
                os.fsync(file.fileno())
            # safetensors makes files that nobody else may read, whatever the umask says.
            os.chmod(stage / name, 0o666 & ~umask)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(
                f"could not save to {folder} ({error}); the files that were there are untouched: "
                "free some space or give another directory"
            ) from error
        raise
    # The index is what makes new shards visible, so it comes after them.
    for name in sorted(names, key=lambda name: name.endswith(".index.json")):
        os.replace(stage / name, folder / name)
    if any(_WEIGHTS.fullmatch(name) for name in names):
        for path in folder.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
    for left in folder.glob(f"{_STAGE}*"):  # this save's, and those of saves that were killed
        shutil.rmtree(left, ignore_errors=True)
