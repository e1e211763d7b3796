"""Pipelines that analyze texts: masks, classes, tags, answers and features.

Return values have the format of Transformers 4, including tasks that version 5 dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.question_answering import ContextWindows, make_windows
from hfseq.errors import UsageError
from hfseq.modeling.sentence import CrossEncoder, MultiVectorConfig, MultiVectorEncoder
from hfseq.pipelines.base import (
    Answer,
    Options,
    Outputs,
    Pipeline,
    RejectedInput,
    Row,
    input_text,
)

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

#: Spellings of a mask for all tokenizers. The mask token of the tokenizer replaces them.
MASKS = ("<mask>", "[MASK]")


class FillMask(Pipeline):
    """Predicts the ``top_k`` most probable tokens for a mask, optionally only from ``targets``.

    A mask is the mask token of the tokenizer or one of `MASKS`.
    """

    head = "ForMaskedLM"
    defaults: ClassVar = {"top_k": 5, "targets": None, "truncation": False}
    per_token = True

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Tokenizes the texts and finds the masks."""
        mask = self.tokenizer.mask_token_id
        if mask is None:
            raise UsageError("the tokenizer has no mask token. Use a masked language model.")

        def rows(encoded: Any, number: int) -> list[Row] | RejectedInput:
            ids = encoded["input_ids"][number]
            positions = [position for position, token in enumerate(ids) if token == mask]
            if not positions:
                names = " or ".join(dict.fromkeys((self.tokenizer.mask_token, MASKS[0])))
                return RejectedInput(f"it contains no mask token ({names})")
            types = encoded.get("token_type_ids")
            return [Row(ids, types and types[number], positions)]

        texts = [self._with_masks(text) if isinstance(text, str) else text for text in inputs]
        return encode_texts(self, texts, options.get("truncation", False), rows)

    def _with_masks(self, text: str) -> str:
        for mask in MASKS:
            text = text.replace(mask, self.tokenizer.mask_token)
        return text

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the probabilities of all tokens at the masks."""
        model_inputs, positions = dict(inputs), inputs["positions"]
        del model_inputs["positions"]
        logits = self.model(**model_inputs, params=params).logits
        mask_logits = jnp.take_along_axis(logits, positions[:, :, None], axis=1).astype(jnp.float32)
        return {"shares": jax.nn.softmax(mask_logits)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the most probable tokens, as one list per mask if there are several."""
        (row,), (output,) = rows, outputs
        targets, answers = self._targets(options.get("targets")), []
        pad = self.tokenizer.pad_token_id
        for position, probabilities in zip(row.positions or (), output["shares"], strict=True):
            scores = probabilities if targets is None else probabilities[targets]
            guesses = []
            for candidate in np.argsort(-scores, kind="stable")[: options.get("top_k", 5)].tolist():
                token = candidate if targets is None else targets[candidate]
                ids = [*row.ids[:position], token, *row.ids[position + 1 :]]
                visible_ids = [token_id for token_id in ids if token_id != pad]
                text = self.tokenizer.decode(
                    visible_ids, skip_special_tokens=len(row.positions or ()) == 1
                )
                guesses.append(
                    {
                        "score": float(scores[candidate]),
                        "token": token,
                        "token_str": self.tokenizer.decode([token]),
                        "sequence": text,
                    }
                )
            answers.append(guesses)
        return answers[0] if len(answers) == 1 else answers

    def _targets(self, words: str | Sequence[str] | None) -> list[int] | None:
        if words is None:
            return None
        vocabulary, token_ids = self.tokenizer.get_vocab(), list[int]()
        for word in [words] if isinstance(words, str) else words:
            ids = (
                [vocabulary[word]]
                if word in vocabulary
                else self.tokenizer.encode(word, add_special_tokens=False)
            )
            token_ids += ids[:1]
        if not token_ids:
            raise UsageError(f"targets {words!r}: none of them is in the vocabulary")
        return sorted(set(token_ids))

    def format_list(self, answers: list[Any], options: Options) -> list[Any]:
        """Returns the answer itself for a list with one input."""
        return answers[0] if len(answers) == 1 else answers


