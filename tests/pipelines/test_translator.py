"""Batched translation equals the translation of each text alone, in the order of the texts."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.pipelines.lines import BadLine
from hfseq.pipelines.translation import Hypothesis, Translator
from tests.support.translators import CharacterTokenizer, EchoModel, echo, save_tiny_t5, sentences

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
    translator = Translator.from_pretrained(str(folder))
    return translator.model, translator.tokenizer


def texts_of(actual: list[list[Hypothesis]]) -> list[list[str]]:
    return [[item.text for item in hypotheses] for hypotheses in actual]


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, SEARCH], ids=["greedy", "beams"])
def test_translations_match_generate_on_single_texts(tiny, options):
    model, tokenizer = tiny
    texts = TEXTS if options is GREEDY else TEXTS[:-1]
    actual = Translator(model, tokenizer, batch_size=4, **options)(texts)
    ended = 0
    for text, hypotheses in zip(texts, actual, strict=True):
        if not text:
            assert hypotheses == [Hypothesis("")] * len(hypotheses)
            continue
        inputs = tokenizer([text], return_tensors="np")
        output = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], **options
        )
        alone = tokenizer.batch_decode(np.asarray(output.sequences), skip_special_tokens=True)
        assert [item.text for item in hypotheses] == alone
        ended += hypotheses[0].ended
        if options is SEARCH:
            assert np.allclose([item.score for item in hypotheses], output.scores, atol=1e-5)
    assert 0 < ended < 17  # so some were cut off, and others were not
    assert len({hypotheses[0].text for hypotheses in actual}) > 9


@pytest.mark.parametrize("options", [GREEDY, SEARCH], ids=["greedy", "beams"])
def test_translations_are_those_of_pytorch(folder, tiny, options):
    torch = pytest.importorskip("torch")
    from transformers import T5ForConditionalGeneration

    theirs = T5ForConditionalGeneration.from_pretrained(folder)
    model, tokenizer = tiny
    texts = [text for text in TEXTS[:-1] if text]
    with torch.no_grad():
        tokens = theirs.generate(**tokenizer(texts, return_tensors="pt", padding=True), **options)
    expected = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    actual = Translator(model, tokenizer, batch_size=4, **options)(texts)
    assert [item.text for hypotheses in actual for item in hypotheses] == expected


def test_explicit_parameters_are_used_on_their_devices(folder, tiny):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from hfseq import FlaxAutoModelForSeq2SeqLM

    model, tokenizer = tiny
    translator = Translator(model, tokenizer, batch_size=4, **GREEDY)
    texts = TEXTS[:4]
    expected = texts_of(translator(texts))
    empty, params = FlaxAutoModelForSeq2SeqLM.from_pretrained(folder, _do_init=False)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))

    def place(leaf):
        spec = PartitionSpec("fsdp") if leaf.shape[0] % 2 == 0 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    spread = Translator(empty, tokenizer, batch_size=4, **GREEDY)
    assert texts_of(spread(texts, params=jax.tree.map(place, params))) == expected
    halved = jax.tree.map(lambda leaf: np.asarray(leaf) / 2, params)
    assert texts_of(translator(texts, params=halved)) != expected


def test_lengths_share_compiled_programs():
    model = EchoModel(positions=64)
    translator = Translator(model, CharacterTokenizer(), batch_size=16)
    rng = np.random.default_rng(0)
    texts = ["x" * int(length) for length in rng.integers(1, 60, 500)]
    assert texts_of(translator(texts)) == [[text.upper()] for text in texts]
    translator(texts[::-1])
    shapes = {(call["shape"], call["max_length"]) for call in model.calls}
    # For each width one limit of new tokens, and full batches or rests of few sizes.
    assert {shape[1] for shape, _ in shapes} == {16, 24, 32, 48, 64}
    assert {shape[0] for shape, _ in shapes} <= {1, 4, 16}
    assert len({(shape[1], length) for shape, length in shapes}) == 5
    assert len(model.calls) < 2 * 500 / 16 * 1.2


def test_batches_group_by_length_and_keep_the_order():
    translator = echo(batch_size=4)
    texts = ["a" * 40, "b", "c" * 39, "", "d", "e" * 41, "f", " \t", "g" * 38, "h"]
    assert texts_of(translator(texts)) == [[text.strip().upper()] for text in texts]
    assert [call["shape"] for call in translator.model.calls] == [(4, 48), (4, 16)]


def test_long_text_is_batched_separately():
    translator = echo(batch_size=4)
    translator(["a" * 5, "b" * 100, "c" * 6, "d" * 20])
    assert [call["shape"] for call in translator.model.calls] == [(1, 128), (4, 24)]


def test_the_limit_of_new_tokens_follows_the_source_and_the_model():
    translator = echo(positions=40)
    translator(["a" * 3])
    translator(["a" * 30])
    translator.model.generation_config.max_length = 20
    translator(["a" * 3])
    (cut,) = translator(["a" * 30])
    assert [call["max_length"] for call in translator.model.calls] == [48 - 8, 40, 20, 20]
    assert cut == [Hypothesis("A" * 19, cut[0].score, ended=False)]


def test_texts_without_words_do_not_reach_the_model():
    translator = echo()
    assert texts_of(translator(["", "  ", "\u200b"])) == [[""], [""], [""]]
    assert translator([]) == [] and translator.model.calls == []


def test_a_newline_in_a_translation_does_not_make_two_lines():
    assert texts_of(echo()(["one\rtwo\nthree"])) == [["ONE TWO THREE"]]


def test_n_best_have_falling_scores_and_blank_texts_as_many():
    actual = echo(num_beams=3, num_return_sequences=2)(["ab", ""])
    assert actual == [[Hypothesis("AB", 0.0), Hypothesis("AB'", -1.0)], [Hypothesis("")] * 2]


def test_one_text_that_fails_costs_no_other():
    translator = echo(batch_size=8)
    texts = [f"text {number}" for number in range(20)]
    texts[7] = "a $ sign"
    actual = translator.translate(texts, first_line=11)
    assert [line.line for line in actual] == list(range(11, 31))
    assert actual[7].error == "the model failed: a dollar" and not actual[7].hypotheses
    assert all(
        line.hypotheses[0].text == text.upper() and line.error is None
        for line, text in zip(actual, texts, strict=True)
        if "$" not in text
    )
    with pytest.raises(UsageError, match="text 8: the model failed: a dollar"):
        translator(texts)


def test_error_on_every_text_is_raised():
    with pytest.raises(FloatingPointError, match="a dollar"):
        echo().translate(["$"] * 5)
    assert [line.error for line in echo().translate(["$"])] == ["the model failed: a dollar"]


def test_a_long_text_is_truncated_with_a_warning(messages):
    translator = echo(max_source_length=11)
    (short, long) = translator.translate(["a" * 10, "b" * 11])
    assert not short.warnings
    assert long.warnings == ["12 tokens exceed the limit of 11: truncated"]
    assert [line.hypotheses[0].text for line in (short, long)] == ["A" * 10, "B" * 10]
    translator(["b" * 11])
    assert "1 of 1 texts are too long: text 1: 12 tokens" in messages()


def test_long_text_is_split_at_sentences_and_joined():
    translator = echo(max_source_length=20, long_lines="split")
    text = (
        "One is here. Two, as it is, came late. Threefourfivesixseveneight 日本語です。そうです。"
    )
    (line,) = translator.translate([text])
    assert line.hypotheses[0].text.replace(" ", "") == text.upper().replace(" ", "")
    assert line.hypotheses[0].text.startswith("ONE IS HERE. TWO, AS IT IS, CAME LATE. ")
    assert line.warnings[0].endswith("split into 7 parts")
    assert max(call["shape"][1] for call in translator.model.calls) <= 24


def test_the_scores_of_a_split_text_are_averaged():
    translator = echo(max_source_length=8, long_lines="split", num_beams=2, num_return_sequences=2)
    ((best, second),) = translator(["abc def. ghi."])
    assert best == Hypothesis("ABC DEF. GHI.", 0.0)
    assert second == Hypothesis("ABC' DEF.' GHI.'", -1.0)


def test_a_long_text_can_be_an_error():
    (line,) = echo(max_source_length=5, long_lines="error").translate(["abcdef"])
    assert line.error.startswith("7 tokens exceed the limit of 5") and not line.hypotheses


def test_prefix_is_added_to_non_blank_texts():
    assert texts_of(echo(source_prefix="to x: ")(["a", ""])) == [["TO X: A"], [""]]


def test_the_position_table_limits_the_source():
    (line,) = echo(positions=16, max_source_length=100).translate(["a" * 40])
    assert line.warnings == ["41 tokens exceed the limit of 16: truncated"]


def test_wrong_options_are_named_together():
    with pytest.raises(UsageError) as caught:
        echo(
            positions=16,
            num_beams=2,
            num_return_sequences=3,
            batch_size=0,
            max_new_tokens=17,
            long_lines="cut",
        )
    for part in (
        "batch_size must be at least 1, not 0",
        "num_return_sequences 3",
        "at most 15",
        "long_lines cut",
    ):
        assert part in str(caught.value)


def test_options_of_generate_are_handed_on():
    translator = echo(num_beams=2, length_penalty=0.6, early_stopping=None)
    translator(["a"])
    (call,) = translator.model.calls
    assert call["length_penalty"] == 0.6 and call["num_beams"] == 2 and not call["do_sample"]
    assert call["compact_finished"]
    assert "early_stopping" not in call and call["max_new_tokens"] is None


# -- streams


def test_stream_flushes_when_the_input_pauses():
    go_on = threading.Event()

    def lines():
        yield "first"
        yield "second"
        assert go_on.wait(60)
        yield "third"

    stream = echo().stream(lines(), pause=0.05)
    assert [next(stream).hypotheses[0].text for _ in range(2)] == ["FIRST", "SECOND"]
    assert not go_on.is_set()
    go_on.set()
    (last,) = stream
    assert last.line == 3 and last.hypotheses[0].text == "THIRD"


def test_a_stream_does_not_wait_for_a_pause_when_a_batch_is_full():
    go_on = threading.Event()

    def lines():
        yield from ["again"] * 4
        go_on.wait()  # for ever, where a full batch waited for the pause

    stream = echo(batch_size=4).stream(lines(), pause=1e6)
    assert [next(stream).line for _ in range(4)] == [1, 2, 3, 4]
    go_on.set()
    stream.close()


@pytest.mark.parametrize("pause", [None, 0.05])
def test_the_order_of_a_stream_is_that_of_its_lines(pause):
    texts = sentences(70)
    actual = list(echo(batch_size=2).stream(iter(texts), pause=pause))
    assert [(line.line, line.source) for line in actual] == list(enumerate(texts, 1))
    assert [line.hypotheses[0].text for line in actual] == [text.upper() for text in texts]


@pytest.mark.parametrize("pause", [None, 0.05])
def test_lines_before_an_error_of_the_input_are_translated_first(pause):
    def lines():
        yield from ("a", "b")
        raise OSError("the disk is gone")

    actual = []
    with pytest.raises(OSError, match="the disk is gone"):
        for line in echo().stream(lines(), pause=pause):
            actual.append(line.hypotheses[0].text)
    assert actual == ["A", "B"]


def test_leaving_a_stream_ends_its_thread():
    def endless():
        while True:
            yield "x"

    previous = set(threading.enumerate())
    stream = echo(batch_size=1).stream(endless())
    next(stream)
    (reader,) = set(threading.enumerate()) - previous
    stream.close()
    reader.join(60)
    assert not reader.is_alive()


@pytest.mark.slow
def test_lines_that_could_not_be_read_are_errors_or_warnings():
    lines = [BadLine("a\ufffd", "invalid"), BadLine("b", "odd", usable=True), "c"]
    first, second, third = echo().stream(lines)
    assert (first.error, first.hypotheses) == ("invalid", [])
    assert (second.warnings, second.hypotheses[0].text) == (["odd"], "B")
    assert not third.error and not third.warnings
