"""Base class for training bi-encoders, sparse encoders and multi-vector encoders.

An example has one or more texts. The first text is the query, and the others are documents. An
objective encodes all texts of the global batch and computes a loss of their vectors. With
``--mini_batch_size``, the texts are encoded in chunks. The activations of only one chunk are then
in memory at a time (see :mod:`hfseq.objectives.chunks`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import RetrievalArguments
from hfseq.data.batches import Batches, GroupedRows, RowRandom
from hfseq.data.records import Records, drop_invalid, load_records
from hfseq.data.retrieval import (
    QUERY,
    Columns,
    LabelKind,
    RetrievalRows,
    encode_labels,
    find_columns,
    label_problem,
    text_problem,
    text_values,
)
from hfseq.data.samplers import GroupByLabelBatches, NoDuplicatesBatches
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import UsageError
from hfseq.modeling.sentence import MODULES_KEY, ModuleWeights, RetrievalConfig, TokenizedTexts
from hfseq.modeling.sentence.config import Inputs, Run
from hfseq.objectives import retrieval_losses as losses
from hfseq.objectives.base import Arrays, Batch, Loss, Objective, Params, RowsAndStats, forward
from hfseq.objectives.chunks import Sharded, map_chunks
from hfseq.objectives.retrieval_losses import LossSum

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: The arrays in a batch that describe documents. For queries, their names have the prefix "query_".
TEXT_ARRAYS = ("input_ids", "attention_mask", "token_type_ids", "scoring_mask")
#: Prefix of the name of an empty array that `--train_mixture` adds to a batch. The rest of the name
#: is the loss of the dataset from which the batch comes.
LOSS_MARKER = "loss:"


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The data that a loss requires.

    Attributes:
        minimum: Minimum number of text columns.
        maximum: Maximum number of text columns, or `None`.
        labels: The type of the labels, or `None` if the loss does not use labels.
        counts_correct: Whether the loss has an accuracy, because it selects the positive among the
            texts of the batch or the class of a pair.
    """

    minimum: int
    maximum: int | None = None
    labels: LabelKind | None = None
    counts_correct: bool = False


RANKING = LossSpec(2, counts_correct=True)
#: The requirements of each loss of text vectors.
SPECS: dict[str, LossSpec] = {
    "multiple_negatives_ranking": RANKING,
    "multiple_negatives_symmetric_ranking": RANKING,
    "gist": LossSpec(2, 3, counts_correct=True),
    "cosent": LossSpec(2, 2, "score"),
    "angle": LossSpec(2, None, "score"),
    "cosine_similarity": LossSpec(2, 2, "score"),
    "contrastive": LossSpec(2, 2, "binary"),
    "online_contrastive": LossSpec(2, 2, "binary"),
    "softmax": LossSpec(2, 2, "class", counts_correct=True),
    "triplet": LossSpec(3, 3),
    "batch_all_triplet": LossSpec(1, 1, "class"),
    "batch_hard_triplet": LossSpec(1, 1, "class"),
    "batch_semi_hard_triplet": LossSpec(1, 1, "class"),
    "margin_mse": LossSpec(3, None, "scores"),
    "distill_kl_div": LossSpec(3, None, "scores"),
    "mse": LossSpec(1, None, "scores"),
    "embed_distill": LossSpec(1, None, "scores"),
}


class TokenVectors(NamedTuple):
    """The token vectors of texts.

    Attributes:
        vectors: The vectors, `(rows, texts, tokens, features)`.
        mask: Mask of the tokens that MaxSim scores, `(rows, texts, tokens)`.
    """

    vectors: jax.Array
    mask: jax.Array


