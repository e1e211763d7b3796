import gzip
import json

import pytest

from hfseq.data.parallel import load_pairs
from hfseq.errors import DataError
from tests.data.parallel_samples import PAIRS, flags, pairs

GERMAN_FIRST = {"source_lang": "de", "target_lang": "en"}


def write(directory, name, header=("english", "german")):
    """Writes PAIRS in the format of the file extension."""
    file = directory / name
    if ".csv" in name:
        text = ",".join(header) + "\n" + "".join(f'"{s}",{t}\n' for s, t in PAIRS)
    elif ".tsv" in name:
        text = "\t".join(header) + "\n" + "".join(f"{s}\t{t}\n" for s, t in PAIRS)
    else:
        rows = [dict(zip(header, pair, strict=True)) for pair in PAIRS]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        text = json.dumps(rows) if name.endswith(".json") else lines
    content = text.encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return file


def write_parquet(directory, columns):
    import pyarrow
    import pyarrow.parquet

    file = directory / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.csv.gz", "a.jsonl.gz"])
def test_every_format_gives_the_same_pairs(tmp_path, name):
    file = write(tmp_path, name)
    assert pairs(load_pairs(flags(file))["train"]) == PAIRS
    reverse = load_pairs(flags(file, **GERMAN_FIRST))
    assert pairs(reverse["train"]) == [(t, s) for s, t in PAIRS]


def test_parquet_with_columns_and_with_translations(tmp_path):
    sources, targets = map(list, zip(*PAIRS, strict=True))
    file = write_parquet(tmp_path, {"n": [*range(40)], "en": sources, "de": targets})
    assert pairs(load_pairs(flags(file))["train"]) == PAIRS
    file = write_parquet(tmp_path, {"translation": [{"en": s, "de": t} for s, t in PAIRS]})
    assert pairs(load_pairs(flags(file, **GERMAN_FIRST))["train"]) == [(t, s) for s, t in PAIRS]
    assert pairs(load_pairs(flags(file))["train"]) == PAIRS


def test_json_lines_as_the_translation_example_of_transformers_has_them(tmp_path):
    file = tmp_path / "a.json"
    rows = [{"translation": {"en": s, "de": t}} for s, t in PAIRS]
    rows.append({"translation": {"en": "alone"}})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = load_pairs(flags(file, source_lang="en", target_lang="de"))
    assert pairs(splits["train"]) == PAIRS
    assert splits.description["first_dropped"]["train"][0].endswith("line 41: empty target")


def test_columns_are_selected_by_flag_language_role_or_order(tmp_path):
    header = "id,source,EN,german,spanish\n"
    (tmp_path / "a.csv").write_text(header + "1,s,e,g,p\n")

    def chosen(**options):
        return pairs(load_pairs(flags(tmp_path / "a.csv", **options))["train"])[0]

    assert chosen(source_column="id", target_column="spanish") == ("1", "p")
    assert chosen(source_lang="eng", target_lang="es") == ("e", "p")
    assert chosen(source_lang="de", target_lang="en-US") == ("g", "e")
    assert chosen(target_lang="de") == ("s", "g")
    assert chosen() == ("s", "e")


def test_unknown_column_names_are_used_in_order(tmp_path):
    file = write_parquet(tmp_path, {"n": [1], "bitext_a": ["house"], "bitext_b": ["Haus"]})
    splits = load_pairs(flags(file, source_lang="en", target_lang="de"))
    assert pairs(splits["train"]) == [("house", "Haus")]
    assert (splits.source_lang, splits.target_lang) == ("en", "de")


def test_missing_language_error_lists_the_columns(tmp_path):
    file = write(tmp_path, "a.csv")
    with pytest.raises(DataError, match="--target_lang fr; the columns are english, german"):
        load_pairs(flags(file, source_lang="en", target_lang="fr"))
    with pytest.raises(DataError, match="--source_column englsh: no such .*did you mean 'english'"):
        load_pairs(flags(file, source_column="englsh"))
    with pytest.raises(DataError, match="both source and target"):
        load_pairs(flags(file, source_column="german", target_column="german"))


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_missing_header_is_logged(tmp_path, messages, name):
    file = write(tmp_path, name, header=("Hello there", "Guten Tag"))
    splits = load_pairs(flags(file, source_lang="en", target_lang="de"))
    assert pairs(splits["train"]) == [("Hello there", "Guten Tag"), *PAIRS]
    assert "has no header (Hello there | Guten Tag contains no known column name)" in messages()


