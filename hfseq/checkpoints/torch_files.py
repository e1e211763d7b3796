"""Reads PyTorch's ``.bin`` files without PyTorch, and without running the pickles in them.

``torch.save`` writes a zip archive. Its ``data.pkl`` is a pickle that describes the tensors, and
``data/0``, ``data/1``, ... contain their values. PyTorch before 1.6 wrote a plain file that
contains the same pickle, followed by the values.

A pickle is a program for a stack machine, and may call any function. This module therefore
interprets only the opcodes that a state dict needs. It never imports the functions and classes that
a pickle refers to: it has replacements for those that a state dict needs, and rejects all others.

Sources: ``_save``, ``_legacy_save`` and ``_legacy_load`` in torch/serialization.py,
torch/_weights_only_unpickler.py, and https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hfseq.checkpoints.weights import Index, Tensor, read_aligned
from hfseq.errors import CheckpointError

# Values at the beginning of files that PyTorch before 1.6 wrote.
_MAGIC_NUMBER, _PROTOCOL_VERSION = 0x1950A86A20F9469CFC6C, 1001
_MAX_DIMENSIONS = 32

#: Opcodes that push their argument, and opcodes that push a constant.
_LITERALS = frozenset(
    "BINUNICODE SHORT_BINSTRING BINSTRING BININT BININT1 BININT2 LONG1 BINFLOAT".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _StorageType(NamedTuple):
    """Replaces a class such as ``torch.FloatStorage``, of which only the dtype is needed."""

    dtype: str


class _Storage(NamedTuple):
    """A PyTorch storage: a sequence of values in the file that tensors refer to.

    Attributes:
        key: Name of the storage.
        dtype: The dtype of the values.
        num_values: The number of values.
        offset: Index of the first value in the file's data for this storage. It can only differ
            from 0 in files of PyTorch before 1.6, which may contain views of storages.
    """

    key: str
    dtype: str
    num_values: int
    offset: int


@dataclasses.dataclass(frozen=True)
class _StoredTensor:
    """A tensor of the state dict: a strided view of a storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns the number of values from the first to the last one of a strided view."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _make_dict(pairs: list[list[Any]] | None = None) -> dict[Any, Any]:
    if any(not isinstance(key, str) for key, _ in pairs or ()):
        raise ValueError("a dictionary has keys that are not strings")
    return {key: value for key, value in pairs or ()}


def _make_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _StoredTensor:
    if not isinstance(storage, _Storage) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a tensor has an invalid description")
    sizes = (offset, *shape, *strides)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("a tensor has an invalid shape")
    count, end = math.prod(shape), offset + _extent(shape, strides)
    # `torch.expand` creates tensors that repeat values. Without this check, such a tensor in a
    # damaged or malicious file could have any size.
    if count > storage.num_values or (count and end > storage.num_values):
        raise ValueError(
            f"a tensor of shape {shape} exceeds its storage of {storage.num_values} values"
        )
    return _StoredTensor(storage, offset, tuple(shape), tuple(strides))


def _make_parameter(tensor: _StoredTensor, *_: Any) -> _StoredTensor:
    return tensor


#: Replacements for the functions and classes that a pickle may refer to, by ``module name``.
_GLOBALS: Mapping[str, _StorageType | Callable[..., Any]] = {
    "collections OrderedDict": _make_dict,
    "torch._utils _rebuild_tensor": _make_tensor,
    "torch._utils _rebuild_tensor_v2": _make_tensor,
    "torch._utils _rebuild_parameter": _make_parameter,
    **{
        f"torch {name}Storage": _StorageType(dtype)
        for name, dtype in {
            "Double": "float64",
            "Float": "float32",
            "Half": "float16",
            "BFloat16": "bfloat16",
            "Long": "int64",
            "Int": "int32",
            "Short": "int16",
            "Char": "int8",
            "Byte": "uint8",
            "Bool": "bool",
        }.items()
    },
}


