import gzip

import pytest

from hfseq.data.parallel import load_pairs, split_file_name
from hfseq.errors import DataError
from tests.data.parallel_samples import PAIRS, flags, pairs

SOURCES, TARGETS = map(list, zip(*PAIRS, strict=True))


def write(file, lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)
    return file


def pair_of(folder, first, second):
    return write(folder / first, SOURCES), write(folder / second, TARGETS)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("a/corpus.en", ("a/corpus", "en")),
        ("a/OpenSubtitles.en-es.es.gz", ("a/OpenSubtitles.en-es", "es")),
        ("doc_1-2_es.snt", ("doc_1-2", "es")),
        ("train.de.txt", ("train", "de")),
        ("newstest2014.tok.clean.en", ("newstest2014.tok.clean", "en")),
        ("a/en.txt", ("a/", "en")),
    ],
)
def test_pair_files_are_matched_by_name_and_side(name, expected):
    assert split_file_name(name) == expected


@pytest.mark.parametrize(
    "names",
    [
        ("corpus.en", "corpus.de"),
        ("en.txt", "de.txt"),
        ("train_eng.txt", "train_deu.txt"),
        ("a-english.txt.gz", "a-german.txt.gz"),
        ("europarl-v7.de-en.en", "europarl-v7.de-en.de"),
        ("train.source", "train.target"),
        ("x.src.txt", "x.tgt.txt"),
    ],
)
def test_two_files_are_a_pair_by_their_names(tmp_path, names):
    files = pair_of(tmp_path, *names)
    splits = load_pairs(flags(*files, source_lang="en", target_lang="de"))
    assert pairs(splits["train"]) == PAIRS
    swapped = load_pairs(flags(*reversed(files), source_lang="en", target_lang="de"))
    assert pairs(swapped["train"]) == PAIRS


def test_without_languages_the_first_file_is_the_source(tmp_path):
    english, german = pair_of(tmp_path, "corpus.en", "corpus.de")
    splits = load_pairs(flags(german, english))
    assert pairs(splits["train"]) == [(t, s) for s, t in PAIRS]
    assert (splits.source_lang, splits.target_lang) == ("de", "en")
    for options in ({"source_lang": "en"}, {"target_lang": "de"}):
        assert pairs(load_pairs(flags(german, english, **options))["train"]) == PAIRS


def test_several_pairs_are_matched_by_name_and_not_by_order(tmp_path):
    item = pair_of(tmp_path, "b.en", "b.de")
    other = write(tmp_path / "a.en", ["first"]), write(tmp_path / "a.de", ["erste"])
    splits = load_pairs(flags(item[0], other[0], other[1], item[1]))
    assert pairs(splits["train"]) == [*PAIRS, ("first", "erste")]
    splits = load_pairs(flags(f"{tmp_path}/*.en", f"{tmp_path}/*.de"))
    assert sorted(pairs(splits["train"])) == sorted([*PAIRS, ("first", "erste")])


@pytest.mark.parametrize("difference", [-3, 2])
def test_different_line_counts_are_an_error_with_both_counts(tmp_path, difference):
    targets = TARGETS[:difference] if difference < 0 else TARGETS + ["x"] * difference
    files = write(tmp_path / "c.en", SOURCES), write(tmp_path / "c.de", targets)
    message = rf"c\.en has 40 lines and .*c\.de {40 + difference};"
    with pytest.raises(DataError, match=message):
        load_pairs(flags(*files))


def test_names_that_do_not_belong_together_are_refused(tmp_path):
    files = pair_of(tmp_path, "europarl.en", "news.de")
    with pytest.raises(DataError, match=r"europarl\.en and .*news\.de .* have no partner"):
        load_pairs(flags(*files))
    files = pair_of(tmp_path, "left.txt", "right.txt")
    with pytest.raises(DataError, match=r"left\.txt, .*right\.txt: .* no language; .*corpus\.en"):
        load_pairs(flags(*files))
    files = pair_of(tmp_path, "corpus.en", "corpus.es")
    with pytest.raises(DataError, match=r"corpus\.es: its name ends neither in en nor in de"):
        load_pairs(flags(*files, source_lang="en", target_lang="de"))


def test_a_lone_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="contain the languages en; use a pair"):
        load_pairs(flags(write(tmp_path / "corpus.en", SOURCES)))


def test_empty_lines_are_left_out_on_both_sides(tmp_path):
    files = write(tmp_path / "c.en", ["a", "", "c"]), write(tmp_path / "c.de", ["A", "B", "C"])
    splits = load_pairs(flags(*files))
    assert pairs(splits["train"]) == [("a", "A"), ("c", "C")]
    assert splits.description["first_dropped"]["train"][0].endswith(
        "c.en and c.de, line 2: empty source"
    )


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    files = pair_of(tmp_path, "c.en", "c.de")
    files[1].write_bytes("\n".join(TARGETS).encode("latin1"))
    with pytest.raises(DataError, match=r"c\.de is not UTF-8: byte 0xab .*\(line 1\).*iconv"):
        load_pairs(flags(*files))


def test_a_multiun_folder_is_paired_by_document(tmp_path):
    for i in range(3):  # Spanish is written first, but sorts last
        write(tmp_path / "un" / f"doc{i}_es.snt", [f"frase {i}.{k}" for k in range(i + 1)])
        write(tmp_path / "un" / f"doc{i}_en.snt", [f"sentence {i}.{k}" for k in range(i + 1)])
    write(tmp_path / "un" / "README", ["about"])
    splits = load_pairs(flags(tmp_path / "un", source_lang="en", target_lang="es"))
    got = pairs(splits["train"])
    assert len(got) == 6
    assert all(s.split()[1] == t.split()[1] for s, t in got)
    assert got[0] == ("sentence 0.0", "frase 0.0")


def test_documents_without_a_partner_are_left_out_and_named(tmp_path, messages):
    pair_of(tmp_path / "un", "a_en.snt", "a_es.snt")
    write(tmp_path / "un" / "b_en.snt", ["alone"])
    write(tmp_path / "un" / "empty_en.snt", [])
    write(tmp_path / "un" / "empty_es.snt", [])
    splits = load_pairs(flags(tmp_path / "un"))
    assert pairs(splits["train"]) == PAIRS
    assert "1 files have no partner and are left out" in messages() and "b_en.snt" in messages()


def test_an_opus_folder_with_several_pairs_of_languages(tmp_path):
    pair_of(tmp_path / "opus", "X.de-en.en.gz", "X.de-en.de.gz")
    write(tmp_path / "opus" / "X.en-es.en", ["house"])
    write(tmp_path / "opus" / "X.en-es.es", ["casa"])
    write(tmp_path / "opus" / "X.en-es.ids", ["1 1"])
    folder = tmp_path / "opus"
    assert pairs(load_pairs(flags(folder, source_lang="es", target_lang="en"))["train"]) == [
        ("casa", "house")
    ]
    assert pairs(load_pairs(flags(folder, source_lang="en", target_lang="de"))["train"]) == PAIRS
    with pytest.raises(DataError, match="contain the languages de, en, es; .*--source_lang"):
        load_pairs(flags(folder))
    with pytest.raises(DataError, match="of the languages fr and it has no partner"):
        load_pairs(flags(folder, source_lang="fr", target_lang="it"))