class RetrievalObjective(Objective):
    """Base class of the objectives that encode queries and documents separately.

    Losses that rank candidates compare a query with all texts of the global batch, on all devices
    and processes. With ``--gradient_accumulation_steps``, they compare it only with the texts of
    its micro-batch, so use ``--mini_batch_size`` instead to fit a large batch into memory.
    """

    data_arguments = RetrievalArguments
    auto_class = "Model"
    supports_streaming = False
    has_vocabulary = False
    evaluates_test = supports_predict = True
    default_length = 256
    mixes_rows = False
    #: The class of the settings that are saved with the model.
    config_class: ClassVar[type[RetrievalConfig]]

    arguments: RetrievalArguments
    retrieval_config: Any

    # -- data

    def setup(self) -> None:
        """Selects the columns, and skips examples without usable texts or labels."""
        self.loss_name = self.arguments.loss or self.arguments.losses[0]
        self.part_losses: dict[int, str] = {}
        self.columns: dict[str, Columns] = {}
        self.splits: dict[str, Records] = {}
        self.labels: dict[str, np.ndarray] = {}
        self.classes: dict[Any, int] = {}
        self.sums = ("correct",) if self.spec.counts_correct else ()  # type: ignore[misc]
        for split, records in load_records(self.arguments).items():
            columns = self.columns[split] = self.select_columns(records)
            problems = {}
            for row in range(len(records)):
                if problem := self.example_problem(records[row], columns):
                    problems[row] = problem
            self.splits[split] = drop_invalid(records, split, problems, self.arguments)
            if self.spec.labels is None:
                warn_about_false_negatives(self.splits[split], split, columns)

    @property
    def spec(self) -> LossSpec:
        """The data that the loss requires."""
        return SPECS[self.loss_name]

    def select_columns(self, records: Records) -> Columns:
        """Returns the names of the text columns and of the label column of a split.

        Raises:
            UsageError: The table has too few or too many text columns, or no labels.
        """
        spec, origin = self.spec, records.tables[0].origin
        columns = find_columns(records, spec.minimum)
        texts = ", ".join(columns.texts)
        if not spec.minimum <= len(columns.texts) <= (spec.maximum or len(columns.texts)):
            expected = str(spec.minimum)
            if spec.maximum != spec.minimum:
                expected += f" to {spec.maximum}" if spec.maximum else " or more"
            raise UsageError(
                f"--loss {self.loss_name} requires {expected} text columns, but {origin} has "
                f"{len(columns.texts)}: {texts}"
            )
        if spec.labels is not None and columns.label is None:
            raise UsageError(
                f"--loss {self.loss_name} requires labels, but {origin} only has the columns "
                f"{', '.join(records.tables[0].columns)}: name the column with the labels 'label' "
                "or 'score'"
            )
        return columns

    def example_problem(self, example: Mapping[str, Any], columns: Columns) -> str | None:
        """Describes why an example cannot be used, or returns `None`."""
        for name in columns.texts:
            if problem := text_problem(name, example.get(name)):
                return problem
        texts = [example[name] for name in columns.texts]
        if self.spec.labels is None:
            return None
        assert columns.label is not None
        lengths: tuple[int, ...] = ()
        if self.loss_name == "margin_mse":
            lengths = (len(texts) - 2, len(texts) - 1)
        elif self.loss_name == "distill_kl_div":
            lengths = (len(texts) - 1,)
        return label_problem(columns.label, example.get(columns.label), self.spec.labels, lengths)

    def natural_length(self) -> int | None:
        """Returns the maximum length that is saved with the model."""
        return self.saved_length

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Sets how the model computes vectors. The settings are also saved with the model."""
        config = model.sentence_config
        if config is not None and not isinstance(config, self.config_class):
            logger.info(
                "converting the model from the type %s to the type %s",
                config.model_type,
                self.config_class.model_type,
            )
            self.saved_length, config = config.max_seq_length, None
        else:
            self.saved_length = None if config is None else config.max_seq_length
        if self.saved_length is not None:
            limits = (self.saved_length, model.max_length())
            self.saved_length = min(limit for limit in limits if limit)
        length = self.choose_length(model.max_length())
        config = self.make_config(model, config)
        data = self.arguments
        prompts = {"query": data.query_prompt, "document": data.document_prompt}
        given_prompts = {name: text for name, text in prompts.items() if text is not None}
        self.retrieval_config = dataclasses.replace(
            config, max_seq_length=length, prompts={**config.prompts, **given_prompts}
        )
        model.sentence_config = self.retrieval_config
        if self.arguments.mini_batch_size and jax.tree.leaves(model.extra_shape_tree):
            raise UsageError(
                "--mini_batch_size does not support models with statistics or scales that change "
                "in training, such as FP8: drop the flag"
            )
        if self.retrieval_config.module_weights:
            model.train_sentence_modules()

    def make_config(self, model: FlaxPreTrainedModel, config: Any) -> Any:
        """Returns the settings of the model, which the flags can change.

        Args:
            model: The model.
            config: The settings that were saved with the model, or `None` for a new model.
        """
        raise NotImplementedError

    def prompt(self, task: str) -> str:
        """Returns the prompt that precedes all texts of a task, "query" or "document"."""
        return getattr(self.arguments, f"{task}_prompt") or ""

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the texts of a split."""
        records, names = splits[split], self.columns[split].texts
        examples = [records[row] for row in range(len(records))]
        texts = [[example[name] for example in examples] for name in names]
        groups: list[GroupedRows | None] = []
        # The texts of examples with a single text are encoded as documents.
        for task, columns in (("query", texts[:1]), ("document", texts[1:])):
            if len(texts) == 1:
                columns = texts if task == "document" else []
            groups.append(self._tokenize(columns, task, length) if columns else None)
        queries, documents = groups
        assert documents is not None
        arrays: dict[str, np.ndarray] = self.make_arrays(split, examples, texts)
        rows = RetrievalRows(documents, queries, arrays, text_values(texts))
        logger.info("%s: %d examples of %s", split, len(rows), ", ".join(names))
        return rows, {"documents": len(rows), "tokens": rows.total_tokens}

    def make_arrays(
        self, split: str, examples: Sequence[Mapping[str, Any]], texts: Sequence[Sequence[str]]
    ) -> dict[str, np.ndarray]:
        """Returns arrays with one entry per example, such as the labels."""
        if self.spec.labels is None:
            return {}
        column = str(self.columns[split].label)
        labels = [example[column] for example in examples]
        self.labels[split] = encode_labels(labels, self.spec.labels, self.classes)
        return {"labels": self.labels[split]}

    def _tokenize(self, columns: Sequence[Sequence[str]], task: str, length: int) -> GroupedRows:
        """Tokenizes the columns of a task."""
        parts: list[TokenizedTexts] = [
            self.retrieval_config.tokenize(
                self.tokenizer, column, limit=length, prompt=self.prompt(task), task=task
            )
            for column in columns
        ]
        fields: dict[str, list] = {}
        if any(part.attended is not None for part in parts):
            fields["attended"] = [
                [[1] * count for count in part.attended or map(len, part.ids)] for part in parts
            ]
            # A field must have one value per token.
            fields["attended"] = [
                [row + [0] * (len(ids) - len(row)) for row, ids in zip(rows, part.ids, strict=True)]
                for rows, part in zip(fields["attended"], parts, strict=True)
            ]
        if any(part.scored is not None for part in parts):
            fields["scoring_mask"] = [
                part.scored or [[1] * len(ids) for ids in part.ids] for part in parts
            ]
        return GroupedRows(
            [part.ids for part in parts],
            pad_token_id(self.retrieval_config.tokenizer_for(task, self.tokenizer)),
            length,
            self.arguments.pad_to_max_length,
            fields,
        )

    def make_batches(self, rows: Any, batch_size: int, seed: int) -> Batches:
        """Returns the training batches that ``--batch_sampler`` selects."""
        sampler = self.arguments.batch_sampler
        if sampler == "no_duplicates":
            return NoDuplicatesBatches(rows, rows.values, batch_size, seed)
        if sampler == "group_by_label":
            if "labels" not in rows.arrays or rows.arrays["labels"].ndim > 1:
                raise UsageError(
                    "--batch_sampler group_by_label requires labels, one per example, which "
                    f"--loss {self.loss_name} does not use: choose another batch sampler"
                )
            return GroupByLabelBatches(rows, rows.arrays["labels"], batch_size, seed)
        return super().make_batches(rows, batch_size, seed)

    def add_part(self, number: int, part: Objective) -> None:
        """Adds a dataset of ``--train_mixture``. Its loss may differ from those of the others."""
        assert isinstance(part, RetrievalObjective)
        self.part_losses[number] = part.loss_name
        self.sums = tuple(dict.fromkeys((*self.sums, *part.sums)))  # type: ignore[misc]

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Creates a batch. Its array "valid" is false for rows that only pad the batch."""
        count = len(rows["input_ids"])
        batch = {"valid": rows["valid"] if "valid" in rows else np.ones(count, bool)}
        for prefix in ("", QUERY):
            if f"{prefix}input_ids" not in rows:
                continue
            segments = rows[f"{prefix}segment_ids"]
            batch[f"{prefix}input_ids"] = rows[f"{prefix}input_ids"]
            batch[f"{prefix}attention_mask"] = rows.get(f"{prefix}attended", segments)
            if f"{prefix}scoring_mask" in rows or f"{prefix}attended" in rows:
                scoring_mask = rows.get(f"{prefix}scoring_mask", segments)
                batch[f"{prefix}scoring_mask"] = scoring_mask.astype(np.int32)
        batch |= {name: rows[name] for name in ("labels", "guide") if name in rows}
        if "dataset" in rows and self.part_losses:
            name = self.part_losses.get(int(rows["dataset"][0]), self.loss_name)
            batch[LOSS_MARKER + name] = np.zeros(count, np.int32)
        return batch

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of tokens of each row, summed over its texts."""
        count = super().count_tokens(rows)
        if f"{QUERY}segment_ids" in rows:
            segments = rows[f"{QUERY}segment_ids"]
            count = count + (segments > 0).reshape(len(count), -1).sum(1) * rows["valid"]
        return count

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns ``count`` rows of a query and a document without padding."""
        rows = super().full_rows(count, length)
        texts = {name: rows[name][:, None] for name in ("input_ids", "segment_ids")}
        queries = {QUERY + name: array for name, array in texts.items()}
        return {**texts, **queries, "valid": rows["valid"]}

    # -- computation

    def encode(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: Any,
        train: bool,
        extra: Params | None,
    ) -> tuple[Any, Params]:
        """Encodes all texts of a batch, in chunks if ``--mini_batch_size`` is set.

        Returns:
            The vectors, `(rows, texts, features)`. Multi-vector encoders return the
            :class:`TokenVectors` of queries and those of documents instead, and other models may
            return their own description of the vectors. The second value contains the model's
            non-parameter collections after the call.
        """
        texts = {
            prefix + name: batch[prefix + name]
            for prefix in ("", QUERY)
            for name in TEXT_ARRAYS
            if prefix + name in batch
        }
        chunk_rows = self.arguments.mini_batch_size
        if chunk_rows is None:
            return self._encode_rows(model, params, texts, rngs, train, extra)

        def encode_chunk(chunk: tuple[dict[str, jax.Array], Any]) -> Any:
            return self._encode_rows(model, params, *chunk, train, extra)[0]

        vectors = map_chunks(encode_chunk, (texts, rngs), chunk_rows, self.sharded(model))
        return vectors, model.extra if extra is None else extra

    def sharded(self, model: FlaxPreTrainedModel) -> Sharded | None:
        """Returns how the rows of a batch are split over devices."""
        return None if model.mesh is None else Sharded(model.mesh)

    def embed(
        self, run: Run, inputs: Inputs, weights: ModuleWeights | None, task: str | None
    ) -> Any:
        """Computes the vectors of texts. See :meth:`RetrievalConfig.embed`."""
        return self.retrieval_config.embed(run, inputs, weights, task)

    def _encode_rows(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        texts: Mapping[str, jax.Array],
        rngs: Any,
        train: bool,
        extra: Params | None,
    ) -> tuple[Any, Params]:
        """Encodes the texts of some rows of a batch.

        The model encodes queries and documents in one call if both are encoded in the same way and
        their arrays have the same width. Otherwise, it runs once for the queries and once for the
        documents.
        """
        current = model.extra if extra is None else extra

        def embed(arrays: Mapping[str, jax.Array], task: str | None, keys: Any) -> Any:
            nonlocal current
            shape = arrays["input_ids"].shape
            inputs = {name: array.reshape(-1, shape[-1]) for name, array in arrays.items()}

            def run(**model_inputs: Any) -> Any:
                nonlocal current
                if "model" in model_inputs:
                    other_model, other_params = map(model_inputs.pop, ("model", "params"))
                    return forward(other_model, other_params, keys, train, {}, **model_inputs)[0]
                output, current = forward(model, params, keys, train, current, **model_inputs)
                return output

            result = self.embed(run, inputs, params.get(MODULES_KEY), task)
            return jax.tree.map(lambda leaf: leaf.reshape(*shape[:2], *leaf.shape[1:]), result)

        documents = {name: texts[name] for name in TEXT_ARRAYS if name in texts}
        queries = {name: texts[QUERY + name] for name in TEXT_ARRAYS if QUERY + name in texts}
        if not queries:
            return self.combine(None, embed(documents, "document", rngs)), current
        same_names = queries.keys() == documents.keys()
        if (
            self.encodes_together
            and same_names
            and (queries["input_ids"].shape[-1] == documents["input_ids"].shape[-1])
        ):
            together = {
                name: jnp.concatenate([queries[name], documents[name]], axis=1)
                for name in documents
            }
            return embed(together, None, rngs), current
        document_keys = None if rngs is None else rngs.fold_in(1)
        query_vectors = embed(queries, "query", rngs)
        return self.combine(query_vectors, embed(documents, "document", document_keys)), current

    @property
    def encodes_together(self) -> bool:
        """Whether queries and documents are encoded in the same way."""
        return True

    def combine(self, queries: Any, documents: Any) -> Any:
        """Combines the vectors of queries and documents that were encoded separately."""
        return documents if queries is None else jnp.concatenate([queries, documents], axis=1)

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the sum of the losses, their number, and the totals for the metrics.

        In evaluation, the totals include the vectors of the texts.
        """
        vectors, new_extra = self.encode(model, params, batch, rngs, train, extra)
        markers = [name for name in batch if name.startswith(LOSS_MARKER)]
        name = markers[0].removeprefix(LOSS_MARKER) if markers else self.loss_name
        weights = params.get(MODULES_KEY)
        result = self.compute_loss(name, vectors, batch, self.sharded(model), weights)
        totals: dict[str, jax.Array] = {}
        if "correct" in self.sums:
            zero = jnp.zeros((), jnp.int32)
            totals["correct"] = zero if result.correct is None else result.correct
        total, totals = self.add_terms(result, vectors, batch, train, totals)
        if not train:
            totals |= self.row_outputs(vectors)
        return total, result.count, {"extra": new_extra, "totals": totals}

    def compute_loss(
        self,
        name: str,
        vectors: Any,
        batch: Batch,
        sharded: Sharded | None,
        weights: ModuleWeights | None = None,
    ) -> LossSum:
        """Computes a loss from the vectors of a batch.

        Args:
            name: Name of the loss.
            vectors: The vectors, which :meth:`encode` returns.
            batch: The batch.
            sharded: How the rows of the batch are split over devices.
            weights: The weights of the modules that follow the encoder, such as a classifier.
        """
        raise NotImplementedError

    def add_terms(
        self,
        result: LossSum,
        vectors: Any,
        batch: Batch,
        train: bool,
        totals: dict[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Adds terms such as regularizers to the loss. By default, there are none.

        Returns:
            The sum to minimize, and the totals for the metrics.
        """
        return result.total, totals

    def row_outputs(self, vectors: Any) -> dict[str, jax.Array]:
        """Returns arrays of a batch. :meth:`row_metrics` receives them for the whole split."""
        raise NotImplementedError

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss and, for losses that rank candidates, the accuracy.

        The accuracy is the fraction of anchors whose positive is the most similar text of the
        batch.
        """
        metrics = super().metrics(totals)
        return {name: value for name, value in metrics.items() if name in ("loss", "accuracy")}

    @property
    def ranking_options(self) -> dict[str, Any]:
        """The options of the losses that rank candidates, from the flags."""
        data: Any = self.arguments
        options: dict[str, Any] = {
            "hardness_mode": data.hardness_mode,
            "hardness_strength": data.hardness_strength,
            "chunk_rows": data.mini_batch_size,
        }
        if data.direction_names:
            options["directions"] = data.direction_names
        if data.partition_mode:
            options["partition_mode"] = data.partition_mode
        return options


def warn_about_false_negatives(records: Records, split: str, columns: Columns) -> None:
    """Warns about examples with a negative that equals the positive.

    As in sentence-transformers, such examples are still used. The positive is then also a negative
    in the loss.
    """
    if len(columns.texts) < 3:
        return
    _, positive, *negatives = columns.texts
    examples = (records[row] for row in range(len(records)))
    equal = [any(e[name] == e[positive] for name in negatives) for e in examples]
    if any(equal):
        logger.warning(
            "%s: %d of %d examples have a negative that equals the positive. The first is %s",
            *(split, sum(equal), len(equal), records.place(equal.index(True))),
        )


def document_scores(vectors: jax.Array) -> jax.Array:
    """Returns the dot products of each query and its own documents, `(rows, documents)`."""
    return losses.pairwise_similarity(vectors[:, :1], vectors[:, 1:], "dot")
