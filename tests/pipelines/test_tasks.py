"""Text pipelines compared with those of Transformers 5 and 4.57."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import transformers

import hfseq
from hfseq.errors import UsageError
from tests.support import models
from tests.support.task_models import MADE, TEXTS, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models with random weights and their tokenizers."""
    root = tmp_path_factory.mktemp("models")
    for name in MADE:
        make(root, name)
    return root


QUESTIONS = [
    {"question": "Where does Anna live?", "context": TEXTS[2]},
    {"question": "What rises?", "context": " ".join(TEXTS)},
]
#: Task, folder, input, options of the call. Those after the blank went with version 5.
CASES = [
    ("fill-mask", "masked", "The <mask> of the land.", {}),
    ("fill-mask", "masked", ["The <mask> of <mask> river.", "It was <mask>."], {"top_k": 3}),
    ("fill-mask", "masked", ["It <mask> Paris."], {"targets": [" river", " law"]}),
    ("text-classification", "classes", TEXTS[0], {}),
    ("text-classification", "classes", TEXTS, {}),
    ("sentiment-analysis", "classes", TEXTS[:2], {"top_k": None}),
    ("text-classification", "classes", TEXTS[0], {"top_k": 2, "function_to_apply": "none"}),
    ("text-classification", "classes", {"text": TEXTS[0], "text_pair": TEXTS[3]}, {}),
    ("text-classification", "grade", TEXTS[:3], {}),
    ("zero-shot-classification", "nli", TEXTS[0], {"candidate_labels": "law, river, old"}),
    ("zero-shot-classification", "nli", TEXTS[:3],
     {"candidate_labels": ["river", "law"], "multi_label": True, "hypothesis_template": "{}!"}),
    ("token-classification", "tags", TEXTS[0], {}),
    ("ner", "tags", TEXTS[1:4], {"aggregation_strategy": "simple"}),
    *(("token-classification", name, TEXTS[:4], {"aggregation_strategy": strategy})
      for name in ("tags", "tags-bytes") for strategy in ("simple", "first", "average", "max")),
    ("token-classification", "tags", TEXTS[4] * 2, {"aggregation_strategy": "max", "stride": 9}),
    ("token-classification", "tags", TEXTS[3], {"ignore_labels": ["B-LOC"]}),
    ("feature-extraction", "features", TEXTS[3], {}),
    ("feature-extraction", "features", TEXTS[2:4], {}),
    ("text-generation", "causal", TEXTS[3], {"max_new_tokens": 9, "do_sample": False}),
    ("text-generation", "causal", TEXTS[:4], {"max_new_tokens": 6, "do_sample": False,
                                              "return_full_text": False}),
    ("text-generation", "causal", [{"role": "user", "content": "the law"}],
     {"max_new_tokens": 5, "do_sample": False}),

    ("question-answering", "answers", QUESTIONS[0], {}),
    ("question-answering", "answers", QUESTIONS, {"top_k": 3, "max_seq_len": 40, "doc_stride": 12}),
    ("question-answering", "answers", QUESTIONS[1], {"handle_impossible_answer": True, "top_k": 4}),
    ("question-answering", "answers", QUESTIONS, {"max_seq_len": 48, "align_to_words": False}),
    ("question-answering", "answers-bytes", QUESTIONS, {"top_k": 2, "max_seq_len": 50}),
    ("text2text-generation", "seq2seq", TEXTS[:3], {"max_new_tokens": 7}),
    ("summarization", "seq2seq", TEXTS[0], {"max_new_tokens": 12}),
    ("summarization", "seq2seq", TEXTS[:2], {"num_return_sequences": 2, "max_new_tokens": 9}),
    ("translation_en_to_de", "seq2seq", TEXTS[:2], {"num_beams": 2, "max_new_tokens": 9}),
]  # fmt: skip
KEPT = next(n for n, case in enumerate(CASES) if case[0] == "question-answering")


