"""Translation with any encoder-decoder.

The module contains, in this order, the language pairs of a checkpoint, the encoding of sources, the
decoding of targets, and the :class:`Translator`, which translates in batches of similar length.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.errors import UsageError, did_you_mean, first_line
from hfseq.generation.request import bucket_length, end_token_ids
from hfseq.pipelines import load
from hfseq.pipelines.base import WINDOW_BATCHES, distribute, padded_row_count
from hfseq.pipelines.lines import LONG_LINE_POLICIES, BadLine, read_windows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Language groups in OPUS-MT model names. These models accept any source language of the group.
LANGUAGE_GROUPS = frozenset(
    "mul afa alv art aav bat ber bnt cau ccs cel cpf cpp cus dra euq fiu gem gmq gmw grk iir inc "
    "ine ira itc map mkh myn nah nic ngf paa phi pqe poz roa sal sem sit sla smi tai trk tut tup "
    "urj wak zle zls zlw zhx".split()
)

#: Maximum number of language pairs in a message.
MAX_LISTED_PAIRS = 40

#: Where texts may be split, by preference: after sentences, after clauses, between words.
SPLIT_PATTERNS = (
    re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'»”’)\]]))\s+|(?<=[。！？])\s*"),
    re.compile(r"(?<=[,;:–—])\s+|(?<=[，、；：])\s*"),
    re.compile(r"\s+"),
)

#: Maximum source length if neither the model nor the tokenizer defines one.
MAX_SOURCE_LENGTH = 1024

#: Seconds without a new line after which the lines of a stream so far are translated.
PAUSE = 0.1

#: Maximum tokens of a translation beyond twice the width of its source.
EXTRA_TOKENS = 16


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

    Language codes are those of the checkpoint, and case does not matter. ``fr`` matches ``fr_XX``
    if this is the only French code. A checkpoint with a single pair does not require languages.

    Args:
        config: The configuration of the model.
        tokenizer: Its tokenizer.
        name: Name of the checkpoint in messages.
        source_lang: Source language.
        target_lang: Target language.
        source_prefix: Replaces the checkpoint's prefix, also if empty.

    Raises:
        UsageError: The checkpoint lacks the languages, or several pairs match. The message lists
            the pairs.
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
    if len(names) > MAX_LISTED_PAIRS:  # all combinations exist: list the codes only
        names = sorted({pair.target for pair in pairs})
    omitted = f" and {len(names) - MAX_LISTED_PAIRS} more" if len(names) > MAX_LISTED_PAIRS else ""
    listed = ", ".join(names[:MAX_LISTED_PAIRS]) + omitted
    if not matches:
        suggestion = did_you_mean(target_lang or source_lang or "", {pair.target for pair in pairs})
        raise UsageError(
            f"'{name}' does not support {requested}{suggestion or ';'} it has {listed}"
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
    # Language groups do not define a source. Old group names are upper-case words: ``ROMANCE``.
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
        warning: Warning about a text that is too long.
        error: Error about a text that is too long.
    """

    parts: list[list[int]]
    separators: list[str] = []  # noqa: RUF012
    warning: str | None = None
    error: str | None = None


