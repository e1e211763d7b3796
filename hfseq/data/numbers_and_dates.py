"""Generates parallel text for the translation demonstration.

The text consists of numbers and dates, which num2words and Babel write out in both languages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import date, timedelta
from functools import lru_cache, partial
from hashlib import sha256
from importlib import metadata

from hfseq.data.arguments import SPLITS, TranslationArguments
from hfseq.data.languages import language_code
from hfseq.data.tables import Origin, Pair, PairColumns, PairSource
from hfseq.errors import UsageError, optional_import

SOURCE_LANG = "en"
#: Target languages, with their codes in num2words and Babel.
TARGET_LANGS = {"de": ("de", "de"), "es": ("es", "es"), "nb": ("no", "nb"), "no": ("no", "nb")}
CORPUS_NAME = "generated numbers and dates"  # in messages
CACHE_KEY = "numbers and dates"
HELD_OUT_PERCENT = 3  # size of the validation split, and of the test split
CARDINALS, DAYS = 6_000, 6_000
LARGEST, LARGEST_ORDINAL, YEARS = 9_999, 999, range(1500, 2100)
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)
DATE_FORMATS = ("full", "long", "medium")
FORMATS_PER_DAY = 2
REVISION = "2"  # increase when this module generates different pairs


def target_language(source_lang: str | None, target_lang: str | None) -> str:
    """Returns the target language of the generated pairs. The default is German.

    Raises:
        UsageError: The source is not English or the target is not supported.
    """
    target = language_code(target_lang) if target_lang else "de"
    if (source_lang and language_code(source_lang) != SOURCE_LANG) or target not in TARGET_LANGS:
        raise UsageError(
            f"no data for --source_lang {source_lang or SOURCE_LANG} --target_lang "
            f"{target_lang}: give --dataset_name or --train_file. Without data, hfseq generates "
            "numbers and dates, but only from en to de, es or nb (use --reverse_translation "
            "for the other direction)"
        )
    return target


@lru_cache(maxsize=4)
def generate_pairs(target: str, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Generates about 20,000 pairs of English text and its translation.

    The pairs are cardinal numbers, ordinal numbers and years in words, and dates in Babel's full,
    long and medium formats. All forms of a number or date are in the same split, so that no number
    or date of the validation and test splits occurs in the training split.

    Args:
        target: Target language: "de", "es", "nb" or "no".
        seed: Seed of the selection and the order. Equal seeds give equal pairs.

    Returns:
        Lists of `(source, target)` by split, in random order.

    Raises:
        UsageError: num2words or Babel is not installed.
    """
    feature = (
        "no data: give --dataset_name or --train_file. The demonstration on generated numbers and "
        "dates"
    )
    with optional_import(feature, ("num2words", "babel"), "hfseq[translation]"):
        from babel.dates import format_date
        from num2words import num2words
    rng, (language, locale) = random.Random(seed), TARGET_LANGS[target]
    pairs: list[tuple[str, str, str]] = []  # item, English, translation
    forms = {
        "cardinal": sorted(rng.sample(range(LARGEST + 1), CARDINALS)),
        "ordinal": range(1, LARGEST_ORDINAL + 1),
        "year": YEARS,
    }
    for form, numbers in forms.items():
        for number in numbers:
            source, text = (
                num2words(number, to=form, lang=code) for code in (SOURCE_LANG, language)
            )
            pairs.append((f"number {number}", source, text))
    for days in sorted(rng.sample(range((LAST_DAY - FIRST_DAY).days + 1), DAYS)):
        day = FIRST_DAY + timedelta(days)
        dates = [
            [
                format_date(day, date_format, locale=locale_name)
                for locale_name in (SOURCE_LANG, locale)
            ]
            for date_format in DATE_FORMATS
        ]
        translations = dict(reversed(dates))  # "May 7, 2001" is both long and medium: use the first
        for source, _ in rng.sample(dates, FORMATS_PER_DAY):
            pairs.append((f"date {day}", source, translations[source]))
    rng.shuffle(pairs)
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in SPLITS}
    used_sources = set()
    for item, source, text in pairs:
        if source not in used_sources:  # some years are spelled like the number
            used_sources.add(source)
            bucket = int(sha256(item.encode()).hexdigest()[:8], 16) % 100
            other_split = "validation" if bucket < 2 * HELD_OUT_PERCENT else "train"
            splits["test" if bucket < HELD_OUT_PERCENT else other_split].append((source, text))
    return splits


def generated_origins(arguments: TranslationArguments) -> dict[str, Origin]:
    """Returns the `Origin` of the generated pairs for each split."""
    target = target_language(arguments.source_lang, arguments.target_lang)
    # The key invalidates cached tokens when this module or one of the packages changes the pairs.
    versions: list[str | None] = [REVISION]
    for package in ("num2words", "Babel"):
        try:
            versions.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            versions.append(None)

    def read(split: str) -> Iterator[Pair]:
        for number, pair in enumerate(generate_pairs(target)[split], 1):
            yield number, *pair

    sides = PairColumns("source", "target", SOURCE_LANG, arguments.target_lang or target)
    return {
        split: (
            [
                PairSource(
                    CORPUS_NAME, [CACHE_KEY, split, target, *versions], partial(read, split), "pair"
                )
            ],
            sides,
        )
        for split in SPLITS
    }
