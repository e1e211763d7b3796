"""Cross-encoders (rerankers): scores of pairs of texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.errors import CheckpointError, UsageError, did_you_mean, write_atomically
from hfseq.modeling.sentence.config import Inputs, ModuleWeights, RetrievalConfig, Run, split_inputs
from hfseq.modeling.sentence.directory import (
    SETTINGS,
    SentenceDirectory,
    modules_json,
    write_json,
)
from hfseq.modeling.sentence.encoder import RetrievalModel
from hfseq.modeling.sentence.modules import torch_activation
from hfseq.modeling.sentence.texts import TokenizedTexts, tokenize
from hfseq.nn.heads import Head, reduced_logits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: Activation functions for float32 scores, by the name of their class in PyTorch.
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda scores: scores,
    "Sigmoid": lambda scores: np.where(
        scores >= 0,
        1 / (1 + np.exp(-np.abs(scores))),
        np.exp(-np.abs(scores)) / (1 + np.exp(-np.abs(scores))),
    ).astype(np.float32),
    "Tanh": np.tanh,
    "ReLU": lambda scores: np.maximum(scores, 0),
    "Softplus": lambda scores: np.logaddexp(scores, np.float32(0)),
}


@dataclass(frozen=True)
class LogitScore:
    """Scores a pair by the token that a causal language model predicts after it.

    The score is the logit of a token such as "yes", minus the logit of a token such as "no".

    Attributes:
        true_token_id: ID of the token that stands for relevant documents.
        false_token_id: ID of the token that stands for other documents. With `None`, no logit is
            subtracted.
    """

    true_token_id: int
    false_token_id: int | None = None

    def __call__(self, logits: jax.Array) -> jax.Array:
        """Converts the logits of the last token, `(batch, vocab_size)`, to scores, `(batch, 1)`."""
        scores = logits[:, self.true_token_id]
        if self.false_token_id is not None:
            scores = scores - logits[:, self.false_token_id]
        return scores[:, None]


@dataclass(frozen=True)
class CrossEncoderConfig(RetrievalConfig):
    """Describes how pairs are preprocessed and how their scores are computed.

    The attributes of :class:`RetrievalConfig` can be set by keyword. A prompt precedes the first
    text of each pair.

    Attributes:
        num_labels: Number of scores per pair.
        activation: Name of the PyTorch class of the function that is applied to scores. `None`
            means "Sigmoid" for models with one label, and "Identity" for others.
        logit_score: How a causal language model scores pairs. `None` for a classifier.
        uses_chat_template: Whether pairs are rendered with the chat template of the tokenizer.
    """

    num_labels: int = 1
    activation: str | None = None
    logit_score: LogitScore | None = None
    uses_chat_template: bool = False

    model_type: ClassVar[str] = "CrossEncoder"

    def __post_init__(self) -> None:
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise UsageError(
                f"unknown activation {self.activation!r}"
                f"{did_you_mean(self.activation, ACTIVATIONS)} (known: {', '.join(ACTIVATIONS)})"
            )

    @property
    def auto_class(self) -> str:  # type: ignore[override]
        """Suffix of the class that loads the model."""
        return "ForSequenceClassification" if self.logit_score is None else "ForCausalLM"

    @property
    def activation_name(self) -> str:
        """Name of the PyTorch class of the function that is applied to scores."""
        return self.activation or ("Sigmoid" if self.num_labels == 1 else "Identity")

    # -- files

    @classmethod
    def from_directory(cls, directory: SentenceDirectory) -> CrossEncoderConfig:
        """Reads the settings from a directory that has a modules.json."""
        supported = ("Transformer", "LogitScore")
        logit_score = None
        for number, module in enumerate(directory.modules):
            if module.class_name != supported[min(number, 1)] or number > 1:
                raise directory.unsupported(module, supported)
            if number:
                settings = module.settings
                logit_score = LogitScore(settings["true_token_id"], settings.get("false_token_id"))
        return cls.from_config(directory, logit_score)

    @classmethod
    def from_config(
        cls, directory: SentenceDirectory, logit_score: LogitScore | None
    ) -> CrossEncoderConfig:
        """Reads the settings from config.json and config_sentence_transformers.json.

        The second file is optional.
        """
        stored = directory.load("config.json")
        labels = stored.get("id2label") or {0: ""}
        architectures = stored.get("architectures") or [""]
        is_classifier = any(name.endswith("ForSequenceClassification") for name in architectures)
        num_labels = stored.get("num_labels") or len(labels) if is_classifier else 1
        if is_classifier and "id2label" not in stored and "num_labels" not in stored:
            num_labels = 2  # the default of Transformers
        candidates = (
            directory.settings.get("activation_fn"),
            (stored.get("sentence_transformers") or {}).get("activation_fn"),
            stored.get("sbert_ce_default_activation_function"),
        )
        path = next((path for path in candidates if path is not None), None)
        values = cls.shared_values(directory)
        del values["similarity_fn_name"], values["truncate_dim"]
        activation = _read_activation(path, directory.source)
        return cls(num_labels if logit_score is None else 1, activation, logit_score, **values)

    def write(self, folder: Path, model: Any) -> None:
        """Writes the settings into the directory of a model.

        For a classifier without prompts, only the activation is written into config.json, under the
        two keys that sentence-transformers 2 to 6 read. For other models, the files of
        sentence-transformers 6 are written too.
        """
        if self.logit_score is None:
            self._write_activation(folder)
        if self.logit_score is None and not any(self.prompts.values()):
            return
        task, output = "sequence-classification", "scores"
        classes = ["base.modules.transformer.Transformer"]
        if self.logit_score is not None:
            task, output = "text-generation", "causal_logits"
            classes.append("cross_encoder.modules.logit_score.LogitScore")
        method = {"method": "forward", "method_output_name": "logits"}
        transformer: dict[str, Any] = {
            "transformer_task": task,
            "modality_config": {"text": method},
            "module_output_name": output,
        }
        if self.uses_chat_template:
            transformer["modality_config"]["message"] = {**method, "format": "flat"}
        if self.max_seq_length is not None:
            transformer["max_seq_length"] = self.max_seq_length
        settings = self.written_settings("6.0.0")
        del settings["similarity_fn_name"]
        contents: dict[str, Any] = {
            "modules.json": modules_json(classes),
            "sentence_bert_config.json": transformer,
            SETTINGS: settings | {"activation_fn": torch_activation(self.activation_name)},
        }
        if self.logit_score is not None:
            contents["1_LogitScore/config.json"] = {
                "true_token_id": self.logit_score.true_token_id,
                "false_token_id": self.logit_score.false_token_id,
                "module_input_name": output,
            }
        write_json(folder, contents)

    def _write_activation(self, folder: Path) -> None:
        path = folder / "config.json"
        if not path.is_file():  # a directory that contains only an adapter
            return
        activation = torch_activation(self.activation_name)
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = stored.get("sentence_transformers") or {}
        stored["sentence_transformers"] = {"version": "5.0.0", **known, "activation_fn": activation}
        stored["sbert_ce_default_activation_function"] = activation
        write_atomically(path, json.dumps(stored, indent=2, sort_keys=True) + "\n")

    # -- computation

    def tokenize(
        self,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[Any],
        *,
        limit: int,
        prompt: str = "",
        task: str | None = None,
    ) -> TokenizedTexts:
        """Tokenizes pairs, as :meth:`RetrievalConfig.tokenize` describes.

        If pairs are rendered with a chat template, the prompt is the system message. The texts of
        the pair are messages with the roles "query" and "document".
        """
        if self.uses_chat_template:
            return _chat_tokens(tokenizer, texts, limit, prompt)
        return tokenize(tokenizer, texts, limit, prompt, self.do_lower_case, name="pair")

    def embed(
        self,
        run: Run,
        inputs: Inputs,
        weights: ModuleWeights | None = None,
        task: str | None = None,
    ) -> jax.Array:
        """Computes the logits of a batch, `(batch, num_labels)`, without the activation.

        The arguments are those of :meth:`RetrievalConfig.embed`.
        """
        model_inputs, mask = split_inputs(inputs)
        if self.logit_score is None:
            return run(**model_inputs).logits.astype(jnp.float32)
        last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1] != 0, axis=1)

        def last_token(states: jax.Array) -> jax.Array:
            return jnp.take_along_axis(states, last[:, None, None], axis=1)

        def reduce(head: Head, states: jax.Array) -> jax.Array:
            return head(last_token(states))

        with reduced_logits(reduce):
            logits = run(**model_inputs).logits
        logits = logits if logits.shape[1] == 1 else last_token(logits)
        return self.logit_score(logits[:, 0].astype(jnp.float32))


def _read_activation(path: str | None, source: str) -> str | None:
    """Returns the class name of an activation from its path.

    For a class that is not supported, the function logs a warning and returns `None`.
    """
    if path is None:
        return None
    name = path.rsplit(".", 1)[-1]
    if path.startswith("torch.") and name in ACTIVATIONS:
        return name
    logger.warning(
        "'%s' has the unsupported activation %s: using the default activation instead (supported: "
        "%s)",
        *(source, path, ", ".join(ACTIVATIONS)),
    )
    return None


def _chat_tokens(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Any], limit: int, prompt: str
) -> TokenizedTexts:
    """Tokenizes pairs with a chat template that supports the roles "query" and "document".

    If a pair is too long, the end of the document is removed, but not the text that the template
    adds after the document.
    """
    system = [{"role": "system", "content": prompt}] if prompt else []

    def render(query: str, document: str) -> list[int]:
        messages = [
            *system,
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        text: Any = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UsageError(f"pair {number} must be a pair of texts, not {pair!r:.60}")
    probes = [render("a", "b"), render("b", "b"), render("a", "a")]
    if probes[0] in probes[1:]:
        raise UsageError(
            "the tokenizer's chat template does not render messages with the roles 'query' and "
            "'document': set tokenizer.chat_template to a template that renders both"
        )
    suffix = _common_suffix(*probes)
    rows = [render(*pair) for pair in pairs]
    if too_long := [row for row in rows if len(row) > limit]:
        logger.warning(
            "%d of %d pairs are longer than %d tokens and were truncated",
            *(len(too_long), len(rows), limit),
        )
    if suffix >= limit:
        raise UsageError(f"the chat template alone exceeds the model's limit of {limit} tokens")
    rows = [
        row if len(row) <= limit else [*row[: limit - suffix], *row[len(row) - suffix :]]
        for row in rows
    ]
    return TokenizedTexts(rows)


def _common_suffix(*rows: Sequence[int]) -> int:
    """Returns the number of tokens at the end that are the same in all rows."""
    length = 0
    while length < min(map(len, rows)) and len({row[-1 - length] for row in rows}) == 1:
        length += 1
    return length


class CrossEncoder(RetrievalModel):
    """A cross-encoder, which scores pairs of texts.

    It consists of a classifier or a causal language model, a tokenizer, and a
    :class:`CrossEncoderConfig`.

    Example:
        >>> model = hfseq.CrossEncoder.from_pretrained("cross-encoder/ms-marco-MiniLM-L6-v2")
        >>> model.predict([("How old is the law?", "The law was made in 1814.")])
        >>> model.rank("How old is the law?", ["Fish live in rivers.", "It was made in 1814."])
    """

    config_class = CrossEncoderConfig
    config: CrossEncoderConfig

    @classmethod
    def read_config(
        cls, directory: SentenceDirectory, options: dict[str, Any]
    ) -> CrossEncoderConfig:
        """Returns the settings of a cross-encoder, or those for a model without a head.

        A model without a head gets a new classification head. The option ``num_labels`` sets its
        number of labels, by default 1. If the model is a bi-encoder, its pooling and its prompts
        are ignored.
        """
        if directory.modules and directory.model_type != "SentenceTransformer":
            return super().read_config(directory, options)  # type: ignore[return-value]
        if directory.fetch("config.json") is None and directory.fetch("adapter_config.json"):
            return CrossEncoderConfig(options.get("num_labels", 1))
        architectures = directory.load("config.json").get("architectures") or [""]
        if architectures[0].endswith("ForCausalLM"):
            return CrossEncoderConfig.from_config(directory, LogitScore(-1, -1))
        config = CrossEncoderConfig.from_config(directory, None)
        num_labels = options.get("num_labels", config.num_labels)
        if not any(name.endswith("ForSequenceClassification") for name in architectures):
            options["num_labels"] = num_labels
        return replace(config, num_labels=num_labels)

    @classmethod
    def build(
        cls,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        config: RetrievalConfig,
        directory: SentenceDirectory,
    ) -> CrossEncoder:
        """Creates the cross-encoder from a loaded model and tokenizer.

        For a causal language model without a configured `LogitScore`, the tokens "yes" and "no"
        are used.
        """
        assert isinstance(config, CrossEncoderConfig)
        if config.logit_score == LogitScore(-1, -1):
            ids: Any = tokenizer.convert_tokens_to_ids(["yes", "no"])
            if None in ids or tokenizer.unk_token_id in ids:
                raise CheckpointError(
                    f"the tokenizer of '{directory.source}' lacks the tokens 'yes' and 'no', which "
                    "a causal language model needs as answers to score a pair"
                )
            config = replace(config, logit_score=LogitScore(*ids))
        if config.logit_score is not None:
            inputs = directory.transformer.get("modality_config") or {"message": {}}
            has_template = bool(tokenizer.chat_template) and "message" in inputs
            config = replace(config, uses_chat_template=has_template)
        return super().build(model, tokenizer, config, directory)

    @classmethod
    def of(cls, model: Any, tokenizer: PreTrainedTokenizerBase) -> CrossEncoder:
        """Creates a cross-encoder from a loaded classifier or causal language model.

        Args:
            model: The model. Settings are read from the directory from which it was loaded.
            tokenizer: The tokenizer of the model.
        """
        if not model.name_or_path:
            config = model.sentence_config or CrossEncoderConfig(model.config.num_labels)
            return cls(model, tokenizer, config)
        directory = SentenceDirectory.read(model.name_or_path, {})
        return cls.build(model, tokenizer, cls.read_config(directory, {}), directory)

    @property
    def num_labels(self) -> int:
        """Number of scores per pair."""
        return self.config.num_labels

    def save_pretrained(self, folder: str | Path) -> None:
        """Saves the model, its tokenizer and the files that sentence-transformers reads.

        The maximum length of a pair is saved with the tokenizer, because a Transformers directory
        without sentence-transformers files cannot store it elsewhere.
        """
        self.tokenizer.model_max_length = self.limit
        super().save_pretrained(folder)

    def predict(
        self,
        sentences: Sequence[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        activation_fn: str | Callable[[np.ndarray], np.ndarray] | None = None,
        apply_softmax: bool = False,
        *,
        params: Any = None,
    ) -> Any:
        """Computes the scores of pairs, as sentence-transformers does.

        Args:
            sentences: A pair of texts, or a list of pairs.
            prompt_name: Name of a stored prompt to prepend to the first text of each pair.
            prompt: A prompt to prepend to the first text of each pair.
            batch_size: Maximum number of pairs per batch.
            show_progress_bar: Whether to show a progress bar.
            activation_fn: A function that is applied to the scores, or the name of its PyTorch
                class, such as "Identity". Default: the activation of the model.
            apply_softmax: Whether to apply a softmax to the scores of a pair, if the model has
                several labels.
            params: Parameters to use instead of those of the model.

        Returns:
            Float32 scores, `(pairs,)` for models with one label, otherwise `(pairs, labels)`. For a
            single pair, the first axis is omitted.

        Raises:
            UsageError: An argument is not valid.
        """
        is_single = bool(len(sentences)) and isinstance(sentences[0], str)
        pairs = [sentences] if is_single else sentences
        for number, pair in enumerate(pairs, 1):
            if isinstance(pair, str) or len(pair) != 2:
                raise UsageError(f"pair {number} must be a pair of texts, not {pair!r:.60}")
        activation: Any = activation_fn or self.config.activation_name
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                raise UsageError(
                    f"unknown activation_fn {activation!r} (known: {', '.join(ACTIVATIONS)})"
                )
            activation = ACTIVATIONS[activation]
        tokens = self.tokenize(pairs, self.config.find_prompt(prompt, prompt_name), None)
        logits = self.vectors(tokens, batch_size, show_progress_bar, params=params)
        scores = np.asarray(activation(logits), np.float32)
        if self.num_labels == 1:
            scores = scores.reshape(len(scores))
        elif apply_softmax and len(scores):
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores = powers / powers.sum(axis=1, keepdims=True)
        return scores[0] if is_single else scores

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Sorts documents by their scores for a query.

        Args:
            query: The query.
            documents: The documents.
            top_k: Number of documents to return. Default: all documents.
            return_documents: Whether to return the texts of the documents.
            **options: Options of :meth:`predict`.

        Returns:
            Dictionaries with the keys "corpus_id" (the index of the document), "score" and, if
            ``return_documents`` is set, "text", sorted by decreasing score. Documents with the same
            score keep their order.

        Raises:
            UsageError: The model has several labels, or a score is not a number.
        """
        if self.num_labels != 1:
            raise UsageError(
                f"rank requires a model with one label, but this model has {self.num_labels}: use "
                "predict"
            )
        scores = self.predict([(query, document) for document in documents], **options)
        if np.isnan(scores).any():
            raise UsageError(
                f"the score of document {int(np.isnan(scores).argmax()) + 1} is not a number, so "
                "the documents cannot be sorted"
            )
        ranking = []
        for number in np.argsort(-scores, kind="stable")[:top_k].tolist():
            entry: dict[str, Any] = {"corpus_id": number, "score": float(scores[number])}
            if return_documents:
                entry["text"] = documents[number]
            ranking.append(entry)
        return ranking
