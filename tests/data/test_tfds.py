"""Directories prepared by TensorFlow Datasets. It wrote the files below (4.9, TF 2.x)."""

import base64
import json
import os

import pytest

from hfseq.data.parallel import load_pairs
from hfseq.data.tfds import parse_example, read_tfrecords
from hfseq.errors import DataError, UsageError
from tests.data.parallel_samples import flags, pairs

SHARDS = [
    "NAAAAAAAAABeMxdcCjIKHAoCZGUSFgoUChJTdHJhw59lIDYgw7x4eHh4eHgKEgoCZW4SDAoKCghzdHJlZXQgNnYKb24v"
    "AAAAAAAAAG1dHVAKLQoXCgJkZRIRCg8KDVN0cmHDn2UgMSDDvHgKEgoCZW4SDAoKCghzdHJlZXQgMTnPRr0=",
    "MgAAAAAAAAAkGVbsCjAKGgoCZGUSFAoSChBTdHJhw59lIDQgw7x4eHh4ChIKAmVuEgwKCgoIc3RyZWV0IDSNebWIMQAA"
    "AAAAAACdg4PpCi8KGQoCZGUSEwoRCg9TdHJhw59lIDMgw7x4eHgKEgoCZW4SDAoKCghzdHJlZXQgMzAruMkwAAAAAAAA"
    "AJX10F8KLgoYCgJkZRISChAKDlN0cmHDn2UgMiDDvHh4ChIKAmVuEgwKCgoIc3RyZWV0IDJeS9ty",
    "MwAAAAAAAAAMpyBWCjEKGwoCZGUSFQoTChFTdHJhw59lIDUgw7x4eHh4eAoSCgJlbhIMCgoKCHN0cmVldCA1Qi9zxy4A"
    "AAAAAAAAxctX+gosChYKAmRlEhAKDgoMU3RyYcOfZSAwIMO8ChIKAmVuEgwKCgoIc3RyZWV0IDDTl5J5",
]
PAIRS = [(f"Straße {i} ü{'x' * i}", f"street {i}") for i in (6, 1, 4, 3, 2, 5, 0)]


def info(split="test", **changes):
    return {
        "configName": "de-en",
        "fileFormat": "tfrecord",
        "name": "tiny",
        "splits": [
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": split,
                "numBytes": "343",
                "shardLengths": ["2", "3", "2"],
            }
        ],
        "supervisedKeys": {"tuple": {"items": [{"featureKey": "de"}, {"featureKey": "en"}]}},
        "version": "1.0.0",
    } | changes


def prepare(root, split="test", version="1.0.0", **changes):
    folder = root / "tiny" / "de-en" / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset_info.json").write_text(json.dumps(info(split, **changes)))
    for i, shard in enumerate(SHARDS):
        (folder / f"tiny-{split}.tfrecord-{i:05d}-of-00003").write_bytes(base64.b64decode(shard))
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "TFDS_DATA_DIR", str(tmp_path))
    return tmp_path


def test_files_written_by_tensorflow_are_read(root):
    prepare(root)
    splits = load_pairs(flags(dataset_name="tfds:tiny/de-en"))
    assert list(splits) == ["test"]
    assert pairs(splits["test"]) == PAIRS
    assert (splits.source_lang, splits.target_lang) == ("de", "en")
    splits = load_pairs(flags(dataset_name="tfds:tiny/de-en", source_lang="en"))
    assert pairs(splits["test"]) == [(t, s) for s, t in PAIRS]


def test_train_and_validation_from_different_datasets(root):
    prepare(root, "train")
    prepare(root / "tiny" / "..", "test", version="2.0.0")  # the newer version has another split
    options = {"dataset_name": "tfds:tiny/de-en:1.0.0", "validation_file": ["tfds:tiny/de-en#test"]}
    splits = load_pairs(flags(**options))
    assert pairs(splits["train"]) == PAIRS
    assert pairs(splits["validation"]) == PAIRS


def test_the_newest_version_is_read_by_number_and_a_path_is_a_name_too(root):
    prepare(root, "train", "9.0.0")
    newest = prepare(root, "test", "10.0.0")
    assert list(load_pairs(flags(dataset_name="tfds:tiny/de-en"))) == ["test"]
    assert list(load_pairs(flags(dataset_name=f"tfds:{newest}"))) == ["test"]
    assert list(load_pairs(flags(dataset_name="tfds:tiny/de-en:9.0.0"))) == ["train"]


