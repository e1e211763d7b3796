"""What an objective is."""

from __future__ import annotations

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
from hfseq.objectives.cross_entropy import cross_entropy  # noqa: E402
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

    def samples(self, model: Any, params: Any, rows: Any, count: int) -> list[tuple[str, str]]:
        """Return up to ``count`` pairs of what the model was given and what it answered.

        ``rows`` are of :meth:`make_rows`; the pairs are for the card.
        """
        return []

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


# With what most objectives need beside, so that a plugin imports from one place.
__all__ = ["IGNORED", "Objective", "Written", "cross_entropy", "visible"]
