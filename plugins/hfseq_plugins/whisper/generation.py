"""Generation with Whisper: prompts with language and task, timestamps, and long audio.

The rules are those of PyTorch's Whisper in Transformers. Audio of up to 30 seconds takes one call
of the generic `generate`. Longer audio is transcribed window by window. Each window starts at the
last timestamp that closes a segment of the window before it.
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
    _Model = object  # a mixin: subclasses also derive from a model class

#: Spectrogram frames per position of the encoder's output, and seconds per timestamp token.
ENCODER_STRIDE, TIME_PRECISION = 2, 0.02

Segment = dict[str, Any]


@dataclasses.dataclass
class FlaxWhisperOutput(FlaxModelOutput):
    """The transcription of audio of any length.

    Attributes:
        sequences: Tokens of all windows without prompts and EOS, `(batch, length)`, padded with
            `pad_token_id`.
        segments: The segments of each row. A segment is a dict with `start` and `end` in seconds
            and `tokens`.
    """

    sequences: np.ndarray | None = None
    segments: list[list[Segment]] | None = None


class WhisperGeneration(_Model):
    """Mixin with the `generate` method of Whisper."""

    def generate(  # type: ignore[override]  # Whisper's arguments, as in Transformers
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
        """Transcribes or translates speech.

        Audio of more than 30 seconds is processed window by window, which requires timestamps.
        The same happens with `return_segments=True` and with lazy features.

        Args:
            input_features: Spectrograms, `(batch, mels, frames)`: an array, or an object with a
                `window` method (:class:`hfseq.data.audio.Spectrograms`) that computes one window
                at a time.
            generation_config: Generation options. It is never modified. Default: the model's.
            logits_processor: Additional logits processors.
            return_timestamps: Whether to predict timestamps. Default: `True` for windows, and the
                value in `generation_config` otherwise.
            task: `"transcribe"` or `"translate"`.
            language: The language of the speech as a code, an English name or a token (`"de"`,
                `"german"`, `"<|de|>"`), or a list with one language per row. By default a
                multilingual model detects it.
            is_multilingual: Overrides the value in `generation_config`.
            prompt_ids: Tokens of the text that precedes the audio.
            condition_on_prev_tokens: Whether each window is conditioned on the text before it.
            return_segments: Whether to return segments also for short audio.
            attention_mask: `(batch, frames)`, 1 for the frames of each row and 0 for its padding.
                Only used for windows.
            monitor_progress: Called before each window, and once at the end, with an array
                `(batch, 2)`: the processed frames and all frames of each row.
            params: Parameters to use instead of the model's.
            **kwargs: Other options of `generate`.

        Returns:
            A :class:`FlaxWhisperOutput` for windows. Otherwise the output of the generic
            `generate`, whose `sequences` begin with the prompt.

        Raises:
            UsageError: The model lacks the language, the task or timestamps, or the inputs have
                the wrong shape.
        """
        if input_features is None:
            input_features = kwargs.pop("input_ids", None)
        encoder_outputs = kwargs.get("encoder_outputs")
        if input_features is None and encoder_outputs is None:
            raise UsageError("generate: Whisper needs input_features (or encoder_outputs)")
        options = _Options(self, generation_config, kwargs)

        window = ENCODER_STRIDE * self.config.max_source_positions
        frames = window
        if input_features is not None:
            input_features = _checked_features(input_features)
            frames = input_features.shape[2]
            return_segments |= hasattr(input_features, "window")
        windowed = return_segments or frames > window
        if return_timestamps is None:
            return_timestamps = True if windowed else bool(options("return_timestamps"))
        _check_timestamps(options, return_timestamps, windowed, frames, window)
        if input_features is not None and not windowed:
            input_features = _pad_frames(input_features, window)
        rows = (input_features if encoder_outputs is None else encoder_outputs[0]).shape[0]
        _check_language_and_task(options, task, language, is_multilingual)

        def detect_languages() -> jax.Array:
            features = None if encoder_outputs is not None else input_features
            if windowed and features is not None:
                first_windows = [(row, 0, window) for row in range(rows)]
                features = _cut_windows(features, first_windows, window)
            return self.detect_language(features, encoder_outputs, params=params)

        prompt: Any = kwargs.get("decoder_input_ids")
        if prompt is None:
            prompt = _decoder_prompt(
                options, rows, task, language, return_timestamps, detect_languages
            )
        call_options = {**kwargs, "forced_decoder_ids": (), "params": params}
        if return_timestamps:
            call_options["timestamp_rules"] = _timestamp_rules(options)

        def generate_text(features: Any, prompt: Any, **overrides: Any) -> Any:
            return super(WhisperGeneration, self).generate(
                features,
                generation_config,
                logits_processor=logits_processor,
                **{**call_options, "decoder_input_ids": prompt, **overrides},
            )

        prefix = None if prompt_ids is None else np.asarray(prompt_ids, np.int32)
        if not windowed:
            if prefix is not None:
                prompt = _prepend(prefix, prompt, rows)
            return generate_text(input_features, prompt)
        if condition_on_prev_tokens is None:
            condition_on_prev_tokens = bool(options("condition_on_prev_tokens"))
        ends = _row_ends(input_features, attention_mask, rows, frames, window)
        transcriber = _WindowTranscriber(
            self, options, np.asarray(prompt), prefix, condition_on_prev_tokens, generate_text
        )
        return transcriber.transcribe(input_features, ends, monitor_progress)

    def detect_language(
        self,
        input_features: Any = None,
        encoder_outputs: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Predicts the language of each row.

        Args:
            input_features: Spectrograms of one window, `(batch, mels, frames)`.
            encoder_outputs: The encoder's output, as an alternative to `input_features`.
            params: Parameters to use instead of the model's.

        Returns:
            The language tokens, `(batch,)`.
        """
        options = _Options(self, None, {})
        language_tokens = sorted(options("lang_to_id").values())
        start = options("decoder_start_token_id")

        def choose(params: Any, features: Any, outputs: Any) -> jax.Array:
            if outputs is None:
                outputs = self.encode(features, params=params)
            ids = jnp.full((outputs[0].shape[0], 1), start, jnp.int32)
            logits = self.decode(ids, outputs, params=params).logits[:, -1]
            tokens = jnp.asarray(language_tokens, jnp.int32)
            return tokens[jnp.argmax(logits[:, tokens], axis=-1)]

        programs = vars(self).setdefault("_generation_programs", Programs())
        key = "language", start, tuple(language_tokens), self._options
        program = programs.setdefault(key, jax.jit(choose))
        return program(self.params if params is None else params, input_features, encoder_outputs)


