"""Converts the arguments of ``generate`` to a plan and operands.

The plan is the static part of the compiled program, and the operands are its arrays. This module
resolves options, reads prompts and encoder inputs, pads them to a few lengths (buckets) for which
programs are compiled, and collects the stopping criteria.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq import plugins
from hfseq.errors import UsageError, did_you_mean, first_line
from hfseq.generation.logits_process import Length
from hfseq.generation.options import (
    SLOWER_ONLY,
    UNSUPPORTED_IF_REQUESTED,
    UNSUPPORTED_OPTIONS,
    Criterion,
    Operands,
    Options,
    Plan,
    Processor,
    resolve_options,
)
from hfseq.generation.search import GenerativeModel
from hfseq.nn.inputs import as_array
from hfseq.nn.sharding import batch_axes, data_shards, is_distributed
from hfseq.plugins.registry import target_name

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
Array = np.ndarray | jax.Array
TokenRows = Array | Sequence[Sequence[int]]

SMALLEST_BUCKET = 16

#: The smallest bucket of the encoder's input. It is smaller than ``SMALLEST_BUCKET``, because an
#: encoder computes the padding too. For short texts, computing more padding would cost more than
#: compiling another program.
SMALLEST_ENCODER_BUCKET = 8

#: Arguments that are neither options of GenerationConfig nor inputs of the model.
EXTRA_ARGUMENTS = (
    *("stopping_criteria", "streamer", "tokenizer", "stop_token_sequences"),
    *("forced_decoder_ids", "length_penalty_type", "compact_finished", "extra"),
    "timestamp_rules",
)

#: Arguments of PyTorch's ``generate`` that have no counterpart, and what to do instead.
UNSUPPORTED_ARGUMENTS = {
    "assistant_model": SLOWER_ONLY,
    "prefix_allowed_tokens_fn": "use a logits_processor, which is traced with the loop",
    "inputs_embeds": "pass input_ids",
    "inputs": "pass it as the first argument, or under the name of the model's input",
    "negative_prompt_ids": "pass a logits_processor that calls the model",
    "negative_prompt_attention_mask": "pass a logits_processor that calls the model",
    "synced_gpus": "leave it out; sharded models need no such flag in JAX",
    "past_key_values": "pass the whole prompt; generate creates its cache",
    "custom_generate": "call your function directly",
    "seed": "pass it as prng_key",
    "rng": "pass it as prng_key",
}

#: Arguments of a model's call that ``generate`` sets.
_ARGUMENTS_SET_BY_GENERATE = {
    "self",
    "params",
    "train",
    "dropout_rng",
    "return_dict",
    "output_attentions",
    "extra",
    "output_hidden_states",
    "past_key_values",
    "input_ids",
    "kwargs",
    "inputs",
    "args",
    "max_length",
}

#: Attributes of model configurations that have the same name as a generation option but do not
#: change generation.
_NON_GENERATION_ATTRIBUTES = (
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict_in_generate",
    "transformers_version",
)


class Streamer(Protocol):
    """A receiver of tokens as they are generated, such as Transformers' ``TextStreamer``."""

    def put(self, value: np.ndarray) -> None:
        """Receives the prompt, `(rows, length)`, then the tokens of each step, `(rows,)`."""

    def end(self) -> None:
        """Called after the last token."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Numbers of tokens. All of them include the prompt.

    Attributes:
        prompt: Length of the prompt.
        stop: Maximum length of the output.
        minimum: Length before which no end token is generated.
        prefill: Length to which the prompt is padded.
        buffer: Length of the token buffer.
    """

    prompt: int
    stop: int
    minimum: int
    prefill: int
    buffer: int


class Request(NamedTuple):
    """The validated arguments of one call of ``generate``.

    Attributes:
        plan: The static part of the program.
        operands: The arrays of the program.
        lengths: The actual lengths, and the lengths with padding to buckets.
        traced: Whether any argument is a tracer, so that the whole run is traced.
        streamer: The object that receives the tokens, if any.
        compact: Whether finished rows are removed from the batch.
    """

    plan: Plan
    operands: Operands
    lengths: Lengths
    traced: bool
    streamer: Streamer | None
    compact: bool


class _ModelInputs(NamedTuple):
    """The prompt and the encoder's inputs.

    ``source`` is the value that the user passed as ``input_ids``.
    """

    prompt: Any
    mask: Any
    source: TokenRows | None
    encoder: dict[str, Any] = {}  # noqa: RUF012
    encoder_outputs: Any = None
    encoder_length: int = 0


