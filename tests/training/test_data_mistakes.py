"""Runs on data and flags that say something else than they seem to."""

from __future__ import annotations

import json
import logging
import random

import numpy as np
import pytest

import hfseq
from hfseq.errors import DataError, UsageError
from hfseq.objectives.metrics import rouge_scores
from hfseq.training import parse
from tests.support.tiers import first
from tests.training.conftest import TINY, TWO_LAYERS, make_runner
from tests.training.test_task_loops import BERT, task  # noqa: F401


@pytest.fixture(scope="module")
def tables(corpus):
    return corpus


@pytest.fixture
def bert(corpus, tmp_path_factory):
    """A tokenizer with the words of these tests."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "in", "city", "dog"]
    folder = tmp_path_factory.mktemp("bert")
    BertTokenizer({word: number for number, word in enumerate(words)}).save_pretrained(folder)
    return folder


def write(path, *rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.slow
def test_every_word_has_a_tag_and_every_sentence_a_line(task, bert, tmp_path, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    tags, draw = {"the": "O", "cat": "B-X", "in": "O", "city": "B-Y"}, random.Random(0)
    sides = [draw.choices(list(tags), k=draw.randint(1, 9)) for _ in range(64)]
    rows = [{"tokens": words, "ner_tags": [tags[word] for word in words]} for words in sides]
    sentences = [
        ["\u200b", "the", "cat", "\u00ad", "city"],
        [],
        ["the"] * 40,
        ["cat"],
    ]
    loop = task(
        "ner",
        "token_classification",
        tokenizer_name=bert,
        train_file=write(tmp_path / "train.jsonl", *rows),
        validation_file=None,
        validation_split_percentage=0,
        test_file=write(tmp_path / "test.jsonl", *({"tokens": words} for words in sentences)),
        max_seq_length=32,
        pad_to_max_length=True,
        do_train=True,
        do_predict=True,
        max_steps=80,
        learning_rate=1e-2,
    )
    lines = (loop.folder / "predictions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["tokens"] for record in records] == sentences
    assert records[0]["tags"] == [None, "O", "B-X", None, "B-Y"]
    assert [len(record["tags"]) for record in records] == list(map(len, sentences))
    assert records[2]["tags"][29] == "O" and records[2]["tags"][30:] == [None] * 10
    texts = (loop.folder / "predictions.txt").read_text().split("\n")
    assert texts[0] == "O O B-X O B-Y" and texts[1] == "" and len(texts) == 5
    assert "truncated 1 of the 3 test sentences" in caplog.text
    assert "predict_loss" not in loop.metrics  # the sentences have no tags


def test_without_targets_a_split_is_an_error_and_a_step_has_no_loss(train, corpus, tmp_path):
    options = {"mlm_probability": 1e-9, "max_steps": 1, "warmup_steps": 0}
    with pytest.raises(DataError, match="the validation split has no targets"):
        train("mlm", 1, **options)
    records = [
        json.loads(line) for line in (tmp_path / "mlm/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert [record["train_loss"] for record in records if "train_loss" in record] == [None]


@pytest.fixture
def multi_label(bert, tmp_path):
    rows = []
    for number in range(48):
        words = [word for bit, word in enumerate(("cat", "dog", "city")) if number >> bit & 1]
        rows.append({"text": " ".join(["the", *words]), "label": words})
    write(tmp_path / "m.jsonl", *rows)
    write(tmp_path / "t.jsonl", {"text": "the cat city"}, {"text": "the dog"}, {"text": "the"})
    return make_runner(
        "classification",
        tmp_path,
        model_type="bert",
        config_overrides=TWO_LAYERS,
        tokenizer_name=bert,
        train_file=tmp_path / "m.jsonl",
        validation_file=tmp_path / "m.jsonl",
        test_file=tmp_path / "t.jsonl",
        max_seq_length=32,
        global_batch_size=16,
        learning_rate=1e-2,
    )


def test_lists_of_labels_are_a_multi_label_classification(multi_label, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    loop = multi_label(max_steps=150, do_train=True, do_eval=True, do_predict=True)
    assert loop.metrics["eval_f1_micro"] == loop.metrics["eval_accuracy"] == 1.0
    predictions = (loop.folder / "test_results.tsv").read_text().splitlines()
    assert predictions == ["index\tprediction", '0\t["cat", "city"]', '1\t["dog"]', "2\t[]"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(loop.folder)
    assert model.config.problem_type == "multi_label_classification"
    tokenizer = transformers.AutoTokenizer.from_pretrained(loop.folder)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = [[float(name in row["label"]) for name in ("cat", "city", "dog")] for row in rows]
    with torch.no_grad():
        loss = model(**batch, labels=torch.tensor(labels)).loss.item()
    assert loop.metrics["eval_loss"] == pytest.approx(loss, abs=1e-6)
    answers = hfseq.pipeline("text-classification", str(loop.folder))(["the cat"], top_k=None)
    scores = {answer["label"]: answer["score"] for answer in answers[0]}
    assert scores["cat"] > 0.5 > max(scores["dog"], scores["city"])


def test_multi_label_scores_are_those_of_sklearn():
    metrics = pytest.importorskip("sklearn.metrics")
    from hfseq.objectives.metrics import METRICS

    draw = np.random.default_rng(0)
    actual, predicted = (draw.integers(0, 2, (50, 4)) for _ in range(2))
    actual[:, 3] = predicted[:, 3] = 0
    for name, expected in (
        ("accuracy", metrics.accuracy_score(actual, predicted)),
        ("f1_micro", metrics.f1_score(actual, predicted, average="micro")),
        ("f1_macro", metrics.f1_score(actual, predicted, average="macro", zero_division=0)),
    ):
        score = METRICS[name].compute(predictions=predicted, references=actual)[name]
        assert score == pytest.approx(expected)


LABELS = [
    (["1,5", "2,0", "1,5"], "decimal comma"),
    (["true", "True", "FALSE"], "upper and lower case only"),
    (["1e5", "22", "30"], "regression model, because the labels are numbers such as 1e5"),
    ([f"id{n}" for n in range(20)], "20 training examples have 20 different labels"),
]


@pytest.mark.parametrize(
    ("labels", "message"),
    first(LABELS, LABELS[0]),
)
def test_suspicious_labels_are_reported(multi_label, tmp_path, labels, message, caplog):
    caplog.set_level(logging.INFO)
    rows = [{"text": "the cat", "label": label} for label in labels]
    file = write(tmp_path / "labels.jsonl", *rows)
    options = {"validation_file": None, "validation_split_percentage": 0, "do_train": True}
    options |= {"config_overrides": TINY, "pad_to_max_length": True}
    if message == "decimal comma":
        with pytest.raises(DataError, match=message):
            multi_label(train_file=file, max_steps=1, **options)
    else:
        multi_label(train_file=file, max_steps=1, **options)
        assert message in caplog.text


def test_rouge_of_all_scripts():
    texts = ["Король идёт домой.", "हिन्दी भाषा", "猫が寝る", "The kings are walking"]
    for text in texts:
        scores = rouge_scores([text], [[text]], "unicode").values
        assert scores["rouge1"] == scores["rougeL"] == 100
    assert rouge_scores(["så øl"], [["sæ ål"]], "unicode").values["rouge1"] == 0
    assert rouge_scores(["猫が"], [["猫を"]], "unicode").values["rouge1"] == pytest.approx(50)
    english = "The running dogs were happily eating 3 apples."
    other = "A dog runs and eats the apple happily, 3 times"
    default = rouge_scores([english], [[other]]).values
    assert rouge_scores([english], [[other]], "unicode").values == default


def test_rouge_warns_about_letters_that_it_ignores(caplog):
    assert rouge_scores(["Король"], [["Король"]]).values["rouge1"] == 0
    assert "--rouge_tokenizer unicode" in caplog.text


def test_yaml_values_of_string_flags_are_text(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "card_language: [nb, no]\noutput_dir: x\ndataset_config_name: no\nhub_model_id: 0123\n"
        "model_revision: 1.10\nlearning_rate: 1e-4\ndo_train: yes\ndo_eval: off\nmax_steps: 3\n"
        "train_file: null\nconfig_overrides: {hidden_size: 32, tie_word_embeddings: false}\n"
        "run_name: '-end-'\n"
    )
    arguments = parse([str(file)], objective="mlm")
    training, data, model = arguments.training, arguments.data, arguments.model
    assert (training.card_language, training.hub_model_id) == (["nb", "no"], "0123")
    assert (data.dataset_config_name, model.model_revision) == ("no", "1.10")
    assert (training.learning_rate, training.do_train, training.do_eval) == (1e-4, True, False)
    assert (training.max_steps, data.train_file, training.run_name) == (3, None, "-end-")
    assert model.config_overrides == "hidden_size=32,tie_word_embeddings=false"
    stored = tmp_path / "training_args.json"
    stored.write_text(json.dumps({"output_dir": "x", "run_name": "-end-", "max_steps": 3}))
    assert parse([str(stored)], objective="mlm").training.run_name == "-end-"


def test_home_directories_are_expanded_in_flags(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = parse(["--output_dir=~/run", "--train_file=~/c.txt"], objective="mlm")
    assert arguments.training.output_dir == f"{tmp_path}/run"
    assert arguments.data.train_file == [f"{tmp_path}/c.txt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output_dir", "o/hub one", "--push_to_hub"], "repository name 'hub one'.*hub_model_id"),
        (["--output_dir", "o", "--push_to_hub", "--hub_model_id", "me/my model!"], "my model!"),
    ],
)
def test_impossible_repository_names_are_refused_at_the_start(flags, message):
    with pytest.raises(UsageError, match=message):
        parse(flags, objective="mlm")


def test_no_validation_data_at_all_names_the_percentage(train):
    options = {"validation_file": None, "validation_split_percentage": 0}
    with pytest.raises(UsageError, match="--validation_split_percentage above 0.*--do_train"):
        train("run", 1, **options)


def test_an_unknown_metric_is_refused_before_training(train):
    with pytest.raises(UsageError, match="--metric_for_best_model f1: .*eval_perplexity"):
        train("run", 1, "clm", metric_for_best_model="f1", eval_steps=3, max_steps=3)


def test_the_best_evaluation_is_saved_whatever_the_save_steps(train):
    loop = train(
        "best",
        1,
        save_steps=4,
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="perplexity",
        greater_is_better=True,  # so that the first evaluation is the best
    )
    assert loop.progress.best_step == 1 and int(loop.state.step) == 1


def test_resuming_with_other_data_names_the_differences(train, corpus, tmp_path, caplog):
    # A schedule that depends on the number of steps would be compiled for each of them.
    options = {"do_train": True, "lr_scheduler_type": "constant", "save_steps": 2}
    train("run", 1, max_steps=2, **options)
    caplog.clear()
    train("run", 1, max_steps=3, **options)
    assert "with different data" not in caplog.text
    lines = (corpus / "train.jsonl").read_text().splitlines()
    (tmp_path / "more.jsonl").write_text("\n".join([*lines, *lines[:30]]) + "\n")
    changes = {"train_file": tmp_path / "more.jsonl", "seed": 7, **options}
    train("run", 1, max_steps=4, **changes)
    message = next(
        r.getMessage() for r in caplog.records if "with different data" in r.getMessage()
    )
    for part in ("--seed (42 before, 7 now)", "documents (100 before, 130 now)", "more.jsonl"):
        assert part in message
    caplog.clear()
    train("run", 1, max_steps=2, **changes)
    assert "nothing is trained: the checkpoint has 4 steps" in caplog.text


def test_the_log_names_the_column_and_counts_documents(train, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    rows = [{"id": "1", "content": "the law of the land"}, {"id": "2", "content": None}]
    rows += [{"id": "3", "content": "who " * 60}]
    train(
        "run",
        1,
        train_file=write(tmp_path / "c.jsonl", *rows),
        validation_file=None,
        validation_split_percentage=0,
        do_train=True,
        line_by_line=True,
    )
    assert "train: 2 of 3 rows have text in the column 'content'" in caplog.text
    assert "1 documents have 32 tokens or more and are truncated" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", "id,content,abstractive\n1,long text here.,short\n", None),
        ("a.csv", "body,abstractive\nlong text here.,short\n", ("long text here.", "short")),
        ("a.csv", '"A text. It is long.",short\n', ("A text. It is long.", "short")),
        ("a.jsonl", '{"document": "a\\n\\nb", "summary": "c\\n- d"}\n', ("a\n\nb", "c\n- d")),
        ("a.json", '{"data": [{"document": "a", "summary": "b"}]}', ("a", "b")),
    ],
)
def test_summaries_are_read_with_header_and_line_breaks(tmp_path, name, content, expected):
    from hfseq.data.arguments import SummarizationArguments
    from hfseq.data.parallel import load_pairs

    (tmp_path / name).write_text(content)
    files = {"train_file": [f"{tmp_path / name}"], "validation_split_percentage": 0}
    if expected is None:
        with pytest.raises(DataError, match="--text_column and --summary_column"):
            load_pairs(SummarizationArguments(**files))
        files |= {"text_column": "content", "summary_column": "abstractive"}
        expected = ("long text here.", "short")
    pairs = load_pairs(SummarizationArguments(**files))["train"]
    assert (pairs["source"][0], pairs["target"][0]) == expected
