"""Examples: splits, parts, labels by name and number, regression, and invalid data."""

from __future__ import annotations

import types

import numpy as np
import pytest

from hfseq.data.arguments import ClassificationArguments
from hfseq.data.classification import (
    LabelEncoder,
    class_names,
    load_examples,
    problem_type,
    sort_labels,
)
from hfseq.errors import DataError, UsageError


@pytest.fixture
def write(tmp_path):
    """Writes a TSV file with the columns sentence and label, and returns its path."""

    def make(name, labels, texts=None, head="sentence\tlabel"):
        texts = texts or [f"text {name} {i}" for i in range(len(labels))]
        lines = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
        path = tmp_path / name
        path.write_text("\n".join([head, *lines]) + "\n")
        return str(path)

    return make


def load(**flags):
    return load_examples(ClassificationArguments(**{"validation_split_percentage": 0} | flags))


def fresh(**extra):
    from transformers import BertConfig

    return BertConfig(**extra)


def test_colas_development_files_are_glues_validation_set(shared):
    raw = shared / "cola" / "raw"
    splits = load(
        train_file=[str(raw / "in_domain_train.tsv")],
        validation_file=[str(raw / f"{name}_dev.tsv") for name in ("in_domain", "out_of_domain")],
    )
    assert len(splits["train"]) == 8551 and len(splits["validation"]) == 1043
    parts = {"in_domain_dev": range(527), "out_of_domain_dev": range(527, 1043)}
    assert splits["validation"].parts == parts and splits.task == "cola"
    names = class_names(splits, fresh())
    assert names == ["unacceptable", "acceptable"]
    labels = LabelEncoder(names).encode_labels(splits["validation"], "validation")
    assert labels[:527].mean() == pytest.approx(0.693, abs=5e-4)
    assert labels[527:].mean() == pytest.approx(0.686, abs=5e-4)
    assert splits["validation"].first[0] == "The sailors rode the breeze clear of the rocks."
    assert splits["validation"].place(528).endswith("out_of_domain_dev.tsv, line 2")


def test_files_of_one_name_are_parts_by_their_folders(tmp_path, write):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        write(f"{name}/dev-set.tsv", ["a", "b"])
    splits = load(validation_file=[f"{tmp_path}/old/dev-set.tsv,{tmp_path}/new/dev-set.tsv"])
    assert list(splits["validation"].parts) == ["old_dev_set", "new_dev_set"]
    assert load(validation_file=[f"{tmp_path}/old/dev-set.tsv"])["validation"].parts == {}


def test_a_limit_cuts_the_parts_too(write):
    files = [write("a.tsv", "xyx"), write("b.tsv", "yx")]
    splits = load(validation_file=files, max_eval_samples=4)
    assert splits["validation"].parts == {"a": range(3), "b": range(3, 4)}
    assert load(validation_file=files, max_eval_samples=2)["validation"].parts == {"a": range(2)}
    assert splits["validation"].place(3).endswith("b.tsv, line 2")


def test_validation_and_test_are_cut_off_without_leaks_and_always_the_same(write):
    texts = [f"text {i % 60}" for i in range(200)]  # most texts are repeated
    file = write("all.tsv", ["ab"[i % 2] for i in range(200)], texts)
    flags = {"train_file": [file], "validation_split_percentage": 20, "test_split_percentage": 10}
    splits = load(**flags)
    sizes = {name: len(examples) for name, examples in splits.items()}
    assert sum(sizes.values()) == 200 and 40 <= sizes["validation"] < 44 and sizes["test"] >= 20
    visited = [set(examples.first) for examples in splits.values()]
    assert (
        not visited[0] & visited[1] and not visited[0] & visited[2] and not visited[1] & visited[2]
    )
    again = load(**flags)
    assert all(again[name].first == splits[name].first for name in sizes)
    row = splits["validation"].place(0)
    assert texts[int(row.rsplit(" ", 1)[1]) - 2] == splits["validation"].first[0]


def test_labels_may_be_numbers_or_names(write):
    words = load(train_file=[write("a.tsv", ["yes", "no", "yes "])])
    assert class_names(words, fresh()) == ["no", "yes"]
    numbers = load(train_file=[write("b.tsv", [10, 9, 10, -1])])
    assert class_names(numbers, fresh()) == ["-1", "9", "10"]
    task = load(train_file=[write("c.tsv", [0, "positive", 1])], task_name="sst2")
    names = class_names(task, fresh())
    assert names == ["negative", "positive"]
    assert LabelEncoder(names).encode_labels(task["train"], "train").tolist() == [0, 1, 1]
    assert sort_labels(["b", "a", "b"]) == ["a", "b"]


