"""From the flags to splits of pairs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hfseq.data import files as data_files
from hfseq.data import sources
from hfseq.data.languages import same_language
from hfseq.data.parallel import tfds
from hfseq.data.parallel.aligned import aligned_parts
from hfseq.data.parallel.columns import Sides, choose_columns
from hfseq.data.parallel.store import BATCH, Pair, PairFiles, Part, Shares, store_pairs
from hfseq.data.parallel.tables import EXTENSIONS, arrow_pairs, table_part
from hfseq.data.translation_arguments import TranslationArguments
from hfseq.errors import DataError

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
GENERATED = "generated numbers and dates"
NO_SCRIPTS = (
    "`datasets` no longer runs loading scripts, which is how {name} was distributed. Use parallel "
    "text stored as parquet, e.g. `--dataset_name wmt/wmt14 --dataset_config_name de-en`, or your "
    "own files with --train_file"
)

#: What a split is read from, and what its sides are called.
Origin = tuple[list[Part], Sides]


class PairSplits(dict[str, Any]):
    """The splits by name ("train", "validation", "test"; any may be absent).

    Each is a map-style ``datasets.Dataset`` with the string columns "source" and "target".
    ``source_lang`` and ``target_lang`` are as asked for or as the data names them, else None;
    ``description`` holds pairs a split and what was dropped.
    """

    def __init__(
        self,
        splits: dict[str, Any],
        source_lang: str | None = None,
        target_lang: str | None = None,
        description: dict[str, Any] | None = None,
    ):
        super().__init__(splits)
        self.source_lang, self.target_lang = source_lang, target_lang
        self.description = description or {}


def load_pairs(arguments: TranslationArguments, plugins: Any = None) -> PairSplits:
    """Load the pairs that the flags ask for, and generate some where they ask for none.

    A dataset name is a prepared TFDS directory (``tfds:NAME/CONFIG``), or is offered to the
    plugins' ``load_dataset`` hook and looked up on the Hub; files are tables, aligned text files,
    or folders of those. Without a validation or test split, training pairs are set aside by the
    SHA-256 of the source sentence, so that all translations of one sentence are on one side, in
    every run. The key is the source as the data has it, with ``--reverse_translation`` too.

    Raises:
        DataError: the data is missing, unreadable, empty, or lacks a side.
    """
    origins = _origins(arguments, plugins)
    stored = _store(origins, arguments)
    splits = {name: files.dataset(name) for name, files in stored.items()}
    splits = {name: split for name, split in splits.items() if split is not None}
    limits = (arguments.max_train_samples, arguments.max_eval_samples, arguments.max_test_samples)
    for name, limit in zip(SPLITS, limits, strict=True):
        if name in splits and limit:
            splits[name] = splits[name].select(range(min(limit, len(splits[name]))))
    sides = _common_sides(list(origins.values()))
    source_lang, target_lang = sides.source_lang, sides.target_lang
    if arguments.reverse_translation:
        source_lang, target_lang = target_lang, source_lang
        swap = {"source": "target", "target": "source"}
        splits = {
            name: split.rename_columns(swap).select_columns(["source", "target"])
            for name, split in splits.items()
        }
    return PairSplits(splits, source_lang, target_lang, _describe(splits, origins, stored))


def _common_sides(origins: list[Origin]) -> Sides:
    """Return the sides of the first origin, after checking that the others go the same way."""
    first = origins[0]
    for parts, sides in origins[1:]:
        for side in ("source_lang", "target_lang"):
            here, there = getattr(first[1], side), getattr(sides, side)
            if here and there and not same_language(here, there):
                raise DataError(
                    f"{parts[0].name} would be translated from {sides.source_lang} into "
                    f"{sides.target_lang}, but {first[0][0].name} from {first[1].source_lang} into "
                    f"{first[1].target_lang}: say which with --source_lang and --target_lang"
                )
    return first[1]


def _origins(arguments: TranslationArguments, plugins: Any) -> dict[str, Origin]:
    """Return the parts of each split that the flags name."""
    origins: dict[str, Origin] = {}
    if arguments.dataset_name:
        origins = _named(arguments, plugins)
    for split in SPLITS:
        if patterns := getattr(arguments, f"{split}_file"):
            origins[split] = _from_files(patterns, split, arguments)
    return origins or _generated(arguments)


def _generated(arguments: TranslationArguments) -> dict[str, Origin]:
    from hfseq.data import numbers_and_dates as demonstration

    target = demonstration.target_language(arguments.source_lang, arguments.target_lang)
    sides = Sides("source", "target", demonstration.SOURCE, arguments.target_lang or target)
    logger.warning(
        "no --dataset_name and no --train_file: this is the demonstration, on generated numbers "
        "and dates (%s to %s)",
        *(sides.source_lang, sides.target_lang),
    )

    def part(split: str) -> Part:
        def read() -> Iterator[Pair]:
            for number, pair in enumerate(demonstration.generate(target)[split], 1):
                yield number, *pair

        key = ["numbers and dates", split, target, *demonstration.versions()]
        return Part(GENERATED, key, read, "pair")

    return {split: ([part(split)], sides) for split in SPLITS}


def _named(arguments: TranslationArguments, plugins: Any) -> dict[str, Origin]:
    name = str(arguments.dataset_name)
    flag = f"--dataset_name {name}"
    if name.startswith(tfds.PREFIX):
        return tfds.origins(name, flag, arguments)
    found = sources.load_named(arguments, plugins, SPLITS, NO_SCRIPTS)
    return {split: _from_dataset(found[split], f"{flag} ({split})", arguments) for split in found}


def _from_dataset(dataset: Any, where: str, arguments: TranslationArguments) -> Origin:
    """Return how to read a dataset: its "translation" by language, or two columns of strings."""
    if not hasattr(dataset, "_fingerprint"):
        raise DataError(f"{where} is a stream: a map-style dataset is needed, with all of its rows")
    features = dict(dataset.features)
    inner = features.get("translation")
    languages = list(
        getattr(inner, "languages", None) or (inner if isinstance(inner, dict) else [])
    )
    texts = [name for name, kind in features.items() if "string" in str(getattr(kind, "dtype", ""))]
    sides = choose_columns(languages or texts, arguments, where)
    columns = ["translation"] if languages else [sides.source, sides.target]

    def read() -> Iterator[Pair]:
        first = 1
        for table in dataset.select_columns(columns).with_format("arrow").iter(BATCH):
            yield from arrow_pairs(table, sides, bool(languages), first)
            first += len(table)

    key = [dataset._fingerprint, sides.source, sides.target]
    return [Part(where, key, read, "row")], sides


def _from_files(patterns: list[str], split: str, arguments: TranslationArguments) -> Origin:
    flag = f"--{split}_file"
    found: list[Origin] = []
    texts: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern.startswith(tfds.PREFIX):
            found.append(tfds.origin(pattern, flag, arguments, split))
        elif data_files.is_folder(pattern, flag):
            files = data_files.walk(pattern, flag)
            found.append(aligned_parts(files, flag, arguments, folder=True))
        else:
            for file in data_files.expand(pattern, flag):
                if data_files.extension_of(file) in EXTENSIONS:
                    part, sides = table_part(file, flag, arguments)
                    found.append(([part], sides))
                else:
                    texts.append(file)
    if texts:
        found.append(aligned_parts(texts, flag, arguments))
    return [part for parts, _ in found for part in parts], _common_sides(found)


def _store(origins: dict[str, Origin], arguments: TranslationArguments) -> dict[str, PairFiles]:
    """Write every split, and divide the training pairs where another one is missing."""

    def store(name: str, shares: Shares) -> PairFiles:
        parts = origins[name][0]
        files = store_pairs(parts, shares, arguments.cache_directory, arguments.overwrite_cache)
        if not files.report["pairs"]:
            listing = "; ".join(files.report.get("first_dropped", ()))
            where = f"{parts[0].name} …" if len(parts) > 1 else parts[0].name
            raise DataError(f"{where} holds no pairs" + (f": {listing}" if listing else ""))
        return files

    stored = {name: store(name, Shares(rest=name)) for name in origins if name != "train"}
    if "train" in origins:
        shares = Shares(
            test=0 if "test" in origins else 10 * arguments.test_split_percentage,
            validation=(
                0 if "validation" in origins else 10 * arguments.validation_split_percentage
            ),
        )
        files = store("train", shares)
        if shares.validation and "validation" not in files.report["pairs"]:
            # Too few sentences for any to fall below the share: take the one that comes closest.
            lowest = files.report["lowest"]
            files = store("train", replace(shares, validation=lowest + 1 - shares.test))
        if "train" not in files.report["pairs"]:
            raise DataError(
                f"{origins['train'][0][0].name} has too few sentences to set some aside for "
                "validation; give --validation_file, or --validation_split_percentage 0"
            )
        stored |= {name: files for name in files.report["pairs"]}
    return {name: stored[name] for name in SPLITS if name in stored}


def _describe(splits: dict, origins: dict[str, Origin], stored: dict[str, PairFiles]) -> dict:
    """Count pairs and what was dropped, and log the latter."""
    reports = {name: stored[name].report for name in origins}
    dropped = {name: report["dropped"] for name, report in reports.items() if report["dropped"]}
    first = {name: reports[name]["first_dropped"] for name in dropped}
    for name, count in dropped.items():
        shown = "; ".join(first[name])
        logger.warning("left out %d %s pairs with an empty side: %s", count, name, shown)
    pairs = {name: len(split) for name, split in splits.items()}
    first_part = next(iter(origins.values()))[0][0]
    description: dict[str, Any] = {"pairs": pairs, "dropped": dropped, "first_dropped": first}
    if first_part.name == GENERATED:
        description["name"] = GENERATED
    return description
