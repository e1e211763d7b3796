"""Speech recognition with Whisper, CTC models and speech encoder-decoders."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.audio import AudioFile, Spectrograms
from hfseq.data.sources import MediaSource, UnreadableError
from hfseq.errors import UsageError, optional_import
from hfseq.generation.request import text_width
from hfseq.pipelines.base import Options, Outputs, RejectedInput, Row, distribute
from hfseq.pipelines.generation import GenerationPipeline

#: Audio for CTC models is padded to a multiple of this number of samples.
SAMPLE_STEP = 160

#: Whisper is expected to generate text for audio of at least this many seconds if any sample
#: exceeds this absolute value (-40 dB).
MIN_SECONDS, MIN_LEVEL = 1.0, 0.01


class SpeechRecognition(GenerationPipeline):
    """Transcribes audio: ``{"text": …}``, with ``return_timestamps`` also ``"chunks"``.

    Audio is a path, the content of a file as ``bytes``, an array of samples at the model's sampling
    rate, or a dictionary with "sampling_rate" and the samples as "array" or "raw". Audio with
    a different sampling rate is resampled. Chunks are ``{"text", "timestamp": (start, end)}``, with
    times in seconds.

    - Whisper: ``return_timestamps=True`` returns segments, and "word" returns words. Audio of more
      than 30 seconds is read window by window, with bounded memory. ``language``, ``task``,
      ``prompt_ids``, ``temperature`` and the thresholds of temperature fallback are options of
      ``generate``. As in Transformers, the default is beam search with five beams.
    - CTC models such as wav2vec 2.0: ``return_timestamps`` is "char" or "word". With
      ``chunk_length_s``, long audio is read in chunks that overlap by ``stride_length_s`` seconds
      on each side, by default a sixth of a chunk. Models with group normalization, such as
      wav2vec2-base, are compiled once for each length of audio. With chunks, almost all rows have
      the same length, so that few programs are compiled.

    With ``resample=False``, a different sampling rate is an error. ``on_progress`` is called
    with the seconds of audio that Whisper has transcribed since the previous call.
    """

    processors = ("feature_extractor", "tokenizer")
    head = "ForSpeechSeq2Seq"
    input_description = "an audio file, bytes, samples"
    window_batches = 1
    num_beams = 5
    extra_options = (
        *("chunk_length_s", "stride_length_s", "return_timestamps", "resample", "on_progress"),
        "ignore_warning",
    )

    def __init__(self, model: Any, tokenizer: Any = None, task: str = "", **arguments: Any):
        super().__init__(model, tokenizer, task, **arguments)
        self.is_ctc = not model.can_generate()
        self.is_whisper = model.main_input_name == "input_features"

    def is_single_input(self, inputs: Any) -> bool:
        """Returns whether ``inputs`` is one audio input."""
        return isinstance(inputs, str | bytes | Path | Mapping | np.ndarray | MediaSource)

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per audio input, or per chunk. The samples are read later."""
        self._check_timestamps(options)
        rate, encoded_inputs = self.feature_extractor.sampling_rate, []
        for item in inputs:
            rows: list[Row] | RejectedInput
            try:
                audio = AudioFile(as_audio_source(item, rate), rate, options.get("resample", True))
                rows = self._chunks(audio, options) if self.is_ctc else [Row(metadata=audio)]
            except UnreadableError as error:
                rows = RejectedInput(error)
            encoded_inputs.append(rows)
        return encoded_inputs

    def _check_timestamps(self, options: Options) -> None:
        requested = options.get("return_timestamps")
        valid: tuple[Any, ...] = ("char", "word") if self.is_ctc else (True, "word")
        if not self.is_ctc and not self.is_whisper:
            valid = ()
        if requested and requested not in valid:
            names = " or ".join(map(repr, valid)) or "False"
            raise UsageError(
                f"return_timestamps={requested!r} is not supported by {type(self.model).__name__}; "
                f"use {names}"
            )
        if options.get("chunk_length_s") and not self.is_ctc:
            raise UsageError(
                "chunk_length_s is an option of CTC models; Whisper reads long audio in windows of "
                "30 seconds without it"
            )

    def _chunks(self, audio: AudioFile, options: Options) -> list[Row]:
        """Returns a row per chunk, with the numbers of samples to ignore at its start and end."""
        seconds = options.get("chunk_length_s")
        if not seconds:
            return [Row(metadata=(audio, 0, audio.length, 0, 0))]
        stride = options.get("stride_length_s", seconds / 6)
        strides = (stride, stride) if isinstance(stride, int | float) else tuple(stride)
        ratio = self.model.config.inputs_to_logits_ratio

        def samples(length: float) -> int:
            return round(length * audio.sampling_rate / ratio) * ratio

        length, left, right = samples(seconds), *map(samples, strides)
        if length <= left + right:
            raise UsageError(
                f"chunk_length_s={seconds} must exceed the sum of both strides "
                f"(stride_length_s={stride})"
            )
        rows = []
        for start in range(0, audio.length, length - left - right):
            end = min(start + length, audio.length)
            is_last = start + length >= audio.length
            if end - start > (left if start else 0):
                ignored = left if start else 0, 0 if is_last else right
                rows.append(Row(metadata=(audio, start, end, *ignored)))
            if is_last:
                break
        return rows

    def find_problem(self, rows: Sequence[Row]) -> str | None:
        """Returns `None`, because ``encode`` has already rejected unreadable audio."""
        return None

    def can_share_batch(self, first: Row, row: Row, options: Options) -> bool:
        """Returns whether two rows may be in the same batch.

        For Whisper, both must be longer than a window of 30 seconds, or both must fit into one.
        Group normalization includes padding in its statistics, so models with group normalization
        require rows of equal length.
        """
        if not self.is_whisper:
            lengths = [end - start for _, start, end, *_ in map(self._span, (first, row))]
            return not self._is_exact or lengths[0] == lengths[1]
        return self._is_long(first.metadata) == self._is_long(row.metadata)

    @property
    def _is_exact(self) -> bool:
        """Whether rows must have their exact length, because padding would change the outputs."""
        config = getattr(self.model.config, "encoder", self.model.config)
        return getattr(config, "feat_extract_norm", "layer") == "group"

    def _span(self, row: Row) -> tuple[AudioFile, int, int, int, int]:
        """Returns the file, start and end of a row, and how many samples to ignore at each end."""
        return row.metadata if self.is_ctc else (row.metadata, 0, row.metadata.length, 0, 0)

    def _is_long(self, audio: AudioFile) -> bool:
        """Returns whether audio is longer than a window of Whisper."""
        return audio.length > self._window_samples

    @property
    def _window_samples(self) -> int:
        return 2 * self.model.config.max_source_positions * int(self.feature_extractor.hop_length)

    def collate(self, rows: Sequence[Row], count: int) -> dict[str, Any]:
        """Returns the audio files of Whisper, or padded samples and their mask."""
        if self.is_whisper:
            files = [row.metadata for row in rows]
            is_padded = not any(map(self._is_long, files))
            return {"audio": files + files[-1:] * (count - len(files) if is_padded else 0)}
        spans = [self._span(row) for row in rows]
        samples = [audio.read(start, end - start) for audio, start, end, *_ in spans]
        longest = max(map(len, samples))
        if not self._is_exact:
            longest = text_width(-(-longest // SAMPLE_STEP)) * SAMPLE_STEP
        encoded = self.feature_extractor(
            [*samples, *samples[-1:] * (count - len(rows))],
            sampling_rate=self.feature_extractor.sampling_rate,
            padding="max_length",
            max_length=longest,
            return_attention_mask=True,
            return_tensors="np",
        )
        return {name: np.asarray(encoded[name]) for name in ("input_values", "attention_mask")}

    def run_batch(self, inputs: Mapping[str, Any], options: Options) -> Outputs:
        """Returns segments, generated tokens, or the most probable token of each frame."""
        if self.is_ctc:
            return self._compiled(self.params, distribute(inputs, self.params))
        if not self.is_whisper:
            return self.generate(inputs, self.generation_options(options))
        generate_options = self.generation_options(options, self._longest_prompt(options))
        timestamps = options.get("return_timestamps")
        files: list[AudioFile] = inputs["audio"]
        features: Any = Spectrograms(files, self.feature_extractor)
        if not self._is_long(files[0]):
            encoded = self.feature_extractor(
                [file.read() for file in files],
                sampling_rate=self.feature_extractor.sampling_rate,
                return_attention_mask=True,
                return_tensors="np",
            )
            features = encoded["input_features"]
            if not timestamps:
                return self.generate(
                    {"input_features": features}, {**generate_options, "return_timestamps": False}
                )
            generate_options["attention_mask"] = encoded["attention_mask"]
        output: Any = self.model.generate(
            features,
            params=self.params,
            return_timestamps=True,
            return_token_timestamps=timestamps == "word",
            return_segments=True,
            monitor_progress=self._reporter(files, options.get("on_progress")),
            **generate_options,
        )
        values = {
            "segments": output.segments,
            "empty_windows": output.empty_windows,
            # English-only models have no language, but the value of each row must be a sequence.
            "languages": [code or "" for code in output.languages],
        }
        outputs = {name: np.empty(len(files), object) for name in values}
        for name, rows in values.items():
            outputs[name][:] = rows
        return outputs

    def _longest_prompt(self, options: Options) -> int:
        """Returns the maximum number of tokens in the prompt of a window.

        The prompt ends with four tokens: start, language, task, and "no timestamps".
        """
        values = {**options, **(options.get("generate_kwargs") or {})}
        prompt_ids, condition = (
            values.get(name) for name in ("prompt_ids", "condition_on_prev_tokens")
        )
        length = 4 + (0 if prompt_ids is None else len(prompt_ids))
        if condition or getattr(self.model.generation_config, "condition_on_prev_tokens", False):
            length += self.model.config.max_target_positions // 2
        return length

    def _reporter(
        self, files: Sequence[AudioFile], on_progress: Callable[[float], None] | None
    ) -> Callable[[np.ndarray], None] | None:
        """Returns a callback for ``generate``, or `None` without ``on_progress``.

        The callback converts the positions of Whisper, in frames, to seconds. It calls
        ``on_progress`` with the seconds that were transcribed since the previous call.
        """
        if on_progress is None:
            return None
        frame = self.feature_extractor.hop_length / self.feature_extractor.sampling_rate
        # The padding of short audio does not count, nor do copies that fill the batch.
        is_first = [files.index(file) == index for index, file in enumerate(files)]
        durations = np.array([file.seconds for file in files]) * is_first
        reported = 0.0

        def report(positions: np.ndarray) -> None:
            nonlocal reported
            seconds = float(np.minimum(positions.min(1) * frame, durations).sum())
            if seconds > reported:
                on_progress(seconds - reported)
            reported = max(seconds, reported)

        return report

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the most probable token of each frame."""
        return {"tokens": jnp.argmax(self.model(**inputs, params=params).logits, axis=-1)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Decodes the tokens, with timestamps if the option ``return_timestamps`` is set."""
        if self.is_ctc:
            return self._decode_frames(rows, outputs, options.get("return_timestamps"))
        (output,) = outputs
        if "segments" not in output:
            return {"text": self._decode(rows[0], self._new_ids(output["sequences"][0]))}
        first_timestamp_id = self.model.generation_config.no_timestamps_token_id + 1
        seconds, chunks, texts = rows[0].metadata.seconds, [], list[str]()
        for segment in output["segments"]:
            is_text = np.asarray(segment["tokens"]) < first_timestamp_id
            ids = np.asarray(segment["tokens"])[is_text].tolist()
            texts.append(self._decode(rows[0], ids))
            parts = [{"text": texts[-1], "timestamp": (segment["start"], segment["end"])}]
            if "token_timestamps" in segment:
                ends = np.asarray(segment["token_timestamps"])
                starts = np.append(segment["start"], ends)[:-1]
                language: Any = output["languages"] or None
                parts = self._words(ids, starts[is_text], ends[is_text], language)
            for part in parts:
                start, end = (min(round(float(time), 2), seconds) for time in part["timestamp"])
                chunks.append({**part, "timestamp": (start, end)})
        answer: dict[str, Any] = {"text": "".join(texts)}
        return answer | ({"chunks": chunks} if options.get("return_timestamps") else {})

    def _words(
        self, ids: list[int], starts: np.ndarray, ends: np.ndarray, language: str | None
    ) -> list[dict[str, Any]]:
        """Returns the words of a segment with their times, as in Transformers.

        Args:
            ids: The text tokens of the segment.
            starts: The start of each token in seconds.
            ends: The end of each token in seconds.
            language: Code of the language. Languages without spaces are split into characters.
        """
        from transformers.models.whisper import tokenization_whisper

        special_ids = {*self.tokenizer.all_special_ids}
        text_indices = [index for index, token in enumerate(ids) if token not in special_ids]
        name = tokenization_whisper.LANGUAGES.get(language or "") or getattr(
            self.tokenizer, "language", None
        )
        words, _, indices = tokenization_whisper._combine_tokens_into_words(
            self.tokenizer, [ids[index] for index in text_indices], name or "english"
        )
        return [
            {
                "text": word,
                "timestamp": (
                    starts[text_indices[positions[0]]],
                    ends[text_indices[positions[-1]]],
                ),
            }
            for word, positions in zip(words, indices, strict=True)
        ]

    def _new_ids(self, sequence: np.ndarray) -> list[int]:
        """Returns the generated tokens. For Whisper, the tokens of the prompt are removed."""
        ids = sequence.tolist()
        if not self.is_whisper:
            return ids
        config = self.model.generation_config
        if config.decoder_start_token_id in ids:  # the tokens before are the caller's prompt_ids
            ids = ids[ids.index(config.decoder_start_token_id) + 1 :]
        # Some tokenizers do not mark the tokens of the prompt as special.
        maps = (getattr(config, name, None) or {} for name in ("lang_to_id", "task_to_id"))
        prompt_ids = {token for mapping in maps for token in mapping.values()}
        prompt_ids.add(getattr(config, "no_timestamps_token_id", None))
        return [token for token in ids if token not in prompt_ids]

    def lacks_task(self, options: Options) -> bool:
        """Returns whether the prompts of a multilingual Whisper contain no task.

        Such a model expects a task, and often generates no text without it. As in Transformers,
        ``generate`` does not add one if neither the task nor the language is set.
        """
        if not self.is_whisper:
            return False
        configs = (self.model.generation_config, self.model.config)
        values = {**options, **(options.get("generate_kwargs") or {})}

        def is_set(name: str) -> bool:
            return bool(values.get(name) or any(getattr(config, name, None) for config in configs))

        is_multilingual = getattr(configs[0], "is_multilingual", None) is not False
        prompt_options = ("task", "language", "forced_decoder_ids")
        return is_multilingual and is_set("task_to_id") and not any(map(is_set, prompt_options))

    def _run_each(
        self, batch: Sequence[Row], max_rows: int, options: Options
    ) -> Sequence[Outputs | RejectedInput]:
        """Returns the outputs for a batch, and warns if audio that is not silent has no text."""
        outputs = super()._run_each(batch, max_rows, options)
        for row, output in zip(batch, outputs, strict=True):
            if self.is_whisper and not isinstance(output, RejectedInput):
                row.warning = self._missing_text(row, output, options)
        return outputs

    def _missing_text(self, row: Row, output: Outputs, options: Options) -> str | None:
        """Returns a warning if a window of audio that is not silent has no text."""
        audio: AudioFile = row.metadata
        windows: Any = output.get("empty_windows")
        if windows is None:
            values = {**options, **(options.get("generate_kwargs") or {})}
            config = self.model.generation_config
            may_skip = values.get(
                "no_speech_threshold", getattr(config, "no_speech_threshold", None)
            )
            is_empty = not self._decode(row, self._new_ids(output["sequences"][0])).strip()
            windows = [(0.0, audio.seconds)] if is_empty and may_skip is None else []
        times = []
        for start, end in windows:
            end = min(end, audio.seconds)
            if end - start < MIN_SECONDS:
                continue
            first, last = (round(time * audio.sampling_rate) for time in (start, end))
            if np.abs(audio.read(first, last - first)).max(initial=0.0) > MIN_LEVEL:
                times.append(f"{start:.1f}-{end:.1f} s")
        if not times:
            return None
        hint = "; pass task='transcribe'" if self.lacks_task(options) else ""
        return f"no text for {', '.join(times)}, although the audio is not silent{hint}"

    def _decode_frames(
        self, rows: list[Row], outputs: list[Outputs], timestamps: str | None
    ) -> dict[str, Any]:
        """Returns the text of the frames of a CTC model.

        Frames in which chunks overlap are only used once.
        """
        ratio, parts = self.model.config.inputs_to_logits_ratio, []
        count_frames: Any = self.model._get_feat_extract_output_lengths  # type: ignore[attr-defined]
        for row, output in zip(rows, outputs, strict=True):
            _, start, end, left, right = row.metadata
            num_frames = int(count_frames(end - start))
            tokens = output["tokens"][:num_frames]
            if left or right:
                total = round((end - start) / ratio)
                left, right = (round(side / (end - start) * total) for side in (left, right))
                tokens = tokens[left : total - right]
            parts.append(tokens)
        tokenizer: Any = self.tokenizer
        ids = np.concatenate(parts).tolist()
        answer: dict[str, Any] = {"text": tokenizer.decode(ids)}
        if timestamps:
            offsets = tokenizer.decode(ids, output_char_offsets=True)["char_offsets"]
            if timestamps == "word":
                offsets = tokenizer._get_word_offsets(
                    offsets, tokenizer.replace_word_delimiter_char
                )
            seconds = ratio / self.feature_extractor.sampling_rate
            answer["chunks"] = [
                {
                    "text": item[timestamps],
                    "timestamp": (item["start_offset"] * seconds, item["end_offset"] * seconds),
                }
                for item in offsets
            ]
        return answer


def as_audio_source(audio: Any, sampling_rate: int) -> MediaSource:
    """Returns the source of an audio input, which may be a file or an array of samples.

    Args:
        audio: See :class:`SpeechRecognition`.
        sampling_rate: Sampling rate of an array, in Hz.

    Raises:
        UnreadableError: The value is not audio.
    """
    if isinstance(audio, MediaSource):
        return audio
    if isinstance(audio, str | Path):
        return MediaSource(str(audio))
    if isinstance(audio, bytes):
        return MediaSource("the audio", audio)
    if isinstance(audio, Mapping):
        samples = next((audio[name] for name in ("raw", "array") if name in audio), None)
        if samples is None and (audio.get("bytes") or audio.get("path")):
            return MediaSource(str(audio.get("path") or "the audio"), audio.get("bytes"))
        if samples is None or "sampling_rate" not in audio:
            raise UnreadableError(
                'a dictionary must have "sampling_rate" and "array" or "raw", but has '
                f"{', '.join(map(repr, audio))}"
            )
        audio, sampling_rate = samples, int(audio["sampling_rate"])
    try:
        samples = np.asarray(audio)
    except ValueError:
        samples = np.empty(0, object)
    if samples.ndim not in (1, 2) or not np.issubdtype(samples.dtype, np.number):
        raise UnreadableError(f"it must be a path, bytes or samples, not {audio!r:.60}")
    if samples.ndim == 2:
        samples = samples.mean(int(samples.shape[0] > samples.shape[1]))
    if not samples.size:
        raise UnreadableError("it is empty")
    with optional_import("audio", "soundfile", "hfseq[audio]"):
        import soundfile
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), sampling_rate, format="WAV", subtype="FLOAT")
    return MediaSource("the samples", file.getvalue())


def to_srt(chunks: Sequence[Mapping[str, Any]]) -> str:
    """Returns subtitles in SubRip format for a transcript. Chunks without text are omitted."""
    chunks = [chunk for chunk in chunks if chunk["text"].strip()]
    return "\n".join(
        f"{number}\n{' --> '.join(map(_time, chunk['timestamp']))}\n{chunk['text'].strip()}\n"
        for number, chunk in enumerate(chunks, 1)
    )


def _time(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, remainder = divmod(milliseconds, 60000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{remainder // 1000:02},{remainder % 1000:03}"
