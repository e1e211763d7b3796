"""Generation with Whisper: prompts with language and task, timestamps, and long audio.

The rules are those of PyTorch's Whisper in Transformers. Audio of up to 30 seconds is transcribed
by one call of the generic `generate`. Longer audio is transcribed in windows of 30 seconds, one
after the other, and so is shorter audio if windows can be decoded again or if times of tokens are
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError, did_you_mean
from hfseq.generation.generate import Programs
from hfseq.generation.request import Request, make_request
from hfseq.nn import sharding
from hfseq_plugins.whisper.decoding import (
    ENCODER_STRIDE,
    Fallback,
    WindowDecoder,
    search_options,
)
from hfseq_plugins.whisper.windows import (
    FlaxWhisperOutput,
    PreviousText,
    WindowTranscriber,
    cut_windows,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from hfseq.generation.search import GenerativeModel
    from hfseq.modeling import FlaxSeq2SeqPreTrainedModel

    _Model = FlaxSeq2SeqPreTrainedModel
else:
    _Model = object  # a mixin: subclasses also derive from a model class

__all__ = ["FlaxWhisperOutput", "WhisperGeneration"]


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
        prompt_condition_type: str | None = None,
        condition_on_prev_tokens: bool | None = None,
        temperature: float | Sequence[float] | None = None,
        compression_ratio_threshold: float | None = None,
        logprob_threshold: float | None = None,
        no_speech_threshold: float | None = None,
        return_token_timestamps: bool | None = None,
        return_segments: bool = False,
        attention_mask: Any = None,
        monitor_progress: Callable[[np.ndarray], None] | None = None,
        params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Transcribes or translates speech.

        Audio of more than 30 seconds is processed in windows, which requires timestamps. Shorter
        audio is also processed in this way if `temperature` is a list, if `no_speech_threshold`,
        `return_token_timestamps` or `return_segments` is set, or if features are computed lazily.

        The thresholds and `condition_on_prev_tokens` can also be set in the generation config, and
        `temperature` if it is a list.

        Args:
            input_features: Spectrograms, `(batch, mels, frames)`. This is an array, or an object
                that computes the features lazily: its method `window` returns one window
                (:class:`hfseq.data.audio.Spectrograms`).
            generation_config: Generation options, which are not modified. The default is the
                generation config of the model.
            logits_processor: Additional logits processors.
            return_timestamps: Whether to predict timestamps. The default is `True` for long audio,
                with `return_segments`, and for lazy features. Otherwise it is the value in
                `generation_config`.
            task: `"transcribe"` or `"translate"`.
            language: The language of the speech as a code, an English name or a token (`"de"`,
                `"german"`, `"<|de|>"`), or a list with one language per row. By default a
                multilingual model detects the language.
            is_multilingual: Overrides the value in `generation_config`.
            prompt_ids: Tokens of a text that precedes the audio, for example with names that occur
                in it (`processor.get_prompt_ids`).
            prompt_condition_type: How `prompt_ids` is combined with the text of previous windows if
                `condition_on_prev_tokens` is set. With `"first-segment"`, the default, it is the
                start of that text. With `"all-segments"`, it precedes the text in every window.
            condition_on_prev_tokens: Whether the prompt of each window contains the text of the
                previous windows. Text that was sampled at a temperature of 0.5 or more is not used.
            temperature: A temperature, or a list of temperatures such as `(0.0, 0.2, 0.4, 0.6, 0.8,
                1.0)`. 0 selects greedy search or beam search, other values select sampling. If a
                window does not pass the thresholds, it is decoded again at the next temperature.
                The result of the last temperature is used in any case.
            compression_ratio_threshold: Highest ratio between the size of a window's tokens and
                their size after compression by zlib, for example 1.35. A higher ratio is caused by
                repetitions.
            logprob_threshold: Lowest average log-probability of a window's tokens, for example
                -1.0.
            no_speech_threshold: Windows are skipped if the probability of silence is higher than
                this value, for example 0.6, and the average log-probability is below
                `logprob_threshold`.
            return_token_timestamps: Whether to return the time of each token. It is derived from
                the cross-attention of the `alignment_heads` in the generation config.
            return_segments: Whether to return segments for short audio, too.
            attention_mask: `(batch, frames)`, 0 for padding. It is only used if audio is processed
                in windows: for the length of long audio and for times of tokens.
            monitor_progress: Function that is called before each window, and once at the end. Its
                argument is an array `(batch, 2)` with the number of processed frames and the total
                number of frames of each row.
            params: Parameters to use instead of the model's.
            **kwargs: Other options of `generate`.

        Returns:
            A :class:`FlaxWhisperOutput` if audio is processed in windows. Otherwise the output of
            the generic `generate`, whose `sequences` start with the prompt.

        Raises:
            UsageError: The model does not support the language, the task or timestamps, options
                contradict each other, or the inputs have the wrong shape.
        """
        if input_features is None:
            input_features = kwargs.pop("input_ids", None)
        encoder_outputs = kwargs.get("encoder_outputs")
        if input_features is None and encoder_outputs is None:
            raise UsageError("generate: Whisper needs input_features (or encoder_outputs)")
        window_options = {
            "condition_on_prev_tokens": condition_on_prev_tokens,
            "compression_ratio_threshold": compression_ratio_threshold,
            "logprob_threshold": logprob_threshold,
            "no_speech_threshold": no_speech_threshold,
        }
        options = _Options(self, generation_config, {**kwargs, **window_options})
        fallback = Fallback.from_options(options, temperature)
        previous_text = PreviousText.from_options(options, prompt_ids, prompt_condition_type)

        window = ENCODER_STRIDE * self.config.max_source_positions
        frames = window
        if input_features is not None:
            input_features = _checked_features(input_features)
            frames = input_features.shape[2]
            return_segments |= hasattr(input_features, "window")
        return_segments |= frames > window
        windowed = return_segments or fallback.is_active or bool(return_token_timestamps)
        if return_timestamps is None:
            return_timestamps = return_segments or bool(options("return_timestamps"))
        _check_timestamps(options, return_timestamps, frames, window)
        if windowed:
            _check_windowed(options, encoder_outputs, input_features, return_token_timestamps)
        if input_features is not None and not windowed:
            input_features = _pad_frames(input_features, window)
        rows = (input_features if encoder_outputs is None else encoder_outputs[0]).shape[0]
        _check_language_and_task(options, task, language, is_multilingual)

        def detect_languages() -> jax.Array:
            features = None if encoder_outputs is not None else input_features
            if windowed and features is not None:
                first_windows = [(row, 0, window) for row in range(rows)]
                features = cut_windows(features, first_windows, window)
            return self.detect_language(features, encoder_outputs, params=params)

        prompt: Any = kwargs.get("decoder_input_ids")
        if prompt is None:
            prompt = _decoder_prompt(
                options, rows, task, language, return_timestamps, detect_languages
            )
        call_options = {**kwargs, "forced_decoder_ids": (), "params": params}
        if return_timestamps:
            call_options["timestamp_rules"] = _timestamp_rules(options)

        def generate_text(features: Any = None, **overrides: Any) -> Any:
            return super(WhisperGeneration, self).generate(
                features,
                generation_config,
                logits_processor=logits_processor,
                **{**call_options, **overrides},
            )

        if not windowed:
            prefix = previous_text.prompt_ids
            if prefix is not None:
                prompt = _prepend(prefix, prompt, rows)
            search = search_options(fallback.temperatures[0])
            return generate_text(input_features, decoder_input_ids=prompt, **search)

        def window_request(**overrides: Any) -> Request:
            arguments = {**call_options, **overrides}
            key = arguments.pop("prng_key", None)
            arguments.pop("params")
            arguments.pop("trace", None)
            model = cast("GenerativeModel", self)
            return make_request(
                model, None, generation_config, key, params, logits_processor, arguments
            )

        decoder = WindowDecoder(
            self,
            options,
            fallback,
            np.shape(prompt)[1],
            options("alignment_heads") if return_token_timestamps else None,
            rows,
            generate_text,
            window_request,
            kwargs.get("prng_key"),
            params,
            kwargs.get("extra"),
        )
        ends = _row_ends(input_features, attention_mask, rows, frames, window)
        audio_ends = ends if attention_mask is None else np.asarray(attention_mask).sum(-1)
        transcriber = WindowTranscriber(self, options, decoder, np.asarray(prompt), previous_text)
        return transcriber.transcribe(input_features, ends, audio_ends, monitor_progress)

    def detect_language(
        self,
        input_features: Any = None,
        encoder_outputs: Any = None,
        params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Predicts the language of each row.

        Args:
            input_features: Spectrograms of one window, `(batch, mels, frames)`.
            encoder_outputs: The output of the encoder, instead of `input_features`.
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
        params = self.params if params is None else params
        tokens = program(params, input_features, encoder_outputs)
        return tokens if isinstance(tokens, jax.core.Tracer) else sharding.replicate(tokens)


class _Options:
    """Returns the value of a generation option, which may be set in several places.

    These are the keyword arguments, the generation config that was passed, the generation config of
    the model, and the configuration of the model, in this order.
    """

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
    """Returns spectrograms as an array and checks their rank. Lazy features are returned as is."""
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
    """Returns the number of frames of each row, `(batch,)`. Padding of short audio is included."""
    if hasattr(features, "ends"):
        return features.ends
    if frames <= window:
        return np.full(rows, frames)
    if attention_mask is not None:
        return np.asarray(attention_mask).sum(-1)
    if rows > 1:
        raise UsageError(
            f"generate: {rows} rows of more than 30 seconds need attention_mask, which determines "
            "their lengths. The feature extractor returns it with return_attention_mask=True"
        )
    return np.full(rows, frames)


def _check_timestamps(options: _Options, return_timestamps: bool, frames: int, window: int) -> None:
    if frames > window and not return_timestamps:
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


def _check_windowed(
    options: _Options, encoder_outputs: Any, features: Any, return_token_timestamps: bool | None
) -> None:
    """Raises UsageError if audio cannot be processed in windows."""
    reasons = (
        "temperature as a list, no_speech_threshold, return_token_timestamps and return_segments"
    )
    if encoder_outputs is not None:
        raise UsageError(
            f"generate: {reasons} require input_features instead of encoder_outputs, because "
            "audio is processed in windows"
        )
    if isinstance(features, jax.core.Tracer):
        raise UsageError(
            f"generate: {reasons} are not possible under jax.jit, because they process audio in "
            "windows. Call generate outside of jit"
        )
    if (returned := options("num_return_sequences")) not in (None, 1):
        raise UsageError(
            f"generate: num_return_sequences={returned} is not possible with {reasons}, nor with "
            "long audio, because the next window depends on the text of the previous one"
        )
    if return_token_timestamps and options("alignment_heads") is None:
        raise UsageError(
            "generate: return_token_timestamps=True needs alignment_heads in the "
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
    """Returns the prompt of each row: the tokens for start, language, task and "no timestamps".

    Args:
        options: The options of the call.
        rows: The batch size.
        task: The requested task, if any.
        language: The requested language or languages, if any.
        timestamps: Whether timestamps are predicted.
        detect_languages: Predicts the language tokens of all rows. It is only called if neither
            the arguments nor `options` specify a language.

    Returns:
        Tokens, int32 `(batch, length)`, as a JAX array while tracing, otherwise as a NumPy array.
    """
    start, no_timestamps = options("decoder_start_token_id"), options("no_timestamps_token_id")
    if start is None:
        raise UsageError(
            "generate: Whisper needs decoder_start_token_id. Pass it, or set it in the "
            "generation_config"
        )
    task = options("task") if task is None else task
    language = options("language") if language is None else language
    forced: list[int | None] = []
    if task is None and language is None:
        forced = _forced_tokens(options)
        if forced[:1] == [no_timestamps]:  # English-only models have no language and no task
            forced = [None, *forced]

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
    """Returns the tokens after the start token from `forced_decoder_ids` of old checkpoints."""
    pairs = options("forced_decoder_ids") or []
    if [position for position, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise UsageError(
            f"generate: the positions in forced_decoder_ids={pairs} must be 1, 2, ... without gaps"
        )
    return [token for _, token in pairs]


def _language_token(name: str, tokens: Mapping[str, int]) -> int:
    """Returns the token ID of a language. `name` is a token, a code or an English name."""
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
    """Returns the tokens `prefix` followed by the prompt of each row, `(batch, length)`."""
    xp: Any = jnp if isinstance(prompt, jax.Array) else np
    prompt = xp.concatenate([xp.broadcast_to(prefix, (rows, len(prefix))), prompt], axis=1)
    return prompt if isinstance(prompt, jax.core.Tracer) else np.asarray(prompt)