class _Options:
    """Looks up options: in the keywords, the passed generation config, the model's, its config."""

    def __init__(self, model: Any, generation_config: Any, kwargs: Mapping[str, Any]):
        self.kwargs = kwargs
        self.configs = (generation_config, model.generation_config, model.config)

    def __call__(self, name: str) -> Any:
        """Returns the first value that is not None."""
        values = (getattr(config, name, None) for config in self.configs if config is not None)
        candidates = (self.kwargs.get(name), *values)
        return next((value for value in candidates if value is not None), None)


# -- inputs
# ----------------------------------------------------------------------------------------


def _checked_features(features: Any) -> Any:
    """Returns spectrograms as an array (lazy ones as they are) after a check of their rank."""
    if not hasattr(features, "window") and not isinstance(features, jax.Array):
        features = np.asarray(features, np.float32)
    if features.ndim != 3:
        raise UsageError(
            f"generate: input_features have shape {tuple(features.shape)}, but Whisper expects "
            "(batch, mels, frames). Pass a single audio as a batch of one: features[None]"
        )
    return features


def _pad_frames(features: Any, window: int) -> Any:
    """Pads `(batch, mels, frames)` with zeros to `window` frames."""
    frames = features.shape[2]
    if frames >= window:
        return features
    xp: Any = jnp if isinstance(features, jax.Array) else np
    return xp.pad(features, ((0, 0), (0, 0), (0, window - frames)))


def _row_ends(
    features: Any, attention_mask: Any, rows: int, frames: int, window: int
) -> np.ndarray:
    """Returns the number of frames of each row, `(batch,)`."""
    if hasattr(features, "ends"):
        return features.ends
    if attention_mask is not None:
        return np.asarray(attention_mask).sum(-1)
    if rows > 1 and frames > window:
        raise UsageError(
            f"generate: {rows} rows of more than 30 seconds need attention_mask, which gives their "
            "lengths. The feature extractor returns it with return_attention_mask=True"
        )
    return np.full(rows, frames)


def _check_timestamps(
    options: _Options, return_timestamps: bool, windowed: bool, frames: int, window: int
) -> None:
    if windowed and not return_timestamps:
        raise UsageError(
            f"generate: return_timestamps=False is not possible for {frames} frames: they are "
            f"processed in windows of {window} frames, which end at timestamps. Pass "
            "return_timestamps=True"
        )
    if return_timestamps and options("no_timestamps_token_id") is None:
        raise UsageError(
            "generate: return_timestamps=True needs no_timestamps_token_id in the "
            "generation_config, as in Whisper's checkpoints"
        )


