import bz2
import gzip
import json

import pytest

from hfseq.data.arguments import CausalArguments, DataArguments
from hfseq.data.sources import load_splits
from hfseq.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def load(*files, **options):
    return load_splits(DataArguments(train_file=[str(f) for f in files], **options))


def documents(split, column="text"):
    return [row[column] for row in split]


def write_formats(directory, texts):
    (directory / "a.txt").write_text("\n".join(texts) + "\n")
    (directory / "a.jsonl").write_text(
        "".join(json.dumps({"n": 1, "text": t}) + "\n" for t in texts)
    )
    (directory / "a.json").write_text(json.dumps([{"text": t} for t in texts]))
    (directory / "a.csv").write_text("n,text\n" + "".join(f'1,"{t}"\n' for t in texts))
    (directory / "a.tsv").write_text("n\ttext\n" + "".join(f"1\t{t}\n" for t in texts))
    (directory / "a.txt.gz").write_bytes(gzip.compress((directory / "a.txt").read_bytes()))
    (directory / "a.jsonl.bz2").write_bytes(bz2.compress((directory / "a.jsonl").read_bytes()))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), directory / "a.parquet")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.txt.gz", "a.jsonl.bz2"]
)
def test_every_format_gives_the_same_documents(tmp_path, texts, name, streaming):
    write_formats(tmp_path, texts)
    splits = load(tmp_path / name, validation_split_percentage=0, streaming=streaming)
    assert splits.text_column == "text"
    assert documents(splits["train"]) == texts
    assert list(splits) == ["train"]


def test_globs_and_comma_separated_lists_name_several_files(tmp_path):
    for name in "ab":
        (tmp_path / f"part-{name}.txt").write_text(f"{name}1\n{name}2\n")
    expected = ["a1", "a2", "b1", "b2"]
    for pattern in (f"{tmp_path}/part-*.txt", f"{tmp_path}/part-a.txt,{tmp_path}/part-b.txt"):
        assert documents(load(pattern, validation_split_percentage=0)["train"]) == expected


def test_any_fsspec_url_is_read(monkeypatch):
    import datasets
    import fsspec

    # Offline, datasets 5.2 rejects every URL, even one that is in memory.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, False, raising=False)
    with fsspec.open("memory://bucket/corpus.txt", "w") as stream:
        stream.write("one\ntwo\n")
    splits = load("memory://bucket/corpus.txt", validation_split_percentage=0)
    assert documents(splits["train"]) == ["one", "two"]
    splits = load("memory://bucket/*.txt", validation_split_percentage=0)
    assert documents(splits["train"]) == ["one", "two"]


def test_the_first_five_percent_validate(corpus, texts):
    splits = load(corpus)
    assert documents(splits["validation"]) == texts[:10]
    assert documents(splits["train"]) == texts[10:]


def test_a_small_corpus_still_gets_a_validation_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    splits = load(tmp_path / "a.txt")
    assert (documents(splits["validation"]), documents(splits["train"])) == (["one"], ["two"])


def test_validation_file_is_used_completely(corpus, tmp_path, texts):
    (tmp_path / "valid.txt").write_text("a\nb\n")
    splits = load(corpus, validation_file=[str(tmp_path / "valid.txt")])
    assert documents(splits["validation"]) == ["a", "b"]
    assert documents(splits["train"]) == texts


def test_a_stream_is_split_by_the_hash_of_the_document(corpus, texts):
    splits = load(corpus, streaming=True, validation_split_percentage=20)
    validation, train = documents(splits["validation"]), documents(splits["train"])
    assert sorted(validation + train) == sorted(texts)
    assert not set(validation) & set(train)
    assert 15 <= len(validation) <= 65  # 40 expected of 200
    again = load(corpus, streaming=True, validation_split_percentage=20)
    assert documents(again["validation"]) == validation


