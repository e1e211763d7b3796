"""How Whisper writes: language and task in the prompt, timestamps, sound of any length by windows.

The rules are PyTorch's. Sound of up to thirty seconds is one call of ``generate``; a longer one is
read window by window, the next of which begins at the last timestamp that closed a segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError, did_you_mean
from hfseq.generation.generate import Programs
from hfseq.nn.outputs import FlaxModelOutput

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from hfseq.modeling import FlaxSeq2SeqPreTrainedModel

    _Model = FlaxSeq2SeqPreTrainedModel
else:
    _Model = object  # a mixin: the model class stands beside it

#: Frames of a spectrogram for each place of the encoder, and seconds that a timestamp counts.
ENCODER_STRIDE, TIME_PRECISION = 2, 0.02


@dataclasses.dataclass
class FlaxWhisperOutput(FlaxModelOutput):
    """What was said in sounds of any length.

    ``sequences`` (rows, length) are the tokens of all windows, without prompts and ends, filled up
    with ``pad_token_id``; ``segments`` are dicts for each row: ``start`` and ``end`` in seconds,
    and ``tokens``.
    """

    sequences: np.ndarray | None = None
    segments: list[list[dict[str, Any]]] | None = None


class WhisperGeneration(_Model):
    """``generate`` of Whisper, and what it is made of."""

    def generate(  # type: ignore[override]
        self,
        input_features: Any = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Any = None,
        return_timestamps: bool | None = None,
        task: str | None = None,
        language: str | Sequence[str] | None = None,
        is_multilingual: bool | None = None,
        *,
        prompt_ids: Sequence[int] | None = None,
        condition_on_prev_tokens: bool | None = None,
        return_segments: bool = False,
        attention_mask: Any = None,
        monitor_progress: Callable[[np.ndarray], None] | None = None,
        params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write down what is said in ``input_features`` (batch, mels, frames).

        ``language`` ("de", "german", "<|de|>", or one for each row) is heard where a multilingual
        model is not told; ``task`` is "transcribe" or "translate"; ``return_timestamps`` writes
        when it was said. Their tokens are those of ``generation_config``, which is never changed.
        Of an ``input_features`` with the method ``window`` no more than that is asked for
        (:class:`hfseq.data.audio.Spectrograms`). ``prompt_ids`` are text that came before. Other
        options are those of ``generate`` of any model, whose output is returned: ``sequences``
        begin with the prompt.

        Longer sound than 30 seconds, or ``return_segments=True``, is read by windows, which needs
        timestamps, and :class:`FlaxWhisperOutput` is returned. ``attention_mask`` (batch, frames)
        then says how long each row is; ``condition_on_prev_tokens`` shows each window the text
        before it; ``monitor_progress`` is called before each window with (batch, 2): frames read
        and frames in all.

        **Raises:** UsageError for a language, a task or timestamps that the model does not have.
        """
        if input_features is None:
            input_features = kwargs.pop("input_ids", None)
        outputs = kwargs.get("encoder_outputs")
        if input_features is None and outputs is None:
            raise UsageError("generate: Whisper needs input_features (or encoder_outputs)")
        known = _Known(self, generation_config, kwargs)
        window = ENCODER_STRIDE * self.config.max_source_positions
        frames = window
        if input_features is not None:
            lazy = hasattr(input_features, "window")
            if not lazy and not isinstance(input_features, jax.Array):
                input_features = np.asarray(input_features, np.float32)
            if input_features.ndim != 3:
                raise UsageError(
                    f"generate: input_features have shape {tuple(input_features.shape)}; Whisper "
                    "takes (batch, mels, frames): one sound is a batch of one, features[None]"
                )
            frames = input_features.shape[2]
            return_segments |= lazy
        many = return_segments or frames > window
        if return_timestamps is None:
            return_timestamps = True if many else bool(known("return_timestamps"))
        if many and not return_timestamps:
            raise UsageError(
                f"generate: return_timestamps=False, but {frames} frames are read by windows of "
                f"{window}, which end where timestamps say: pass return_timestamps=True"
            )
        if return_timestamps and known("no_timestamps_token_id") is None:
            raise UsageError(
                "generate: return_timestamps=True needs no_timestamps_token_id in the "
                "generation_config, as Whisper's checkpoints have it"
            )
        if input_features is not None and frames < window and not many:
            xp: Any = jnp if isinstance(input_features, jax.Array) else np
            input_features = xp.pad(input_features, ((0, 0), (0, 0), (0, window - frames)))
        rows = (input_features if outputs is None else outputs[0]).shape[0]
        _refuse_unknown(known, task, language, is_multilingual)

        def hear() -> jax.Array:
            first = None if outputs is not None else input_features
            if many and first is not None:
                first = _cut(first, [(row, 0, window) for row in range(rows)], window)
            return self.detect_language(first, outputs, params=params)

        starts: Any = kwargs.get("decoder_input_ids")
        if starts is None:
            starts = _starts(known, rows, task, language, return_timestamps, hear)
        options = {**kwargs, "forced_decoder_ids": (), "params": params}
        if return_timestamps:
            end = known("eos_token_id")
            options["timestamp_rules"] = (
                known("no_timestamps_token_id"),
                end[0] if isinstance(end, list) else end,
                known("max_initial_timestamp_index"),
            )

        def write(features: Any, prompt: Any, **more: Any) -> Any:
            given = {**options, "decoder_input_ids": prompt, **more}
            return super(WhisperGeneration, self).generate(
                features, generation_config, logits_processor=logits_processor, **given
            )

        shown = None if prompt_ids is None else np.asarray(prompt_ids, np.int32)
        if not many:
            if shown is not None:
                before = jnp.broadcast_to(shown, (rows, len(shown)))
                starts = jnp.concatenate([before, starts], axis=1)
                starts = starts if isinstance(starts, jax.core.Tracer) else np.asarray(starts)
            return write(input_features, starts)
        if condition_on_prev_tokens is None:
            condition_on_prev_tokens = bool(known("condition_on_prev_tokens"))
        ends = np.full(rows, frames)
        if hasattr(input_features, "ends"):
            ends = input_features.ends
        elif attention_mask is not None:
            ends = np.asarray(attention_mask).sum(-1)
        elif rows > 1 and frames > window:
            raise UsageError(
                "generate: several sounds of different lengths need attention_mask: the feature "
                "extractor returns it with return_attention_mask=True"
            )
        reader = _Reader(self, known, np.asarray(starts), shown, condition_on_prev_tokens, write)
        return reader.read(input_features, ends, monitor_progress)

    def detect_language(
        self,
        input_features: Any = None,
        encoder_outputs: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Return the token of the language that each row begins with, (batch,).

        ``input_features`` are those of a window, or ``encoder_outputs`` what the encoder made.
        """
        known = _Known(self, None, {})
        languages = sorted(known("lang_to_id").values())
        start = known("decoder_start_token_id")

        def choose(params: Any, features: Any, outputs: Any) -> jax.Array:
            if outputs is None:
                outputs = self.encode(features, params=params)
            ids = jnp.full((outputs[0].shape[0], 1), start, jnp.int32)
            logits = self.decode(ids, outputs, params=params).logits[:, -1]
            tokens = jnp.asarray(languages, jnp.int32)
            return tokens[jnp.argmax(logits[:, tokens], axis=-1)]

        programs = vars(self).setdefault("_generation_programs", Programs())
        key = "language", start, tuple(languages), self._options
        program = programs.setdefault(key, jax.jit(choose))
        return program(params or self.params, input_features, encoder_outputs)


class _Known:
    """The options of a call: a keyword, the configuration that was passed, or the model's own."""

    def __init__(self, model: Any, given: Any, kwargs: Mapping[str, Any]):
        self.kwargs, self.places = kwargs, (given, model.generation_config, model.config)

    def __call__(self, name: str) -> Any:
        """Return the first value that is not None."""
        values = (getattr(place, name, None) for place in self.places if place is not None)
        found = (self.kwargs.get(name), *values)
        return next((value for value in found if value is not None), None)


def _refuse_unknown(
    known: _Known, task: str | None, language: str | Sequence[str] | None, multilingual: bool | None
) -> None:
    """Refuse a language and a task that the model cannot be told."""
    multilingual = known("is_multilingual") if multilingual is None else multilingual
    if multilingual is False and (task is not None or language is not None):
        raise UsageError(
            "generate: task and language are for multilingual models, and this one knows English "
            "alone: leave them out, or pass is_multilingual=True"
        )
    tables = {"lang_to_id": language, "task_to_id": task}
    if absent := [name for name, value in tables.items() if value and not known(name)]:
        raise UsageError(
            f"generate: the generation_config has no {' and no '.join(absent)}, which names the "
            "tokens of languages and tasks: take that of the checkpoint"
        )


def _starts(
    known: _Known,
    rows: int,
    task: str | None,
    language: str | Sequence[str] | None,
    timestamps: bool,
    hear: Callable[[], jax.Array],
) -> Any:
    """Return what each row begins with, (rows, length): start, language, task, no timestamps.

    ``hear`` tells the languages of all rows, for which nobody asks where they are known.
    """
    start, silent = known("decoder_start_token_id"), known("no_timestamps_token_id")
    if start is None:
        raise UsageError("generate: Whisper needs decoder_start_token_id: pass it")
    task = known("task") if task is None else task
    language = known("language") if language is None else language
    forced: list[int | None] = []
    if task is None and language is None:  # how old checkpoints say it
        places = known("forced_decoder_ids") or []
        if [place for place, _ in places] != list(range(1, len(places) + 1)):
            raise UsageError(f"generate: forced_decoder_ids={places} have to number 1, 2, ...")
        forced = [token for _, token in places]
    spoken: Any = [token for token in forced[:1] if token is not None]
    if language is not None:
        names = [language] if isinstance(language, str) else list(language)
        spoken = [_language_token(name, known("lang_to_id")) for name in names]
        if len(spoken) not in (1, rows):
            raise UsageError(
                f"generate: {len(spoken)} languages for {rows} rows: pass one, or one a row"
            )
    elif not spoken and known("lang_to_id"):
        spoken = hear()
    tasks = known("task_to_id") or {}
    if task is not None and task not in tasks:
        raise UsageError(
            f"generate: no task '{task}'{did_you_mean(task, tasks)} (known: {', '.join(tasks)})"
        )
    tail = [token for token in forced[1:] if token is not None]
    if task is not None or (language is not None and tasks):
        tail.append(tasks[task or "transcribe"])
    if timestamps and tail[-1:] == [silent]:
        tail.pop()
    elif not timestamps and silent is not None and tail[-1:] != [silent]:
        tail.append(silent)
    first = [np.asarray(start)] if len(spoken) == 0 else [np.asarray(start), spoken]
    columns = [*first, *(np.asarray(token) for token in tail)]
    xp: Any = jnp if isinstance(spoken, jax.core.Tracer) else np
    columns = [xp.broadcast_to(xp.asarray(column, np.int32), (rows,)) for column in columns]
    return xp.stack(columns, axis=1)


def _language_token(name: str, tokens: Mapping[str, int]) -> int:
    """Return the token of a language: by its token, its code, or its English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    if not isinstance(name, str):
        raise UsageError(f"generate: language has to be text, or a list of texts, not {name!r}")
    word = name.lower()
    token = word if word in tokens else f"<|{TO_LANGUAGE_CODE.get(word, word)}|>"
    if token not in tokens:
        codes = [known.strip("<|>") for known in tokens]
        full = [word for word, code in TO_LANGUAGE_CODE.items() if code in codes]
        raise UsageError(
            f"generate: the model knows no language '{name}'{did_you_mean(word, [*codes, *full])} "
            f"(known: {', '.join(codes)})"
        )
    return tokens[token]


class _Reader:
    """Reads sound by windows; each row has its own place."""

    def __init__(
        self,
        model: Any,
        known: _Known,
        starts: np.ndarray,
        shown: np.ndarray | None,
        conditioned: bool,
        write: Callable[..., Any],
    ):
        self.starts, self.shown, self.conditioned, self.write = starts, shown, conditioned, write
        self.window = ENCODER_STRIDE * model.config.max_source_positions
        self.positions: int = model.config.max_target_positions
        self.stamp: int = known("no_timestamps_token_id") + 1
        end = known("eos_token_id")
        self.ends = set(end) if isinstance(end, list) else {end}
        self.pad = next(iter(self.ends)) if known("pad_token_id") is None else known("pad_token_id")
        self.more = known("max_new_tokens")
        self.longest = known("max_length")
        hidden = known("suppress_tokens") or ()
        self.previous = known("prev_sot_token_id")
        if self.previous is None and len(hidden) >= 2:
            self.previous = hidden[-2]

    def read(
        self,
        features: Any,
        ends: np.ndarray,
        monitor: Callable[[np.ndarray], None] | None = None,
    ) -> FlaxWhisperOutput:
        """Read all rows of ``features`` up to their ``ends``."""
        rows = len(ends)
        found: list[list[dict[str, Any]]] = [[] for _ in range(rows)]
        seek = np.zeros(rows, int)
        while (active := np.flatnonzero(seek < ends)).size:
            if monitor is not None:
                monitor(np.stack([seek, ends], axis=1))
            # As many rows as a power of two, so that few programs are compiled.
            filled = min(1 << (len(active) - 1).bit_length(), rows)
            active = np.pad(active, (0, filled - len(active)), mode="edge")
            lengths = np.minimum(ends[active] - seek[active], self.window)
            places = zip(active, seek[active], lengths, strict=True)
            heard = _cut(features, list(places), self.window)
            prompt, mask = self.prompt([found[row] for row in active], active)
            more = {} if mask is None else {"decoder_attention_mask": mask}
            output = self.write(heard, prompt, **self.lengths(prompt.shape[1]), **more)
            tokens = np.asarray(output.sequences)[:, prompt.shape[1] :]
            for row, place in {row: place for place, row in enumerate(active)}.items():
                segments, offset = self.cut(
                    self.bare(tokens[place]),
                    float(seek[row]) * TIME_PRECISION / ENCODER_STRIDE,
                    int(lengths[place]),
                )
                found[row] += segments
                seek[row] += offset
        if monitor is not None:
            monitor(np.stack([seek, ends], axis=1))
        parts = [np.concatenate([np.zeros(0, np.int32), *_tokens(row)]) for row in found]
        width = max(map(len, parts))
        sequences = np.full((rows, width), self.pad, np.int32)
        for row, part in enumerate(parts):
            sequences[row, : len(part)] = part
        return FlaxWhisperOutput(sequences, found)

    def bare(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a row before its end."""
        ended = np.flatnonzero(np.isin(tokens, [*self.ends]))
        return tokens[: ended[0]] if ended.size else tokens

    def lengths(self, prompt: int) -> dict[str, int]:
        """Return how long a window's text may become: as long as there are positions, mostly."""
        if self.more is not None:
            if prompt + self.more > self.positions:
                raise UsageError(
                    f"generate: max_new_tokens={self.more} after the {prompt} tokens of a prompt "
                    f"are more than the model's {self.positions} positions: ask for fewer"
                )
            return {"max_new_tokens": self.more}
        shown = min(self.positions // 2 - 1, prompt)
        longest = self.positions if self.longest is None else self.longest + shown
        return {"max_length": min(longest, self.positions)}

    def prompt(
        self, before: Sequence[Sequence[dict[str, Any]]], active: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return what the active rows begin with, and which of it is no padding."""
        starts = self.starts[active]
        if not self.conditioned:
            if self.shown is None:
                return starts, None
            shown = np.broadcast_to(self.shown, (len(active), len(self.shown)))
            return np.concatenate([shown, starts], axis=1), None
        first: list[np.ndarray] = []
        if self.shown is not None:  # a text that came before the first window
            first = [self.shown[1:] if self.shown[0] == self.previous else self.shown]
        if not first and not before[0]:
            return starts, None
        begin = [] if self.previous is None else [np.asarray([self.previous], np.int32)]
        texts = []
        for segments in before:
            # Of the two timestamps that close a window's last segment the second opens the next.
            parts = [
                part[:-1] if len(part) > 2 and part[-2] >= self.stamp else part
                for part in _tokens(segments)
            ]
            text = np.concatenate([np.zeros(0, np.int32), *first, *parts])
            texts.append(np.concatenate([*begin, text[-(self.positions // 2 - 1) :]]))
        width = max(map(len, texts))
        padded = np.full((len(texts), width), self.pad, np.int32)
        for row, text in enumerate(texts):
            padded[row, width - len(text) :] = text
        prompt = np.concatenate([padded, starts], axis=1)
        return prompt, (prompt != self.pad).astype(np.int32)

    def cut(self, tokens: np.ndarray, time: float, frames: int) -> tuple[list[dict[str, Any]], int]:
        """Cut a window's tokens into segments; return them and how many frames are done.

        ``time`` is when the window begins, ``frames`` how long it is.
        """
        stamps = tokens >= self.stamp
        # Two timestamps in a row end a segment and begin another; one at the end says that nothing
        # comes after it, and without any all of it is one segment.
        pairs = np.flatnonzero(stamps[:-1] & stamps[1:]) + 1
        if not pairs.size:
            until = frames / ENCODER_STRIDE
            if stamps.any() and tokens[np.flatnonzero(stamps)[-1]] != self.stamp:
                until = int(tokens[np.flatnonzero(stamps)[-1]]) - self.stamp
            else:
                until = int(until)
            segment = {"start": time, "end": time + until * TIME_PRECISION, "tokens": tokens}
            return [segment], frames
        alone = stamps[-2:].tolist() == [False, True]
        borders = [*pairs.tolist(), len(tokens)] if alone else pairs.tolist()
        if not alone:
            borders[-1] += 1  # the pair stays together, so that it can be seen
        segments, last = [], 0
        for border in borders:
            part = tokens[last:border]
            closing = part[-2 if border == borders[-1] and not alone else -1]
            begin, end = (int(token) - self.stamp for token in (part[0], closing))
            segments.append(
                {
                    "start": time + begin * TIME_PRECISION,
                    "end": time + end * TIME_PRECISION,
                    "tokens": part,
                }
            )
            last = border
        done = frames if alone else (int(tokens[last - 2]) - self.stamp) * ENCODER_STRIDE
        return segments, done


def _cut(features: Any, places: Sequence[tuple[int, int, int]], window: int) -> np.ndarray:
    """Cut windows out of spectrograms, (row, start, frames) each, and fill them up with zeros."""
    heard = np.zeros((len(places), features.shape[1], window), np.float32)
    for place, (row, start, frames) in enumerate(places):
        if hasattr(features, "window"):
            cut = features.window(int(row), int(start), int(frames))
        else:
            cut = np.asarray(features[row, :, start : start + frames])
        heard[place, :, : cut.shape[1]] = cut
    return heard


def _tokens(segments: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
    return [np.asarray(segment["tokens"], np.int32) for segment in segments]
