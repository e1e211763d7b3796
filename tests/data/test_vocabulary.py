import json
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq.data.tokenizers import train_joint_tokenizer
from hfseq.errors import UsageError

ROOT = Path(__file__).parents[2]
ALGORITHMS = ("unigram", "bpe")
SIZE = {"unigram": 200, "bpe": 400}
SENTENCES = [
    f"{subject} {verb} {when}, {how}"
    for subject in ("Tom", "Mary's cat", "¿María", "El niño", "Åse «Ø»")
    for verb in ("comes back", "llegó", "no viene", "won't eat 1,234.50 €")
    for when in ("at 5:30", "mañana", "i går…", "on ½ day")
    for how in ("alone!", "¡hoy!", "(maybe) – or not?", 'he said: "no".')
]


def batches(size=10):
    for start in range(0, len(SENTENCES), size):
        yield SENTENCES[start : start + size]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    return {a: train_joint_tokenizer(batches(), a, SIZE[a], folder / a) for a in ALGORITHMS}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_special_tokens_have_the_first_ids_and_a_text_ends_with_one(trained, algorithm):
    tokenizer = trained[algorithm]
    assert tokenizer.convert_ids_to_tokens(range(4)) == ["<pad>", "<s>", "</s>", "<unk>"]
    roles = (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    assert roles == ("<pad>", "<s>", "</s>", "<unk>")
    encoded = tokenizer("Tom comes back")
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"][-1] == 2 and min(encoded["input_ids"][:-1]) > 3
    assert len(tokenizer) == max(tokenizer.get_vocab().values()) + 1 <= SIZE[algorithm]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ordinary_text_comes_back_as_it_was_written(trained, algorithm):
    tokenizer = trained[algorithm]
    rows = tokenizer(SENTENCES)["input_ids"]
    assert tokenizer.batch_decode(rows, skip_special_tokens=True) == SENTENCES


def test_bytes_know_every_character_and_pieces_those_of_the_texts(trained):
    text = "Ω 漢字 𝄞"
    byte_level = trained["bpe"]
    assert byte_level.decode(byte_level(text)["input_ids"], skip_special_tokens=True) == text
    assert trained["unigram"].unk_token_id in trained["unigram"](text)["input_ids"]


def test_only_pruned_characters_have_the_lowest_score(trained):
    vocabulary = json.loads(trained["unigram"].backend_tokenizer.to_str())["model"]["vocab"][4:]
    characters = {piece: score for piece, score in vocabulary if len(piece) == 1}
    lowest = min(score for _, score in vocabulary)
    assert min(characters.values()) == lowest < characters["e"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_word_has_the_same_piece_at_any_position(trained, algorithm):
    tokenizer = trained[algorithm]
    pieces = tokenizer.tokenize("Tom")
    assert pieces == tokenizer.tokenize("cat Tom")[-len(pieces) :]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model_type", ["pegasus", "marian"])
def test_a_model_in_the_same_directory_does_not_change_it(tmp_path, trained, algorithm, model_type):
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.for_model(
        model_type, vocab_size=SIZE[algorithm], pad_token_id=0, decoder_start_token_id=0
    ).save_pretrained(tmp_path)
    saved = train_joint_tokenizer(batches(), algorithm, SIZE[algorithm], tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast and loaded.get_vocab() == trained[algorithm].get_vocab()
    sample = "¿María no viene mañana, (maybe) – or not?"
    assert loaded(sample)["input_ids"] == saved(sample)["input_ids"]
    assert loaded.decode(loaded(sample)["input_ids"], skip_special_tokens=True) == sample
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type


TRAIN = """
import hashlib
from hfseq.data.tokenizers import train_joint_tokenizer
from tests.data.test_vocabulary import SIZE, batches
for algorithm, size in SIZE.items():
    tokenizer = train_joint_tokenizer(batches(), algorithm, size)
    print(hashlib.sha256(tokenizer._tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.slow
def test_equal_texts_give_an_equal_vocabulary_in_another_process(trained):
    """The trainers store words in hash tables whose order differs between processes."""
    run = [sys.executable, "-c", TRAIN]
    outputs = {
        subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1 and len(outputs.pop().split()) == 2


def test_only_the_first_characters_are_read():
    read = []

    def texts():
        for batch in batches(2):
            read.extend(batch)
            yield batch

    limit = sum(map(len, SENTENCES[:20])) + 3
    tokenizer = train_joint_tokenizer(texts(), "bpe", 300, max_corpus_chars=limit)
    assert len(read) == 22  # the list that reaches the limit is the last one
    visited = train_joint_tokenizer([SENTENCES[:20], [SENTENCES[20][:3]]], "bpe", 300)
    assert tokenizer.get_vocab() == visited.get_vocab()


def test_both_languages_share_the_vocabulary():
    english, spanish = ["the white house stands"] * 50, ["la casa blanca está aquí"] * 50
    tokenizer = train_joint_tokenizer(iter([english, spanish]), "bpe", 320)
    for text in (english[0], spanish[0]):
        assert len(tokenizer.tokenize(text)) <= len(text) // 2


def test_untrainable_vocabulary_is_rejected():
    with pytest.raises(
        UsageError, match="--tokenizer_algorithm wordpiece: expected one of unigram, bpe"
    ):
        train_joint_tokenizer(batches(), "wordpiece", 100)
    with pytest.raises(UsageError, match="--vocab_size 100 is too small"):
        train_joint_tokenizer(batches(), "bpe", 100)
    with pytest.raises(UsageError, match="cannot train a .* vocabulary of 20"):
        train_joint_tokenizer(batches(), "unigram", 20)
