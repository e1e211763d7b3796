"""Tables and text files that say something else than they seem to."""

import json
import logging
import os

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hfseq.data.arguments import (
    CausalArguments,
    ClassificationArguments,
    DataArguments,
    TokenClassificationArguments,
    TranslationArguments,
)
from hfseq.data.classification import load_examples
from hfseq.data.parallel import load_pairs
from hfseq.data.records import load_records
from hfseq.data.sources import load_splits
from hfseq.errors import DataError


def texts(*files, **options):
    files = [str(file) for file in files]
    arguments = DataArguments(train_file=files, validation_split_percentage=0, **options)
    splits = load_splits(arguments)
    return [row[splits.text_column] for row in splits["train"]]


def sentences(file, **options):
    arguments = ClassificationArguments(
        train_file=[str(file)], validation_split_percentage=0, **options
    )
    examples = load_examples(arguments)["train"]
    return list(zip(examples.first, examples.labels, strict=True))


def pairs(file, **options):
    arguments = TranslationArguments(
        train_file=[str(file)], validation_split_percentage=0, **options
    )
    return [(row["source"], row["target"]) for row in load_pairs(arguments)["train"]]


@pytest.mark.parametrize("streaming", [False, True])
def test_empty_cells_after_the_last_column_are_dropped(tmp_path, streaming):
    file = tmp_path / "a.csv"
    file.write_text("text,label\nfirst text,pos,\nsecond text,neg,,\n\n,\n")
    assert texts(file, streaming=streaming) == ["first text", "second text"]
    assert sentences(file) == [("first text", "pos"), ("second text", "neg")]
    file.write_text("text,label,\nfirst text,pos,\n")
    assert sentences(file) == [("first text", "pos")]


