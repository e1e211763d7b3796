"""Tables of examples: formats, headers, quotes, columns, and invalid files."""

from __future__ import annotations

import gzip
import json

import pytest

from hfseq.data.arguments import ClassificationArguments
from hfseq.data.classification import choose_columns
from hfseq.data.tables import read_table
from hfseq.errors import DataError, UsageError

COLA = 'gj04\t1\t\tThe dog "ran.\ngj04\t0\t*\tDog the ran.\n'


def arguments(**flags):
    return ClassificationArguments(train_file=["given"], **flags)


def read(path, text, **flags):
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text, encoding="utf-8")
    return read_table(str(path), "--train_file", arguments(**flags))


def columns(table, labelled=True, **flags):
    return choose_columns(table, arguments(**flags), labelled)


def test_a_tsv_has_no_quotes_and_a_csv_has(tmp_path):
    table = read(tmp_path / "a.tsv", 'label\tsentence\n1\t"Yes," he said\n')
    assert table.columns == {"label": ["1"], "sentence": ['"Yes," he said']}
    table = read(tmp_path / "a.csv", 'label,sentence\n1,"Yes, he said\nno"\n0,b\n')
    assert table.columns["sentence"] == ["Yes, he said\nno", "b"]
    assert table.place(1) == f"--train_file {tmp_path}/a.csv, line 4"


def test_quoting_is_configurable(tmp_path):
    table = read(tmp_path / "a.tsv", 'label\tsentence\n1\t"a\tb"\n', quoting=True)
    assert table.columns["sentence"] == ["a\tb"]
    table = read(tmp_path / "a.csv", 'label,sentence\n1,"a\n', no_quoting=True)
    assert table.columns["sentence"] == ['"a']


@pytest.mark.parametrize("flags", [{"header": False}, {"label_column": "0"}])
def test_without_a_header_columns_have_numbers(tmp_path, flags):
    table = read(tmp_path / "a.tsv", "good\tfine text\nbad\tother text\n", **flags)
    assert table.columns == {"0": ["good", "bad"], "1": ["fine text", "other text"]}
    expected_value = {"sentence1_column": "1", "label_column": "0"}
    assert columns(table, **expected_value) == ("1", None, "0")


def test_numbers_name_columns_of_a_header_too(tmp_path):
    table = read(tmp_path / "a.tsv", "kind\tbody\ngood\ttext\n", header=True, label_column="0")
    assert columns(table, label_column="0", sentence1_column="1") == ("body", None, "kind")


def test_blank_lines_are_neither_examples_nor_header(tmp_path):
    for quoting in (False, True):
        table = read(tmp_path / "a.tsv", "\n\nlabel\tsentence\n\n1\ta\n", quoting=quoting)
        assert table.columns == {"label": ["1"], "sentence": ["a"]} and table.line_numbers == [5]


def test_ambiguous_header_is_an_error(tmp_path):
    text = "kind\tbody\ngood\ta\nbad\tb\ngood\tc\nbad\td\n"
    numbers = {"label_column": "0", "sentence1_column": "1"}
    with pytest.raises(DataError, match=r"line 1 has the label 'kind', .*--header True.*False"):
        read(tmp_path / "a.tsv", text, **numbers)
    assert read(tmp_path / "a.tsv", text, header=False, **numbers).columns["0"][0] == "kind"
    assert read(tmp_path / "a.tsv", text, header=True, **numbers).columns["kind"][0] == "good"
    # A repeated class or a number for regression is an example, not a header.
    for line in ("good\tx", "7\tx"):
        assert len(read(tmp_path / "b.tsv", text.replace("kind\tbody", line), **numbers)) == 5


@pytest.mark.parametrize("name", ["²", "9" * 5000])
def test_only_numbers_of_columns_are_numbers(tmp_path, name):
    table = read(tmp_path / "a.tsv", "label\tsentence\n1\ta\n", sentence1_column=name)
    with pytest.raises(DataError, match="has no such column, only label, sentence"):
        columns(table, sentence1_column=name)


def test_column_has_one_role(tmp_path):
    table = read(tmp_path / "a.tsv", "label\ta\tb\n1\tx\ty\n")
    for flags in ({"sentence2_column": "a"}, {"label_column": "a"}):
        with pytest.raises(UsageError, match="'a' cannot have two roles"):
            columns(table, sentence1_column="a", **flags)


def test_cola_files_are_recognized(tmp_path):
    table = read(tmp_path / "in_domain_train.tsv", COLA)
    assert table.task == "cola" and table.line_numbers == [1, 2]
    assert columns(table) == ("sentence", None, "label")
    assert table.columns["sentence"] == ['The dog "ran.', "Dog the ran."]
    assert read(tmp_path / "b.tsv", COLA, header=True).task is None
    assert read(tmp_path / "b.tsv", COLA.replace("*", "x")).task is None


