"""Decoding of windows of audio: temperature fallback, skipped silence, and times of tokens.

A window whose tokens are improbable or repetitive is decoded again at the next temperature. The
average log-probability, the probability of silence and the attention weights come from one pass of
the decoder over the generated tokens.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.generation.generate import Programs, get_program, run_traced
from hfseq.generation.request import Request, bucket_length, make_key
from hfseq.nn import sharding
from hfseq_plugins.whisper.alignment import token_times

if TYPE_CHECKING:
    from hfseq.generation.options import Operands

logger = logging.getLogger(__name__)

#: Number of spectrogram frames per position of the encoder's output, and number of seconds per
#: position and per timestamp token.
ENCODER_STRIDE, TIME_PRECISION = 2, 0.02

#: Smallest length of sequences in the pass over generated tokens.
SMALLEST_REVIEW = 64

#: Function that returns the value of a generation option, given its name.
Lookup = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Fallback:
    """The conditions under which a window is decoded again or skipped.

    Attributes:
        temperatures: Temperatures in the order in which they are tried. 0 is greedy search or beam
            search. With `None`, the other generation options determine the search method.
        compression_ratio_threshold: Highest ratio between the size of the tokens and their size
            after compression by zlib. A higher ratio is caused by repetitions.
        logprob_threshold: Lowest average log-probability of the tokens.
        no_speech_threshold: If the probability of silence is higher and the average log-probability
            is below `logprob_threshold`, the window is skipped.
    """

    temperatures: tuple[float | None, ...]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None

    @classmethod
    def from_options(cls, options: Lookup, temperature: Any) -> Fallback:
        """Reads the options of a call.

        Args:
            options: Function that returns a threshold, given the name of its option.
            temperature: The argument of the call. If it is `None`, a list of temperatures in the
                generation configuration applies, but not a single temperature.

        Raises:
            UsageError: A value is invalid, or a threshold requires another option.
        """
        configured = options("temperature")
        if temperature is None and isinstance(configured, (list, tuple)):
            temperature = configured
        temperatures = temperature if isinstance(temperature, (list, tuple)) else (temperature,)
        is_valid = [
            isinstance(value, (int, float)) and value >= 0 and not isinstance(value, bool)
            for value in temperatures
        ]
        if not temperatures or not (temperature is None or all(is_valid)):
            raise UsageError(
                f"generate: temperature={temperature!r} must be a number that is not negative, or "
                "a list of them, such as (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)"
            )
        names = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
        thresholds = {name: options(name) for name in names}
        for name, value in thresholds.items():
            if value is not None and not isinstance(value, (int, float)):
                raise UsageError(f"generate: {name}={value!r} must be a number")
        if thresholds["no_speech_threshold"] is not None:
            if thresholds["logprob_threshold"] is None:
                raise UsageError(
                    f"generate: no_speech_threshold={thresholds['no_speech_threshold']} requires "
                    "logprob_threshold, because only windows with improbable text are skipped. "
                    "Pass logprob_threshold=-1.0, for example"
                )
            if options("no_timestamps_token_id") is None:
                raise UsageError(
                    "generate: no_speech_threshold needs no_timestamps_token_id in the "
                    "generation_config, as in Whisper's checkpoints"
                )
        values = tuple(None if value is None else float(value) for value in temperatures)
        return cls(values, **thresholds)

    @property
    def is_active(self) -> bool:
        """Whether a window can be decoded again or skipped."""
        return len(self.temperatures) > 1 or self.no_speech_threshold is not None

    @property
    def needs_logprobs(self) -> bool:
        """Whether the decisions depend on log-probabilities."""
        return self.is_active and self.logprob_threshold is not None

    def fails(self, window: DecodedWindow) -> bool:
        """Returns whether to decode a window again."""
        if window.is_silent:
            return False
        ratio, threshold = window.compression_ratio, self.compression_ratio_threshold
        return (threshold is not None and ratio > threshold) or self._is_improbable(window)

    def is_silent(self, window: DecodedWindow) -> bool:
        """Returns whether to skip a window."""
        threshold = self.no_speech_threshold
        return (
            threshold is not None
            and self._is_improbable(window)
            and window.no_speech_probability > threshold
        )

    def _is_improbable(self, window: DecodedWindow) -> bool:
        threshold = self.logprob_threshold
        return threshold is not None and window.average_logprob < threshold


@dataclasses.dataclass
class DecodedWindow:
    """The result for one window.

    Attributes:
        tokens: The generated tokens before EOS.
        temperature: The temperature at which they were generated.
        compression_ratio: See :class:`Fallback`.
        average_logprob: Average log-probability of the tokens including EOS, if it is needed.
        no_speech_probability: Probability of silence, if it is needed.
        weights: Attention weights of the alignment heads, if times are requested, `(heads, tokens -
            1, positions)`.
        is_silent: Whether the window is skipped.
    """

    tokens: np.ndarray
    temperature: float | None
    compression_ratio: float
    average_logprob: float = math.nan
    no_speech_probability: float = math.nan
    weights: np.ndarray | None = None
    is_silent: bool = False

    @property
    def supports_conditioning(self) -> bool:
        """Whether the prompt of the next window may contain the text of this window.

        Text that was sampled at a high temperature may not be used.
        """
        return self.temperature is None or self.temperature < 0.5


class WindowDecoder:
    """Decodes batches of windows.

    Args:
        model: The model.
        options: Function that returns the value of a generation option, given its name.
        fallback: The temperatures and thresholds.
        prompt_length: Number of tokens of the prompt from the start token on.
        alignment_heads: Layer and head of each alignment head, if times of tokens are requested.
        batch_size: The largest batch size.
        generate_text: Generates text with the generic `generate`.
        make_request: Returns the request that `generate_text` would run with the same arguments.
        prng_key: The key of random numbers, or a seed.
        params: Parameters of the model.
        extra: Collections to use instead of the model's own.
    """

    def __init__(
        self,
        model: Any,
        options: Lookup,
        fallback: Fallback,
        prompt_length: int,
        alignment_heads: Sequence[Sequence[int]] | None,
        batch_size: int,
        generate_text: Callable[..., Any],
        make_request: Callable[..., Request],
        prng_key: jax.Array | int | None = None,
        params: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        self.model, self.fallback, self.prompt_length = model, fallback, prompt_length
        self.alignment_heads = None if alignment_heads is None else _checked(alignment_heads, model)
        self.batch_size = batch_size
        self.generate_text, self.make_request = generate_text, make_request
        self.key = make_key(prng_key)
        self.params = model.params if params is None else params
        self.extra = extra or model.extra
        eos = options("eos_token_id")
        self.eos_tokens = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        pad = options("pad_token_id")
        self.pad: int = self.eos_tokens[0] if pad is None else pad
        no_timestamps = options("no_timestamps_token_id")
        self.no_speech_token = None if no_timestamps is None else no_timestamps - 1

    def decode(
        self, features: np.ndarray, prompts: np.ndarray, mask: np.ndarray | None, **options: Any
    ) -> list[DecodedWindow]:
        """Decodes windows, and those that fail again at the next temperatures.

        Batch sizes are powers of two, so that few programs are compiled. The same programs decode
        all windows and all temperatures above 0.

        Args:
            features: Spectrograms, `(windows, mels, frames)`.
            prompts: Tokens, `(windows, length)`.
            mask: Mask of the prompts, 0 for padding, or `None` without padding.
            **options: Options of `generate` that limit the length.

        Returns:
            The results of the windows.
        """
        results: dict[int, DecodedWindow] = {}
        remaining = np.arange(len(features))
        self.key, *keys = jax.random.split(self.key, 1 + len(self.fallback.temperatures))
        hidden_states: Any = None
        for temperature, key in zip(self.fallback.temperatures, keys, strict=True):
            count = min(1 << (len(remaining) - 1).bit_length(), self.batch_size)
            rows = np.pad(remaining, (0, count - len(remaining)), mode="edge")
            if hidden_states is None:
                hidden_states = self._encode(features[rows])
            states = hidden_states if len(rows) == len(hidden_states) else hidden_states[rows]
            arguments = {"decoder_input_ids": prompts[rows], **options, "prng_key": key}
            if mask is not None:
                arguments["decoder_attention_mask"] = mask[rows]
            decoded = self._decode_once(states, arguments, temperature)
            # The copies that fill the batch are ignored.
            results.update(zip(remaining.tolist(), decoded, strict=False))
            remaining = np.array(
                [row for row, window in results.items() if self.fallback.fails(window)]
            )
            if not len(remaining):
                break
            logger.debug("%d windows failed at the temperature %s", len(remaining), temperature)
        return [results[row] for row in range(len(features))]

    def times(self, window: DecodedWindow, frames: int) -> np.ndarray | None:
        """Returns the time of each token, in seconds from the start of the window.

        Args:
            window: The result of decoding the window.
            frames: The length of the audio in the window, in frames.

        Returns:
            The times, or `None` if the window was decoded without cross-attention weights.
        """
        if window.weights is None:
            return None
        weights = window.weights[..., : max(1, frames // ENCODER_STRIDE)]
        return token_times(weights, self.model.config.median_filter_width, TIME_PRECISION)

    def before_eos(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens of a row before the EOS token."""
        ends = np.flatnonzero(np.isin(tokens, self.eos_tokens))
        return tokens[: ends[0]] if ends.size else tokens

    def _encode(self, features: np.ndarray) -> jax.Array:
        """Returns the encoder's output, `(windows, positions, hidden)`."""

        def encode(params: Any, extra: Any, features: jax.Array) -> jax.Array:
            return _with_extra(self.model, extra).encode(features, params=params)[0]

        programs = vars(self.model).setdefault("_generation_programs", Programs())
        program = programs.setdefault(("encode", self.model._options), jax.jit(encode))
        return sharding.replicate(program(self.params, self.extra, features))

    def _decode_once(
        self, hidden_states: jax.Array, arguments: dict[str, Any], temperature: float | None
    ) -> list[DecodedWindow]:
        """Decodes a batch at one temperature."""
        arguments = {**arguments, "encoder_outputs": (hidden_states,)}
        arguments |= search_options(temperature)
        if temperature:
            arguments["temperature"] = 1.0  # an argument of the program scales the scores
            sequences = self._sample(self.make_request(**arguments), temperature)
        else:
            sequences = np.asarray(self.generate_text(**arguments).sequences)
        length = arguments["decoder_input_ids"].shape[1]
        windows, ends = [], []
        for row in sequences[:, length:]:
            tokens = self.before_eos(row)
            ends.append(length + min(len(tokens) + 1, len(row)))
            ratio = compression_ratio(row[: len(tokens) + 1], self.model.config.vocab_size)
            windows.append(DecodedWindow(tokens, temperature, ratio))
        if self.fallback.needs_logprobs or self.alignment_heads is not None:
            values = self._review(self.make_request(**arguments), sequences, ends, temperature)
            for row, (window, end) in enumerate(zip(windows, ends, strict=True)):
                if "logprobs" in values:
                    window.average_logprob = float(values["logprobs"][row]) / (end - length)
                    window.no_speech_probability = float(values["no_speech"][row])
                if "weights" in values:
                    window.weights = values["weights"][row][:, length : end - 1]
        for window in windows:
            window.is_silent = self.fallback.is_silent(window)
        return windows

    def _sample(self, request: Request, temperature: float) -> np.ndarray:
        """Samples with a compiled program that receives the temperature as an argument."""
        model, plan = self.model, request.plan

        def run(operands: Operands, temperature: jax.Array) -> jax.Array:
            def scale(input_ids: jax.Array, scores: jax.Array, cur_len: Any) -> jax.Array:
                return scores / temperature

            # Processors of the caller are applied after the others and before the warpers.
            scaled = dataclasses.replace(plan, processors=(*plan.processors, scale))
            return run_traced(model, scaled, operands).sequences  # type: ignore[return-value]

        program = get_program(model, plan, "temperature", lambda: jax.jit(run))
        sequences = sharding.replicate(program(request.operands, np.float32(temperature)))
        return np.asarray(sequences)[:, : request.lengths.stop]

    def _review(
        self,
        request: Request,
        sequences: np.ndarray,
        ends: Sequence[int],
        temperature: float | None,
    ) -> dict[str, np.ndarray]:
        """Runs the decoder once over generated sequences.

        Args:
            request: The request that generated them.
            sequences: Prompts and generated tokens, `(windows, length)`.
            ends: Position after the last token of each sequence, including EOS.
            temperature: The temperature at which the tokens were generated.

        Returns:
            A dict of "logprobs", the sum of the log-probabilities of the generated tokens,
            `(windows,)`; "no_speech", the probability of silence, `(windows,)`; and "weights", the
            attention weights of the alignment heads, `(windows, heads, length, positions)`. It
            contains only the values that are needed.
        """
        plan, prompt_length, heads = request.plan, self.prompt_length, self.alignment_heads
        has_logprobs, no_speech_token = self.fallback.needs_logprobs, self.no_speech_token

        def run(
            operands: Operands,
            sequences: jax.Array,
            mask: jax.Array,
            ends: jax.Array,
            temperature: jax.Array,
        ) -> dict[str, jax.Array]:
            model = _with_extra(self.model, operands.extra)
            output = model.decode(
                sequences,
                operands.encoder_outputs,
                decoder_attention_mask=mask,
                decoder_position_ids=jnp.maximum(mask.cumsum(-1) - 1, 0),
                output_attentions=heads is not None,
                params=operands.params,
                return_dict=True,
            )
            values = {}
            if heads is not None:
                layers = output.cross_attentions
                values["weights"] = jnp.stack([layers[i][:, head] for i, head in heads], axis=1)
            if not has_logprobs:
                return values
            start = jnp.take(output.logits, operands.prompt_length - prompt_length, axis=1)
            values["no_speech"] = jnp.zeros(len(sequences))
            if no_speech_token is not None:
                probabilities = jax.nn.softmax(start.astype(jnp.float32))
                values["no_speech"] = probabilities[:, no_speech_token]
            processors = plan.options.processors(operands, plan.processors)

            def add(position: jax.Array, total: jax.Array) -> jax.Array:
                scores = jnp.take(output.logits, position - 1, axis=1).astype(jnp.float32)
                if plan.options.num_beams > 1:
                    scores = jax.nn.log_softmax(scores)
                columns = jnp.arange(sequences.shape[1])
                tokens = jnp.where(columns < position, sequences, plan.pad)
                for processor in processors:
                    scores = processor(tokens, scores, position)
                # Warpers select tokens at the temperature. Probabilities are those at 1.
                scores = scores / temperature
                for warper in plan.options.warpers():
                    scores = warper(tokens, scores, position)
                logprobs = jax.nn.log_softmax(scores * temperature)
                column = jnp.take(sequences, position, axis=1)
                token_logprobs = jnp.take_along_axis(logprobs, column[:, None], axis=1)[:, 0]
                return total + jnp.where(position < ends, token_logprobs, 0.0)

            zeros = jnp.zeros(len(sequences))
            first = jnp.asarray(operands.prompt_length, jnp.int32)
            values["logprobs"] = jax.lax.fori_loop(first, ends.max(), add, zeros)
            return values

        width = bucket_length(max(ends), self.model.position_limit(), SMALLEST_REVIEW)
        tokens = np.full((len(sequences), width), self.pad, np.int32)
        tokens[:, : sequences.shape[1]] = sequences[:, :width]
        mask = np.ones_like(tokens)
        if request.operands.mask is not None:
            prompt_mask = np.asarray(request.operands.mask)[:, : request.lengths.prompt]
            mask[:, : request.lengths.prompt] = prompt_mask
        name = f"review {prompt_length} {has_logprobs} {no_speech_token} {heads}"
        program = get_program(self.model, plan, name, lambda: jax.jit(run))
        scale = np.float32(temperature or 1.0)
        values = program(request.operands, tokens, mask, np.asarray(ends, np.int32), scale)
        return {name: np.asarray(value) for name, value in sharding.replicate(values).items()}


