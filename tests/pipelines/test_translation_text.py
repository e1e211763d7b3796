"""Marian's tokenizer: source and target vocabularies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hfseq.pipelines.base import Row
from hfseq.pipelines.generation import Translation
from hfseq.pipelines.translation import SourceEncoder
from tests.support.translators import EOS, PAD, CharacterTokenizer, EchoModel, echo, sentences


def test_outputs_end_at_the_end_token_or_at_the_limit():
    translator = echo(num_beams=1)
    end = [EOS]

    def ended(*ids: int) -> tuple[int, bool]:
        details = translator.details(np.array(ids), end, {}, 0)
        return details["num_tokens"], details["ended"]

    assert ended(5, 6, EOS, PAD) == (2, True)
    assert ended(5, 6, 7, EOS) == (3, False)  # the end may have been forced
    assert ended(5, 6, 7, 8) == (4, False)
    assert ended(EOS, 5, 6) == (0, True)


def test_target_vocabulary_decodes_the_output():
    class TwoVocabularies(CharacterTokenizer):
        spm_target = object()

        def decode(self, row, skip_special_tokens=False, use_source_tokenizer=True):
            return f"{super().decode(row)} {use_source_tokenizer}"

    translate = Translation(EchoModel(), TwoVocabularies())
    assert translate("a")[0]["translation_text"] == "A False"


@pytest.mark.parametrize(
    ("positions", "own_value", "options", "limit"),
    [
        (64, 512, None, 64),
        (64, 512, 100, 64),
        (64, 512, 10, 10),
        (None, 512, None, 512),
        (None, 512, 2000, 2000),
        (None, int(1e30), None, 1024),
    ],
)
def test_the_limit_of_the_source_is_the_smallest_that_binds(positions, own_value, options, limit):
    tokenizer = CharacterTokenizer()
    tokenizer.model_max_length = own_value
    assert SourceEncoder(tokenizer, positions, options, truncation=True).limit == limit


@pytest.fixture
def marian(tmp_path) -> Path:
    """The tokenizer files of an opus-mt model, with one SentencePiece model per language."""
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("transformers")
    words = {"source": sentences(200), "target": [text[::-1] for text in sentences(200)]}
    pieces = {">>fra<<": None}
    for side, texts in words.items():
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_prefix=str(tmp_path / side),
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (tmp_path / f"{side}.model").rename(tmp_path / f"{side}.spm")
        model = sentencepiece.SentencePieceProcessor(str(tmp_path / f"{side}.spm"))
        pieces |= dict.fromkeys(model.id_to_piece(i) for i in range(3, len(model)))
    vocab = {piece: i for i, piece in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    return tmp_path


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sentencepiece's bindings
def test_marian_reads_the_source_and_writes_the_target(marian):
    from transformers import MarianTokenizer

    from hfseq.pipelines.translation import find_direction

    tokenizer = MarianTokenizer.from_pretrained(marian)
    source, target = "the cat is blue", "eulb si tac eht"
    tokenizer._switch_to_target_mode()  # as an error may leave it
    direction = find_direction(tokenizer, tokenizer, "m", target_lang="fra")
    encoder = SourceEncoder(tokenizer, 50, prefix=direction.source_prefix)
    (encoded,) = encoder([source])
    pieces = tokenizer.spm_source.encode(f" {source}", out_type=str)
    assert tokenizer.convert_ids_to_tokens(encoded.parts[0]) == [">>fra<<", *pieces, "</s>"]
    ids = tokenizer(text_target=target)["input_ids"]
    translate = Translation(EchoModel(), tokenizer)
    assert translate._decode(Row(), np.array(ids[:-1])) == target
