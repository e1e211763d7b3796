"""What an objective is, and the loss that most of them share."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from hfseq._compat import prepare_jax

prepare_jax()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from hfseq.labels import IGNORED  # noqa: E402
from hfseq.nn.reductions import first_maximum  # noqa: E402


class Objective:
    """A training objective: it turns rows into batches and batches into sums.

    **Arguments:** ``arguments`` the data flags, ``tokenizer``, and the model's ``config``. Losses
    and metrics are sums with a count, over micro-batches, devices and batches; they are divided
    once, at the end, so there is no mean of means.
    """

    name: ClassVar[str]
    auto_class: ClassVar[str]
    # Names of the sums that `loss` returns beside the loss and its count.
    sums: ClassVar[tuple[str, ...]] = ()
    # What a script trains where no flag says which architecture.
    default_model_type: ClassVar[str | None] = None
    # Tokens a row where no flag says how many, and neither tokenizer nor model sets a limit.
    default_length: ClassVar[int] = 512

    def __init__(self, arguments: Any, tokenizer: Any, config: Any):
        self.arguments, self.tokenizer, self.config = arguments, tokenizer, config

    @classmethod
    def configure(cls, config: Any, tokenizer: Any, fresh: bool) -> None:
        """Set what the objective needs in ``config`` (``fresh``: no weights are loaded)."""

    @property
    def cross_documents(self) -> bool:
        """Whether a packed row is one sequence, whatever documents are in it."""
        return getattr(self.arguments, "cross_documents", False)

    def row_length(self, length: int) -> int:
        """Return tokens of text a row, where the model is to see ``length`` of them."""
        return length

    def target_length(self, length: int) -> int:
        """Return the decoder's positions for a row that the encoder sees ``length`` of, or 0."""
        return 0

    def collate(
        self, rows: dict[str, np.ndarray], random: Any, groups: int
    ) -> dict[str, np.ndarray]:
        """Turn fetched rows into a batch of arrays whose first axis is rows, or ``groups``.

        What is drawn from ``random`` for a row must depend on that row alone.
        """
        raise NotImplementedError

    def loss(
        self,
        model: Any,
        params: Any,
        batch: dict[str, jax.Array],
        rngs: Any,
        train: bool,
        extra: Any = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """Return the sum of the losses, their count, and a dict of ``totals`` and new ``extra``."""
        raise NotImplementedError

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Turn sums (``loss``, ``count`` and those that :meth:`loss` added) into metrics.

        An evaluation's may hold ``words``, the number of words that the text has.
        """
        loss = totals["loss"] / max(totals["count"], 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def tokens(self, rows: dict[str, np.ndarray]) -> int:
        """Return how many real tokens the rows hold."""
        return int((rows["segment_ids"] > 0)[rows["valid"]].sum())

    def head_share(self) -> float:
        """Return the share of positions at which the head is computed, for counting FLOPs."""
        return 1.0


def visible(model: Any, segment_ids: jax.Array, prefix: str = "") -> dict[str, jax.Array]:
    """Say which tokens are real and, to models that take it, which document each belongs to."""
    inputs = {f"{prefix}attention_mask": (segment_ids > 0).astype(jnp.int32)}
    name = f"{prefix}segment_ids"
    return inputs | ({name: segment_ids} if model.takes(name) else {})


def cross_entropy(
    logits: jax.Array, labels: jax.Array, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum cross-entropy over labels that are not -100; returns (sum, count, number right).

    Logits are (..., vocabulary) in any type, the sum is float32. Columns from ``vocab_size`` on are
    padding for the tensor axis and get no probability.
    """
    if vocab_size is not None and logits.shape[-1] > vocab_size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    wanted = labels != IGNORED
    safe = jnp.where(wanted, labels, 0)
    losses, best = _label_losses(logits, safe)
    return jnp.where(wanted, losses, 0.0).sum(), wanted.sum(), (wanted & (best == safe)).sum()


@jax.custom_vjp
def _label_losses(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy and the most probable id at each place, in few passes over the logits.

    The derivative, softmax - one-hot, is written out: automatic differentiation would scatter into
    another array of the logits' size, and keep the softmax.
    """
    return _label_losses_forward(logits, labels)[0]


def _label_losses_forward(logits: jax.Array, labels: jax.Array) -> Any:
    wide = logits.astype(jnp.float32)
    top = wide.max(-1)
    total = jnp.log(jnp.exp(wide - top[..., None]).sum(-1)) + top
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (total - picked, first_maximum(wide, top)), (logits, labels, total)


def _label_losses_backward(saved: Any, cotangents: Any) -> tuple[jax.Array, None]:
    logits, labels, total = saved
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(jnp.float32) - total[..., None])
    change = probabilities - (ids == labels[..., None])
    return (change * cotangents[0][..., None]).astype(logits.dtype), None


_label_losses.defvjp(_label_losses_forward, _label_losses_backward)