def test_descriptions_of_older_versions_lack_format_and_template(root):
    folder = prepare(root)
    description = info()
    del description["fileFormat"], description["splits"][0]["filepathTemplate"]
    (folder / "dataset_info.json").write_text(json.dumps(description))
    assert pairs(load_pairs(flags(dataset_name="tfds:tiny/de-en"))["test"]) == PAIRS


def test_unknown_dataset_error_suggests_a_fix(root):
    prepare(root)
    with pytest.raises(DataError, match="no prepared dataset at .*tiny/fr-en.*tfds build tiny/fr"):
        load_pairs(flags(dataset_name="tfds:tiny/fr-en"))
    with pytest.raises(DataError, match="no prepared dataset of version 3.0.0"):
        load_pairs(flags(dataset_name="tfds:tiny/de-en:3.0.0"))
    with pytest.raises(DataError, match="no split 'tset', only test; did you mean 'test'"):
        load_pairs(flags(validation_file=["tfds:tiny/de-en#tset"]))
    with pytest.raises(DataError, match="--target_lang fr; the columns are de, en"):
        load_pairs(flags(dataset_name="tfds:tiny/de-en", source_lang="de", target_lang="fr"))
    with pytest.raises(UsageError, match="tfds:NAME/CONFIG"):
        load_pairs(flags(dataset_name="tfds:"))


def test_damaged_files_are_named_with_the_record(root):
    shard = prepare(root) / "tiny-test.tfrecord-00001-of-00003"
    full = shard.read_bytes()

    def failure(content):
        shard.write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_pairs(flags(dataset_name="tfds:tiny/de-en"))
        return str(caught.value).split("tiny-test.")[1]

    assert failure(full[:-3]) == "tfrecord-00001-of-00003 is truncated in record 3: copy it again"
    assert "damaged: invalid header of record 2" in failure(full[:66] + b"\1" + full[67:])
    assert "record 1 is not a valid tf.train.Example" in failure(
        full[:12] + b"\xff" * 50 + full[62:]
    )
    assert "record 1 is not UTF-8" in failure(full.replace(b"\xc3\x9f", b"\xff\xff", 1))
    assert "has 2 records, but dataset_info.json specifies 3" in failure(full[: 2 * 66 - 1])
    shard.unlink()
    with pytest.raises(DataError, match="00001-of-00003 is missing"):
        load_pairs(flags(dataset_name="tfds:tiny/de-en"))
    (shard.parent / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match="is not a valid dataset description"):
        load_pairs(flags(dataset_name="tfds:tiny/de-en"))


def test_other_formats_ask_for_the_package(root, monkeypatch):
    prepare(root, fileFormat="array_record")
    monkeypatch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"stored as array_record, .*hfseq\[tfds\]"):
        load_pairs(flags(dataset_name="tfds:tiny/de-en"))


def delimited(number, content):
    """Encodes a field of a protocol buffer, independently of the parser."""
    length, size = b"", len(content)
    while size > 127:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([number * 8 + 2]) + length + bytes([size]) + content


@pytest.mark.parametrize("size", [1, 64, 8192, 20_000])
def test_examples_with_numbers_lists_and_long_texts(size):
    def feature(name, value):
        return delimited(1, delimited(1, name.encode()) + delimited(2, value))

    long = "ø" * size
    example = delimited(
        1,
        feature("text", delimited(1, delimited(1, long.encode())))
        + feature("n", delimited(3, delimited(1, b"\x05")))  # an int64 list
        + feature("many", delimited(1, delimited(1, b"a") + delimited(1, b"b")))
        + feature("none", delimited(1, b"")),
    )
    skipped = b"\x38\x96\x01" + b"\x3d" + b"1234" + b"\x39" + b"12345678"  # fields of other types
    assert parse_example(skipped + example) == {"text": long}
    with pytest.raises(ValueError, match="longer than its message"):
        parse_example(example[:-4])


@pytest.mark.slow
def test_records_of_a_file(root):
    folder = prepare(root)
    records = list(
        read_tfrecords(str(folder / "tiny-test.tfrecord-00000-of-00003"), "--train_file")
    )
    assert [parse_example(record) for record in records] == [
        {"de": s, "en": t} for s, t in PAIRS[:2]
    ]
