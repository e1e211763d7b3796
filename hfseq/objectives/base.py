"""What an objective is: it turns rows into batches, and batches into sums that are divided once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data import tokenize
from hfseq.data.arguments import DataArguments, TextArguments
from hfseq.data.batches import LineRows, PackedRows, RowRandom, Rows
from hfseq.data.sources import ByteArrayRows, ByteArrays, RawText, Splits, load_splits
from hfseq.errors import UsageError
from hfseq.nn.context import RowGuarantees as KnownRows
from hfseq.objectives.cross_entropy import cross_entropy as cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

#: A batch on the host, and on devices: arrays whose first axis is rows, or groups of them.
Arrays = dict[str, np.ndarray]
Batch = Mapping[str, jax.Array]
#: A tree of parameters, or of the collections beside them, by name.
Params = Mapping[str, Any]
#: The rows of a split, and facts on them.
RowsAndStats = tuple[Rows, dict[str, Any]]
#: What a model was given, and what it answered.
Sample = tuple[str, str]


class LossExtra(TypedDict, total=False):
    """What a loss returns beside its sum and count.

    totals: sums by name; a "loss" among them is reported instead of what is minimised; in
    evaluation also arrays with an entry for each row, which :meth:`Objective.row_metrics` gets for
    the whole split. extra: the collections after the call. memory: what the model knows after the
    batch, where the batch has a "memory" of before. divisor: what the sum is divided by, if not by
    the number of targets.
    """

    totals: dict[str, jax.Array]
    extra: Params
    memory: Params
    divisor: jax.Array


#: What is minimised (a sum), the number of targets, and what else is new.
Loss = tuple[jax.Array, jax.Array, LossExtra]


def make_text_rows(
    data: TextArguments,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    split: str,
    length: int,
    cross: bool,
) -> RowsAndStats:
    """Tokenise a split into packed rows, or a row a line; returns facts on it, too."""
    column, dataset = splits.text_column, splits[split]
    if isinstance(dataset, ByteArrays):
        total = len(dataset) * dataset.size
        facts: dict[str, Any] = {"documents": len(dataset), "tokens": total, "bytes": total}
        return ByteArrayRows(dataset, tokenizer, length), facts
    words, by_bytes = (
        split != "train" and getattr(data, name, False)
        for name in ("word_perplexity", "bits_per_byte")
    )
    ends = getattr(data, "count_line_ends", True)
    facts = {}  # what the metrics of an evaluation divide by
    if isinstance(dataset, RawText):
        store = tokenize.tokenize_raw(
            dataset, tokenizer, data.cache_directory, data.overwrite_cache
        )
        facts |= {"words": dataset.count_words(ends)} if words else {}
        facts["bytes"] = len(dataset)
    else:
        if not hasattr(dataset, "__len__"):  # a streamed validation split is read once
            from datasets import Dataset

            dataset = Dataset.from_list(list(dataset))
        store = tokenize.tokenize(
            dataset,
            tokenizer,
            column,
            cache_dir=data.cache_directory,
            line_by_line=data.line_by_line,
            max_length=length,
            num_proc=data.preprocessing_num_workers,
            overwrite=data.overwrite_cache,
            keep_blank=data.keep_blank,
            append_eos=getattr(data, "append_eos", False),
            description=f"Tokenising {split}",
        )
        if words:
            facts["words"] = tokenize.count_words(dataset, column, data.keep_blank, ends)
        if by_bytes:
            facts["bytes"] = tokenize.count_bytes(dataset, column, data.keep_blank)
    facts = {"documents": len(store), "tokens": store.total_tokens} | facts
    if data.line_by_line:  # which raw text refuses
        return LineRows(store, length, data.pad_to_max_length), facts
    return PackedRows(store, length, cross), facts


class ProcessorPair:
    """What makes inputs of pictures or sound, and a tokenizer, beside each other in a folder."""

    def __init__(self, inputs: Any, tokenizer: Any):
        self.inputs, self.tokenizer = inputs, tokenizer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both into ``folder``, for ``AutoProcessor`` and the Auto classes of each."""
        self.inputs.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


logger = logging.getLogger(__name__)
MAX_LOGGED_EXAMPLES = 5  # pictures or sounds that a log names before it only counts


