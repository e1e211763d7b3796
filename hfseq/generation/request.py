"""From the arguments of ``generate`` to a plan and operands: options, prompts, lengths, ends."""

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
from hfseq.errors import UsageError, did_you_mean
from hfseq.generation.logits_process import Length
from hfseq.generation.options import (
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
from hfseq.plugins.registry import target_name

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")
Array = np.ndarray | jax.Array
TokenRows = Array | Sequence[Sequence[int]]

SMALLEST_BUCKET = 16

#: All columns of an encoder are computed, so spare ones cost more than a program for short texts.
SMALLEST_ENCODER_BUCKET = 8

#: Arguments beyond GenerationConfig that are no inputs of the model.
EXTRA_ARGUMENTS = (
    *("stopping_criteria", "streamer", "tokenizer", "stop_token_sequences"),
    *("forced_decoder_ids", "length_penalty_type", "compact_finished", "extra"),
    "timestamp_rules",
)

#: Arguments of PyTorch's ``generate`` that have no counterpart.
UNSUPPORTED_ARGUMENTS = {
    "assistant_model": "leave it out: the text is the same, only slower",
    "prefix_allowed_tokens_fn": "use a logits_processor, which is traced with the loop",
    "inputs_embeds": "pass input_ids",
    "inputs": "pass it first, or under the name of the model's input",
    "negative_prompt_ids": "use a logits_processor that calls the model",
    "negative_prompt_attention_mask": "use a logits_processor that calls the model",
    "synced_gpus": "leave it out: sharded models need no such flag in JAX",
    "past_key_values": "pass the whole prompt; its cache is made inside",
    "custom_generate": "call your function directly",
}

#: Arguments of a model's call that ``generate`` sets itself.
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

#: Attributes of any configuration that do not mean generation.
_NON_GENERATION_ATTRIBUTES = (
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict_in_generate",
    "transformers_version",
)


class Streamer(Protocol):
    """What gets tokens as they come, such as Transformers' ``TextStreamer``."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompt (rows, length), then the tokens (rows,) of each step."""

    def end(self) -> None:
        """Take note that there are no more."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, the prompt counted: real ones and those of the compiled buffers."""

    prompt: int
    stop: int
    minimum: int
    prefill: int
    buffer: int


class Request(NamedTuple):
    """All that a run needs; ``traced`` if anything is a tracer, so that all is traced."""

    plan: Plan
    operands: Operands
    lengths: Lengths
    traced: bool
    streamer: Streamer | None
    compact: bool


class _ModelInputs(NamedTuple):
    """Prompts and the input of an encoder; ``source`` is what was passed as ``input_ids``."""

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
    """Check everything that can be checked, and put the inputs into their buckets.

    **Raises:** TypeError for a class without a head, UsageError for what cannot work.
    """
    check_can_generate(model)
    config, rest, default_length = merge_options(model, generation_config, dict(kwargs or {}))
    extras = {name: rest.pop(name) for name in EXTRA_ARGUMENTS if name in rest}
    inputs = {name: value for name, value in rest.items() if value is not None}
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    if input_ids is None and encoder_decoder:
        input_ids = inputs.pop(model.main_input_name, None)
    check_arguments(model, inputs, encoder_decoder)
    options = resolve_options(config, extras)
    options.check(model.vocab_size("decoder_input_ids"))
    criteria = stop_criteria(config.stop_strings, extras)
    processors = _as_tuple(logits_processor)
    for item in processors:
        if not callable(item):
            raise UsageError(
                f"generate: logits_processor has to be a list of callables, but holds {item!r}"
            )
    traced = is_traced(input_ids, inputs, params, prng_key, extras.get("extra"))
    read = _read_encoder_decoder_inputs if encoder_decoder else _read_decoder_inputs
    given = read(model, config, options, input_ids, inputs, traced)
    lengths = resolve_lengths(
        config,
        given.prompt.shape[1],
        model.max_length(),
        default=default_length,
        traced=traced,
        what="decoder_input_ids" if encoder_decoder else "input_ids",
    )
    new = lengths.stop - lengths.prompt
    recorded = options.output_scores or options.output_logits
    steps = (new if traced else bucket_length(new)) if recorded else 0
    plan = Plan(options, lengths.buffer, steps, encoder_decoder, processors, criteria)
    if (criteria or options.stop_token_sequences) and options.pad_token_id is None:
        raise UsageError(
            "generate: rows that stop early are filled up with pad_token_id, but there is neither "
            "pad_token_id nor eos_token_id: pass pad_token_id=..."
        )
    arrays = given.prompt, given.mask, given.encoder
    number: Callable[[int], Length] = int
    if not traced:
        number = np.int32  # type: ignore[assignment]  # an operand, and no constant of the program
        prompt, mask, encoder = arrays
        mask = None if mask is None else pad_right(mask, lengths.prefill, 1)
        arrays = pad_right(prompt, lengths.prefill), mask, encoder
        sharding = getattr(given.source, "sharding", None)
        if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
            # As the rows of what was passed are distributed.
            rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
            arrays = jax.tree.map(lambda array: jax.device_put(array, rows), arrays)
    operands = Operands(
        params=params or model.params,
        prompt=arrays[0],
        mask=arrays[1],
        key=make_key(prng_key),
        prompt_length=number(lengths.prompt),
        stop_length=number(lengths.stop),
        min_length=number(lengths.minimum),
        encoder=arrays[2],
        encoder_outputs=given.encoder_outputs,
        encoder_length=number(given.encoder_length),
        model_kwargs=inputs,
        extra=extras.get("extra") or model.extra,
    )
    compact = bool(extras.get("compact_finished"))
    return Request(plan, operands, lengths, traced, extras.get("streamer"), compact)


def is_traced(*trees: Any) -> bool:
    """Tell whether values cannot be looked at: under a transformation, or on other hosts."""
    return any(
        isinstance(leaf, jax.core.Tracer)
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
        for leaf in jax.tree.leaves(trees)
    )


def make_key(key: jax.Array | int | None) -> jax.Array:
    """Return a PRNG key: 0 by default, of a seed, or the key that was given."""
    if key is None:
        return jax.random.PRNGKey(0)
    is_key = getattr(key, "ndim", 0) > 0 or jnp.issubdtype(
        getattr(key, "dtype", jnp.int32), jax.dtypes.prng_key
    )
    if hasattr(key, "__index__") and not is_key:
        return jax.random.PRNGKey(key)
    return key  # type: ignore[return-value]


def _as_tuple(given: Sequence[T] | T | None) -> tuple[T, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)


# -- options and arguments


def merge_options(
    model: GenerativeModel, given: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any], bool]:
    """Return a complete GenerationConfig, the keyword arguments that are none of its options, and
    whether ``max_length`` is nobody's choice.

    What ``kwargs`` say comes first, then ``given``, then the model's own configuration, then the
    defaults of Transformers. As in Transformers 4, edits of ``model.config`` count as long as the
    model's generation configuration still is what was made of it.
    """
    from transformers import GenerationConfig

    held = model.generation_config or GenerationConfig()
    made = given is None and getattr(held, "_from_model_config", False)
    if made and getattr(held, "_original_object_hash", None) == hash(held):
        edits = {
            name: value
            for name, known in vars(held).items()
            if not name.startswith("_") and name not in _NON_GENERATION_ATTRIBUTES
            if (value := getattr(model.config, name, known)) != known
            if value is not None or name.endswith("token_id")
        }
        if edits:
            logger.warning(
                "You have modified the pretrained model configuration to control generation (%s). "
                "This is a deprecated strategy: change model.generation_config instead.",
                ", ".join(edits),
            )
            held = copy.deepcopy(held)
            held.update(**edits)
            held._original_object_hash = hash(held)
            model.generation_config = held
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    explicit = {name for name, value in vars(config).items() if value is not None} | set(kwargs)
    config.update(**held.to_dict(), defaults_only=True, allow_custom_entries=True)
    default_length = config.max_length is None and kwargs.get("max_length") is None
    defaults = GenerationConfig._get_default_generation_params()
    config.update(**defaults, defaults_only=True)
    rest = config.update(**kwargs)
    for name in ("max_length", "min_length"):
        if getattr(config, name) is None:
            setattr(config, name, defaults[name])
    asked = {name: rule for name, rule in UNSUPPORTED_IF_REQUESTED.items() if name in explicit}
    problems = [
        f"{name}={getattr(config, name)!r} is not supported: {hint}"
        for name, (allowed, hint) in {**UNSUPPORTED_OPTIONS, **asked}.items()
        if hasattr(config, name) and getattr(config, name) not in allowed
    ]
    if problems:
        raise UsageError("generate: " + "; ".join(problems))
    return config, rest, default_length


