"""Finds and reads weight files, and writes them atomically.

Tensors are read on demand, as a whole or in slices. The supported formats are
``model.safetensors`` with PyTorch or Flax names, the legacy ``flax_model.msgpack``, and
``pytorch_model.bin``, each as one file or as shards. hfseq reads ``.bin`` files without running the
pickles in them (`hfseq.checkpoints.torch_files`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np

from hfseq.checkpoints.torch_files import open_torch_file
from hfseq.checkpoints.weights import Index, Tensor, read_aligned
from hfseq.errors import CheckpointError, UsageError, parse_json
from hfseq.plugins.import_hooks import prepare_jax

if TYPE_CHECKING:
    import numpy.typing as npt
    from huggingface_hub import StateDictSplit
    from safetensors import safe_open as SafetensorsFile

logger = logging.getLogger("hfseq.checkpoints.files")

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
MSGPACK, MSGPACK_INDEX = "flax_model.msgpack", "flax_model.msgpack.index.json"
TORCH_BIN, TORCH_BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SAFETENSORS_FILES = (SAFETENSORS, SAFETENSORS_INDEX)
MSGPACK_FILES = (MSGPACK, MSGPACK_INDEX)
TORCH_FILES = (TORCH_BIN, TORCH_BIN_INDEX)
#: Names of the weight files in the order of preference.
WEIGHTS_FILES = (*SAFETENSORS_FILES, *MSGPACK_FILES, *TORCH_FILES)
_WEIGHTS = re.compile(
    r"(model|flax_model)(-\d{5}-of-\d{5})?\.(safetensors|msgpack)(\.index\.json)?"
    r"|fp8_params\.safetensors|adapter_model\.safetensors"
)
_STAGE = ".hfseq-save-"
#: NumPy's name of each dtype code of safetensors. ml_dtypes defines bfloat16 and the 8-bit floats.
DTYPE_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}


@dataclasses.dataclass
class OpenedWeights:
    """The tensors of an opened checkpoint.

    Attributes:
        tensors: The tensors by name.
        native: Whether the names are Flax paths instead of PyTorch names.
        source: Path of the weight file or index.
    """

    tensors: dict[str, Tensor]
    native: bool
    source: str


Fetch = Callable[[str], str | None]


def open_weights(
    fetch: Fetch, source: str, *, from_pt: bool = False, from_flax: bool = False
) -> OpenedWeights:
    """Opens the weights of a checkpoint: the first file in `WEIGHTS_FILES` that exists.

    Args:
        fetch: Maps a file name to a local path, or to `None` if the file does not exist.
        source: Directory or Hub name, for messages.
        from_pt: Whether to prefer ``pytorch_model.bin`` to ``flax_model.msgpack``.
        from_flax: Whether to read ``flax_model.msgpack`` and no other file.

    Raises:
        UsageError: Both ``from_pt`` and ``from_flax`` are set.
        CheckpointError: No weight file exists, or it cannot be read.
    """
    if from_pt and from_flax:
        raise UsageError("from_pt=True and from_flax=True are mutually exclusive: pass only one")
    names: tuple[str, ...] = WEIGHTS_FILES
    if from_pt:
        names = (*SAFETENSORS_FILES, *TORCH_FILES, *MSGPACK_FILES)
    elif from_flax:
        names = MSGPACK_FILES
    path = next(filter(None, map(fetch, names)), None)
    if path is not None:
        if os.path.isdir(source):
            _warn_if_older(path, tuple(filter(None, map(fetch, WEIGHTS_FILES))))
        return open_file(path, fetch=fetch)
    if from_flax and any(fetch(name) for name in WEIGHTS_FILES):
        raise CheckpointError(
            f"{source} has no {MSGPACK}, which from_flax=True reads: omit from_flax to load the "
            "weights in another format"
        )
    raise CheckpointError(
        f"Error no file named {', '.join(names)} found in {source}: "
        + (_other_weights(source) or "use a directory or a repository with a saved model")
    )


#: Extensions of weight files that hfseq does not read, and advice for the user.
_OTHER_FORMATS = {
    **dict.fromkeys((".h5", ".ckpt", ".index"), "convert it with Transformers 4, from_tf=True"),
    **dict.fromkeys((".gguf", ".ggml"), "load it with Transformers, gguf_file=..., and save it"),
    **dict.fromkeys((".onnx", ".pt", ".pth", ".bin"), "export the model with save_pretrained"),
}


def _other_weights(source: str) -> str:
    """Returns a message about weight files with other names or formats in a directory."""
    for path in sorted(Path(source).iterdir()) if os.path.isdir(source) else ():
        if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
            return (
                f"it contains {path.name}; pass this file, with config={source!r}, to load it "
                "(the option variant= of Transformers gives files such names)"
            )
        if path.suffix in _OTHER_FORMATS:
            return f"it contains {path.name}, which is not read: {_OTHER_FORMATS[path.suffix]}"
    return ""


def _warn_if_older(path: str, paths: tuple[str, ...]) -> None:
    """Logs a warning if another weight file is newer than the one to read."""
    newest = max(paths, key=lambda other: os.lstat(other).st_mtime)
    # Files in the Hub cache are links. Their times are download times, so they are not compared.
    if not os.path.islink(path) and os.lstat(path).st_mtime < os.lstat(newest).st_mtime:
        _warn_about_newer(path, os.path.basename(newest))


@functools.cache  # one warning per file, even if a program opens it several times
def _warn_about_newer(path: str, newest: str) -> None:
    logger.warning(
        "reading %s, although %s is newer: delete the file that you do not need, or pass the path "
        "of the file to read",
        path,
        newest,
    )


def open_file(path: str, *, fetch: Fetch | None = None) -> OpenedWeights:
    """Opens one weight file, or all shards of an index file.

    Args:
        path: Path of the file.
        fetch: Maps the name of a shard to its path. Default: shards are in the directory of the
            index.

    Raises:
        CheckpointError: The file or a shard cannot be read.
    """
    name = os.path.basename(path)
    if name.endswith(".index.json"):
        return _open_shards(path, fetch or (lambda shard: os.path.join(path[: -len(name)], shard)))
    if name.endswith(".msgpack"):
        prepare_jax()
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
            raise CheckpointError(f"{path} does not contain a parameter tree")
        return OpenedWeights(tensors, True, path)
    if name.endswith((".bin", ".pt", ".pth")):
        return OpenedWeights(open_torch_file(path), False, path)
    return _read_safetensors(path)


def _open_shards(index: str, fetch: Fetch) -> OpenedWeights:
    try:
        weight_map = read_index(index, unique=True)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight shards ({type(error).__name__}: {error})"
        ) from error
    for shard in weight_map.values():
        if not isinstance(shard, str) or re.search(r"[/\\]|\.index\.json$|^\.*$", shard):
            raise CheckpointError(
                f"{index} lists the shard {shard!r}: shards must be in the directory of the index"
            )
    if not weight_map:
        raise CheckpointError(f"{index} lists no shards")
    parts: dict[str, OpenedWeights] = {}
    for shard in sorted(set(weight_map.values())):
        path = fetch(shard)
        if path is None or not os.path.exists(path):
            raise CheckpointError(
                f"{index} lists {shard}, which does not exist: download or save it again"
            )
        parts[shard] = open_file(path)
    missing = [
        name
        for name, shard in weight_map.items()
        if name.replace("/", ".") not in parts[shard].tensors
    ]
    if missing:
        raise CheckpointError(
            f"{index} lists {missing[0]} in {weight_map[missing[0]]}, which does not contain it "
            f"({len(missing)} missing tensors). The shards may be from different saves: download "
            "or save them again"
        )
    tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
    return OpenedWeights(tensors, next(iter(parts.values())).native, index)


def read_index(index: str | os.PathLike[str], unique: bool = False) -> dict[str, str]:
    """Reads the map from tensor names to shards of an index file, without validation.

    Args:
        index: Path of the index file.
        unique: Whether to raise an error if a tensor name occurs twice. Some libraries would use
            the first entry and others the last.

    Raises:
        OSError, ValueError, LookupError or TypeError: The file is not a valid index.
    """
    return dict(parse_json(Path(index).read_bytes(), unique_keys=unique)["weight_map"])


# -- reading


def _read_safetensors(path: str) -> OpenedWeights:
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors then returns)
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="numpy")
        format_name = (file.metadata() or {}).get("format", "pt")
        with open(path, "rb") as content:
            size = int.from_bytes(content.read(8), "little")
            # Duplicate names are an error, because libraries differ in which of them they use.
            entries = parse_json(content.read(size), unique_keys=True)
        data_start = 8 + size
        tensors = {
            name: _lazy(file, name, path, data_start + entries[name]["data_offsets"][0])
            for name in file.keys()  # noqa: SIM118
        }
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({error}): download or save it again"
        ) from error
    if format_name not in ("pt", "flax", "np", "tf", "mlx"):
        raise CheckpointError(
            f"{path} has the unknown metadata format '{format_name}' (supported: pt, flax)"
        )
    return OpenedWeights(tensors, format_name == "flax", path)


def _lazy(file: SafetensorsFile, name: str, path: str, begin: int) -> Tensor:
    view = file.get_slice(name)
    code, shape = view.get_dtype(), tuple(view.get_shape())

    def read(index: Index) -> np.ndarray:
        if code not in DTYPE_NAMES:
            whole = isinstance(index, EllipsisType) or not index
            return file.get_tensor(name) if whole else np.asarray(view[index])
        dtype = np.dtype(DTYPE_NAMES[code])
        if isinstance(index, EllipsisType) or not index:
            return read_aligned(path, begin, shape, dtype)
        if not code.startswith("F8"):
            return np.asarray(view[index])
        # safetensors cannot return 8-bit floats as NumPy arrays.
        start, stop, _ = index[0].indices(shape[0])
        row_size = math.prod(shape[1:]) * dtype.itemsize
        num_rows = max(0, stop - start)
        rows = read_aligned(path, begin + start * row_size, (num_rows, *shape[1:]), dtype)
        return rows[(slice(None), *index[1:])]

    # Unsupported dtypes are not an error here: the tensor may be a buffer that the model ignores.
    return Tensor(shape, DTYPE_NAMES.get(code, code), read)


def tensor_from_array(values: npt.ArrayLike) -> Tensor:
    """Returns a `Tensor` for an array in memory."""
    array = np.asarray(values)
    return Tensor(array.shape, array.dtype.name, lambda index: array[index])


# -- writing


def parse_size(size: int | str) -> int:
    """Converts a size such as 1000, ``"10GB"``, ``"200kB"`` or ``"150kiB"`` to bytes.

    Raises:
        ValueError: The size is not valid.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]\s*", size)
    if not match:
        raise ValueError(f"max_shard_size '{size}' is not a size such as '5GB' or '200MiB'")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def split_shards(
    sizes: Mapping[str, int], max_shard_size: int | str, filename_pattern: str
) -> StateDictSplit:
    """Assigns tensors to shards.

    Args:
        sizes: Size of each tensor in bytes, by name.
        max_shard_size: Maximum size of a shard, in bytes or as a string such as ``"5GB"``.
        filename_pattern: File name of the shards, such as ``"model{suffix}.safetensors"``.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=int,
        filename_pattern=filename_pattern,
        max_shard_size=parse_size(max_shard_size),
    )


def write_safetensors(
    folder: Path | None,
    sizes: Mapping[str, int],
    load: Callable[[Iterable[str]], Mapping[str, np.ndarray]],
    max_shard_size: int | str,
    metadata: Mapping[str, str],
) -> None:
    """Writes tensors as ``model.safetensors``, or as shards with an index.

    Args:
        folder: Output directory, or `None` if another process writes the files. The tensors are
            then only loaded, in the same order.
        sizes: Size of each tensor in bytes, by name.
        load: Function that accepts tensor names, and returns the loaded tensors in the same order.
            It is called for one shard at a time, so that only one shard is in memory.
        max_shard_size: Maximum size of a shard, in bytes or as a string such as ``"5GB"``.
        metadata: Metadata of the files.
    """
    from safetensors.numpy import save_file

    shards = split_shards(sizes, max_shard_size, "model{suffix}.safetensors")
    for name, keys in shards.filename_to_tensors.items():
        if folder is None:
            for key in keys:
                load([key])
        else:
            save_file(dict(load(keys)), folder / name, metadata=dict(metadata))
    if shards.is_sharded and folder is not None:
        _write_index(folder / SAFETENSORS_INDEX, shards)


def write_msgpack(
    folder: Path, flat: Mapping[tuple[str, ...], np.ndarray], max_shard_size: int | str
) -> None:
    """Writes the legacy ``flax_model.msgpack``, or shards with an index as in Transformers 4.

    Args:
        folder: Output directory.
        flat: The parameters by path.
        max_shard_size: Maximum size of a shard, in bytes or as a string such as ``"5GB"``.
    """
    prepare_jax()
    from flax.serialization import msgpack_serialize
    from flax.traverse_util import unflatten_dict

    sizes = {"/".join(path): leaf.nbytes for path, leaf in flat.items()}
    shards = split_shards(sizes, max_shard_size, "flax_model{suffix}.msgpack")
    for name, keys in shards.filename_to_tensors.items():
        part = {tuple(key.split("/")): flat[tuple(key.split("/"))] for key in keys}
        (folder / name).write_bytes(msgpack_serialize(unflatten_dict(part)))
    if shards.is_sharded:
        _write_index(folder / MSGPACK_INDEX, shards)


def _write_index(path: Path, shards: StateDictSplit) -> None:
    index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def is_full(error: BaseException) -> bool:
    """Returns whether an error was raised because a disk or a quota is full.

    Errors of safetensors have no error code, so their text is searched instead.
    """
    codes = {errno.ENOSPC, errno.EDQUOT}
    return getattr(error, "errno", None) in codes or "No space left" in str(error)


@contextlib.contextmanager
def staging_directory(folder: Path) -> Iterator[Path]:
    """Yields a hidden directory in ``folder`` whose files are moved to ``folder`` on success.

    If the disk is full, or the process is interrupted or killed, the previous files are unchanged.
    Weights of an earlier save in another format or number of shards are removed at the end, because
    a reader might prefer them.

    Raises:
        CheckpointError: Writing failed.
    """
    stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=folder))
    os.umask(umask := os.umask(0))
    try:
        yield stage
        staged = [path.relative_to(stage) for path in stage.rglob("*")]
        for directory in (path for path in staged if (stage / path).is_dir()):
            (folder / directory).mkdir(parents=True, exist_ok=True)
        names = sorted(path.as_posix() for path in staged if (stage / path).is_file())
        for name in names:
            with open(stage / name, "rb+") as file:
                os.fsync(file.fileno())
            # safetensors ignores the umask and creates files that only the owner may read.
            os.chmod(stage / name, 0o666 & ~umask)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise CheckpointError(
                f"could not save to {folder} ({error}). The previous files are unchanged: "
                f"{'free disk space' if is_full(error) else 'check its permissions'} or use "
                "another directory"
            ) from error
        raise
    # The index makes the new shards visible, so it is moved last.
    for name in sorted(names, key=lambda name: name.endswith(".index.json")):
        os.replace(stage / name, folder / name)
    if any(_WEIGHTS.fullmatch(name) for name in names):
        for path in folder.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
    for leftover in folder.glob(f"{_STAGE}*"):  # of this save and of killed saves
        shutil.rmtree(leftover, ignore_errors=True)