def search_options(temperature: float | None) -> dict[str, Any]:
    """Returns the options of `generate` for a temperature, which selects the method of search."""
    if temperature is None:
        return {}
    if temperature == 0:
        return {"do_sample": False, "temperature": 1.0}
    return {"do_sample": True, "temperature": temperature, "num_beams": 1}


def compression_ratio(tokens: np.ndarray, vocab_size: int) -> float:
    """Returns the size of tokens in bytes, divided by their size after compression by zlib."""
    bytes_per_token = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(int(token).to_bytes(bytes_per_token, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def _checked(heads: Sequence[Sequence[int]], model: Any) -> tuple[tuple[int, int], ...]:
    """Checks alignment heads and returns them as tuples, which are hashable."""
    layers, per_layer = model.config.decoder_layers, model.config.decoder_attention_heads
    for head in heads:
        if len(head) != 2 or not (0 <= head[0] < layers and 0 <= head[1] < per_layer):
            raise UsageError(
                f"generate: alignment_heads contains {list(head)}, but the decoder has {layers} "
                f"layers with {per_layer} heads each. Use the generation_config of the checkpoint"
            )
    return tuple((int(layer), int(head)) for layer, head in heads)


def _with_extra(model: Any, extra: Mapping[str, Any]) -> Any:
    """Returns a copy of the model that uses the collections `extra`.

    The collections are the arguments of a compiled program. If there are none, the model itself is
    returned.
    """
    if not extra:
        return model
    model = copy.copy(model)
    model.extra = extra
    return model
