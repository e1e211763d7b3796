"""Language pairs of translation checkpoints, and the encoding of source texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hfseq.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

#: Language groups in OPUS-MT model names. These models accept any source language of the group.
LANGUAGE_GROUPS = frozenset(
    "mul afa alv art aav bat ber bnt cau ccs cel cpf cpp cus dra euq fiu gem gmq gmw grk iir inc "
    "ine ira itc map mkh myn nah nic ngf paa phi pqe poz roa sal sem sit sla smi tai trk tut tup "
    "urj wak zle zls zlw zhx".split()
)

#: Maximum number of language pairs in a message.
MAX_LISTED_PAIRS = 40

#: Patterns at which long texts may be split, in the order of preference: after a sentence, after a
#: clause, between words.
SPLIT_PATTERNS = (
    re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'»”’)\]]))\s+|(?<=[。！？])\s*"),
    re.compile(r"(?<=[,;:–—])\s+|(?<=[，、；：])\s*"),
    re.compile(r"\s+"),
)

#: Maximum source length if neither the model nor the tokenizer defines one.
MAX_SOURCE_LENGTH = 1024


@dataclass(frozen=True)
class Direction:
    """How a checkpoint translates from one language into another.

    Attributes:
        source_prefix: Text before each source.
        forced_bos_token_id: First token of each output.
        tokenizer_source: Source language to set in the tokenizer.
    """

    source_prefix: str = ""
    forced_bos_token_id: int | None = None
    tokenizer_source: str | None = None


class _Pair(NamedTuple):
    source: str | None  # None: any language
    target: str
    direction: Direction


def find_direction(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    source_lang: str | None = None,
    target_lang: str | None = None,
    source_prefix: str | None = None,
) -> Direction:
    """Returns how a checkpoint translates from one language into another.

    The languages are codes of the checkpoint, in upper or lower case. ``fr`` matches ``fr_XX`` if
    this is the only French code. For a checkpoint with a single pair, the languages can be omitted.

    Args:
        config: The configuration of the model.
        tokenizer: Its tokenizer.
        name: Name of the checkpoint in messages.
        source_lang: Source language.
        target_lang: Target language.
        source_prefix: Prefix that replaces the prefix of the checkpoint. It may be empty.

    Raises:
        UsageError: The checkpoint does not support the languages, or several of its pairs match.
            The message lists the pairs.
    """
    pairs = _pairs(config, tokenizer)
    flags = {"--source_lang": source_lang, "--target_lang": target_lang}
    requested = " ".join(f"{flag} {value}" for flag, value in flags.items() if value)
    if not requested and (source_prefix is not None or not pairs):
        return Direction(_prefix(config) if source_prefix is None else source_prefix)
    if not pairs:
        raise UsageError(
            f"'{name}' does not define languages, so {requested} has no effect. Omit these options."
        )
    targets = _matching({pair.target for pair in pairs}, target_lang)
    sources = _matching({pair.source for pair in pairs if pair.source}, source_lang)
    matches = [
        pair
        for pair in pairs
        if pair.target in targets and (pair.source is None or pair.source in sources)
    ]
    if len(matches) == 1:
        overrides: dict[str, Any] = (
            {} if source_prefix is None else {"source_prefix": source_prefix}
        )
        return replace(matches[0].direction, **overrides)
    names = [f"{pair.source} -> {pair.target}" if pair.source else pair.target for pair in pairs]
    if len(names) > MAX_LISTED_PAIRS:  # all pairs of codes exist, so list the codes only
        names = sorted({pair.target for pair in pairs})
    omitted = f" and {len(names) - MAX_LISTED_PAIRS} more" if len(names) > MAX_LISTED_PAIRS else ""
    listed = ", ".join(names[:MAX_LISTED_PAIRS]) + omitted
    if not matches:
        suggestion = ""
        for code, matching, known in (
            (source_lang, sources, {pair.source for pair in pairs if pair.source}),
            (target_lang, targets, {pair.target for pair in pairs}),
        ):
            if code and not matching:
                suggestion = did_you_mean(code, known)
        raise UsageError(
            f"'{name}' does not support {requested}{suggestion or ';'} it supports {listed}"
        )
    match_count = f" ({requested} matches {len(matches)})" if requested else ""
    raise UsageError(
        f"'{name}' translates between several languages{match_count}. Choose with --source_lang "
        f"and --target_lang among {listed}, or set the prefix with --source_prefix."
    )


def _prefix(config: PreTrainedConfig) -> str:
    return getattr(config, "source_prefix", None) or ""


def _pairs(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[_Pair]:
    """Returns the language pairs of a checkpoint, by the conventions of its family."""
    first, second = getattr(config, "source_lang", None), getattr(config, "target_lang", None)
    if isinstance(first, str) and isinstance(second, str):  # trained by hfseq
        return [_Pair(first, second, Direction(_prefix(config)))]
    tasks = getattr(config, "task_specific_params", None) or {}  # T5
    translating = [
        _Pair(match[1], match[2], Direction((settings or {}).get("prefix") or ""))
        for task, settings in tasks.items()
        if (match := re.fullmatch(r"translation_(\w+)_to_(\w+)", task))
    ]
    if translating:
        return translating
    source = getattr(tokenizer, "source_lang", None)
    # A language group is not a specific source language. Names of old groups are upper-case words
    # such as ``ROMANCE``.
    if (
        not isinstance(source, str)
        or source in LANGUAGE_GROUPS
        or (source.isupper() and len(source) > 3)
    ):
        source = None
    tokens = getattr(tokenizer, "supported_language_codes", None)  # Marian
    if tokens:
        return [_Pair(source, token.strip("<>"), Direction(f"{token} ")) for token in tokens]
    if hasattr(tokenizer, "src_lang"):  # mBART, NLLB, M2M100
        codes = getattr(tokenizer, "lang_code_to_id", None) or {
            token: tokenizer.convert_tokens_to_ids(token)
            for token in tokenizer.all_special_tokens
            if re.fullmatch(r"[a-z]{2,3}_[A-Za-z]{2,4}", token)
        }
        return [
            _Pair(first, second, Direction("", number, first))
            for first in codes
            for second, number in codes.items()
            if first != second
        ]
    target = getattr(tokenizer, "target_lang", None)
    return [_Pair(source, target, Direction())] if isinstance(target, str) else []


def _matching(codes: set[str], code_wanted: str | None) -> set[str]:
    """Returns the codes equal to the requested one, or else those that start with it."""
    if code_wanted is None:
        return codes

    def plain(code: str) -> str:
        return code.strip("<>_ ").lower().replace("_", "-")

    exact = {code for code in codes if plain(code) == plain(code_wanted)}
    return exact or {code for code in codes if plain(code).startswith(f"{plain(code_wanted)}-")}


class EncodedText(NamedTuple):
    """The tokens of a text.

    Attributes:
        parts: Token IDs of each part. Empty for a text without words; several if the text was
            split.
        separators: The text between the parts.
        warning: Warning that the text was too long and was truncated or split.
        error: Error message if the text is too long.
    """

    parts: list[list[int]]
    separators: list[str] = []  # noqa: RUF012
    warning: str | None = None
    error: str | None = None


class SourceEncoder:
    """Converts texts to token IDs.

    Args:
        tokenizer: The tokenizer.
        model_limit: Number of positions of the model, if it has a limit.
        max_length: Maximum number of tokens. Default: the limit of the model. If the model has no
            limit, texts are truncated or split at the limit of the tokenizer.
        prefix: Prefix that is added to every text, and to every part of a text that is split.
        truncation: How to handle longer texts. ``False`` treats them as errors, ``True`` truncates
            them, and "split" splits them into several parts.

    Raises:
        UsageError: ``truncation`` has an unknown value, or ``max_length`` is below 1.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_limit: int | None,
        max_length: int | None = None,
        prefix: str = "",
        truncation: bool | str = False,
    ):
        if truncation not in (False, True, "split", "longest_first", "do_not_truncate"):
            raise UsageError(f"truncation must be False, True or 'split', not {truncation!r}")
        if max_length is not None and max_length < 1:
            raise UsageError(f"max_source_length must be at least 1, not {max_length}")
        self.tokenizer, self.prefix = tokenizer, prefix
        self.truncation = False if truncation == "do_not_truncate" else truncation
        limit = max_length
        if self.truncation and limit is None and model_limit is None:
            limit = getattr(tokenizer, "model_max_length", None)
            limit = limit if limit and limit < 1_000_000 else MAX_SOURCE_LENGTH  # 1e30: no limit
        limits = [item for item in (limit, model_limit) if item is not None]
        self.limit = min(limits) if limits else None
        self._empty = self._ids([prefix])[0]

    def __call__(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes texts in order. Blank texts have no parts."""
        tokens = iter(self._ids([self.prefix + text for text in texts if text.strip()]))
        encoded = []
        for text in texts:
            ids = next(tokens) if text.strip() else self._empty
            problem = f"{len(ids)} tokens exceed the limit of {self.limit}"
            if ids == self._empty:  # a blank text, or the tokenizer drops all its characters
                encoded.append(EncodedText([]))
            elif self.limit is None or len(ids) <= self.limit:
                encoded.append(EncodedText([ids]))
            elif not self.truncation:
                advice = "Shorten it, or set truncation=True"
                encoded.append(EncodedText([], error=f"{problem}. {advice}"))
            elif self.truncation == "split":
                parts, separators = self._split(text, self.limit)
                encoded.append(
                    EncodedText(parts, separators, f"{problem}: split into {len(parts)} parts")
                )
            else:
                truncated = self._ids([self.prefix + text], truncation=True, max_length=self.limit)
                encoded.append(EncodedText(truncated, warning=f"{problem}: truncated"))
        return encoded

    def _split(self, text: str, limit: int) -> tuple[list[list[int]], list[str]]:
        """Halves ``text`` until every part fits, and returns the parts' tokens and separators."""
        ids = self._ids([self.prefix + text])[0]
        if len(ids) <= limit or len(text) < 2:
            return [ids[:limit]], []
        start = end = len(text) // 2
        for pattern in SPLIT_PATTERNS:
            spans = [match.span() for match in pattern.finditer(text)]
            spans = [span for span in spans if 0 < span[0] and span[1] < len(text)]
            if spans:
                start, end = min(spans, key=lambda span: abs(span[0] - len(text) / 2))
                break
        left, left_separators = self._split(text[:start], limit)
        right, right_separators = self._split(text[end:], limit)
        return left + right, [*left_separators, " " if end > start else "", *right_separators]

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        # After an error, Marian's tokenizer may still be in the mode for target texts.
        if hasattr(self.tokenizer, "_switch_to_input_mode"):
            self.tokenizer._switch_to_input_mode()
        # With verbose=True, the tokenizer would warn about its own limit instead of the model's.
        return [list(ids) for ids in self.tokenizer(texts, verbose=False, **options)["input_ids"]]
