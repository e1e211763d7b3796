"""The tokenizer class of the T5 example: its recipe works, and AutoTokenizer returns it."""

from __future__ import annotations

import pytest

from hfseq.data.sentencepiece import SentencePieceUnigramTokenizer
from tests.data.samples import make_texts


@pytest.fixture(scope="module")
def trained():
    tokenizer = SentencePieceUnigramTokenizer(
        unk_token="<unk>", eos_token="</s>", pad_token="<pad>"
    )
    batches = (make_texts(50, seed=seed) for seed in range(4))
    tokenizer.train_from_iterator(iterator=batches, vocab_size=120, show_progress=False)
    return tokenizer


def test_ids_and_normalisation_are_those_of_the_example(trained):
    assert [trained.token_to_id(token) for token in ("<pad>", "</s>", "<unk>")] == [0, 1, 2]
    encoded = trained.encode("EN   Lov  2024!")
    assert encoded.tokens[-1] == "</s>" and trained.encode("☃").ids[-2:] == [2, 1]
    assert encoded.ids == trained.encode("en lov 2024!").ids
    assert trained.decode(trained.encode("en lov").ids) == "en lov"


def test_digits_and_punctuation_are_separate_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("lov 2024 2024, lov!\n" * 50)
    tokenizer = SentencePieceUnigramTokenizer()
    tokenizer.train(str(tmp_path / "a.txt"), vocab_size=40, show_progress=False)
    tokens = tokenizer.encode("2024,").tokens
    assert [token for token in tokens if token != "▁"] == ["2", "0", "2", "4", ",", "</s>"]


def test_auto_tokenizer_returns_it(trained, tmp_path):
    from transformers import AutoTokenizer, T5Config

    trained.save(str(tmp_path / "tokenizer.json"))
    T5Config(vocab_size=trained.get_vocab_size()).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == trained.get_vocab_size()
    for text in ("En LOV om alle", "2024, ☃!"):
        assert loaded(text)["input_ids"] == trained.encode(text).ids
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)


def test_another_name_is_just_a_file(trained, tmp_path):
    trained.save(str(tmp_path / "other.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]
