"""Tokenized pairs: aligned sides, long pairs, and rows of one pair."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data import tokenize
from hfseq.data.pairs import PairRows, SideEncoder, tokenize_pairs
from hfseq.data.tokenizers import train_tokenizer
from hfseq.errors import DataError, UsageError
from tests.data.samples import make_texts

LIMITS = {"max_source_length": 24, "max_target_length": 16}


@pytest.fixture(scope="module")
def marian():
    return train_tokenizer(make_texts(300), "marian", "bpe", vocab_size=400)


@pytest.fixture
def dataset():
    from datasets import Dataset

    sources = make_texts(120, seed=4)
    targets = [" ".join(reversed(text.split())) for text in sources]
    return Dataset.from_dict({"source": sources, "target": targets})


@pytest.fixture
def tokenized(dataset, marian, tmp_path):
    def run(tokenizer=marian, data=dataset, **options):
        return tokenize_pairs(data, tokenizer, cache_dir=tmp_path, **{**LIMITS, **options})

    return run


def sentences(side, store):
    """Returns the tokens of every sentence in the store."""
    actual = []
    for pair in store.pair_indices:
        ids = np.empty(side.lengths[pair], np.int32)
        side.copy(pair, ids)
        actual.append(ids.tolist())
    return actual


def test_sides_stay_aligned_with_blank_lines(tokenized, marian):
    from datasets import Dataset

    data = Dataset.from_dict({"source": ["en lov", "\u200b", "for alle"], "target": ["a", "b", ""]})
    store = tokenized(data=data)
    assert [marian.decode(ids) for ids in sentences(store.source, store)][::2] == [
        "en lov</s>",
        "for alle</s>",
    ]
    assert len(store) == 3 and sentences(store.target, store)[2] == [marian.eos_token_id]


def test_tokens_are_those_of_the_tokenizer_with_the_prefix_before_sources_only(
    tokenized, dataset, marian
):
    store = tokenized(max_source_length=99, max_target_length=99, source_prefix="gjelde: ")
    sources, targets = (sentences(side, store) for side in store.sides)
    assert sources == [marian(f"gjelde: {text}")["input_ids"] for text in dataset["source"]]
    assert targets == [marian(text)["input_ids"] for text in dataset["target"]]


def test_a_tokenizer_that_adds_no_end_gets_one_added(tokenized):
    gpt2 = train_tokenizer(make_texts(100), "gpt2", vocab_size=300)
    store = tokenized(gpt2)
    ends = {ids[-1] for side in store.sides for ids in sentences(side, store)}
    assert ends == {gpt2.eos_token_id}


def test_a_tokenizer_without_an_end_token_is_refused(tokenized):
    bert = train_tokenizer(make_texts(100), "bert", vocab_size=200)
    with pytest.raises(UsageError, match="tokenizer with an EOS token"):
        tokenized(bert)


def test_targets_are_encoded_as_targets():
    class Switching:
        eos_token_id, unk_token_id, all_special_ids = 1, 2, (1, 2)

        def _switch_to_target_mode(self):
            raise AssertionError("the call does that")

        def __call__(self, text=None, text_target=None, **_):
            first = 5 if text is None else 4
            return {"input_ids": [[first, 1] for _ in text or text_target]}

    assert [SideEncoder(Switching(), side)(["x"])[0].tolist() for side in ("source", "target")] == [
        [4, 1],
        [5, 1],
    ]


def test_long_pairs_are_left_out_or_cut_before_the_end_token_and_counted(
    tokenized, marian, dataset, messages
):
    complete = tokenized(max_source_length=99, max_target_length=99)
    full = [sentences(side, complete) for side in complete.sides]
    fits = [len(a) <= 24 and len(b) <= 16 for a, b in zip(*full, strict=True)]
    assert 10 < sum(fits) < 110 and messages() == ""
    remaining = tokenized(drop_long=True)
    assert remaining.pair_indices.tolist() == np.flatnonzero(fits).tolist()
    assert remaining.stats["dropped"] == 120 - sum(fits) and remaining.stats["truncated"] == 0
    assert f"{120 - sum(fits)} of 120 pairs are longer than 24 source or 16 target" in messages()
    assert "--truncate_long_pairs" in messages()
    cut = tokenized()
    assert len(cut) == 120 and cut.stats["truncated"] == 120 - sum(fits)
    for side, limit, previous in zip(cut.sides, (24, 16), full, strict=True):
        for short, long in zip(sentences(side, cut), previous, strict=True):
            expected = [*long[: limit - 1], marian.eos_token_id] if len(long) > limit else long
            assert short == expected
    assert cut.stats["tokens"] == sum(int(lengths.sum()) for lengths in cut.lengths)


def test_errors_suggest_a_fix(tokenized):
    with pytest.raises(DataError, match="all 120 pairs are longer than 2 source"):
        tokenized(max_source_length=2, drop_long=True)
    with pytest.raises(UsageError, match="--max_target_length 1 leaves no space"):
        tokenized(max_target_length=1)


def test_the_cache_serves_other_limits_but_no_other_prefix(tokenized, tmp_path, monkeypatch):
    first = tokenized()
    names = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "_encode_range", lambda *_: pytest.fail("tokenised again"))
        again = tokenized(max_source_length=30, drop_long=True)
    assert len(again) < len(first) and names == {path.name for path in tmp_path.iterdir()}
    tokenized(source_prefix="x ")
    assert len(names) < len(list(tmp_path.iterdir()))


def test_every_pair_has_a_row_and_widths_are_bucketed(tokenized):
    store = tokenized(max_source_length=60, max_target_length=50)
    rows = PairRows(store)
    assert sorted(rows.order.tolist()) == list(range(len(rows))) == store.pair_indices.tolist()
    batches = [np.arange(i, min(i + 7, len(rows))) for i in range(0, len(rows), 7)]
    shapes, padded = set(), 0
    for batch in batches:
        actual = rows.fetch(batch)
        shapes.add((actual["input_ids"].shape[1], actual["target_ids"].shape[1]))
        padded += actual["input_ids"].size
        for index, pair in enumerate(rows.order[batch]):
            for side, name in zip(store.sides, ("input_ids", "target_ids"), strict=True):
                segments = actual[
                    name.replace("input_ids", "segment_ids").replace(
                        "target_ids", "target_segment_ids"
                    )
                ][index]
                assert segments.sum() == side.lengths[pair]
                np.testing.assert_array_equal(
                    actual[name][index][segments > 0], side.store[int(pair)][: segments.sum()]
                )
    assert len(shapes) <= 6 and all(a <= 60 and b <= 50 for a, b in shapes)
    assert padded < 1.6 * store.stats["source_tokens"]
    wide = PairRows(store, pad_to_max_length=True)
    assert wide.width(np.array([0])) == (60, 50)


@pytest.mark.slow
def test_rows_of_equal_length_keep_the_order_of_the_data(tokenized, marian):
    from datasets import Dataset

    data = Dataset.from_dict({"source": ["en lov"] * 9, "target": ["for alle"] * 9})
    rows = PairRows(tokenized(data=data))
    assert rows.order.tolist() == list(range(9))
