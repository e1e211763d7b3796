"""Which languages a checkpoint translates, and how it is told to translate the wanted ones.

There are five habits: hfseq's own checkpoints and bilingual Marian name one pair; T5 lists tasks,
each with its prefix; multilingual Marian reads the target as a token, ``>>fra<<``, before the text;
mBART and its kin have codes: the tokenizer adds the source's, the output begins with the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hfseq.errors import UsageError, nearest

#: Groups of languages that OPUS-MT names as one side of a pair: any language is welcome there.
GROUPS = frozenset(
    "mul afa alv art aav bat ber bnt cau ccs cel cpf cpp cus dra euq fiu gem gmq gmw grk iir inc "
    "ine ira itc map mkh myn nah nic ngf paa phi pqe poz roa sal sem sit sla smi tai trk tut tup "
    "urj wak zle zls zlw zhx".split()
)
LISTED = 40
_TASK = re.compile(r"translation_(\w+)_to_(\w+)")
_CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")


@dataclass(frozen=True)
class Direction:
    """What goes before each text, the first token of each output, and the tokenizer's source."""

    source_prefix: str = ""
    forced_bos_token_id: int | None = None
    tokenizer_source: str | None = None


@dataclass(frozen=True)
class _Way:
    source: str | None  # None: the checkpoint does not care
    target: str
    direction: Direction


def find_direction(
    config: Any,
    tokenizer: Any,
    name: str,
    source_lang: str | None = None,
    target_lang: str | None = None,
    source_prefix: str | None = None,
) -> Direction:
    """Return how the checkpoint ``name`` translates from one language into the other.

    Codes are the checkpoint's own; case does not matter, and ``fr`` finds ``fr_XX`` where that is
    the only French. A ``source_prefix`` of the caller, empty or not, takes the place of the one
    that was found. With one pair, nothing has to be said.

    **Raises:** UsageError for languages the checkpoint lacks, or where a choice has to be made;
    it lists them.
    """
    ways = _ways(config, tokenizer)
    asked = bool(source_lang or target_lang)
    if not asked and (source_prefix is not None or not ways):
        return Direction(_prefix(config) if source_prefix is None else source_prefix)
    if not ways:
        given = _flags(source_lang, target_lang)
        raise UsageError(
            f"'{name}' does not say which languages it translates, so {given} means nothing to it: "
            "leave that out"
        )
    found = _choose(ways, name, source_lang, target_lang).direction
    if source_prefix is None:
        return found
    return Direction(source_prefix, found.forced_bos_token_id, found.tokenizer_source)


def _ways(config: Any, tokenizer: Any) -> list[_Way]:
    first, second = getattr(config, "source_lang", None), getattr(config, "target_lang", None)
    if isinstance(first, str) and isinstance(second, str):  # trained by hfseq
        return [_Way(first, second, Direction(_prefix(config)))]
    tasks = _tasks(config)
    if tasks:
        return tasks
    source = getattr(tokenizer, "source_lang", None)
    source = None if _is_group(source) else source
    tokens = getattr(tokenizer, "supported_language_codes", None)
    if tokens:
        return [_Way(source, token.strip("<>"), Direction(f"{token} ")) for token in tokens]
    if hasattr(tokenizer, "src_lang"):
        codes = _codes(tokenizer)
        return [
            _Way(first, second, Direction("", number, first))
            for first in codes
            for second, number in codes.items()
            if first != second
        ]
    target = getattr(tokenizer, "target_lang", None)
    return [_Way(source, target, Direction())] if isinstance(target, str) else []


def _prefix(config: Any) -> str:
    return getattr(config, "source_prefix", None) or ""


def _tasks(config: Any) -> list[_Way]:
    tasks = getattr(config, "task_specific_params", None) or {}
    found = [(_TASK.fullmatch(task), settings) for task, settings in tasks.items()]
    return [
        _Way(match[1], match[2], Direction((settings or {}).get("prefix") or ""))
        for match, settings in found
        if match
    ]


def _codes(tokenizer: Any) -> dict[str, int]:
    codes = getattr(tokenizer, "lang_code_to_id", None)
    if codes:
        return dict(codes)
    tokens = [token for token in tokenizer.all_special_tokens if _CODE.fullmatch(token)]
    return {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}


def _is_group(code: Any) -> bool:
    """Tell whether a side of a pair is no single language; old names are words: ``ROMANCE``."""
    return not isinstance(code, str) or code in GROUPS or (code.isupper() and len(code) > 3)


def _choose(ways: list[_Way], name: str, source: str | None, target: str | None) -> _Way:
    targets = _matching({way.target for way in ways}, target)
    sources = _matching({way.source for way in ways if way.source}, source)
    found = [
        way
        for way in ways
        if way.target in targets and (way.source is None or way.source in sources)
    ]
    if len(found) == 1:
        return found[0]
    have = _listing(ways)
    if not found:
        close = nearest(target or source or "", {way.target for way in ways})
        raise UsageError(
            f"'{name}' does not translate {_flags(source, target)}{close or ';'} it has {have}"
        )
    given = f" ({_flags(source, target)} fits {len(found)})" if source or target else ""
    raise UsageError(
        f"'{name}' translates between several languages{given}: choose with --source_lang and "
        f"--target_lang among {have}, or write the prefix yourself with --source_prefix"
    )


def _matching(codes: set[str], wanted: str | None) -> set[str]:
    if wanted is None:
        return codes
    plain = {code: _plain(code) for code in codes}
    same = {code for code in codes if plain[code] == _plain(wanted)}
    return same or {code for code in codes if plain[code].startswith(f"{_plain(wanted)}-")}


def _plain(code: str) -> str:
    return code.strip("<>_ ").lower().replace("_", "-")


def _flags(source: str | None, target: str | None) -> str:
    given = {"--source_lang": source, "--target_lang": target}
    return " ".join(f"{flag} {value}" for flag, value in given.items() if value)


def _listing(ways: list[_Way]) -> str:
    """Return pairs where there are few, the codes where any goes with any."""
    names = [f"{way.source} -> {way.target}" if way.source else way.target for way in ways]
    if len(names) > LISTED:
        names = sorted({way.target for way in ways})
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
