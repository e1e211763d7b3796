import json
import logging
from hashlib import sha256
from types import SimpleNamespace

import pytest

from hfseq.data.parallel import load_pairs
from hfseq.errors import DataError
from tests.data.parallel_samples import PAIRS, flags, pairs


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "pairs.csv"
    file.write_text("english,german\n" + "".join(f"{s},{t}\n" for s, t in PAIRS))
    return file


def place(source):
    return int(sha256(source.encode()).hexdigest()[:8], 16) % 1000


def test_pairs_have_two_string_columns_and_their_languages(table):
    splits = load_pairs(flags(table))
    assert list(splits) == ["train"]
    assert splits["train"].column_names == ["source", "target"]
    assert pairs(splits["train"]) == PAIRS
    assert (splits.source_lang, splits.target_lang) == ("en", "de")
    assert splits.description["pairs"] == {"train": 40}


def test_the_split_is_by_the_hash_of_the_source_sentence(table):
    splits = load_pairs(flags(table, validation_split_percentage=20, test_split_percentage=10))
    for s, t in PAIRS:
        name = "test" if place(s) < 100 else "validation" if place(s) < 300 else "train"
        assert (s, t) in pairs(splits[name])
    assert sum(map(len, splits.values())) == 40
    assert list(splits) == ["train", "validation", "test"]


def test_all_translations_of_a_sentence_are_on_one_side(tmp_path):
    file = tmp_path / "many.tsv"
    file.write_text("".join(f"source {i % 50}\ttranslation {i}\n" for i in range(500)))
    splits = load_pairs(flags(file, validation_split_percentage=30))
    sides = [set(splits[name]["source"]) for name in ("train", "validation")]
    assert not sides[0] & sides[1]
    assert len(sides[0]) + len(sides[1]) == 50
    assert len(splits["validation"]) == 10 * len(sides[1])


@pytest.mark.slow
def test_the_published_split_of_the_tatoeba_pairs(shared):
    file = shared / "en-es-tatoeba" / "english-spanish.csv"
    options = {"validation_split_percentage": 1, "test_split_percentage": 1}
    splits = load_pairs(flags(file, **options))
    counts = {"train": 116_565, "validation": 1_214, "test": 1_185}
    assert {name: len(split) for name, split in splits.items()} == counts
    assert splits["train"][0] == {"source": "Go.", "target": "Ve."}
    reverse = load_pairs(flags(file, reverse_translation=True, **options))
    assert reverse["test"]["source"][:] == splits["test"]["target"][:]
    assert reverse["test"]["target"][:] == splits["test"]["source"][:]


def test_files_of_the_press_office_without_a_header(shared):
    folder = shared / "nb-nn-npk"
    names = {
        f"{split}_file": [folder / f"nb_nn_{name}.tsv"]
        for split, name in (("train", "train"), ("validation", "dev"), ("test", "test"))
    }
    splits = load_pairs(flags(source_lang="nb", target_lang="nn", **names))
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 10_000,
        "validation": 10_001,
        "test": 10_000,
    }


def test_reversing_swaps_sides_and_languages(table):
    splits = load_pairs(flags(table, reverse_translation=True))
    assert pairs(splits["train"]) == [(t, s) for s, t in PAIRS]
    assert splits["train"].column_names == ["source", "target"]
    assert (splits.source_lang, splits.target_lang) == ("de", "en")


def test_id_and_en_columns_are_languages(tmp_path):
    (tmp_path / "a.csv").write_text("id,en\nrumah,house\n")
    splits = load_pairs(flags(tmp_path / "a.csv", source_lang="id", target_lang="en"))
    assert pairs(splits["train"]) == [("rumah", "house")]


def test_a_small_file_still_gets_a_validation_pair(tmp_path):
    (tmp_path / "a.tsv").write_text("one\teins\ntwo\tzwei\nthree\tdrei\n")
    splits = load_pairs(flags(tmp_path / "a.tsv", validation_split_percentage=1))
    assert len(splits["validation"]) == 1 and len(splits["train"]) == 2
    assert splits["validation"]["source"][0] == min(("one", "two", "three"), key=place)


