"""How long generation may get, and the sizes of buffers that are compiled for it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from hfseq.errors import UsageError

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