def encode_texts(
    pipeline: Pipeline,
    inputs: Sequence[Any],
    truncation: bool | str,
    make_rows: Any,
    pair_texts: Sequence[str] | None = None,
) -> list[list[Row] | RejectedInput]:
    """Tokenizes the texts of all inputs in one call, and returns the rows of each input.

    Args:
        pipeline: The pipeline.
        inputs: The inputs.
        truncation: Option of the tokenizer.
        make_rows: Function that returns the rows of a text. Its arguments are the tokenizer's
            output and the index of the text.
        pair_texts: Second texts. If given, each text is paired with each of them.
    """
    texts = [input_text(text, "text") for text in inputs]
    valid_texts = [text for text in texts if not isinstance(text, RejectedInput)]
    pairs = None if pair_texts is None else list(pair_texts) * len(valid_texts)
    repeated_texts = [text for text in valid_texts for _ in pair_texts or ("",)]
    encoded: Any = (
        pipeline.tokenize(repeated_texts, pairs, truncation=truncation) if valid_texts else {}
    )
    numbers = iter(range(len(valid_texts)))
    return [
        text if isinstance(text, RejectedInput) else make_rows(encoded, next(numbers))
        for text in texts
    ]


class FeatureExtraction(Pipeline):
    """Returns the last hidden states of a text, `(1, tokens, features)`."""

    head = "Model"
    defaults: ClassVar = {"return_tensors": False, "truncation": False}
    per_token = True

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per text."""
        return encode_texts(self, inputs, options.get("truncation", False), make_row)

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the hidden states."""
        output = self.model(**inputs, params=params)
        return {"features": output.last_hidden_state.astype(jnp.float32)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns nested lists, or an array with ``return_tensors``."""
        features = outputs[0]["features"][None]
        return features if options.get("return_tensors") else features.tolist()


def make_row(encoded: Any, number: int) -> list[Row]:
    """Returns the row of an encoded text."""
    types = encoded.get("token_type_ids")
    return [Row(encoded["input_ids"][number], types and types[number])]


class SentenceSimilarity(Pipeline):
    """Returns the similarity between a sentence and each of several other sentences.

    The input is ``{"source_sentence": …, "sentences": […]}``, as on the Hub. Similarities of
    bi-encoders are cosines. The embeddings are those of
    :meth:`~hfseq.modeling.FlaxPreTrainedModel.encode`, whose options ``pooling``, ``prompt`` and
    ``prompt_name`` are accepted. Multi-vector encoders compute MaxSim.
    """

    head = "Model"
    input_description = 'a dictionary with "source_sentence" and "sentences"'
    defaults: ClassVar = {"pooling": None, "prompt": None, "prompt_name": None}

    def stream(
        self,
        inputs: Iterable[Any],
        batch_size: int | None = None,
        options: Options | None = None,
        pause: float | None = None,
    ) -> Iterator[Answer]:
        """See :meth:`hfseq.pipelines.base.Pipeline.stream`."""
        encode_options = {**(self.options if options is None else options)}
        encode_options |= {"batch_size": batch_size or self.batch_size, "params": self.params}
        config = self.model.sentence_config
        encoder = None
        if isinstance(config, MultiVectorConfig) and encode_options.get("pooling") is None:
            encoder = MultiVectorEncoder(self.model, self.tokenizer, config)
            encode_options.pop("pooling", None)
        for item in inputs:
            source, sentences = (
                (item.get("source_sentence"), item.get("sentences"))
                if isinstance(item, Mapping)
                else (None, None)
            )
            texts = [source, *sentences] if isinstance(sentences, list | tuple) else []
            if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
                yield Answer(error=f"it must be {self.input_description}, not {item!r:.60}")
            elif encoder is not None:
                queries = encoder.encode_query(texts[:1], **encode_options)
                documents = encoder.encode_document(texts[1:], **encode_options)
                yield Answer(encoder.similarity(queries, documents)[0].tolist())
            else:
                vectors = self.model.encode(
                    texts, normalize_embeddings=True, tokenizer=self.tokenizer, **encode_options
                )
                yield Answer([float(score) for score in vectors[1:] @ vectors[0]])


class TextRanking(Pipeline):
    """Sorts texts by their relevance to a query, with a cross-encoder.

    The input is ``{"query": …, "documents": […]}``. The answer is that of
    :meth:`hfseq.CrossEncoder.rank`: a list of ``{"corpus_id": …, "score": …}``, sorted by
    decreasing score, with at most ``top_k`` entries, and with ``text`` if ``return_documents`` is
    set. The prompt (``prompt`` or ``prompt_name``) precedes the query.
    """

    head = "ForSequenceClassification"
    input_description = 'a dictionary with "query" and "documents"'
    defaults: ClassVar = {
        "top_k": None,
        "return_documents": False,
        "prompt": None,
        "prompt_name": None,
    }

    @classmethod
    def check_head(cls, model: FlaxPreTrainedModel, name: str) -> None:
        """Checks that the checkpoint has weights of a classifier, or is a causal language model."""
        if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            super().check_head(model, name)

    def stream(
        self,
        inputs: Iterable[Any],
        batch_size: int | None = None,
        options: Options | None = None,
        pause: float | None = None,
    ) -> Iterator[Answer]:
        """See :meth:`hfseq.pipelines.base.Pipeline.stream`."""
        rank_options = {**(self.options if options is None else options)}
        encoder = CrossEncoder.of(self.model, self.tokenizer)
        for item in inputs:
            query, documents = (
                (item.get("query"), item.get("documents"))
                if isinstance(item, Mapping)
                else (None, None)
            )
            texts = [query, *documents] if isinstance(documents, list | tuple) else []
            if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
                yield Answer(error=f"it must be {self.input_description}, not {item!r:.60}")
                continue
            ranking = encoder.rank(
                texts[0],
                texts[1:],
                batch_size=batch_size or self.batch_size,
                params=self.params,
                **rank_options,
            )
            yield Answer(ranking)


class TextClassification(Pipeline):
    """Classifies a text, or a pair ``{"text": …, "text_pair": …}``.

    The ``top_k`` most probable classes are returned, or all classes for ``top_k=None``.
    ``function_to_apply`` is ``softmax``, ``sigmoid`` or ``none``. Its default depends on the
    problem type of the model.
    """

    head = "ForSequenceClassification"
    defaults: ClassVar = {"top_k": 1, "function_to_apply": None, "truncation": False}

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per text or pair."""
        truncation, sides = options.get("truncation", False), []
        for item in inputs:
            is_pair = isinstance(item, Mapping) and item.get("text_pair") is not None
            pair = input_text(item, "text_pair") if is_pair else None
            sides.append((input_text(item, "text"), pair))
        rows: list[list[Row] | RejectedInput | None] = [
            next((side for side in pair_sides if isinstance(side, RejectedInput)), None)
            for pair_sides in sides
        ]
        for is_pair in (False, True):  # tokenizers accept either texts or pairs
            indices = [n for n, (_, pair) in enumerate(sides) if (pair is not None) == is_pair]
            indices = [number for number in indices if rows[number] is None]
            if indices:
                pairs = [sides[number][1] for number in indices] if is_pair else None
                encoded = self.tokenize(
                    [sides[n][0] for n in indices], pairs, truncation=truncation
                )
                for position, number in enumerate(indices):
                    rows[number] = make_row(encoded, position)
        return [item for item in rows if item is not None]

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the logits of all classes."""
        return {"logits": self.model(**inputs, params=params).logits.astype(jnp.float32)}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the most probable class, or a list with ``top_k``."""
        function = options.get("function_to_apply")
        results = class_scores(self.model.config, outputs[0]["logits"], function)
        return results[: options["top_k"]] if "top_k" in options else results[0]

    def format_single(self, answer: Any, inputs: Any, options: Options) -> Any:
        """Returns a list for a single text, unless the call sets ``top_k``."""
        return [answer] if isinstance(inputs, str) and "top_k" not in options else answer


def class_scores(config: Any, logits: np.ndarray, function: str | None) -> list[dict[str, Any]]:
    """Returns ``{"label", "score"}`` for all classes, the highest score first.

    Args:
        config: The model's configuration.
        logits: The logits, `(num_labels,)`.
        function: "softmax", "sigmoid" or "none". Default: "none" for regression, "sigmoid" for
            multi-label classification and for a single class, and otherwise "softmax".

    Raises:
        UsageError: ``function`` has an unknown value.
    """
    if function is None:
        is_multi_label = config.problem_type == "multi_label_classification" or len(logits) == 1
        is_regression = config.problem_type == "regression"
        function = "none" if is_regression else "sigmoid" if is_multi_label else "softmax"
    if function not in ("none", "sigmoid", "softmax"):
        raise UsageError(
            f"function_to_apply must be 'softmax', 'sigmoid' or 'none', not {function!r}"
        )
    scores = logits.astype(np.float64)
    if function == "sigmoid":
        scores = 1 / (1 + np.exp(-scores))
    elif function == "softmax":
        scores = softmax(scores)
    return [
        {"label": class_label(config, number), "score": float(scores[number])}
        for number in np.argsort(-scores, kind="stable").tolist()
    ]


def class_label(config: Any, number: int) -> str:
    """Returns the name of a class. The default, as in Transformers, is LABEL_0 and so on."""
    return config.id2label.get(number, f"LABEL_{number}")


def softmax(scores: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


class ZeroShotClassification(Pipeline):
    """Classifies texts with a natural language inference model.

    The labels are an argument of the call.
    """

    head = "ForSequenceClassification"
    defaults: ClassVar = {
        "candidate_labels": None,
        "hypothesis_template": "This example is {}.",
        "multi_label": False,
        "truncation": "only_first",
    }

    def __call__(
        self, inputs: Any, candidate_labels: str | Sequence[str] | None = None, **options: Any
    ) -> Any:
        """Returns ``{"sequence", "labels", "scores"}`` with the most probable label first."""
        if candidate_labels is not None:
            options["candidate_labels"] = candidate_labels
        return super().__call__(inputs, **options)

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per text and label."""
        labels = candidate_labels_of(options)
        template = options.get("hypothesis_template", self.defaults["hypothesis_template"])

        def rows(encoded: Any, number: int) -> list[Row]:
            start = number * len(labels)
            return [row for n in range(len(labels)) for row in make_row(encoded, start + n)]

        truncation = options.get("truncation", "only_first")
        return encode_texts(self, inputs, truncation, rows, hypotheses(labels, template))

    forward = TextClassification.forward

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the labels with their scores.

        The scores are the softmax of the entailment logits of all labels. With ``multi_label``, or
        for a single label, a score is the softmax of the entailment and contradiction logits.
        """
        labels = candidate_labels_of(options)
        logits = np.stack([output["logits"] for output in outputs]).astype(np.float64)
        label_ids = self.model.config.label2id.items()
        entailment = next((n for name, n in label_ids if name.lower().startswith("entail")), -1)
        if options.get("multi_label") or len(labels) == 1:
            contradiction = -1 if entailment == 0 else 0
            scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
        else:
            scores = softmax(logits[:, entailment])
        order = np.argsort(-scores, kind="stable").tolist()
        return {
            "sequence": input_text(inputs, "text"),
            "labels": [labels[n] for n in order],
            "scores": [float(scores[n]) for n in order],
        }


def candidate_labels_of(options: Options) -> list[str]:
    """Returns the candidate labels of a zero-shot task, which may be a comma-separated string.

    Raises:
        UsageError: The option is missing or empty.
    """
    labels = options.get("candidate_labels")
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if not labels:
        raise UsageError("candidate_labels is required: the labels to choose from")
    return list(labels)


def hypotheses(labels: Sequence[str], template: str) -> list[str]:
    """Returns the hypothesis of each label, which is the template with the label inserted.

    Raises:
        UsageError: The template has no placeholder.
    """
    if template.format(labels[0]) == template:
        raise UsageError(
            f"hypothesis_template {template!r} has no {{}} as a placeholder for the label"
        )
    return [template.format(label) for label in labels]


AGGREGATION_STRATEGIES = ("none", "simple", "first", "average", "max")


class TokenClassification(Pipeline):
    """Tags the tokens of a text, or returns its entities with an ``aggregation_strategy``.

    The strategy ``simple`` merges adjacent tokens with the same tag. ``first``, ``average`` and
    ``max`` assign one tag to all tokens of a word. With ``stride``, texts that are longer than the
    model's limit are read in windows that overlap by this many tokens. With
    ``is_split_into_words``, a text is a list of words.
    """

    head = "ForTokenClassification"
    defaults: ClassVar = {
        "aggregation_strategy": "none",
        "ignore_labels": ["O"],
        "stride": None,
        "is_split_into_words": False,
        "delimiter": " ",
        "truncation": True,
    }
    per_token = True

    def is_single_input(self, inputs: Any) -> bool:
        """Returns whether ``inputs`` is one text, which may be a list of words."""
        words = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], str)
        return super().is_single_input(inputs) or (words and self._words)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Returns the entities of one or more texts."""
        self._words = {**self.options, **options}.get("is_split_into_words", False)
        return super().__call__(inputs, **options)

    _words = False

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per text, or per window of a text."""
        strategy, stride = self._strategy(options), options.get("stride")
        if stride is not None and strategy == "none":
            raise UsageError("stride requires an aggregation_strategy, because windows overlap")
        if not self.tokenizer.is_fast:
            raise UsageError(
                f"{type(self.tokenizer).__name__} does not return character offsets. Use a fast "
                "tokenizer (tokenizer.json)."
            )
        if stride is not None and (
            self.truncation_length is None or stride >= self.truncation_length
        ):
            raise UsageError(
                f"stride {stride} must be less than the window of {self.truncation_length} tokens"
            )
        is_split = options.get("is_split_into_words", False)
        delimiter = options.get("delimiter", " ")
        encoded_inputs: list[list[Row] | RejectedInput] = []
        for item in inputs:
            if is_split:
                words = item.get("tokens") if isinstance(item, Mapping) else item
                if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
                    encoded_inputs.append(
                        RejectedInput(f"words must be a list of texts, not {words!r:.60}")
                    )
                    continue
                text: Any = words
                starts = np.cumsum([0, *(len(word) + len(delimiter) for word in words)])
                sentence = delimiter.join(words)
            else:
                text = sentence = input_text(item, "text")
                if isinstance(text, RejectedInput):
                    encoded_inputs.append(text)
                    continue
            window_options = (
                {}
                if stride is None
                else {
                    "return_overflowing_tokens": True,
                    "stride": stride,
                }
            )
            encoded = self.tokenize(
                [text],
                truncation=options.get("truncation", True),
                is_split_into_words=is_split,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                **window_options,
            )
            rows = []
            for index in range(len(encoded["input_ids"])):
                (row,) = make_row(encoded, index)
                offsets = np.array(encoded["offset_mapping"][index]).reshape(-1, 2)
                if is_split:
                    offsets += [
                        [0 if word is None else starts[word]] for word in encoded.word_ids(index)
                    ]
                row.metadata = sentence, offsets, encoded["special_tokens_mask"][index]
                rows.append(row)
            encoded_inputs.append(rows)
        return encoded_inputs

    def _strategy(self, options: Options) -> str:
        strategy = str(options.get("aggregation_strategy", "none")).lower()
        if strategy not in AGGREGATION_STRATEGIES:
            raise UsageError(
                f"unknown aggregation_strategy {strategy!r}. Use one of "
                f"{', '.join(AGGREGATION_STRATEGIES)}."
            )
        return strategy

    forward = TextClassification.forward

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the tags or entities of all windows, except ignored labels."""
        strategy, ignored = self._strategy(options), options.get("ignore_labels", ["O"])
        results = []
        for row, output in zip(rows, outputs, strict=True):
            entities = self._tokens(row, softmax(output["logits"].astype(np.float64)))
            if strategy in ("first", "average", "max"):
                words = _runs(entities, lambda _, token: token["inside"])
                entities = [self._word(word, strategy) for word in words]
            for entity in entities:
                probabilities = entity.pop("scores")
                entity["entity"] = class_label(self.model.config, int(probabilities.argmax()))
                entity["score"] = float(probabilities.max())
                del entity["inside"]
            if strategy != "none":
                entities = [self._group(group) for group in _runs(entities, _one_entity)]
            key = "entity" if strategy == "none" else "entity_group"
            results += [entity for entity in entities if entity[key] not in ignored]
        return results if len(rows) == 1 else _without_overlap(results)

    def _tokens(self, row: Row, probabilities: np.ndarray) -> list[dict[str, Any]]:
        """Returns the tokens that are not special. ``inside`` marks tokens that continue a word."""
        sentence, offsets, special = row.metadata
        prefix = getattr(self.tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
        tokens = []
        for position, (start, end) in enumerate(offsets.tolist()):
            if special[position]:
                continue
            word = str(self.tokenizer.convert_ids_to_tokens(int(row.ids[position])))
            if prefix:
                continues_word = len(word) != end - start
            else:
                continues_word = start > 0 and " " not in sentence[start - 1 : start + 1]
            if row.ids[position] == self.tokenizer.unk_token_id:
                word, continues_word = sentence[start:end], False
            tokens.append(
                {
                    "entity": "",
                    "score": 0.0,
                    "index": position,
                    "word": word,
                    "start": start,
                    "end": end,
                    "scores": probabilities[position],
                    "inside": continues_word,
                }
            )
        return tokens

    def _word(self, tokens: list[dict[str, Any]], strategy: str) -> dict[str, Any]:
        """Returns a word with its class probabilities.

        The probabilities are those of the word's first token (``first``), those of its most certain
        token (``max``), or the mean over its tokens (``average``).
        """
        probabilities = np.stack([token["scores"] for token in tokens])
        if strategy == "average":
            scores = probabilities.mean(axis=0)
        else:
            scores = probabilities[
                0 if strategy == "first" else int(probabilities.max(axis=1).argmax())
            ]
        text = self.tokenizer.convert_tokens_to_string([token["word"] for token in tokens])
        return {
            "entity": "",
            "score": 0.0,
            "word": text,
            "start": tokens[0]["start"],
            "end": tokens[-1]["end"],
            "scores": scores,
            "inside": False,
        }

    def _group(self, entities: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "entity_group": entities[0]["entity"].split("-", 1)[-1],
            "score": float(np.mean([entity["score"] for entity in entities])),
            "word": self.tokenizer.convert_tokens_to_string(
                [entity["word"] for entity in entities]
            ),
            "start": entities[0]["start"],
            "end": entities[-1]["end"],
        }


def _runs(
    items: list[dict[str, Any]], continues: Callable[[dict[str, Any], dict[str, Any]], bool]
) -> list[list[dict[str, Any]]]:
    """Groups adjacent items.

    An item is in the group of the previous item if ``continues(previous, item)`` is true.
    """
    runs: list[list[dict[str, Any]]] = []
    for item in items:
        if runs and continues(runs[-1][-1], item):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _one_entity(previous: dict[str, Any], entity: dict[str, Any]) -> bool:
    """Returns whether a token continues the entity of the previous token.

    A tag with the prefix ``B-`` starts a new entity.
    """
    begins, tag = _tag(entity["entity"])
    return not begins and tag == _tag(previous["entity"])[1]


def _tag(name: str) -> tuple[bool, str]:
    return name.startswith("B-"), name[2:] if name[:2] in ("B-", "I-") else name


def _without_overlap(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns entities without overlaps, for texts that were read in overlapping windows.

    Of two entities that overlap, the longer one is kept, or the more certain one if they are
    equally long.
    """
    selected: list[dict[str, Any]] = []
    for current in sorted(entities, key=lambda entity: entity["start"]):
        if selected and current["start"] < selected[-1]["end"]:
            ranks = [
                (each["end"] - each["start"], each["score"]) for each in (selected[-1], current)
            ]
            selected[-1] = current if ranks[1] > ranks[0] else selected[-1]
        else:
            selected.append(current)
    return selected