@pytest.mark.parametrize("read", [texts, sentences])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na,1\nb,0,more\n", "line 3 has 3 columns, but the first line has 2"),
        ("a.csv", "text\nHello, world\n", "line 2 has 2 columns.*quote cells that contain a comma"),
        ("a.tsv", "text\tlabel\na\t1\t2\n", "line 2 has 3 columns.*remove the tab"),
        ("a.csv", "text,label\na,1\nb\n", "line 3 has 1 columns"),
        ("a.csv", "text,label\na,1\nb,0\ntext,label\nc,1\n", "line 4 repeats the header"),
        ("a.csv", "text;label\na;1\n", "one column, 'text;label'.*commas in .csv"),
        ("a.csv", "text\tlabel\na\t1\n", "one column"),
        ("a.tsv", "text,label\na,1\n", "one column, 'text,label'.*tabs in .tsv"),
        ("a.csv", "text,text\na,1\n", "not unique"),
    ],
)
def test_malformed_tables_are_refused_with_the_line(tmp_path, read, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_pairs_refuse_a_repeated_header(tmp_path):
    (tmp_path / "a.tsv").write_text("en\tde\none\teins\nen\tde\n")
    with pytest.raises(DataError, match="line 3 repeats the header"):
        pairs(tmp_path / "a.tsv")


def test_quotation_marks_in_tsv_files_are_characters(tmp_path):
    file = tmp_path / "q.tsv"
    file.write_text('text\tid\n"Hello he said\t1\nfoo\t2\nbar" end\t3\nlast\t4\n')
    assert texts(file) == ['"Hello he said', "foo", 'bar" end', "last"]


def test_empty_lines_of_a_file_with_one_column_are_empty_texts(tmp_path):
    file = tmp_path / "te.csv"
    file.write_text("text\nfirst\n\nthird\n\nfifth\n\n")
    arguments = ClassificationArguments(test_file=[str(file)])
    assert load_examples(arguments)["test"].first == ["first", "", "third", "", "fifth"]


def test_numbers_in_csv_cells_are_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,n\n007,1\n1.50,2\n")
    assert texts(tmp_path / "a.csv") == ["007", "1.50"]
    (tmp_path / "a.jsonl").write_text('{"text": "2020-01-01"}\n')
    with pytest.raises(DataError, match="'text' does not contain text.*timestamp.*JSON strings"):
        texts(tmp_path / "a.jsonl")


def test_files_whose_names_are_globs_are_read_themselves(tmp_path):
    folder = tmp_path / "run[3]"
    folder.mkdir()
    for name in ("data[1].txt", "data1.txt", "what?.txt", "whatX.txt", "a*.jsonl", "ab.jsonl"):
        text = json.dumps({"text": name}) if name.endswith("jsonl") else name
        (folder / name).write_text(f"{text}\n")
    for name in ("data[1].txt", "what?.txt", "a*.jsonl"):
        assert texts(folder / name) == [name]


@pytest.mark.parametrize("name", ["x.txt", "x.csv", "x.jsonl", "x.tsv"])
def test_new_content_under_an_old_time_stamp_is_read(tmp_path, name):
    def rows(count):
        lines = {
            "x.txt": [f"{count} {i}" for i in range(count)],
            "x.csv": ["text", *(f"{count} {i}" for i in range(count))],
            "x.jsonl": [json.dumps({"text": f"{count} {i}"}) for i in range(count)],
            "x.tsv": ["en\tde", *(f"{count} {i}\t{i}" for i in range(count))],
        }[name]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        os.utime(tmp_path / name, (0, 0))
        options = {"data_cache_dir": str(tmp_path / "cache")}
        read = pairs if name == "x.tsv" else texts
        return read(tmp_path / name, **options)

    for count in (5, 6, 7):  # the sizes of 5 and 6 rows differ, those of equal counts do not
        assert len(rows(count)) == count
    (tmp_path / name).write_text((tmp_path / name).read_text().replace("7 ", "8 "))
    os.utime(tmp_path / name, (0, 0))
    read = pairs if name == "x.tsv" else texts
    first = read(tmp_path / name, data_cache_dir=str(tmp_path / "cache"))[0]
    assert (first[0] if name == "x.tsv" else first) == "8 0"


def test_the_text_column_is_not_an_identifier(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"id": "1", "path": "a/b", "content": "the cat"}\n' * 3)
    with caplog.at_level(logging.WARNING):
        assert texts(tmp_path / "a.jsonl") == ["a/b"] * 3
    assert "using 'path' as the text" in caplog.text and "content" in caplog.text
    (tmp_path / "b.jsonl").write_text('{"text": ["a", "b"], "title": "c"}\n' * 3)
    with pytest.raises(DataError, match="'text' does not contain text"):
        texts(tmp_path / "b.jsonl")
    (tmp_path / "c.json").write_text('{"version": "1", "data": [{"text": "a"}, {"text": "b"}]}')
    assert texts(tmp_path / "c.json") == ["a", "b"]


def test_splits_may_name_the_text_differently(tmp_path):
    (tmp_path / "c.txt").write_text("one\ntwo\n")
    (tmp_path / "v.jsonl").write_text('{"content": "the cat", "id": 1}\n')
    files = {"train_file": [f"{tmp_path}/c.txt"], "validation_file": [f"{tmp_path}/v.jsonl"]}
    splits = load_splits(CausalArguments(**files))
    assert splits["validation"][splits.text_column][:] == ["the cat"]
    for name, content in (("a", '{"text": "a"}'), ("b", '{"body": "b"}')):
        (tmp_path / f"{name}.jsonl").write_text(f"{content}\n")
        column = "text" if name == "a" else "body"
        (tmp_path / f"{name}.csv").write_text(f"{column},n\n{name},1\n")
    with pytest.raises(DataError, match="b.csv has the columns body, n, but"):
        texts(tmp_path / "a.csv", tmp_path / "b.csv")


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert texts(tmp_path / "a.txt") == ["one", "two"]


def test_an_unwritable_cache_of_datasets_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the cache.*HF_HOME.*--data_cache_dir"):
        texts(tmp_path / "a.txt", data_cache_dir=str(tmp_path / "file"))


def test_saved_datasets_and_other_names_of_splits_are_read(tmp_path, caplog):
    rows = Dataset.from_dict({"text": ["a", "b"]})
    rows.save_to_disk(tmp_path / "one")
    DatasetDict({"train": rows, "dev": rows.select([1]), "extra": rows}).save_to_disk(
        tmp_path / "several"
    )
    options = {"validation_split_percentage": 0}
    splits = load_splits(DataArguments(dataset_name=str(tmp_path / "one"), **options))
    assert splits["train"]["text"][:] == ["a", "b"]
    with caplog.at_level(logging.INFO):
        splits = load_splits(DataArguments(dataset_name=str(tmp_path / "several")))
    assert splits["validation"]["text"][:] == ["b"] and len(splits["train"]) == 2
    assert "'dev' as validation" in caplog.text and "the splits extra are not used" in caplog.text


def tagged_dataset():
    features = Features(
        {
            "text": Value("string"),
            "tokens": List(Value("string")),
            "pos_tags": List(ClassLabel(names=["NN", "NNP", "VB"])),
            "ner_tags": List(ClassLabel(names=["O", "B-PER", "I-PER"])),
            "topic": ClassLabel(names=["news", "sport"]),
            "label": ClassLabel(names=["bad", "good"]),
        }
    )
    row = {"text": "Ada lives", "tokens": ["Ada", "lives"], "pos_tags": [1, 2], "ner_tags": [1, 0]}
    rows = [row | {"topic": 1, "label": 0}, row | {"topic": 0, "label": 1}]
    return Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("parquet", [False, True])
def test_class_names_are_those_of_the_column(tmp_path, parquet):
    if parquet:
        tagged_dataset().to_parquet(tmp_path / "a.parquet")
        source = {"train_file": [str(tmp_path / "a.parquet")]}
    else:
        tagged_dataset().save_to_disk(tmp_path / "saved")
        source = {"dataset_name": str(tmp_path / "saved")}
    source["validation_split_percentage"] = 0
    table = load_records(TokenClassificationArguments(**source))["train"].tables[0]
    assert table.classes["ner_tags"] == ("O", "B-PER", "I-PER")
    assert table.classes["pos_tags"] == ("NN", "NNP", "VB")
    for column, labels in (("topic", ["sport", "news"]), ("label", ["bad", "good"])):
        arguments = ClassificationArguments(**source, label_column=column)
        assert load_examples(arguments)["train"].labels == labels


def test_lists_of_labels_are_several_classes(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_text('{"text":"a","label":["x","z"]}\n{"text":"b","label":["y"]}\n')
    assert [label for _, label in sentences(file)] == [("x", "z"), ("y",)]
    for second, message in (
        ('"y"', "line 2 has the label 'y', but other rows have lists"),
        ("[0.5]", "line 2 has the labels .0.5.: expected a list of class names"),
    ):
        file.write_text(f'{{"text":"a","label":["x"]}}\n{{"text":"b","label":{second}}}\n')
        with pytest.raises(DataError, match=message):
            sentences(file)
