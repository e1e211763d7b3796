"""Malicious data files, one attack each."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hfseq import errors
from hfseq.checkpoints.storage import Workspace, check_output_dir
from hfseq.data import files, sources, store
from hfseq.data import files as unpacked
from hfseq.data.arguments import ClassificationArguments, DataArguments, TranslationArguments
from hfseq.data.parallel import load_pairs
from hfseq.data.sources import load_splits
from hfseq.data.tables import read_table
from hfseq.errors import CheckpointError, DataError, HfseqError, UsageError
from tests.data import test_tfds
from tests.support.tiers import first

PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
BOMB = 64 << 20  # bytes


def texts(*names, **options):
    return load_splits(DataArguments(train_file=[str(name) for name in names], **options))


def pairs(*names, **options):
    return load_pairs(TranslationArguments(train_file=[str(name) for name in names], **options))


def table(path):
    return read_table(str(path), "--train_file", ClassificationArguments(train_file=["given"]))


@pytest.fixture
def peak():
    """Returns a function that calls another one and returns the peak of Python memory in bytes."""

    def measure(function):
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measure


# -- compressed files


@pytest.fixture(scope="module")
def bomb():
    """64 MB of one letter without a line end, in each compression format."""
    return {suffix: pack(b"a" * BOMB) for suffix, pack in PACK.items()}


@pytest.mark.parametrize("suffix", first(PACK, ".gz"))
def test_a_decompression_bomb_is_refused_before_it_has_unpacked(tmp_path, bomb, suffix, peak):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(bomb[suffix])
    text = "to more than 100 times its size .* decompress it"
    for read in (texts, pairs, table):
        with pytest.raises(DataError, match=text):
            read(path)

    def whole():
        with pytest.raises(DataError, match=text):
            sources.RawText.read([str(path)], "--train_file")

    def lines():
        with pytest.raises(DataError, match=text):
            list(files.read_lines(str(path), "--train_file"))

    assert max(map(peak, (whole, lines))) < BOMB


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bomb_is_not_handed_to_others_that_unpack_it(tmp_path, bomb, streaming):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(bomb[".gz"])
    with pytest.raises(DataError, match="more than 100 times its size"):
        texts(path, streaming=streaming, data_cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("suffix", first(PACK, ".gz"))
def test_highly_compressed_text_is_read_completely(tmp_path, suffix):
    content = "".join(f"line {i % 700} of a log, time {i}\n" for i in range(60_000)).encode()
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](content))
    assert sources.RawText.read([str(path)], "--train_file").bytes.tobytes() == content


def test_large_archives_may_unpack_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacked, "ALWAYS_ALLOWED_BYTES", 1000)
    content = np.random.default_rng(0).bytes(200_000)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(content))
    assert sources.RawText.read([str(path)], "--train_file").bytes.tobytes() == content


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:20] + b"\xff" * 40 + b[60:]])
def test_a_damaged_packed_file_is_named(tmp_path, suffix, damage):
    content = np.random.default_rng(0).bytes(20_000).hex().encode()
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(damage(PACK[suffix](content)))
    with pytest.raises(DataError, match=r"a\.jsonl.* cannot be read"):
        list(files.read_lines(str(path), "--train_file"))


def test_an_archive_of_arrays_that_unpacks_to_too_much_is_refused(tmp_path, peak):
    np.savez_compressed(tmp_path / "x.npz", np.zeros((BOMB // 64, 8, 8), np.uint8))

    def read():
        with pytest.raises(DataError, match="to 64 MB, more than 100 times its size"):
            sources.ByteArrays.read([str(tmp_path / "x.npz")], "--train_file")

    assert peak(read) < BOMB // 4


# -- parquet


def write_parquet(path: Path, **columns) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, compression="zstd")


def test_parquet_that_unpacks_to_too_much_is_refused(tmp_path):
    """Equal texts are stored once, so that a few kB can expand to any number of GB."""
    path = tmp_path / "a.parquet"
    write_parquet(path, text=["a" * 1000] * 200_000, label=[1] * 200_000)
    assert path.stat().st_size < 100_000
    for read in (texts, table):
        with pytest.raises(DataError, match="more than 100 times its size"):
            read(path)
    write_parquet(path, en=["a" * 1000] * 200_000, de=["b"] * 200_000)
    with pytest.raises(DataError, match="more than 100 times its size"):
        pairs(path)


# -- JSON


DEEP = "[" * 100_000
LINES = {
    "nesting": '{"text": ' + DEEP,
    "a long number": '{"text": "a", "n": ' + "9" * 10_000 + "}",
    "half a pair of surrogates": '{"text": "\\ud800", "label": 1}',
    "a key twice": '{"text": "a", "text": {"b": 1}}',
    "no object": '"text"',
    "another type": '{"text": 3, "label": 1}',
    "zero bytes": '{"text": "\\u0000"}',
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize(
    "read",
    [
        texts,
        pytest.param(pairs, marks=pytest.mark.slow),
        pytest.param(table, marks=pytest.mark.slow),
    ],
)
def test_lines_that_deceive_are_read_or_named(tmp_path, name, read):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine", "label": 0}\n{"text": "good"}\n' + LINES[name] + "\n")
    try:
        assert read(path)
    except HfseqError as error:
        assert str(path) in str(error) or "no column contains text" in str(error)


@pytest.mark.parametrize("text", [DEEP, "1" * 10_000, '{"a": 1, "a": 2}', b"\xff", "", "\ufeff1"])
def test_json_errors_have_one_type(text):
    with pytest.raises(json.JSONDecodeError):
        errors.parse_json(text, unique_keys=True)


def test_equal_keys_are_python_s_business_unless_it_matters():
    assert errors.parse_json('{"a": 1, "a": 2}') == {"a": 2}


# -- arrays and stores


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_arrays_of_pickled_objects_never_run(tmp_path):
    ran = tmp_path / "ran"
    np.save(tmp_path / "x.npy", np.array([Evil(ran)], object), allow_pickle=True)
    np.savez(tmp_path / "x.npz", np.array([Evil(ran)], object))
    (tmp_path / "y.npy").write_bytes(pickle.dumps(Evil(ran)))
    for name in ("x.npy", "x.npz", "y.npy"):
        with pytest.raises(DataError, match="cannot be read as an array"):
            sources.ByteArrays.read([str(tmp_path / name)], "--train_file")
    assert not ran.exists()


def test_archive_with_wrong_extension_is_reported(tmp_path):
    np.savez(tmp_path / "x.npz", np.zeros((2, 2), np.uint8))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(DataError, match="is an archive of arrays.*npz"):
        sources.ByteArrays.read([str(tmp_path / "x.npy")], "--train_file")


@pytest.mark.parametrize("shape", ["(10**12,)", "(2**62, 4)", "(-4, 4)", "(4", "((((((1,),),),),)"])
def test_false_shape_is_rejected(tmp_path, shape):
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)
    (tmp_path / "x.npy").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("arr_0.npy", data)
    for name in ("x.npy", "x.npz"):
        with pytest.raises(DataError, match=r"cannot be read as an array|shape"):
            sources.ByteArrays.read([str(tmp_path / name)], "--train_file")


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 2**62},
        {"tokens": -1},
        {"documents": "2"},
        {"documents": 10**30},
        {"tokens": None},
        {"pad_token_id": 2**40},
        {"continues": [1]},
        {"version": {}},
    ],
)
def test_false_store_header_is_rejected(tmp_path, change):
    chunks = [(np.arange(6, dtype=np.int32), np.array([2, 4]), None)]
    store.build_store(tmp_path / "s", lambda: chunks, {"fingerprint": "", "pad_token_id": 0})
    path = tmp_path / "s" / store.HEADER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError):
        store.TokenStore.open(tmp_path / "s")


def test_false_offsets_are_rejected(tmp_path):
    chunks = [(np.arange(6, dtype=np.int32), np.array([2, 4]), None)]
    store.build_store(tmp_path / "s", lambda: chunks, {"fingerprint": "", "pad_token_id": 0})
    for offsets in ([0, 7, 6], [1, 2, 6], [0, -1, 6], [0, 2, 5]):
        (tmp_path / "s" / store.OFFSETS_FILE).write_bytes(np.array(offsets, "<i8").tobytes())
        with pytest.raises(DataError, match="rebuild it with --overwrite_cache"):
            store.TokenStore.open(tmp_path / "s")


# -- paths outside a directory


@pytest.mark.parametrize(
    "template",
    [
        "../../{DATASET}",
        "/etc/passwd",
        "{DATASET.__class__}",
        "{DATASET:>1000000000}",
        "a\0b",
        "..",
    ],
)
def test_prepared_dataset_files_outside_the_folder_are_rejected(tmp_path, template):
    info = test_tfds.info("train")
    info["splits"][0]["filepathTemplate"] = template
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(
        DataError, match="in the same directory|is missing|cannot be read|not the de"
    ):
        load_pairs(TranslationArguments(dataset_name=f"tfds:{tmp_path}"))


@pytest.mark.parametrize("name", ["../outside", "checkpoints/3/../../../outside"])
def test_storage_that_names_files_outside_writes_none(tmp_path, name):
    workspace = Workspace.__new__(Workspace)
    workspace.path = tmp_path / "run"
    workspace._fs = SimpleNamespace(get_file=lambda *_: pytest.fail("it was downloaded"))
    with pytest.raises(CheckpointError, match="points outside the directory"):
        workspace._download(name, 3)


@pytest.mark.parametrize("name", ["metrics.jsonl", "tokenizer.json", "README.md", ".hidden"])
def test_an_output_directory_with_links_to_files_outside_is_refused(tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=f"{name} is a link to .*mine.*copy the file"):
            check_output_dir(tmp_path / "run", overwrite)
    assert (tmp_path / "mine").read_text() == "mine"


def test_checkpoints_on_another_disk_are_welcome(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    check_output_dir(tmp_path / "run")


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_null_are_refused(tmp_path, streaming):
    """The reader of pyarrow crashes the process for some of these files."""
    rows = [json.dumps({"text": f"text number {i}"}) for i in range(9)]
    for at in (0, 4):
        (tmp_path / "a.jsonl").write_text("\n".join([*rows[:at], " null", *rows[at:]]) + "\n")
        with pytest.raises(DataError, match=rf"a.jsonl:{at + 1} is null"):
            load_splits(
                DataArguments(
                    train_file=[str(tmp_path / "a.jsonl")],
                    streaming=streaming,
                    data_cache_dir=str(tmp_path / "cache"),
                    validation_split_percentage=0,
                )
            )


def test_one_document_over_many_lines_may_hold_nulls(tmp_path):
    (tmp_path / "a.json").write_text('[\n {"text": "a",\n  "tags": [\n  null\n  ]}\n]\n')
    files.check_null_rows(str(tmp_path / "a.json"), "--train_file")
