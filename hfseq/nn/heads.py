"""Output heads over the vocabulary, and reductions of their logits over the tokens of a row.

The logits of a masked language model are an array `(batch, length, vocab_size)`, which is often the
largest array of the whole program. Sparse encoders only need the maximum or a sum over the tokens
of each row. Within `reduced_logits`, `vocabulary_logits` computes this reduction block by block, so
the full array exists neither in the forward pass nor in the backward pass.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.nn.positions import gather_positions

#: Maps hidden states, `(..., features)`, to logits, `(..., vocab_size)`.
Head = Callable[[jax.Array], jax.Array]

#: Number of tokens per row whose logits are computed at the same time.
BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class LogitReduction:
    """A reduction of logits over the tokens of each row.

    Attributes:
        mask: Mask of the tokens, `(batch, length)`. The logits of hidden tokens count as 0.
        activation: Function that is applied to float32 logits. It must be monotonically increasing
            if ``strategy`` is ``"max"``.
        strategy: ``"max"`` or ``"sum"``.
        block: Number of tokens per row whose logits are computed at the same time.
    """

    mask: jax.Array
    activation: Callable[[jax.Array], jax.Array]
    strategy: str = "max"
    block: int = BLOCK_TOKENS

    def reduce(self, logits: jax.Array, mask: jax.Array) -> jax.Array:
        """Reduces logits `(batch, tokens, vocab_size)` to float32 values `(batch, vocab_size)`."""
        logits = logits * mask[..., None].astype(logits.dtype)
        if self.strategy == "max":
            return self.activation(logits.max(axis=1).astype(jnp.float32))
        return self.activation(logits.astype(jnp.float32)).sum(axis=1)

    def __call__(self, head: Head, hidden_states: jax.Array) -> jax.Array:
        """Applies a head to hidden states `(batch, length, features)` and reduces its logits."""
        length = hidden_states.shape[1]
        if length <= self.block:
            return self.reduce(head(hidden_states), self.mask)
        blocks = -(-length // self.block)
        padding = blocks * self.block - length
        hidden_states = jnp.pad(hidden_states, ((0, 0), (0, padding), (0, 0)))
        mask = jnp.pad(self.mask, ((0, 0), (0, padding))).astype(hidden_states.dtype)

        def split(array: jax.Array) -> jax.Array:
            array = array.reshape(array.shape[0], blocks, self.block, *array.shape[2:])
            return array.swapaxes(0, 1)

        if self.strategy == "max":
            # The parameters that the head uses become explicit arguments, for their gradients.
            function, constants = jax.closure_convert(head, hidden_states[:, : self.block])
            largest = _blockwise_max(function, split(hidden_states), split(mask), tuple(constants))
            return self.activation(largest.astype(jnp.float32))

        @jax.checkpoint
        def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + self.reduce(head(block[0]), block[1]), None

        shape = jax.eval_shape(head, hidden_states[:, 0]).shape
        total, _ = jax.lax.scan(
            add, jnp.zeros(shape, jnp.float32), (split(hidden_states), split(mask))
        )
        return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise_max(
    head: Callable[..., jax.Array], states: jax.Array, mask: jax.Array, constants: tuple[Any, ...]
) -> jax.Array:
    """Returns the maximum of `logits * mask` over all tokens of a row.

    Args:
        head: Maps hidden states and `constants` to logits.
        states: Hidden states, `(blocks, batch, block, features)`.
        mask: Mask of the tokens, `(blocks, batch, block)`.
        constants: The parameters of the head.

    Returns:
        `(batch, vocab_size)` in the dtype of the logits.
    """
    return _forward_max(head, states, mask, constants)[0]


def _forward_max(
    head: Callable[..., jax.Array], states: jax.Array, mask: jax.Array, constants: tuple[Any, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Returns the maximum, and the inputs and positions that the backward pass requires."""
    logits = jax.eval_shape(head, states[0], *constants)
    shape = logits.shape[0], logits.shape[-1]

    def update(
        best: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        number, hidden, visible = block
        values = head(hidden, *constants)
        values = values * visible[..., None].astype(values.dtype)
        top, position = values.max(axis=1), values.argmax(axis=1).astype(jnp.int32)
        larger = top > best[0]
        position += number * hidden.shape[1]
        return (jnp.where(larger, top, best[0]), jnp.where(larger, position, best[1])), None

    start = jnp.full(shape, -jnp.inf, logits.dtype), jnp.zeros(shape, jnp.int32)
    numbers = jnp.arange(len(states), dtype=jnp.int32)
    (largest, positions), _ = jax.lax.scan(update, start, (numbers, states, mask))
    return largest, (states, mask, constants, positions)


def _backward_max(
    head: Callable[..., jax.Array], residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[Any, ...]:
    """Propagates the gradient of each maximum to the logit at its position."""
    states, mask, constants, positions = residuals

    def backward(
        total: tuple[Any, ...], block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[Any, ...], jax.Array]:
        number, hidden, visible = block
        tokens = number * hidden.shape[1] + jnp.arange(hidden.shape[1], dtype=jnp.int32)
        selected = positions[:, None] == tokens[None, :, None]
        cotangent = jnp.where(selected, gradient[:, None], 0)
        cotangent = cotangent * visible[..., None].astype(cotangent.dtype)
        _, vjp = jax.vjp(head, hidden, *constants)
        hidden_gradient, *parts = vjp(cotangent)
        return tuple(a + b for a, b in zip(total, parts, strict=True)), hidden_gradient

    numbers = jnp.arange(len(states), dtype=jnp.int32)
    zeros = tuple(jnp.zeros_like(constant) for constant in constants)
    parts, state_gradients = jax.lax.scan(backward, zeros, (numbers, states, mask))
    return state_gradients, np.zeros(mask.shape, mask.dtype), parts


_blockwise_max.defvjp(_forward_max, _backward_max)

#: Maps a head and hidden states, `(batch, length, features)`, to the result of the model.
Reduction = Callable[[Head, jax.Array], Any]

_reduction: contextvars.ContextVar[Reduction | None] = contextvars.ContextVar(
    "hfseq_logit_reduction", default=None
)


@contextlib.contextmanager
def reduced_logits(reduction: Reduction) -> Iterator[None]:
    """Makes `vocabulary_logits` return the result of `reduction` within a `with` block."""
    token = _reduction.set(reduction)
    try:
        yield
    finally:
        _reduction.reset(token)


def vocabulary_logits(
    head: Head, hidden_states: jax.Array, masked_positions: jax.Array | None = None
) -> Any:
    """Applies the head of a language model.

    Args:
        head: Maps hidden states, `(..., features)`, to logits, `(..., vocab_size)`. It must process
            each token independently.
        hidden_states: `(batch, length, features)`.
        masked_positions: Indices of the `k` tokens to predict in each group of rows,
            `(groups, k)`, see `gather_positions`. The default is all tokens.

    Returns:
        Logits, `(batch, length, vocab_size)`, or `(groups, k, vocab_size)` with
            `masked_positions`. Within `reduced_logits`, the result of the reduction.
    """
    hidden_states = gather_positions(hidden_states, masked_positions)
    reduction = _reduction.get()
    return head(hidden_states) if reduction is None else reduction(head, hidden_states)