def _make_storage(identifier: object) -> _Storage:
    if not isinstance(identifier, tuple) or len(identifier) not in (5, 6):
        raise ValueError("a storage has an invalid description")
    tag, storage_type, key, _, count, *view = identifier
    # Files of PyTorch before 1.6 may refer to a part of a storage with the tuple (name of the view,
    # offset, number of values).
    offset = view[0][1] if view and view[0] is not None else 0
    integers = all(type(number) is int and number >= 0 for number in (count, offset))
    known_type = isinstance(storage_type, _StorageType)
    if tag != "storage" or type(key) is not str or not known_type or not integers:
        raise ValueError("a storage has an invalid description")
    return _Storage(key, storage_type.dtype, count, offset)


def _interpret(stream: Any) -> Any:
    """Returns the value that a pickle describes: literals, dicts, lists, tuples and tensors.

    Args:
        stream: A bytes object, or a file at the start of the pickle.

    Raises:
        ValueError: The pickle contains anything else. Damaged pickles also raise other errors.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_to_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def set_items(items: list[Any]) -> None:
        keys, values = items[::2], items[1::2]
        # Reject keys of other types, because hashing them may be expensive.
        if not isinstance(stack[-1], dict) or any(type(key) not in (str, int) for key in keys):
            raise ValueError("a dictionary has keys that are not strings")
        stack[-1].update(zip(keys, values, strict=True))

    argument: Any
    for opcode, argument, position in pickletools.genops(stream):
        name = opcode.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name in _TUPLES:
            start = len(stack) - _TUPLES[name]
            if start < 0:
                raise ValueError("its pickle takes more values from the stack than exist")
            stack[start:] = [tuple(stack[start:])]
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("SETITEM", "SETITEMS"):
            set_items(pop_to_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()])
        elif name in ("APPEND", "APPENDS"):
            items = pop_to_mark() if name == "APPENDS" else [stack.pop()]
            if not isinstance(stack[-1], list):
                raise ValueError(
                    f"its pickle appends to a {type(stack[-1]).__name__} instead of a list"
                )
            stack[-1].extend(items)
        elif name == "GLOBAL":
            if argument not in _GLOBALS:
                raise ValueError(
                    f"it uses '{argument.replace(' ', '.')}', which a state dict of tensors does "
                    "not need"
                )
            stack.append(_GLOBALS[argument])
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            if not callable(function):  # the only functions on the stack are those in _GLOBALS
                raise ValueError("its pickle calls a value that is not a function")
            stack.append(function(*arguments))
        elif name == "BINPERSID":
            stack.append(_make_storage(stack.pop()))
        elif name == "BUILD":  # sets attributes; state dicts store module versions in this way
            stack.pop()
            if not isinstance(stack[-1], dict):
                raise ValueError("its pickle sets attributes of an object that is not a dict")
        elif name not in ("PROTO", "STOP"):
            raise ValueError(
                f"it uses the pickle opcode {name} (at byte {position}), which a state dict of "
                "tensors does not need"
            )
    return stack.pop()


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """The location of a tensor in a file.

    Attributes:
        dtype: The dtype as in NumPy.
        shape: The shape.
        strides: Number of values from one index of an axis to the next, per axis.
        begin: Offset of the first byte.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int

    @property
    def extent(self) -> int:
        """The number of values from the first to the last one, or 0 for an empty tensor."""
        return 0 if 0 in self.shape else _extent(self.shape, self.strides)

    @property
    def contiguous(self) -> bool:
        """Whether the values are stored in order."""
        return all(
            # The strides of axes of length 1 have no meaning.
            size == 1 or stride == math.prod(self.shape[axis + 1 :])
            for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True))
        )

    def map(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Returns the values as a memory map."""
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

        dtype = np.dtype(self.dtype)
        if not self.extent:
            return np.empty(self.shape, dtype)
        flat = np.memmap(path, dtype, "r", self.begin, (self.extent,))
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides)


def open_torch_file(path: str) -> dict[str, Tensor]:
    """Opens a state dict that ``torch.save`` wrote. Values are read on demand.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is damaged, or contains anything but a dictionary of tensors.
    """

    def tensor(location: TorchTensor) -> Tensor:
        def read(index: Index) -> np.ndarray:
            if location.extent and location.contiguous and (index is ... or not index):
                dtype = np.dtype(location.dtype)
                return read_aligned(path, location.begin, location.shape, dtype)
            return np.array(location.map(path)[index])

        return Tensor(location.shape, location.dtype, read)

    return {name: tensor(location) for name, location in locate_tensors(path).items()}


def locate_tensors(path: str) -> dict[str, TorchTensor]:
    """Returns the location of each tensor in a state dict file that ``torch.save`` wrote.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is damaged, or contains anything but a dictionary of tensors.
    """
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

    try:
        if zipfile.is_zipfile(path):
            state, begins = _read_zip(path)
        else:
            state, begins = _read_plain(path)
        return {name: _locate(value, begins) for name, value in state.items()}
    except (
        *(ValueError, LookupError, TypeError, OverflowError, MemoryError, OSError),
        *(struct.error, zipfile.BadZipFile, NotImplementedError, RuntimeError),
    ) as error:
        message = str(error) or type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a plain PyTorch state dict: {message}. hfseq does not run "
            "pickles. If you trust the file, load it with PyTorch and save its tensors with "
            "safetensors.torch.save_file"
        ) from error


def _read_state(stream: Any) -> dict[str, _StoredTensor]:
    state = _interpret(stream)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not a dictionary")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, _StoredTensor):
            raise ValueError(f"its entry {name!r:.80} is not a tensor ({type(value).__name__})")
    return state


def _read_zip(path: str) -> tuple[dict[str, _StoredTensor], dict[str, tuple[int, int]]]:
    """Returns the state dict, and the offset and size in bytes of each storage in the file."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        entries = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(entries) != len(archive.infolist()):
            raise ValueError("the zip archive does not have exactly one data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if any(info.compress_type or info.flag_bits & 1 for info in entries.values()):
            raise ValueError("the zip archive is compressed or encrypted")
        size = file.seek(0, 2)
        if any(info.file_size > size - info.header_offset for info in entries.values()):
            raise ValueError("the zip archive is truncated")
        byteorder = f"{folder}byteorder"
        if byteorder in entries and archive.read(byteorder) != b"little":
            raise ValueError("its values are big-endian")
        state = _read_state(archive.read(pickles[0]))
        begins = {}
        for name, info in entries.items():
            if name.startswith(f"{folder}data/"):
                file.seek(info.header_offset + 26)  # lengths of the name and of the extra field
                lengths = struct.unpack("<HH", file.read(4))
                begin = info.header_offset + 30 + sum(lengths)
                begins[name.removeprefix(f"{folder}data/")] = begin, info.file_size
    return state, begins


def _read_plain(path: str) -> tuple[dict[str, _StoredTensor], dict[str, tuple[int, int]]]:
    """Reads a file that PyTorch before 1.6 wrote. Returns the same values as `_read_zip`."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
    ):
        if view[:2] != b"\x80\x02" or _interpret(view) != _MAGIC_NUMBER:
            raise ValueError("it is neither a zip archive nor a file of PyTorch before 1.6")
        version, system = _interpret(view), _interpret(view)
        if version != _PROTOCOL_VERSION or not system["little_endian"]:
            raise ValueError(
                f"it has version {version} of the format (supported: {_PROTOCOL_VERSION}), or "
                "big-endian values"
            )
        state, keys = _read_state(view), _interpret(view)
        sizes = {
            tensor.storage.key: np.dtype(tensor.storage.dtype).itemsize for tensor in state.values()
        }
        begins = {}
        for key in keys:
            (count,) = struct.unpack("<q", view.read(8))
            if key not in sizes or count < 0:
                raise ValueError(f"its storage {key!r:.80} belongs to no tensor")
            begins[key] = view.tell(), count * sizes[key]
            view.seek(count * sizes[key], 1)
    return state, begins


def _locate(tensor: _StoredTensor, begins: Mapping[str, tuple[int, int]]) -> TorchTensor:
    storage = tensor.storage
    item_size = np.dtype(storage.dtype).itemsize
    if storage.key not in begins:
        raise ValueError(f"the values of the storage {storage.key!r:.80} are missing")
    begin, size = begins[storage.key]
    if (storage.offset + storage.num_values) * item_size > size:
        raise ValueError(f"the storage {storage.key!r:.80} is shorter than its tensors")
    begin += (storage.offset + tensor.offset) * item_size
    return TorchTensor(storage.dtype, tensor.shape, tensor.strides, begin)