def test_one_sentence_cannot_be_split(tmp_path):
    (tmp_path / "a.tsv").write_text("one\teins\none\tein\n")
    with pytest.raises(DataError, match="too few sentences.*--validation_file"):
        load_pairs(flags(tmp_path / "a.tsv", validation_split_percentage=1))


def test_validation_file_disables_the_split(table, tmp_path):
    (tmp_path / "v.csv").write_text("english,german\nnew,neu\n")
    splits = load_pairs(
        flags(table, validation_file=[tmp_path / "v.csv"], validation_split_percentage=50)
    )
    assert pairs(splits["validation"]) == [("new", "neu")]
    assert pairs(splits["train"]) == PAIRS


def test_test_file_is_sufficient(tmp_path):
    (tmp_path / "t.csv").write_text("english,german\nnew,neu\n")
    assert list(load_pairs(flags(test_file=[tmp_path / "t.csv"]))) == ["test"]


def test_sample_limits_keep_the_first_pairs(table):
    splits = load_pairs(
        flags(
            table,
            max_train_samples=3,
            max_eval_samples=2,
            max_test_samples=100,
            validation_split_percentage=20,
            test_split_percentage=10,
        )
    )
    assert len(splits["train"]) == 3 and len(splits["validation"]) == 2
    assert 1 < len(splits["test"]) < 40


def test_pairs_with_an_empty_side_are_left_out_and_reported(tmp_path, messages):
    file = tmp_path / "holes.csv"
    file.write_text("english,german\none,eins\n,zwei\nthree,  \n,\n five ,fünf\n")
    splits = load_pairs(flags(file))
    assert pairs(splits["train"]) == [("one", "eins"), ("five", "fünf")]
    assert splits.description["dropped"] == {"train": 3}
    first = splits.description["first_dropped"]["train"]
    assert [entry.split(".csv, ")[1] for entry in first] == [
        "line 3: empty source",
        "line 4: empty target",
        "line 5: empty source and target",
    ]
    assert "left out 3 train pairs" in messages()


def test_a_file_with_empty_pairs_only_is_an_error_that_shows_some(tmp_path):
    (tmp_path / "a.csv").write_text("english,german\none,\n")
    with pytest.raises(DataError, match=r"a\.csv contains no pairs.*line 2: empty target"):
        load_pairs(flags(tmp_path / "a.csv"))


def test_a_line_break_in_a_cell_becomes_a_space(tmp_path):
    (tmp_path / "a.csv").write_text('english,german\n"one\n two",eins\nthree,drei\n')
    assert pairs(load_pairs(flags(tmp_path / "a.csv"))["train"])[0] == ("one two", "eins")


def test_fingerprints_depend_on_the_pairs_and_not_on_the_file(table, tmp_path):
    copy = tmp_path / "copy.tsv"
    copy.write_text("".join(f"{s}\t{t}\n" for s, t in PAIRS))
    prints = [load_pairs(flags(file))["train"]._fingerprint for file in (table, copy, table)]
    assert len(set(prints)) == 1
    copy.write_text(copy.read_text().replace("Haus", "Hütte"))
    assert load_pairs(flags(copy))["train"]._fingerprint != prints[0]
    reverse = [load_pairs(flags(table, reverse_translation=True))["train"] for _ in range(2)]
    assert reverse[0]._fingerprint == reverse[1]._fingerprint != prints[0]


def test_the_pairs_are_read_once_and_then_mapped(table, monkeypatch):
    first = load_pairs(flags(table))
    monkeypatch.setattr("hfseq.data.store.StringTableWriter.add", None)
    again = load_pairs(flags(table))
    assert pairs(again["train"]) == pairs(first["train"])
    with pytest.raises(TypeError):
        load_pairs(flags(table, overwrite_cache=True))