@pytest.mark.parametrize("validation", [0, 20])
def test_stream_has_a_test_split(corpus, texts, validation):
    splits = load_splits(
        CausalArguments(
            train_file=[str(corpus)],
            streaming=True,
            validation_split_percentage=validation,
            test_split_percentage=20,
        )
    )
    parts = [documents(splits[name]) for name in splits]
    assert sorted(sum(parts, [])) == sorted(texts)
    assert len(splits) == (3 if validation else 2) and all(len(part) > 15 for part in parts)


def test_test_split_percentage_refers_to_the_full_text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(10)))
    for shares, sizes in (((50, 40), (1, 5, 4)), ((49, 50), (1, 5, 4)), ((0, 30), (7, 0, 3))):
        splits = load_splits(
            CausalArguments(
                train_file=[str(tmp_path / "a.txt")],
                validation_split_percentage=shares[0],
                test_split_percentage=shares[1],
            )
        )
        assert tuple(len(splits.get(n, ())) for n in ("train", "validation", "test")) == sizes


def test_too_few_documents_for_a_test_split_names_the_flags(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    flags = CausalArguments(train_file=[str(tmp_path / "a.txt")], test_split_percentage=5)
    with pytest.raises(DataError, match="1 document left, .* for test; use --test_file"):
        load_splits(flags)


@pytest.mark.parametrize("streaming", [False, True])
def test_sample_limits_keep_the_first_documents(corpus, texts, streaming):
    splits = load(corpus, max_train_samples=7, max_eval_samples=3, streaming=streaming)
    assert len(documents(splits["train"])) == 7
    assert len(documents(splits["validation"])) == 3


def test_text_files_can_be_cut_at_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    splits = load(tmp_path / "a.txt", sample_by="paragraph", validation_split_percentage=0)
    assert documents(splits["train"]) == ["one\ntwo", "three\n"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_column_of_strings_is_the_text(tmp_path, streaming):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "body": "x", "title": "y"}\n' * 3)
    assert load(tmp_path / "a.jsonl", streaming=streaming).text_column == "body"
    selected = load(tmp_path / "a.jsonl", text_column_name="title", streaming=streaming)
    assert selected.text_column == "title"


def test_words_like_na_survive_csv(tmp_path):
    (tmp_path / "a.csv").write_text("text\nNA\nnull\nhei\n")
    splits = load(tmp_path / "a.csv", validation_split_percentage=0)
    assert documents(splits["train"]) == ["NA", "null", "hei"]


def test_reference_positions_follow_their_documents_into_the_splits(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\nthree\nfour\n")
    (tmp_path / "ref").write_text("[1]\n[2]\n[3]\n[4]\n")
    splits = load(
        tmp_path / "a.txt", train_ref_file=str(tmp_path / "ref"), validation_split_percentage=25
    )
    assert splits["validation"]["chinese_ref"][:] == [[1]]
    assert splits["train"]["chinese_ref"][:] == [[2], [3], [4]]


class Plugins:
    def __init__(self, answer):
        self.answer = answer

    def call_first(self, hook, name, arguments):
        assert hook == "load_dataset"
        return self.answer


def test_a_plugin_answers_before_the_hub():
    from datasets import Dataset

    actual = {"train": Dataset.from_dict({"text": ["a", "b"]}), "test": None}
    splits = load_splits(
        DataArguments(dataset_name="private", validation_split_percentage=0), Plugins(actual)
    )
    assert documents(splits["train"]) == ["a", "b"]
    with pytest.raises(DataError, match="--dataset_name private has the splits test"):
        load_splits(DataArguments(dataset_name="private"), Plugins({"test": None}))


def test_a_dataset_saved_to_disk_is_a_dataset_name(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_dict({"text": ["a", "b"]})}).save_to_disk(tmp_path / "saved")
    splits = load_splits(DataArguments(dataset_name=str(tmp_path / "saved")))
    assert documents(splits["train"]) == ["b"]


def fail_with(monkeypatch, error):
    import datasets

    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_an_unreachable_hub_is_named(monkeypatch):
    fail_with(monkeypatch, ConnectionError("Couldn't reach 'org/corpus' on the Hub"))
    with pytest.raises(
        DataError, match="--dataset_name org/corpus.*cannot reach the Hub.*--train_file"
    ):
        load_splits(DataArguments(dataset_name="org/corpus"))


def test_loading_scripts_are_explained(monkeypatch):
    fail_with(monkeypatch, RuntimeError("Dataset scripts are no longer supported, but found x.py"))
    with pytest.raises(
        DataError, match="org/scripted.*no longer supports loading scripts.*parquet"
    ):
        load_splits(DataArguments(dataset_name="org/scripted"))
    fail_with(monkeypatch, ConnectionError("offline"))
    with pytest.raises(DataError, match="oscar.*no longer supports loading scripts"):
        load_splits(DataArguments(dataset_name="oscar"))


def test_no_data_is_a_usage_error():
    with pytest.raises(UsageError, match="--dataset_name or --train_file"):
        load_splits(DataArguments())


BAD_FILES = {
    "empty.txt": (b"", "empty.txt is empty"),
    "blank.txt": (b"\n \n", "blank.txt is empty"),
    "binary.txt": (b"\x7fELF\0\0\0\1", "binary.txt is binary"),
    "utf16.txt": ("hei".encode("utf-16"), "utf16.txt is binary.*UTF-16"),
    "latin1.txt": (b"god dag\nbl\xe5b\xe6r\n", "latin1.txt is not UTF-8: byte 0xe5 at offset 10"),
    "latin1.jsonl": (b'{"text": "a"}\n{"text": "\xe5"}\n', "latin1.jsonl is not UTF-8.*offset 24"),
    "latin1.csv": (b"text\na\n\xe5\n", "latin1.csv is not UTF-8: byte 0xe5 at offset 7"),
    "cut.txt": (b"god dag \xc3", "cut.txt is not UTF-8: byte 0xc3 at offset 8"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": oops}\n', "bad.jsonl, line 2 is not valid JSON"),
    "list.jsonl": (b'{"text": "a"}\n["b"]\n', "list.jsonl, line 2 is not a JSON object"),
    "bad.json": (b'[{"text": "a"},\n{"text": ]', "bad.json is not valid JSON.*line 2"),
    "bad.csv": (b"text,n\na,1\nb,2,3,4\n", "bad.csv, line 3 has 4 columns, .* has 2"),
    "bad.parquet": (b"not parquet", "bad.parquet is not valid parquet"),
    "bad.txt.gz": (b"not gzip", "bad.txt.gz cannot be read"),
    "notes.docx": (b"hei", r"notes.docx: unknown extension '.docx'.*\.jsonl"),
    "numbers.csv": (b"a,b\n1,2\n3,4\n", r"no column contains text; .* a \(numbers\), b"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_error_names_file_and_problem(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / name)


def test_missing_files_directories_and_mixtures_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.csv").write_text("text\na\n")
    with pytest.raises(DataError, match="--train_file .*nope.txt does not exist"):
        load(tmp_path / "nope.txt")
    with pytest.raises(DataError, match="matches no file"):
        load(f"{tmp_path}/*.parquet")
    with pytest.raises(DataError, match="is a directory"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"mixes .csv and .txt"):
        load(tmp_path / "a.txt", tmp_path / "b.csv")
    with pytest.raises(DataError, match="nosuchscheme"):
        load("nosuchscheme://a.txt")


def test_missing_text_column_error_lists_the_columns(corpus):
    with pytest.raises(DataError, match="--text_column_name txt.*id, text; did you mean 'text'"):
        load(corpus, text_column_name="txt")
    with pytest.raises(DataError, match=r"'id' does not contain text; .* id \(int64\), text"):
        load(corpus, text_column_name="id")


def test_one_document_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(DataError, match="1 document, too few.*--validation_file"):
        load(tmp_path / "a.txt")


def test_reference_files_must_match_the_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "ref").write_text("[1]\n")
    with pytest.raises(DataError, match="ref has 1 lines for 2 documents"):
        load(tmp_path / "a.txt", train_ref_file=str(tmp_path / "ref"))
    with pytest.raises(DataError, match="nope cannot be read"):
        load(tmp_path / "a.txt", train_ref_file=str(tmp_path / "nope"))
