"""Parallel text without any download: numbers and dates, spelled by num2words and Babel."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, timedelta
from functools import lru_cache
from hashlib import sha256
from importlib import metadata

from hfseq.data.languages import code_of
from hfseq.errors import UsageError

SOURCE = "en"
#: Languages to translate into: what num2words and Babel call them.
TARGETS = {"de": ("de", "de"), "es": ("es", "es"), "nb": ("no", "nb"), "no": ("no", "nb")}
SPLITS = ("train", "validation", "test")
HELD_OUT = 3  # percent of the items for validation, and as many for the test
CARDINALS, DAYS = 6_000, 6_000
LARGEST, LARGEST_ORDINAL, YEARS = 9_999, 999, range(1500, 2100)
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)
FORMATS = ("full", "long", "medium")
FORMATS_A_DAY = 2
REVISION = "2"  # of this file's pairs; another one where they change


def target_language(source_lang: str | None, target_lang: str | None) -> str:
    """Return the language to translate into from English; German by default."""
    target = code_of(target_lang) if target_lang else "de"
    if (source_lang and code_of(source_lang) != SOURCE) or target not in TARGETS:
        raise UsageError(
            f"no data for --source_lang {source_lang or SOURCE} --target_lang {target_lang}: give "
            "--dataset_name or --train_file. Without them there are generated numbers and dates, "
            "from en to de, es or nb (--reverse_translation for the other way)"
        )
    return target


@lru_cache(maxsize=4)
def generate(target: str, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Return about 20,000 pairs of English and ``target`` ("de", "es", "nb"), by split.

    Cardinal and ordinal numbers and years in words, dates as the languages write them in full, long
    and medium form. What is held out for validation and test is the item: no number and no date of
    the test is in the training pairs in any form. Equal seeds give equal pairs, in random order.
    """
    chooser = random.Random(seed)
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in SPLITS}
    seen = set()
    pairs = [*_numbers(target, chooser), *_dates(target, chooser)]
    chooser.shuffle(pairs)
    for item, source, text in pairs:
        if source not in seen:  # English spells some years as it does the number
            seen.add(source)
            place = int(sha256(item.encode()).hexdigest()[:8], 16) % 100
            rest = "validation" if place < 2 * HELD_OUT else "train"
            splits["test" if place < HELD_OUT else rest].append((source, text))
    return splits


def versions() -> list[str | None]:
    """Return what the pairs depend on: what was tokenised of others is made anew."""
    made: list[str | None] = [REVISION]
    for package in ("num2words", "Babel"):
        try:
            made.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            made.append(None)
    return made


def _numbers(target: str, chooser: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield item, English, translation."""
    try:
        from num2words import num2words
    except ImportError as error:
        raise _missing(error) from error
    language = TARGETS[target][0]
    forms = {
        "cardinal": sorted(chooser.sample(range(LARGEST + 1), CARDINALS)),
        "ordinal": range(1, LARGEST_ORDINAL + 1),
        "year": YEARS,
    }
    for form, numbers in forms.items():
        for number in numbers:
            source, text = (num2words(number, to=form, lang=code) for code in (SOURCE, language))
            yield f"number {number}", source, text


def _dates(target: str, chooser: random.Random) -> Iterator[tuple[str, str, str]]:
    try:
        from babel.dates import format_date
    except ImportError as error:
        raise _missing(error) from error
    locales = (SOURCE, TARGETS[target][1])
    for days in sorted(chooser.sample(range((LAST_DAY - FIRST_DAY).days + 1), DAYS)):
        day = FIRST_DAY + timedelta(days)
        forms = [[format_date(day, form, locale=where) for where in locales] for form in FORMATS]
        meant = dict(reversed(forms))  # "May 7, 2001" is long and medium: the first of them counts
        for source, _ in chooser.sample(forms, FORMATS_A_DAY):
            yield f"date {day}", source, meant[source]


def _missing(error: ImportError) -> UsageError:
    return UsageError(
        "no data: give --dataset_name or --train_file. The demonstration, which generates numbers "
        f'and dates, needs num2words and Babel: pip install "hfseq[translation]" ({error})'
    )