def _timestamp_rules(options: _Options) -> tuple[int, int, int | None]:
    eos = options("eos_token_id")
    return (
        options("no_timestamps_token_id"),
        eos[0] if isinstance(eos, list) else eos,
        options("max_initial_timestamp_index"),
    )


# -- the prompt
# ----------------------------------------------------------------------------------------


def _check_language_and_task(
    options: _Options,
    task: str | None,
    language: str | Sequence[str] | None,
    multilingual: bool | None,
) -> None:
    """Raises UsageError if the model has no tokens for languages or tasks."""
    multilingual = options("is_multilingual") if multilingual is None else multilingual
    if multilingual is False and (task is not None or language is not None):
        raise UsageError(
            "generate: task and language are options of multilingual models, but this model "
            "supports English only. Remove them, or pass is_multilingual=True"
        )
    requested = {"lang_to_id": language, "task_to_id": task}
    if missing := [name for name, value in requested.items() if value and not options(name)]:
        raise UsageError(
            f"generate: the generation_config has no {' and no '.join(missing)}, the tokens of "
            "languages and tasks. Use the generation_config of the checkpoint"
        )


def _decoder_prompt(
    options: _Options,
    rows: int,
    task: str | None,
    language: str | Sequence[str] | None,
    timestamps: bool,
    detect_languages: Callable[[], jax.Array],
) -> Any:
    """Returns the first tokens of each row: start, language, task, "no timestamps".

    Args:
        options: The options of the call.
        rows: The batch size.
        task: The requested task, if any.
        language: The requested language or languages, if any.
        timestamps: Whether timestamps are predicted.
        detect_languages: Predicts the language tokens of all rows. It is only called if neither
            the arguments nor `options` name a language.

    Returns:
        int32 tokens, `(batch, length)`: a JAX array while tracing, otherwise a NumPy array.
    """
    start, no_timestamps = options("decoder_start_token_id"), options("no_timestamps_token_id")
    if start is None:
        raise UsageError("generate: Whisper needs decoder_start_token_id: pass it")
    task = options("task") if task is None else task
    language = options("language") if language is None else language
    forced: list[int | None] = []
    if task is None and language is None:
        forced = _forced_tokens(options)

    languages: Any = [token for token in forced[:1] if token is not None]
    if language is not None:
        names = [language] if isinstance(language, str) else list(language)
        languages = [_language_token(name, options("lang_to_id")) for name in names]
        if len(languages) not in (1, rows):
            raise UsageError(
                f"generate: {len(languages)} languages for {rows} rows. Pass one language, or one "
                "per row"
            )
    elif not languages and options("lang_to_id"):
        languages = detect_languages()

    tasks = options("task_to_id") or {}
    if task is not None and task not in tasks:
        raise UsageError(
            f"generate: no task '{task}'{did_you_mean(task, tasks)} (known: {', '.join(tasks)})"
        )
    suffix = [token for token in forced[1:] if token is not None]
    if task is not None or (language is not None and tasks):
        suffix.append(tasks[task or "transcribe"])
    if timestamps and suffix[-1:] == [no_timestamps]:
        suffix.pop()
    elif not timestamps and no_timestamps is not None and suffix[-1:] != [no_timestamps]:
        suffix.append(no_timestamps)

    prefix = [np.asarray(start)] if len(languages) == 0 else [np.asarray(start), languages]
    columns = [*prefix, *(np.asarray(token) for token in suffix)]
    xp: Any = jnp if isinstance(languages, jax.core.Tracer) else np
    columns = [xp.broadcast_to(xp.asarray(column, np.int32), (rows,)) for column in columns]
    return xp.stack(columns, axis=1)


