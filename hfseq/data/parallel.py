"""Parallel text: from the flags to cleaned pairs of a source and a target sentence, on disk.

Pairs come from tables, aligned text files, prepared TFDS directories, the Hub or a plugin.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from hashlib import blake2b, sha256
from itertools import chain, zip_longest
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hfseq import errors
from hfseq.data import files, numbers_and_dates, sources, tables, tfds
from hfseq.data.arguments import SIDE_COLUMNS, SPLITS, TranslationArguments
from hfseq.data.languages import find_language, language_code, same_language
from hfseq.data.store import write_once
from hfseq.data.tables import BATCH_ROWS, Origin, Pair, PairColumns, PairSource
from hfseq.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)
NO_SCRIPTS = (
    "`datasets` no longer runs loading scripts, which is how {name} was distributed. Use parallel "
    "text stored as parquet, e.g. `--dataset_name wmt/wmt14 --dataset_config_name de-en`, or your "
    "own files with --train_file"
)


class PairSplits(dict[str, "Dataset"]):
    """The splits by name ("train", "validation", "test"; any may be absent).

    Each is a map-style ``datasets.Dataset`` with the string columns "source" and "target".
    ``source_lang`` and ``target_lang`` are as asked for or as the data names them, else None;
    ``description`` holds pairs a split and what was dropped.
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
    """Load the pairs that the flags ask for, and generate some where they ask for none.

    A dataset name is a prepared TFDS directory (``tfds:NAME/CONFIG``), or is offered to the
    plugins' ``load_dataset`` hook and looked up on the Hub; files are tables, aligned text files,
    or folders of those. Without a validation or test split, training pairs are set aside by the
    SHA-256 of the source sentence, so that all translations of one sentence are on one side, in
    every run. The key is the source as the data has it, with ``--reverse_translation`` too.

    Raises:
        DataError: the data is missing, unreadable, empty, or lacks a side.
    """
    origins: dict[str, Origin] = {}
    if name := arguments.dataset_name:
        flag = f"--dataset_name {name}"
        if name.startswith(tfds.TFDS_PREFIX):
            origins = tfds.split_origins(name, flag, arguments)
        else:
            named = sources.load_dataset_splits(arguments, plugins, SPLITS, NO_SCRIPTS)
            origins = {
                split: tables.dataset_origin(dataset, f"{flag} ({split})", arguments)
                for split, dataset in named.items()
            }
    for split in SPLITS:
        if patterns := getattr(arguments, f"{split}_file"):
            origins[split] = _from_files(patterns, split, arguments)
    if not origins:
        origins = numbers_and_dates.generated_origins(arguments)
        sides = origins["train"][1]
        logger.warning(
            "no --dataset_name and no --train_file: this is the demonstration, on generated "
            "numbers and dates (%s to %s)",
            *(sides.source_lang, sides.target_lang),
        )
    stored = _store(origins, arguments)
    whole = {split: pairs.dataset(split) for split, pairs in stored.items()}
    splits = {split: dataset for split, dataset in whole.items() if dataset is not None}
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
        shown = "; ".join(first[name])
        logger.warning("left out %d %s pairs with an empty side: %s", count, name, shown)
    pairs = {name: len(split) for name, split in splits.items()}
    description: dict[str, Any] = {"pairs": pairs, "dropped": dropped, "first_dropped": first}
    if next(iter(origins.values()))[0][0].name == numbers_and_dates.CORPUS_NAME:
        description["name"] = numbers_and_dates.CORPUS_NAME
    return PairSplits(splits, source_lang, target_lang, description)


def _common_sides(origins: list[Origin]) -> PairColumns:
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
_BREAKS = re.compile(r"\s*[\r\n]+\s*")
_PLAIN = (".txt", ".text", ".snt", ".tok", ".clean")
_LAST = re.compile(r"^(?:(?P<stem>.*)[._-])?(?P<side>[^._-]+)$", re.DOTALL)
_SIDES = {name: side for side, names in SIDE_COLUMNS.items() for name in names}