class SkippedExamplesMixin:
    """Counts the examples that cannot be read, and says which the first ones are."""

    unit: ClassVar[str]
    skipped_examples: dict[str, dict[int, str]]  # by split and number: why

    def skip_example(self, split: str, number: int, name: str, reason: str) -> None:
        """Name an example that cannot be read, the first time."""
        found = self.skipped_examples.setdefault(split, {})
        if number in found:
            return
        found[number] = reason
        self.on_skip(split, number)
        if len(found) <= MAX_LOGGED_EXAMPLES:
            logger.warning("left out of %s: %s: %s", split, name, reason)
        elif len(found) in (10, 100, 1000, 10_000, 100_000):
            logger.warning("left out of %s so far: %d %s", split, len(found), self.unit)

    def on_skip(self, split: str, number: int) -> None:
        """Learn that an example of a split cannot be read."""

    def skip_metrics(self, split: str = "validation") -> dict[str, float]:
        """Return the metric of how many could not be read, where there are such."""
        missed = len(self.skipped_examples.get(split, ()))
        return {"left_out": float(missed)} if missed else {}


class GeneratedTexts(NamedTuple):
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
    # The flags of its data.
    data_arguments: ClassVar[type[TextArguments]] = DataArguments
    auto_class: ClassVar[str]
    # What its models are for, in the words of the Hub, where the class does not say it.
    pipeline_tag: ClassVar[str | None] = None
    # Names of the sums that `loss` returns beside the loss and its count.
    sums: ClassVar[tuple[str, ...]] = ()
    # What a script trains where no flag says which architecture.
    default_model_type: ClassVar[str | None] = None
    # Tokens a row where no flag says how many, and neither tokenizer nor model sets a limit.
    default_length: ClassVar[int] = 512
    # What its models are found by on the Hub.
    tags: ClassVar[tuple[str, ...]] = ()
    # Whether --streaming, and --do_predict on a test split, mean anything here.
    supports_streaming: ClassVar[bool] = True
    supports_predict: ClassVar[bool] = False
    # Whether the test split is judged like the validation split, by its loss.
    evaluates_test: ClassVar[bool] = False
    # What `loss` may rely on of the rows that `collate` returns, beside what arrays say: attention
    # then takes kernels that need padding at the end, or a bound of the documents in a row.
    row_layout: KnownRows | None = None
    # Whether `loss` takes a "memory" of the windows before and returns the one after this.
    carries_state: ClassVar[bool] = False

    # Whether a head runs over the vocabulary, at every position unless `head_share` says otherwise.
    has_vocabulary: ClassVar[bool] = True

    arguments: TextArguments
    splits: Any = None

    def __init__(
        self, arguments: TextArguments, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
    ):
        self.arguments, self.tokenizer, self.config = arguments, tokenizer, config
        self.setup()

    def setup(self) -> None:
        """Derive what the objective needs from arguments, tokenizer and config, once."""

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, fresh: bool
    ) -> None:
        """Set what the objective needs in ``config`` (``fresh``: no weights are loaded)."""

    @classmethod
    def configure_data(
        cls, config: PreTrainedConfig, arguments: TextArguments, plugins: Plugins | None
    ) -> None:
        """Set what the data decides in ``config``, e.g. its classes, before the model is made."""

    @classmethod
    def make_tokenizer(cls, arguments: TextArguments, folder: Path, plugins: Plugins | None) -> Any:
        """Return the tokenizer of a run that names none, or None where one must be named.

        ``arguments`` are the data flags, ``folder`` is where the run leaves its model.
        """
        return None

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Return what makes inputs of pictures or sound, in place of a tokenizer, or None.

        ``name`` is the checkpoint that the run begins with, ``options`` are for the Hub.
        """
        return None

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Get to know the model, before any data is read."""

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Load "train" and "validation" (either may be absent), as the flags say.

        Examples that :meth:`setup` has found are in ``splits`` already.
        """
        return load_splits(self.arguments, plugins) if self.splits is None else self.splits

    def natural_length(self) -> int | None:
        """Return the tokens of a row that the data is in itself, where no flag says how many."""
        return None

    def choose_length(self, limit: int | None) -> int:
        """Return how many tokens the model is to see, with a position table of ``limit``.

        That is what the flag says, else the longest that tokenizer and model allow.
        """
        data, longest = self.arguments, self.default_length
        wanted = data.row_length or self.natural_length()
        if wanted and limit and wanted > limit:
            names = ("max_seq_length", "max_length")
            flag = next((name for name in names if getattr(data, name, None)), "block_size")
            raise UsageError(
                f"--{flag} {wanted} is longer than the position table of this model allows "
                f"({limit}): give at most {limit}, or a configuration with more "
                "max_position_embeddings"
            )
        most = limit or longest
        if longest > 512:  # v4's limit for rows of causal models
            most = min(most, longest)
        return wanted or min(self.tokenizer.model_max_length, most)

    def make_rows(self, splits: Splits, split: str, length: int) -> RowsAndStats:
        """Tokenise a split into rows of ``length`` tokens of text; returns facts on it, too."""
        return make_text_rows(
            self.arguments, self.tokenizer, splits, split, length, self.cross_documents
        )

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Let the model write texts for a split that :meth:`load_splits` gave, and judge them."""
        return None

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
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

    def full_rows(self, count: int, length: int) -> Arrays:
        """Return ``count`` rows of text without padding, as :meth:`collate` takes them.

        The model is to see ``length`` tokens of each. What they say means nothing: a run that is
        only planned has no others.
        """
        shape = (count, self.row_length(length))
        word = len(self.tokenizer.all_special_ids)
        return {
            "input_ids": np.full(shape, word, np.int32),
            "segment_ids": np.ones(shape, np.int32),
            "valid": np.ones(count, bool),
        }

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Turn fetched rows into a batch of arrays whose first axis is rows, or ``groups``.

        ``rows`` are those of a step, in its order, as :class:`hfseq.data.batches.Rows` has them and
        "valid", bool (rows,). What is drawn from ``random`` for a row must depend on that row
        alone. The batch is cut into ``groups`` equal runs of rows, one for each micro-batch and
        device; an array whose first axis is ``groups`` has an entry for each of them.
        """
        raise NotImplementedError

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Return what is minimised (a sum), the number of targets, and what else is new.

        Called under ``jit`` and ``grad``. ``params`` are what is differentiated, ``rngs`` the key
        of dropout, ``extra`` the collections beside the parameters (the model's own by default).
        """
        raise NotImplementedError

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Turn sums (``loss``, ``count`` and those that :meth:`loss` added) into metrics.

        An evaluation's may hold ``words``, ``bytes`` and ``tokens`` of the text that it is of.
        """
        count = max(totals["count"], 1)
        loss = totals["loss"] / count
        accuracy = {"accuracy": totals["correct"] / count} if "correct" in totals else {}
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))} | accuracy

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Return metrics that are no sums, from arrays with an entry for each row of the split."""
        return {}

    def reported_metrics(self, split: str) -> set[str] | None:
        """Return the names of all metrics of a split; None where that is not known beforehand."""
        return None

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Write what was predicted for the rows of a split into the run's ``folder``."""

    def tokens(self, rows: Arrays) -> int:
        """Return how many real tokens the rows hold."""
        return int((rows["segment_ids"] > 0)[rows["valid"]].sum())

    def head_share(self) -> float:
        """Return the share of positions at which the head is computed, for counting FLOPs."""
        return float(self.has_vocabulary)


