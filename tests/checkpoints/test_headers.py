"""Headers of valid and damaged weight files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hfseq.checkpoints.headers import read_header, read_local_headers

TREE = {
    "a": {"kernel": np.ones((3, 4), np.float32), "0": np.ones((300, 40), ml_dtypes.bfloat16)},
    "b": np.zeros((), np.int32),
}


def safetensors(path: Path, header: dict[str, Any] | bytes, data: int) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(data))
    return path


def tensor(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def msgpack(path: Path, tree: Any) -> Path:
    from flax.serialization import msgpack_serialize

    path.write_bytes(msgpack_serialize(tree))
    return path


def test_both_formats_describe_the_same_tensors(tmp_path):
    from safetensors.numpy import save_file

    flat = {"a.kernel": TREE["a"]["kernel"], "a.0": TREE["a"]["0"], "b": TREE["b"]}
    save_file(flat, tmp_path / "model.safetensors", {"format": "pt"})
    safetensors_header = read_header(tmp_path / "model.safetensors")
    msgpack_header = read_header(msgpack(tmp_path / "flax_model.msgpack", TREE))
    expected = {("a.kernel", "F32", (3, 4)), ("a.0", "BF16", (300, 40)), ("b", "I32", ())}
    for header in (safetensors_header, msgpack_header):
        assert {(t.name, t.dtype_code, t.shape) for t in header.tensors} == expected
        assert header.problems == []
    assert (safetensors_header.native, msgpack_header.native) == (False, True)
    assert safetensors_header.metadata == {"format": "pt"}


def test_values_are_where_the_header_says(tmp_path):
    header = read_header(msgpack(tmp_path / "flax_model.msgpack", {"x": np.arange(6.0)}))
    (entry,) = header.tensors
    data = (tmp_path / "flax_model.msgpack").read_bytes()[entry.begin : entry.end]
    assert np.frombuffer(data).tolist() == list(range(6))


def test_an_array_in_chunks_is_one_tensor(tmp_path, monkeypatch):
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    path = msgpack(tmp_path / "flax_model.msgpack", {"x": {"y": np.ones((10, 8), np.float32)}})
    header = read_header(path)
    assert [(t.name, t.dtype_code, t.shape) for t in header.tensors] == [("x.y", "F32", (10, 8))]
    assert header.problems == []


DAMAGED = {
    "overlaps with a": ({"a": tensor(0, 8), "b": tensor(4, 12)}, 12),
    "4 bytes before b do not belong to a tensor": ({"a": tensor(0, 8), "b": tensor(12, 20)}, 20),
    "8 bytes are missing": ({"a": tensor(0, 8), "b": tensor(8, 16)}, 8),
    "5 bytes follow the last tensor": ({"a": tensor(0, 8)}, 13),
    "a has 8 bytes instead of 12": ({"a": tensor(0, 8, (3,))}, 8),
    "unknown dtype X9": ({"a": tensor(0, 8, dtype="X9")}, 8),
    "a has an invalid entry": ({"a": {"dtype": "F32"}, "b": tensor(0, 8)}, 8),
    "contains a twice": (b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 8)).encode(),) * 2), 8),
    "is not a JSON object": (b"[]", 0),
    "cannot be read": (b'{"a": ', 0),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_invalid_safetensors_error_names_the_problem(tmp_path, message):
    header = read_header(safetensors(tmp_path / "model.safetensors", *DAMAGED[message]))
    assert any(message in problem for problem in header.problems), header.problems


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**60) + b"{}"])
def test_a_file_that_is_too_short_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    (problem,) = read_header(tmp_path / "model.safetensors").problems
    assert "model.safetensors cannot be read: it" in problem


def test_every_cut_of_a_msgpack_file_is_a_problem_and_no_crash(tmp_path):
    path = msgpack(tmp_path / "flax_model.msgpack", {"a": {"b": np.ones(3)}, "c": np.ones(2)})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert read_header(path).problems, length
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 0xFF]) + content[offset + 1 :])
        read_header(path)
    path.write_bytes(content + b"\x00")
    assert "1 bytes follow the parameter tree" in read_header(path).problems[0]


def test_a_tree_nested_too_deeply_is_a_problem(tmp_path):
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x91" * 100_000)
    assert "cannot be read" in read_header(tmp_path / "flax_model.msgpack").problems[0]


def test_tied_tensors_of_bin_shards_count_once(tmp_path):
    torch = pytest.importorskip("torch")
    table = torch.ones(4, 3)
    name = "pytorch_model-00001-of-00001.bin"
    torch.save({"wte.weight": table, "lm_head.weight": table}, tmp_path / name)
    index = {"metadata": {"total_size": 48}, "weight_map": {"wte.weight": name}}
    index["weight_map"]["lm_head.weight"] = name
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    weights = read_local_headers(tmp_path)
    assert weights.problems == [] and set(weights.entries) == {"wte.weight", "lm_head.weight"}


def test_shards_of_a_format_that_is_not_read_are_not_a_problem(tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    other = "pytorch_model-00001-of-00001.bin"
    (tmp_path / other).write_bytes(b"")
    weights = read_local_headers(tmp_path)
    assert weights.problems == [] and weights.unread_files == [other]