def aligned_origin(
    names: Sequence[str], flag: str, arguments: TranslationArguments, folder: bool = False
) -> Origin:
    """Return how to read aligned files, paired by name, and the languages.

    Two files are a pair if their names differ in nothing but the language (``corpus.en`` and
    ``corpus.de``, ``doc_en.snt`` and ``doc_es.snt``, ``X.en-es.en`` and ``X.en-es.es``). Without
    ``--source_lang`` and ``--target_lang`` the language of the first file is the source. Of a
    ``folder``, files of other languages and without a partner are left out, and that is logged.
    """
    named = [(file, *split_file_name(file)) for file in names]
    if folder:
        named = [entry for entry in named if language_code(entry[2])]
    sides = _languages([side for _, _, side in named], arguments, flag, names, folder)
    pairs: dict[str, dict[str, str]] = {}
    for file, stem, side in named:
        role = next((r for r in SIDE_COLUMNS if find_language([side], getattr(sides, r))), None)
        if role is None and not folder:
            raise DataError(
                f"{flag} {file}: its name ends neither in {sides.source} nor in {sides.target}; "
                f"call the files of a pair corpus.{sides.source} and corpus.{sides.target}"
            )
        if role and (other := pairs.setdefault(stem, {}).setdefault(role, file)) != file:
            raise DataError(f"{flag}: {other} and {file} would be the {role} of the same pair")
    whole = {stem: pair for stem, pair in pairs.items() if len(pair) == 2}
    alone = [file for stem, pair in pairs.items() if stem not in whole for file in pair.values()]
    shown = alone[:MAX_REPORTED_FILES]
    if not whole or (alone and not folder):
        raise DataError(
            f"{flag}: {' and '.join(shown) or 'no file'} of the languages {sides.source} and "
            f"{sides.target} ha{'ve' if len(alone) > 1 else 's'} no partner; the names of a pair "
            f"differ in the language only, as corpus.{sides.source} and corpus.{sides.target} do"
        )
    if alone:
        logger.warning(
            "%s: %d files have no partner and are left out: %s", flag, len(alone), ", ".join(shown)
        )
    if not folder:  # which may well have a document without a sentence
        files.check_heads(names, "text", flag)
    return [_part(pair["source"], pair["target"], flag) for pair in whole.values()], sides


def split_file_name(file: str) -> tuple[str, str]:
    """Split a file's name into what a pair shares and what names its side.

    ``a/X.en-es.en.gz`` is ("a/X.en-es", "en"), ``doc_es.snt`` ("doc", "es"), ``en.txt`` ("", "en").
    """
    path = PurePosixPath(file)
    name = PurePosixPath(
        path.stem if path.suffix.lower() in files.COMPRESSED_EXTENSIONS else path.name
    )
    while name.suffix.lower() in _PLAIN:
        name = PurePosixPath(name.stem)
    match = _LAST.match(name.name)
    stem, side = (match["stem"] or "", match["side"]) if match else (name.name, "")
    return str(path.with_name(stem)) if stem else str(path.parent) + "/", side


def _languages(
    sides: Sequence[str],
    arguments: TranslationArguments,
    flag: str,
    names: Sequence[str],
    folder: bool,
) -> PairColumns:
    spelled: dict[str, str] = {}  # by code
    for side in sides:
        if code := language_code(side) or _SIDES.get(side.lower()):
            spelled.setdefault(code, side)
    asked = arguments.source_lang, arguments.target_lang
    roles = set(spelled) == set(SIDE_COLUMNS)
    if asked[0] and asked[1] and not roles:
        return PairColumns(asked[0], asked[1], *asked)
    if roles:
        return PairColumns(spelled["source"], spelled["target"], *asked)
    pair = tuple(spelled.values())
    given = find_language(pair, asked[0] or asked[1] or "") if any(asked) else ""
    if len(pair) != 2 or given is None:
        what = ", ".join(names)
        if folder and names:
            what = f"the folder {PurePosixPath(names[0]).parent}"
        languages = f"names the languages {', '.join(pair)}" if pair else "names no language"
        raise DataError(
            f"{flag} {what} {languages}: give a pair of files such as corpus.en and corpus.de, or "
            "say which two languages with --source_lang and --target_lang"
        )
    source, target = pair
    if any(asked) and (given == target) == bool(asked[0]):  # the other one was not asked for
        source, target = target, source
    return PairColumns(
        source, target, asked[0] or language_code(source), asked[1] or language_code(target)
    )


