"""Translation with any encoder-decoder: from a pair of languages and texts to their translations.

In this order: which way a checkpoint translates, how texts become tokens, how tokens become texts,
and the :class:`Translator` that does it in batches of similar length and keeps the order.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hfseq.errors import UsageError, did_you_mean, first_line
from hfseq.generation.request import bucket_length
from hfseq.pipelines import load
from hfseq.pipelines.base import WINDOW_BATCHES, distribute, padded_row_count
from hfseq.pipelines.lines import LONG_LINE_POLICIES, BadLine, read_windows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Groups of languages that OPUS-MT names as one side of a pair: any language is welcome there.
LANGUAGE_GROUPS = frozenset(
    "mul afa alv art aav bat ber bnt cau ccs cel cpf cpp cus dra euq fiu gem gmq gmw grk iir inc "
    "ine ira itc map mkh myn nah nic ngf paa phi pqe poz roa sal sem sit sla smi tai trk tut tup "
    "urj wak zle zls zlw zhx".split()
)

#: Pairs of languages that a message lists.
MAX_LISTED_PAIRS = 40

#: Where text may be cut, the best cuts first: behind sentences, behind clauses, between words.
SPLIT_PATTERNS = (
    re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'»”’)\]]))\s+|(?<=[。！？])\s*"),
    re.compile(r"(?<=[,;:–—])\s+|(?<=[，、；：])\s*"),
    re.compile(r"\s+"),
)

#: What a model without a position table, whose tokenizer has no limit either, may read at most.
MAX_SOURCE_LENGTH = 1024

#: Seconds without a new line after which a stream is translated as far as it has come.
PAUSE = 0.1

#: Tokens that a translation may have beyond twice those of its source.
EXTRA_TOKENS = 16


@dataclass(frozen=True)
class Direction:
    """What goes before each text, the first token of each output, and the tokenizer's source."""

    source_prefix: str = ""
    forced_bos_token_id: int | None = None
    tokenizer_source: str | None = None


class _Pair(NamedTuple):
    source: str | None  # None: the checkpoint does not care
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
    """Return how the checkpoint ``name`` translates from one language into the other.

    Codes are the checkpoint's own; case does not matter, and ``fr`` finds ``fr_XX`` where that is
    the only French. A ``source_prefix`` of the caller, empty or not, takes the place of the one
    that was found. With one pair, nothing has to be said.

    **Raises:** UsageError for languages the checkpoint lacks, or where a choice has to be made;
    it lists them.
    """
    pairs = _pairs(config, tokenizer)
    flags = {"--source_lang": source_lang, "--target_lang": target_lang}
    asked = " ".join(f"{flag} {value}" for flag, value in flags.items() if value)
    if not asked and (source_prefix is not None or not pairs):
        return Direction(_prefix(config) if source_prefix is None else source_prefix)
    if not pairs:
        raise UsageError(
            f"'{name}' does not say which languages it translates, so {asked} means nothing to it: "
            "leave that out"
        )
    targets = _matching({pair.target for pair in pairs}, target_lang)
    sources = _matching({pair.source for pair in pairs if pair.source}, source_lang)
    fitting = [
        pair
        for pair in pairs
        if pair.target in targets and (pair.source is None or pair.source in sources)
    ]
    if len(fitting) == 1:
        changes: dict[str, Any] = {} if source_prefix is None else {"source_prefix": source_prefix}
        return replace(fitting[0].direction, **changes)
    names = [f"{pair.source} -> {pair.target}" if pair.source else pair.target for pair in pairs]
    if len(names) > MAX_LISTED_PAIRS:  # any goes with any: the codes say as much
        names = sorted({pair.target for pair in pairs})
    more = f" and {len(names) - MAX_LISTED_PAIRS} more" if len(names) > MAX_LISTED_PAIRS else ""
    listed = ", ".join(names[:MAX_LISTED_PAIRS]) + more
    if not fitting:
        close = did_you_mean(target_lang or source_lang or "", {pair.target for pair in pairs})
        raise UsageError(f"'{name}' does not translate {asked}{close or ';'} it has {listed}")
    given = f" ({asked} fits {len(fitting)})" if asked else ""
    raise UsageError(
        f"'{name}' translates between several languages{given}: choose with --source_lang and "
        f"--target_lang among {listed}, or write the prefix yourself with --source_prefix"
    )


def _prefix(config: PreTrainedConfig) -> str:
    return getattr(config, "source_prefix", None) or ""


