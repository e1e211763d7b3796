"""Loads pairs of source and target sentences (parallel text), cleans them, and stores them on disk.

Pairs come from tables, aligned text files, prepared TFDS directories, the Hub or a plugin.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b, sha256
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hfseq import errors
from hfseq.data import files, numbers_and_dates, sources, tables, tfds
from hfseq.data.arguments import SIDE_COLUMNS, SPLITS, TranslationArguments
from hfseq.data.languages import find_language, language_code, same_language
from hfseq.data.store import StringTableWriter, write_once
from hfseq.data.tables import Origin, Pair, PairColumns, PairSource
from hfseq.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)
NO_SCRIPTS = (
    "`datasets` no longer supports loading scripts, which {name} uses. Use parallel text in "
    "parquet format, e.g. `--dataset_name wmt/wmt14 --dataset_config_name de-en`, or local "
    "files with --train_file"
)


class PairSplits(dict[str, "Dataset"]):
    """Pairs by split.

    Args:
        splits: Datasets with the string columns "source" and "target", by split name. Any split may
            be absent.
        source_lang: Source language. This is the value of the flag or, without the flag, the
            language that the data specifies. `None` if it is unknown.
        target_lang: Target language, determined in the same way.
        description: Numbers of pairs and of dropped pairs per split.
    """

    def __init__(
        self,
        splits: dict[str, Dataset],
        source_lang: str | None = None,
        target_lang: str | None = None,
        description: dict[str, Any] | None = None,
    ):
        super().__init__(splits)
        self.source_lang, self.target_lang = source_lang, target_lang
        self.description = description or {}


@sources.cached_on_arguments
def load_pairs(arguments: TranslationArguments, plugins: Plugins | None = None) -> PairSplits:
    """Loads the pairs that the flags specify, or generates demonstration data if they specify none.

    `--dataset_name tfds:NAME/CONFIG` refers to a prepared TFDS directory. Other dataset names are
    passed to the plugins' `load_dataset` hook first, and looked up on the Hub if no plugin handles
    them. Files can be tables, aligned text files, or directories of aligned text files.

    If the validation or test split is missing, it is taken from the training pairs. The SHA-256
    hash of the source sentence determines the split, so that all translations of a sentence are in
    the same split in every run. With `--reverse_translation`, the hash of the original source
    sentence (before the sides are swapped) is used.

    Repeated calls with the same `arguments` object return the same result.

    Raises:
        DataError: The data is missing, unreadable or empty, or has no source or no target.
    """
    origins: dict[str, Origin] = {}
    if name := arguments.dataset_name:
        flag = f"--dataset_name {name}"
        if name.startswith(tfds.TFDS_PREFIX):
            origins = tfds.split_origins(name, flag, arguments)
        else:
            dataset_splits = sources.load_dataset_splits(arguments, plugins, SPLITS, NO_SCRIPTS)
            origins = {
                split: tables.dataset_origin(dataset, f"{flag} ({split})", arguments)
                for split, dataset in dataset_splits.items()
            }
    for split in SPLITS:
        if patterns := getattr(arguments, f"{split}_file"):
            origins[split] = _from_files(patterns, split, arguments)
    if not origins:
        origins = numbers_and_dates.generated_origins(arguments)
        sides = origins["train"][1]
        logger.warning(
            "no --dataset_name and no --train_file: training on the demonstration data, "
            "generated numbers and dates (%s to %s)",
            *(sides.source_lang, sides.target_lang),
        )
    stored = _store(origins, arguments)
    all_splits = {split: pairs.dataset(split) for split, pairs in stored.items()}
    splits = {split: dataset for split, dataset in all_splits.items() if dataset is not None}
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
    reports = {name: stored[name].report for name in origins}
    dropped = {name: report["dropped"] for name, report in reports.items() if report["dropped"]}
    first = {name: reports[name]["first_dropped"] for name in dropped}
    for name, count in dropped.items():
        examples = "; ".join(first[name])
        logger.warning("left out %d %s pairs with an empty side: %s", count, name, examples)
    pairs = {name: len(split) for name, split in splits.items()}
    description: dict[str, Any] = {"pairs": pairs, "dropped": dropped, "first_dropped": first}
    if next(iter(origins.values()))[0][0].name == numbers_and_dates.CORPUS_NAME:
        description["name"] = numbers_and_dates.CORPUS_NAME
    return PairSplits(splits, source_lang, target_lang, description)


def _common_sides(origins: list[Origin]) -> PairColumns:
    """Returns the columns and languages of the first origin.

    Raises:
        DataError: The languages of another origin differ.
    """
    first = origins[0]
    for parts, sides in origins[1:]:
        for side in ("source_lang", "target_lang"):
            first_language, language = getattr(first[1], side), getattr(sides, side)
            if first_language and language and not same_language(first_language, language):
                raise DataError(
                    f"{parts[0].name} would be translated from {sides.source_lang} to "
                    f"{sides.target_lang}, but {first[0][0].name} from {first[1].source_lang} "
                    f"to {first[1].target_lang}: specify --source_lang and --target_lang"
                )
    return first[1]


def _from_files(patterns: list[str], split: str, arguments: TranslationArguments) -> Origin:
    flag = f"--{split}_file"
    origins: list[Origin] = []
    texts: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if pattern.startswith(tfds.TFDS_PREFIX):
            origins.append(tfds.split_origin(pattern, flag, arguments, split))
        elif files.is_directory(pattern, flag):
            below = files.list_files(pattern, flag)
            origins.append(aligned_origin(below, flag, arguments, folder=True))
        else:
            for file in files.expand_patterns(pattern, flag):
                if files.extension_of(file) in tables.FORMATS:
                    origins.append(tables.file_origin(file, flag, arguments))
                else:
                    texts.append(file)
    if texts:
        origins.append(aligned_origin(texts, flag, arguments))
    return [part for parts, _ in origins for part in parts], _common_sides(origins)


MAX_REPORTED_FILES = 3
_LINE_BREAKS = re.compile(r"\s*[\r\n]+\s*")
_TEXT_EXTENSIONS = (".txt", ".text", ".snt", ".tok", ".clean")
_SIDE_SUFFIX = re.compile(r"^(?:(?P<stem>.*)[._-])?(?P<side>[^._-]+)$", re.DOTALL)
_SIDE_BY_NAME = {name: side for side, names in SIDE_COLUMNS.items() for name in names}


def aligned_origin(
    names: Sequence[str], flag: str, arguments: TranslationArguments, folder: bool = False
) -> Origin:
    """Returns the `Origin` of the pairs in aligned text files, which are matched by name.

    Two files are a pair if their names differ only in the language (`corpus.en` and `corpus.de`,
    `doc_en.snt` and `doc_es.snt`, `X.en-es.en` and `X.en-es.es`). Without `--source_lang` and
    `--target_lang` the language of the first file is the source.

    Args:
        names: The files.
        flag: The flag, for messages.
        arguments: The data flags.
        folder: Whether the files are the content of a directory. In a directory, files of other
            languages are ignored, and files without a partner are logged and left out.

    Raises:
        DataError: Files cannot be paired, or the languages cannot be determined.
    """
    entries = [(file, *split_file_name(file)) for file in names]
    if folder:
        entries = [entry for entry in entries if language_code(entry[2])]
    sides = _languages([side for _, _, side in entries], arguments, flag, names, folder)
    pairs, unpaired = _pair_files(entries, sides, flag, folder)
    reported = unpaired[:MAX_REPORTED_FILES]
    if not pairs or (unpaired and not folder):
        raise DataError(
            f"{flag}: {' and '.join(reported) or 'no file'} of the languages {sides.source} and "
            f"{sides.target} ha{'ve' if len(unpaired) > 1 else 's'} no partner; the names of a "
            f"pair must differ in the language only, e.g. corpus.{sides.source} and "
            f"corpus.{sides.target}"
        )
    if unpaired:
        logger.warning(
            "%s: %d files have no partner and are left out: %s",
            flag,
            len(unpaired),
            ", ".join(reported),
        )
    if not folder:  # files of a directory may be empty
        files.check_heads(names, "text", flag)
    return [_pair_source(source, target, flag) for source, target in pairs], sides


def _pair_files(
    entries: list[tuple[str, str, str]], sides: PairColumns, flag: str, folder: bool
) -> tuple[list[tuple[str, str]], list[str]]:
    """Matches source and target files with the same stem.

    Args:
        entries: Path, stem and language of each file.
        sides: The languages as spelled in the file names.
        flag: The flag, for messages.
        folder: Whether files of other languages are ignored instead of raising.

    Returns:
        The pairs of files, and the files without a partner.
    """
    by_stem: dict[str, dict[str, str]] = {}
    for file, stem, language in entries:
        side = next(
            (side for side in SIDE_COLUMNS if find_language([language], getattr(sides, side))), None
        )
        if side is None:
            if folder:
                continue
            raise DataError(
                f"{flag} {file}: its name ends neither in {sides.source} nor in {sides.target}; "
                f"use names such as corpus.{sides.source} and corpus.{sides.target} for the two "
                "files of a pair"
            )
        other = by_stem.setdefault(stem, {}).setdefault(side, file)
        if other != file:
            raise DataError(f"{flag}: {other} and {file} are both the {side} of the same pair")
    pairs: list[tuple[str, str]] = []
    unpaired: list[str] = []
    for pair in by_stem.values():
        if len(pair) == 2:
            pairs.append((pair["source"], pair["target"]))
        else:
            unpaired += pair.values()
    return pairs, unpaired


def split_file_name(file: str) -> tuple[str, str]:
    """Splits the name of a text file into a stem and a suffix.

    Both files of a pair have the same stem. The suffix identifies the side, usually by its
    language. For example, `a/X.en-es.en.gz` is split into "a/X.en-es" and "en", `doc_es.snt` into
    "doc" and "es", and `a/en.txt` into "a/" and "en".
    """
    path = PurePosixPath(file)
    name = PurePosixPath(
        path.stem if path.suffix.lower() in files.COMPRESSED_EXTENSIONS else path.name
    )
    while name.suffix.lower() in _TEXT_EXTENSIONS:
        name = PurePosixPath(name.stem)
    match = _SIDE_SUFFIX.match(name.name)
    stem, side = (match["stem"] or "", match["side"]) if match else (name.name, "")
    return str(path.with_name(stem)) if stem else str(path.parent) + "/", side


def _languages(
    sides: Sequence[str],
    arguments: TranslationArguments,
    flag: str,
    names: Sequence[str],
    folder: bool,
) -> PairColumns:
    """Returns the source and target languages as spelled in file names, and their codes.

    The first rule that applies decides:

    1. The names contain "source" and "target" (or their abbreviations) instead of languages.
    2. Both `--source_lang` and `--target_lang` are given.
    3. The names contain exactly two languages. The first one is the source, unless one of the
       flags is given and requires the other order.
    """
    spelling_by_code: dict[str, str] = {}
    for side in sides:
        if code := language_code(side) or _SIDE_BY_NAME.get(side.lower()):
            spelling_by_code.setdefault(code, side)
    source_lang, target_lang = arguments.source_lang, arguments.target_lang
    if set(spelling_by_code) == set(SIDE_COLUMNS):
        source, target = spelling_by_code["source"], spelling_by_code["target"]
        return PairColumns(source, target, source_lang, target_lang)
    if source_lang and target_lang:
        return PairColumns(source_lang, target_lang, source_lang, target_lang)
    languages = tuple(spelling_by_code.values())
    requested = source_lang or target_lang
    matching = find_language(languages, requested) if requested else None
    if len(languages) != 2 or (requested and matching is None):
        location = ", ".join(names)
        if folder and names:
            location = f"the directory {PurePosixPath(names[0]).parent}"
        named_languages = f"the languages {', '.join(languages)}" if languages else "no language"
        raise DataError(
            f"{flag} {location}: the file names contain {named_languages}; use a pair of files "
            "such as corpus.en and corpus.de, or specify two languages with --source_lang and "
            "--target_lang"
        )
    source, target = languages
    if (source_lang and matching == target) or (target_lang and matching == source):
        source, target = target, source
    return PairColumns(
        source,
        target,
        source_lang or language_code(source),
        target_lang or language_code(target),
    )


def _pair_source(source: str, target: str, flag: str) -> PairSource:
    def read() -> Iterator[Pair]:
        sides = files.read_lines(source, flag), files.read_lines(target, flag)
        number = 0
        for number, (source_line, target_line) in enumerate(zip_longest(*sides), 1):
            if source_line is None or target_line is None:
                longer = number + sum(1 for _ in sides[source_line is None])
                counts = (longer, number - 1) if target_line is None else (number - 1, longer)
                raise DataError(
                    f"{flag}: {source} has {counts[0]:,} lines and {target} {counts[1]:,}; line "
                    "n of one file must be the translation of line n of the other"
                )
            yield number, source_line, target_line

    key = [files.file_identity(source), files.file_identity(target)]
    return PairSource(f"{source} and {PurePosixPath(target).name}", key, read)


@dataclass(frozen=True)
class SplitShares:
    """Shares of the source sentences that are assigned to each split.

    Attributes:
        test: Share of the test split, in thousandths.
        validation: Share of the validation split, in thousandths.
        default: Name of the split for all other sentences.
    """

    test: int = 0
    validation: int = 0
    default: str = "train"

    def split_of(self, source: str) -> tuple[str, int]:
        """Returns the split for all translations of a source sentence.

        Returns:
            The split, and the hash of the sentence modulo 1000, which determines the split. The
            second value is 0 if all sentences are in the default split.
        """
        if not self.test + self.validation:
            return self.default, 0
        position = int(sha256(source.encode()).hexdigest()[:8], 16) % 1000
        if position < self.test:
            return "test", position
        return ("validation" if position < self.test + self.validation else self.default), position


def _store(origins: dict[str, Origin], arguments: TranslationArguments) -> dict[str, PairFiles]:
    """Stores the pairs of all splits on disk, and takes missing splits from the training pairs."""

    def store(name: str, shares: SplitShares) -> PairFiles:
        parts = origins[name][0]
        pairs = store_pairs(
            parts,
            shares,
            arguments.cache_directory,
            arguments.overwrite_cache,
            arguments.keep_line_breaks,
        )
        if not pairs.report["pairs"]:
            listing = "; ".join(pairs.report.get("first_dropped", ()))
            name_of_parts = f"{parts[0].name} …" if len(parts) > 1 else parts[0].name
            raise DataError(
                f"{name_of_parts} contains no pairs" + (f": {listing}" if listing else "")
            )
        return pairs

    stored = {name: store(name, SplitShares(default=name)) for name in origins if name != "train"}
    if "train" in origins:
        percent = {
            name: 0 if name in origins else getattr(arguments, f"{name}_split_percentage")
            for name in ("test", "validation")
        }
        shares = SplitShares(10 * percent["test"], 10 * percent["validation"])
        pairs = store("train", shares)
        if shares.validation and "validation" not in pairs.report["pairs"]:
            # No sentence has a hash below the limit: use the sentence with the lowest hash.
            lowest = pairs.report["lowest"]
            pairs = store("train", replace(shares, validation=lowest + 1 - shares.test))
        if "train" not in pairs.report["pairs"]:
            raise DataError(
                f"{origins['train'][0][0].name} has too few sentences to hold out some for "
                "validation; use --validation_file, or --validation_split_percentage 0"
            )
        stored |= {name: pairs for name in pairs.report["pairs"]}
    return {name: stored[name] for name in SPLITS if name in stored}


VERSION = 1
REPORT_FILE = "report.json"
MAX_REPORTED_PAIRS = 5  # dropped pairs to list in a message


@dataclass(frozen=True)
class PairFiles:
    """Pairs that `store_pairs` has stored on disk.

    Attributes:
        directory: The directory, with one Arrow file per split.
        report: The content of the report file: for each split the number of pairs and the
            fingerprint, and information about dropped pairs.
    """

    directory: Path
    report: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> PairFiles:
        """Opens a directory. Raises a `DataError` if it does not contain pairs."""
        try:
            report = errors.parse_json((directory / REPORT_FILE).read_bytes())
            if not all(isinstance(report[name], dict) for name in ("pairs", "fingerprints")):
                raise ValueError("invalid report")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{directory} contains no pairs: {error}") from error
        return cls(directory, report)

    def dataset(self, split: str) -> Dataset | None:
        """Returns a split as a memory-mapped `datasets.Dataset`, or `None` if it is empty.

        The fingerprint of the dataset is a hash of its content, so that cached tokens stay valid
        if the directory is moved.
        """
        if not self.report["pairs"].get(split):
            return None
        from datasets import Dataset
        from datasets.table import MemoryMappedTable

        table = MemoryMappedTable.from_file(str(self.directory / f"{split}.arrow"))
        return Dataset(table, fingerprint=self.report["fingerprints"][split])


def store_pairs(
    parts: list[PairSource],
    shares: SplitShares,
    cache_dir: Path,
    overwrite: bool = False,
    keep_line_breaks: bool = False,
) -> PairFiles:
    """Reads and cleans pairs, divides them into splits, and stores them in `cache_dir`.

    Whitespace at the beginning and end of each text is removed. Pairs with an empty source or
    target are dropped and counted. Memory use does not depend on the number of pairs.

    Args:
        parts: The sources of pairs.
        shares: The share of each split.
        cache_dir: Directory of cached data.
        overwrite: Whether to ignore a cached result.
        keep_line_breaks: Whether to keep line breaks within a text instead of replacing them by
            spaces.
    """
    content = [VERSION, *astuple(shares), [part.key for part in parts]]
    content += ["line breaks"] if keep_line_breaks else []
    clean = _strip if keep_line_breaks else clean_sentence
    key = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def write(directory: Path) -> None:
        splits: dict[str, StringTableWriter] = {}
        dropped, lowest = 0, 1000
        reported: list[str] = []
        for part in parts:
            number = 0
            try:
                for number, raw_source, raw_target in part.read():
                    source, target = clean(raw_source), clean(raw_target)
                    if source and target:
                        split, thousandth = shares.split_of(source)
                        if split == shares.default:
                            lowest = min(lowest, thousandth)
                        if split not in splits:
                            path = directory / f"{split}.arrow"
                            splits[split] = StringTableWriter(path, ["source", "target"])
                        splits[split].add(source, target)
                        continue
                    dropped += 1
                    if len(reported) < MAX_REPORTED_PAIRS:
                        sides = "target" if source else "source" if target else "source and target"
                        reported.append(f"{part.name}, {part.unit} {number}: empty {sides}")
            except UnicodeDecodeError as error:  # parquet does not validate strings
                raise DataError(
                    f"{part.name} is not UTF-8 after {part.unit} {number}: {error.reason}"
                ) from error
        fingerprints = {name: split.close() for name, split in splits.items()}
        pairs = {name: split.count for name, split in splits.items()}
        report = {"pairs": pairs, "fingerprints": fingerprints, "lowest": lowest}
        report |= {"dropped": dropped} | ({"first_dropped": reported} if reported else {})
        (directory / REPORT_FILE).write_text(json.dumps(report, indent=2))

    return write_once(Path(cache_dir) / f"pairs-{key}", PairFiles.open, write, overwrite)


def _strip(text: str | None) -> str:
    return text.strip() if text else ""


def clean_sentence(text: str | None) -> str:
    """Strips a sentence and replaces its line breaks by spaces. Returns "" for `None`."""
    text = _strip(text)
    return _LINE_BREAKS.sub(" ", text) if "\n" in text or "\r" in text else text