def test_short_words_are_not_header(tmp_path):
    (tmp_path / "a.tsv").write_text("It\tEs\nIs\tEn\n")
    assert len(load_pairs(flags(tmp_path / "a.tsv"))["train"]) == 2


def test_quotation_marks_in_tsv_are_text(tmp_path):
    (tmp_path / "a.tsv").write_text('en\tde\n"Go\tLos"\n"No" he said\t"Nein"\n')
    got = pairs(load_pairs(flags(tmp_path / "a.tsv"))["train"])
    assert got == [('"Go', 'Los"'), ('"No" he said', '"Nein"')]


def test_line_numbers_count_lines_of_the_file_and_not_cells(tmp_path):
    (tmp_path / "a.csv").write_text('en,de\n\n"one\ntwo\nthree",drei\n"",vier\nok,gut\n')
    splits = load_pairs(flags(tmp_path / "a.csv"))
    assert splits.description["first_dropped"]["train"][0].endswith("line 6: empty source")


def test_only_a_line_feed_ends_a_line(tmp_path):
    source = "one\u2028two\x85three\x0cfour"
    (tmp_path / "a.tsv").write_bytes(f"en\tde\r\n{source}\teins\r\n".encode())
    assert pairs(load_pairs(flags(tmp_path / "a.tsv"))["train"]) == [(source, "eins")]


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path):
    (tmp_path / "a.csv").write_text("\ufeffenglish,german\nhouse,Haus\n")
    assert pairs(load_pairs(flags(tmp_path / "a.csv"))["train"]) == [("house", "Haus")]


BAD = {
    "cells.csv": (b"en,de\na,b\nHello, you,Hallo\n", r"line 3 has 3 columns, .* 2: quote cells"),
    "cells.tsv": (b"en\tde\na\tb\tc\n", "line 2 has 3 columns, .*remove the tab"),
    "one.csv": (b"en;de\na;b\n", "line 1 has one cell: .* by a comma"),
    "one.tsv": (b"en,de\na,b\n", "line 1 has one cell: .* by a tab"),
    "open.csv": (b'en,de\na,b\n"c,d\ne,f\n', "line 3 is not valid CSV"),
    "quote.csv": (b'en,de\n"No" he said,b\n', "line 2 is not valid CSV.*doubled"),
    "latin.csv": (b"en,de\na,b\nc,\xe5\n", r"latin.csv is not UTF-8: .*0xe5 .*\(line 3\).*iconv"),
    "latin.jsonl": (b'{"en": "a", "de": "\xe5"}\n', r"not UTF-8.*\(line 1\)"),
    "oops.jsonl": (b'{"en": "a", "de": "b"}\n\n{oops\n', "line 3 is not valid JSON"),
    "list.jsonl": (b'{"en": "a", "de": "b"}\n3\n', "line 2 is not a JSON object"),
    "number.jsonl": (
        b'{"en": "a", "de": "b"}\n{"en": 1, "de": "b"}\n',
        "line 2: 'en' is not a string",
    ),
    "half.jsonl": (b'{"en": "a", "de": "\\ud800"}\n', r"line 1: 'de' is not valid Unicode"),
    "array.json": (b'[{"en": "a", "de": "b"}, {"en"]', "not valid JSON"),
    "flat.jsonl": (b'{"translation": {"en": "a", "de": "b"}}\n{"translation": "x"}\n', "line 2"),
    "lone.jsonl": (b'{"en": "a"}\n', "no text column for the target; the columns are en"),
    "empty.csv": (b"", "empty.csv is empty"),
    "head.csv": (b"en,de\n", "contains no pairs"),
    "zero.tsv": ("en\tde\n".encode("utf-16"), "binary, not UTF-8.*UTF-16"),
    "not.parquet": (b"no parquet at all", "not valid parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_file_errors_name_file_and_line(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_pairs(flags(tmp_path / name))
    assert name in str(caught.value)


def test_parquet_with_bytes_that_are_not_text(tmp_path):
    import pyarrow

    bad = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    file = write_parquet(tmp_path, {"en": ["a", "b"], "de": bad})
    with pytest.raises(DataError, match=r"a\.parquet is not UTF-8"):
        load_pairs(flags(file))
