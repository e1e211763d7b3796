"""From the arguments of ``generate`` to a plan and its operands."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hfseq.errors import UsageError
from hfseq.generation.options import (
    Operands,
    Options,
    Plan,
    check_arguments,
    check_options,
    merge,
    resolve,
)
from hfseq.generation.search import make_key

logger = logging.getLogger(__name__)

SMALLEST_BUCKET = 16


#: All columns of an encoder are computed, so spare ones cost more than a program for short texts.
SMALLEST_ENCODER_BUCKET = 8


def bucket(length: int, limit: int | None = None, smallest: int = SMALLEST_BUCKET) -> int:
    """Return the size that is compiled for ``length``: 1, 16, 24, 32, 48, 64, 96 and so on.

    Sizes are powers of two and one and a half times these, so at most half of a buffer is spare;
    after 1 comes ``smallest``. ``limit``, the model's number of positions, is never exceeded.
    """
    size = 1 if length <= 1 else smallest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else max(min(size, limit), length)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, the prompt counted: real ones and those of the compiled buffers."""

    prompt: int
    stop: int
    minimum: int
    prefill: int
    buffer: int


def resolve_lengths(
    config: Any, prompt: int, limit: int | None, *, default: bool, static: bool, what: str
) -> Lengths:
    """Apply the rules of ``max_length``, ``max_new_tokens`` and their kin to a prompt.

    ``default`` tells that nobody chose ``max_length``; ``static`` that the caller compiles, so that
    buckets would gain nothing; ``limit`` is the model's number of positions. UsageError for
    lengths that cannot be.
    """
    if limit is not None and prompt > limit:
        raise UsageError(
            f"generate: {what} has {prompt} tokens, but the model has only {limit} positions: "
            "shorten the prompt (a tokenizer does with truncation=True, max_length=...)"
        )
    stop = _stop(config, prompt, limit, default)
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
    minimum = _minimum(config, prompt, stop)
    if static:
        return Lengths(prompt, stop, minimum, prompt, stop)
    prefill = bucket(prompt, limit)
    # Neither depends on the prompt's length within its bucket.
    needed = stop if config.max_new_tokens is None else prefill + config.max_new_tokens
    buffer = max(bucket(needed, limit) if limit is None or needed <= limit else limit, stop)
    return Lengths(prompt, stop, minimum, min(prefill, buffer), buffer)


def _stop(config: Any, prompt: int, limit: int | None, default: bool) -> int:
    if config.max_new_tokens is not None:
        if not default:
            logger.warning(
                "Both `max_new_tokens` (=%s) and `max_length` (=%s) have been set: "
                "`max_new_tokens` takes precedence.",
                config.max_new_tokens,
                config.max_length,
            )
        return prompt + config.max_new_tokens
    if not default:
        return config.max_length
    logger.warning(
        "Using the model-agnostic default `max_length` (=%s) to control the generation length. "
        "We recommend setting `max_new_tokens`.",
        config.max_length,
    )
    return config.max_length if limit is None else min(config.max_length, limit)


def _minimum(config: Any, prompt: int, stop: int) -> int:
    if config.min_length < 0 or (config.min_new_tokens or 0) < 0:
        raise UsageError(
            f"generate: min_length={config.min_length} and min_new_tokens={config.min_new_tokens} "
            "must not be negative"
        )
    new = config.min_new_tokens
    minimum = config.min_length if new is None else prompt + new
    if minimum > stop:
        name = f"min_length={minimum}" if new is None else f"min_new_tokens={new}"
        raise UsageError(
            f"generate: {name} cannot be reached: the prompt has {prompt} tokens and max_length "
            f"is {stop}; lower it, or raise max_length or max_new_tokens"
        )
    return minimum


def is_static(*trees: Any) -> bool:
    """Tell whether values cannot be looked at: under a transformation, or on other hosts."""
    return any(
        isinstance(leaf, jax.core.Tracer)
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
        for leaf in jax.tree.leaves(trees)
    )