class SourceEncoder:
    """Converts texts to at most ``limit`` token IDs.

    Args:
        tokenizer: The tokenizer.
        limit: Maximum number of tokens.
        prefix: Text before every text, and before every part of a text that is split.
        long_lines: How to handle longer texts: ``truncate`` and ``split`` add a warning, ``error``
            an error.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        prefix: str = "",
        long_lines: str = "truncate",
    ):
        self.tokenizer, self.limit, self.prefix = tokenizer, limit, prefix
        self.long_lines = long_lines
        self._empty = self._ids([prefix])[0]

    def __call__(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes texts in order. Blank texts have no parts."""
        tokens = iter(self._ids([self.prefix + text for text in texts if text.strip()]))
        encoded = []
        for text in texts:
            ids = next(tokens) if text.strip() else self._empty
            problem = f"{len(ids)} tokens exceed the limit of {self.limit}"
            if ids == self._empty:  # all characters are dropped by the tokenizer
                encoded.append(EncodedText([]))
            elif len(ids) <= self.limit:
                encoded.append(EncodedText([ids]))
            elif self.long_lines == "error":
                advice = "shorten it, or let it be split or truncated"
                encoded.append(EncodedText([], error=f"{problem}: {advice}"))
            elif self.long_lines == "split":
                parts, separators = self._split(text)
                encoded.append(
                    EncodedText(parts, separators, f"{problem}: split into {len(parts)} parts")
                )
            else:
                truncated = self._ids([self.prefix + text], truncation=True, max_length=self.limit)
                encoded.append(EncodedText(truncated, warning=f"{problem}: truncated"))
        return encoded

    def _split(self, text: str) -> tuple[list[list[int]], list[str]]:
        """Halves ``text`` until every part fits, and returns the parts' tokens and separators."""
        ids = self._ids([self.prefix + text])[0]
        if len(ids) <= self.limit or len(text) < 2:
            return [ids[: self.limit]], []
        start = end = len(text) // 2
        for pattern in SPLIT_PATTERNS:
            spans = [match.span() for match in pattern.finditer(text)]
            spans = [span for span in spans if 0 < span[0] and span[1] < len(text)]
            if spans:
                start, end = min(spans, key=lambda span: abs(span[0] - len(text) / 2))
                break
        left, left_separators = self._split(text[:start])
        right, right_separators = self._split(text[end:])
        return left + right, [*left_separators, " " if end > start else "", *right_separators]

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        # Marian: an error may have left it in target mode.
        if hasattr(self.tokenizer, "_switch_to_input_mode"):
            self.tokenizer._switch_to_input_mode()
        # verbose=True warns about the tokenizer's limit, which may differ from the model's.
        return [list(ids) for ids in self.tokenizer(texts, verbose=False, **options)["input_ids"]]


def max_source_tokens(
    model: FlaxPreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_source_length: int | None
) -> int:
    """Returns the maximum number of source tokens: the model's limit, or less if requested."""
    limit = model.max_length()
    if limit is None:
        tokenizer_limit = getattr(tokenizer, "model_max_length", None) or MAX_SOURCE_LENGTH
        # 1e30 stands for "no limit".
        limit = max_source_length or (
            tokenizer_limit if tokenizer_limit < 1_000_000 else MAX_SOURCE_LENGTH
        )
    return min(limit, max_source_length or limit)