def _part(source: str, target: str, flag: str) -> PairSource:
    def read() -> Iterator[Pair]:
        sides = files.read_lines(source, flag), files.read_lines(target, flag)
        number = 0
        for number, (one, other) in enumerate(zip_longest(*sides), 1):
            if one is None or other is None:
                longer = number + sum(1 for _ in sides[one is None])
                counts = (longer, number - 1) if other is None else (number - 1, longer)
                raise DataError(
                    f"{flag}: {source} has {counts[0]:,} lines and {target} {counts[1]:,}; line n "
                    "of one is the translation of line n of the other, so remove or add lines"
                )
            yield number, one, other

    key = [files.file_identity(source), files.file_identity(target)]
    return PairSource(f"{source} and {PurePosixPath(target).name}", key, read)


@dataclass(frozen=True)
class SplitShares:
    """Thousandths of the sources that test and that validate, and the split of the rest."""

    test: int = 0
    validation: int = 0
    rest: str = "train"

    def split_of(self, source: str) -> tuple[str, int]:
        """Return the split of all translations of a sentence, and its place among a thousand."""
        if not self.test + self.validation:
            return self.rest, 0
        place = int(sha256(source.encode()).hexdigest()[:8], 16) % 1000
        if place < self.test:
            return "test", place
        return ("validation" if place < self.test + self.validation else self.rest), place


def _store(origins: dict[str, Origin], arguments: TranslationArguments) -> dict[str, PairFiles]:
    """Write every split, and divide the training pairs where another one is missing."""

    def store(name: str, shares: SplitShares) -> PairFiles:
        parts = origins[name][0]
        pairs = store_pairs(parts, shares, arguments.cache_directory, arguments.overwrite_cache)
        if not pairs.report["pairs"]:
            listing = "; ".join(pairs.report.get("first_dropped", ()))
            where = f"{parts[0].name} …" if len(parts) > 1 else parts[0].name
            raise DataError(f"{where} holds no pairs" + (f": {listing}" if listing else ""))
        return pairs

    stored = {name: store(name, SplitShares(rest=name)) for name in origins if name != "train"}
    if "train" in origins:
        percent = {
            name: 0 if name in origins else getattr(arguments, f"{name}_split_percentage")
            for name in ("test", "validation")
        }
        shares = SplitShares(10 * percent["test"], 10 * percent["validation"])
        pairs = store("train", shares)
        if shares.validation and "validation" not in pairs.report["pairs"]:
            # Too few sentences for any to fall below the share: take the one that comes closest.
            lowest = pairs.report["lowest"]
            pairs = store("train", replace(shares, validation=lowest + 1 - shares.test))
        if "train" not in pairs.report["pairs"]:
            raise DataError(
                f"{origins['train'][0][0].name} has too few sentences to set some aside for "
                "validation; give --validation_file, or --validation_split_percentage 0"
            )
        stored |= {name: pairs for name in pairs.report["pairs"]}
    return {name: stored[name] for name in SPLITS if name in stored}


VERSION = 1
REPORT_FILE = "report.json"
MAX_REPORTED_PAIRS = 5  # dropped pairs that are named