def as_ids(name: str, ids: Any, static: bool) -> Any:
    """Return token ids (rows, length) as int32; UsageError says what else was given."""
    if isinstance(ids, (list, tuple)):
        ids = _rectangular(name, ids)
    if not hasattr(ids, "ndim") or ids.ndim != 2:
        shape = f"the shape {tuple(ids.shape)}" if hasattr(ids, "shape") else f"type {type(ids)}"
        raise UsageError(
            f"generate: {name} has to be (batch, length), but has {shape}; one prompt is a batch "
            "of one: ids[None]"
        )
    if not static:
        ids = np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer) and ids.size:
        raise UsageError(f"generate: {name} holds {ids.dtype}, token ids are integers")
    return ids.astype(np.int32)


def _rectangular(name: str, rows: Any) -> np.ndarray:
    try:
        return np.asarray(rows)
    except ValueError:
        raise UsageError(
            f"generate: the rows of {name} have different lengths: pad them and pass the "
            'attention_mask too, as tokenizer(texts, padding=True, return_tensors="np") gives both'
        ) from None


def check_vocabulary(name: str, ids: Any, vocab_size: int | None) -> None:
    """Refuse ids that have no embedding; JAX would go on with NaN."""
    if vocab_size and isinstance(ids, np.ndarray) and ids.size:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise UsageError(
                f"generate: {name} holds {low if low < 0 else high}, outside of the model's "
                f"vocabulary of {vocab_size}: use the tokenizer that belongs to the model"
            )


def as_mask(name: str, mask: Any, ids: Any, static: bool) -> Any:
    """Return an attention mask as int32 of the shape of ``ids``; bool and floats are accepted."""
    if isinstance(mask, (list, tuple)):
        mask = _rectangular(name, mask)
    if tuple(mask.shape) != tuple(ids.shape):
        raise UsageError(
            f"generate: {name} has the shape {tuple(mask.shape)}, the tokens have "
            f"{tuple(ids.shape)}: pass the mask that the tokenizer gave with them"
        )
    if static:
        return (jnp.asarray(mask) != 0).astype(jnp.int32)
    mask = (np.asarray(mask) != 0).astype(np.int32)
    empty = np.flatnonzero(mask.sum(-1) == 0)
    if mask.size and empty.size:
        raise UsageError(
            f"generate: {name} hides every token of row {empty[0]}: a prompt needs at least one"
        )
    return mask


def infer_mask(ids: Any, pad: int | None, eos: tuple[int, ...]) -> Any:
    """Return the mask of a prompt that came without: padding hides, unless it also ends texts.

    This is PyTorch's rule. ``None`` where all is visible for certain.
    """
    if pad is None or pad in eos:
        return None
    return (ids != pad).astype(np.int32)


def pad_left(ids: Any, mask: Any) -> tuple[Any, Any]:
    """Move padding at the end of rows to their beginning: new tokens follow the last column."""
    numpy = isinstance(ids, np.ndarray) and isinstance(mask, np.ndarray)
    xp: Any = np if numpy else jnp
    trailing = xp.argmax(mask[:, ::-1] != 0, axis=1)
    if numpy and not trailing.any():
        return ids, mask
    places = (xp.arange(ids.shape[1])[None] - trailing[:, None]) % ids.shape[1]
    return xp.take_along_axis(ids, places, axis=1), xp.take_along_axis(mask, places, axis=1)


def widen(ids: np.ndarray, width: int, value: int = 0) -> np.ndarray:
    """Fill rows up with ``value`` on the right, to a bucket; token 0 has an embedding for sure."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=value)


def place_like(source: Any, arrays: Any) -> Any:
    """Distribute ``arrays`` over devices as the rows of ``source`` are, if they are."""
    sharding = getattr(source, "sharding", None)
    if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
        return arrays
    rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return jax.tree.map(lambda array: jax.device_put(array, rows), arrays)


def stop_criteria(stop_strings: Any, extras: dict[str, Any]) -> tuple[Any, ...]:
    """Return the criteria that end rows: the user's, and one for ``stop_strings``."""
    given = extras.get("stopping_criteria")
    given = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
    for criterion in given:
        if not callable(criterion) or type(criterion).__module__.startswith("transformers."):
            raise UsageError(
                f"generate: stopping_criteria holds {criterion!r}; hfseq takes traceable functions "
                "(input_ids, cur_len) -> bool array (rows,)"
            )
    if stop_strings is None:
        return tuple(given)
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
def stop_strings_criterion(tokenizer: Any, strings: tuple[str, ...]) -> StopStrings:
    """Return the criterion for ``strings``; the same object for the same arguments."""
    return StopStrings(vocabulary(tokenizer), strings)


