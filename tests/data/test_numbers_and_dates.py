import re
import sys

import pytest

from hfseq.data import numbers_and_dates
from hfseq.data.numbers_and_dates import generate_pairs, target_language
from hfseq.errors import UsageError

MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


@pytest.fixture
def packages():
    """Skips without num2words and Babel, and clears cached pairs."""
    pytest.importorskip("num2words")
    pytest.importorskip("babel")
    generate_pairs.cache_clear()
    yield
    generate_pairs.cache_clear()


@pytest.fixture
def few(packages, monkeypatch):
    """Generates fewer items than the demonstration."""
    sizes = {"CARDINALS": 800, "LARGEST": 1_000, "YEARS": range(1500, 1600), "DAYS": 600}
    for name, value in sizes.items():
        monkeypatch.setattr(numbers_and_dates, name, value)


def day_of(text):
    """Returns (year, month, day) of an English date, or None."""
    match = re.fullmatch(r"(?:\w+day, )?(\w{3})\w* (\d+), (\d{4})", text)
    return match and (int(match[3]), MONTHS.index(match[1]), int(match[2]))


@pytest.mark.slow
def test_about_twenty_thousand_short_pairs(packages):
    splits = generate_pairs("de")
    counts = {name: len(pairs) for name, pairs in splits.items()}
    assert 18_000 < sum(counts.values()) < 20_000
    assert 500 < counts["validation"] < 700 and 500 < counts["test"] < 700
    assert max(len(text) for pairs in splits.values() for pair in pairs for text in pair) < 80


@pytest.mark.parametrize(
    "target, expected_names",
    [
        ("de", {"twenty-first": "einundzwanzigste", "fifteen oh-nine": "fünfzehnhundertneun"}),
        ("es", {"twenty-first": "vigésimo primero", "fifteen oh-nine": "mil quinientos nueve"}),
        ("nb", {"twenty-first": "tjueførste", "fifteen oh-nine": "femten hundre og ni"}),
    ],
)
def test_known_translations(few, target, expected_names):
    pairs = dict(pair for split in generate_pairs(target).values() for pair in split)
    assert {source: pairs[source] for source in expected_names} == expected_names


def test_a_date_has_the_same_day_on_both_sides(few):
    dates = [(day_of(s), t) for s, t in generate_pairs("de")["train"] if day_of(s)]
    assert len(dates) > 1_000
    for (year, _, day), target in dates:
        assert str(year) in target and re.search(rf"\b0?{day}\.", target)


def test_month_equal_to_its_abbreviation_has_one_translation(few):
    pairs = [pair for split in generate_pairs("de").values() for pair in split]
    may = [target for source, target in pairs if source.startswith("May ")]
    june = [target for source, target in pairs if source.startswith("Jun ")]
    assert may and all(" Mai " in target for target in may)  # the long form, never 07.05.2001
    assert june and all(re.fullmatch(r"\d\d\.06\.\d{4}", target) for target in june)


def test_no_date_of_the_test_is_in_the_training_pairs_in_any_form(few):
    splits = generate_pairs("de")
    days = {name: {day_of(s) for s, _ in pairs} - {None} for name, pairs in splits.items()}
    assert len(days["test"]) > 9 and len(days["validation"]) > 9
    assert not days["test"] & days["train"] and not days["validation"] & days["train"]
    assert not days["test"] & days["validation"]


@pytest.mark.slow
def test_no_number_of_the_test_is_in_the_training_pairs_in_any_form(few):
    from num2words import num2words

    splits, numbers = generate_pairs("de"), [*range(1_001), *range(1500, 1600)]
    forms = {
        num2words(n, to=f): n
        for f in ("year", "ordinal", "cardinal")
        for n in numbers
        if f != "year" or n >= 1500
    }
    actual = {name: {forms[s] for s, _ in pairs if s in forms} for name, pairs in splits.items()}
    assert len(actual["test"]) > 15
    assert not actual["test"] & actual["train"]


def test_a_source_has_one_translation_and_is_in_one_split(few):
    sources = [source for pairs in generate_pairs("nb").values() for source, _ in pairs]
    assert len(sources) == len(set(sources)) > 2_000


@pytest.mark.slow
def test_the_seed_decides(few):
    first = generate_pairs("de")
    generate_pairs.cache_clear()
    assert generate_pairs("de") == first
    other = generate_pairs("de", seed=1)
    assert other["train"][:20] != first["train"][:20]
    assert {s for s, _ in other["test"]} != {s for s, _ in first["test"]}


def test_languages():
    assert target_language(None, None) == "de"
    assert target_language("eng", "Spanish") == "es"
    assert target_language("en", "nb") == "nb"
    for pair in (("en", "fr"), ("de", "en"), (None, "xx")):
        with pytest.raises(UsageError, match="no data.*--train_file.*from en to de, es or nb"):
            target_language(*pair)


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "num2words", None)
    generate_pairs.cache_clear()
    with pytest.raises(UsageError, match=r"no data.*pip install 'hfseq\[translation\]'"):
        generate_pairs("de")
