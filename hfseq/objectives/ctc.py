"""Connectionist temporal classification (Graves et al., 2006), as PyTorch's models count it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hfseq.errors import UsageError, nearest

REDUCTIONS = ("sum", "mean", "none")


def ctc_loss(
    logits: jax.Array,
    labels: jax.Array,
    lengths: jax.Array | None = None,
    *,
    blank: int = 0,
    reduction: str = "sum",
    zero_infinity: bool = False,
) -> jax.Array:
    """Return the loss of reading ``labels`` from ``logits``, whose frames need not be aligned.

    **Arguments:** ``logits`` (batch, frames, vocabulary) in any type, of which the first
    ``lengths`` (batch,) of a row count; ``labels`` (batch, letters), padded on the right with
    negative numbers such as -100; ``blank`` the id of no letter, ``config.pad_token_id`` of
    wav2vec 2.0; ``reduction`` is ``config.ctc_loss_reduction``: "sum" over the rows, "mean" of each
    row's loss by its letters, or "none". More letters than frames cost infinity, or with
    ``zero_infinity`` nothing. float32.
    """
    import optax

    if reduction not in REDUCTIONS:
        raise UsageError(f"no reduction '{reduction}'{nearest(reduction, REDUCTIONS)}")
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    rows, frames, _ = logits.shape
    lengths = jnp.full(rows, frames) if lengths is None else jnp.asarray(lengths)
    padded, absent = jnp.arange(frames) >= lengths[:, None], labels < 0
    safe = jnp.where(absent, 0, labels)
    losses = optax.ctc_loss(
        logits, padded.astype(jnp.float32), safe, absent.astype(jnp.float32), blank_id=blank
    )
    letters = (~absent).sum(-1)
    # Between two equal letters stands a frame without one.
    twice = ((labels[:, 1:] == labels[:, :-1]) & ~absent[:, 1:]).sum(-1)
    losses = jnp.where(letters + twice <= lengths, losses, 0.0 if zero_infinity else jnp.inf)
    if reduction == "mean":
        return (losses / jnp.maximum(letters, 1)).mean()
    return losses.sum() if reduction == "sum" else losses