def test_a_changed_file_is_read_again(table):
    load_pairs(flags(table))
    table.write_text(table.read_text() + "one more,noch eins\n")
    assert len(load_pairs(flags(table))["train"]) == 41


def test_splits_that_go_different_ways_are_refused(table, tmp_path):
    (tmp_path / "v.csv").write_text("german,english\nneu,new\n")
    with pytest.raises(DataError, match="from de to en, but .* from en to de.*--source_lang"):
        load_pairs(flags(table, validation_file=[tmp_path / "v.csv"]))
    splits = load_pairs(flags(table, validation_file=[tmp_path / "v.csv"], source_lang="en"))
    assert pairs(splits["validation"]) == [("new", "neu")]


def test_a_dataset_directory_with_translations(tmp_path):
    from datasets import Dataset, DatasetDict, Features, Translation

    rows = {"translation": [{"de": t, "en": s} for s, t in PAIRS]}
    split = Dataset.from_dict(rows, Features({"translation": Translation(["de", "en"])}))
    DatasetDict(
        train=split, validation=split.select(range(3)), test=split.select([7])
    ).save_to_disk(tmp_path / "wmt")
    name = str(tmp_path / "wmt")
    splits = load_pairs(flags(dataset_name=name))
    assert pairs(splits["train"]) == [(t, s) for s, t in PAIRS]
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 40,
        "validation": 3,
        "test": 1,
    }
    splits = load_pairs(flags(dataset_name=name, source_lang="en", target_lang="de"))
    assert pairs(splits["test"]) == [PAIRS[7]]
    with pytest.raises(DataError, match="--target_lang fr; the columns are de, en"):
        load_pairs(flags(dataset_name=name, source_lang="en", target_lang="fr"))


def test_plugin_dataset_precedes_the_hub(table):
    from datasets import Dataset

    requested = []

    def call_first(hook, name, arguments):
        requested.append((hook, name))
        columns = {"id": [1], "english": ["house"], "german": ["Haus"]}
        return {"train": Dataset.from_dict(columns)}

    splits = load_pairs(flags(dataset_name="ours"), SimpleNamespace(call_first=call_first))
    assert requested == [("load_dataset", "ours")]
    assert pairs(splits["train"]) == [("house", "Haus")]


def test_a_stream_from_a_plugin_is_refused():
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(lambda: iter([{"en": "a", "de": "b"}]))
    plugins = SimpleNamespace(call_first=lambda *_, **__: {"train": stream})
    with pytest.raises(DataError, match="is a stream"):
        load_pairs(flags(dataset_name="ours"), plugins)


def test_script_dataset_error_suggests_an_alternative(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Dataset scripts are no longer supported, but found wmt14.py")

    monkeypatch.setattr("datasets.load_dataset", fails)
    with pytest.raises(DataError, match="--dataset_name wmt/wmt14 --dataset_config_name de-en"):
        load_pairs(flags(dataset_name="wmt14", dataset_config_name="de-en"))


def test_without_data_the_demonstration_is_generated(caplog):
    pytest.importorskip("num2words")
    pytest.importorskip("babel")
    with caplog.at_level(logging.WARNING):
        splits = load_pairs(flags(target_lang="es", max_train_samples=100))
    assert "demonstration" in caplog.text
    assert list(splits) == ["train", "validation", "test"] and len(splits["train"]) == 100
    assert (splits.source_lang, splits.target_lang) == ("en", "es")


def test_pairs_survive_a_trip_to_another_process(table):
    import pickle

    split = load_pairs(flags(table))["train"]
    assert pairs(pickle.loads(pickle.dumps(split))) == PAIRS


@pytest.mark.slow
def test_failing_file_leaves_no_cache(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    rows = [json.dumps({"en": s, "de": t}) for s, t in PAIRS]
    file.write_text("\n".join([*rows, "{oops"]))
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"a\.jsonl, line 41 is not valid JSON"):
        load_pairs(flags(file, data_cache_dir=str(cache)))
    assert not [path for path in cache.iterdir() if path.is_dir()]
