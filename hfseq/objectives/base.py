"""What an objective is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data import tokenize
from hfseq.data.arguments import TextArguments
from hfseq.data.batches import LineRows, PackedRows, RowRandom, Rows
from hfseq.data.sources import ImageRows, Images, RawText, load_splits
from hfseq.data.store import TokenStore
from hfseq.errors import UsageError


def text_row_length(
    data: TextArguments,
    limit: int | None,
    tokenizer: Any,
    longest: int,
    natural: int | None = None,
) -> int:
    """Return tokens a row: what the flag says, else the longest that tokenizer and model allow.

    ``limit`` is the model's position table, ``longest`` the default where nothing sets a limit;
    ``natural`` is the length that the data has itself.
    """
    wanted = data.row_length or natural
    if wanted and limit and wanted > limit:
        flag = "max_seq_length" if data.max_seq_length else "block_size"
        raise UsageError(
            f"--{flag} {wanted} is longer than the position table of this model allows "
            f"({limit}): give at most {limit}, or a configuration with more max_position_embeddings"
        )
    most = limit or longest
    if longest > 512:  # v4's limit for rows of causal models
        most = min(most, longest)
    return wanted or min(tokenizer.model_max_length, most)


def text_rows(
    data: TextArguments, tokenizer: Any, splits: Any, split: str, length: int, cross: bool
) -> tuple[Rows, dict[str, Any]]:
    """Tokenise a split into packed rows, or a row a line; returns facts on it, too."""
    column, dataset = splits.text_column, splits[split]
    if isinstance(dataset, Images):
        rows = ImageRows(dataset, tokenizer, length)
        total = len(dataset) * dataset.size
        return rows, {"documents": len(dataset), "tokens": total, "bytes": total}
    if isinstance(dataset, RawText):
        store = tokenize.tokenize_raw(
            dataset, tokenizer, data.cache_directory, data.overwrite_cache
        )
        return PackedRows(store, length, cross), _facts(data, split, dataset, column, store)
    if not hasattr(dataset, "__len__"):  # a streamed validation split is read once
        dataset = _materialise(dataset)
    store = tokenize.tokenize(
        dataset, tokenizer, column, cache_dir=data.cache_directory,
        line_by_line=data.line_by_line, max_length=length, num_proc=data.preprocessing_num_workers,
        overwrite=data.overwrite_cache, keep_blank=data.keep_blank,
        append_eos=getattr(data, "append_eos", False), description=f"Tokenising {split}",
    )  # fmt: skip
    facts = _facts(data, split, dataset, column, store)
    if data.line_by_line:
        return LineRows(store, length, data.pad_to_max_length), facts
    return PackedRows(store, length, cross), facts


def _facts(
    data: TextArguments, split: str, dataset: Any, column: str, store: TokenStore
) -> dict[str, Any]:
    """Count what the metrics of an evaluation divide by."""
    facts = {"documents": len(store), "tokens": store.total_tokens}
    raw = isinstance(dataset, RawText)
    if split != "train" and getattr(data, "word_perplexity", False):
        ends = getattr(data, "count_line_ends", True)
        facts["words"] = (
            dataset.count_words(ends) if raw
            else tokenize.count_words(dataset, column, data.keep_blank, ends)
        )  # fmt: skip
    if raw:
        facts["bytes"] = len(dataset)
    elif split != "train" and getattr(data, "bits_per_byte", False):
        facts["bytes"] = tokenize.count_bytes(dataset, column, data.keep_blank)
    return facts


def _materialise(stream: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(stream))


class Texts(NamedTuple):
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

    def write_texts(self, model: Any, params: Any, split: str) -> Texts | None:
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


#: Tokens of a row that an example shows, and that a model writes for it.
SHOWN, WRITTEN = 32, 32


GUESSES = 3


Sample = tuple[str, str]


def pick(rows: Any, count: int) -> dict[str, np.ndarray]:
    """Return the beginnings of ``count`` rows spread over ``rows``, cut where a document ends.

    "input_ids" and "segment_ids" (1 on what is shown, 0 after it) are int32 (count, width).
    """
    places = sorted({number * len(rows) // count for number in range(count)})
    fetched = rows.fetch(np.array(places, np.int64))
    ids, segments = (fetched[name][:, :SHOWN] for name in ("input_ids", "segment_ids"))
    shown = (segments > 0) & (segments == segments[:, :1])
    return {"input_ids": ids, "segment_ids": shown.astype(np.int32)}


def filled(model: Any, params: Any, tokenizer: Any, rows: Any, special: np.ndarray) -> list[Sample]:
    """Hide a token in the middle of each row and let the model guess it."""
    ids, shown = rows["input_ids"].copy(), rows["segment_ids"] > 0
    ordinary = shown & ~special[ids]
    kept = ordinary.any(axis=1)
    ids, shown, ordinary = ids[kept], shown[kept], ordinary[kept]
    if not len(ids):
        return []
    hidden = [int(np.flatnonzero(row)[row.sum() // 2]) for row in ordinary]
    row_numbers = np.arange(len(ids))
    ids[row_numbers, hidden] = tokenizer.mask_token_id
    logits = model(ids, attention_mask=shown.astype(np.int32), params=params).logits
    chances = np.asarray(jax.nn.softmax(logits[row_numbers, np.array(hidden)], axis=-1))
    best = np.argsort(-chances, axis=-1)[:, :GUESSES].tolist()
    visible = ordinary | (ids == tokenizer.mask_token_id)
    return [
        (
            tokenizer.decode(row[mask].tolist()).strip(),
            ", ".join(f"{tokenizer.decode([i]).strip()} ({chance[i]:.0%})" for i in guesses),
        )
        for row, mask, guesses, chance in zip(ids, visible, best, chances, strict=True)
    ]


def continued(model: Any, params: Any, tokenizer: Any, rows: Any) -> list[Sample]:
    """Let the model go on, greedily, where the first half of each row ends."""
    lengths = np.maximum(rows["segment_ids"].sum(axis=1) // 2, 1)
    limit = model.max_length()
    most = WRITTEN if limit is None else min(WRITTEN, limit - int(lengths.max()))
    if most < 1:
        return []
    samples = []
    for ids, length in zip(rows["input_ids"], lengths, strict=True):
        prompt = ids[None, :length]
        made = model.generate(
            prompt, params=params, max_new_tokens=most, do_sample=False, num_beams=1
        ).sequences
        texts = [
            tokenizer.decode(np.asarray(part).tolist(), skip_special_tokens=True).strip()
            for part in (prompt[0], made[0, length:])
        ]
        samples.append((texts[0], texts[1]))
    return samples


def restored(model: Any, params: Any, objective: Any, rows: Any) -> list[Sample]:
    """Noise the rows as in training and let the model write what they were, greedily."""
    tokenizer = objective.tokenizer
    batch = objective.collate(dict(rows), RowRandom(0, 0, np.arange(len(rows["input_ids"]))), 1)
    inputs, real = batch["input_ids"], batch["segment_ids"] > 0
    limit = model.max_length()
    most = 2 * SHOWN if limit is None else min(2 * SHOWN, limit - 1)
    made = model.generate(
        inputs, attention_mask=real.astype(np.int32), params=params, max_new_tokens=most,
        do_sample=False, num_beams=1,
    ).sequences  # fmt: skip
    roles = ("bos", "eos", "pad")
    # Masks and sentinels are what the task is about: they are shown.
    unseen = {getattr(tokenizer, f"{role}_token_id") for role in roles}
    unseen.add(getattr(model.config, "decoder_start_token_id", None))

    def text(ids: np.ndarray) -> str:
        return tokenizer.decode([i for i in np.asarray(ids).tolist() if i not in unseen]).strip()

    return [(text(row[mask]), text(out)) for row, mask, out in zip(inputs, real, made, strict=True)]