@functools.lru_cache(maxsize=4)
def vocabulary(tokenizer: Any) -> tuple[str, ...]:
    """Return the text of every token as it reads inside of a text; empty for special tokens."""
    before = tokenizer.encode("a", add_special_tokens=False)
    special = set(tokenizer.all_special_ids)
    start = len(tokenizer.decode(before))
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    texts = (
        "" if i in special else tokenizer.decode([*before, i], **options)[start:]
        for i in range(len(tokenizer))
    )
    return tuple(texts)


class StopStrings:
    """True for rows whose text contains one of ``strings`` that ends within the last token.

    Knuth, Morris and Pratt's automaton reads the last tokens, with one table from (state, token) to
    the next state. It needs no memory of its own, so beams may be reordered freely.
    """

    def __init__(self, vocabulary: Sequence[str], strings: Sequence[str]):
        self.tables = [_tables(string, vocabulary) for string in strings]

    def __call__(self, input_ids: jax.Array, cur_len: Any) -> jax.Array:
        """Read the last tokens of the first ``cur_len`` columns of ``input_ids``."""
        found = jnp.zeros(input_ids.shape[0], bool)
        for following, hits in self.tables:
            found |= self._ends(input_ids, cur_len, jnp.asarray(following), jnp.asarray(hits))
        return found

    def _ends(self, ids: jax.Array, cur_len: Any, following: jax.Array, hits: jax.Array):
        # A match ends in the last token; every token but an empty one has a character of it.
        window = min(2 * len(following) + 1, ids.shape[1])
        state, hit = jnp.zeros(ids.shape[0], jnp.int32), jnp.zeros(ids.shape[0], bool)
        for back in range(window, 0, -1):
            column = jax.lax.dynamic_slice_in_dim(ids, jnp.maximum(cur_len - back, 0), 1, axis=1)
            token = jnp.clip(column[:, 0], 0, following.shape[1] - 1)
            inside = cur_len >= back
            hit = hits[state, token] & inside
            state = jnp.where(inside, following[state, token], 0)
        return hit


