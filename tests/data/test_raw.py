"""Files without documents: one long text cut by position, and arrays of bytes."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from hfseq.data.arguments import CausalArguments
from hfseq.data.raw import ImageRows, RawText
from hfseq.data.sources import load_splits
from hfseq.data.tokenizers import train_tokenizer
from hfseq.errors import DataError, UsageError
from hfseq.objectives.text import text_rows


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return train_tokenizer([], "vq_transformer", "bytes")


def splits_of(**flags):
    return load_splits(CausalArguments(**flags))


def rows_of(splits, split, tokenizer, length, **flags):
    data = CausalArguments(train_file=["x"], sample_by="raw", **flags)
    return text_rows(data, tokenizer, splits, split, length, False)


def test_a_text_is_cut_by_position_into_training_validation_and_test(tmp_path, bytes_tokenizer):
    content = bytes(range(256)) * 4
    (tmp_path / "enwik8").write_bytes(content[:1000])
    splits = splits_of(
        train_file=[str(tmp_path / "enwik8")], sample_by="raw", test_split_percentage=5
    )
    assert {name: (part.start, part.stop) for name, part in splits.items()} == {
        "train": (0, 900), "validation": (900, 950), "test": (950, 1000),
    }  # fmt: skip
    rows, facts = rows_of(splits, "validation", bytes_tokenizer, 16)
    assert facts == {"documents": 1, "tokens": 50, "bytes": 50}
    fetched = rows.fetch(np.arange(len(rows)))
    found = fetched["input_ids"][fetched["segment_ids"] > 0]
    assert bytes((found - 3).tolist()) == content[900:950]  # any byte, UTF-8 or not


def test_files_of_their_own_are_not_cut_and_packed_ones_are_read(tmp_path):
    with gzip.open(tmp_path / "train.bin.gz", "wb") as stream:
        stream.write(b"train" * 10)
    (tmp_path / "valid").write_bytes(b"valid")
    splits = splits_of(
        train_file=[str(tmp_path / "train.bin.gz")], validation_file=[str(tmp_path / "valid")],
        sample_by="raw", max_eval_samples=3,
    )  # fmt: skip
    assert splits["train"].bytes.tobytes() == b"train" * 10
    assert splits["validation"].bytes.tobytes() == b"val"


def test_other_vocabularies_read_whole_characters(tmp_path, tokenizer):
    text = "æøå and\nthe rest\n" * 30
    (tmp_path / "text").write_bytes(text.encode())
    splits = splits_of(
        train_file=[str(tmp_path / "text")], sample_by="raw", data_cache_dir=str(tmp_path)
    )
    parts = ["".join(splits[name].pieces()) for name in ("train", "validation")]
    assert "".join(parts) == text
    rows, facts = rows_of(
        splits, "validation", tokenizer, 8, data_cache_dir=str(tmp_path), word_perplexity=True
    )
    ids = tokenizer(parts[1], add_special_tokens=False)["input_ids"]
    assert facts["tokens"] == len(ids) and facts["bytes"] == len(splits["validation"])
    assert facts["words"] == len(parts[1].split()) + parts[1].count("\n")
    fetched = rows.fetch(np.arange(len(rows)))
    assert fetched["input_ids"][fetched["segment_ids"] > 0].tolist() == ids
    assert (fetched["segment_ids"] <= 1).all()  # one document


def test_long_texts_come_in_pieces_that_end_with_lines(monkeypatch):
    monkeypatch.setattr("hfseq.data.raw.PIECE", 10)
    content = np.frombuffer("aaa\nbbbb\nccøøøøøøøøøø\nd".encode(), np.uint8)
    pieces = list(RawText(content, 0, len(content)).pieces())
    assert "".join(pieces).encode() == content.tobytes()
    assert pieces[0] == "aaa\nbbbb\n" and len(pieces) > 2


def test_bytes_that_are_no_text_are_refused_by_vocabularies_of_text():
    content = np.frombuffer(b"good \xff bad", np.uint8)
    with pytest.raises(DataError, match="byte 5 .* --vocabulary bytes"):
        list(RawText(content, 0, len(content)).pieces())


@pytest.fixture
def images(tmp_path):
    arrays = np.random.default_rng(0).integers(0, 256, (20, 2, 3, 3), np.uint8)
    np.save(tmp_path / "images.npy", arrays)
    np.savez(tmp_path / "images.npz", images=arrays)
    return tmp_path, arrays


@pytest.mark.parametrize("name", ["images.npy", "images.npz"])
def test_an_array_of_images_is_a_row_an_image_a_token_a_byte(images, bytes_tokenizer, name):
    folder, arrays = images
    splits = splits_of(train_file=[str(folder / name)], validation_split_percentage=10)
    assert (len(splits["train"]), len(splits["validation"])) == (18, 2)
    rows, facts = text_rows(CausalArguments(), bytes_tokenizer, splits, "validation", 18, True)
    assert facts == {"documents": 2, "tokens": 36, "bytes": 36}
    fetched = rows.fetch(np.array([1, 0]))
    assert np.array_equal(fetched["input_ids"] - 3, arrays[[19, 18]].reshape(2, -1))
    assert (fetched["segment_ids"] == 1).all() and (fetched["next_ids"] == -1).all()


def test_images_need_rows_of_their_size_and_a_vocabulary_of_bytes(
    images, bytes_tokenizer, tokenizer
):
    splits = splits_of(train_file=[str(images[0] / "images.npy")])
    with pytest.raises(UsageError, match="have 18 bytes: give --block_size 18"):
        ImageRows(splits["train"], bytes_tokenizer, 16)
    with pytest.raises(UsageError, match="need a vocabulary of bytes"):
        ImageRows(splits["train"], tokenizer, 18)


def test_what_is_no_array_of_bytes_is_refused(tmp_path):
    np.save(tmp_path / "floats.npy", np.zeros((3, 2)))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 2), np.uint8), b=np.zeros(2))
    for name, message in (
        ("floats.npy", "float64 of shape .* give uint8"),
        ("broken.npy", "cannot be read as an array"),
        ("two.npz", "holds a, b: give a file with one array"),
    ):
        with pytest.raises(DataError, match=message):
            splits_of(train_file=[str(tmp_path / name)])


def test_mistakes_about_raw_text_are_named(tmp_path):
    (tmp_path / "tiny").write_bytes(b"ab")
    with pytest.raises(DataError, match="leave nothing for validation"):
        splits_of(train_file=[str(tmp_path / "tiny")], sample_by="raw")
    with pytest.raises(UsageError, match="has documents, which --sample_by raw does not read"):
        splits_of(dataset_name="x", sample_by="raw")
    with pytest.raises(UsageError, match="drop --streaming"):
        CausalArguments(train_file=["x"], sample_by="raw", streaming=True)
    (tmp_path / "text.enwik8").write_bytes(b"ab")
    with pytest.raises(DataError, match="or --sample_by raw"):
        splits_of(train_file=[str(tmp_path / "text.enwik8")])


def test_documents_are_set_aside_for_the_test_after_those_of_validation(tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"line {i}\n" for i in range(20)))
    splits = splits_of(
        train_file=[str(tmp_path / "lines.txt")], validation_split_percentage=10,
        test_split_percentage=10,
    )  # fmt: skip
    first = {name: part[0]["text"].strip() for name, part in splits.items()}
    assert first == {"validation": "line 0", "test": "line 2", "train": "line 4"}


def test_enwik8_is_split_as_its_readme_says(shared_data, bytes_tokenizer):
    file = shared_data / "enwik8-4MB" / "enwik8.first4000000"
    splits = splits_of(train_file=[str(file)], sample_by="raw", test_split_percentage=5)
    sizes = {name: len(part) for name, part in splits.items()}
    assert sizes == {"train": 3_600_000, "validation": 200_000, "test": 200_000}
    rows, _ = rows_of(splits, "train", bytes_tokenizer, 1024)
    last = rows.fetch(np.array([len(rows) - 1]))
    assert isinstance(rows.store.tokens, np.ndarray) and int((last["segment_ids"] > 0).sum()) == (
        3_600_000 % 1024
    )
