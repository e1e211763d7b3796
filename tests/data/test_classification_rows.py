"""Rows of examples: lengths, truncation, token types, and word vocabularies."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data.arguments import ClassificationArguments
from hfseq.data.batches import Batches
from hfseq.data.classification import ExampleRows, Examples, load_or_train_word_tokenizer
from hfseq.data.tokenizers import train_word_tokenizer
from hfseq.errors import DataError, UsageError
from tests.data.samples import make_texts


def examples(first, second=None):
    return Examples(first, second, [None] * len(first), [])


def rows_of(tokenizer, first, second=None, length=32, **options):
    inputs = examples(first, second)
    return ExampleRows(inputs, np.arange(len(first), dtype=np.int32), tokenizer, length, **options)


def test_row_matches_the_tokenizer_output(tokenizer):
    texts = make_texts(20)
    other_texts = make_texts(20, seed=1)
    for second in (None, other_texts):
        rows = rows_of(tokenizer, texts, second, length=24)
        expected = tokenizer(
            texts, second, truncation="longest_first", max_length=24, padding="max_length"
        )
        actual = rows.fetch(np.arange(20), 24)
        assert actual["input_ids"].tolist() == expected["input_ids"]
        assert actual["segment_ids"].tolist() == expected["attention_mask"]
        assert actual["labels"].tolist() == list(range(20))
        long = sum(len(ids) > 24 for ids in tokenizer(texts, second)["input_ids"])
        assert rows.truncated == long
        assert rows.total_tokens == np.sum(expected["attention_mask"])


def test_a_tokenizer_is_left_as_it_was(tokenizer):
    previous = tokenizer.backend_tokenizer.to_str()
    rows_of(tokenizer, make_texts(3), length=8)
    assert tokenizer.backend_tokenizer.to_str() == previous


def test_batches_have_four_widths_at_most_and_hold_their_rows(tokenizer):
    texts = [" ".join(make_texts(1, seed=i)[0].split()[: 1 + i % 30]) for i in range(200)]
    rows = rows_of(tokenizer, texts, length=128)
    assert len(rows.widths) <= 4 and rows.widths[-1] <= 128
    batches = Batches(rows, 8, seed=0)
    for step in range(len(batches)):
        actual = batches[step]
        assert actual["input_ids"].shape[1] in rows.widths
        lengths = actual["segment_ids"].sum(1)
        expected_value = np.diff(rows.store.offsets)[batches.indices(step)[0]]
        assert (lengths == expected_value).all()
    assert rows_of(tokenizer, texts, length=128, pad_to_max_length=True).widths == [128]


def test_the_second_sentence_of_a_pair_has_another_type():
    from hfseq.data.tokenizers import train_tokenizer

    bert = train_tokenizer(make_texts(200), "bert", vocab_size=200)
    actual = rows_of(bert, ["a b"], ["c"], token_type_ids=True).fetch(np.array([0]))
    expected = bert("a b", "c")
    count = len(expected["input_ids"])
    assert actual["token_type_ids"][0, :count].tolist() == expected["token_type_ids"]
    assert not actual["token_type_ids"][0, count:].any()


def test_length_without_room_for_text_is_rejected(tokenizer):
    with pytest.raises(UsageError, match="--max_seq_length 2 leaves no space .* adds 2 special"):
        rows_of(tokenizer, ["a"], length=2)


def test_words_are_those_of_the_training_part_the_frequent_first():
    created = train_word_tokenizer(["The cat sat.", "the cat won't", "a cat", "dogs sat"])
    vocabulary = created.get_vocab()
    assert [created.pad_token_id, created.unk_token_id, created.sep_token_id] == [0, 1, 2]
    assert vocabulary["cat"] == 3 and vocabulary["sat"] == 4
    assert created("the bird sat.")["input_ids"][1] == created.unk_token_id
    assert created.tokenize("won't!") == ["won", "'", "t", "<unk>"]
    pair = created("cat", "sat")
    assert pair["input_ids"] == [3, 2, 4] and pair["token_type_ids"] == [0, 0, 1]
    assert len(train_word_tokenizer(["a b c d e f"], vocab_size=5)) == 5
    with pytest.raises(UsageError, match="--vocab_size 3 leaves no space"):
        train_word_tokenizer(["a"], vocab_size=3)


def test_an_example_without_a_word_still_has_a_token():
    created = train_word_tokenizer(["a b", "b"])
    actual = rows_of(created, ["a", " "]).fetch(np.arange(2))
    assert actual["segment_ids"].sum(1).tolist() == [1, 1]
    assert actual["input_ids"][1, 0] == created.unk_token_id


def test_vocabulary_is_created_once_and_loads(tmp_path):
    calls = []

    def load():
        calls.append(1)
        return {"train": examples(["a b b", "c"])}

    arguments = ClassificationArguments(vocabulary="words")
    first = load_or_train_word_tokenizer(tmp_path, arguments, load)
    again = load_or_train_word_tokenizer(tmp_path, arguments, load)
    assert len(calls) == 1 and first.get_vocab() == again.get_vocab()
    assert again("c")["input_ids"] == first("c")["input_ids"] and again.pad_token == "<pad>"
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    with pytest.raises(DataError, match="without a training split of examples"):
        load_or_train_word_tokenizer(tmp_path / "new", arguments, dict)