def check_can_generate(model: GenerativeModel) -> None:
    """Raise TypeError for a class without a head, naming those that have one."""
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
    """Refuse arguments that neither an option nor the model knows, all at once."""
    refused = [
        f"{name}: {UNSUPPORTED_ARGUMENTS[name]}" for name in inputs if name in UNSUPPORTED_ARGUMENTS
    ]
    if refused:
        raise UsageError(f"generate does not support {'; '.join(refused)}")
    methods = [model.prepare_inputs_for_generation, *([model.encode] if encoder_decoder else [])]
    known = {
        p.name
        for method in methods
        for p in inspect.signature(method).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    } - _ARGUMENTS_SET_BY_GENERATE
    if encoder_decoder:
        known |= {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs"}
    unknown = [name for name in inputs if name not in known]
    if unknown:
        from transformers import GenerationConfig

        options = [*known, *vars(GenerationConfig())]
        raise UsageError(
            f"The following `model_kwargs` are not used by the model: {unknown} (note: typos in "
            f"the generate arguments will also show up in this list){did_you_mean(unknown[0], options)}"
        )


# -- prompts


def _read_decoder_inputs(
    model: GenerativeModel,
    config: GenerationConfig,
    options: Options,
    ids: TokenRows | None,
    inputs: dict[str, Any],
    traced: bool,
) -> _ModelInputs:
    """Read the prompt of a decoder, which is the begin token where there is none."""
    vocabulary, mask = model.vocab_size(), inputs.pop("attention_mask", None)
    prompt = None if ids is None else as_ids("input_ids", ids, traced, vocabulary)
    if prompt is None or not (prompt.shape[0] and prompt.shape[1]):
        rows = 1 if prompt is None else prompt.shape[0]
        if config.bos_token_id is None or not rows:
            raise UsageError(
                "generate: input_ids holds no tokens, and the model has no bos_token_id to begin "
                "with: pass a prompt of at least one token, or bos_token_id=..."
            )
        begin = np.full((rows, 1), config.bos_token_id, np.int32)
        prompt = as_ids("input_ids", begin, traced, vocabulary)
    if mask is not None:
        prompt, mask = pad_left(prompt, as_mask("attention_mask", mask, prompt, traced))
    elif options.pad_token_id is not None and options.pad_token_id not in options.eos_token_id:
        mask = (prompt != options.pad_token_id).astype(np.int32)  # padding hides: PyTorch's rule
    elif not traced:  # so that batches with and without padding share a program
        mask = np.ones_like(prompt)
    return _ModelInputs(prompt, mask, ids)


def _read_encoder_decoder_inputs(
    model: GenerativeModel,
    config: GenerationConfig,
    options: Options,
    ids: TokenRows | None,
    inputs: dict[str, Any],
    traced: bool,
) -> _ModelInputs:
    """Read the input of the encoder and the beginning of the decoder's output."""
    outputs, mask = inputs.pop("encoder_outputs", None), inputs.pop("attention_mask", None)
    encoder, length, name = {}, 0, model.main_input_name
    if ids is None and outputs is None:
        raise UsageError(f"generate: an encoder-decoder needs {name} (or encoder_outputs)")
    if ids is not None and name != "input_ids":
        ids = as_media(name, ids, options, traced)
        others = {other: inputs.pop(other) for other in [*inputs] if other[:8] != "decoder_"}
        named = {name: ids, "attention_mask": mask, **others}
        encoder = {name: value for name, value in named.items() if value is not None}
    elif ids is not None:
        ids = as_ids("input_ids", ids, traced, model.vocab_size())
        if not ids.size:
            raise UsageError("generate: input_ids holds no tokens: pass at least one a row")
        if mask is not None:
            mask = as_mask("attention_mask", mask, ids, traced)
        others = {name: inputs.pop(name) for name in [*inputs] if not name.startswith("decoder_")}
        length, limit = ids.shape[1], model.max_source_length()
        if limit is not None and length > limit:
            raise UsageError(
                f"generate: input_ids has {length} tokens, but the model has only {limit} "
                "positions: shorten the input (a tokenizer does with truncation=True, "
                "max_length=...)"
            )
        # A caller's outputs have the length of their mask; other inputs have unknown shapes.
        if traced or outputs is not None or others:
            named = {"input_ids": ids, "attention_mask": mask, **others}
            encoder = {name: value for name, value in named.items() if value is not None}
        else:
            width = bucket_length(length, limit, SMALLEST_ENCODER_BUCKET)
            mask = np.ones_like(ids) if mask is None else mask
            encoder = {"input_ids": pad_right(ids, width), "attention_mask": pad_right(mask, width)}
    elif mask is not None:
        encoder = {"attention_mask": jnp.asarray(mask, jnp.int32)}
    if isinstance(outputs, (tuple, list)):
        outputs = tuple(outputs)
    batch = ids.shape[0] if ids is not None else outputs[0].shape[0]
    given = inputs.pop("decoder_input_ids", None)
    mask = inputs.pop("decoder_attention_mask", None)
    if given is not None:
        vocabulary = model.vocab_size("decoder_input_ids")
        prompt = as_ids("decoder_input_ids", given, is_traced(given), vocabulary)
        if prompt.shape[0] != batch or not prompt.shape[1]:
            raise UsageError(
                f"generate: decoder_input_ids has the shape {tuple(prompt.shape)}, but the input "
                f"has {batch} rows: pass (rows, at least one token)"
            )
    elif config.decoder_start_token_id is None:
        raise UsageError(
            "`decoder_start_token_id` has to be defined for encoder-decoder generation: pass "
            "decoder_start_token_id=... (or decoder_input_ids), or set it once in "
            "model.generation_config"
        )
    else:
        prompt = np.full((batch, 1), config.decoder_start_token_id, np.int32)
    if mask is not None:
        mask = as_mask("decoder_attention_mask", mask, prompt, traced)
        prompt, mask = pad_left(prompt, mask)
    return _ModelInputs(prompt, mask, ids, encoder, outputs, length)


def as_ids(name: str, ids: TokenRows, traced: bool, vocab_size: int | None) -> Array:
    """Return token ids (rows, length) as int32; UsageError says what else was given.

    Ids without an embedding are refused: JAX would go on with NaN.
    """
    array: Any = _as_array(name, ids)
    if not hasattr(array, "ndim") or array.ndim != 2:
        what = f"the shape {tuple(array.shape)}" if hasattr(array, "shape") else f"type {type(ids)}"
        raise UsageError(
            f"generate: {name} has to be (batch, length), but has {what}; one prompt is a batch "
            "of one: ids[None]"
        )
    array = array if traced else np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer) and array.size:
        raise UsageError(f"generate: {name} holds {array.dtype}, token ids are integers")
    array = array.astype(np.int32)
    if vocab_size and isinstance(array, np.ndarray) and array.size:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"generate: {name} holds {low if low < 0 else high}, outside of the model's "
                f"vocabulary of {vocab_size}: use the tokenizer that belongs to the model"
            )
    return array