def make_request(
    model: GenerativeModel,
    input_ids: TokenRows | None,
    generation_config: GenerationConfig | None = None,
    prng_key: jax.Array | int | None = None,
    params: Mapping[str, Any] | None = None,
    logits_processor: Sequence[Processor] | Processor | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Request:
    """Validates the arguments of ``generate`` and pads the inputs to buckets.

    Raises:
        TypeError: The class has no head that can generate.
        UsageError: The options or inputs are invalid.
    """
    check_can_generate(model)
    config, remaining, default_length = merge_options(model, generation_config, dict(kwargs or {}))
    extras = {name: remaining.pop(name) for name in EXTRA_ARGUMENTS if name in remaining}
    inputs = {name: value for name, value in remaining.items() if value is not None}
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if input_ids is None and encoder_decoder:
        input_ids = inputs.pop(model.main_input_name, None)
    check_arguments(model, inputs, encoder_decoder)
    options = resolve_options(config, extras)
    options.check(model.vocab_size("decoder_input_ids"))
    criteria = stop_criteria(config.stop_strings, extras)
    processors = _check_processors(logits_processor)

    traced = is_traced(input_ids, inputs) or any(
        isinstance(leaf, jax.core.Tracer)
        for leaf in jax.tree.leaves((params, prng_key, extras.get("extra")))
    )
    read_inputs = _read_encoder_decoder_inputs if encoder_decoder else _read_decoder_inputs
    model_inputs = read_inputs(model, config, options, input_ids, inputs, traced)
    lengths = resolve_lengths(
        config,
        model_inputs.prompt.shape[1],
        model.position_limit(),
        recommended=model.max_length(),
        default=default_length,
        traced=traced,
        input_name="decoder_input_ids" if encoder_decoder else "input_ids",
    )
    model.check_generation_lengths(lengths.prompt, lengths.stop)
    plan = Plan(
        options,
        lengths.buffer,
        _recorded_steps(options, lengths, traced),
        encoder_decoder,
        processors,
        criteria,
    )
    _check_padding_token(plan)

    # Lengths are arguments of the compiled program, so that one program serves a whole bucket. If
    # the caller traces the program, they are constants.
    number: Callable[[int], Length] = int
    if not traced:
        number = np.int32  # type: ignore[assignment]
        model_inputs = _fit_to_bucket(model_inputs, lengths.prefill, params or model.params)
    operands = Operands(
        params=params or model.params,
        prompt=model_inputs.prompt,
        mask=model_inputs.mask,
        key=make_key(prng_key),
        prompt_length=number(lengths.prompt),
        stop_length=number(lengths.stop),
        min_length=number(lengths.minimum),
        encoder=model_inputs.encoder,
        encoder_outputs=model_inputs.encoder_outputs,
        encoder_length=number(model_inputs.encoder_length),
        model_kwargs=inputs,
        extra=extras.get("extra") or model.extra,
    )
    compact = bool(extras.get("compact_finished"))
    return Request(plan, operands, lengths, traced, extras.get("streamer"), compact)


def _check_processors(
    logits_processor: Sequence[Processor] | Processor | None,
) -> tuple[Processor, ...]:
    processors = _as_tuple(logits_processor)
    for processor in processors:
        if not callable(processor):
            raise UsageError(
                "generate: logits_processor must be a list of callables, but it contains "
                f"{processor!r}"
            )
    return processors


def _recorded_steps(options: Options, lengths: Lengths, traced: bool) -> int:
    """Returns the number of steps whose scores are recorded."""
    if not (options.output_scores or options.output_logits):
        return 0
    new_tokens = lengths.stop - lengths.prompt
    return new_tokens if traced else bucket_length(new_tokens)


def _check_padding_token(plan: Plan) -> None:
    stops_early = plan.criteria or plan.options.stop_token_sequences
    if stops_early and plan.options.pad_token_id is None:
        raise UsageError(
            "generate: sequences that stop early are padded with pad_token_id, but neither "
            "pad_token_id nor eos_token_id is set: pass pad_token_id=..."
        )


def _fit_to_bucket(inputs: _ModelInputs, width: int, params: Any) -> _ModelInputs:
    """Pads the prompt to ``width`` and shards the batch axis of all inputs.

    The batch axis is sharded like that of the array that the caller passed. If the parameters are
    distributed over several processes, it is sharded over the mesh of the parameters instead. Each
    process must then pass the whole batch.
    """
    mask = None if inputs.mask is None else pad_right(inputs.mask, width, 1)
    arrays = pad_right(inputs.prompt, width), mask, inputs.encoder
    sharding = getattr(inputs.source, "sharding", None)
    if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
        rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        arrays = jax.tree.map(lambda array: jax.device_put(array, rows), arrays)
    leaf = next(filter(is_distributed, jax.tree.leaves(params)), None)
    if leaf is not None:
        mesh = leaf.sharding.mesh
        divides = inputs.prompt.shape[0] % data_shards(mesh) == 0
        rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh) if divides else None))
        arrays = jax.tree.map(
            lambda array: jax.make_array_from_callback(
                array.shape, rows, np.asarray(array).__getitem__
            ),
            arrays,
        )
    prompt, mask, encoder = arrays
    return inputs._replace(prompt=prompt, mask=mask, encoder=encoder)


