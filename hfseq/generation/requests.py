"""From the arguments of ``generate`` to a plan and its operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hfseq.errors import UsageError
from hfseq.generation import prompts
from hfseq.generation.checks import check_arguments, check_options
from hfseq.generation.lengths import (
    SMALLEST_ENCODER_BUCKET,
    Lengths,
    bucket,
    resolve_lengths,
)
from hfseq.generation.options import Options, merge, resolve
from hfseq.generation.plan import Operands, Plan
from hfseq.generation.sampling import make_key
from hfseq.generation.stopping import stop_criteria

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
    static = prompts.is_static(input_ids, inputs, params, prng_key, extras.get("extra"))
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
    prompts.check_vocabulary("input_ids", ids, model.config.vocab_size)
    if mask is None:
        mask = prompts.infer_mask(ids, options.pad_token_id, options.eos_token_id)
    else:
        ids, mask = prompts.pad_left(ids, prompts.as_mask("attention_mask", mask, ids, static))
    if mask is None and not static:  # so that batches with and without padding share a program
        mask = np.ones_like(ids)
    return _Parts(ids, mask, {}, None, 0, inputs, source)


def _nonempty(ids: Any, config: Any, static: bool) -> Any:
    """Return the prompt, which is the begin token where there is none."""
    if ids is not None:
        ids = prompts.as_ids("input_ids", ids, static)
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
        ids = prompts.as_ids("input_ids", ids, static)
        if not ids.size:
            raise UsageError("generate: input_ids holds no tokens: pass at least one a row")
        prompts.check_vocabulary("input_ids", ids, model.config.vocab_size)
        if mask is not None:
            mask = prompts.as_mask("attention_mask", mask, ids, static)
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
        mask = prompts.as_mask("decoder_attention_mask", mask, prompt, static)
        prompt, mask = prompts.pad_left(prompt, mask)
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
    wide = {"input_ids": prompts.widen(ids, width)}
    return wide | {"attention_mask": prompts.widen(mask, width)}


def _decoder_prompt(
    model: Any, config: Any, inputs: dict[str, Any], batch: int, static: bool
) -> Any:
    """Return what the decoder begins with: the caller's tokens, or the start token."""
    prompt = inputs.pop("decoder_input_ids", None)
    if prompt is not None:
        prompt = prompts.as_ids("decoder_input_ids", prompt, prompts.is_static(prompt))
        prompts.check_vocabulary("decoder_input_ids", prompt, model.config.vocab_size)
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
        prompt = prompts.widen(prompt, lengths.prefill)
        mask = None if mask is None else prompts.widen(mask, lengths.prefill, 1)
        prompt, mask = prompts.place_like(parts.source, (prompt, mask))
    number: Any = int if static else np.int32
    return Operands(
        params=params,
        prompt=prompt,
        mask=mask,
        key=key,
        prompt_length=number(lengths.prompt),
        stop_length=number(lengths.stop),
        min_length=number(lengths.minimum),
        encoder=parts.encoder if static else prompts.place_like(parts.source, parts.encoder),
        encoder_outputs=parts.encoder_outputs,
        encoder_length=number(parts.encoder_length),
        model_kwargs=parts.model_kwargs,
        extra=extra,
    )
