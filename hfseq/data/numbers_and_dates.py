"""Parallel text without any download: numbers and dates, spelled by num2words and Babel."""

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
from hfseq.errors import UsageError

SOURCE_LANG = "en"
#: Languages to translate into: what num2words and Babel call them.
TARGET_LANGS = {"de": ("de", "de"), "es": ("es", "es"), "nb": ("no", "nb"), "no": ("no", "nb")}
CORPUS_NAME, CACHE_KEY = (
    "generated numbers and dates",
    "numbers and dates",
)  # in messages, of a cache
HELD_OUT_PERCENT = 3  # percent of the items for validation, and as many for the test
CARDINALS, DAYS = 6_000, 6_000
LARGEST, LARGEST_ORDINAL, YEARS = 9_999, 999, range(1500, 2100)
FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)
DATE_FORMATS = ("full", "long", "medium")
FORMATS_PER_DAY = 2
REVISION = "2"  # of this file's pairs; another one where they change


def target_language(source_lang: str | None, target_lang: str | None) -> str:
    """Return the language to translate into from English; German by default."""
    target = language_code(target_lang) if target_lang else "de"
    if (source_lang and language_code(source_lang) != SOURCE_LANG) or target not in TARGET_LANGS:
        raise UsageError(
            f"no data for --source_lang {source_lang or SOURCE_LANG} --target_lang {target_lang}: give "
            "--dataset_name or --train_file. Without them there are generated numbers and dates, "
            "from en to de, es or nb (--reverse_translation for the other way)"
        )
    return target


@lru_cache(maxsize=4)
def generate_pairs(target: str, seed: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Return about 20,000 pairs of English and ``target`` ("de", "es", "nb"), by split.

    Cardinal and ordinal numbers and years in words, dates as the languages write them in full, long
    and medium form. What is held out for validation and test is the item: no number and no date of
    the test is in the training pairs in any form. Equal seeds give equal pairs, in random order.
    """
    try:
        from babel.dates import format_date
        from num2words import num2words
    except ImportError as error:
        raise UsageError(
            "no data: give --dataset_name or --train_file. The demonstration, which generates "
            "numbers and dates, needs num2words and Babel: "
            f'pip install "hfseq[translation]" ({error})'
        ) from error
    chooser, (language, locale) = random.Random(seed), TARGET_LANGS[target]
    pairs: list[tuple[str, str, str]] = []  # item, English, translation
    forms = {
        "cardinal": sorted(chooser.sample(range(LARGEST + 1), CARDINALS)),
        "ordinal": range(1, LARGEST_ORDINAL + 1),
        "year": YEARS,
    }
    for form, numbers in forms.items():
        for number in numbers:
            source, text = (
                num2words(number, to=form, lang=code) for code in (SOURCE_LANG, language)
            )
            pairs.append((f"number {number}", source, text))
    for days in sorted(chooser.sample(range((LAST_DAY - FIRST_DAY).days + 1), DAYS)):
        day = FIRST_DAY + timedelta(days)
        dates = [
            [format_date(day, f, locale=where) for where in (SOURCE_LANG, locale)]
            for f in DATE_FORMATS
        ]
        meant = dict(reversed(dates))  # "May 7, 2001" is long and medium: the first of them counts
        for source, _ in chooser.sample(dates, FORMATS_PER_DAY):
            pairs.append((f"date {day}", source, meant[source]))
    chooser.shuffle(pairs)
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in SPLITS}
    seen = set()
    for item, source, text in pairs:
        if source not in seen:  # English spells some years as it does the number
            seen.add(source)
            place = int(sha256(item.encode()).hexdigest()[:8], 16) % 100
            rest = "validation" if place < 2 * HELD_OUT_PERCENT else "train"
            splits["test" if place < HELD_OUT_PERCENT else rest].append((source, text))
    return splits


def generated_origins(arguments: TranslationArguments) -> dict[str, Origin]:
    """Return how to read the pairs of each split, and the languages."""
    target = target_language(arguments.source_lang, arguments.target_lang)
    # What is tokenised is made anew where the pairs change: with this file, or with the packages.
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
