"""The base class of training objectives.

An objective turns rows of data into batches, and batches into sums of losses and metrics. The
trainer adds up these sums over batches, and divides them by their counts when it reports them.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data import tokenize
from hfseq.data.arguments import DataArguments, TextArguments
from hfseq.data.batches import Batches, LineRows, PackedRows, RowRandom, Rows
from hfseq.data.sources import ByteArrayRows, ByteArrays, RawText, Splits, is_raw, load_splits
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.nn.context import RowGuarantees
from hfseq.objectives.cross_entropy import cross_entropy as cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)
# Each process reads different examples, so every process logs the examples that it skips.
skip_logger = logging.getLogger("hfseq.skipped")
skip_logger.setLevel(logging.WARNING)

#: The arrays of a batch, on the host (`Arrays`) and on devices (`Batch`). The first axis of each
#: array has one entry per row, or one entry per group of rows.
Arrays = dict[str, np.ndarray]
Batch = Mapping[str, jax.Array]
#: A tree of parameters, or of the model's non-parameter collections such as batch statistics.
Params = Mapping[str, Any]
#: The rows of a split, and statistics such as the number of documents and tokens.
RowsAndStats = tuple[Rows, dict[str, Any]]
#: The input of a model and its output.
Sample = tuple[str, str]


class LossExtra(TypedDict, total=False):
    """Optional results of :meth:`Objective.loss`, in addition to the loss and its count.

    Attributes:
        totals: Sums by name, from which :meth:`Objective.metrics` computes metrics. An entry "loss"
            replaces the minimized sum in reports. In evaluation, `totals` can also contain arrays
            with one entry per row. :meth:`Objective.row_metrics` receives these arrays for the
            whole split.
        extra: The model's non-parameter collections after the call.
        memory: The model's state after the batch. Set if the batch contains "memory", the state
            after the previous window of the same rows.
        divisor: The divisor of the minimized sum, if it is not the number of targets.
    """

    totals: dict[str, jax.Array]
    extra: Params
    memory: Params
    divisor: jax.Array


#: The sum to minimize, the number of targets, and further results.
Loss = tuple[jax.Array, jax.Array, LossExtra]


def make_text_rows(
    data: TextArguments,
    tokenizer: PreTrainedTokenizerBase,
    splits: Splits,
    split: str,
    length: int,
    cross_documents: bool,
) -> RowsAndStats:
    """Tokenizes a split into packed rows, or into one row per line.

    Args:
        data: Data flags.
        tokenizer: The tokenizer.
        splits: The loaded splits.
        split: Name of the split to tokenize.
        length: Tokens per row.
        cross_documents: Whether a packed row is one sequence, regardless of document boundaries.

    Returns:
        The rows, and statistics of the split: the number of "documents" and "tokens" and, if they
            are counted, of "words" and "bytes".
    """
    column, dataset = splits.text_column, splits[split]
    if isinstance(dataset, ByteArrays):
        num_tokens = len(dataset) * dataset.size
        stats: dict[str, Any] = {
            "documents": len(dataset),
            "tokens": num_tokens,
            "bytes": num_tokens,
        }
        return ByteArrayRows(dataset, tokenizer, length), stats
    count_words, count_bytes = (
        split != "train" and getattr(data, name, False)
        for name in ("word_perplexity", "bits_per_byte")
    )
    count_line_ends = getattr(data, "count_line_ends", True)
    stats = {}  # "words" and "bytes" are divisors of evaluation metrics
    if isinstance(dataset, RawText):
        store = tokenize.tokenize_raw(
            dataset, tokenizer, data.cache_directory, data.overwrite_cache
        )
        stats |= {"words": dataset.count_words(count_line_ends)} if count_words else {}
        stats["bytes"] = len(dataset)
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
            description=f"Tokenizing {split}",
        )
        stats |= {"text_column": column, "rows": len(dataset)}
        logger.info(
            "%s: %d of %d rows have text in the column '%s'",
            *(split, len(store), len(dataset), column),
        )
        if data.line_by_line and (full := int((np.diff(store.offsets) >= length).sum())):
            logger.info(
                "%s: %d documents have %d tokens or more and are truncated to this length",
                *(split, full, length),
            )
        if count_words:
            stats["words"] = tokenize.count_words(dataset, column, data.keep_blank, count_line_ends)
        if count_bytes:
            stats["bytes"] = tokenize.count_bytes(dataset, column, data.keep_blank)
    stats = {"documents": len(store), "tokens": store.total_tokens} | stats
    if data.line_by_line:  # never true for raw text, for which the flag was rejected
        return LineRows(store, length, data.pad_to_max_length), stats
    return PackedRows(store, length, cross_documents), stats


@dataclasses.dataclass(frozen=True)
class AuxiliaryModel:
    """A second model that an objective needs, whose parameters are not trained.

    Attributes:
        source: Directory or Hub name of the model. `None` means the weights from which the run
            starts. If the run trains an adapter, the model then shares the parameters of the base
            model with the trained model.
        head: Suffix of the model class, such as "ForCausalLM". Default: the suffix of the class
            that the objective trains.
        dtype: Dtype of the parameters. Default: the dtype of the trained model's parameters.
        flag: The flag that names the model, for messages.
    """

    source: str | None = None
    head: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    flag: str = "model_name_or_path"


@dataclasses.dataclass(frozen=True)
class Auxiliary:
    """The structure of an auxiliary model, without its parameters.

    Attributes:
        model: The model.
        shared_paths: The paths of the parameters that it shares with the trained model, or `None`
            if it shares none.
    """

    model: FlaxPreTrainedModel
    shared_paths: frozenset[trees.Path] | None = None

    def params(self, params: Params, stored: Params) -> Params:
        """Returns the parameters of the auxiliary model.

        Args:
            params: The parameters of the trained model.
            stored: The parameters that belong to the auxiliary model only.
        """
        if self.shared_paths is None:
            return stored
        flat = trees.flatten(params) | trees.flatten(stored)
        return trees.unflatten({path: flat[path] for path in self.shared_paths})


class ProcessorPair:
    """An image processor or feature extractor together with a tokenizer, saved in one directory."""

    def __init__(self, input_processor: Any, tokenizer: Any):
        self.input_processor, self.tokenizer = input_processor, tokenizer

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves the processor and the tokenizer in ``folder``.

        ``AutoProcessor`` loads the processor together with the tokenizer. The Auto class of the
        processor loads only the processor, and ``AutoTokenizer`` only the tokenizer.
        """
        self.input_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