def forward(
    model: FlaxPreTrainedModel,
    params: Params,
    rngs: jax.Array | None,
    train: bool,
    extra: Params | None,
    *inputs: Any,
    **named: Any,
) -> tuple[Any, Params]:
    """Run a model on inputs, as :meth:`Objective.loss` has it; returns the new ``extra``, too."""
    extra = model.extra if extra is None else extra
    call: Callable[..., Any] = model
    return call(*inputs, params=params, dropout_rng=rngs, train=train, extra=extra, **named)


def attention_inputs(
    model: FlaxPreTrainedModel, segment_ids: jax.Array, prefix: str = ""
) -> dict[str, jax.Array]:
    """Say which tokens are real and, to models that take it, which document each belongs to."""
    inputs = {f"{prefix}attention_mask": (segment_ids > 0).astype(jnp.int32)}
    name = f"{prefix}segment_ids"
    return inputs | ({name: segment_ids} if model.accepts(name) else {})


#: Tokens of a row that a sample shows.
SAMPLE_LENGTH = 32


def sample_rows(rows: Rows, count: int) -> Arrays:
    """Return the beginnings of ``count`` rows spread over ``rows``, cut where a document ends.

    "input_ids" and "segment_ids" (1 on what is shown, 0 after it) are int32 (count, width).
    """
    chosen = sorted({number * len(rows) // count for number in range(count)})
    fetched = rows.fetch(np.array(chosen, np.int64))
    ids, segments = (fetched[name][:, :SAMPLE_LENGTH] for name in ("input_ids", "segment_ids"))
    shown = (segments > 0) & (segments == segments[:, :1])
    return {"input_ids": ids, "segment_ids": shown.astype(np.int32)}
