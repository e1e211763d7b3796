"""Data without documents: a long text that is split by position, and arrays of bytes."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from hfseq.data.arguments import CausalArguments, DataArguments
from hfseq.data.sources import ByteArrayRows, RawText, Splits, load_splits
from hfseq.data.tokenize import tokenize_raw
from hfseq.data.tokenizers import train_tokenizer
from hfseq.errors import DataError, UsageError
from hfseq.objectives.base import make_text_rows
from hfseq.objectives.clm import CausalLM


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return train_tokenizer([], "vq_transformer", "bytes")


def splits_of(**flags):
    return load_splits(CausalArguments(**flags))


def rows_of(splits, split, tokenizer, length, **flags):
    data = CausalArguments(train_file=["x"], sample_by="raw", **flags)
    return make_text_rows(data, tokenizer, splits, split, length, False)


def test_a_text_is_cut_by_position_into_training_validation_and_test(tmp_path, bytes_tokenizer):
    content = bytes(range(256)) * 4
    (tmp_path / "enwik8").write_bytes(content[:1000])
    splits = splits_of(
        train_file=[str(tmp_path / "enwik8")], sample_by="raw", test_split_percentage=5
    )
    assert {name: (part.start, part.stop) for name, part in splits.items()} == {
        "train": (0, 900),
        "validation": (900, 950),
        "test": (950, 1000),
    }
    rows, stats = rows_of(splits, "validation", bytes_tokenizer, 16)
    assert stats == {"documents": 1, "tokens": 50, "bytes": 50}
    fetched = rows.fetch(np.arange(len(rows)))
    actual = fetched["input_ids"][fetched["segment_ids"] > 0]
    assert bytes((actual - 3).tolist()) == content[900:950]  # any byte, UTF-8 or not


def test_separate_files_are_not_split_and_compressed_files_load(tmp_path):
    with gzip.open(tmp_path / "train.bin.gz", "wb") as stream:
        stream.write(b"train" * 10)
    (tmp_path / "valid").write_bytes(b"valid")
    splits = splits_of(
        train_file=[str(tmp_path / "train.bin.gz")],
        validation_file=[str(tmp_path / "valid")],
        sample_by="raw",
        max_eval_samples=3,
    )
    assert splits["train"].bytes.tobytes() == b"train" * 10
    assert splits["validation"].bytes.tobytes() == b"val"


def test_other_vocabularies_read_complete_characters(tmp_path, tokenizer):
    text = "æøå and\nthe rest\n" * 30
    (tmp_path / "text").write_bytes(text.encode())
    splits = splits_of(
        train_file=[str(tmp_path / "text")], sample_by="raw", data_cache_dir=str(tmp_path)
    )
    parts = ["".join(splits[name].pieces()) for name in ("train", "validation")]
    assert "".join(parts) == text
    rows, stats = rows_of(
        splits, "validation", tokenizer, 8, data_cache_dir=str(tmp_path), word_perplexity=True
    )
    ids = tokenizer(parts[1], add_special_tokens=False)["input_ids"]
    assert stats["tokens"] == len(ids) and stats["bytes"] == len(splits["validation"])
    assert stats["words"] == len(parts[1].split()) + parts[1].count("\n")
    fetched = rows.fetch(np.arange(len(rows)))
    assert fetched["input_ids"][fetched["segment_ids"] > 0].tolist() == ids
    assert (fetched["segment_ids"] <= 1).all()  # one document


def test_long_texts_come_in_pieces_that_end_with_lines(monkeypatch):
    monkeypatch.setattr("hfseq.data.sources.PIECE_BYTES", 10)
    content = np.frombuffer("aaa\nbbbb\nccøøøøøøøøøø\nd".encode(), np.uint8)
    pieces = list(RawText(content, 0, len(content)).pieces())
    assert "".join(pieces).encode() == content.tobytes()
    assert pieces[0] == "aaa\nbbbb\n" and len(pieces) > 2


def test_bytes_that_are_not_text_are_refused_by_vocabularies_of_text():
    content = np.frombuffer(b"good \xff bad", np.uint8)
    with pytest.raises(DataError, match="byte 5 .* --vocabulary bytes"):
        list(RawText(content, 0, len(content)).pieces())


@pytest.mark.parametrize("content", [b"\x80\x80hello", b"a" + b"\x80" * 9 + b"b"])
def test_bytes_that_continue_no_character_are_not_dropped(content):
    with pytest.raises(DataError, match="is not UTF-8"):
        list(RawText(np.frombuffer(content, np.uint8), 0, len(content)).pieces())


def test_a_part_of_a_character_is_not_text(tokenizer, tmp_path):
    content = np.frombuffer("\U0001f600".encode(), np.uint8)
    assert "".join(RawText(content, 0, 1).pieces()) == "\U0001f600"
    with pytest.raises(DataError, match="bytes 1 to 3 of the text contain no complete character"):
        tokenize_raw(RawText(content, 1, 3), tokenizer, tmp_path, False)


def test_words_of_bytes_that_are_not_text_are_not_counted(bytes_tokenizer):
    text = RawText(np.frombuffer(b"good \xff bad", np.uint8), 0, 10)
    with pytest.raises(DataError, match="--word_perplexity: byte 5 .* drop"):
        rows_of(
            Splits({"validation": text}, "text"),
            "validation",
            bytes_tokenizer,
            8,
            word_perplexity=True,
        )


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
    rows, stats = make_text_rows(CausalArguments(), bytes_tokenizer, splits, "validation", 18, True)
    assert stats == {"documents": 2, "tokens": 36, "bytes": 36}
    fetched = rows.fetch(np.array([1, 0]))
    assert np.array_equal(fetched["input_ids"] - 3, arrays[[19, 18]].reshape(2, -1))
    assert (fetched["segment_ids"] == 1).all() and (fetched["next_ids"] == -1).all()


def test_images_need_rows_of_their_size_and_a_vocabulary_of_bytes(
    images, bytes_tokenizer, tokenizer
):
    splits = splits_of(train_file=[str(images[0] / "images.npy")])
    with pytest.raises(UsageError, match="have 18 bytes: use --block_size 18"):
        ByteArrayRows(splits["train"], bytes_tokenizer, 16)
    with pytest.raises(UsageError, match="require a byte vocabulary"):
        ByteArrayRows(splits["train"], tokenizer, 18)


def test_non_byte_arrays_are_rejected(tmp_path):
    np.save(tmp_path / "floats.npy", np.zeros((3, 2)))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 2), np.uint8), b=np.zeros(2))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "two.npz").read_bytes()[:200])
    np.savez(tmp_path / "none.npz")
    np.save(tmp_path / "empty.npy", np.zeros((0, 2, 2), np.uint8))
    for name, message in (
        ("floats.npy", "float64 of shape .* expected uint8"),
        ("broken.npy", "cannot be read as an array"),
        ("two.npz", "contains a, b: use a file with one array"),
        ("cut.npz", "cannot be read as an array"),
        ("none.npz", "contains nothing: use a file with one array"),
        ("empty.npy", r"is empty .shape \(0, 2, 2\)"),
    ):
        with pytest.raises(DataError, match=message):
            splits_of(train_file=[str(tmp_path / name)])


def test_arrays_and_text_files_do_not_mix(images):
    folder, _ = images
    (folder / "valid.txt").write_text("text")
    np.save(folder / "empty.npy", np.zeros((0, 18), np.uint8))
    for name, message in (("valid.txt", "all splits must be arrays"), ("empty.npy", "is empty")):
        with pytest.raises(DataError, match=f"--validation_file .*{message}"):
            splits_of(train_file=[str(folder / "images.npy")], validation_file=[str(folder / name)])


def test_image_arrays_determine_the_row_length(images, bytes_tokenizer):
    flags = CausalArguments(train_file=[str(images[0] / "images.npz")])
    objective = CausalLM(flags, bytes_tokenizer, None)
    assert objective.choose_length(None) == 18
    assert len(objective.load_splits(None)["train"]) == 19
    with pytest.raises(UsageError, match="--block_size 18 exceeds the .* positions"):
        objective.choose_length(16)


def test_other_objectives_do_not_take_arrays(images):
    with pytest.raises(UsageError, match="only supported by run_clm_flax.py"):
        load_splits(DataArguments(train_file=[str(images[0] / "images.npy")]))


def test_mistakes_about_raw_text_are_named(tmp_path):
    (tmp_path / "tiny").write_bytes(b"ab")
    with pytest.raises(DataError, match="too few for validation"):
        splits_of(train_file=[str(tmp_path / "tiny")], sample_by="raw")
    with pytest.raises(UsageError, match="contains documents, but --sample_by raw reads files"):
        splits_of(dataset_name="x", sample_by="raw")
    with pytest.raises(UsageError, match="drop --streaming"):
        CausalArguments(train_file=["x"], sample_by="raw", streaming=True)
    (tmp_path / "text.enwik8").write_bytes(b"ab")
    with pytest.raises(DataError, match="or --sample_by raw"):
        splits_of(train_file=[str(tmp_path / "text.enwik8")])


def test_documents_are_set_aside_for_the_test_after_those_of_validation(tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"line {i}\n" for i in range(20)))
    splits = splits_of(
        train_file=[str(tmp_path / "lines.txt")],
        validation_split_percentage=10,
        test_split_percentage=10,
    )
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