def check_equal(ours, theirs, where=""):
    """Compare nested answers: texts and numbers exactly, scores closely."""
    if isinstance(theirs, dict):
        # Version 5 sorts answers with equal scores arbitrarily. No scores are equal here.
        assert ours.keys() == theirs.keys(), where
        for name in theirs:
            check_equal(ours[name], theirs[name], f"{where}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for number, (item, other) in enumerate(zip(ours, theirs, strict=True)):
            check_equal(item, other, f"{where}[{number}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-5), where
    else:
        assert ours == theirs, where


@pytest.mark.filterwarnings("ignore")  # theirs
def test_answers_are_those_of_transformers_5(folder):
    pytest.importorskip("torch")
    ours = functools.cache(lambda *names: hfseq.pipeline(*names, batch_size=3))
    theirs = functools.cache(transformers.pipeline)
    for task, name, inputs, options in CASES[:KEPT]:
        answers = ours(task, str(folder / name))(inputs, **options)
        expected = theirs(task, str(folder / name))(inputs, **options)
        expected = json.loads(json.dumps(expected, default=float))
        check_equal(answers, expected, f"{task}, {name}, {options}")


THEIRS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from transformers import pipeline
for task, name, given, options in json.load(sys.stdin):
    made = pipeline(task, f"{sys.argv[1]}/{name}")(given, **options)
    print("ANSWER", json.dumps(made, default=float))
"""


@pytest.mark.slow
def test_answers_are_those_of_transformers_4(folder, python_4):
    """Covers all tasks, including those that version 5 dropped."""
    command = [python_4, "-c", THEIRS, str(folder)]
    completed = subprocess.run(command, input=json.dumps(CASES), capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-2000:]
    lines = [line for line in completed.stdout.splitlines() if line.startswith("ANSWER")]
    for (task, name, inputs, options), line in zip(CASES, lines, strict=True):
        answers = hfseq.pipeline(task, str(folder / name), batch_size=3)(inputs, **options)
        check_equal(answers, json.loads(line.removeprefix("ANSWER")), f"{task}, {name}, {options}")


def test_results_do_not_depend_on_the_batch(folder):
    alone = hfseq.pipeline("ner", str(folder / "tags"), batch_size=1, aggregation_strategy="simple")
    inputs = [TEXTS[number % 4] for number in range(9)]
    expected = [alone(text) for text in inputs]
    check_equal(alone(inputs), expected)
    check_equal(alone(inputs, batch_size=4), expected)


def test_a_bucket_of_lengths_is_compiled_once(folder):
    output = hfseq.pipeline("text-classification", str(folder / "classes"), batch_size=4)
    words = TEXTS[4].split()
    output([" ".join(words[:count]) for count in range(1, 13)])
    compiled = output._compiled._cache_size()
    assert compiled <= 6  # 8, 16, 24 … tokens, most of them with four rows
    output([" ".join(words[-count:]) for count in range(1, 9)] * 2)
    assert output._compiled._cache_size() <= compiled + 2


def test_iterators_and_files_are_answered_as_they_are_read(folder, tmp_path):
    output = hfseq.pipeline("text-classification", str(folder / "classes"), batch_size=1)
    read = []

    def texts():
        for number in range(64):
            read.append(number)
            yield TEXTS[number % 2]

    answers = output(texts())
    first = next(answers)
    assert len(read) <= 17, "a window of 16 batches is enough"
    assert [first, *answers] == output([TEXTS[number % 2] for number in range(64)])
    lines, table = tmp_path / "lines.txt", tmp_path / "table.csv"
    lines.write_text("".join(f"{text}\n" for text in TEXTS))
    table.write_text('text,text_pair\n"a, b",c\nd,"e"\n')
    assert list(output(lines)) == output(TEXTS)
    pairs = [{"text": "a, b", "text_pair": "c"}, {"text": "d", "text_pair": "e"}]
    assert list(output(table)) == output(pairs)
    asks = hfseq.pipeline("question-answering", str(folder / "answers"))
    squad = tmp_path / "squad.json"
    paragraphs = [{"context": TEXTS[2], "qas": [{"id": "1", "question": "Where?"}]}]
    squad.write_text(json.dumps({"version": "1", "data": [{"paragraphs": paragraphs}]}))
    assert list(asks(squad)) == [asks(question="Where?", context=TEXTS[2])]


def test_unanswerable_inputs_are_rejected(folder):
    with pytest.raises(UsageError, match="unknown task 'fil-mask'; did you mean 'fill-mask'"):
        hfseq.pipeline("fil-mask", str(folder / "masked"))
    with pytest.raises(
        UsageError, match="contains RobertaForMaskedLM, which has no head ForTokenCl"
    ):
        hfseq.pipeline("ner", str(folder / "masked"))
    with pytest.raises(
        UsageError, match="contains RobertaForMaskedLM, which cannot continue.*is_decoder"
    ):
        hfseq.pipeline("text-generation", str(folder / "masked"))
    with pytest.raises(UsageError, match="a new model also requires tokenizer="):
        hfseq.pipeline("ner", hfseq.FlaxAutoModel.from_config(models.roberta_config()))
    classes = hfseq.pipeline("text-classification", str(folder / "classes"))
    with pytest.raises(UsageError, match="config= is a .*Tokenizer.*tokenizer="):
        hfseq.pipeline("text-classification", classes.model, classes.tokenizer)
    with pytest.raises(UsageError, match="precision= requires the name of a checkpoint"):
        hfseq.pipeline("text-classification", classes.model, precision="bfloat16")
    with pytest.raises(UsageError, match="has no option 'topk'.*did you mean 'top_k'"):
        classes(TEXTS, topk=2)
    with pytest.raises(UsageError, match="input 2: it must be a text, not 5"):
        classes(["a", 5])
    with pytest.raises(UsageError, match="input 1: [0-9]+ tokens exceed the model's 128 pos"):
        classes(TEXTS[4] * 9)
    assert classes(TEXTS[4] * 9, truncation=True)
    with pytest.raises(UsageError, match="input 1: it contains no mask token .<mask>."):
        hfseq.pipeline("fill-mask", str(folder / "masked"))("a text")
    with pytest.raises(UsageError, match="has no {} as a placeholder"):
        hfseq.pipeline("zero-shot-classification", str(folder / "nli"))(
            "a", ["b"], hypothesis_template="about this"
        )
    with pytest.raises(UsageError, match="input 1: its question or its context is empty"):
        hfseq.pipeline("question-answering", str(folder / "answers"))(question="a", context=" ")
    with pytest.raises(UsageError, match="none, simple, first, average, max"):
        hfseq.pipeline("ner", str(folder / "tags"))("a", aggregation_strategy="last")
    writer = hfseq.pipeline("text-generation", str(folder / "causal"))
    with pytest.raises(UsageError, match="max_tokens"):
        writer("a", max_tokens=3)


def test_summary_length_defaults_to_the_model(folder):
    short = hfseq.pipeline("summarization", str(folder / "seq2seq"))
    (item,) = short(TEXTS[0])
    tokens = short.tokenizer(item["summary_text"], add_special_tokens=False)["input_ids"]
    assert short.task_defaults["max_length"] == 18 and short.direction.source_prefix == "short: "
    assert len(tokens) <= 3 * 18


def test_words_that_are_split_already_are_tagged(folder):
    output = hfseq.pipeline("ner", str(folder / "tags"), ignore_labels=[])
    text = "Anna lives in Berlin"
    apart = output(text.split(), is_split_into_words=True)
    check_equal(apart, output(text))


def test_an_adapter_does_the_work(folder, tmp_path):
    import jax

    from hfseq.modeling.lora import LoraConfig
    from hfseq.nn import trees

    base = folder / "classes"
    auto = hfseq.FlaxAutoModelForSequenceClassification
    config = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    model = auto.from_pretrained(base, peft_config=config)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    flat = trees.flatten(model.params)
    changed = {
        path: jax.random.normal(next(keys), leaf.shape) if path in model.trainable_paths else leaf
        for path, leaf in flat.items()
    }
    own_value = {path: leaf for path, leaf in changed.items() if path in model.trainable_paths}
    model.save_pretrained(tmp_path / "adapter", params=trees.unflatten(own_value))
    output = hfseq.pipeline("text-classification", str(tmp_path / "adapter"))
    logits = auto.from_pretrained(tmp_path / "adapter")
    (actual,) = output(TEXTS[0], function_to_apply="none")
    ids = output.tokenizer(TEXTS[0], return_tensors="np")
    expected = jax.jit(logits)(ids["input_ids"], ids["attention_mask"]).logits[0]
    assert actual["score"] == pytest.approx(float(expected.max()), rel=1e-4)
    plain = hfseq.pipeline("text-classification", str(base))(TEXTS[0], function_to_apply="none")
    assert abs(plain[0]["score"] - actual["score"]) > 1e-3


@pytest.mark.parametrize(
    ("task", "name", "pad_token_id"),
    [("text-generation", "causal", None), ("text2text-generation", "seq2seq", 1)],
)
def test_texts_end_at_the_end_token_of_the_call(folder, task, name, pad_token_id):
    pipeline = hfseq.pipeline(task, str(folder / name))
    options = {"max_new_tokens": 12, "num_beams": 1}
    inputs = pipeline.tokenizer([TEXTS[3]], return_tensors="np")["input_ids"]
    free = pipeline.model.generate(inputs, do_sample=False, eos_token_id=None, **options)
    start = 1 if name == "seq2seq" else inputs.shape[1]
    new = np.asarray(free.sequences)[0, start:].tolist()
    config = pipeline.model.generation_config
    config.pad_token_id = pad_token_id
    own = next(token for token in new[1:] if token != new[0])
    end = next(token for token in new[new.index(own) + 1 :] if token not in (own, new[0]))
    expected = pipeline.tokenizer.decode(new[: new.index(end)], skip_special_tokens=True)
    for config.eos_token_id in (own, None):
        options |= {"return_full_text": False} if name == "causal" else {}
        (answer,) = pipeline(TEXTS[3], eos_token_id=end, **options)
        assert answer["generated_text"].strip() == expected.strip()


@pytest.mark.parametrize(
    ("task", "changes"),
    [("fill-mask", {}), ("text-generation", {"is_decoder": True})],
)
def test_discriminator_of_electra_has_no_head_for_texts(folder, tmp_path, task, changes):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "grade")
    config = models.electra_config(vocab_size=len(tokenizer), **changes)
    hfseq.FlaxElectraForPreTraining(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="ElectraForPreTraining, which has no head.*generator"):
        hfseq.pipeline(task, str(tmp_path))


def test_a_base_model_with_a_tied_head_generates(folder, tmp_path):
    shutil.copytree(folder / "causal", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["architectures"] = ["GPT2Model"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    options = {"max_new_tokens": 5}
    expected = hfseq.pipeline("text-generation", str(folder / "causal"))(TEXTS[3], **options)
    assert (
        hfseq.pipeline("text-generation", str(tmp_path / "base"))(TEXTS[3], **options) == expected
    )


def test_similar_sentences_have_the_cosine_of_their_embeddings(folder):
    compare = hfseq.pipeline("sentence-similarity", str(folder / "features"), pooling="mean")
    scores = compare({"source_sentence": TEXTS[0], "sentences": [TEXTS[0], TEXTS[1], TEXTS[2]]})
    vectors = compare.model.encode(TEXTS[:3], pooling="mean", tokenizer=compare.tokenizer)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(scores, vectors @ vectors[0], atol=1e-5)
    with pytest.raises(UsageError, match='input 1: it must be a dictionary with "source_sentence"'):
        compare([{"source_sentence": "a"}])


def test_streams_of_text_equal_the_answer(folder):
    write = hfseq.pipeline("text-generation", str(folder / "causal"), max_new_tokens=6)
    (answer,) = write(TEXTS[3], return_full_text=False)
    assert "".join(write.stream_text(TEXTS[3])) == answer["generated_text"]
    chat = [{"role": "user", "content": "the law"}]
    (answer,) = write(chat, return_full_text=False)
    assert "".join(write.stream_text(chat)) == answer["generated_text"]
    (ids,) = write(TEXTS[3], return_tensors=True)
    assert write.tokenizer.decode(ids["generated_token_ids"]).startswith(TEXTS[3])
