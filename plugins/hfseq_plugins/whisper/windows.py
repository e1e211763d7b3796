"""Transcription of audio window by window.

Each window starts at the end of the last complete segment of the previous window, which Whisper
marks with a timestamp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hfseq.errors import UsageError
from hfseq.nn.outputs import FlaxModelOutput
from hfseq_plugins.whisper.decoding import (
    ENCODER_STRIDE,
    TIME_PRECISION,
    Lookup,
    WindowDecoder,
)

Segment = dict[str, Any]


@dataclasses.dataclass
class FlaxWhisperOutput(FlaxModelOutput):
    """The transcription of audio of any length.

    Attributes:
        sequences: Tokens of all windows without prompts and EOS, `(batch, length)`, padded with
            `pad_token_id`.
        segments: The segments of each row. A segment is a dict with `start` and `end` in seconds
            and `tokens`, and with `return_token_timestamps` also `token_timestamps`.
        token_timestamps: With `return_token_timestamps`, the time of each token in seconds from the
            start of the audio, `(batch, length)`, padded with the last time of the row.
        languages: The code of the language of each row, or `None` if the prompt contains none.
        empty_windows: For each row, the start and end in seconds of the windows for which the model
            generated no text, without those that `no_speech_threshold` skipped.
    """

    sequences: np.ndarray | None = None
    segments: list[list[Segment]] | None = None
    token_timestamps: np.ndarray | None = None
    languages: list[str | None] | None = None
    empty_windows: list[list[tuple[float, float]]] | None = None


@dataclasses.dataclass(frozen=True)
class PreviousText:
    """The text that precedes the audio in the prompt of a window.

    Attributes:
        prompt_ids: Tokens that the caller passed, if any.
        is_conditioned: Whether the prompts contain the text of previous windows.
        in_all_windows: Whether every prompt starts with `prompt_ids`. Otherwise, `prompt_ids` is
            treated as text before the first window, which is cut off when the text is too long.
    """

    prompt_ids: np.ndarray | None
    is_conditioned: bool
    in_all_windows: bool

    @classmethod
    def from_options(
        cls, options: Lookup, prompt_ids: Any, prompt_condition_type: str | None
    ) -> PreviousText:
        """Reads the options of a call.

        Raises:
            UsageError: A value is invalid, or the values contradict each other.
        """
        kinds = ("first-segment", "all-segments")
        kind = prompt_condition_type or kinds[0]
        if kind not in kinds:
            raise UsageError(
                f"generate: prompt_condition_type='{kind}' must be one of {', '.join(kinds)}"
            )
        is_conditioned = bool(options("condition_on_prev_tokens"))
        if kind == "all-segments" and not is_conditioned:
            raise UsageError(
                "generate: prompt_condition_type='all-segments' requires "
                "condition_on_prev_tokens=True"
            )
        if prompt_ids is not None:
            prompt_ids = np.asarray(prompt_ids)
            if prompt_ids.ndim != 1 or not prompt_ids.size or prompt_ids.dtype.kind not in "iu":
                raise UsageError(
                    "generate: prompt_ids must be a non-empty list of tokens, such as the result "
                    f"of processor.get_prompt_ids, but has the shape {prompt_ids.shape} and the "
                    f"dtype {prompt_ids.dtype}"
                )
            prompt_ids = prompt_ids.astype(np.int32)
        return cls(prompt_ids, is_conditioned, kind == "all-segments")


class WindowTranscriber:
    """Transcribes audio in windows. The windows of different rows may start at different times.

    Args:
        model: The model.
        options: Function that returns the value of a generation option, given its name.
        decoder: Decodes batches of windows.
        prompts: The prompt of each row from the start token on, `(batch, length)`.
        previous_text: The text that precedes these prompts.
    """

    def __init__(
        self,
        model: Any,
        options: Lookup,
        decoder: WindowDecoder,
        prompts: np.ndarray,
        previous_text: PreviousText,
    ):
        self.prompts, self.previous_text, self.decoder = prompts, previous_text, decoder
        self.window = ENCODER_STRIDE * model.config.max_source_positions
        self.max_positions: int = model.config.max_target_positions
        no_timestamps = options("no_timestamps_token_id")
        # Without timestamp tokens, no token is a timestamp.
        self.first_timestamp: int = 1 + (
            model.config.vocab_size if no_timestamps is None else no_timestamps
        )
        self.pad = decoder.pad
        self.max_new_tokens = options("max_new_tokens")
        self.max_length = options("max_length")
        suppressed: Sequence[int] = options("suppress_tokens") or ()
        self.previous_text_token = options("prev_sot_token_id")
        if self.previous_text_token is None and len(suppressed) >= 2:
            self.previous_text_token = suppressed[-2]
        names = ("decoder_start_token_id", "prev_sot_token_id", "no_timestamps_token_id")
        prompt_tokens = {options(name) for name in names} - {None}
        for name in ("lang_to_id", "task_to_id"):
            prompt_tokens |= {*(options(name) or {}).values()}
        if no_timestamps is not None:
            prompt_tokens.add(no_timestamps - 1)  # marks silence
        self.prompt_tokens = sorted(prompt_tokens)
        codes = {token: code.strip("<|>") for code, token in (options("lang_to_id") or {}).items()}
        self.languages = [codes.get(token) for token in prompts[:, min(1, prompts.shape[1] - 1)]]

    def transcribe(
        self,
        features: Any,
        ends: np.ndarray,
        audio_ends: np.ndarray,
        monitor: Callable[[np.ndarray], None] | None = None,
    ) -> FlaxWhisperOutput:
        """Transcribes all rows.

        Args:
            features: Spectrograms, `(batch, mels, frames)`, or an object that computes them lazily.
            ends: The number of frames of each row, `(batch,)`.
            audio_ends: The number of frames without padding, `(batch,)`. Times of tokens do not
                exceed it.
            monitor: Function that reports progress. Its argument is `(batch, 2)`: the number of
                processed frames and the number of frames of each row.
        """
        rows = len(ends)
        segments: list[list[Segment]] = [[] for _ in range(rows)]
        empty_windows: list[list[tuple[float, float]]] = [[] for _ in range(rows)]
        is_conditioned = np.full(rows, self.previous_text.is_conditioned)
        seek = np.zeros(rows, int)
        while (active := np.flatnonzero(seek < ends)).size:
            if monitor is not None:
                monitor(np.stack([seek, ends], axis=1))
            lengths = np.minimum(ends[active] - seek[active], self.window)
            parts = [
                (int(row), int(start), int(length))
                for row, start, length in zip(active, seek[active], lengths, strict=True)
            ]
            texts = [self.text_before(segments[row], is_conditioned[row]) for row in active]
            prompts, mask = self.join_prompts(texts, active)
            decoded = self.decoder.decode(
                cut_windows(features, parts, self.window),
                prompts,
                mask,
                **self.length_options(prompts.shape[1]),
            )
            for (row, start, length), window in zip(parts, decoded, strict=True):
                is_conditioned[row] = (
                    self.previous_text.is_conditioned and window.supports_conditioning
                )
                if window.is_silent:
                    seek[row] += length
                    continue
                time = start * TIME_PRECISION / ENCODER_STRIDE
                times = self.decoder.times(window, int(audio_ends[row]) - start)
                new_segments, frames = self.split_segments(window.tokens, time, length, times)
                if not self.has_text(window.tokens):
                    end = (start + frames) * TIME_PRECISION / ENCODER_STRIDE
                    empty_windows[row].append((time, end))
                segments[row] += new_segments
                seek[row] += frames
        if monitor is not None:
            monitor(np.stack([seek, ends], axis=1))
        tokens = [_concatenate(row, "tokens", np.int32) for row in segments]
        token_timestamps = None
        if self.decoder.alignment_heads is not None:
            row_times = [_concatenate(row, "token_timestamps", np.float64) for row in segments]
            token_timestamps = _pad_rows(
                row_times, [row[-1] if len(row) else 0.0 for row in row_times]
            )
        return FlaxWhisperOutput(
            _pad_rows(tokens, [self.pad] * rows),
            segments,
            token_timestamps,
            self.languages,
            empty_windows,
        )

    def has_text(self, tokens: np.ndarray) -> bool:
        """Returns whether any token is neither a timestamp nor a token of prompts."""
        is_text = (tokens < self.first_timestamp) & ~np.isin(tokens, self.prompt_tokens)
        return bool(is_text.any())

    def length_options(self, prompt_length: int) -> dict[str, int | None]:
        """Returns the options that limit the length of a window.

        `max_new_tokens` applies if it is set, otherwise `max_length`.
        """
        if self.max_new_tokens is not None:
            if prompt_length + self.max_new_tokens > self.max_positions:
                raise UsageError(
                    f"generate: max_new_tokens={self.max_new_tokens} after the {prompt_length} "
                    f"tokens of a prompt exceeds the model's {self.max_positions} positions. Use "
                    "fewer new tokens or a shorter prompt"
                )
            # With both options, `generate` would log a warning for each window.
            return {"max_new_tokens": None, "max_length": prompt_length + self.max_new_tokens}
        if self.max_length is None:
            return {"max_length": self.max_positions}
        allowance = min(self.max_positions // 2 - 1, prompt_length)
        return {"max_length": min(self.max_length + allowance, self.max_positions)}

    def text_before(self, segments: Sequence[Segment], is_conditioned: bool) -> np.ndarray:
        """Returns the tokens that precede the prompt of a row's next window.

        Args:
            segments: The segments of the row so far.
            is_conditioned: Whether the window may depend on their text.
        """
        prompt_ids, in_all = self.previous_text.prompt_ids, self.previous_text.in_all_windows
        given = np.zeros(0, np.int32) if prompt_ids is None else prompt_ids
        first_text = given[:0]
        if prompt_ids is not None and not in_all:  # the prompt is the text before the first window
            first_text = given[int(given[0] == self.previous_text_token) :]
        if not is_conditioned or not (segments or len(first_text)):
            return given
        # The last segment of a window may end with two timestamps. The second one is the start of
        # the next segment.
        parts = [np.asarray(segment["tokens"], np.int32) for segment in segments]
        parts = [
            part[:-1] if len(part) > 2 and part[-2] >= self.first_timestamp else part
            for part in parts
        ]
        text = np.concatenate([first_text, *parts])[-(self.max_positions // 2 - 1) :]
        start = given[:0]
        if in_all and prompt_ids is not None:
            start = given
        elif self.previous_text_token is not None:
            start = np.asarray([self.previous_text_token], np.int32)
        return np.concatenate([start, text])

    def join_prompts(
        self, texts: Sequence[np.ndarray], active: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Builds the prompts of the active rows.

        Args:
            texts: The tokens that precede the prompt of each active row.
            active: The indices of the active rows.

        Returns:
            Tokens, `(rows, length)`, and a mask that is 0 for padding, or `None` if there is no
            padding.
        """
        width = max(map(len, texts))
        padded = np.full((len(texts), width), self.pad, np.int32)
        for row, text in enumerate(texts):
            padded[row, width - len(text) :] = text
        prompts = np.concatenate([padded, self.prompts[active]], axis=1)
        is_padded = self.previous_text.is_conditioned and width
        return prompts, (prompts != self.pad).astype(np.int32) if is_padded else None

    def split_segments(
        self, tokens: np.ndarray, time: float, frames: int, times: np.ndarray | None = None
    ) -> tuple[list[Segment], int]:
        """Splits the tokens of a window into segments.

        Args:
            tokens: The tokens of the window, `(length,)`.
            time: The start of the window in seconds.
            frames: The length of the window in frames.
            times: The time of each token in seconds from the start of the window, if requested.

        Returns:
            The segments, and the number of frames until the start of the next window.
        """

        def segment(start: int, stop: int, first: int, last: int) -> Segment:
            """Returns a segment of tokens between two positions of the encoder."""
            result = {
                "start": time + first * TIME_PRECISION,
                "end": time + last * TIME_PRECISION,
                "tokens": tokens[start:stop],
            }
            return (
                result if times is None else result | {"token_timestamps": times[start:stop] + time}
            )

        is_timestamp = tokens >= self.first_timestamp
        # Two adjacent timestamps are the end of a segment and the start of the next one. A single
        # timestamp at the end means that no speech follows. Tokens without such a pair of
        # timestamps are one segment.
        pairs = np.flatnonzero(is_timestamp[:-1] & is_timestamp[1:]) + 1
        if not pairs.size:
            positions = int(frames / ENCODER_STRIDE)
            if is_timestamp.any():
                last = tokens[np.flatnonzero(is_timestamp)[-1]]
                if last != self.first_timestamp:
                    positions = int(last) - self.first_timestamp
            return [segment(0, len(tokens), 0, positions)], frames
        single_end = is_timestamp[-2:].tolist() == [False, True]
        borders = [*pairs.tolist(), len(tokens)] if single_end else pairs.tolist()
        if not single_end:
            borders[-1] += 1  # keep the last pair in one segment, so that text_before finds it
        segments: list[Segment] = []
        start = 0
        for border in borders:
            part = tokens[start:border]
            closing = part[-2 if border == borders[-1] and not single_end else -1]
            first, last = (int(token) - self.first_timestamp for token in (part[0], closing))
            segments.append(segment(start, border, first, last))
            start = border
        if single_end:
            return segments, frames
        return segments, (int(tokens[start - 2]) - self.first_timestamp) * ENCODER_STRIDE


def cut_windows(features: Any, windows: Sequence[tuple[int, int, int]], window: int) -> np.ndarray:
    """Returns windows of spectrograms, padded with zeros to `window` frames.

    Args:
        features: Spectrograms, `(batch, mels, frames)`, or an object that computes them lazily.
        windows: The row, the first frame and the number of frames of each window.
        window: The number of frames to pad to.
    """
    batch = np.zeros((len(windows), features.shape[1], window), np.float32)
    for index, (row, start, frames) in enumerate(windows):
        if hasattr(features, "window"):
            part = features.window(row, start, frames)
        else:
            part = np.asarray(features[row, :, start : start + frames])
        batch[index, :, : part.shape[1]] = part
    return batch


def _concatenate(segments: Sequence[Mapping[str, Any]], name: str, dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(segment[name] for segment in segments)])


def _pad_rows(rows: Sequence[np.ndarray], values: Sequence[Any]) -> np.ndarray:
    """Returns rows of different lengths as an array, padded with a value for each row."""
    padded = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        padded[index, : len(row)], padded[index, len(row) :] = row, value
    return padded