MAX_LOGGED_EXAMPLES = 5  # examples logged by name; after that only counts are logged


class SkippedExamplesMixin:
    """Records and logs the examples that cannot be read.

    In training and evaluation, each process reads only a part of the rows. It therefore knows only
    the examples that it skipped itself, until :meth:`add_skipped` adds the examples that other
    processes skipped.

    Attributes:
        unit: Plural noun for the examples in log messages.
        skipped_examples: The reason for each skipped example, by split and index.
    """

    unit: ClassVar[str]
    skipped_examples: dict[str, dict[int, str]]
    _unread: dict[str, int]

    def skip_example(self, split: str, index: int, name: str, reason: str) -> None:
        """Records an example that cannot be read, and logs it the first time.

        Args:
            split: Name of the split.
            index: Index of the example in the split.
            name: Name of the example in the log, for instance its path.
            reason: Why it cannot be read.
        """
        reasons = self.skipped_examples.setdefault(split, {})
        if index in reasons:
            return
        reasons[index] = reason
        self.on_skip(split, index)
        if len(reasons) <= MAX_LOGGED_EXAMPLES:
            skip_logger.warning("skipped in %s: %s: %s", split, name, reason)
        elif len(reasons) in (10, 100, 1000, 10_000, 100_000):
            skip_logger.warning("skipped in %s so far: %d %s", split, len(reasons), self.unit)

    def add_skipped(self, split: str, indices: Sequence[int]) -> None:
        """Records the examples that other processes have skipped.

        Args:
            split: Name of the split.
            indices: Indices of the examples in the split.
        """
        reasons = self.skipped_examples.setdefault(split, {})
        for index in indices:
            if index not in reasons:
                reasons[index] = "skipped by another process"
                self.on_skip(split, index)

    def on_skip(self, split: str, index: int) -> None:
        """Handles a skipped example. It is called once per example and does nothing by default."""

    def count_unread(self, split: str, num_valid: int, num_read: int) -> bool:
        """Counts consecutive examples of a split that could not be read.

        Args:
            split: Name of the split.
            num_valid: Number of examples of this process in the current batch.
            num_read: Number of these examples that could be read.

        Returns:
            Whether a whole global batch could not be read. To determine this, the method counts the
            unreadable examples since the last batch with a readable example. The result is true if
            their number has reached the number of examples in a batch of all processes.
        """
        counts = self.__dict__.setdefault("_unread", {})
        counts[split] = 0 if num_read else counts.get(split, 0) + num_valid
        return counts[split] >= num_valid * jax.process_count() > 0

    def skip_metrics(self, split: str = "validation") -> dict[str, float]:
        """Returns the metric ``left_out``, the number of skipped examples, if there are any."""
        count = len(self.skipped_examples.get(split, ()))
        return {"left_out": float(count)} if count else {}


