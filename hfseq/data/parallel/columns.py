"""Which two columns of a table are the source and the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfseq.data.languages import code_of, find_language
from hfseq.errors import DataError, nearest

ROLES = {"source": ("source", "src", "source_text"), "target": ("target", "tgt", "target_text")}


@dataclass(frozen=True)
class Sides:
    """What the source and the target are called where they come from, and their languages."""

    source: str
    target: str
    source_lang: str | None = None
    target_lang: str | None = None


def choose_columns(names: Sequence[str], arguments: Any, where: str) -> Sides:
    """Choose the source and the target among the columns ``names`` of ``where``.

    A side is the column that its flag names, else the one that is called like its language ("de",
    "german"), else "source" or "target". What is still open goes to the first columns that are
    left, those named after a language before the others; but never a column of a third language to
    a side whose language was asked for.

    Raises:
        DataError: a column or language that was asked for is not there, or there are not two.
    """
    found = {side: _named_column(names, arguments, side, where) for side in ROLES}
    listing = ", ".join(names) or "none"
    if found["source"] and found["source"] == found["target"]:
        raise DataError(
            f"{where}: column {found['source']} would be both source and target; choose two of "
            f"{listing} with --source_column and --target_column"
        )
    for side in ROLES:
        if found[side] is None:
            language = getattr(arguments, f"{side}_lang")
            left = [name for name in names if name not in found.values()]
            left = [name for name in left if not (language and _language(name))]
            left.sort(key=lambda name: _language(name) is None)  # stable, so otherwise in order
            if not left:
                asked = f" for --{side}_lang {language}" if language else f" for the {side}"
                raise DataError(
                    f"{where}: no text column{asked}; the columns are {listing}. Name it with "
                    f"--{side}_column"
                )
            found[side] = left[0]
    source, target = str(found["source"]), str(found["target"])
    return Sides(
        source,
        target,
        arguments.source_lang or code_of(source),
        arguments.target_lang or code_of(target),
    )


def _language(name: str) -> str | None:
    """The language of a column's name; "id" is Indonesian only where that was asked for."""
    return None if name.lower() == "id" else code_of(name)


def _named_column(names: Sequence[str], arguments: Any, side: str, where: str) -> str | None:
    asked = getattr(arguments, f"{side}_column")
    if asked:
        if asked not in names:
            raise DataError(
                f"--{side}_column {asked}: no such text column in {where}; the columns are "
                f"{', '.join(names) or 'none'}{nearest(asked, names)}"
            )
        return asked
    language = getattr(arguments, f"{side}_lang")
    by_language = find_language(names, language) if language else None
    return by_language or next((name for name in names if name.lower() in ROLES[side]), None)


def is_header(cells: Sequence[str], arguments: Any) -> bool:
    """Tell whether the first line of a table names columns, rather than being a pair already.

    It does if two of its cells are names that are known: languages, "source" and "target", or what
    the flags ask for. A flag that names a column says that there is a header.
    """
    if arguments.source_column or arguments.target_column:
        return True
    languages = [lang for lang in (arguments.source_lang, arguments.target_lang) if lang]
    known = {
        code_of(cell) or cell.strip().lower()
        for cell in cells
        if code_of(cell)
        or cell in languages
        or any(cell.strip().lower() in names for names in ROLES.values())
    }
    return len(known) > 1
