"""Reading valid and damaged weight files, and atomic saves."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hfseq.checkpoints import files
from hfseq.errors import CheckpointError, UsageError


def folder_of(path: Path) -> files.Fetch:
    return lambda name: str(path / name) if (path / name).is_file() else None


def opened(path: Path, **options) -> files.OpenedWeights:
    return files.open_weights(folder_of(path), str(path), **options)


def write(path: Path, tensors: dict, name: str = files.SAFETENSORS, form: str = "pt") -> None:
    save_file(tensors, path / name, metadata={"format": form})


ONE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}


# -- reading ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_are_read_completely_and_by_slices(tmp_path, dtype):
    values = np.arange(24).reshape(4, 6).astype(dtype)
    write(tmp_path, {"a": values})
    tensor = opened(tmp_path).tensors["a"]
    assert (tensor.shape, tensor.dtype) == ((4, 6), np.dtype(dtype).name)
    full, part = tensor.read(...), tensor.read((slice(1, 3), slice(None)))
    assert full.dtype == part.dtype == dtype
    assert np.array_equal(full, values) and np.array_equal(part, values[1:3])


def test_scalars_are_read(tmp_path):
    write(tmp_path, {"a": np.array(3.0, np.float32)})
    assert opened(tmp_path).tensors["a"].read(...) == 3


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux' list of maps")
def test_reading_tensors_does_not_keep_file_pages_in_memory(tmp_path):
    write(tmp_path, {name: np.ones(1_000_000, np.float32) for name in "abcd"})
    tensors = opened(tmp_path).tensors
    assert sum(tensor.read(...).sum() for tensor in tensors.values()) == 4_000_000
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = [line for line in maps if str(tmp_path) in line]
    resident = sum(int(kb) for line in ours for kb in re.findall(r"^Rss: +(\d+)", line, flags=re.M))
    assert ours and resident < 1_000  # of 16,000 kB


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    write(tmp_path, ONE)
    tensor = opened(tmp_path).tensors["a"]
    os.truncate(tmp_path / files.SAFETENSORS, 80)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors was truncated while it was read"
    ):
        tensor.read(...)


def write_all_formats(folder: Path, monkeypatch) -> None:
    """Writes each weight file that a directory may have. Only their names are read."""
    monkeypatch.setattr(files, "open_file", lambda path, fetch: os.path.basename(path))
    for age, name in enumerate(files.WEIGHTS_FILES):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "model.safetensors flax_model.msgpack pytorch_model.bin"),
        ({"from_pt": True}, "model.safetensors pytorch_model.bin flax_model.msgpack"),
        ({"from_flax": True}, "flax_model.msgpack"),
    ],
)
def test_files_are_read_in_the_order_of_preference(tmp_path, monkeypatch, options, order):
    write_all_formats(tmp_path, monkeypatch)
    expected = [name + suffix for name in order.split() for suffix in ("", ".index.json")]
    for name in expected:
        assert opened(tmp_path, **options) == name
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="no file named|has no flax_model.msgpack"):
        opened(tmp_path, **options)


def test_from_flax_and_from_pt_exclude_each_other(tmp_path):
    with pytest.raises(UsageError, match="from_pt=True and from_flax=True"):
        opened(tmp_path, from_pt=True, from_flax=True)


def test_from_flax_without_msgpack_is_an_error(tmp_path):
    write(tmp_path, ONE)
    with pytest.raises(CheckpointError, match=r"has no flax_model\.msgpack, which from_flax=True"):
        opened(tmp_path, from_flax=True)


def test_one_warning_names_the_read_file_and_a_newer_one(tmp_path, monkeypatch, caplog):
    write_all_formats(tmp_path, monkeypatch)
    opened(tmp_path)
    assert not caplog.records
    os.utime(tmp_path / files.MSGPACK, (2e9, 2e9))
    for _ in range(2):
        opened(tmp_path)
    opened(tmp_path, from_flax=True)
    (message,) = caplog.messages
    assert re.search(
        r"reading .*model\.safetensors, although flax_model\.msgpack is newer", message
    )


def test_times_of_links_in_the_cache_of_the_hub_are_not_compared(tmp_path, monkeypatch, caplog):
    write_all_formats(tmp_path, monkeypatch)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in (files.SAFETENSORS, files.MSGPACK):
        (snapshot / name).symlink_to(tmp_path / name)
        os.utime(snapshot / name, (1e9, 1e9), follow_symlinks=False)
    os.utime(snapshot / files.MSGPACK, (2e9, 2e9), follow_symlinks=False)
    assert opened(snapshot) == files.SAFETENSORS and not caplog.records


def test_format_flax_has_native_names(tmp_path):
    write(tmp_path, {"b.kernel": ONE["a"]}, form="flax")
    assert opened(tmp_path).native


def test_without_metadata_names_are_pytorchs(tmp_path):
    save_file(ONE, tmp_path / files.SAFETENSORS)
    assert not opened(tmp_path).native


def test_unknown_format_is_rejected(tmp_path):
    write(tmp_path, ONE, form="cobol")
    with pytest.raises(CheckpointError, match="unknown metadata format 'cobol'.*pt, flax"):
        opened(tmp_path)


def test_empty_directory_error_lists_the_expected_files(tmp_path):
    with pytest.raises(
        CheckpointError, match="no file named model.safetensors.*flax_model.msgpack"
    ):
        opened(tmp_path)


# -- damaged files ---------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    short = data[8 : 8 + header].replace(b"[0,24]", b"[0,99]")
    path.write_bytes(
        {
            "empty": b"",
            "truncated data": data[:-5],
            "truncated header": data[:20],
            "garbage": bytes(range(256)) * 4,
            "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "header larger than the file": struct.pack("<Q", 10**6) + data[8:],
            "header of 2**62 bytes": struct.pack("<Q", 2**62) + data[8:],
            "tensor larger than the file": struct.pack("<Q", header) + short + data[8 + header :],
        }[how]
    )


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "truncated data", "truncated header", "garbage", "text"),
        *("header larger than the file", "header of 2**62 bytes", "tensor larger than the file"),
    ],
)
def test_damaged_safetensors_are_named(tmp_path, how):
    write(tmp_path, ONE)
    damage(tmp_path / files.SAFETENSORS, how)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is damaged or not a safetensors"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xc1garbage", b"\x93\x01\x02\x03"])
def test_damaged_msgpack_is_named(tmp_path, data):
    (tmp_path / files.MSGPACK).write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"flax_model\.msgpack (is damaged|does not contain a parameter)"
    ):
        opened(tmp_path)


def test_truncated_msgpack_is_named(tmp_path):
    files.write_msgpack(tmp_path, {("a",): ONE["a"]}, "5GB")
    full = (tmp_path / files.MSGPACK).read_bytes()
    (tmp_path / files.MSGPACK).write_bytes(full[:-4])
    with pytest.raises(CheckpointError, match=r"flax_model\.msgpack is damaged"):
        opened(tmp_path)


# -- shards ----------------------------------------------------------------------------------------


def index(path: Path, weight_map: object) -> None:
    (path / files.SAFETENSORS_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_together(tmp_path):
    write(tmp_path, ONE, "one.safetensors")
    write(tmp_path, {"b": ONE["a"]}, "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert sorted(opened(tmp_path).tensors) == ["a", "b"]


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_shards_outside_of_the_directory_are_refused(tmp_path, name):
    index(tmp_path, {"a": name})
    with pytest.raises(CheckpointError, match="shards must be in the directory of the index"):
        opened(tmp_path)


def test_missing_shard_is_named(tmp_path):
    index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(CheckpointError, match=r"lists gone\.safetensors, which does not exist"):
        opened(tmp_path)


def test_shard_of_another_save_is_noticed(tmp_path):
    write(tmp_path, ONE, "one.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"lists b in .*one\.safetensors, which does not contain it"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_broken_index_is_named(tmp_path, text):
    (tmp_path / files.SAFETENSORS_INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("5GB", 5 * 10**9), ("200kB", 200_000), ("150kiB", 153_600), ("1.5MB", 1_500_000)],
)
def test_sizes_are_parsed(text, size):
    assert files.parse_size(text) == size


def test_size_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'big' is not a size such as '5GB'"):
        files.parse_size("big")


# -- writing ---------------------------------------------------------------------------------------


def save(folder: Path, values: dict[str, np.ndarray], limit: int = 10**9) -> None:
    sizes = {name: value.nbytes for name, value in values.items()}
    with files.staging_directory(folder) as stage:
        files.write_safetensors(
            stage, sizes, lambda keys: {key: values[key] for key in keys}, limit, {"format": "pt"}
        )


MANY = {f"t{i}": np.full((4, 4), i, np.float32) for i in range(5)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("before", "after"), [(64, 10**9), (10**9, 64), (64, 128)])
def test_a_save_replaces_all_weights_of_the_one_before(tmp_path, before, after):
    save(tmp_path, MANY, before)
    (tmp_path / "notes.txt").write_text("keep me")
    save(tmp_path, {name: value + 1 for name, value in MANY.items()}, after)
    tensors = opened(tmp_path).tensors
    assert all(np.array_equal(tensors[name].read(...), MANY[name] + 1) for name in MANY)
    count = 1 if after > 128 else {64: 5, 128: 3}[after] + 1
    assert len(names(tmp_path)) == count + 1 and "notes.txt" in names(tmp_path)


def test_index_contains_the_total_size(tmp_path):
    save(tmp_path, MANY, 128)
    stored = json.loads((tmp_path / files.SAFETENSORS_INDEX).read_text())
    assert stored["metadata"]["total_size"] == 5 * 64
    assert set(stored["weight_map"]) == set(MANY)


@pytest.mark.parametrize("limit", [64, 10**9])
def test_full_disk_keeps_only_the_previous_files(tmp_path, monkeypatch, limit):
    import safetensors.numpy

    save(tmp_path, MANY, limit)
    files_before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    written_files = []

    def full(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        written_files.append(path)
        if len(written_files) == (3 if limit == 64 else 1):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left.*unchanged: free disk space"):
        save(tmp_path, MANY, limit)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == files_before


def test_interrupt_keeps_only_the_previous_files(tmp_path, monkeypatch):
    import safetensors.numpy

    save(tmp_path, MANY)
    files_before = names(tmp_path)

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, MANY)
    assert names(tmp_path) == files_before


KILLED = """
import os, signal, sys
import numpy as np, safetensors.numpy as st
from pathlib import Path
from hfseq.checkpoints import files
real, done = st.save_file, []
def save_file(tensors, path, metadata=None):
    real(tensors, path, metadata)
    done.append(path)
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
st.save_file = save_file
values = {f"t{i}": np.full((4, 4), -1, np.float32) for i in range(5)}
with files.staging_directory(Path(sys.argv[1])) as stage:
    sizes = dict.fromkeys(values, 64)
    files.write_safetensors(stage, sizes, lambda k: {n: values[n] for n in k}, 64, {})
"""


def test_kill_during_save_loses_nothing(tmp_path):
    save(tmp_path, MANY, 64)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment)
    assert result.returncode == -signal.SIGKILL
    tensors = opened(tmp_path).tensors
    assert all(np.array_equal(tensors[name].read(...), MANY[name]) for name in MANY)
    save(tmp_path, MANY, 64)  # the next save removes the leftovers of the killed one
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_shards_are_loaded_one_at_a_time(tmp_path):
    requested = []

    def load(keys):
        requested.append(list(keys))
        return {key: MANY[key] for key in keys}

    with files.staging_directory(tmp_path) as stage:
        files.write_safetensors(stage, dict.fromkeys(MANY, 64), load, 128, {"format": "pt"})
    assert requested == [["t0", "t1"], ["t2", "t3"], ["t4"]]