def as_media(name: str, values: Any, options: Options, traced: bool) -> Array:
    """Return the numbers of sound or pictures, rows first, as float32.

    Nobody knows how to fill them up: a program is compiled for each of their shapes.
    """
    array: Any = _as_array(name, values)
    array = array if traced else np.asarray(array)
    if array.ndim < 2 or not array.size:
        raise UsageError(
            f"generate: {name} has to hold a batch of examples, but has the shape "
            f"{tuple(array.shape)}; one example is a batch of one: {name}[None]"
        )
    if options.encoder_repetition_penalty or options.encoder_no_repeat_ngram_size:
        raise UsageError(
            "generate: encoder_repetition_penalty and encoder_no_repeat_ngram_size compare with "
            f"tokens of the input, and {name} are none: leave them out"
        )
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(np.float32)


def as_mask(name: str, mask: TokenRows, ids: Array, traced: bool) -> Array:
    """Return an attention mask as int32 of the shape of ``ids``; bool and floats are accepted."""
    given = _as_array(name, mask)
    if tuple(given.shape) != tuple(ids.shape):
        raise UsageError(
            f"generate: {name} has the shape {tuple(given.shape)}, the tokens have "
            f"{tuple(ids.shape)}: pass the mask that the tokenizer gave with them"
        )
    if traced:
        return (jnp.asarray(given) != 0).astype(jnp.int32)
    real = (np.asarray(given) != 0).astype(np.int32)
    empty = np.flatnonzero(real.sum(-1) == 0)
    if real.size and empty.size:
        raise UsageError(
            f"generate: {name} hides every token of row {empty[0]}: a prompt needs at least one"
        )
    return real