def test_json_lines_arrays_and_packed_files_are_read(tmp_path):
    records = [{"text": "a", "label": 1}, {"text": "b", "label": "no", "more": 2}]
    lines = "".join(json.dumps(record) + "\n\n" for record in records)
    table = read(tmp_path / "a.jsonl.gz", gzip.compress(lines.encode()))
    assert table.columns == {"text": ["a", "b"], "label": [1, "no"], "more": [None, 2]}
    assert table.place(1).endswith("line 3")
    table = read(tmp_path / "a.json", json.dumps(records))
    assert table.columns["text"] == ["a", "b"] and table.place(1).endswith("row 2")


def test_parquet_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"], "label": [1.5]}), path)
    table = read_table(str(path), "--train_file", arguments())
    assert table.columns == {"text": ["a"], "label": [1.5]}
    path.write_bytes(b"PAR1 is all it has")
    with pytest.raises(DataError, match="is not valid parquet"):
        read_table(str(path), "--train_file", arguments())


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "", "is empty"),
        ("a.tsv", "\n" * 9000, "is empty"),
        ("a.tsv", "label\tsentence\n", "contains a header but no examples"),
        ("a.tsv", "label\tsentence\n1\ta\tb\n", "line 2 has 3 columns, but .* has 2: .* --quoting"),
        ("a.csv", "label,sentence\n1,a,b\n", "line 2 has 3 columns, .* --no_quoting"),
        ("a.tsv", "1\t1\n0\tb\n", "not unique: 1, 1.* --header False"),
        ("a.txt", "text", r"unknown extension '.txt'.* use .tsv"),
        ("a.jsonl", '{"label": 1}\n{"label": 1,\n', "line 2 is not valid JSON"),
        ("a.jsonl", '{"label": %s}\n' % ("9" * 5000), "line 1 is not valid JSON: Exceeds"),
        ("a.json", "[" * 100000, "line 1 is not valid JSON: it is nested too deeply"),
        ("a.jsonl", '"words"\n', "line 1 is not a JSON object"),
        ("a.tsv", b"label\tsentence\n1\tbl\xe5\n", "is not UTF-8: byte 0xe5"),
        ("a.tsv", b"label\tsentence\0", "is binary"),
    ],
)
def test_a_file_that_is_not_a_table_is_named_with_the_line(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name, text)
    assert f"--train_file {tmp_path / name}" in str(caught.value)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("idx\tsentence1\tsentence2\tlabel", ("sentence1", "sentence2", "label")),
        ("premise\thypothesis\tgold_label\tx", ("premise", "hypothesis", "gold_label")),
        ("id\tquestion1\tquestion2\tis_duplicate", ("question1", "question2", "is_duplicate")),
        ("id\ttext\tlabel\tx", ("text", None, "label")),
        ("a\tb\tlabel", ("a", "b", "label")),
    ],
)
def test_common_columns_are_detected(tmp_path, header, expected):
    table = read(tmp_path / "a.tsv", f"{header}\n" + "\t".join("1" for _ in header.split()) + "\n")
    assert columns(table) == expected


@pytest.mark.parametrize(
    ("header", "flags", "case", "message"),
    [
        ("text\tkind", {}, UsageError, "no column 'label', only text, kind: .*--label_column NAME"),
        ("a\tb\tc\tlabel", {}, UsageError, "no column 'sentence' or 'text', only a, b, c, label"),
        ("text\tlabel", {"label_column": "lable"}, DataError, "did you mean 'label'"),
        ("text\tlabel", {"label_column": "7", "header": True}, DataError, "numbers 0 to 1"),
        ("text\tlabel", {"sentence2_column": "other"}, DataError, "--sentence2_column other"),
        (
            "sentence1\tlabel",
            {"task_name": "rte"},
            DataError,
            r"rte compares two sentences \(sentence1, sentence2\), .* has one",
        ),
    ],
)
def test_missing_column_error_lists_the_columns(tmp_path, header, flags, case, message):
    table = read(
        tmp_path / "a.tsv", f"{header}\n" + "\t".join("x" * len(header.split())) + "\n", **flags
    )
    with pytest.raises(case, match=message):
        columns(table, **flags)


def test_a_test_file_needs_no_label(tmp_path):
    table = read(tmp_path / "a.tsv", "text\tid\nx\t1\n")
    assert columns(table, labelled=False) == ("text", None, None)
    assert columns(table, labelled=False, label_column="label") == ("text", None, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task_name": "colla"}, "--task_name colla: expected one of cola, sst2"),
        ({"task_type": "ranking"}, "expected classification or regression"),
        ({"task_name": "cola", "task_type": "regression"}, "disagree: this task is classification"),
        ({"vocabulary": "letters"}, "expected words .*--tokenizer_name"),
        ({"streaming": True}, "every example is a row"),
        ({"max_predict_samples": 0}, "--max_predict_samples 0"),
        ({"test_split_percentage": 96}, "leave no training examples"),
    ],
)
def test_flags_that_cannot_work_are_named(flags, message):
    with pytest.raises(UsageError, match=message):
        ClassificationArguments(**flags)


def test_task_name_selects_a_glue_configuration():
    actual = ClassificationArguments(task_name="SST-2")
    assert (actual.dataset_name, actual.dataset_config_name) == ("nyu-mll/glue", "sst2")
    assert ClassificationArguments(task_name="sst2", train_file=["a"]).dataset_name is None