def is_traced(*trees: Any) -> bool:
    """Returns whether any value cannot be read, because it is traced or partly on other hosts."""
    return any(
        isinstance(leaf, jax.core.Tracer)
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
        for leaf in jax.tree.leaves(trees)
    )


def make_key(key: jax.Array | int | None) -> jax.Array:
    """Returns a PRNG key from a key, a seed, or `None` (seed 0)."""
    if key is None:
        return jax.random.PRNGKey(0)
    is_key = getattr(key, "ndim", 0) > 0 or jnp.issubdtype(
        getattr(key, "dtype", jnp.int32), jax.dtypes.prng_key
    )
    if hasattr(key, "__index__") and not is_key:
        return jax.random.PRNGKey(key)
    return key  # type: ignore[return-value]


def _as_tuple(values: Sequence[T] | T | None) -> tuple[T, ...]:
    if values is None:
        return ()
    return tuple(values) if isinstance(values, Sequence) else (values,)


# -- options and arguments


def merge_options(
    model: GenerativeModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any], bool]:
    """Merges the sources of generation options.

    In the order of precedence, these are ``kwargs``, ``generation_config``, the model's generation
    configuration, and the defaults of Transformers. If the model's generation configuration was
    derived from ``model.config``, generation options that are changed in ``model.config`` after
    loading are used too, as in Transformers 4.

    Returns:
        A complete GenerationConfig, the keyword arguments that are not options, and whether
        ``max_length`` is the default.

    Raises:
        UsageError: An option is not supported.
    """
    from transformers import GenerationConfig

    model_config = model.generation_config or GenerationConfig()
    is_derived = generation_config is None and getattr(model_config, "_from_model_config", False)
    if is_derived and getattr(model_config, "_original_object_hash", None) == hash(model_config):
        edits = {
            name: value
            for name, old_value in model.original_generation_values.items()
            if name not in _NON_GENERATION_ATTRIBUTES
            if (value := getattr(model.config, name, old_value)) != old_value
            if value is not None or name.endswith("token_id")
        }
        if edits:
            logger.warning(
                "You have modified the pretrained model configuration to control generation (%s). "
                "This is a deprecated strategy: change model.generation_config instead.",
                ", ".join(edits),
            )
            model_config = copy.deepcopy(model_config)
            model_config.update(**edits)
            model_config._original_object_hash = hash(model_config)
            model.generation_config = model_config
            model.original_generation_values |= edits
    config = GenerationConfig() if generation_config is None else copy.deepcopy(generation_config)
    explicit = {name for name, value in vars(config).items() if value is not None} | set(kwargs)
    config.update(**model_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    default_length = config.max_length is None and kwargs.get("max_length") is None
    defaults = GenerationConfig._get_default_generation_params()
    config.update(**defaults, defaults_only=True)
    try:
        remaining = config.update(**kwargs)
    except ValueError as error:  # options that contradict each other
        raise UsageError(f"generate: {first_line(error)}") from error
    for name in ("max_length", "min_length"):
        if getattr(config, name) is None:
            setattr(config, name, defaults[name])
    requested = {name: rule for name, rule in UNSUPPORTED_IF_REQUESTED.items() if name in explicit}
    problems = [
        f"{name}={getattr(config, name)!r} is not supported: {hint}"
        for name, (allowed, hint) in {**UNSUPPORTED_OPTIONS, **requested}.items()
        if hasattr(config, name) and getattr(config, name) not in allowed
    ]
    if problems:
        raise UsageError("generate: " + "; ".join(problems))
    return config, remaining, default_length


def end_token_ids(model: Any, options: Mapping[str, Any]) -> list[int]:
    """Returns the end tokens that ``generate`` uses with these options."""
    kwargs = dict(options)
    config, _, _ = merge_options(model, kwargs.pop("generation_config", None), kwargs)
    return np.ravel([] if config.eos_token_id is None else config.eos_token_id).tolist()


def until_end(ids: np.ndarray, end_ids: Sequence[int]) -> np.ndarray:
    """Returns the tokens before the first end token."""
    end_positions = np.flatnonzero(np.isin(ids, end_ids))
    return ids[: end_positions[0]] if len(end_positions) else ids


def check_can_generate(model: GenerativeModel) -> None:
    """Raises a TypeError for a class without a head, naming the classes that have one."""
    if model.can_generate():
        return
    architectures, model_type = plugins.load().architectures, model.config.model_type
    heads = architectures.get(model_type).heads if model_type in architectures else {}
    tasks = ("ForCausalLM", "ForSeq2SeqLM", "ForSpeechSeq2Seq", "ForVision2Seq")
    names = sorted({target_name(heads[task]) for task in tasks if task in heads})
    hint = f" Please use one of the following classes instead: {', '.join(names)}" if names else ""
    raise TypeError(
        f"The current model class ({type(model).__name__}) is not compatible with `.generate()`, "
        f"as it doesn't have a language model head.{hint}"
    )


def check_arguments(
    model: GenerativeModel, inputs: Mapping[str, Any], encoder_decoder: bool
) -> None:
    """Raises a UsageError that lists the arguments that are neither options nor model inputs."""
    refused = [
        f"{name}: {UNSUPPORTED_ARGUMENTS[name]}" for name in inputs if name in UNSUPPORTED_ARGUMENTS
    ]
    if refused:
        raise UsageError(f"generate does not support {'; '.join(refused)}")
    methods = [model.prepare_inputs_for_generation, *([model.encode] if encoder_decoder else [])]
    accepted = {
        p.name
        for method in methods
        for p in inspect.signature(method).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    } - _ARGUMENTS_SET_BY_GENERATE
    if encoder_decoder:
        accepted |= {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs"}
    unknown = [name for name in inputs if name not in accepted]
    if unknown:
        from transformers import GenerationConfig

        options = [*accepted, *vars(GenerationConfig())]
        raise UsageError(
            f"The following `model_kwargs` are not used by the model: {unknown} (note: typos in "
            "the generate arguments will also show up in this list)"
            f"{did_you_mean(unknown[0], options)}"
        )


# -- prompts and encoder inputs


def _read_decoder_inputs(
    model: GenerativeModel,
    config: GenerationConfig,
    options: Options,
    ids: TokenRows | None,
    inputs: dict[str, Any],
    traced: bool,
) -> _ModelInputs:
    """Reads the prompt of a decoder. An empty prompt becomes the BOS token."""
    vocab_size, mask = model.vocab_size(), inputs.pop("attention_mask", None)
    prompt = None if ids is None else as_ids("input_ids", ids, traced, vocab_size)
    if prompt is None or not (prompt.shape[0] and prompt.shape[1]):
        rows = 1 if prompt is None else prompt.shape[0]
        if config.bos_token_id is None or not rows:
            raise UsageError(
                "generate: input_ids contains no tokens, and the model has no bos_token_id to "
                "start from: pass a prompt of at least one token, or bos_token_id=..."
            )
        bos = np.full((rows, 1), config.bos_token_id, np.int32)
        prompt = as_ids("input_ids", bos, traced, vocab_size)
    prompt, mask = _resolve_prompt_mask(prompt, mask, options, traced)
    return _ModelInputs(prompt, mask, ids)


def _resolve_prompt_mask(
    prompt: Array, mask: TokenRows | None, options: Options, traced: bool
) -> tuple[Array, Array | None]:
    """Returns the left-padded prompt and its mask. The mask is `None` if every token is visible."""
    if mask is not None:
        return pad_left(prompt, as_mask("attention_mask", mask, prompt, traced))
    if options.pad_token_id is not None and options.pad_token_id not in options.eos_token_id:
        # As in PyTorch, these tokens are masked. PyTorch does not move them to the left, however.
        return pad_left(prompt, (prompt != options.pad_token_id).astype(np.int32))
    if traced:
        return prompt, None
    return prompt, np.ones_like(prompt)  # batches with and without padding share a program


def _read_encoder_decoder_inputs(
    model: GenerativeModel,
    config: GenerationConfig,
    options: Options,
    ids: TokenRows | None,
    inputs: dict[str, Any],
    traced: bool,
) -> _ModelInputs:
    """Reads the encoder's input and the start of the decoder's output."""
    outputs, mask = inputs.pop("encoder_outputs", None), inputs.pop("attention_mask", None)
    encoder, length, name = {}, 0, model.main_input_name
    if ids is None and outputs is None:
        raise UsageError(f"generate: an encoder-decoder requires {name} (or encoder_outputs)")
    if ids is not None and name != "input_ids":
        ids = as_media(name, ids, options, traced)
        encoder = _without_none({name: ids, "attention_mask": mask, **_pop_encoder_inputs(inputs)})
    elif ids is not None:
        ids = as_ids("input_ids", ids, traced, model.vocab_size())
        length = ids.shape[1]
        # If the caller passed encoder outputs, the mask must keep their length.
        may_pad = not traced and outputs is None
        encoder = _read_source_tokens(model, ids, mask, inputs, traced, may_pad)
    elif mask is not None:
        encoder = {"attention_mask": jnp.asarray(mask, jnp.int32)}
    if isinstance(outputs, (tuple, list)):
        outputs = tuple(outputs)
    batch = ids.shape[0] if ids is not None else outputs[0].shape[0]
    prompt, prompt_mask = _read_decoder_prompt(model, config, batch, inputs, traced)
    return _ModelInputs(prompt, prompt_mask, ids, encoder, outputs, length)


def _read_source_tokens(
    model: GenerativeModel,
    ids: Array,
    mask: TokenRows | None,
    inputs: dict[str, Any],
    traced: bool,
    may_pad: bool,
) -> dict[str, Any]:
    """Returns the arguments of ``encode`` for token IDs, padded to a bucket if possible."""
    if not ids.size:
        raise UsageError("generate: input_ids contains no tokens: pass at least one token per row")
    if mask is not None:
        mask = as_mask("attention_mask", mask, ids, traced)
    other_inputs = _pop_encoder_inputs(inputs)
    length, limit = ids.shape[1], model.max_source_length()
    if limit is not None and length > limit:
        raise UsageError(
            f"generate: input_ids has {length} tokens, but the model has only {limit} "
            "positions: shorten the input (for example with tokenizer(..., truncation=True, "
            "max_length=...))"
        )
    # Other inputs have unknown shapes and cannot be padded, so nothing is padded.
    if other_inputs or not may_pad:
        return _without_none({"input_ids": ids, "attention_mask": mask, **other_inputs})
    width = bucket_length(length, limit, SMALLEST_ENCODER_BUCKET)
    mask = np.ones_like(ids) if mask is None else mask
    return {"input_ids": pad_right(ids, width), "attention_mask": pad_right(mask, width)}


def _decoder_start_token_id(model: GenerativeModel, config: GenerationConfig) -> int | None:
    """Returns the first decoder token, or `None` if it is not defined.

    The token is read from the generation configuration, or if it is missing there, from the model's
    configuration, which training uses too. If neither of them contains the token, the BOS token is
    used, as in PyTorch.
    """
    values = (
        config.decoder_start_token_id,
        getattr(model.config, "decoder_start_token_id", None),
        config.bos_token_id,
    )
    return next((value for value in values if value is not None), None)


def _read_decoder_prompt(
    model: GenerativeModel,
    config: GenerationConfig,
    batch: int,
    inputs: dict[str, Any],
    traced: bool,
) -> tuple[Array, Array | None]:
    """Returns the first tokens of the decoder, left-padded, and their mask."""
    ids = inputs.pop("decoder_input_ids", None)
    mask = inputs.pop("decoder_attention_mask", None)
    if ids is not None:
        vocab_size = model.vocab_size("decoder_input_ids")
        prompt = as_ids("decoder_input_ids", ids, is_traced(ids), vocab_size)
        if prompt.shape[0] != batch or not prompt.shape[1]:
            raise UsageError(
                f"generate: decoder_input_ids has the shape {tuple(prompt.shape)}, but the batch "
                f"size of the input is {batch}: pass an array with this batch size and at least "
                "one token per sequence"
            )
    elif (start_token_id := _decoder_start_token_id(model, config)) is None:
        raise UsageError(
            "`decoder_start_token_id` has to be defined for encoder-decoder generation: pass "
            "decoder_start_token_id=... (or decoder_input_ids), or set it once in "
            "model.generation_config"
        )
    else:
        prompt = np.full((batch, 1), start_token_id, np.int32)
    if mask is None:
        return prompt, None
    return pad_left(prompt, as_mask("decoder_attention_mask", mask, prompt, traced))


def _pop_encoder_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Removes the encoder's arguments from ``inputs`` and returns them."""
    return {name: inputs.pop(name) for name in [*inputs] if not name.startswith("decoder_")}


def _without_none(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def as_ids(name: str, ids: TokenRows, traced: bool, vocab_size: int | None) -> Array:
    """Returns token IDs as int32, `(batch, length)`.

    Raises:
        UsageError: The value is not a batch of integers, or an ID is outside of the vocabulary. JAX
            would not raise an error for such an ID, but compute NaN.
    """
    array: Any = as_array(name, ids)
    if not hasattr(array, "ndim") or array.ndim != 2:
        description = (
            f"the shape {tuple(array.shape)}" if hasattr(array, "shape") else f"type {type(ids)}"
        )
        raise UsageError(
            f"generate: {name} must have the shape (batch, length), but has {description}; add a "
            "batch axis to a single prompt: ids[None]"
        )
    array = (array if traced else np.asarray(array)).astype(np.int32)
    if vocab_size and isinstance(array, np.ndarray) and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"generate: {name} contains {low if low < 0 else high}, which is outside of the "
                f"model's vocabulary of {vocab_size}: use the tokenizer of this model"
            )
    return array


def as_media(name: str, values: Any, options: Options, traced: bool) -> Array:
    """Returns audio or images as floats, with the batch as the first axis.

    Audio and images are not padded to buckets, so one program is compiled per shape.

    Raises:
        UsageError: The value is not a batch, or an option is set that requires tokens as input.
    """
    array: Any = as_array(name, values)
    array = array if traced else np.asarray(array)
    if array.ndim < 2 or not array.size:
        raise UsageError(
            f"generate: {name} must be a non-empty batch of examples, but has the shape "
            f"{tuple(array.shape)}; add a batch axis to a single example: {name}[None]"
        )
    if options.encoder_repetition_penalty or options.encoder_no_repeat_ngram_size:
        raise UsageError(
            "generate: encoder_repetition_penalty and encoder_no_repeat_ngram_size compare with "
            f"input tokens, but the input of this model is {name}: leave these options out"
        )
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(np.float32)


def as_mask(name: str, mask: TokenRows, ids: Array, traced: bool) -> Array:
    """Returns an attention mask as int32 with the shape of ``ids``.

    Args:
        name: Name of the argument, for messages.
        mask: Integers, booleans or floats. Non-zero values are visible.
        ids: The tokens that the mask belongs to.
        traced: Whether the values cannot be read, because they are traced or on other hosts.

    Raises:
        UsageError: The shapes differ, or a row has no visible token.
    """
    array = as_array(name, mask)
    if tuple(array.shape) != tuple(ids.shape):
        raise UsageError(
            f"generate: {name} has the shape {tuple(array.shape)}, but the tokens have the shape "
            f"{tuple(ids.shape)}: pass the mask that the tokenizer returned with the tokens"
        )
    if traced:
        return (jnp.asarray(array) != 0).astype(jnp.int32)
    visible = (np.asarray(array) != 0).astype(np.int32)
    empty = np.flatnonzero(visible.sum(-1) == 0)
    if visible.size and empty.size:
        raise UsageError(
            f"generate: {name} hides every token of row {empty[0]}: a prompt needs at least one "
            "visible token"
        )
    return visible


def pad_left(ids: Array, mask: Array) -> tuple[Array, Array]:
    """Moves padding from the right of each row to the left, so that new tokens can follow."""
    numpy = isinstance(ids, np.ndarray) and isinstance(mask, np.ndarray)
    xp: Any = np if numpy else jnp
    trailing = xp.argmax(mask[:, ::-1] != 0, axis=1)
    if numpy and not trailing.any():
        return ids, mask
    indices = (xp.arange(ids.shape[1])[None] - trailing[:, None]) % ids.shape[1]
    return xp.take_along_axis(ids, indices, axis=1), xp.take_along_axis(mask, indices, axis=1)


def pad_right(ids: Array, width: int, value: int = 0) -> np.ndarray:
    """Pads rows on the right to ``width``. The default, token 0, exists in every vocabulary."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=value)


# -- lengths


def bucket_length(length: int, limit: int | None = None, smallest: int = SMALLEST_BUCKET) -> int:
    """Returns the bucket for ``length``: 1, 16, 24, 32, 48, 64, 96 and so on.

    Above 1, buckets are powers of two, or one and a half times a power of two.

    Args:
        length: Number of tokens.
        limit: The model's maximum number of positions. The bucket does not exceed it.
        smallest: The smallest bucket above 1.
    """
    size = 1 if length <= 1 else smallest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else max(min(size, limit), length)


def text_width(length: int, limit: int | None = None) -> int:
    """Returns the length to which texts are padded in a forward pass: 8, 16, ..., 64, 80, 96, ....

    Up to 64, the lengths are multiples of 8. Above 64, there are four lengths between a power of
    two and the next one. From 32 on, at most a fifth of the length is padding. There are more
    lengths than in :func:`bucket_length`, because programs without a loop compile quickly.

    Args:
        length: Number of tokens of the longest text.
        limit: The model's maximum number of positions. The result does not exceed it.
    """
    step = max(8, (1 << max(length - 1, 1).bit_length() - 1) // 4)
    size = -(-length // step) * step
    return size if limit is None else max(min(size, limit), length)


@functools.cache
def _warn_about_length(recommended: int) -> None:
    logger.warning(
        "generate: the sequence may become longer than %d tokens, the maximum length in the "
        "model's configuration (max_position_embeddings and rotary scaling). The quality may "
        "decrease",
        recommended,
    )


def resolve_lengths(
    config: GenerationConfig,
    prompt: int,
    limit: int | None,
    *,
    recommended: int | None,
    default: bool,
    traced: bool,
    input_name: str,
) -> Lengths:
    """Applies ``max_length``, ``max_new_tokens``, ``min_length`` and ``min_new_tokens``.

    Args:
        config: A complete GenerationConfig.
        prompt: Length of the prompt.
        limit: The model's number of position embeddings, or `None` if it has none.
        recommended: The maximum length in the model's configuration, or `None`. Longer sequences
            cause a warning.
        default: Whether ``max_length`` is a default that the user did not set.
        traced: Whether the caller compiles the program, so that buckets are not needed.
        input_name: Name of the prompt argument, for messages.

    Raises:
        UsageError: The lengths are contradictory or exceed the model's number of positions.
    """
    if limit is not None and prompt > limit:
        raise UsageError(
            f"generate: {input_name} has {prompt} tokens, but the model has only {limit} "
            "positions: shorten the prompt (for example with tokenizer(..., truncation=True, "
            "max_length=...))"
        )
    new, stop = config.max_new_tokens, config.max_length
    if new is None and default:
        logger.warning(
            "Using the model-agnostic default `max_length` (=%s) to control the generation length. "
            "We recommend setting `max_new_tokens`.",
            stop,
        )
        stop = stop if recommended is None else min(stop, recommended)
    elif new is not None:
        if not default:
            logger.warning(
                "Both `max_new_tokens` (=%s) and `max_length` (=%s) have been set: "
                "`max_new_tokens` takes precedence.",
                new,
                stop,
            )
        stop = prompt + new
    if stop <= prompt:
        raise UsageError(
            f"generate: max_length={stop} does not exceed the {prompt} tokens of {input_name}. "
            "max_length includes the prompt: pass max_new_tokens instead"
        )
    if limit is not None and stop > limit:
        raise UsageError(
            f"generate: {input_name} has {prompt} tokens and up to {stop - prompt} new tokens are "
            f"requested (max_length or max_new_tokens), but the model has only {limit} positions: "
            f"request at most {limit - prompt} new tokens"
        )
    if limit is None and recommended is not None and stop > recommended:
        _warn_about_length(recommended)
    min_new = config.min_new_tokens
    if config.min_length < 0 or (min_new or 0) < 0:
        raise UsageError(
            f"generate: min_length={config.min_length} and min_new_tokens={min_new} "
            "must not be negative"
        )
    minimum = config.min_length if min_new is None else prompt + min_new
    if minimum > stop:
        name = f"min_length={minimum}" if min_new is None else f"min_new_tokens={min_new}"
        raise UsageError(
            f"generate: {name} cannot be reached: the prompt has {prompt} tokens and max_length "
            f"is {stop}; lower it, or raise max_length or max_new_tokens"
        )
    if traced:
        return Lengths(prompt, stop, minimum, prompt, stop)
    prefill = bucket_length(prompt, limit)
    # Neither length depends on the length of the prompt within its bucket, so that all prompts of a
    # bucket use the same program.
    needed = stop if new is None else prefill + new
    buffer = max(bucket_length(needed, limit) if limit is None or needed <= limit else limit, stop)
    return Lengths(prompt, stop, minimum, min(prefill, buffer), buffer)


# -- stopping


def stop_criteria(
    stop_strings: str | Sequence[str] | None, extras: Mapping[str, Any]
) -> tuple[Criterion, ...]:
    """Returns the stopping criteria that the user passed, and one for ``stop_strings``.

    Raises:
        UsageError: A criterion is not a traceable function, ``stop_strings`` is invalid, or the
            tokenizer is missing.
    """
    criteria: tuple[Criterion, ...] = _as_tuple(extras.get("stopping_criteria"))
    for criterion in criteria:
        if not callable(criterion) or type(criterion).__module__.startswith("transformers."):
            raise UsageError(
                f"generate: stopping_criteria contains {criterion!r}, but must contain traceable "
                "functions (input_ids, cur_len) -> bool array (rows,)"
            )
    if stop_strings is None:
        return criteria
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise UsageError(
            f"generate: stop_strings={stop_strings!r} must be a non-empty string, or a list of "
            "non-empty strings"
        )
    tokenizer = extras.get("tokenizer")
    if tokenizer is None:
        raise UsageError(
            f"generate: stop_strings={stop_strings!r} requires the tokenizer: pass tokenizer=..., "
            "or pass the tokens as stop_token_sequences=[[...]]"
        )
    return (*criteria, stop_strings_criterion(tokenizer, strings))


@functools.lru_cache(maxsize=16)
def stop_strings_criterion(
    tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]
) -> StopStrings:
    """Returns the stopping criterion for ``strings``.

    Equal arguments return the same object, so that compiled programs can be reused.
    """
    return StopStrings(token_texts(tokenizer), strings)


@functools.lru_cache(maxsize=4)
def token_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Returns the text of every token, as it appears after another token.

    Special tokens have an empty text.
    """
    prefix, special = tokenizer.encode("a", add_special_tokens=False), {*tokenizer.all_special_ids}
    start, options = len(tokenizer.decode(prefix)), {"clean_up_tokenization_spaces": False}
    return tuple(
        "" if i in special else str(tokenizer.decode([*prefix, i], **options))[start:]
        for i in range(len(tokenizer))
    )


class StopStrings:
    """A stopping criterion that is true for rows whose last token contains the end of a string.

    The strings are searched with Knuth-Morris-Pratt automata. For each string, a table contains the
    next state for each state and token. Each call reads the last tokens again and keeps no state,
    so beam search can reorder rows between the calls.
    """

    def __init__(self, token_texts: Sequence[str], strings: Sequence[str]):
        """Builds the tables.

        Args:
            token_texts: The text of every token of the vocabulary.
            strings: Strings after which generation stops.
        """
        #: For each string, two arrays `(states, tokens)`: the next state, and whether a match ends
        #: within the token.
        self.tables: list[tuple[np.ndarray, np.ndarray]] = []
        for string in strings:
            letters = sorted(set(string))
            # The state is the length of the longest prefix of the string that the text ends with.
            # `moves` contains the next state for each letter. The last column stands for all
            # letters that do not occur in the string.
            moves = np.zeros((len(string) + 1, len(letters) + 1), np.int32)
            for state in range(len(string) + 1):
                for column, letter in enumerate(letters):
                    text = string[:state] + letter
                    sizes = range(min(len(text), len(string)), 0, -1)
                    moves[state, column] = next((n for n in sizes if text.endswith(string[:n])), 0)
            longest = max(map(len, token_texts), default=0)
            # The letters of each token as columns of `moves`. -1 is after the end of the token.
            codes = np.full((len(token_texts), longest), -1, np.int32)
            number = {letter: column for column, letter in enumerate(letters)}
            for row, text in enumerate(token_texts):
                codes[row, : len(text)] = [number.get(letter, len(letters)) for letter in text]
            states = np.repeat(np.arange(len(string))[:, None], len(token_texts), axis=1)
            hits = np.zeros(states.shape, bool)
            for position in range(longest):
                code = codes[None, :, position]
                arrived = np.where(code >= 0, moves[states, np.maximum(code, 0)], states)
                hits |= (arrived == len(string)) & (code >= 0)
                states = arrived
            # After a match, continue with the longest proper prefix of the string that is also its
            # suffix.
            border = next(
                (n for n in range(len(string) - 1, 0, -1) if string.endswith(string[:n])), 0
            )
            following = np.where(states == len(string), border, states)
            self.tables.append((following.astype(np.int32), hits))

    def __call__(self, input_ids: jax.Array, cur_len: Length) -> jax.Array:
        """Returns for each row whether one of the strings ends within its last token.

        Args:
            input_ids: Token buffer, `(rows, width)`.
            cur_len: Number of filled columns.
        """
        ended = jnp.zeros(input_ids.shape[0], bool)
        for tables in self.tables:
            following, hits = map(jnp.asarray, tables)
            # A match must end in the last token, and each token with a text has at least one
            # letter. So it is enough to read this number of tokens.
            window = min(2 * len(following) + 1, input_ids.shape[1])
            tokens = jax.lax.dynamic_slice_in_dim(
                jnp.pad(input_ids, ((0, 0), (window, 0))), cur_len, window, axis=1
            )
            tokens = jnp.clip(tokens, 0, following.shape[1] - 1)
            first = jnp.maximum(window - cur_len, 0)  # columns before it are padding

            def read(
                column: jax.Array,
                carry: tuple[jax.Array, jax.Array],
                following: jax.Array = following,
                hits: jax.Array = hits,
                tokens: jax.Array = tokens,
            ) -> tuple[jax.Array, jax.Array]:
                state, token = carry[0], tokens[:, column]
                return following[state, token], hits[state, token]

            # This is a loop, because the compile time of unrolled lookups grows exponentially.
            rows = len(input_ids)
            start = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
            _, hit = jax.lax.fori_loop(first, window, read, start)
            ended |= hit
        return ended