def _as_array(name: str, rows: TokenRows) -> Array:
    """Return lists as an array; anything else as it is."""
    if not isinstance(rows, (list, tuple)):
        return rows  # type: ignore[return-value]
    try:
        return np.asarray(rows)
    except ValueError:
        raise UsageError(
            f"generate: the rows of {name} have different lengths: pad them and pass the "
            'attention_mask too, as tokenizer(texts, padding=True, return_tensors="np") gives both'
        ) from None


def pad_left(ids: Array, mask: Array) -> tuple[Array, Array]:
    """Move padding at the end of rows to their beginning: new tokens follow the last column."""
    numpy = isinstance(ids, np.ndarray) and isinstance(mask, np.ndarray)
    xp: Any = np if numpy else jnp
    trailing = xp.argmax(mask[:, ::-1] != 0, axis=1)
    if numpy and not trailing.any():
        return ids, mask
    places = (xp.arange(ids.shape[1])[None] - trailing[:, None]) % ids.shape[1]
    return xp.take_along_axis(ids, places, axis=1), xp.take_along_axis(mask, places, axis=1)


def pad_right(ids: Array, width: int, value: int = 0) -> np.ndarray:
    """Fill rows up with ``value`` on the right, to a bucket; token 0 has an embedding for sure."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=value)


# -- lengths


def bucket_length(length: int, limit: int | None = None, smallest: int = SMALLEST_BUCKET) -> int:
    """Return the size that is compiled for ``length``: 1, 16, 24, 32, 48, 64, 96 and so on.

    Sizes are powers of two and one and a half times these, so at most half of a buffer is spare;
    after 1 comes ``smallest``. ``limit``, the model's number of positions, is never exceeded.
    """
    size = 1 if length <= 1 else smallest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else max(min(size, limit), length)


def text_width(length: int, limit: int | None = None) -> int:
    """Return the width to which texts of a forward pass are padded: 8, 16, 24 … 64, 80, 96 ….

    Eights up to 64, then quarters of a power of two: from 32 on at most a fifth is padding.
    Programs without a loop compile quickly, so there are more sizes than of :func:`bucket`.
    """
    step = max(8, (1 << max(length - 1, 1).bit_length() - 1) // 4)
    size = -(-length // step) * step
    return size if limit is None else max(min(size, limit), length)


def resolve_lengths(
    config: GenerationConfig,
    prompt: int,
    limit: int | None,
    *,
    default: bool,
    traced: bool,
    what: str,
) -> Lengths:
    """Apply the rules of ``max_length``, ``max_new_tokens`` and their kin to a prompt.

    ``default`` tells that nobody chose ``max_length``; ``traced`` that the caller compiles, so that
    buckets would gain nothing; ``limit`` is the model's number of positions. UsageError for
    lengths that cannot be.
    """
    if limit is not None and prompt > limit:
        raise UsageError(
            f"generate: {what} has {prompt} tokens, but the model has only {limit} positions: "
            "shorten the prompt (a tokenizer does with truncation=True, max_length=...)"
        )
    new, stop = config.max_new_tokens, config.max_length
    if new is None and default:
        logger.warning(
            "Using the model-agnostic default `max_length` (=%s) to control the generation length. "
            "We recommend setting `max_new_tokens`.",
            stop,
        )
        stop = stop if limit is None else min(stop, limit)
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
            f"generate: max_length={stop} leaves no room after the {prompt} tokens of {what}; it "
            "counts the prompt too: pass max_new_tokens instead"
        )
    if limit is not None and stop > limit:
        raise UsageError(
            f"generate: {what} has {prompt} tokens and up to {stop - prompt} more are asked for "
            f"(max_length or max_new_tokens), but the model has only {limit} positions: ask for "
            f"at most {limit - prompt} new ones"
        )
    least = config.min_new_tokens
    if config.min_length < 0 or (least or 0) < 0:
        raise UsageError(
            f"generate: min_length={config.min_length} and min_new_tokens={least} "
            "must not be negative"
        )
    minimum = config.min_length if least is None else prompt + least
    if minimum > stop:
        name = f"min_length={minimum}" if least is None else f"min_new_tokens={least}"
        raise UsageError(
            f"generate: {name} cannot be reached: the prompt has {prompt} tokens and max_length "
            f"is {stop}; lower it, or raise max_length or max_new_tokens"
        )
    if traced:
        return Lengths(prompt, stop, minimum, prompt, stop)
    prefill = bucket_length(prompt, limit)
    # Neither depends on the prompt's length within its bucket.
    needed = stop if new is None else prefill + new
    buffer = max(bucket_length(needed, limit) if limit is None or needed <= limit else limit, stop)
    return Lengths(prompt, stop, minimum, min(prefill, buffer), buffer)


# -- stopping


def stop_criteria(
    stop_strings: str | Sequence[str] | None, extras: Mapping[str, Any]
) -> tuple[Criterion, ...]:
    """Return the criteria that end rows: the user's, and one for ``stop_strings``."""
    given: tuple[Criterion, ...] = _as_tuple(extras.get("stopping_criteria"))
    for criterion in given:
        if not callable(criterion) or type(criterion).__module__.startswith("transformers."):
            raise UsageError(
                f"generate: stopping_criteria holds {criterion!r}; hfseq takes traceable functions "
                "(input_ids, cur_len) -> bool array (rows,)"
            )
    if stop_strings is None:
        return given
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise UsageError(f"generate: stop_strings={stop_strings!r} has to be text, or a list of it")
    tokenizer = extras.get("tokenizer")
    if tokenizer is None:
        raise UsageError(
            f"generate: stop_strings={stop_strings!r} needs the tokenizer too: pass tokenizer=..., "
            "or the tokens themselves as stop_token_sequences=[[...]]"
        )
    return (*given, stop_strings_criterion(tokenizer, strings))