def _tables(string: str, vocabulary: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (states, tokens) tables: the state after a token, and whether it completed a match."""
    letters = sorted(set(string))
    moves = _automaton(string, letters)
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
    following = np.where(states == len(string), _border(string), states)
    return following.astype(np.int32), hits


def _automaton(string: str, letters: Sequence[str]) -> np.ndarray:
    """Return (states + 1, letters + 1): how much of ``string`` ends the text after a letter."""
    table = np.zeros((len(string) + 1, len(letters) + 1), np.int32)
    for state in range(len(string) + 1):
        for place, letter in enumerate(letters):
            text = string[:state] + letter
            sizes = range(min(len(text), len(string)), 0, -1)
            table[state, place] = next((n for n in sizes if text.endswith(string[:n])), 0)
    return table


def _border(string: str) -> int:
    """Return the length of the longest proper prefix of ``string`` that also ends it."""
    return next((n for n in range(len(string) - 1, 0, -1) if string.endswith(string[:n])), 0)


#: Arguments beyond GenerationConfig that are no inputs of the model.
EXTRAS = (
    "stopping_criteria",
    "streamer",
    "tokenizer",
    "stop_token_sequences",
    "forced_decoder_ids",
    "length_penalty_type",
    "compact_finished",
    "extra",
)


class Request(NamedTuple):
    """All that a run needs; ``static`` if anything is a tracer, so that all is traced."""

    plan: Plan
    operands: Operands
    lengths: Lengths
    static: bool
    streamer: Any
    compact: bool = False


def make_request(
    model: Any,
    input_ids: Any,
    generation_config: Any = None,
    prng_key: Any = None,
    params: Any = None,
    logits_processor: Any = None,
    kwargs: dict[str, Any] | None = None,
) -> Request:
    """Check everything that can be checked, and put the inputs into their buckets."""
    config, rest, default = merge(model, generation_config, dict(kwargs or {}))
    extras = {name: rest.pop(name) for name in EXTRAS if name in rest}
    inputs = {name: value for name, value in rest.items() if value is not None}
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    check_arguments(model, inputs, encoder_decoder)
    options = resolve(config, extras)
    check_options(options, model.config.vocab_size)
    criteria = stop_criteria(config.stop_strings, extras)
    static = is_static(input_ids, inputs, params, prng_key, extras.get("extra"))
    read = _read_pair if encoder_decoder else _read_prompt
    parts = read(model, config, options, input_ids, inputs, static)
    name = "decoder_input_ids" if encoder_decoder else "input_ids"
    lengths = resolve_lengths(
        config, parts.prompt.shape[1], model.max_length(), default=default, static=static, what=name
    )
    plan = Plan(
        options=options,
        buffer=lengths.buffer,
        steps=_recorded_steps(options, lengths, static),
        encoder_decoder=encoder_decoder,
        processors=_callables("logits_processor", logits_processor),
        criteria=criteria,
    )
    check_padding(plan)
    key = make_key(prng_key)
    held = extras.get("extra") or model.extra
    operands = _operands(parts, lengths, key, params or model.params, held, static)
    compact = bool(extras.get("compact_finished"))
    return Request(plan, operands, lengths, static, extras.get("streamer"), compact)


class _Parts(NamedTuple):
    prompt: Any
    mask: Any
    encoder: dict[str, Any]
    encoder_outputs: Any
    encoder_length: Any
    model_kwargs: dict[str, Any]
    source: Any


def _read_prompt(
    model: Any, config: Any, options: Options, ids: Any, inputs: dict[str, Any], static: bool
) -> _Parts:
    """Read the prompt of a decoder."""
    source, mask = ids, inputs.pop("attention_mask", None)
    ids = _nonempty(ids, config, static)
    check_vocabulary("input_ids", ids, model.config.vocab_size)
    if mask is None:
        mask = infer_mask(ids, options.pad_token_id, options.eos_token_id)
    else:
        ids, mask = pad_left(ids, as_mask("attention_mask", mask, ids, static))
    if mask is None and not static:  # so that batches with and without padding share a program
        mask = np.ones_like(ids)
    return _Parts(ids, mask, {}, None, 0, inputs, source)


def _nonempty(ids: Any, config: Any, static: bool) -> Any:
    """Return the prompt, which is the begin token where there is none."""
    if ids is not None:
        ids = as_ids("input_ids", ids, static)
        if ids.shape[0] and ids.shape[1]:
            return ids
    bos = config.bos_token_id
    rows = 1 if ids is None else ids.shape[0]
    if bos is None or not rows:
        raise UsageError(
            "generate: input_ids holds no tokens, and the model has no bos_token_id to begin with: "
            "pass a prompt of at least one token, or bos_token_id=..."
        )
    return np.full((rows, 1), bos, np.int32)


def _read_pair(
    model: Any, config: Any, options: Options, ids: Any, inputs: dict[str, Any], static: bool
) -> _Parts:
    """Read the input of the encoder and the beginning of the decoder's output."""
    outputs = inputs.pop("encoder_outputs", None)
    mask, encoder, length = inputs.pop("attention_mask", None), {}, 0
    if ids is None and outputs is None:
        raise UsageError("generate: an encoder-decoder needs input_ids (or encoder_outputs)")
    if ids is not None:
        ids = as_ids("input_ids", ids, static)
        if not ids.size:
            raise UsageError("generate: input_ids holds no tokens: pass at least one a row")
        check_vocabulary("input_ids", ids, model.config.vocab_size)
        if mask is not None:
            mask = as_mask("attention_mask", mask, ids, static)
        exact = static or outputs is not None  # their mask has their length
        encoder, length = _encoder_inputs(model, ids, mask, inputs, exact), ids.shape[1]
    elif mask is not None:
        encoder = {"attention_mask": jnp.asarray(mask, jnp.int32)}
    if isinstance(outputs, (tuple, list)):
        outputs = tuple(outputs)
    batch = ids.shape[0] if ids is not None else outputs[0].shape[0]
    prompt = _decoder_prompt(model, config, inputs, batch, static)
    mask = inputs.pop("decoder_attention_mask", None)
    if mask is not None:
        mask = as_mask("decoder_attention_mask", mask, prompt, static)
        prompt, mask = pad_left(prompt, mask)
    return _Parts(prompt, mask, encoder, outputs, length, inputs, ids)


def _encoder_inputs(
    model: Any, ids: Any, mask: Any, inputs: dict[str, Any], exact: bool
) -> dict[str, Any]:
    """Return the arguments of ``encode``; ``exact`` keeps them out of a bucket."""
    others = {name: inputs.pop(name) for name in list(inputs) if not name.startswith("decoder_")}
    length, limit = ids.shape[1], model.max_length()
    if limit is not None and length > limit:
        raise UsageError(
            f"generate: input_ids has {length} tokens, but the model has only {limit} positions: "
            "shorten the input (a tokenizer does with truncation=True, max_length=...)"
        )
    if exact or others:  # other inputs have shapes that are not known here
        given = {"input_ids": ids, "attention_mask": mask, **others}
        return {name: value for name, value in given.items() if value is not None}
    width = bucket(length, limit, SMALLEST_ENCODER_BUCKET)
    mask = np.ones_like(ids) if mask is None else mask
    wide = {"input_ids": widen(ids, width)}
    return wide | {"attention_mask": widen(mask, width)}


def _decoder_prompt(
    model: Any, config: Any, inputs: dict[str, Any], batch: int, static: bool
) -> Any:
    """Return what the decoder begins with: the caller's tokens, or the start token."""
    prompt = inputs.pop("decoder_input_ids", None)
    if prompt is not None:
        prompt = as_ids("decoder_input_ids", prompt, is_static(prompt))
        check_vocabulary("decoder_input_ids", prompt, model.config.vocab_size)
        if prompt.shape[0] != batch or not prompt.shape[1]:
            raise UsageError(
                f"generate: decoder_input_ids has the shape {tuple(prompt.shape)}, but the input "
                f"has {batch} rows: pass (rows, at least one token)"
            )
        return prompt
    start = config.decoder_start_token_id
    if start is None:
        raise UsageError(
            "`decoder_start_token_id` has to be defined for encoder-decoder generation: pass "
            "decoder_start_token_id=... (or decoder_input_ids), or set it once in "
            "model.generation_config"
        )
    return np.full((batch, 1), start, np.int32)


def _recorded_steps(options: Options, lengths: Lengths, static: bool) -> int:
    if not (options.output_scores or options.output_logits):
        return 0
    new = lengths.stop - lengths.prompt
    return new if static else bucket(new)


def _callables(name: str, given: Any) -> tuple[Any, ...]:
    """Return a list of callables as a tuple."""
    if given is None:
        return ()
    items = list(given) if isinstance(given, Sequence) else [given]
    wrong = [item for item in items if not callable(item)]
    if wrong:
        raise UsageError(f"generate: {name} has to be a list of callables, but holds {wrong[0]!r}")
    return tuple(items)


def check_padding(plan: Plan) -> None:
    """Refuse stopping early without a token to fill rows up with."""
    stops = plan.criteria or plan.options.stop_token_sequences
    if stops and plan.options.pad_token_id is None:
        raise UsageError(
            "generate: rows that stop early are filled up with pad_token_id, but there is neither "
            "pad_token_id nor eos_token_id: pass pad_token_id=..."
        )


def _operands(
    parts: _Parts, lengths: Lengths, key: Any, params: Any, extra: Any, static: bool
) -> Operands:
    prompt, mask = parts.prompt, parts.mask
    if not static:
        prompt = widen(prompt, lengths.prefill)
        mask = None if mask is None else widen(mask, lengths.prefill, 1)
        prompt, mask = place_like(parts.source, (prompt, mask))
    number: Any = int if static else np.int32
    return Operands(
        params=params,
        prompt=prompt,
        mask=mask,
        key=key,
        prompt_length=number(lengths.prompt),
        stop_length=number(lengths.stop),
        min_length=number(lengths.minimum),
        encoder=parts.encoder if static else place_like(parts.source, parts.encoder),
        encoder_outputs=parts.encoder_outputs,
        encoder_length=number(parts.encoder_length),
        model_kwargs=parts.model_kwargs,
        extra=extra,
    )
