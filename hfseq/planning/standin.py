"""What stands in for things that a plan has not: a tokenizer, rows of text, cuDNN's attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.batches import RowRandom
from hfseq.nn import attention

SENTINELS = 100
BLOCK = 128  # queries that flash_attention looks at together


def make_tokenizer(config: Any, sentinels: bool) -> Any:
    """Return a tokenizer of the configuration's vocabulary, whose entries mean nothing.

    With ``sentinels`` its last entries are T5's, a hundred or a quarter of the vocabulary.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    size = config.vocab_size
    roles = ("bos", "pad", "eos", "unk", "cls", "sep", "mask")
    words = [f"<{role}>" for role in roles] + [f"w{i}" for i in range(max(size - len(roles), 1))]
    count = min(SENTINELS, size // 4) if sentinels else 0
    if count:
        words[-count:] = [f"<extra_id_{k}>" for k in reversed(range(count))]
    words = words[: max(size, len(roles) + 1)]
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    special: dict[str, Any] = {f"{role}_token": f"<{role}>" for role in roles}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def rows_of_text(count: int, length: int, tokenizer: Any, target_length: int = 0) -> Any:
    """Return full rows as a data set gives them; with ``target_length``, pairs."""
    word = len(tokenizer.all_special_ids)
    full = {
        "input_ids": np.full((count, length), word, np.int32),
        "segment_ids": np.ones((count, length), np.int32),
        "valid": np.ones(count, bool),
    }
    if target_length:
        full["target_ids"] = np.full((count, target_length), word, np.int32)
        full["target_segment_ids"] = np.ones((count, target_length), np.int32)
    return full


def batch_arrays(objective: Any, rows: dict[str, np.ndarray], groups: int) -> dict[str, Any]:
    """Return shapes and types of a batch of ``groups`` times ``rows``, as the feed makes them.

    What an objective returns has rows or groups first, and both grow with the groups.
    """
    count = len(rows["input_ids"])
    random = RowRandom(0, 0, np.arange(count))
    batch = objective.collate(rows, random, 1) | {"row": np.arange(count, dtype=np.int32)}
    return {
        name: jax.ShapeDtypeStruct((groups * array.shape[0], *array.shape[1:]), array.dtype)
        for name, array in batch.items()
    }


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """Attention that keeps what a flash kernel keeps, in programs for a CPU: no square of scores.

    A block of queries at a time, computed again in the backward pass. Slow, and never run.
    """
    length = query.shape[1]
    block = BLOCK if length % BLOCK == 0 else length
    if is_causal:
        below = jnp.tril(jnp.ones((length, key.shape[1]), bool), key.shape[1] - length)
        mask = below[None, None] if mask is None else mask & below

    def cut(x: jax.Array | None, start: jax.Array) -> jax.Array | None:
        if x is None or x.shape[2] == 1:
            return x
        return jax.lax.dynamic_slice_in_dim(x, start, block, axis=2)

    @jax.checkpoint
    def one(start: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(query, start, block, axis=1)
        return attention.eager_attention(
            part, key, value, cut(bias, start), cut(mask, start), scale=scale
        )

    if block == length:
        return one(jnp.int32(0))
    found = jax.lax.map(one, jnp.arange(0, length, block))
    return jnp.moveaxis(found, 0, 1).reshape(query.shape[0], length, *found.shape[3:])


__all__ = ["batch_arrays", "flash_attention", "make_tokenizer", "rows_of_text"]
