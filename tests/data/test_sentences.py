"""Sentence ends from tokens alone: several languages, several kinds of vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.data.tokenizers import train_tokenizer
from hfseq.objectives.denoising import build_sentence_tables

# '|' marks the expected ends.
MARKED = {
    "norwegian": "Loven gjelder fra 1. januar.| Hvem leser den?| Alle, f.eks. du!| Slutt.",
    "numbers": "Prisen er 3.50 kroner.| Den var 2.75.| Ja",
    "quotation": 'Han sa: "Kom hit!"| Hun kom.| «Nei.»| (Så gikk de.)| "Hvorfor?"| Ingen vet.',
    "ellipsis": "Og så …| Ingenting.| Hva?!| Nei.",
    "german": "Das Gesetz gilt z. b. hier.| Übrigens auch dort.| Ärger gab es nicht.",
    "greek": "Έλα εδώ.| Πού πας;",
}


def pieces(marked):
    return [piece + " " for piece in marked.split("| ")]


def found(tokenizer, text):
    ids = np.array([tokenizer(text, add_special_tokens=False)["input_ids"]])
    ends = build_sentence_tables(tokenizer).sentence_ends(ids, np.ones_like(ids, bool))[0]
    borders = [0, *(np.flatnonzero(ends) + 1).tolist(), ids.shape[1]]
    parts = [tokenizer.decode(ids[0, a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    return [part.strip() for part in parts]


@pytest.fixture(scope="module", params=["roberta", "t5"])
def tokenizer(request):
    texts = [text.replace("|", "") for text in MARKED.values()] * 3
    return train_tokenizer(texts, request.param, vocab_size=460, min_frequency=1)


@pytest.mark.parametrize("name", MARKED)
def test_sentence_ends_are_detected(tokenizer, name):
    text = MARKED[name].replace("|", "")
    # The normalizer of T5's vocabularies replaces an ellipsis by three periods.
    parts = [part.replace("...", "…") for part in found(tokenizer, text)]
    assert parts == [piece.strip() for piece in pieces(MARKED[name])]


@pytest.mark.parametrize(
    "tokenizer", ["roberta"], indirect=True
)  # the other one has no line breaks
def test_a_line_break_after_a_stop_belongs_to_the_sentence_before(tokenizer):
    assert found(tokenizer, "Slutt.\nLoven gjelder\nHvem?\n\nAlle") == [
        "Slutt.",
        "Loven gjelder\nHvem?",
        "Alle",
    ]


def test_lower_case_text_has_sentences_too():
    texts = ["loven gjelder. hvem leser den? alle!"] * 5
    tokenizer = train_tokenizer(texts, "bert", vocab_size=120, lowercase=True, min_frequency=1)
    assert found(tokenizer, texts[0]) == ["loven gjelder.", "hvem leser den?", "alle!"]


def test_ideographic_stops_need_no_space():
    text = "今日は雨です。明日は晴れます。はい。"
    tokenizer = train_tokenizer([text] * 5, "t5", vocab_size=160)
    assert [part.replace(" ", "") for part in found(tokenizer, text)] == [
        "今日は雨です。",
        "明日は晴れます。",
        "はい。",
    ]


def test_neither_padding_nor_special_tokens_are_sentences(tokenizer):
    ids = np.array([tokenizer("Slutt. Alle.")["input_ids"]])
    text = ~np.isin(ids, tokenizer.all_special_ids)
    ends = build_sentence_tables(tokenizer).sentence_ends(ids, text)
    assert ends.sum() == 1 and not ends[~text].any()
    assert not build_sentence_tables(tokenizer).sentence_ends(ids, np.zeros_like(text)).any()


def test_a_real_vocabulary_is_read(shared_data):
    from transformers import PreTrainedTokenizerFast

    file = shared_data / "tokenizers" / "roberta-base" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    text = 'He came. "Why?" she asked. In 3.5 years, e.g. soon, it\'s over. The end...'
    assert found(tokenizer, text) == [
        "He came.",
        '"Why?" she asked.',
        "In 3.5 years, e.g. soon, it's over.",
        "The end...",
    ]