def test_model_keeps_its_class_order(write):
    splits = load(train_file=[write("a.tsv", ["yes", "no"])])
    custom = fresh(id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    assert class_names(splits, custom) == ["yes", "no"]
    other = fresh(id2label={0: "up", 1: "down"}, label2id={"up": 0, "down": 1})
    assert class_names(splits, other) == ["no", "yes"]


def test_evaluation_uses_the_classes_of_the_model(write):
    splits = load(validation_file=[write("a.tsv", ["1", "yes"])])
    custom = fresh(id2label={0: "yes", 1: "no"}, label2id={"yes": 0, "no": 1})
    names = class_names(splits, custom)
    actual = LabelEncoder(names, by_number=True).encode_labels(splits["validation"], "validation")
    assert actual.tolist() == [1, 0]
    assert class_names(splits, fresh(num_labels=3)) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("labels", "flags", "expected"),
    [
        (["0.5", "1", "2.25"], {}, True),
        (["1e-1", "-2.0"], {}, True),
        (["1", "2"], {}, False),
        (["a", "0.5"], {}, False),
        (["1", "2"], {"task_type": "regression"}, True),
        (["0.5", "1.0"], {"task_type": "classification"}, False),
    ],
)
def test_fractions_make_a_regression(write, labels, flags, expected):
    flags = {"train_file": [write("a.tsv", labels)]} | flags
    splits = load(**flags)
    actual = problem_type(splits, ClassificationArguments(**flags), fresh())
    assert (actual == "regression") == expected
    if expected:
        actual = LabelEncoder(None).encode_labels(splits["train"], "train")
        assert actual.dtype == np.float32 and actual.tolist() == pytest.approx(
            list(map(float, labels))
        )


def test_test_examples_need_no_label(write):
    splits = load(test_file=[write("a.tsv", ["yes", ""])])
    assert LabelEncoder(["no", "yes"]).encode_labels(splits["test"], "test").tolist() == [1, -100]
    actual = LabelEncoder(None).encode_labels(
        load(test_file=[write("b.tsv", ["0.5", ""])])["test"], "test"
    )
    assert actual[0] == 0.5 and np.isnan(actual[1])
    glue = load(test_file=[write("c.tsv", ["-1", "-1"])], task_name="cola")
    assert glue["test"].labels == [None, None]


@pytest.mark.parametrize(
    ("labels", "regression", "message"),
    [
        (["yes", "maybe"], False, r"a.tsv, line 3: the label 'maybe' is not one of .* no, yes"),
        (["yes", ""], False, "a.tsv, line 3 has no label"),
        (
            ["0.5", "much"],
            True,
            "line 3: the label 'much' is not a number, but regression requires",
        ),
        (["0.5", "inf"], True, "line 3: the label 'inf' is not a number"),
        (["0.5", "1e300"], True, "line 3: the label '1e300' exceeds the range of float32"),
    ],
)
def test_a_label_that_cannot_be_learnt_is_named_with_its_line(write, labels, regression, message):
    examples = load(validation_file=[write("a.tsv", labels)])["validation"]
    with pytest.raises(DataError, match=message):
        LabelEncoder(None if regression else ["no", "yes"]).encode_labels(examples, "validation")


def test_half_a_character_is_not_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "label": 1}\n{"text": "b \\ud800", "label": 0}\n')
    with pytest.raises(DataError, match=r"line 2 has 'b \\ud800', which is not text"):
        load(train_file=[str(path)])


def test_numbers_of_any_length_and_script_are_classes(write):
    labels = ["9" * 5000, "²", "10", "9"]
    splits = load(train_file=[write("a.tsv", labels)])
    assert class_names(splits, fresh()) == sorted(labels)
    task = load(train_file=[write("b.tsv", ["²", "9" * 5000, "1"])], task_name="sst2")
    assert task["train"].labels == ["²", "9" * 5000, "positive"]


def test_single_class_is_rejected(write):
    splits = load(train_file=[write("a.tsv", ["yes", "yes"])])
    with pytest.raises(DataError, match="every training example has the label 'yes'"):
        class_names(splits, fresh())


