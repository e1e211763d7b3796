"""Translation with any encoder-decoder: texts in batches of similar length, out in their order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hfseq.errors import UsageError, first_line
from hfseq.generation.lengths import bucket
from hfseq.translation_stream import LONG_LINES, BadLine, windows
from hfseq.translation_text import Encoded, SourceEncoder, TargetDecoder, source_limit

logger = logging.getLogger(__name__)

#: Batches that are sorted by length together.
WINDOW = 16
#: Seconds without a new line after which a stream is translated as far as it has come.
PAUSE = 0.1
#: Tokens that a translation may have beyond twice those of its source.
SPARE = 16


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
    place: int
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
        model: Any,
        tokenizer: Any,
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
        self.window = WINDOW * batch_size
        self._check(max_source_length, long_lines)
        limit = source_limit(model, tokenizer, max_source_length)
        self.encode = SourceEncoder(tokenizer, limit, source_prefix, long_lines)
        own = model.generation_config
        ends = own.eos_token_id if own.eos_token_id is not None else model.config.eos_token_id
        pad = own.pad_token_id if own.pad_token_id is not None else model.config.pad_token_id
        self.pad = 0 if pad is None else pad
        self.decode = TargetDecoder(tokenizer, np.ravel([] if ends is None else ends).tolist(), pad)
        self._options = _options(num_beams, num_return_sequences, generation)
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

        Languages and prefix are those of :func:`hfseq.translation_languages.find_direction`.

        **Raises:** UsageError for a pair that the checkpoint lacks, CheckpointError for one that
        cannot be loaded.
        """
        from hfseq.translation_checkpoint import load_pair
        from hfseq.translation_languages import find_direction

        model, tokenizer = load_pair(name, precision)
        way = find_direction(model.config, tokenizer, name, source_lang, target_lang, source_prefix)
        if way.tokenizer_source is not None:
            tokenizer.src_lang = way.tokenizer_source
        if way.forced_bos_token_id is not None:
            options.setdefault("forced_bos_token_id", way.forced_bos_token_id)
        return cls(model, tokenizer, source_prefix=way.source_prefix, **options)

    def __call__(self, texts: Sequence[str], params: Any = None) -> list[list[Hypothesis]]:
        """Return the hypotheses of each text, best first; a blank text has a blank translation.

        ``params`` are used instead of the model's own, wherever they lie; over a mesh, the rows of
        batches that divide evenly are distributed too. An error in one text is raised.
        """
        found = self.translate(texts, params)
        wrong = next((line for line in found if line.error), None)
        if wrong is not None:
            raise UsageError(f"text {wrong.line}: {wrong.error}")
        warned = [line for line in found if line.warnings]
        if warned:
            first = f"text {warned[0].line}: {warned[0].warnings[0]}"
            logger.warning("%d of %d texts are too long: %s", len(warned), len(found), first)
        return [line.hypotheses for line in found]

    def translate(
        self, texts: Sequence[str], params: Any = None, first_line: int = 1
    ) -> list[Translation]:
        """Return a :class:`Translation` of each text, numbered from ``first_line``.

        A text on which the model fails has an ``error``; the others of its batch are translated.
        """
        found = [Translation(first_line + place, text) for place, text in enumerate(texts)]
        for start in range(0, len(found), self.window):
            self._translate_window(found[start : start + self.window], params)
        return found

    def stream(
        self, lines: Iterable[str], params: Any = None, pause: float | None = PAUSE
    ) -> Iterator[Translation]:
        """Translate lines as they come, in order.

        What has come is translated when it fills a batch, or when nothing comes for ``pause``
        seconds; ``None`` waits for full windows, which suits files. An error of ``lines`` is raised
        after the translations of the lines before it.
        """
        first = 1
        for window in windows(lines, self.window, self.batch_size, pause):
            yield from self.translate(window, params, first)
            first += len(window)

    def _check(self, max_source_length: int | None, long_lines: str) -> None:
        counts = {
            "num_beams": self.num_beams,
            "batch_size": self.batch_size,
            "num_return_sequences": self.num_return_sequences,
            "max_source_length": max_source_length,
            "max_new_tokens": self.max_new_tokens,
        }
        problems = [
            f"{name} {value}: give a number of at least 1"
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        if self.num_return_sequences > self.num_beams:
            problems.append(
                f"num_return_sequences {self.num_return_sequences} is more than num_beams "
                f"{self.num_beams}: raise num_beams"
            )
        if long_lines not in LONG_LINES:
            problems.append(f"long_lines {long_lines}: choose among {', '.join(LONG_LINES)}")
        room = self.model.max_length()
        if room is not None and (self.max_new_tokens or 0) > room:
            problems.append(
                f"max_new_tokens {self.max_new_tokens} is more than the model's {room} positions "
                f"allow: give at most {room - 1}"
            )
        if problems:
            raise UsageError("; ".join(problems))

    def _translate_window(self, lines: list[Translation], params: Any) -> None:
        encoded = self._encode(lines)
        parts = [
            _Part(number, place, ids)
            for number, one in enumerate(encoded)
            for place, ids in enumerate(one.parts)
        ]
        done: dict[tuple[int, int], list[Hypothesis]] = {}
        for batch in _batches(parts, self.batch_size):
            for part, result in zip(batch, self._survive(batch, params), strict=True):
                if isinstance(result, str):
                    lines[part.line].error = result
                else:
                    done[part.line, part.place] = result
        for number, (line, one) in enumerate(zip(lines, encoded, strict=True)):
            if not line.error:
                found = [done[number, place] for place in range(len(one.parts))]
                line.hypotheses = _join(found, one.joints, self.num_return_sequences)

    def _encode(self, lines: list[Translation]) -> list[Encoded]:
        texts = []
        for line in lines:
            source = line.source
            if isinstance(source, BadLine):
                line.error = None if source.usable else source.problem
                line.warnings += [source.problem] if source.usable else []
            texts.append("" if line.error else str(source))
        encoded = self.encode(texts)
        for line, one in zip(lines, encoded, strict=True):
            line.error = line.error or one.error
            line.warnings += [one.warning] if one.warning else []
        return encoded

    def _survive(self, batch: list[_Part], params: Any) -> list[list[Hypothesis] | str]:
        """Return the hypotheses of each part, or what went wrong with it alone.

        **Raises:** what went wrong, where nothing has gone right so far for several parts: then it
        is not the fault of a text.
        """
        try:
            found: list[Any] = self._generate([part.ids for part in batch], params)
            self._succeeded = True
            return found
        except Exception as error:
            if len(batch) == 1:
                return [_describe(error)]
            alone = [self._survive([part], params)[0] for part in batch]
            if len(batch) > 3 and not self._succeeded:
                raise
            return alone

    def _generate(self, rows: list[list[int]], params: Any) -> list[list[Hypothesis]]:
        width = bucket(max(map(len, rows)), self.model.max_length())
        # Rows that fill up are copies of a real one: they take no steps of their own.
        filled = rows + [rows[-1]] * (self._rows(len(rows)) - len(rows))
        ids = np.full((len(filled), width), self.pad, np.int32)
        mask = np.zeros_like(ids)
        for place, row in enumerate(filled):
            ids[place, : len(row)], mask[place, : len(row)] = row, 1
        output = self.model.generate(
            _spread(ids, params), attention_mask=mask, params=params,
            max_length=1 + self._new_tokens(width), max_new_tokens=None, **self._options,
        )  # fmt: skip
        wanted = self.num_return_sequences
        found = self.decode(np.asarray(output.sequences)[: len(rows) * wanted])
        scores = [None] * len(found)
        if self.num_beams > 1:
            scores = np.asarray(output.scores, np.float64).tolist()
        flat = [
            Hypothesis(text, score, ended)
            for (text, ended), score in zip(found, scores, strict=False)
        ]
        return [flat[start : start + wanted] for start in range(0, len(flat), wanted)]

    def _rows(self, count: int) -> int:
        """Return 1, 4, 16 and so on, or the size of a full batch."""
        rows = 1
        while rows < count:
            rows *= 4
        return min(rows, self.batch_size)

    def _new_tokens(self, width: int) -> int:
        """Return how long a translation of a source of ``width`` tokens may get."""
        room = self.model.max_length()
        if self.max_new_tokens is not None:  # all positions but that of the start token
            return self.max_new_tokens if room is None else min(self.max_new_tokens, room - 1)
        own = self.model.generation_config
        new = bucket(2 * width + SPARE) - 1  # the start token is in the buffer too
        if own.max_new_tokens is not None:
            new = min(new, own.max_new_tokens)
        elif own.max_length is not None:
            new = min(new, own.max_length - 1)
        return max(1, new if room is None else min(new, room - 1))


def _batches(parts: list[_Part], size: int) -> Iterator[list[_Part]]:
    """Yield parts of similar length together, the longest first, so that memory fails early."""
    batch: list[_Part] = []
    for part in sorted(parts, key=lambda part: -len(part.ids)):
        # One long line must not make 31 short ones as wide, and as long to decode.
        lonely = batch and 2 * bucket(len(part.ids)) <= bucket(len(batch[0].ids))
        if len(batch) == size or lonely:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _options(num_beams: int, wanted: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``generate`` without those that are left to the model."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return {
        "do_sample": False, "num_beams": num_beams, "num_return_sequences": wanted,
        "compact_finished": True, **chosen,
    }  # fmt: skip


def _describe(error: Exception) -> str:
    return f"the model failed on it: {first_line(error)}"


def _join(parts: list[list[Hypothesis]], joints: list[str], count: int) -> list[Hypothesis]:
    """Join the hypotheses of equal rank of all parts; scores are averaged over the parts."""
    if not parts:
        return [Hypothesis("")] * count
    if len(parts) == 1:
        return parts[0]
    found = []
    for rank in range(count):
        ranked = [part[rank] for part in parts]
        text = "".join(joint + one.text for joint, one in zip(["", *joints], ranked, strict=True))
        scores = [one.score for one in ranked if one.score is not None]
        score = sum(scores) / len(scores) if scores else None
        found.append(Hypothesis(text.strip(), score, all(one.ended for one in ranked)))
    return found


def _spread(ids: np.ndarray, params: Any) -> Any:
    """Distribute rows over the data axes of the mesh on which parameters lie, if they do."""
    if params is None:
        return ids
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = getattr(next(iter(jax.tree.leaves(params)), None), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.is_fully_addressable:
        return ids
    axes = [name for name in ("data", "fsdp") if sharding.mesh.shape.get(name, 1) > 1]
    parts = int(np.prod([sharding.mesh.shape[name] for name in axes]))
    if not axes or len(ids) % parts:
        return ids
    return jax.device_put(ids, NamedSharding(sharding.mesh, PartitionSpec(tuple(axes))))
