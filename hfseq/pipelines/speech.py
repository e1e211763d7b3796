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
from hfseq.errors import UsageError
from hfseq.generation.request import text_width
from hfseq.pipelines.base import Options, Outputs, RejectedInput, Row, distribute
from hfseq.pipelines.generation import GenerationPipeline

#: Number of samples to whose multiples the audio of CTC models is padded.
SAMPLE_STEP = 160


class SpeechRecognition(GenerationPipeline):
    """Transcribes audio: ``{"text": …}``, with ``return_timestamps`` also ``"chunks"``.

    Audio is a path, the content of a file as ``bytes``, an array of samples at the model's sampling
    rate, or a dictionary with "array" or "raw" and "sampling_rate". Audio with another rate is
    resampled. Chunks are ``{"text", "timestamp": (start, end)}`` in seconds.

    - Whisper: ``return_timestamps=True`` returns segments. Audio of more than 30 seconds is read
      window by window, with bounded memory. ``language`` and ``task`` are options of ``generate``.
      As in Transformers, the default is beam search with five beams.
    - CTC models such as wav2vec 2.0: ``return_timestamps`` is "char" or "word". With
      ``chunk_length_s``, long audio is read in chunks that overlap by ``stride_length_s`` seconds
      on each side, by default a sixth of a chunk. Models with group normalization, such as
      wav2vec2-base, are compiled for each length of audio; chunks share one program.

    ``resample=False`` makes audio with another sampling rate an error. ``on_progress`` is called
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
        """Returns whether ``inputs`` is one audio."""
        return isinstance(inputs, str | bytes | Path | Mapping | np.ndarray | MediaSource)

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns a row per audio, or per chunk. Samples are read later."""
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
        valid: tuple[Any, ...] = ("char", "word") if self.is_ctc else (True,)
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
                f"chunk_length_s={seconds} must exceed the two strides, stride_length_s={stride}"
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
        """Returns ``None``: the audio has been checked when it was opened."""
        return None

    def can_share_batch(self, first: Row, row: Row, options: Options) -> bool:
        """Returns whether both are shorter or both longer than a window of Whisper.

        Group normalization includes padding in its statistics, so models that have it require rows
        of equal length.
        """
        if not self.is_whisper:
            lengths = [end - start for _, start, end, *_ in map(self._span, (first, row))]
            return not self._is_exact or lengths[0] == lengths[1]
        return self._is_long(first.metadata) == self._is_long(row.metadata)

    @property
    def _is_exact(self) -> bool:
        """Whether padding would change the outputs."""
        config = getattr(self.model.config, "encoder", self.model.config)
        return getattr(config, "feat_extract_norm", "layer") == "group"

    def _span(self, row: Row) -> tuple[AudioFile, int, int, int, int]:
        """Returns the samples of a row: the file, their start and end, and what is ignored."""
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
        # Start, language, task, and "no timestamps".
        generate_options = self.generation_options(options, prompt_length=4)
        files: list[AudioFile] = inputs["audio"]
        features: Any = Spectrograms(files, self.feature_extractor)
        if not self._is_long(files[0]):
            features = self.feature_extractor(
                [file.read() for file in files],
                sampling_rate=self.feature_extractor.sampling_rate,
                return_tensors="np",
            )["input_features"]
            if not options.get("return_timestamps"):
                return self.generate(
                    {"input_features": features}, {**generate_options, "return_timestamps": False}
                )
        output: Any = self.model.generate(
            features,
            params=self.params,
            return_timestamps=True,
            return_segments=True,
            monitor_progress=self._reporter(options.get("on_progress")),
            **generate_options,
        )
        segments = np.empty(len(files), object)
        segments[:] = output.segments
        return {"segments": segments}

    def _reporter(
        self, on_progress: Callable[[float], None] | None
    ) -> Callable[[np.ndarray], None] | None:
        """Returns a function that converts the frames of Whisper to seconds since its last call."""
        if on_progress is None:
            return None
        extractor, reported = self.feature_extractor, 0.0

        def report(positions: np.ndarray) -> None:
            nonlocal reported
            seconds = float(positions.min(1).sum()) * extractor.hop_length / extractor.sampling_rate
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
        """Decodes the tokens, with timestamps if the call asks for them."""
        if self.is_ctc:
            return self._decode_frames(rows, outputs, options.get("return_timestamps"))
        (output,) = outputs
        if "segments" not in output:
            prompt_ids = self._prompt_ids() if self.is_whisper else ()
            ids = [token for token in output["sequences"][0].tolist() if token not in prompt_ids]
            return {"text": self._decode(rows[0], ids)}
        first_timestamp_id = self.model.generation_config.no_timestamps_token_id + 1
        seconds, chunks, texts = rows[0].metadata.seconds, [], list[str]()
        for segment in output["segments"]:
            ids = [token for token in np.asarray(segment["tokens"]).tolist()]
            ids = [token for token in ids if token < first_timestamp_id]
            start, end = (min(float(segment[name]), seconds) for name in ("start", "end"))
            texts.append(self._decode(rows[0], ids))
            chunks.append({"text": texts[-1], "timestamp": (start, end)})
        answer: dict[str, Any] = {"text": "".join(texts)}
        return answer | ({"chunks": chunks} if options.get("return_timestamps") else {})

    def _prompt_ids(self) -> set[int]:
        """Returns the tokens of Whisper's prompt, which some tokenizers do not mark as special."""
        config = self.model.generation_config
        maps = (getattr(config, name, None) or {} for name in ("lang_to_id", "task_to_id"))
        ids = {token for mapping in maps for token in mapping.values()}
        return ids | {
            getattr(config, "no_timestamps_token_id", None),
            config.decoder_start_token_id,
        }

    def _decode_frames(
        self, rows: list[Row], outputs: list[Outputs], timestamps: str | None
    ) -> dict[str, Any]:
        """Returns the text of a CTC model's frames, without the frames that chunks share."""
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
    """Returns the source of an audio file or of samples.

    Args:
        audio: See :class:`SpeechRecognition`.
        sampling_rate: Sampling rate of an array, in Hz.

    Raises:
        UnreadableError: The value is no audio.
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
    try:
        import soundfile
    except ImportError as error:
        raise UsageError("audio requires soundfile: pip install 'hfseq[audio]'") from error
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), sampling_rate, format="WAV", subtype="FLOAT")
    return MediaSource("the samples", file.getvalue())


def to_srt(chunks: Sequence[Mapping[str, Any]]) -> str:
    """Returns subtitles in SubRip format for the chunks of a transcript. Empty ones are omitted."""
    chunks = [chunk for chunk in chunks if chunk["text"].strip()]
    return "\n".join(
        f"{number}\n{' --> '.join(map(_time, chunk['timestamp']))}\n{chunk['text'].strip()}\n"
        for number, chunk in enumerate(chunks, 1)
    )


def _time(seconds: float) -> str:
    milliseconds = round(seconds * 1000)
    minutes, remainder = divmod(milliseconds, 60000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{remainder // 1000:02},{remainder % 1000:03}"