class TargetDecoder:
    """Converts rows of token IDs, which begin with the decoder's start token, to lines of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], pad: int | None):
        self.tokenizer, self.ends, self.pad = tokenizer, list(ends), pad
        # Marian's tokenizer has two vocabularies and decodes with the source vocabulary by default.
        has_two_vocabularies = hasattr(tokenizer, "spm_target")
        self._options: dict[str, Any] = (
            {"use_source_tokenizer": False} if has_two_vocabularies else {}
        )

    def __call__(self, sequences: np.ndarray) -> list[tuple[str, bool]]:
        """Returns the text of each row, and whether it ends with an end token."""
        text_ids, ended = [], []
        for row in sequences[:, 1:]:
            end_positions = np.flatnonzero(np.isin(row, self.ends))
            length = len(row)
            if len(end_positions):
                length = int(end_positions[0])
            elif self.pad is not None:
                length -= int(np.argmax(row[::-1] != self.pad))
            text_ids.append(row[:length].tolist())
            ended.append(bool(len(end_positions) and end_positions[0] < len(row) - 1))
        texts = self.tokenizer.batch_decode(text_ids, skip_special_tokens=True, **self._options)
        lines = [" ".join(text.split("\n")).replace("\r", " ").strip() for text in texts]
        return list(zip(lines, ended, strict=True))


class Hypothesis(NamedTuple):
    """A translation.

    Attributes:
        text: The text.
        score: Score of beam search.
        ended: Whether it is complete, that is, not cut off at the maximum length.
    """

    text: str
    score: float | None = None
    ended: bool = True


@dataclass
class Translation:
    """A line and its translations.

    Attributes:
        line: Line number.
        source: The source text.
        hypotheses: Translations, best first. Empty after an error.
        warnings: Warnings about the line.
        error: Why the line could not be translated.
    """

    line: int
    source: str
    hypotheses: list[Hypothesis] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


class _Part(NamedTuple):
    """Tokens of a line, or of a part of it: a row of a batch."""

    line: int
    piece: int
    ids: list[int]


class Translator:
    """Translates with a model of ``FlaxAutoModelForSeq2SeqLM`` and its tokenizer.

    Texts are sorted by length within windows of 16 batches and padded to a few widths and numbers
    of rows, so that few programs are compiled. A translation does not depend on padding or other
    rows.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        num_beams: Number of beams. 1 is greedy search.
        batch_size: Rows per batch.
        max_source_length: Maximum source tokens.
        max_new_tokens: Maximum new tokens. By default slightly more than twice the width of the
            source, limited by ``max_length`` of the generation configuration and the position
            table.
        num_return_sequences: Translations per text.
        source_prefix: Text before every source.
        long_lines: How to handle texts that are too long: ``truncate``, ``split`` or ``error``.
        **generation: Options of ``generate``, for example ``length_penalty``,
            ``length_penalty_type`` and ``early_stopping``. ``None`` leaves an option to the model.

    Raises:
        UsageError: Options contradict each other or the model.
    """

    def __init__(
        self,
        model: FlaxPreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_beams: int = 4,
        batch_size: int = 32,
        max_source_length: int | None = None,
        max_new_tokens: int | None = None,
        num_return_sequences: int = 1,
        source_prefix: str = "",
        long_lines: str = "truncate",
        **generation: Any,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.num_beams, self.batch_size = num_beams, batch_size
        self.num_return_sequences, self.max_new_tokens = num_return_sequences, max_new_tokens
        self.window = WINDOW_BATCHES * batch_size
        counts = {
            "num_beams": num_beams,
            "batch_size": batch_size,
            "num_return_sequences": num_return_sequences,
            "max_source_length": max_source_length,
            "max_new_tokens": max_new_tokens,
        }
        problems = [
            f"{name} must be at least 1, not {value}"
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        if num_return_sequences > num_beams:
            problems.append(
                f"num_return_sequences {num_return_sequences} exceeds num_beams "
                f"{num_beams}: raise num_beams"
            )
        if long_lines not in LONG_LINE_POLICIES:
            problems.append(
                f"unknown long_lines {long_lines}: use one of {', '.join(LONG_LINE_POLICIES)}"
            )
        max_positions = model.max_length()
        if max_positions is not None and (max_new_tokens or 0) > max_positions:
            problems.append(
                f"max_new_tokens {max_new_tokens} exceeds the model's {max_positions} positions: "
                f"use at most {max_positions - 1}"
            )
        if problems:
            raise UsageError("; ".join(problems))
        limit = max_source_tokens(model, tokenizer, max_source_length)
        self.encode = SourceEncoder(tokenizer, limit, source_prefix, long_lines)
        pad = model.generation_config.pad_token_id
        pad = pad if pad is not None else model.config.pad_token_id
        self.pad = 0 if pad is None else pad
        self._options: dict[str, Any] = {
            "do_sample": False,
            "compact_finished": True,
            "num_beams": num_beams,
            "num_return_sequences": num_return_sequences,
        }
        # None leaves an option to the model.
        self._options |= {name: value for name, value in generation.items() if value is not None}
        self.decode = TargetDecoder(tokenizer, end_token_ids(model, self._options), pad)
        self._succeeded = False

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        precision: str | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        source_prefix: str | None = None,
        **options: Any,
    ) -> Translator:
        """Loads a checkpoint for a pair of languages.

        Args:
            name: Directory or Hub name.
            precision: Precision recipe. By default float32.
            source_lang: See :func:`find_direction`.
            target_lang: See :func:`find_direction`.
            source_prefix: See :func:`find_direction`.
            **options: Arguments of :class:`Translator`.

        Raises:
            UsageError: The checkpoint has another type, has no tokenizer, or lacks the pair.
            CheckpointError: The checkpoint cannot be loaded.
        """
        from hfseq.modeling.auto import FlaxAutoModelForSeq2SeqLM

        recipe = {"precision": precision} if precision else {}
        model, tokenizer = load(FlaxAutoModelForSeq2SeqLM, name, **recipe)
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise UsageError(f"'{name}' is not an encoder-decoder with a language modeling head")
        direction = find_direction(
            model.config, tokenizer, name, source_lang, target_lang, source_prefix
        )
        if direction.tokenizer_source is not None:
            tokenizer.src_lang = direction.tokenizer_source
        if direction.forced_bos_token_id is not None:
            options.setdefault("forced_bos_token_id", direction.forced_bos_token_id)
        return cls(model, tokenizer, source_prefix=direction.source_prefix, **options)

    def __call__(
        self, texts: Sequence[str], params: Mapping[str, Any] | None = None
    ) -> list[list[Hypothesis]]:
        """Returns the translations of each text, best first. A blank text has a blank translation.

        Args:
            texts: The texts.
            params: Parameters to use instead of the model's. If they are distributed over a mesh,
                batches that divide evenly are distributed too.

        Raises:
            UsageError: A text cannot be translated.
        """
        translations = self.translate(texts, params)
        failed = next((line for line in translations if line.error), None)
        if failed is not None:
            raise UsageError(f"text {failed.line}: {failed.error}")
        with_warnings = [line for line in translations if line.warnings]
        if with_warnings:
            first = f"text {with_warnings[0].line}: {with_warnings[0].warnings[0]}"
            logger.warning(
                "%d of %d texts are too long: %s", len(with_warnings), len(translations), first
            )
        return [line.hypotheses for line in translations]

    def translate(
        self, texts: Sequence[str], params: Mapping[str, Any] | None = None, first_line: int = 1
    ) -> list[Translation]:
        """Returns a :class:`Translation` of each text.

        A text on which the model fails has an ``error``; the other texts of its batch are
        translated.

        Args:
            texts: The texts.
            params: Parameters to use instead of the model's.
            first_line: Number of the first text.
        """
        lines = [Translation(index, text) for index, text in enumerate(texts, first_line)]
        for start in range(0, len(lines), self.window):
            window = lines[start : start + self.window]
            for line in window:
                if isinstance(line.source, BadLine):
                    usable, problem = line.source.usable, line.source.problem
                    line.error = None if usable else problem
                    line.warnings += [problem] if usable else []
            encoded = self.encode(["" if line.error else str(line.source) for line in window])
            parts = []
            for index, (line, encoded_text) in enumerate(zip(window, encoded, strict=True)):
                line.error = line.error or encoded_text.error
                line.warnings += [encoded_text.warning] if encoded_text.warning else []
                parts += [_Part(index, piece, ids) for piece, ids in enumerate(encoded_text.parts)]
            results: dict[tuple[int, int], list[Hypothesis]] = {}
            for batch in self._batches(parts):
                for part, result in zip(batch, self._generate_each(batch, params), strict=True):
                    if isinstance(result, str):
                        window[part.line].error = result
                    else:
                        results[part.line, part.piece] = result
            for index, (line, encoded_text) in enumerate(zip(window, encoded, strict=True)):
                if not line.error:
                    pieces = [results[index, piece] for piece in range(len(encoded_text.parts))]
                    line.hypotheses = self._join(pieces, encoded_text.separators)
        return lines

    def stream(
        self,
        lines: Iterable[str],
        params: Mapping[str, Any] | None = None,
        pause: float | None = PAUSE,
    ) -> Iterator[Translation]:
        """Translates lines as they arrive, in order.

        An error of ``lines`` is raised after the translations of the lines before it.

        Args:
            lines: The lines.
            params: Parameters to use instead of the model's.
            pause: Seconds without a new line after which incomplete batches are translated.
                ``None`` waits for complete windows, which suits files.
        """
        first = 1
        for window in read_windows(lines, self.window, self.batch_size, pause):
            yield from self.translate(window, params, first)
            first += len(window)

    def _batches(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """Yields parts of similar length. The longest are first, so that memory fails early."""
        batch: list[_Part] = []
        for part in sorted(parts, key=lambda part: -len(part.ids)):
            # Do not pad 31 short lines, and extend their decoding, for one long line.
            is_too_short = batch and 2 * bucket_length(len(part.ids)) <= bucket_length(
                len(batch[0].ids)
            )
            if len(batch) == self.batch_size or is_too_short:
                yield batch
                batch = []
            batch.append(part)
        if batch:
            yield batch

    def _generate_each(
        self, batch: list[_Part], params: Mapping[str, Any] | None
    ) -> Sequence[list[Hypothesis] | str]:
        """Returns the translations of each part, or the error that the part alone causes.

        Raises:
            Exception: Several parts fail, and no batch has succeeded so far. The cause is then not
                a text.
        """
        try:
            results = self._generate([part.ids for part in batch], params)
            self._succeeded = True
            return results
        except Exception as error:
            if len(batch) == 1:
                return [f"the model failed: {first_line(error)}"]
            separate = [self._generate_each([part], params)[0] for part in batch]
            if len(batch) > 3 and not self._succeeded:
                raise
            return separate

    def _generate(
        self, rows: list[list[int]], params: Mapping[str, Any] | None
    ) -> list[list[Hypothesis]]:
        width = bucket_length(max(map(len, rows)), self.model.max_length())
        # Padding rows are copies of a real row, so that they do not require more decoding steps.
        padded_rows = rows + [rows[-1]] * (padded_row_count(len(rows), self.batch_size) - len(rows))
        ids = np.full((len(padded_rows), width), self.pad, np.int32)
        mask = np.zeros_like(ids)
        for number, row in enumerate(padded_rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        output = self.model.generate(
            distribute({"ids": ids}, params)["ids"],
            attention_mask=mask,
            params=params,
            max_length=1 + self._new_tokens(width),
            max_new_tokens=None,
            **self._options,
        )
        num_sequences = self.num_return_sequences
        texts = self.decode(np.asarray(output.sequences)[: len(rows) * num_sequences])
        scores = [None] * len(texts)
        if self.num_beams > 1:
            scores = np.asarray(output.scores, np.float64).tolist()
        flat = [
            Hypothesis(text, score, ended)
            for (text, ended), score in zip(texts, scores, strict=False)
        ]
        return [flat[start : start + num_sequences] for start in range(0, len(flat), num_sequences)]

    def _new_tokens(self, width: int) -> int:
        """Returns the maximum length of the translation of a source with ``width`` tokens."""
        max_positions = self.model.max_length()
        if self.max_new_tokens is not None:  # all positions except the start token's
            return (
                self.max_new_tokens
                if max_positions is None
                else min(self.max_new_tokens, max_positions - 1)
            )
        config = self.model.generation_config
        # The buffer includes the start token.
        max_new_tokens = bucket_length(2 * width + EXTRA_TOKENS) - 1
        if config.max_new_tokens is not None:
            max_new_tokens = min(max_new_tokens, config.max_new_tokens)
        elif config.max_length is not None:
            max_new_tokens = min(max_new_tokens, config.max_length - 1)
        return max(
            1, max_new_tokens if max_positions is None else min(max_new_tokens, max_positions - 1)
        )

    def _join(self, pieces: list[list[Hypothesis]], separators: list[str]) -> list[Hypothesis]:
        """Joins the translations of equal rank of all pieces.

        Scores are averaged over the pieces.
        """
        if not pieces:
            return [Hypothesis("")] * self.num_return_sequences
        if len(pieces) == 1:
            return pieces[0]
        hypotheses = []
        for ranked in zip(*pieces, strict=True):
            text = "".join(
                separator + hypothesis.text
                for separator, hypothesis in zip(["", *separators], ranked, strict=True)
            )
            scores = [hypothesis.score for hypothesis in ranked if hypothesis.score is not None]
            score = sum(scores) / len(scores) if scores else None
            hypotheses.append(
                Hypothesis(text.strip(), score, all(hypothesis.ended for hypothesis in ranked))
            )
        return hypotheses
