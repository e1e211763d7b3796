"""Training of cross-encoders (rerankers), which score pairs of a query and a document.

The losses are those of sentence-transformers' CrossEncoder. An example has a query and one
document, several documents in separate columns, or a column with a list of documents.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import CrossEncoderArguments
from hfseq.data.batches import Batches, RowRandom, derive_key
from hfseq.data.records import Records, load_records
from hfseq.data.retrieval import (
    CandidateBatches,
    Columns,
    PairRows,
    class_labels,
    encode_labels,
    find_columns,
    label_problem,
    parse_number,
    text_problem,
)
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import DataError, UsageError
from hfseq.modeling.sentence import CrossEncoderConfig, ModuleWeights
from hfseq.objectives import ranking_losses as losses
from hfseq.objectives.base import Arrays, Batch, Loss, Params, RowsAndStats, forward
from hfseq.objectives.chunks import Sharded, map_chunks
from hfseq.objectives.embedding import MRR_CUTOFF, rank_summary
from hfseq.objectives.retrieval import LOSS_MARKER, LossSpec, RetrievalObjective
from hfseq.objectives.retrieval_losses import LossSum, margin_mse
from hfseq.objectives.retrieval_metrics import (
    multi_label_metrics,
    reranking_metrics,
    similarity_metrics,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

LISTWISE = ("lambda_loss", "list_net", "list_mle", "p_list_mle", "rank_net", "adr_mse")
SPECS: dict[str, LossSpec] = {
    "binary_cross_entropy": LossSpec(2, 2, "score"),
    "cross_entropy": LossSpec(2, 2, "class"),
    "mse": LossSpec(2, 2, "score"),
    "margin_mse": LossSpec(3, None, "scores"),
    "multiple_negatives_ranking": LossSpec(2, None, counts_correct=True),
    **{name: LossSpec(2, 2, "scores") for name in LISTWISE},
}


class CrossEncoderTraining(RetrievalObjective):
    """Trains a cross-encoder.

    Depending on the loss, evaluation ranks the documents of each query or compares scores with
    labels.
    """

    name = "cross_encoder"
    data_arguments = CrossEncoderArguments
    auto_class = "ForSequenceClassification"
    pipeline_tag = "text-ranking"
    tags = ("sentence-transformers", "cross-encoder", "reranker")
    config_class = CrossEncoderConfig
    default_length = 512

    arguments: CrossEncoderArguments

    @property
    def spec(self) -> LossSpec:
        """The data that the loss requires."""
        return SPECS[self.loss_name]

    # -- data

    @classmethod
    def configure_data(  # type: ignore[override]
        cls, config: PreTrainedConfig, arguments: CrossEncoderArguments, plugins: Plugins | None
    ) -> None:
        """Sets the number of scores per pair, and the names of the classes."""
        if arguments.loss != "cross_entropy":
            config.num_labels = 1
            return
        classes = class_labels(load_records(arguments, plugins))
        config.id2label = dict(enumerate(map(str, classes)))
        config.label2id = {str(name): number for number, name in enumerate(classes)}

    def setup(self) -> None:
        """Selects the columns, and skips examples without usable texts or labels."""
        super().setup()
        if self.loss_name == "cross_entropy":
            self.classes = {name: number for number, name in enumerate(class_labels(self.splits))}

    def select_columns(self, records: Records) -> Columns:
        """Returns the names of the text columns and of the label column of a split.

        For listwise losses, the second text column contains lists of documents.
        """
        if self.loss_name not in LISTWISE:
            return super().select_columns(records)
        columns = find_columns(records, 2, lists=True)
        table = records.tables[0]
        if len(columns.texts) != 2 or columns.label is None:
            raise UsageError(
                f"--loss {self.loss_name} requires a column of queries, a column with lists of "
                f"documents, and a column 'labels' with lists of numbers, but {table.origin} has "
                f"the columns {', '.join(table.columns)}"
            )
        return columns

    def example_problem(self, example: Mapping[str, Any], columns: Columns) -> str | None:
        """Describes why an example cannot be used, or returns `None`."""
        if self.loss_name not in LISTWISE:
            problem = super().example_problem(example, columns)
            if problem is None and self.loss_name == "binary_cross_entropy":
                assert columns.label is not None
                number = parse_number(example[columns.label])
                if number is not None and not 0 <= number <= 1:
                    raise DataError(
                        f"--loss binary_cross_entropy requires labels from 0 to 1, but the column "
                        f"'{columns.label}' has the value {number:g}: scale the labels, or use "
                        "--loss mse for numbers or --loss cross_entropy for classes"
                    )
            return problem
        query, texts = columns.texts
        if problem := text_problem(query, example.get(query)):
            return problem
        documents, label = example.get(texts), str(columns.label)
        if not isinstance(documents, list) or not documents:
            return f"'{texts}' must be a list with at least one document, not {documents!r:.60}"
        for document in documents:
            if problem := text_problem(texts, document):
                return problem
        if not isinstance(example.get(label), list):
            return f"'{label}' must be a list of numbers, not {example.get(label)!r:.60}"
        return label_problem(label, example[label], "scores", (len(documents),))

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks the tokenizer and configures how the model scores pairs."""
        self.check_pairs()
        super().prepare(model)
        # Cross-encoders are saved as Transformers directories, in which the tokenizer stores the
        # maximum length of a pair.
        self.tokenizer.model_max_length = self.retrieval_config.max_seq_length
        self.uses_token_types = (
            model.accepts("token_type_ids")
            and (getattr(self.config, "type_vocab_size", 0) or 0) > 1
            and "token_type_ids" in self.tokenizer.model_input_names
        )

    def check_pairs(self) -> None:
        """Checks that the tokenizer supports pairs, and warns if it does not separate the texts.

        Raises:
            UsageError: The tokenizer cannot encode pairs.
        """
        try:
            single, pair = self.tokenizer("a b"), self.tokenizer("a", "b")
            separated = len(pair["input_ids"]) > len(single["input_ids"]) or any(
                pair.get("token_type_ids", ())
            )
        except Exception as error:  # the Rust tokenizers raise plain Exception
            raise UsageError(
                f"the tokenizer does not support pairs of texts, which a cross-encoder requires: "
                f"{error}"
            ) from error
        if not separated:
            logger.warning(
                "the tokenizer does not separate the texts of a pair, so the model cannot tell "
                "where the document begins: use a tokenizer whose template for pairs has a "
                "separator, such as BERT's, or a --query_prompt that marks the query"
            )

    def make_config(
        self, model: FlaxPreTrainedModel, config: CrossEncoderConfig | None
    ) -> CrossEncoderConfig:
        """Returns the settings of the model. An existing cross-encoder keeps its activation."""
        num_labels = len(self.config.id2label or "1")
        if config is None:
            config = CrossEncoderConfig(num_labels, saved_activation(self.config))
        return dataclasses.replace(config, num_labels=num_labels)

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the pairs of a split."""
        records, columns = splits[split], self.columns[split]
        examples = [records[row] for row in range(len(records))]
        query, *texts = columns.texts
        queries = [example[query] for example in examples]
        if self.loss_name in LISTWISE:
            documents = [example[texts[0]] for example in examples]
        else:
            documents = [[example[name] for name in texts] for example in examples]
        arrays = {}
        if self.spec.labels is not None:
            arrays["labels"] = self.labels[split] = self._labels(examples, columns, documents)
        if self.loss_name == "multiple_negatives_ranking" and split != "train":
            documents = self._with_candidates(documents)
        rows = PairRows(
            queries,
            documents,
            lambda pairs: self._tokenize_pairs(pairs, length),
            pad_token_id(self.tokenizer),
            length,
            self.arguments.pad_to_max_length,
            arrays,
        )
        self.split_queries[split] = queries
        logger.info("%s: %d examples, %d pairs", split, len(rows), int(rows.counts.sum()))
        return rows, {"documents": len(rows), "tokens": rows.total_tokens}

    @property
    def split_queries(self) -> dict[str, list[str]]:
        """The queries of each split."""
        return self.__dict__.setdefault("_split_queries", {})

    def _labels(
        self,
        examples: Sequence[Mapping[str, Any]],
        columns: Columns,
        documents: Sequence[Sequence[str]],
    ) -> np.ndarray:
        labels = [example[str(columns.label)] for example in examples]
        if self.loss_name not in LISTWISE:
            assert self.spec.labels is not None
            return encode_labels(labels, self.spec.labels, self.classes)
        width = max(map(len, documents))
        padded = np.zeros((len(labels), width), np.float32)
        for row, values in zip(padded, labels, strict=True):
            row[: len(values)] = [float(value) for value in values]
        return padded

    def _with_candidates(self, documents: list[list[str]]) -> list[list[str]]:
        """Adds random documents of other examples as candidates.

        The candidates are the same in every evaluation.
        """
        flat = [text for texts in documents for text in texts]
        owner = np.repeat(np.arange(len(documents)), [len(texts) for texts in documents])
        result = []
        for row, texts in enumerate(documents):
            generator = np.random.Generator(np.random.Philox(key=derive_key("candidates", row)))
            other_documents = np.flatnonzero(owner != row)
            order = generator.permutation(len(other_documents))[: self.arguments.num_negatives]
            own_texts = set(texts)
            result.append(
                [
                    *texts,
                    *(t for t in (flat[i] for i in other_documents[order]) if t not in own_texts),
                ]
            )
        return result

    def _tokenize_pairs(
        self, pairs: Sequence[tuple[str, str]], length: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        if not pairs:
            return [], []
        prompt = self.prompt("query")
        tokens = self.retrieval_config.tokenize(self.tokenizer, pairs, limit=length, prompt=prompt)
        types = tokens.types or [[0] * len(ids) for ids in tokens.ids]
        return tokens.ids, types

    def make_batches(self, rows: Any, batch_size: int, seed: int) -> Batches:
        """Returns the training batches.

        For multiple_negatives_ranking, they contain documents of other examples as candidates.
        """
        batches = super().make_batches(rows, batch_size, seed)
        if self.loss_name == "multiple_negatives_ranking":
            return CandidateBatches(batches, self.arguments.num_negatives)
        return batches

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Creates a batch. Its array "valid" is false for rows that only pad the batch."""
        batch = super().collate(rows, random, groups)
        batch["document_mask"] = rows["document_mask"]
        if self.uses_token_types:
            batch["token_type_ids"] = rows["token_type_ids"]
        return batch

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns ``count`` rows with one pair each, without padding."""
        rows = super().full_rows(count, length)
        arrays = {name: rows[name] for name in ("input_ids", "segment_ids", "valid")}
        types = np.zeros_like(rows["input_ids"])
        mask = np.ones((count, 1), bool)
        arrays |= {"document_mask": mask, "token_type_ids": types}
        if self.spec.labels is not None:
            arrays["labels"] = np.zeros(
                count, np.int32 if self.spec.labels == "class" else np.float32
            )
        return arrays

    # -- computation

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

        In evaluation, the totals include the logits of each pair.
        """
        logits, new_extra = self._logits(model, params, batch, rngs, train, extra)
        markers = [name for name in batch if name.startswith(LOSS_MARKER)]
        name = markers[0].removeprefix(LOSS_MARKER) if markers else self.loss_name
        result = self.compute_loss(name, logits, batch, None)
        totals: dict[str, jax.Array] = {}
        if "correct" in self.sums:
            zero = jnp.zeros((), jnp.int32)
            totals["correct"] = zero if result.correct is None else result.correct
        if not train:
            hidden = ~batch["document_mask"][..., None]
            totals["row_outputs"] = jnp.where(hidden, -jnp.inf, logits)
        return result.total, result.count, {"extra": new_extra, "totals": totals}

    def _logits(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: Any,
        train: bool,
        extra: Params | None,
    ) -> tuple[jax.Array, Params]:
        """Returns the logits of all pairs, `(rows, documents, num_labels)`."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        arrays = {name: batch[name] for name in names if name in batch}
        current = model.extra if extra is None else extra

        def score(chunk: tuple[dict[str, jax.Array], Any]) -> tuple[jax.Array, Params]:
            pairs, keys = chunk
            new_extra = current

            def run(**inputs: Any) -> Any:
                nonlocal new_extra
                output, new_extra = forward(model, params, keys, train, current, **inputs)
                return output

            shape = pairs["input_ids"].shape
            inputs = {name: array.reshape(-1, shape[-1]) for name, array in pairs.items()}
            logits = self.retrieval_config.embed(run, inputs)
            return logits.reshape(*shape[:2], -1), new_extra

        chunk_rows = self.arguments.mini_batch_size
        if chunk_rows is None:
            return score((arrays, rngs))
        sharded = self.sharded(model)
        logits = map_chunks(lambda chunk: score(chunk)[0], (arrays, rngs), chunk_rows, sharded)
        return logits, current

    def compute_loss(
        self,
        name: str,
        vectors: jax.Array,
        batch: Batch,
        sharded: Sharded | None,
        weights: ModuleWeights | None = None,
    ) -> LossSum:
        """Computes a loss from logits, `(rows, documents, num_labels)`."""
        data, valid = self.arguments, batch["valid"]
        labels: Any = batch.get("labels")
        mask = batch["document_mask"] & valid[:, None]
        if name == "cross_entropy":
            return losses.softmax_cross_entropy(vectors[:, 0], labels, valid)
        scores = vectors[..., 0]
        if name == "binary_cross_entropy":
            weight = data.pos_weight or 1.0
            return losses.binary_cross_entropy(scores[:, 0], labels, valid, pos_weight=weight)
        if name == "mse":
            return losses.mse(scores[:, 0], labels, valid)
        if name == "margin_mse":
            return margin_mse(scores, labels, valid)
        if name == "multiple_negatives_ranking":
            scale = data.scale or 10.0
            return losses.candidate_ranking(scores, mask, scale=scale, activation=data.activation)
        labels = jnp.pad(labels, ((0, 0), (0, scores.shape[1] - labels.shape[1])))
        if name in ("lambda_loss", "rank_net"):
            weighting: Any = "none" if name == "rank_net" else data.weighting_scheme
            return losses.lambda_loss(scores, labels, mask, weighting=weighting, k=data.cutoff)
        if name == "list_net":
            return losses.list_net(scores, labels, mask)
        if name == "adr_mse":
            return losses.adr_mse(scores, labels, mask)
        return losses.list_mle(
            scores,
            labels,
            mask,
            weighted=name == "p_list_mle",
            respect_input_order=data.respect_input_order,
        )

    # -- metrics

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Ranks the documents of each query, or compares scores with labels."""
        logits = np.asarray(rows["row_outputs"], np.float64)
        labels = self.labels.get(split)
        if self.loss_name == "cross_entropy":
            assert labels is not None
            return multi_label_metrics(logits[:, 0], labels)
        scores = logits[..., 0]
        if self.spec.labels is None or self.loss_name == "margin_mse":
            # The first document is the positive. Documents with the same score rank before it.
            return rank_summary((scores >= scores[:, :1]).sum(1))
        assert labels is not None
        if self.loss_name in LISTWISE:
            mask = np.isfinite(scores)
            labels = np.pad(labels, ((0, 0), (0, scores.shape[1] - labels.shape[1])))
            lists = [(s[m], y[m]) for s, y, m in zip(scores, labels, mask, strict=True)]
            return list_metrics(lists)
        metrics = similarity_metrics(scores[:, 0], labels)
        groups: dict[str, list[int]] = {}
        for row, query in enumerate(self.split_queries[split]):
            groups.setdefault(query, []).append(row)
        lists = [(scores[g, 0], labels[g]) for g in groups.values() if len(g) > 1]
        return metrics | (list_metrics(lists) if lists else {})

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split, or `None` if they depend on the data."""
        if self.loss_name == "cross_entropy":
            return {"loss", "f1_macro", "f1_micro", "f1_weighted"}
        if self.spec.labels is None or self.loss_name == "margin_mse":
            names = {"loss", "accuracy_at_1", f"mrr_at_{MRR_CUTOFF}"}
            return names | ({"accuracy"} if "correct" in self.sums else set())
        return None


def saved_activation(config: Any) -> str | None:
    """Returns the name of the activation class in a cross-encoder's config.json, or `None`."""
    stored = getattr(config, "sentence_transformers", None) or {}
    path = stored.get("activation_fn") or getattr(
        config, "sbert_ce_default_activation_function", None
    )
    return None if path is None else str(path).rsplit(".", 1)[-1]


def list_metrics(lists: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Returns reranking metrics, averaged over queries.

    Documents with a label above 0 are relevant. Queries without relevant documents are ignored.

    Args:
        lists: The scores and the labels of the documents of each query.
    """
    lists = [(scores, labels) for scores, labels in lists if (labels > 0).any()]
    if not lists:
        return {}
    scores, labels = zip(*lists, strict=True)
    metrics = reranking_metrics(scores, labels, ties="last")
    return {name.replace("@", "_at_"): value for name, value in metrics.items()}