def _forced_tokens(options: _Options) -> list[int | None]:
    """Returns the prompt after the start token that old checkpoints have as forced_decoder_ids."""
    pairs = options("forced_decoder_ids") or []
    if [position for position, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise UsageError(
            f"generate: the positions in forced_decoder_ids={pairs} must be 1, 2, ... without gaps"
        )
    return [token for _, token in pairs]


def _language_token(name: str, tokens: Mapping[str, int]) -> int:
    """Returns the token of a language, given as a token, a code, or an English name."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    if not isinstance(name, str):
        raise UsageError(
            f"generate: language has to be a string or a list of strings, not {name!r}"
        )
    word = name.lower()
    token = word if word in tokens else f"<|{TO_LANGUAGE_CODE.get(word, word)}|>"
    if token not in tokens:
        codes = [language_token.strip("<|>") for language_token in tokens]
        names = [word for word, code in TO_LANGUAGE_CODE.items() if code in codes]
        raise UsageError(
            f"generate: the model has no language '{name}'{did_you_mean(word, [*codes, *names])} "
            f"(known: {', '.join(codes)})"
        )
    return tokens[token]


def _prepend(prefix: np.ndarray, prompt: Any, rows: int) -> Any:
    """Returns `(batch, length)`: the tokens `prefix` and then the prompt of each row."""
    xp: Any = jnp if isinstance(prompt, jax.Array) else np
    prompt = xp.concatenate([xp.broadcast_to(prefix, (rows, len(prefix))), prompt], axis=1)
    return prompt if isinstance(prompt, jax.core.Tracer) else np.asarray(prompt)


# -- long audio
# ----------------------------------------------------------------------------------------


class _WindowTranscriber:
    """Transcribes audio window by window. Each row advances at its own pace."""

    def __init__(
        self,
        model: Any,
        options: _Options,
        prompts: np.ndarray,
        prefix: np.ndarray | None,
        conditioned: bool,
        generate_text: Callable[..., Any],
    ):
        self.prompts, self.prefix, self.conditioned = prompts, prefix, conditioned
        self.generate_text = generate_text
        self.window = ENCODER_STRIDE * model.config.max_source_positions
        self.max_positions: int = model.config.max_target_positions
        self.first_timestamp: int = options("no_timestamps_token_id") + 1
        eos = options("eos_token_id")
        self.eos_tokens = set(eos) if isinstance(eos, list) else {eos}
        pad = options("pad_token_id")
        self.pad = next(iter(self.eos_tokens)) if pad is None else pad
        self.max_new_tokens = options("max_new_tokens")
        self.max_length = options("max_length")
        suppressed: Sequence[int] = options("suppress_tokens") or ()
        self.previous_text_token = options("prev_sot_token_id")
        if self.previous_text_token is None and len(suppressed) >= 2:
            self.previous_text_token = suppressed[-2]

    def transcribe(
        self,
        features: Any,
        ends: np.ndarray,
        monitor: Callable[[np.ndarray], None] | None = None,
    ) -> FlaxWhisperOutput:
        """Transcribes all rows of `features` up to their `ends` in frames, `(batch,)`."""
        rows = len(ends)
        segments: list[list[Segment]] = [[] for _ in range(rows)]
        seek = np.zeros(rows, int)
        while (active := np.flatnonzero(seek < ends)).size:
            if monitor is not None:
                monitor(np.stack([seek, ends], axis=1))
            # Batch sizes are powers of two, so that few programs are compiled.
            batch_size = min(1 << (len(active) - 1).bit_length(), rows)
            active = np.pad(active, (0, batch_size - len(active)), mode="edge")
            lengths = np.minimum(ends[active] - seek[active], self.window)
            windows = [
                (int(row), int(start), int(length))
                for row, start, length in zip(active, seek[active], lengths, strict=True)
            ]
            prompt, mask = self.window_prompt([segments[row] for row in active], active)
            masks = {} if mask is None else {"decoder_attention_mask": mask}
            output = self.generate_text(
                _cut_windows(features, windows, self.window),
                prompt,
                **self.length_options(prompt.shape[1]),
                **masks,
            )
            tokens = np.asarray(output.sequences)[:, prompt.shape[1] :]
            # Padding repeats the last active row: its last copy counts.
            for row, index in {row: index for index, row in enumerate(active.tolist())}.items():
                new_segments, frames = self.split_segments(
                    self.before_eos(tokens[index]),
                    float(seek[row]) * TIME_PRECISION / ENCODER_STRIDE,
                    int(lengths[index]),
                )
                segments[row] += new_segments
                seek[row] += frames
        if monitor is not None:
            monitor(np.stack([seek, ends], axis=1))
        texts = [np.concatenate([np.zeros(0, np.int32), *_tokens(row)]) for row in segments]
        sequences = np.full((rows, max(map(len, texts))), self.pad, np.int32)
        for row, text in enumerate(texts):
            sequences[row, : len(text)] = text
        return FlaxWhisperOutput(sequences, segments)

    def before_eos(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of a row before its EOS."""
        ends = np.flatnonzero(np.isin(tokens, [*self.eos_tokens]))
        return tokens[: ends[0]] if ends.size else tokens

    def length_options(self, prompt_length: int) -> dict[str, int]:
        """Returns the length limit of a window: max_new_tokens, or by default max_length."""
        if self.max_new_tokens is not None:
            if prompt_length + self.max_new_tokens > self.max_positions:
                raise UsageError(
                    f"generate: max_new_tokens={self.max_new_tokens} after the {prompt_length} "
                    f"tokens of a prompt exceeds the model's {self.max_positions} positions. Use "
                    "fewer new tokens or a shorter prompt"
                )
            return {"max_new_tokens": self.max_new_tokens}
        if self.max_length is None:
            return {"max_length": self.max_positions}
        allowance = min(self.max_positions // 2 - 1, prompt_length)
        return {"max_length": min(self.max_length + allowance, self.max_positions)}

    def window_prompt(
        self, previous_segments: Sequence[Sequence[Segment]], active: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Builds the prompts of the active rows.

        Args:
            previous_segments: The segments of each active row so far.
            active: The numbers of the active rows.

        Returns:
            Tokens, `(batch, length)`, and a mask that is 0 for padding, or None without padding.
        """
        prompts = self.prompts[active]
        if not self.conditioned:
            if self.prefix is None:
                return prompts, None
            return _prepend(self.prefix, prompts, len(active)), None
        first_text: list[np.ndarray] = []
        if self.prefix is not None:  # the text before the first window
            starts = self.prefix[0] == self.previous_text_token
            first_text = [self.prefix[1:] if starts else self.prefix]
        if not first_text and not previous_segments[0]:
            return prompts, None
        previous = self.previous_text_token
        start = [] if previous is None else [np.asarray([previous], np.int32)]
        texts = []
        for segments in previous_segments:
            # Two timestamps close a window's last segment. The second one opens the next segment.
            parts = [
                part[:-1] if len(part) > 2 and part[-2] >= self.first_timestamp else part
                for part in _tokens(segments)
            ]
            text = np.concatenate([np.zeros(0, np.int32), *first_text, *parts])
            texts.append(np.concatenate([*start, text[-(self.max_positions // 2 - 1) :]]))
        width = max(map(len, texts))
        padded = np.full((len(texts), width), self.pad, np.int32)
        for row, text in enumerate(texts):
            padded[row, width - len(text) :] = text
        prompt = np.concatenate([padded, prompts], axis=1)
        return prompt, (prompt != self.pad).astype(np.int32)

    def split_segments(
        self, tokens: np.ndarray, time: float, frames: int
    ) -> tuple[list[Segment], int]:
        """Splits a window's tokens into segments.

        Args:
            tokens: The tokens of the window, `(length,)`.
            time: The start of the window in seconds.
            frames: The length of the window in frames.

        Returns:
            The segments, and the number of frames until the start of the next window.
        """
        is_timestamp = tokens >= self.first_timestamp
        # A pair of timestamps ends one segment and starts the next. A single timestamp at the end
        # means that no speech follows it. Tokens without a pair are one segment.
        pairs = np.flatnonzero(is_timestamp[:-1] & is_timestamp[1:]) + 1
        if not pairs.size:
            positions = int(frames / ENCODER_STRIDE)
            if is_timestamp.any():
                last = tokens[np.flatnonzero(is_timestamp)[-1]]
                if last != self.first_timestamp:
                    positions = int(last) - self.first_timestamp
            end_time = time + positions * TIME_PRECISION
            return [{"start": time, "end": end_time, "tokens": tokens}], frames
        single_end = is_timestamp[-2:].tolist() == [False, True]
        borders = [*pairs.tolist(), len(tokens)] if single_end else pairs.tolist()
        if not single_end:
            borders[-1] += 1  # the last pair stays in one segment, so that it can be recognized
        segments: list[Segment] = []
        start = 0
        for border in borders:
            part = tokens[start:border]
            closing = part[-2 if border == borders[-1] and not single_end else -1]
            begin, end = (int(token) - self.first_timestamp for token in (part[0], closing))
            segments.append(
                {
                    "start": time + begin * TIME_PRECISION,
                    "end": time + end * TIME_PRECISION,
                    "tokens": part,
                }
            )
            start = border
        if single_end:
            return segments, frames
        return segments, (int(tokens[start - 2]) - self.first_timestamp) * ENCODER_STRIDE


def _cut_windows(features: Any, windows: Sequence[tuple[int, int, int]], window: int) -> np.ndarray:
    """Cuts windows, given as (row, start, frames), out of spectrograms and pads them with zeros."""
    batch = np.zeros((len(windows), features.shape[1], window), np.float32)
    for index, (row, start, frames) in enumerate(windows):
        if hasattr(features, "window"):
            part = features.window(row, start, frames)
        else:
            part = np.asarray(features[row, :, start : start + frames])
        batch[index, :, : part.shape[1]] = part
    return batch


def _tokens(segments: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
    return [np.asarray(segment["tokens"], np.int32) for segment in segments]
