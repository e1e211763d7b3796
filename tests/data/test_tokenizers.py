import json
from types import SimpleNamespace

import numpy as np
import pytest

from hfseq import plugins
from hfseq.data.tokenizers import (
    check_vocabulary,
    special_ids,
    train_tokenizer,
    word_start_table,
)
from hfseq.errors import UsageError
from tests.data.samples import make_texts

TEXTS = make_texts(400, seed=2)
SIZE = 400
TWINS = ("roberta-prelayernorm", "mt5", "mbart", "blenderbot-small")  # same as a tested family
FAMILIES = {
    entry.name: entry.resolve()
    for entry in plugins.load().tokenizers.entries()
    if entry.name not in TWINS
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains every family and algorithm once: (tokenizer, directory)."""
    directory = tmp_path_factory.mktemp("tokenizers")
    return {
        (family, algorithm): (
            train_tokenizer(TEXTS, family, algorithm, SIZE, directory / f"{family}-{algorithm}"),
            directory / f"{family}-{algorithm}",
        )
        for family in FAMILIES
        for algorithm in ("bpe", "unigram", "wordpiece")
    }


EVERY = [
    (family, algorithm) for family in FAMILIES for algorithm in ("bpe", "unigram", "wordpiece")
]


@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_auto_tokenizer_reads_back_the_same_ids(trained, key):
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, directory = trained[key]
    config = AutoConfig.for_model(key[0], vocab_size=len(tokenizer))
    config.save_pretrained(directory)  # a config could select the class of the family
    loaded = AutoTokenizer.from_pretrained(directory)
    sample = f"en lov om å bygge {tokenizer.mask_token or ''} språkmodeller"
    assert loaded(sample)["input_ids"] == tokenizer(sample)["input_ids"]
    assert len(loaded) == len(tokenizer) == len(loaded.get_vocab()) <= SIZE
    assert max(loaded.get_vocab().values()) == len(loaded) - 1
    assert loaded.is_fast
    check_vocabulary(loaded, config)


@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_text_survives_a_round_trip(trained, key):
    tokenizer, _ = trained[key]
    text = "en lov om å bygge språkmodeller"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text


@pytest.mark.parametrize(
    ("family", "single", "pair"),
    [
        ("roberta", "<s> A </s>", "<s> A </s> </s> B </s>"),
        ("bart", "<s> A </s>", "<s> A </s> </s> B </s>"),
        ("bert", "[CLS] A [SEP]", "[CLS] A [SEP] B [SEP]"),
        ("t5", "A </s>", "A </s> B </s>"),
        ("marian", "A </s>", "A B </s>"),
        ("gpt2", "A", "A B"),
        ("xlm-roberta", "<s> A </s>", "<s> A </s> </s> B </s>"),
        ("xglm", "</s> A", "</s> A </s> </s> B"),
        ("blenderbot", "A </s>", "A </s> B </s>"),
    ],
)
def test_special_tokens_have_the_ids_of_the_family(trained, family, single, pair):
    tokenizer, _ = trained[family, FAMILIES[family].algorithm]

    def expected(template):
        parts = {"A": tokenizer("lov", add_special_tokens=False)["input_ids"]}
        parts["B"] = tokenizer("alle", add_special_tokens=False)["input_ids"]
        tokens = [parts.get(t) or [tokenizer.convert_tokens_to_ids(t)] for t in template.split()]
        return [i for token in tokens for i in token]

    assert tokenizer("lov")["input_ids"] == expected(single)
    assert tokenizer("lov", "alle")["input_ids"] == expected(pair)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_ids_are_those_of_the_family(trained, family):
    tokenizer, _ = trained[family, FAMILIES[family].algorithm]
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in tokenizer.get_vocab()}
    for i, token in enumerate(FAMILIES[family].first):
        assert ids[token] == i
    for i, token in enumerate(reversed(FAMILIES[family].last)):
        assert ids[token] == len(tokenizer) - 1 - i
    if family == "t5":
        assert ids["<extra_id_0>"] == len(tokenizer) - 1
        assert ids["<extra_id_99>"] == len(tokenizer) - 100
    if family in ("roberta", "bart"):
        assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (1, 4)


def test_the_mask_takes_the_space_before_it(trained):
    for family in ("roberta", "bart"):
        tokenizer, _ = trained[family, "bpe"]
        mask = tokenizer.mask_token_id
        ids = tokenizer("lov <mask> alle", add_special_tokens=False)["input_ids"]
        expected = tokenizer("lov", add_special_tokens=False)["input_ids"] + [mask]
        assert ids[: len(expected)] == expected


def test_lower_casing_and_normalisation_survive_saving(tmp_path):
    from transformers import AutoTokenizer

    for family in ("roberta", "t5", "bert"):
        kwargs = {"lowercase": True, "normalizer": "nfkc"}
        tokenizer = train_tokenizer(TEXTS, family, None, SIZE, tmp_path / family, **kwargs)
        loaded = AutoTokenizer.from_pretrained(tmp_path / family)
        assert loaded("ＬOV om")["input_ids"] == tokenizer("lov om")["input_ids"]


def test_only_bert_has_token_types(trained):
    bert, roberta = (trained[key][0] for key in (("bert", "wordpiece"), ("roberta", "bpe")))
    assert set(bert("lov", "alle")["token_type_ids"]) == {0, 1}
    assert "token_type_ids" not in roberta("lov")


def test_the_files_name_a_class_that_transformers_4_knows(trained):
    _, directory = trained["roberta", "bpe"]
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "backend" not in config


def test_impossible_wishes_are_usage_errors():
    with pytest.raises(UsageError, match="model type 'robberta'.*did you mean 'roberta'"):
        train_tokenizer(TEXTS, "robberta")
    with pytest.raises(
        UsageError, match="algorithm 'bbpe': expected one of bpe, unigram, wordpiece"
    ):
        train_tokenizer(TEXTS, "roberta", "bbpe")
    with pytest.raises(UsageError, match="--vocab_size 200 is too small.*261"):
        train_tokenizer(TEXTS, "roberta", vocab_size=200)
    with pytest.raises(UsageError, match="--vocab_size 100 is too small"):
        train_tokenizer(TEXTS, "t5", vocab_size=100)
    with pytest.raises(UsageError, match="--normalizer nfx"):
        train_tokenizer(TEXTS, "roberta", normalizer="nfx")


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer):
    largest = max(tokenizer.get_vocab().values())
    check_vocabulary(tokenizer, SimpleNamespace(vocab_size=largest + 1))
    with pytest.raises(UsageError, match=f"largest id is {largest}.*vocab_size is {largest};"):
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=largest))


@pytest.mark.parametrize("family", ["roberta", "t5", "bert"])
def test_a_directory_without_tokenizer_files_is_refused(tmp_path, family):
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.for_model(family)
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"{tmp_path}' has only special tokens"):
        check_vocabulary(AutoTokenizer.from_pretrained(tmp_path), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_ids_are_marked(trained, family):
    tokenizer, _ = trained[family, FAMILIES[family].algorithm]
    table = special_ids(tokenizer)
    spec = FAMILIES[family]
    expected = {tokenizer.convert_tokens_to_ids(token) for token in spec.first + spec.last}
    assert set(np.flatnonzero(table).tolist()) == expected
    assert table.shape == (len(tokenizer),) and special_ids(tokenizer, 512).shape == (512,)


@pytest.mark.parametrize("key", EVERY, ids="-".join)
def test_word_starts_are_read_off_the_vocabulary(trained, key):
    tokenizer, _ = trained[key]
    starts = word_start_table(tokenizer)
    ids = tokenizer(" alle språkmodeller leserskriver", add_special_tokens=False)["input_ids"]
    assert starts[ids].sum() == 3
    assert len(ids) > 3


def test_a_vocabulary_without_marks_has_no_words():
    plain = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    with pytest.raises(UsageError, match="--whole_word_masking"):
        word_start_table(plain)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("roberta-base", " internationalization of bookkeepers", 3),
        ("bert-base-uncased", "internationalization of bookkeepers", 3),
        ("t5-base", "internationalization of bookkeepers", 3),
    ],
)
def test_word_starts_of_published_tokenizers(shared_data, name, text, words):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert word_start_table(tokenizer)[ids].sum() == words < len(ids)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram", "wordpiece"])
def test_very_long_word_is_split_for_training(algorithm):
    # The training time is quadratic in the length of a word.
    full, parts = (
        train_tokenizer(texts, "roberta", algorithm, SIZE)
        for texts in (["a" * 200_000], [["a" * 10_000] * 20])
    )
    assert full.get_vocab() == parts.get_vocab()


def test_texts_are_cut_within_long_words_only():
    from hfseq.data.tokenizers import LONGEST_WORD, split_long_words

    n = LONGEST_WORD
    texts = ["en lov " * n, "a" * n, "b " + "a" * (2 * n + 1) + " c", "\n" * (n + 1)]
    assert list(split_long_words(texts[:2])) == [[texts[0]], [texts[1]]]
    assert list(split_long_words([texts])) == [
        [*texts[:2], "b " + "a" * n, "a" * n, "a c", "\n" * n, "\n"]
    ]


@pytest.mark.parametrize("longest", ["512", [512], None, True, float("nan"), -1])
def test_invalid_model_max_length_is_rejected(longest):
    tokenizer = SimpleNamespace(model_max_length=longest, name_or_path="mine")
    with pytest.raises(UsageError, match="'mine' has model_max_length .* is not a valid length"):
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=9))