@functools.lru_cache(maxsize=16)
def stop_strings_criterion(
    tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]
) -> StopStrings:
    """Return the criterion for ``strings``; the same object for the same arguments."""
    return StopStrings(token_texts(tokenizer), strings)


@functools.lru_cache(maxsize=4)
def token_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the text of every token as it reads inside of a text; empty for special tokens."""
    before, special = tokenizer.encode("a", add_special_tokens=False), {*tokenizer.all_special_ids}
    start, options = len(tokenizer.decode(before)), {"clean_up_tokenization_spaces": False}
    return tuple(
        "" if i in special else str(tokenizer.decode([*before, i], **options))[start:]
        for i in range(len(tokenizer))
    )


class StopStrings:
    """True for rows whose text contains one of ``strings`` that ends within the last token.

    Knuth, Morris and Pratt's automaton reads the last tokens, with one table from (state, token) to
    the next state. It needs no memory of its own, so beams may be reordered freely.
    """

    def __init__(self, vocabulary: Sequence[str], strings: Sequence[str]):
        #: For each string (states, tokens): the state after a token, whether it completed a match.
        self.tables: list[tuple[np.ndarray, np.ndarray]] = []
        for string in strings:
            letters = sorted(set(string))
            # How much of the string ends the text after a letter; last any other letter.
            moves = np.zeros((len(string) + 1, len(letters) + 1), np.int32)
            for state in range(len(string) + 1):
                for place, letter in enumerate(letters):
                    text = string[:state] + letter
                    sizes = range(min(len(text), len(string)), 0, -1)
                    moves[state, place] = next((n for n in sizes if text.endswith(string[:n])), 0)
            longest = max(map(len, vocabulary), default=0)
            # Letter numbers of each token; len(letters): any other letter, -1: past the end.
            codes = np.full((len(vocabulary), longest), -1, np.int32)
            number = {letter: place for place, letter in enumerate(letters)}
            for row, text in enumerate(vocabulary):
                codes[row, : len(text)] = [number.get(letter, len(letters)) for letter in text]
            states = np.repeat(np.arange(len(string))[:, None], len(vocabulary), axis=1)
            hits = np.zeros(states.shape, bool)
            for place in range(longest):
                code = codes[None, :, place]
                arrived = np.where(code >= 0, moves[states, np.maximum(code, 0)], states)
                hits |= (arrived == len(string)) & (code >= 0)
                states = arrived
            # After a match goes on the longest proper prefix of the string that also ends it.
            border = next(
                (n for n in range(len(string) - 1, 0, -1) if string.endswith(string[:n])), 0
            )
            following = np.where(states == len(string), border, states)
            self.tables.append((following.astype(np.int32), hits))

    def __call__(self, input_ids: jax.Array, cur_len: Length) -> jax.Array:
        """Read the last tokens of the first ``cur_len`` columns of ``input_ids``."""
        ended = jnp.zeros(input_ids.shape[0], bool)
        for tables in self.tables:
            following, hits = map(jnp.asarray, tables)
            # A match ends in the last token; every token but an empty one has a character of it.
            window = min(2 * len(following) + 1, input_ids.shape[1])
            state, hit = jnp.zeros(len(input_ids), jnp.int32), jnp.zeros(len(input_ids), bool)
            for back in range(window, 0, -1):
                place = jnp.maximum(cur_len - back, 0)
                column = jax.lax.dynamic_slice_in_dim(input_ids, place, 1, axis=1)
                token = jnp.clip(column[:, 0], 0, following.shape[1] - 1)
                inside = cur_len >= back
                hit = hits[state, token] & inside
                state = jnp.where(inside, following[state, token], 0)
            ended |= hit
        return ended
