"""What an objective is, and the loss that most of them share."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hfseq._compat import prepare_jax

prepare_jax()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from hfseq.data.packing import Rows  # noqa: E402
from hfseq.data.sources import load_splits  # noqa: E402
from hfseq.labels import IGNORED  # noqa: E402
from hfseq.nn.reductions import first_maximum  # noqa: E402
from hfseq.objectives.text import text_row_length, text_rows  # noqa: E402


class Written(NamedTuple):
    """Texts that a model wrote: what they were made of, what they should be, and the scores."""

    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    metrics: dict[str, float]
    notes: dict[str, str]  # e.g. the signature of a metric


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
    # Whether --streaming, and --do_predict on a test split, mean anything here.
    streams: ClassVar[bool] = True
    predicts: ClassVar[bool] = False
    # Whether the test split is judged like the validation split, by its loss.
    judges_test: ClassVar[bool] = False
    # Whether `loss` takes a "memory" of the windows before and returns the one after this.
    carries_state: ClassVar[bool] = False

    def __init__(self, arguments: Any, tokenizer: Any, config: Any):
        self.arguments, self.tokenizer, self.config = arguments, tokenizer, config

    @classmethod
    def configure(cls, config: Any, tokenizer: Any, fresh: bool) -> None:
        """Set what the objective needs in ``config`` (``fresh``: no weights are loaded)."""

    @classmethod
    def configure_data(cls, config: Any, arguments: Any, plugins: Any) -> None:
        """Set what the data decides in ``config``, e.g. its classes, before the model is made."""

    @classmethod
    def make_tokenizer(cls, arguments: Any, folder: Path, plugins: Any) -> Any:
        """Return the tokenizer of a run that names none, or None where one must be named.

        ``arguments`` are the data flags, ``folder`` is where the run leaves its model.
        """
        return None

    def prepare(self, model: Any) -> None:
        """Get to know the model, before any data is read."""

    def load_splits(self, plugins: Any) -> Mapping[str, Any]:
        """Load "train" and "validation" (either may be absent), as the flags say."""
        return load_splits(self.arguments, plugins)

    def choose_length(self, limit: int | None) -> int:
        """Return how many tokens the model is to see, with a position table of ``limit``."""
        return text_row_length(self.arguments, limit, self.tokenizer, self.default_length)

    def make_rows(self, splits: Any, split: str, length: int) -> tuple[Rows, dict[str, Any]]:
        """Tokenise a split into rows of ``length`` tokens of text; returns facts on it, too."""
        return text_rows(
            self.arguments, self.tokenizer, splits, split, length, self.cross_documents
        )

    def write_texts(self, model: Any, params: Any, split: str) -> Written | None:
        """Let the model write texts for a split that :meth:`load_splits` gave, and judge them."""
        return None

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
        """Return what is minimised (a sum), the number of targets, and a dict of what else is new.

        The dict may have ``totals`` (sums by name; a "loss" among them is reported instead of what
        is minimised; in evaluation also arrays with an entry for each row, which
        :meth:`row_metrics` gets for the whole split), ``extra`` (the collections after the call),
        ``memory`` (what the model knows after the batch, where the batch has a "memory" of
        before), and ``divisor`` (what the sum is divided by, if not by the number of targets).
        """
        raise NotImplementedError

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Turn sums (``loss``, ``count`` and those that :meth:`loss` added) into metrics.

        An evaluation's may hold ``words``, ``bytes`` and ``tokens`` of the text that it is of.
        """
        loss = totals["loss"] / max(totals["count"], 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def row_metrics(self, rows: dict[str, np.ndarray], split: str) -> dict[str, float]:
        """Return metrics that are no sums, from arrays with an entry for each row of the split."""
        return {}

    def reported(self, split: str) -> set[str] | None:
        """Return the names of all metrics of a split; None where that is not known beforehand."""
        return None

    def save_predictions(self, rows: dict[str, np.ndarray], split: str, folder: Path) -> None:
        """Write what was predicted for the rows of a split into the run's ``folder``."""

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
    total, _, count, right = smoothed_cross_entropy(logits, labels, vocab_size, 0.0)
    return total, count, right


def smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, vocab_size: int | None, smoothing: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sum the loss with label smoothing; returns (sum, cross-entropy, count, number right).

    The target is 1 - ``smoothing`` for the label, and smoothing / (V - 1) for each other entry of
    the vocabulary (Szegedy et al., 2015, section 7, in the form of Flax's WMT example). Its entropy
    is subtracted, so that the loss is a divergence, 0 for the best prediction. PyTorch's
    ``CrossEntropyLoss(label_smoothing=s)`` spreads s / V over all entries, the label too, and
    subtracts nothing: its gradient is that of s (V - 1) / V here. See :func:`cross_entropy` for
    the arguments.
    """
    size = logits.shape[-1] if vocab_size is None else min(vocab_size, logits.shape[-1])
    if logits.shape[-1] > size:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)
    wanted = labels != IGNORED
    safe = jnp.where(wanted, labels, 0)
    losses, plain, best = _label_losses(logits, safe, smoothing, size)
    total, plain_total = (jnp.where(wanted, part, 0.0).sum() for part in (losses, plain))
    return total, plain_total, wanted.sum(), (wanted & (best == safe)).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _label_losses(
    logits: jax.Array, labels: jax.Array, smoothing: float, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Smoothed and plain cross-entropy and the most probable id at each place, in few passes.

    The derivative, softmax - target, is written out: automatic differentiation would scatter into
    another array of the logits' size, and keep the softmax. Only ``size`` columns are real.
    """
    return _label_losses_forward(logits, labels, smoothing, size)[0]


def _label_losses_forward(logits: jax.Array, labels: jax.Array, smoothing: float, size: int) -> Any:
    wide = logits.astype(jnp.float32)
    top = wide.max(-1)
    total = jnp.log(jnp.exp(wide - top[..., None]).sum(-1)) + top
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    plain = losses = total - picked
    if smoothing:
        other = smoothing / (size - 1)
        # Summed along with the exponentials; sums of the logits themselves would lose digits.
        rest = size * (total - top) - _real(wide - top[..., None], size).sum(-1)
        losses = (1 - smoothing - other) * plain + other * rest - _entropy(smoothing, size)
    return (losses, plain, first_maximum(wide, top)), (logits, labels, total)


def _label_losses_backward(smoothing: float, size: int, saved: Any, cotangents: Any) -> Any:
    logits, labels, total = saved
    smoothed, plain = cotangents[0][..., None], cotangents[1][..., None]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    probabilities = jnp.exp(logits.astype(jnp.float32) - total[..., None])
    if not smoothing:
        change = (probabilities - (ids == labels[..., None])) * (smoothed + plain)
        return change.astype(logits.dtype), None
    other = smoothing / (size - 1)
    picked = jnp.where(ids == labels[..., None], (1 - smoothing - other) * smoothed + plain, 0.0)
    change = _real(probabilities * (smoothed + plain) - other * smoothed, size) - picked
    return change.astype(logits.dtype), None


_label_losses.defvjp(_label_losses_forward, _label_losses_backward)


def _real(x: jax.Array, size: int) -> jax.Array:
    """Set columns from ``size`` on to 0; comparing columns is slow on a CPU, so only if need be."""
    return x if x.shape[-1] == size else jnp.where(jnp.arange(x.shape[-1]) < size, x, 0.0)


def _entropy(smoothing: float, size: int) -> float:
    """The entropy of a smoothed target, in nats."""
    kept = 1 - smoothing
    return -kept * math.log(kept) - smoothing * math.log(smoothing / (size - 1))