@dataclass(frozen=True)
class PairFiles:
    """What ``store_pairs`` wrote: a directory and its report."""

    directory: Path
    report: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> PairFiles:
        """Read the report of a directory; DataError if it holds no pairs."""
        try:
            report = errors.parse_json((directory / REPORT_FILE).read_bytes())
            if not all(isinstance(report[name], dict) for name in ("pairs", "fingerprints")):
                raise ValueError("its report counts nothing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{directory} holds no pairs: {error}") from error
        return cls(directory, report)

    def dataset(self, split: str) -> Dataset | None:
        """Return a split as a memory-mapped ``datasets.Dataset``, or None where it is empty.

        Its fingerprint is a hash of its content, so that a token cache is found again wherever the
        files lie.
        """
        if not self.report["pairs"].get(split):
            return None
        from datasets import Dataset
        from datasets.table import MemoryMappedTable

        table = MemoryMappedTable.from_file(str(self.directory / f"{split}.arrow"))
        return Dataset(table, fingerprint=self.report["fingerprints"][split])


def store_pairs(
    parts: list[PairSource], shares: SplitShares, cache_dir: Path, overwrite: bool = False
) -> PairFiles:
    """Read ``parts`` once, clean them, divide them by ``shares``, and keep them in ``cache_dir``.

    A side is stripped, line breaks within it become spaces; a pair with an empty side is dropped
    and counted. Nothing grows with the number of pairs but the files.
    """
    content = [VERSION, *astuple(shares), [part.key for part in parts]]
    key = blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def write(directory: Path) -> None:
        splits: dict[str, _SplitFile] = {}
        dropped, lowest = 0, 1000
        shown: list[str] = []
        for part in parts:
            number = 0
            try:
                for number, raw_source, raw_target in part.read():
                    source, target = clean_sentence(raw_source), clean_sentence(raw_target)
                    if source and target:
                        split, thousandth = shares.split_of(source)
                        if split == shares.rest:
                            lowest = min(lowest, thousandth)
                        if split not in splits:
                            splits[split] = _SplitFile(directory / f"{split}.arrow")
                        splits[split].add(source, target)
                        continue
                    dropped += 1
                    if len(shown) < MAX_REPORTED_PAIRS:
                        sides = "target" if source else "source" if target else "source and target"
                        shown.append(f"{part.name}, {part.unit} {number}: empty {sides}")
            except UnicodeDecodeError as error:  # parquet takes any bytes for text
                raise DataError(
                    f"{part.name} is not UTF-8 after {part.unit} {number}: {error.reason}"
                ) from error
        fingerprints = {name: split.close() for name, split in splits.items()}
        pairs = {name: split.count for name, split in splits.items()}
        report = {"pairs": pairs, "fingerprints": fingerprints, "lowest": lowest}
        report |= {"dropped": dropped} | ({"first_dropped": shown} if shown else {})
        (directory / REPORT_FILE).write_text(json.dumps(report, indent=2))

    return write_once(Path(cache_dir) / f"pairs-{key}", PairFiles.open, write, overwrite)


def clean_sentence(text: str | None) -> str:
    """Strip a side and put it on one line; a missing one is empty."""
    text = text.strip() if text else ""
    return _BREAKS.sub(" ", text) if "\n" in text or "\r" in text else text


class _SplitFile:
    """An Arrow stream of the columns "source" and "target"."""

    def __init__(self, path: Path):
        import pyarrow

        self.schema = pyarrow.schema([("source", pyarrow.string()), ("target", pyarrow.string())])
        self.writer = pyarrow.ipc.new_stream(str(path), self.schema)
        self.pairs: list[tuple[str, str]] = []
        self.count, self.hash = 0, blake2b(digest_size=8)

    def add(self, source: str, target: str) -> None:
        self.pairs.append((source, target))
        self.count += 1
        if len(self.pairs) == BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        sides = [list(side) for side in zip(*self.pairs, strict=True)]
        columns = [pyarrow.array(texts, "string") for texts in sides]
        self.writer.write_batch(pyarrow.record_batch(columns, schema=self.schema))
        self.hash.update("\n".join([*chain(*sides), ""]).encode())
        self.pairs = []

    def close(self) -> str:
        if self.pairs:
            self._flush()
        self.writer.close()
        return self.hash.hexdigest()