class GeneratedTexts(NamedTuple):
    """Texts generated for a split.

    Attributes:
        sources: The inputs.
        references: The expected texts.
        hypotheses: The generated texts.
        metrics: Scores of the generated texts.
        notes: Descriptions of how metrics were computed, by the name of the metric. An example is
            the sacreBLEU signature.
    """

    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    metrics: dict[str, float]
    notes: dict[str, str]


class Objective:
    """Base class of training objectives, which define the batches and the loss of a training run.

    Losses and metrics are returned as sums and counts. Sums and counts are added up over
    micro-batches, devices and batches. The sums are divided by the counts once at the end. The
    result is therefore an exact mean, and not a mean of means.

    Args:
        arguments: The data flags.
        tokenizer: The tokenizer, or the processor that :meth:`load_processor` returned.
        config: The model's configuration.
    """

    name: ClassVar[str]
    # The dataclass of the data flags.
    data_arguments: ClassVar[type[TextArguments]] = DataArguments
    auto_class: ClassVar[str]
    # The pipeline tag of the trained models on the Hub, if the model class does not determine it.
    pipeline_tag: ClassVar[str | None] = None
    # Names of the sums that `loss` returns in addition to the loss and its count.
    sums: ClassVar[tuple[str, ...]] = ()
    # The architecture to train if no flag specifies one.
    default_model_type: ClassVar[str | None] = None
    # Tokens per row if neither a flag nor the tokenizer nor the model sets a limit.
    default_length: ClassVar[int] = 512
    # Tags of the trained models on the Hub.
    tags: ClassVar[tuple[str, ...]] = ()
    # Whether the model card also contains the outputs of `samples` before training.
    compares_samples: ClassVar[bool] = False
    # BibTeX entry of the method, for the model card.
    citation: ClassVar[str] = ""
    # Whether --streaming is supported, and whether --do_predict is supported on a test split.
    supports_streaming: ClassVar[bool] = True
    supports_predict: ClassVar[bool] = False
    # Whether the loss of the test split is evaluated, as for the validation split.
    evaluates_test: ClassVar[bool] = False
    # Properties of the rows of `collate` on which `loss` may rely, although the arrays do not show
    # them. They allow attention kernels that require padding at the end or a maximum number of
    # documents per row.
    row_guarantees: RowGuarantees | None = None
    # Arrays of `collate` whose second axis has a length that depends on the rows, and the padding
    # value of each. With several processes, they are padded to the largest length in any process.
    variable_width: ClassVar[Mapping[str, int]] = {}
    # Whether `loss` accepts a "memory" of the previous windows and returns the updated one.
    carries_state: ClassVar[bool] = False

    # Whether `loss` requires the sums that `step_totals` returns.
    uses_step_totals: ClassVar[bool] = False
    # The structures of the models that `auxiliary_models` names. The batch of `loss` contains their
    # parameters under "auxiliary".
    auxiliary: Mapping[str, Auxiliary] = {}
    # Names of the auxiliary models that are only used before training.
    precomputed_auxiliary: frozenset[str] = frozenset()
    # Whether a batch can contain rows of several datasets of a mixture (`--train_mixture`).
    mixes_rows: ClassVar[bool] = True

    # Whether the model has an output head over the vocabulary. The count of FLOPs assumes that the
    # head runs at every position, unless `head_share` is overridden.
    has_vocabulary: ClassVar[bool] = True

    arguments: TextArguments
    splits: Any = None
    # Number of training steps of the run, which is set after the data is loaded.
    total_steps: int = 0

    def __init__(
        self, arguments: TextArguments, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
    ):
        self.arguments, self.tokenizer, self.config = arguments, tokenizer, config
        self.setup()

    def setup(self) -> None:
        """Derives settings of the objective from arguments, tokenizer and configuration.

        The constructor calls this method once.
        """

    @classmethod
    def task_head(cls, config: PreTrainedConfig, **download: Any) -> str:
        """Returns the suffix of the class of models with this configuration.

        Args:
            config: The configuration, which names the directory or repository of the model.
            **download: Options for reading further files of a repository.
        """
        return cls.auto_class

    def auxiliary_models(self) -> dict[str, AuxiliaryModel]:
        """Returns further models that the loss needs, by name. They are not trained."""
        return {}

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Sets the values in ``config`` that the objective determines.

        Args:
            config: The configuration of the model, changed in place.
            tokenizer: The tokenizer, or the processor that :meth:`load_processor` returned.
            from_scratch: Whether the model is initialized without loading weights.
        """

    @classmethod
    def configure_data(
        cls, config: PreTrainedConfig, arguments: TextArguments, plugins: Plugins | None
    ) -> None:
        """Sets values in ``config`` that depend on the data, before the model is created.

        For example, a classification objective sets the names of the classes.
        """

    @classmethod
    def make_tokenizer(cls, arguments: TextArguments, folder: Path, plugins: Plugins | None) -> Any:
        """Returns a tokenizer for a run whose flags do not specify one.

        ``None`` means that the objective requires a flag for the tokenizer.

        Args:
            arguments: The data flags.
            folder: The run's output directory.
            plugins: The loaded plugins.
        """
        return None

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Returns an image or audio processor to use in place of a tokenizer.

        ``None`` means that the objective uses a tokenizer.

        Args:
            name: Directory or Hub name of the checkpoint from which the run starts. ``None`` for a
                new model.
            arguments: The data flags.
            **options: Download options for the Hub.
        """
        return None

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks or configures the model before any data is read.

        ``auxiliary`` contains the structures of the auxiliary models.
        """

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Loads the splits that the flags specify, such as "train" and "validation".

        If :meth:`setup` has already stored examples in ``splits``, these are returned.
        """
        return load_splits(self.arguments, plugins) if self.splits is None else self.splits

    def natural_length(self) -> int | None:
        """Returns the row length that the data determines, which is used if no flag sets one."""
        return None

    def choose_length(self, limit: int | None) -> int:
        """Returns the number of tokens per row that the model reads.

        This is the value of the flag or, without a flag, the maximum that both tokenizer and model
        allow.

        Args:
            limit: Maximum number of positions of the model, or ``None`` if it has no limit.

        Raises:
            UsageError: The flag exceeds ``limit``.
        """
        data, default_length = self.arguments, self.default_length
        length = data.row_length or self.natural_length()
        if length and limit and length > limit:
            names = ("max_seq_length", "max_length")
            flag = next((name for name in names if getattr(data, name, None)), "block_size")
            raise UsageError(
                f"--{flag} {length} exceeds the {limit} positions of this model. Use at most "
                f"{limit}, or a configuration with a larger max_position_embeddings."
            )
        max_length = limit or default_length
        # For causal models, the default is also an upper limit, as in the Transformers 4 scripts.
        if default_length > 512:
            max_length = min(max_length, default_length)
        return length or min(self.tokenizer.model_max_length, max_length)

    def make_rows(self, splits: Splits, split: str, length: int) -> RowsAndStats:
        """Tokenizes a split and divides it into rows of ``length`` tokens.

        Returns:
            The rows, and statistics of the split for the run's description.
        """
        return make_text_rows(
            self.arguments, self.tokenizer, splits, split, length, self.cross_documents
        )

    def make_batches(self, rows: Rows, batch_size: int, seed: int) -> Batches:
        """Returns the training batches of rows from :meth:`make_rows`.

        Args:
            rows: The rows.
            batch_size: Rows per batch, over all processes.
            seed: Seed of the order.
        """
        return Batches(rows, batch_size, seed)

    def part(self, arguments: TextArguments) -> Objective:
        """Returns the objective of another dataset of a mixture, with the same model.

        Args:
            arguments: The data flags of the dataset.
        """
        other = copy.copy(self)
        other.arguments, other.splits = arguments, None
        other.setup()
        return other

    def add_part(self, number: int, part: Objective) -> None:
        """Adds a dataset of a mixture.

        Args:
            number: Number of the dataset, from 1. Dataset 0 is the dataset of this objective.
            part: The objective of the added dataset.
        """

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Generates texts for a split of :meth:`load_splits`, and computes their scores.

        Objectives that do not generate texts return ``None``, which is the default.
        """
        return None

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Returns sample inputs and outputs of the model for the model card.

        Args:
            model: The model.
            params: The parameters to use.
            rows: Rows of :meth:`make_rows`.
            count: Maximum number of samples.
        """
        return []

    def card_rows(
        self, counts: Mapping[str, Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        """Returns the rows of the table "Method" in the model card, or no rows to omit the table.

        Args:
            counts: The statistics of each split that :meth:`make_rows` returned.
            log: The records of the metrics log, in order.
        """
        return {}

    @property
    def cross_documents(self) -> bool:
        """Whether a packed row is one sequence, regardless of document boundaries."""
        return getattr(self.arguments, "cross_documents", False)

    def row_length(self, length: int) -> int:
        """Returns the tokens of text per row if the model reads ``length`` tokens."""
        return length

    def target_length(self, length: int) -> int:
        """Returns the decoder positions per row of ``length`` encoder positions, or 0 without a
        decoder.
        """
        return 0

    @property
    def sequences_per_row(self) -> int:
        """The number of sequences of full length that the model reads per row."""
        return 1

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns ``count`` rows of text without padding, in the format of :meth:`collate`.

        The tokens are arbitrary. ``hfseq plan`` uses these rows in place of data.

        Args:
            count: Number of rows.
            length: Tokens that the model reads per row.
        """
        shape = (count, self.row_length(length))
        token_id = len(self.tokenizer.all_special_ids)
        return {
            "input_ids": np.full(shape, token_id, np.int32),
            "segment_ids": np.ones(shape, np.int32),
            "valid": np.ones(count, bool),
        }

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Turns fetched rows into a batch of arrays.

        With several processes, each one collates only the rows that its devices hold. The arrays of
        a row must therefore not depend on other rows. Computations that involve all rows of a step
        belong in :meth:`loss`. Its arrays contain the rows of all processes, so that a sum over
        rows is a sum over all processes.

        Args:
            rows: The arrays that :meth:`hfseq.data.batches.Rows.fetch` returns for rows of a step,
                in order, and "valid", a bool array `(rows,)`.
            random: Source of random numbers. The values drawn for a row may depend on that row
                only. ``random.rows`` contains the positions of the rows in the batch of the step,
                or in evaluation their indices in the split.
            groups: Number of equal, contiguous groups of rows, one per micro-batch and device.

        Returns:
            Arrays whose first axis has one entry per row, or one entry per group. The other axes
            must have the same length in all processes, except for the second axis of the arrays in
            ``variable_width``.
        """
        raise NotImplementedError

    def step_totals(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        extra: Params | None,
    ) -> dict[str, jax.Array]:
        """Returns sums over a micro-batch that the loss needs for the whole step.

        The trainer adds the sums of all micro-batches before the first call of :meth:`loss`, whose
        batch contains them under "step_totals". No gradient passes through them. This method is
        only called if ``uses_step_totals`` is set.

        Args:
            model: The model.
            params: The parameters.
            batch: A micro-batch, as in :meth:`loss`.
            extra: The model's non-parameter collections.
        """
        return {}

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the sum to minimize, the number of targets and optional further results.

        This method is called under ``jit`` and ``grad``.

        Args:
            model: The model.
            params: The parameters, with respect to which the loss is differentiated.
            batch: A batch of :meth:`collate`, on devices. It also contains the parameters of
                auxiliary models under "auxiliary", and the sums of :meth:`step_totals` under
                "step_totals", if the objective uses them.
            rngs: PRNG key for dropout, or ``None`` to disable dropout.
            train: Whether this is a training step.
            extra: The model's non-parameter collections. Default: ``model.extra``.
        """
        raise NotImplementedError

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Turns sums into metrics.

        Args:
            totals: ``loss``, ``count``, and the other sums that :meth:`loss` returned. In
                evaluation, they can also contain the number of ``words``, ``bytes`` and ``tokens``
                of the text.
        """
        count = max(totals["count"], 1)
        loss = totals["loss"] / count
        accuracy = {"accuracy": totals["correct"] / count} if "correct" in totals else {}
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))} | accuracy

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Returns metrics that cannot be computed from sums.

        Args:
            rows: Arrays with one entry per row of the split.
            split: Name of the split.
        """
        return {}

    def has_targets(self, split: str) -> bool:
        """Returns whether the examples of a split have targets, which a test split may lack."""
        return True

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split, or ``None`` if they are not known yet."""
        kind = type(self)
        if (kind.row_metrics, kind.generate_texts) != (
            Objective.row_metrics,
            Objective.generate_texts,
        ):
            return None
        totals = dict.fromkeys(("loss", "count", "tokens", *self.sums), 1.0)
        if getattr(self.arguments, "word_perplexity", False):
            totals["words"] = 1.0
        if getattr(self.arguments, "bits_per_byte", False) or is_raw(self.arguments):
            totals["bytes"] = 1.0
        return set(self.metrics(totals))

    def save_predictions(self, rows: Arrays, split: str, folder: Path) -> None:
        """Writes the predictions for the rows of a split into the output directory ``folder``."""

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of non-padding tokens of each row.

        For invalid rows, which only fill up the batch, it is 0.

        Args:
            rows: The rows, after :meth:`collate`.

        Returns:
            Integers, `(rows,)`.
        """
        valid = rows["valid"]
        return (rows["segment_ids"] > 0).reshape(len(valid), -1).sum(1) * valid

    def head_share(self) -> float:
        """Returns the fraction of positions at which the output head runs, to count FLOPs."""
        return float(self.has_vocabulary)


def forward(
    model: FlaxPreTrainedModel,
    params: Params,
    rngs: jax.Array | Literal[False] | None,
    train: bool,
    extra: Params | None,
    *inputs: Any,
    **keyword_inputs: Any,
) -> tuple[Any, Params]:
    """Runs a model inside :meth:`Objective.loss`.

    Args:
        model: The model.
        params: The parameters.
        rngs: PRNG key for dropout, or ``None`` in evaluation. ``False`` disables dropout in
            training.
        train: Whether this is a training step.
        extra: The model's non-parameter collections. Default: ``model.extra``.
        *inputs: Positional inputs of the model.
        **keyword_inputs: Keyword inputs of the model.

    Returns:
        The model's output, and its non-parameter collections after the call.
    """
    extra = model.extra if extra is None else extra
    call: Callable[..., Any] = model
    recorder = _recorder.get()
    keywords = keyword_inputs if recorder is None else keyword_inputs | recorder[1]
    output, new_extra = call(
        *inputs, params=params, dropout_rng=rngs, train=train, extra=extra, **keywords
    )
    if recorder is not None:
        recorder[0].append(ForwardCall(inputs, keyword_inputs, output))
    return output, new_extra


class ForwardCall(NamedTuple):
    """A call of :func:`forward`.

    Attributes:
        inputs: The positional inputs of the model.
        keyword_inputs: Its keyword inputs.
        output: Its output.
    """

    inputs: tuple[Any, ...]
    keyword_inputs: dict[str, Any]
    output: Any


_recorder: contextvars.ContextVar[tuple[list[ForwardCall], dict[str, Any]] | None]
_recorder = contextvars.ContextVar("hfseq_recorder", default=None)


@contextlib.contextmanager
def record_forward(**keywords: Any) -> Iterator[list[ForwardCall]]:
    """Yields a list to which :func:`forward` adds its calls within a `with` block.

    Args:
        **keywords: Further keyword arguments of these calls, such as `output_hidden_states=True`.
    """
    calls: list[ForwardCall] = []
    token = _recorder.set((calls, keywords))
    try:
        yield calls
    finally:
        _recorder.reset(token)


def attention_inputs(
    model: FlaxPreTrainedModel, segment_ids: jax.Array, prefix: str = ""
) -> dict[str, jax.Array]:
    """Returns the attention mask and, for models that accept them, the segment IDs.

    Args:
        model: The model.
        segment_ids: Document number of each token, 0 for padding, `(rows, length)`.
        prefix: Prefix of the input names, for example ``"decoder_"``.
    """
    inputs = {f"{prefix}attention_mask": (segment_ids > 0).astype(jnp.int32)}
    name = f"{prefix}segment_ids"
    return inputs | ({name: segment_ids} if model.accepts(name) else {})


def has_router_loss(model: FlaxPreTrainedModel) -> bool:
    """Returns whether the auxiliary loss of a model is the load-balancing loss of experts."""
    return bool(getattr(model.config, "output_router_logits", False))


#: Maximum number of tokens that a sample for the model card shows of a row.
SAMPLE_LENGTH = 32


def sample_rows(rows: Rows, count: int) -> Arrays:
    """Returns the beginning of ``count`` rows, which are spread evenly over ``rows``.

    This is the first document of each row, or its first ``SAMPLE_LENGTH`` tokens if it is longer.

    Returns:
        "input_ids" and "segment_ids" (1 for tokens, 0 after them), int32 `(count, width)`.
    """
    indices = sorted({index * len(rows) // count for index in range(count)})
    batch = rows.fetch(np.array(indices, np.int64))
    ids, segments = (batch[name][:, :SAMPLE_LENGTH] for name in ("input_ids", "segment_ids"))
    visible = (segments > 0) & (segments == segments[:, :1])
    return {"input_ids": ids, "segment_ids": visible.astype(np.int32)}
