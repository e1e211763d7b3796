"""Aligned text files, a line a sentence: which two belong together is read off their names."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

from hfseq.data import files as data_files
from hfseq.data.languages import code_of, find_language
from hfseq.data.parallel.columns import ROLES, Sides
from hfseq.data.parallel.store import Pair, Part
from hfseq.errors import DataError

logger = logging.getLogger(__name__)
SHOWN = 3
_PLAIN = (".txt", ".text", ".snt", ".tok", ".clean")
_LAST = re.compile(r"^(?:(?P<stem>.*)[._-])?(?P<side>[^._-]+)$", re.DOTALL)
_SIDES = {name: side for side, names in ROLES.items() for name in names}


def split_name(file: str) -> tuple[str, str]:
    """Split a file's name into what a pair shares and what names its side.

    ``a/X.en-es.en.gz`` is ("a/X.en-es", "en"), ``doc_es.snt`` ("doc", "es"), ``en.txt`` ("", "en").
    """
    path = PurePosixPath(file)
    name = path.name
    if PurePosixPath(name).suffix.lower() in data_files.COMPRESSIONS:
        name = PurePosixPath(name).stem
    while PurePosixPath(name).suffix.lower() in _PLAIN:
        name = PurePosixPath(name).stem
    match = _LAST.match(name)
    stem, side = (match["stem"] or "", match["side"]) if match else (name, "")
    return str(path.with_name(stem)) if stem else str(path.parent) + "/", side


def aligned_parts(
    files: Sequence[str], flag: str, arguments: Any, folder: bool = False
) -> tuple[list[Part], Sides]:
    """Return how to read aligned files, paired by name, and the languages.

    Two files are a pair if their names differ in nothing but the language (``corpus.en`` and
    ``corpus.de``, ``doc_en.snt`` and ``doc_es.snt``, ``X.en-es.en`` and ``X.en-es.es``). Without
    ``--source_lang`` and ``--target_lang`` the language of the first file is the source. Of a
    ``folder``, files of other languages and without a partner are left out, and that is logged.

    Raises:
        DataError: names do not agree, a file has no partner, or there are more than two languages.
    """
    named = [(file, *split_name(file)) for file in files]
    if folder:
        named = [entry for entry in named if code_of(entry[2])]
    sides = _languages([side for _, _, side in named], arguments, flag, files, folder)
    pairs: dict[str, dict[str, str]] = {}
    for file, stem, side in named:
        role = _role(side, sides)
        if role is None and not folder:
            raise DataError(
                f"{flag} {file}: its name ends neither in {sides.source} nor in {sides.target}; "
                f"call the files of a pair corpus.{sides.source} and corpus.{sides.target}"
            )
        if role and (other := pairs.setdefault(stem, {}).setdefault(role, file)) != file:
            raise DataError(f"{flag}: {other} and {file} would be the {role} of the same pair")
    whole = {stem: pair for stem, pair in pairs.items() if len(pair) == 2}
    _check_partners(pairs, whole, sides, flag, folder)
    if not folder:  # which may well have a document without a sentence
        data_files.check_heads(files, "text", flag)
    return [_part(pair["source"], pair["target"], flag) for pair in whole.values()], sides


def _languages(
    names: Sequence[str], arguments: Any, flag: str, files: Sequence[str], folder: bool
) -> Sides:
    found: dict[str, str] = {}  # code: as it is written
    for name in names:
        if code := code_of(name) or _SIDES.get(name.lower()):
            found.setdefault(code, name)
    asked = arguments.source_lang, arguments.target_lang
    if all(asked) and set(found) != set(ROLES):
        return Sides(*asked, *asked)
    if len(found) != 2:
        raise _unclear(found, flag, files, folder)
    if set(found) == set(ROLES):
        return Sides(found["source"], found["target"], *asked)
    source, target = found.values()
    if asked[0] or asked[1]:  # the one that was not asked for is the other side
        given = find_language((source, target), asked[0] or asked[1])
        if given is None:
            raise _unclear(found, flag, files, folder)
        if (given == target) == bool(asked[0]):
            source, target = target, source
    return Sides(source, target, asked[0] or code_of(source), asked[1] or code_of(target))


def _unclear(found: dict[str, str], flag: str, files: Sequence[str], folder: bool) -> DataError:
    what = f"the folder {PurePosixPath(files[0]).parent}" if folder and files else ", ".join(files)
    languages = f"names the languages {', '.join(found.values())}" if found else "names no language"
    return DataError(
        f"{flag} {what} {languages}: give a pair of files such as corpus.en and corpus.de, or say "
        "which two languages with --source_lang and --target_lang"
    )


def _role(side: str, sides: Sides) -> str | None:
    name = find_language([side], sides.source) and "source"
    return name or (find_language([side], sides.target) and "target")


def _check_partners(
    pairs: dict[str, dict[str, str]], whole: dict, sides: Sides, flag: str, folder: bool
) -> None:
    alone = [file for stem, pair in pairs.items() if stem not in whole for file in pair.values()]
    if not alone and whole:
        return
    if not whole or not folder:
        listing = " and ".join(alone[:SHOWN]) or "no file"
        raise DataError(
            f"{flag}: {listing} of the languages {sides.source} and {sides.target} ha"
            f"{'ve' if len(alone) > 1 else 's'} no partner; the names of a pair differ in the "
            f"language only, as corpus.{sides.source} and corpus.{sides.target} do"
        )
    logger.warning(
        "%s: %d files have no partner and are left out: %s",
        *(flag, len(alone), ", ".join(alone[:SHOWN])),
    )


def _part(source: str, target: str, flag: str) -> Part:
    def read() -> Iterator[Pair]:
        sides = data_files.read_lines(source, flag), data_files.read_lines(target, flag)
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

    key = [data_files.identity(source), data_files.identity(target)]
    return Part(f"{source} and {PurePosixPath(target).name}", key, read)