class QuestionAnswering(Pipeline):
    """Answers a question from a context: ``{"score", "start", "end", "answer"}``.

    With ``top_k`` > 1 the result is a list. Contexts longer than ``max_seq_len`` tokens (384) are
    read in windows that overlap by ``doc_stride`` tokens (128). Answers have at most
    ``max_answer_len`` tokens (15). With ``handle_impossible_answer`` the answer may be empty.
    ``align_to_words`` extends answers to whole words.
    """

    head = "ForQuestionAnswering"
    defaults: ClassVar = {
        "top_k": 1,
        "doc_stride": None,
        "max_seq_len": None,
        "max_answer_len": 15,
        "handle_impossible_answer": False,
        "align_to_words": True,
    }
    per_token = True

    def __call__(
        self,
        inputs: Any = None,
        context: str | None = None,
        *,
        question: str | Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """Answers ``question`` from ``context``.

        Args:
            inputs: One or more dictionaries with "question" and "context". If ``context`` is given,
                one or more questions.
            context: One context for all questions, or one context per question.
            question: One or more questions.
            **options: Options of the task.
        """
        questions_given = (
            question if question is not None else inputs if context is not None else None
        )
        if questions_given is not None:
            if context is None:
                raise UsageError("question-answering: context is required")
            questions = (
                [questions_given] if isinstance(questions_given, str) else list(questions_given)
            )
            contexts = [context] * len(questions) if isinstance(context, str) else list(context)
            if len(questions) != len(contexts):
                raise UsageError(
                    f"question-answering: got {len(questions)} questions and {len(contexts)} "
                    "contexts"
                )
            inputs = [
                {"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)
            ]
        for name in ("top_k", "max_answer_len"):
            if options.get(name, 1) < 1:
                raise UsageError(f"{name} must be at least 1, not {options[name]}")
        if isinstance(inputs, list | tuple) and len(inputs) == 1:
            (inputs,) = inputs
        return super().__call__(inputs, **options)

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Returns one row per window of the context."""
        default_length = min(item for item in (self.truncation_length, 384) if item)
        length = min(
            options.get("max_seq_len") or default_length, self.max_positions or default_length
        )
        stride = options.get("doc_stride")
        stride = min(length // 2, 128) if stride is None else stride
        encoded_inputs: list[list[Row] | RejectedInput] = []
        for item in inputs:
            sides = [
                input_text(item if isinstance(item, Mapping) else {}, name)
                for name in ("question", "context")
            ]
            rejected = next((side for side in sides if isinstance(side, RejectedInput)), None)
            if rejected is None and not all(side.strip() for side in sides):
                rejected = RejectedInput("its question or its context is empty")
            if rejected is not None:
                encoded_inputs.append(rejected)
                continue
            question, context = sides
            windows = make_windows(self.tokenizer, [question], [context], length, stride)
            rows = []
            for number, ids in enumerate(windows.ids):
                types = None if windows.token_type_ids is None else windows.token_type_ids[number]
                rows.append(Row(ids, types, metadata=(windows, number)))
            encoded_inputs.append(rows)
        return encoded_inputs

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Returns the logits of the first and of the last token of the answer."""
        output = self.model(**inputs, params=params)
        return {side: output[f"{side}_logits"].astype(jnp.float32) for side in ("start", "end")}

    def postprocess(
        self, inputs: Any, rows: list[Row], outputs: list[Outputs], options: Options
    ) -> Any:
        """Returns the most probable spans. Spans with equal text are merged."""
        top, aligned = options.get("top_k", 1), options.get("align_to_words", True)
        null_score, context = 1e6, inputs["context"]
        answers: list[dict[str, Any]] = []
        for row, output in zip(rows, outputs, strict=True):
            windows, number = row.metadata
            spans = windows.offsets[number]
            probabilities = []
            for side in ("start", "end"):
                logits = output[side].astype(np.float64)
                is_candidate = (spans[:, 0] >= 0) | (
                    np.array(row.ids) == self.tokenizer.cls_token_id
                )
                probabilities.append(softmax(np.where(is_candidate, logits, -1e4)))
            null_score = min(null_score, float(probabilities[0][0] * probabilities[1][0]))
            longest = options.get("max_answer_len", 15)
            scores = np.tril(np.triu(np.outer(*probabilities)), longest - 1)
            scores[spans[:, 0] < 0] = scores[:, spans[:, 0] < 0] = 0.0
            # Read more spans than necessary: some become equal when they are extended to words.
            count = 2 * top + 10 if aligned else top
            order = np.argsort(-scores, axis=None, kind="stable")[:count]
            firsts, lasts = np.unravel_index(order, scores.shape)
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                if spans[first, 0] < 0 or spans[last, 0] < 0 or last < first:
                    continue
                start, end = _characters(windows, number, first, last, aligned)
                text, score = context[start:end], float(scores[first, last])
                duplicate = next(
                    (
                        candidate
                        for candidate in answers
                        if candidate["answer"].lower() == text.lower()
                    ),
                    None,
                )
                if duplicate is not None:
                    duplicate["score"] += score
                else:
                    answers.append({"score": score, "start": start, "end": end, "answer": text})
        if options.get("handle_impossible_answer"):
            answers.append({"score": null_score, "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda answer: -answer["score"])[:top]
        return answers[0] if len(answers) == 1 else answers


def _characters(
    windows: ContextWindows, number: int, first: int, last: int, align_to_words: bool
) -> tuple[int, int]:
    """Returns the character range of tokens of a window, optionally extended to whole words."""
    spans, words = windows.offsets[number], windows.word_ids_of_tokens[number]
    if align_to_words and words[first] >= 0 and words[last] >= 0:
        first = int(np.flatnonzero(words == words[first])[0])
        last = int(np.flatnonzero(words == words[last])[-1])
    return int(spans[first, 0]), int(spans[last, 1])