def test_splits_that_do_not_go_together_are_refused(tmp_path, write):
    pairs = write("pairs.tsv", ["x\t1", "y\t0"], head="sentence1\tsentence2\tlabel")
    single = write("single.tsv", ["a", "b"])
    with pytest.raises(DataError, match="train single sentences, validation pairs"):
        load(train_file=[single], validation_file=[pairs])
    with pytest.raises(DataError, match="pairs.tsv has two columns of sentences"):
        load(validation_file=[single, pairs])
    with pytest.raises(DataError, match="too few to hold out 50% for test"):
        load(train_file=[single], validation_split_percentage=49, test_split_percentage=50)


def test_missing_data_and_text_are_errors(tmp_path):
    with pytest.raises(UsageError, match="no data: give --task_name"):
        load()
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n{"label": 1}\n')
    with pytest.raises(DataError, match="line 2 has nothing in the column 'text'"):
        load(train_file=[str(tmp_path / "a.jsonl")])
    (tmp_path / "b.jsonl").write_text('{"text": "a", "label": 1}\n{"text": 3, "label": 1}\n')
    with pytest.raises(DataError, match="line 2 has 3, which is not text"):
        load(train_file=[str(tmp_path / "b.jsonl")])


class Plugins:
    """A plugin that provides a dataset with the name of GLUE."""

    def __init__(self, splits):
        self.splits, self.asked = splits, []

    def call_first(self, hook, name, arguments):
        self.asked.append((hook, name, arguments.dataset_config_name))
        return self.splits


def glue(columns, labels, names):
    from datasets import ClassLabel, Dataset, Features, Value

    case = ClassLabel(names=list(names)) if names else Value("float32")
    features = Features({name: Value("string") for name in columns} | {"label": case})
    data = {name: [f"{name} {i}" for i in range(len(labels))] for name in columns}
    return Dataset.from_dict(data | {"label": labels}, features=features)


def test_columns_of_glue_are_those_of_the_hub():
    from hfseq.data.arguments import GLUE

    assert {name: " ".join(task.sentence_columns) for name, task in GLUE.items()} == {
        **{"cola": "sentence", "sst2": "sentence", "qnli": "question sentence"},
        **dict.fromkeys(("mrpc", "stsb", "rte", "wnli"), "sentence1 sentence2"),
        **{"qqp": "question1 question2", "mnli": "premise hypothesis"},
    }


def test_mnli_of_the_hub_has_two_validation_and_two_test_sets():
    from hfseq.data.arguments import GLUE

    columns, names = GLUE["mnli"].sentence_columns, GLUE["mnli"].labels
    plugins = Plugins(
        {
            "train": glue(columns, [0, 1, 2, 1], names),
            "validation_matched": glue(columns, [0, 2], names),
            "validation_mismatched": glue(columns, [1, 1, 0], names),
            "test_matched": glue(columns, [-1], names),
            "test_mismatched": glue(columns, [-1], names),
        }
    )
    arguments = ClassificationArguments(task_name="mnli")
    splits = load_examples(arguments, plugins)
    assert load_examples(arguments, plugins) is splits
    assert plugins.asked == [("load_dataset", "nyu-mll/glue", "mnli")]
    assert splits["validation"].parts == {"matched": range(2), "mismatched": range(2, 5)}
    assert splits["test"].labels == [None, None]
    assert class_names(splits, fresh()) == ["entailment", "neutral", "contradiction"]
    assert splits["train"].second == [f"hypothesis {i}" for i in range(4)]


def test_stsb_of_the_hub_is_a_regression_and_its_test_set_has_no_scores():
    columns = ("sentence1", "sentence2")
    plugins = Plugins(
        {
            "train": glue(columns, [0.0, 5.0, 2.5], None),
            "test": glue(columns, [-1.0], None),
        }
    )
    arguments = ClassificationArguments(task_name="stsb", validation_split_percentage=0)
    splits = load_examples(arguments, plugins)
    assert problem_type(splits, arguments, types.SimpleNamespace()) == "regression"
    assert LabelEncoder(None).encode_labels(splits["train"], "train").tolist() == [0.0, 5.0, 2.5]
    assert np.isnan(LabelEncoder(None).encode_labels(splits["test"], "test")).all()