def _pairs(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[_Pair]:
    """Return the pairs of languages of a checkpoint, by the habits of the families."""
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
    # A group is no single language; old names of groups are words: ``ROMANCE``.
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


def _matching(codes: set[str], wanted: str | None) -> set[str]:
    """Return the codes that are the wanted one, or else those that begin with it."""
    if wanted is None:
        return codes

    def plain(code: str) -> str:
        return code.strip("<>_ ").lower().replace("_", "-")

    same = {code for code in codes if plain(code) == plain(wanted)}
    return same or {code for code in codes if plain(code).startswith(f"{plain(wanted)}-")}


class EncodedText(NamedTuple):
    """The tokens of one text: none for what has no words, several parts if it was split."""

    parts: list[list[int]]
    joints: list[str] = []  # noqa: RUF012  what stood between the parts
    warning: str | None = None
    error: str | None = None


class SourceEncoder:
    """Turns texts into token ids of at most ``limit``.

    ``prefix`` goes before every text (and before every part of one that is split); ``long_lines``
    is what happens to texts beyond the limit: ``truncate`` and ``split`` leave a warning, ``error``
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
        """Encode texts, in their order; blank ones have no parts."""
        tokens = iter(self._ids([self.prefix + text for text in texts if text.strip()]))
        encoded = []
        for text in texts:
            ids = next(tokens) if text.strip() else self._empty
            what = f"{len(ids)} tokens are more than the {self.limit} that fit"
            if ids == self._empty:  # of signs that the tokenizer drops
                encoded.append(EncodedText([]))
            elif len(ids) <= self.limit:
                encoded.append(EncodedText([ids]))
            elif self.long_lines == "error":
                advice = "shorten it, or let it be split or truncated"
                encoded.append(EncodedText([], error=f"{what}: {advice}"))
            elif self.long_lines == "split":
                parts, joints = self._split(text)
                encoded.append(EncodedText(parts, joints, f"{what}: split into {len(parts)} parts"))
            else:
                cut = self._ids([self.prefix + text], truncation=True, max_length=self.limit)
                encoded.append(EncodedText(cut, warning=f"{what}: truncated"))
        return encoded

    def _split(self, text: str) -> tuple[list[list[int]], list[str]]:
        """Halve ``text`` until every part fits; return their tokens and what lay between them."""
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
        left, joints = self._split(text[:start])
        right, more = self._split(text[end:])
        return left + right, [*joints, " " if end > start else "", *more]

    def _ids(self, texts: list[str], **options: Any) -> list[list[int]]:
        if not texts:
            return []
        if hasattr(self.tokenizer, "_switch_to_input_mode"):  # Marian: an error may have left it
            self.tokenizer._switch_to_input_mode()
        # Not verbose: it would warn of the tokenizer's limit, which may not be the model's.
        return [list(ids) for ids in self.tokenizer(texts, verbose=False, **options)["input_ids"]]


def max_source_tokens(
    model: FlaxPreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: int | None
) -> int:
    """Return how many tokens a source may have: the position table's, or fewer where asked."""
    limit = model.max_length()
    if limit is None:
        of_tokenizer = getattr(tokenizer, "model_max_length", None) or MAX_SOURCE_LENGTH
        # 1e30 stands for "no limit".
        limit = asked or (of_tokenizer if of_tokenizer < 1_000_000 else MAX_SOURCE_LENGTH)
    return min(limit, asked or limit)


class TargetDecoder:
    """Turns rows of tokens, which begin with the decoder's start token, into one line of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], pad: int | None):
        self.tokenizer, self.ends, self.pad = tokenizer, list(ends), pad
        # Marian's tokenizer has two vocabularies and would decode with the source's.
        two = hasattr(tokenizer, "spm_target")
        self._options: dict[str, Any] = {"use_source_tokenizer": False} if two else {}

    def __call__(self, sequences: np.ndarray) -> list[tuple[str, bool]]:
        """Return for each row its text and whether it came to an end by itself."""
        kept, ended = [], []
        for row in sequences[:, 1:]:
            ends = np.flatnonzero(np.isin(row, self.ends))
            length = len(row)
            if len(ends):
                length = int(ends[0])
            elif self.pad is not None:
                length -= int(np.argmax(row[::-1] != self.pad))
            kept.append(row[:length].tolist())
            ended.append(bool(len(ends) and ends[0] < len(row) - 1))
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True, **self._options)
        lines = [" ".join(text.split("\n")).replace("\r", " ").strip() for text in texts]
        return list(zip(lines, ended, strict=True))


class Hypothesis(NamedTuple):
    """A translation. ``score`` is that of beam search; ``ended`` tells that it was not cut off."""

    text: str
    score: float | None = None
    ended: bool = True


@dataclass
class Translation:
    """A line and what became of it: hypotheses, best first, or an ``error`` and none."""

    line: int
    source: str
    hypotheses: list[Hypothesis] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


class _Part(NamedTuple):
    """Tokens of a line, or of a piece of it: what makes a row of a batch."""

    line: int
    piece: int
    ids: list[int]


class Translator:
    """Translates with a model of ``FlaxAutoModelForSeq2SeqLM`` and its tokenizer.

    Texts are sorted by length within windows of 16 batches and padded to few widths and numbers of
    rows, so that few programs are compiled; padding and neighbours change no translation.

    **Arguments:** ``num_beams`` 1 is greedy search; ``batch_size`` rows are translated at a time;
    ``max_source_length`` and ``max_new_tokens`` count tokens. Without the latter it is a little
    more than twice the width of the source, and never more than ``max_length`` of the model's
    generation configuration or its position table. ``length_penalty``, ``length_penalty_type`` and
    ``early_stopping`` are those of ``generate``, by default the model's own; ``source_prefix`` goes
    before every text; ``long_lines`` says what happens to texts that are too long: ``truncate``,
    ``split`` or ``error``. Other keywords go to ``generate``.

    **Raises:** UsageError for options that contradict each other or the model.
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
            f"{name} {value}: give a number of at least 1"
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        if num_return_sequences > num_beams:
            problems.append(
                f"num_return_sequences {num_return_sequences} is more than num_beams "
                f"{num_beams}: raise num_beams"
            )
        if long_lines not in LONG_LINE_POLICIES:
            problems.append(
                f"long_lines {long_lines}: choose among {', '.join(LONG_LINE_POLICIES)}"
            )
        room = model.max_length()
        if room is not None and (max_new_tokens or 0) > room:
            problems.append(
                f"max_new_tokens {max_new_tokens} is more than the model's {room} positions "
                f"allow: give at most {room - 1}"
            )
        if problems:
            raise UsageError("; ".join(problems))
        limit = max_source_tokens(model, tokenizer, max_source_length)
        self.encode = SourceEncoder(tokenizer, limit, source_prefix, long_lines)
        config = model.generation_config
        ends, pad = config.eos_token_id, config.pad_token_id
        ends = ends if ends is not None else model.config.eos_token_id
        pad = pad if pad is not None else model.config.pad_token_id
        self.pad = 0 if pad is None else pad
        self.decode = TargetDecoder(tokenizer, np.ravel([] if ends is None else ends).tolist(), pad)
        self._options: dict[str, Any] = {
            "do_sample": False,
            "compact_finished": True,
            "num_beams": num_beams,
            "num_return_sequences": num_return_sequences,
        }
        # None leaves an option to the model.
        self._options |= {name: value for name, value in generation.items() if value is not None}
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
        """Load the checkpoint ``name`` (a directory or on the Hub) for a pair of languages.

        ``precision`` names a recipe; ``None`` computes in float32. Languages and prefix are those
        of :func:`hfseq.pipelines.translation.find_direction`.

        **Raises:** UsageError for a checkpoint of another kind or without a tokenizer, or for a
        pair that it lacks, CheckpointError for one that cannot be loaded.
        """
        from hfseq.modeling.auto import FlaxAutoModelForSeq2SeqLM

        recipe = {"precision": precision} if precision else {}
        model, tokenizer = load(FlaxAutoModelForSeq2SeqLM, name, **recipe)
        if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
            raise UsageError(f"'{name}' is no encoder-decoder with a head: it cannot translate")
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
        """Return the hypotheses of each text, best first; a blank text has a blank translation.

        ``params`` are used instead of the model's own, wherever they lie; over a mesh, the rows of
        batches that divide evenly are distributed too. An error in one text is raised.
        """
        translations = self.translate(texts, params)
        wrong = next((line for line in translations if line.error), None)
        if wrong is not None:
            raise UsageError(f"text {wrong.line}: {wrong.error}")
        warned = [line for line in translations if line.warnings]
        if warned:
            first = f"text {warned[0].line}: {warned[0].warnings[0]}"
            logger.warning("%d of %d texts are too long: %s", len(warned), len(translations), first)
        return [line.hypotheses for line in translations]

    def translate(
        self, texts: Sequence[str], params: Mapping[str, Any] | None = None, first_line: int = 1
    ) -> list[Translation]:
        """Return a :class:`Translation` of each text, numbered from ``first_line``.

        A text on which the model fails has an ``error``; the others of its batch are translated.
        """
        lines = [Translation(number, text) for number, text in enumerate(texts, first_line)]
        for start in range(0, len(lines), self.window):
            window = lines[start : start + self.window]
            for line in window:
                if isinstance(line.source, BadLine):
                    usable, problem = line.source.usable, line.source.problem
                    line.error = None if usable else problem
                    line.warnings += [problem] if usable else []
            encoded = self.encode(["" if line.error else str(line.source) for line in window])
            parts = []
            for number, (line, one) in enumerate(zip(window, encoded, strict=True)):
                line.error = line.error or one.error
                line.warnings += [one.warning] if one.warning else []
                parts += [_Part(number, piece, ids) for piece, ids in enumerate(one.parts)]
            done: dict[tuple[int, int], list[Hypothesis]] = {}
            for batch in self._batches(parts):
                for part, result in zip(batch, self._survive(batch, params), strict=True):
                    if isinstance(result, str):
                        window[part.line].error = result
                    else:
                        done[part.line, part.piece] = result
            for number, (line, one) in enumerate(zip(window, encoded, strict=True)):
                if not line.error:
                    pieces = [done[number, piece] for piece in range(len(one.parts))]
                    line.hypotheses = self._join(pieces, one.joints)
        return lines

    def stream(
        self,
        lines: Iterable[str],
        params: Mapping[str, Any] | None = None,
        pause: float | None = PAUSE,
    ) -> Iterator[Translation]:
        """Translate lines as they come, in order.

        What has come is translated when it fills a batch, or when nothing comes for ``pause``
        seconds; ``None`` waits for full windows, which suits files. An error of ``lines`` is raised
        after the translations of the lines before it.
        """
        first = 1
        for window in read_windows(lines, self.window, self.batch_size, pause):
            yield from self.translate(window, params, first)
            first += len(window)

    def _batches(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """Yield parts of similar length together, the longest first, so that memory fails early."""
        batch: list[_Part] = []
        for part in sorted(parts, key=lambda part: -len(part.ids)):
            # One long line must not make 31 short ones as wide, and as long to decode.
            lonely = batch and 2 * bucket_length(len(part.ids)) <= bucket_length(len(batch[0].ids))
            if len(batch) == self.batch_size or lonely:
                yield batch
                batch = []
            batch.append(part)
        if batch:
            yield batch

    def _survive(
        self, batch: list[_Part], params: Mapping[str, Any] | None
    ) -> Sequence[list[Hypothesis] | str]:
        """Return the hypotheses of each part, or what went wrong with it alone.

        **Raises:** what went wrong, where nothing has gone right so far for several parts: then it
        is not the fault of a text.
        """
        try:
            results = self._generate([part.ids for part in batch], params)
            self._succeeded = True
            return results
        except Exception as error:
            if len(batch) == 1:
                return [f"the model failed on it: {first_line(error)}"]
            alone = [self._survive([part], params)[0] for part in batch]
            if len(batch) > 3 and not self._succeeded:
                raise
            return alone

    def _generate(
        self, rows: list[list[int]], params: Mapping[str, Any] | None
    ) -> list[list[Hypothesis]]:
        width = bucket_length(max(map(len, rows)), self.model.max_length())
        # Rows that fill up are copies of a real one: they take no steps of their own.
        filled = rows + [rows[-1]] * (padded_row_count(len(rows), self.batch_size) - len(rows))
        ids = np.full((len(filled), width), self.pad, np.int32)
        mask = np.zeros_like(ids)
        for number, row in enumerate(filled):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        output = self.model.generate(
            distribute({"ids": ids}, params)["ids"],
            attention_mask=mask,
            params=params,
            max_length=1 + self._new_tokens(width),
            max_new_tokens=None,
            **self._options,
        )
        wanted = self.num_return_sequences
        texts = self.decode(np.asarray(output.sequences)[: len(rows) * wanted])
        scores = [None] * len(texts)
        if self.num_beams > 1:
            scores = np.asarray(output.scores, np.float64).tolist()
        flat = [
            Hypothesis(text, score, ended)
            for (text, ended), score in zip(texts, scores, strict=False)
        ]
        return [flat[start : start + wanted] for start in range(0, len(flat), wanted)]

    def _new_tokens(self, width: int) -> int:
        """Return how long a translation of a source of ``width`` tokens may get."""
        room = self.model.max_length()
        if self.max_new_tokens is not None:  # all positions but that of the start token
            return self.max_new_tokens if room is None else min(self.max_new_tokens, room - 1)
        config = self.model.generation_config
        new = bucket_length(2 * width + EXTRA_TOKENS) - 1  # the start token is in the buffer too
        if config.max_new_tokens is not None:
            new = min(new, config.max_new_tokens)
        elif config.max_length is not None:
            new = min(new, config.max_length - 1)
        return max(1, new if room is None else min(new, room - 1))

    def _join(self, pieces: list[list[Hypothesis]], joints: list[str]) -> list[Hypothesis]:
        """Join the hypotheses of equal rank of all pieces; scores are averaged over the pieces."""
        if not pieces:
            return [Hypothesis("")] * self.num_return_sequences
        if len(pieces) == 1:
            return pieces[0]
        joined = []
        for ranked in zip(*pieces, strict=True):
            text = "".join(j + one.text for j, one in zip(["", *joints], ranked, strict=True))
            scores = [one.score for one in ranked if one.score is not None]
            score = sum(scores) / len(scores) if scores else None
            joined.append(Hypothesis(text.strip(), score, all(one.ended for one in ranked)))
        return joined
