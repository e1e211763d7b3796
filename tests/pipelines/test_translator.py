"""Batched translation equals the translation of each text alone, in the order of the texts."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest

import hfseq
from hfseq.errors import UsageError
from hfseq.pipelines.generation import Translation
from hfseq.pipelines.lines import BadLine
from tests.support.tiers import first
from tests.support.translators import (
    CharacterTokenizer,
    EchoModel,
    echo,
    save_tiny_t5,
    sentences,
    texts_of,
)

#: All but one have the same width, since each width requires a compilation.
TEXTS = [*sentences(17, longest=4), "", "the house of the laws and the trees"]
SEARCH = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 15}
GREEDY = {"num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 15}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-t5")
    save_tiny_t5(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(folder):
    translate = hfseq.pipeline("translation", str(folder))
    return translate.model, translate.tokenizer


def translation(text: str, score: float | None = None, ended: bool = True) -> dict:
    """Returns an output with details, without the number of tokens."""
    scores = {} if score is None else {"score": score}
    return {"translation_text": text, "ended": ended, **scores}


def without_counts(outputs):
    """Removes the number of tokens from outputs."""
    if isinstance(outputs, list):
        return [without_counts(item) for item in outputs]
    return {name: value for name, value in outputs.items() if name != "num_tokens"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, SEARCH], ids=["greedy", "beams"])
def test_translations_match_generate_on_single_texts(tiny, options):
    model, tokenizer = tiny
    texts = TEXTS if options is GREEDY else TEXTS[:-1]
    translate = Translation(model, tokenizer, batch_size=4, return_details=True, **options)
    actual = [answer.output for answer in translate.stream(texts)]
    ended = 0
    for text, outputs in zip(texts, actual, strict=True):
        if not text:
            assert [item["translation_text"] for item in outputs] == [""] * len(outputs)
            continue
        inputs = tokenizer([text], return_tensors="np")
        output = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], **options
        )
        alone = tokenizer.batch_decode(np.asarray(output.sequences), skip_special_tokens=True)
        assert [item["translation_text"] for item in outputs] == alone
        ended += outputs[0]["ended"]
        if options is SEARCH:
            assert np.allclose([item["score"] for item in outputs], output.scores, atol=1e-5)
    assert 0 < ended < 17  # so some were cut off, and others were not
    assert len({outputs[0]["translation_text"] for outputs in actual}) > 9


@pytest.mark.parametrize("options", first([GREEDY, SEARCH], SEARCH))
def test_translations_are_those_of_pytorch(folder, tiny, options):
    torch = pytest.importorskip("torch")
    from transformers import T5ForConditionalGeneration

    theirs = T5ForConditionalGeneration.from_pretrained(folder)
    model, tokenizer = tiny
    texts = [text for text in TEXTS[:-1] if text]
    with torch.no_grad():
        tokens = theirs.generate(**tokenizer(texts, return_tensors="pt", padding=True), **options)
    expected = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    answers = Translation(model, tokenizer, batch_size=4, **options).stream(texts)
    assert [item["translation_text"] for each in answers for item in each.output] == expected


def test_explicit_parameters_are_used_on_their_devices(folder, tiny):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from hfseq import FlaxAutoModelForSeq2SeqLM

    model, tokenizer = tiny
    texts = TEXTS[:4]
    expected = texts_of(Translation(model, tokenizer, batch_size=4, **GREEDY)(texts))
    empty, params = FlaxAutoModelForSeq2SeqLM.from_pretrained(folder, _do_init=False)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))

    def place(leaf):
        spec = PartitionSpec("fsdp") if leaf.shape[0] % 2 == 0 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    options = {"batch_size": 4, **GREEDY}
    spread = Translation(empty, tokenizer, params=jax.tree.map(place, params), **options)
    assert texts_of(spread(texts)) == expected
    halved = jax.tree.map(lambda leaf: np.asarray(leaf) / 2, params)
    assert texts_of(Translation(model, tokenizer, params=halved, **options)(texts)) != expected


def test_lengths_share_compiled_programs():
    model = EchoModel(positions=64)
    translator = Translation(model, CharacterTokenizer(), batch_size=16)
    rng = np.random.default_rng(0)
    texts = ["x" * int(length) for length in rng.integers(1, 60, 500)]
    assert texts_of(translator(texts)) == [text.upper() for text in texts]
    translator(texts[::-1])
    shapes = {(call["shape"], call["max_length"]) for call in model.calls}
    # For each width one limit of new tokens, and full batches or rests of few sizes.
    assert {shape[1] for shape, _ in shapes} == {8, 12, 16, 24, 32, 48, 64}
    assert {shape[0] for shape, _ in shapes} <= {1, 4, 16}
    assert len({(shape[1], length) for shape, length in shapes}) == 7
    assert len(model.calls) < 2 * 500 / 16 * 1.2


def test_batches_group_by_length_and_keep_the_order():
    translator = echo(batch_size=4)
    texts = ["a" * 40, "b", "c" * 39, "", "d", "e" * 41, "f", " \t", "g" * 38, "h"]
    assert texts_of(translator(texts)) == [text.strip().upper() for text in texts]
    assert [call["shape"] for call in translator.model.calls] == [(4, 48), (4, 8)]


def test_long_text_is_batched_separately():
    translator = echo(batch_size=4)
    translator(["a" * 5, "b" * 100, "c" * 6, "d" * 20])
    assert [call["shape"] for call in translator.model.calls] == [(1, 128), (1, 24), (4, 8)]


def test_the_limit_of_new_tokens_follows_the_source_and_the_model():
    translator = echo(positions=40)
    translator(["a" * 3])
    translator(["a" * 30])
    translator.model.generation_config.max_length = 21
    translator(["a" * 3])
    (cut,) = without_counts(translator(["a" * 30]))
    assert [call["max_length"] for call in translator.model.calls] == [32, 40, 21, 21]
    assert cut == translation("A" * 20, 0.0, ended=False)


def test_texts_without_words_do_not_reach_the_model():
    translator = echo()
    assert texts_of(translator(["", "  ", "\u200b"])) == ["", "", ""]
    assert translator([]) == [] and translator.model.calls == []


def test_n_best_have_falling_scores_and_blank_texts_as_many():
    actual = without_counts(echo(num_beams=3, num_return_sequences=2)(["ab", ""]))
    assert actual == [[translation("AB", 0.0), translation("AB'", -1.0)], [translation("")] * 2]


def test_one_text_that_fails_costs_no_other():
    translator = echo(batch_size=8)
    texts = [f"text {number}" for number in range(20)]
    texts[7] = "a $ sign"
    actual = list(translator.stream(texts))
    assert actual[7].error == "the model failed: a dollar" and actual[7].output is None
    others = [text for text in texts if "$" not in text]
    assert texts_of(actual[:7] + actual[8:]) == [text.upper() for text in others]
    assert {answer.error for answer in actual[:7] + actual[8:]} == {None}
    with pytest.raises(UsageError, match="input 8: the model failed: a dollar"):
        translator(texts)


def test_error_on_every_text_is_raised():
    with pytest.raises(FloatingPointError, match="a dollar"):
        list(echo().stream(["$"] * 5))
    assert [answer.error for answer in echo().stream(["$"])] == ["the model failed: a dollar"]


def test_a_long_text_is_truncated_with_a_warning(caplog):
    translator = echo(max_source_length=11)
    (short, long) = translator.stream(["a" * 10, "b" * 11])
    assert not short.warnings
    assert long.warnings == ["12 tokens exceed the limit of 11: truncated"]
    assert texts_of([short, long]) == ["A" * 10, "B" * 10]
    with caplog.at_level(logging.WARNING, "hfseq"):
        translator(["b" * 11])
    assert "input 1: 12 tokens exceed the limit of 11" in caplog.text


def test_long_text_is_split_at_sentences_and_joined():
    translator = echo(max_source_length=20, truncation="split")
    text = (
        "One is here. Two, as it is, came late. Threefourfivesixseveneight 日本語です。そうです。"
    )
    (line,) = translator.stream([text])
    (joined,) = texts_of([line])
    assert joined.replace(" ", "") == text.upper().replace(" ", "")
    assert joined.startswith("ONE IS HERE. TWO, AS IT IS, CAME LATE. ")
    assert line.warnings[0].endswith("split into 7 parts")
    assert max(call["shape"][1] for call in translator.model.calls) <= 24


def test_the_scores_of_a_split_text_are_averaged():
    translator = echo(max_source_length=8, truncation="split", num_beams=2, num_return_sequences=2)
    ((best, second),) = without_counts(translator(["abc def. ghi."]))
    assert best == translation("ABC DEF. GHI.", 0.0)
    assert second == translation("ABC' DEF.' GHI.'", -1.0)


def test_a_long_text_can_be_an_error():
    (line,) = echo(max_source_length=5, truncation=False).stream(["abcdef"])
    assert line.error.startswith("7 tokens exceed the limit of 5") and line.output is None


def test_prefix_is_added_to_non_blank_texts():
    assert texts_of(echo(source_prefix="to x: ")(["a", ""])) == ["TO X: A", ""]


def test_languages_reach_the_tokenizer_and_the_first_token():
    class Multilingual(CharacterTokenizer):
        src_lang = "en_XX"
        lang_code_to_id: ClassVar = {"en_XX": 4, "fr_XX": 5, "de_DE": 6}

        def __call__(self, texts, **options):
            return super().__call__([f"{self.src_lang}: {text}" for text in texts], **options)

    translate = Translation(
        EchoModel(), Multilingual(), "translation", src_lang="de_DE", tgt_lang="fr_XX"
    )
    assert translate("ja") == [{"translation_text": "DE_DE: JA"}]
    assert translate.model.calls[-1]["forced_bos_token_id"] == 5


def test_the_position_table_limits_the_source():
    (line,) = echo(positions=16, max_source_length=100).stream(["a" * 40])
    assert line.warnings == ["41 tokens exceed the limit of 16: truncated"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"truncation": "cut"}, "truncation must be False, True or 'split', not 'cut'"),
        ({"max_source_length": 0}, "max_source_length must be at least 1, not 0"),
    ],
)
def test_invalid_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        echo(**options)(["a"])


def test_options_of_generate_are_handed_on():
    translator = echo(num_beams=2, length_penalty=0.6, early_stopping=None)
    translator(["a"])
    (call,) = translator.model.calls
    assert call["length_penalty"] == 0.6 and call["num_beams"] == 2
    assert call["compact_finished"] and "early_stopping" not in call


# -- streams


def test_stream_flushes_when_the_input_pauses():
    go_on = threading.Event()

    def lines():
        yield "first"
        yield "second"
        assert go_on.wait(60)
        yield "third"

    stream = echo().stream(lines(), pause=0.05)
    assert texts_of([next(stream), next(stream)]) == ["FIRST", "SECOND"]
    assert not go_on.is_set()
    go_on.set()
    (last,) = stream
    assert texts_of([last]) == ["THIRD"]


def test_a_stream_does_not_wait_for_a_pause_when_a_batch_is_full():
    go_on = threading.Event()

    def lines():
        yield from ["again"] * 4
        go_on.wait()  # for ever, where a full batch waited for the pause

    stream = echo(batch_size=4).stream(lines(), pause=1e6)
    assert texts_of(next(stream) for _ in range(4)) == ["AGAIN"] * 4
    go_on.set()
    stream.close()


@pytest.mark.parametrize("pause", [None, 0.05])
def test_the_order_of_a_stream_is_that_of_its_lines(pause):
    texts = sentences(70)
    actual = list(echo(batch_size=2).stream(iter(texts), pause=pause))
    assert texts_of(actual) == [text.upper() for text in texts]


@pytest.mark.parametrize("pause", [None, 0.05])
def test_lines_before_an_error_of_the_input_are_translated_first(pause):
    def lines():
        yield from ("a", "b")
        raise OSError("the disk is gone")

    actual = []
    with pytest.raises(OSError, match="the disk is gone"):
        for line in echo().stream(lines(), pause=pause):
            actual += texts_of([line])
    assert actual == ["A", "B"]


def test_leaving_a_stream_ends_its_thread():
    def endless():
        while True:
            yield "x"

    previous = set(threading.enumerate())
    stream = echo(batch_size=1).stream(endless(), pause=0.05)
    next(stream)
    (reader,) = set(threading.enumerate()) - previous
    stream.close()
    reader.join(60)
    assert not reader.is_alive()


@pytest.mark.slow
def test_lines_that_could_not_be_read_are_errors_or_warnings():
    lines = [BadLine("a\ufffd", "invalid"), BadLine("b", "odd", usable=True), "c"]
    first, second, third = echo().stream(lines)
    assert (first.error, first.output) == ("invalid", None)
    assert texts_of([second, third]) == ["B", "C"] and not third.error
