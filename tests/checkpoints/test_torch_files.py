"""Reading of PyTorch's .bin files without running their pickles."""

from __future__ import annotations

import collections
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hfseq.checkpoints import files
from hfseq.checkpoints.torch_files import open_torch_file
from hfseq.errors import CheckpointError
from hfseq.modeling.pytorch_utils import torch_to_numpy

torch = pytest.importorskip("torch")


def save(state: object, path: Path, plain: bool) -> str:
    torch.save(state, path, _use_new_zipfile_serialization=not plain)
    return str(path)


@pytest.fixture(params=[False, True], ids=["zip", "before PyTorch 1.6"])
def plain(request) -> bool:
    return request.param


def test_values_equal_those_of_torch_load(tmp_path, plain):
    weight = torch.randn(3, 4, 5)
    state = collections.OrderedDict(
        weight=weight,
        tied=weight,
        transposed=weight.transpose(0, 2),
        part=weight[1, :, 2:],
        parameter=torch.nn.Parameter(torch.randn(2, 2)),
        half=torch.randn(7).half(),
        brain=torch.randn(7).bfloat16(),
        double=torch.randn(2, dtype=torch.float64),
        ids=torch.arange(6).expand(1, -1),
        mask=torch.tensor([True, False]),
        scalar=torch.tensor(2.5),
        empty=torch.empty(0, 3),
    )
    state._metadata = {"": {"version": 1}}
    path = save(state, tmp_path / "pytorch_model.bin", plain)
    expected = torch.load(path, weights_only=True)
    tensors = open_torch_file(path)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        values = torch_to_numpy(expected[name])
        assert (tensor.shape, tensor.dtype) == (values.shape, values.dtype.name)
        assert np.array_equal(tensor.read(...), values)
    part = (slice(1, 3), slice(None), slice(0, 2))
    for name in ("weight", "transposed"):
        assert np.array_equal(tensors[name].read(part), expected[name].numpy()[part])


class Evil:
    """Creates a directory when it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": Evil()}, rf"it uses '{os.mkdir.__module__}\.mkdir'"),
        ({"a": torch.nn.Linear(2, 2)}, r"it uses 'torch\.nn\.modules\.linear\.Linear'"),
        ({"a": torch.zeros(2).to_sparse()}, r"it uses 'torch\._utils\._rebuild_sparse_tensor'"),
        ({"epoch": 3, "model": {"a": torch.ones(1)}}, "its entry 'epoch' is not a tensor"),
        ([torch.ones(1)], "it contains a list, not a dictionary"),
    ],
)
def test_anything_but_a_dictionary_of_tensors_is_refused(
    tmp_path, monkeypatch, plain, state, message
):
    monkeypatch.chdir(tmp_path)
    path = save(state, tmp_path / "pytorch_model.bin", plain)
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin .*{message}.*safetensors"):
        open_torch_file(path)
    assert not Path("exploded").exists()


def with_pickle(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> str:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("m/data.pkl", content)
        archive.writestr("m/data/0", bytes(8))
    return str(path)


def tensor_pickle(count: bytes, shape: bytes, strides: bytes, offset: bytes = b"K\x00") -> bytes:
    """A pickle of {"a": tensor} with float32 values in the storage "0"."""
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + count + b"tQ"
    arguments = b"(" + storage + offset + b"(" + shape + b"t(" + strides + b"t\x89}t"
    return b"\x80\x02}U\x01actorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_handmade_pickle_is_read(tmp_path):
    content = tensor_pickle(b"K\x02", b"K\x02", b"K\x01")
    tensors = open_torch_file(with_pickle(tmp_path / "a.bin", content))
    assert tensors["a"].shape == (2,) and not tensors["a"].read(...).any()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": 1}, protocol=4), "pickle opcode (FRAME|MEMOIZE|SHORT_BINUNICODE)"),
        (b"\x80\x02cos\nsystem\n(U\x02lstR.", r"it uses 'os\.system'"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "pickle opcode NEWOBJ"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n}U\x08__code__K\x01sb.", "sets attributes"),
        (b"\x80\x02" + b")" + b"\x85" * 100_000 + b"K\x01s.", "IndexError|pop from|out of range"),
        (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", "keys that are not strings"),
        (b"\x80\x02}U\x01aU\x01bs", "exhausted before seeing STOP"),
        (b"\x80\x02.", "pop from empty list"),
        (tensor_pickle(b"K\x02", b"K\x03", b"K\x01"), r"shape \(3,\) exceeds its storage"),
        (tensor_pickle(b"K\x02", b"K\x02", b"K\x01", b"K\x01"), "exceeds its storage"),
        (tensor_pickle(b"K\x03", b"K\x03", b"K\x01"), "is shorter than its tensors"),
        (tensor_pickle(b"K\x02", b"J\x00\x00\x00\x70", b"K\x00"), "exceeds its storage"),
        (tensor_pickle(b"K\x02", b"J\xff\xff\xff\xff", b"K\x01"), "invalid shape"),
        (tensor_pickle(b"K\x02", b"K\x02", b""), "shorter|longer"),
        (tensor_pickle(b"K\x02", b"K\x01" * 40, b"K\x01" * 40), "invalid description"),
    ],
)
def test_invalid_pickle_is_refused(tmp_path, content, message):
    path = with_pickle(tmp_path / "a.bin", content)
    with pytest.raises(CheckpointError, match=rf"a\.bin is damaged or .*({message})"):
        open_torch_file(path)


def test_compressed_archive_is_refused(tmp_path):
    content = tensor_pickle(b"K\x02", b"K\x02", b"K\x01")
    path = with_pickle(tmp_path / "a.bin", content, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        open_torch_file(path)


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x02K\x01.", b"\x1f\x8b" * 9, b"PK\x05\x06"])
def test_file_of_another_format_is_refused(tmp_path, content):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged or not a plain PyTorch state dict"):
        open_torch_file(str(tmp_path / "a.bin"))


def test_every_cut_of_a_file_is_an_error(tmp_path, plain):
    path = Path(save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "a.bin", plain))
    content = path.read_bytes()
    for size in range(0, len(content) - 1, 7):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            open_torch_file(str(path))


def test_index_that_names_an_absent_file_is_an_error(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    shards = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = tmp_path / files.TORCH_BIN_INDEX
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"index\.json lists .*00002-of-00002\.bin, which"):
        files.open_file(str(index))
    shutil.copy(tmp_path / shards["a"], tmp_path / shards["b"])
    with pytest.raises(CheckpointError, match="lists b in .*which does not contain it"):
        files.open_file(str(index))


def test_reading_imports_neither_torch_nor_jax(tmp_path):
    path = save({"a": torch.arange(3.0)}, tmp_path / "a.bin", plain=False)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hfseq.checkpoints import files\n"
        f"print(files.open_file({path!r}).tensors['a'].read(...).sum())\n"
        "assert 'jax' not in sys.modules"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", code], env=paths, capture_output=True, text=True
    )
    assert process.stdout.strip() == "3.0", process.stderr
