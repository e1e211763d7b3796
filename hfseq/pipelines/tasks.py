"""Pipelines that judge texts: masks, classes, tags, answers, features; and the door to all of them.

What they return has the shapes of Transformers 4, which dropped some of them in version 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.question_answering import ContextWindows, make_windows
from hfseq.errors import UsageError, did_you_mean
from hfseq.pipelines import load
from hfseq.pipelines.base import Options, Outputs, Pipeline, RejectedInput, Row, input_text
from hfseq.pipelines.generation import Summarization, Text2Text, TextGeneration, Translation

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel


class FillMask(Pipeline):
    """What stands in the place of masks: the ``top_k`` likeliest, of ``targets`` if there are."""

    head = "ForMaskedLM"
    defaults: ClassVar = {"top_k": 5, "targets": None, "truncation": False}
    per_token = True

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Find the masks."""
        mask = self.tokenizer.mask_token_id
        if mask is None:
            raise UsageError("the tokenizer has no mask token: take a masked language model")

        def rows(encoded: Any, number: int) -> list[Row] | RejectedInput:
            ids = encoded["input_ids"][number]
            places = [place for place, token in enumerate(ids) if token == mask]
            if not places:
                return RejectedInput(f"there is no mask ({self.tokenizer.mask_token}) in it")
            types = encoded.get("token_type_ids")
            return [Row(ids, types and types[number], places)]

        return encode_texts(self, inputs, options.get("truncation", False), rows)

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the probabilities of all tokens at the masks."""
        given, places = dict(inputs), inputs["places"]
        del given["places"]
        logits = self.model(**given, params=params).logits
        chosen = jnp.take_along_axis(logits, places[:, :, None], axis=1).astype(jnp.float32)
        return {"shares": jax.nn.softmax(chosen)}

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Return the likeliest tokens, for each mask if there are several."""
        (row,), (output,) = rows, outputs
        targets, answers = self._targets(options.get("targets")), []
        pad = self.tokenizer.pad_token_id
        for place, shares in zip(row.places or (), output["shares"], strict=True):
            known = shares if targets is None else shares[targets]
            guesses = []
            for best in np.argsort(-known, kind="stable")[: options.get("top_k", 5)].tolist():
                token = best if targets is None else targets[best]
                ids = [*row.ids[:place], token, *row.ids[place + 1 :]]
                kept = [one for one in ids if one != pad]
                text = self.tokenizer.decode(kept, skip_special_tokens=len(row.places or ()) == 1)
                guesses.append(
                    {
                        "score": float(known[best]),
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
        known, found = self.tokenizer.get_vocab(), list[int]()
        for word in [words] if isinstance(words, str) else words:
            ids = (
                [known[word]]
                if word in known
                else self.tokenizer.encode(word, add_special_tokens=False)
            )
            found += ids[:1]
        if not found:
            raise UsageError(f"targets {words!r}: no token of the model stands for them")
        return sorted(set(found))

    def several(self, answers: list[Any], options: Options) -> list[Any]:
        """Return the only answer of a list of one as it is."""
        return answers[0] if len(answers) == 1 else answers


def encode_texts(
    pipeline: Pipeline,
    inputs: Sequence[Any],
    truncation: bool | str,
    rows: Any,
    beside: Sequence[str] | None = None,
) -> list[list[Row] | RejectedInput]:
    """Tokenise all texts at once; ``rows(encoded, number)`` makes the rows of one.

    Each is paired with each of the texts ``beside``, where these are given.
    """
    texts = [input_text(one, "text") for one in inputs]
    good = [one for one in texts if not isinstance(one, RejectedInput)]
    pairs = None if beside is None else list(beside) * len(good)
    every = [one for one in good for _ in beside or ("",)]
    encoded: Any = pipeline.tokenize(every, pairs, truncation=truncation) if good else {}
    numbers = iter(range(len(good)))
    return [
        one if isinstance(one, RejectedInput) else rows(encoded, next(numbers)) for one in texts
    ]


class FeatureExtraction(Pipeline):
    """The last hidden states of a text, (1, tokens, features)."""

    head = "Model"
    defaults: ClassVar = {"return_tensors": False, "truncation": False}
    per_token = True

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Make a row of each text."""
        return encode_texts(self, inputs, options.get("truncation", False), make_row)

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the hidden states."""
        output = self.model(**inputs, params=params)
        return {"features": output.last_hidden_state.astype(jnp.float32)}

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Return nested lists, or an array."""
        features = outputs[0]["features"][None]
        return features if options.get("return_tensors") else features.tolist()


def make_row(encoded: Any, number: int) -> list[Row]:
    """Return the row of a text that the tokenizer encoded."""
    types = encoded.get("token_type_ids")
    return [Row(encoded["input_ids"][number], types and types[number])]


class TextClassification(Pipeline):
    """Classes of a text, or of a pair as ``{"text": …, "text_pair": …}``.

    ``top_k`` are returned, all with None; ``function_to_apply`` is ``softmax``, ``sigmoid`` or
    ``none``, by default what the model was trained for.
    """

    head = "ForSequenceClassification"
    defaults: ClassVar = {"top_k": 1, "function_to_apply": None, "truncation": False}

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Make a row of each text or pair."""
        cut, sides = options.get("truncation", False), []
        for one in inputs:
            paired = isinstance(one, Mapping) and one.get("text_pair") is not None
            pair = input_text(one, "text_pair") if paired else None
            sides.append((input_text(one, "text"), pair))
        made: list[list[Row] | RejectedInput | None] = [
            next((side for side in both if isinstance(side, RejectedInput)), None) for both in sides
        ]
        for paired in (False, True):  # tokenizers take either texts or pairs
            own = [n for n, (_, pair) in enumerate(sides) if (pair is not None) == paired]
            own = [number for number in own if made[number] is None]
            if own:
                pairs = [sides[number][1] for number in own] if paired else None
                encoded = self.tokenize([sides[n][0] for n in own], pairs, truncation=cut)
                for place, number in enumerate(own):
                    made[number] = make_row(encoded, place)
        return [one for one in made if one is not None]

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the scores of all classes."""
        return {"logits": self.model(**inputs, params=params).logits.astype(jnp.float32)}

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Return the best class, or a list of several."""
        config, logits = self.model.config, outputs[0]["logits"]
        function, kind = options.get("function_to_apply"), config.problem_type
        if function is None:
            several = kind == "multi_label_classification" or len(logits) == 1
            function = "none" if kind == "regression" else "sigmoid" if several else "softmax"
        if function not in ("none", "sigmoid", "softmax"):
            raise UsageError(
                f"function_to_apply {function!r}: choose among 'softmax', 'sigmoid' and 'none'"
            )
        scores = logits.astype(np.float64)
        if function == "sigmoid":
            scores = 1 / (1 + np.exp(-scores))
        elif function == "softmax":
            scores = softmax(scores)
        named = [
            {"label": config.id2label[number], "score": float(scores[number])}
            for number in np.argsort(-scores, kind="stable").tolist()
        ]
        return named[: options["top_k"]] if "top_k" in options else named[0]

    def single(self, answer: Any, given: Any, options: Options) -> Any:
        """Return a list of one for a text, unless the call asked for several classes."""
        return [answer] if isinstance(given, str) and "top_k" not in options else answer


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the shares of the last axis."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


class ZeroShotClassification(Pipeline):
    """Classes that are named with the call, by a model that judges what a text entails."""

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
        """Return ``{"sequence", "labels", "scores"}``, the likeliest label first."""
        if candidate_labels is not None:
            options["candidate_labels"] = candidate_labels
        return super().__call__(inputs, **options)

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Make a row of each text with each label."""
        labels = self._labels(options)
        template = options.get("hypothesis_template", self.defaults["hypothesis_template"])
        if template.format(labels[0]) == template:
            raise UsageError(
                f"hypothesis_template {template!r} has no {{}} where the label is to stand"
            )
        hypotheses = [template.format(label) for label in labels]

        def rows(encoded: Any, number: int) -> list[Row]:
            start = number * len(labels)
            return [row for n in range(len(labels)) for row in make_row(encoded, start + n)]

        cut = options.get("truncation", "only_first")
        return encode_texts(self, inputs, cut, rows, hypotheses)

    def _labels(self, options: Options) -> list[str]:
        labels = options.get("candidate_labels")
        if isinstance(labels, str):
            labels = [label.strip() for label in labels.split(",") if label.strip()]
        if not labels:
            raise UsageError("candidate_labels: give the labels among which to choose")
        return list(labels)

    forward = TextClassification.forward

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Compare how far each label is entailed, or each with its contradiction."""
        labels = self._labels(options)
        logits = np.stack([output["logits"] for output in outputs]).astype(np.float64)
        kinds = self.model.config.label2id.items()
        entailed = next((n for name, n in kinds if name.lower().startswith("entail")), -1)
        if options.get("multi_label") or len(labels) == 1:
            against = -1 if entailed == 0 else 0
            scores = softmax(logits[:, [against, entailed]])[:, 1]
        else:
            scores = softmax(logits[:, entailed])
        order = np.argsort(-scores, kind="stable").tolist()
        return {
            "sequence": input_text(given, "text"),
            "labels": [labels[n] for n in order],
            "scores": [float(scores[n]) for n in order],
        }


AGGREGATION_STRATEGIES = ("none", "simple", "first", "average", "max")


class TokenClassification(Pipeline):
    """Tags of the tokens of a text, or with an ``aggregation_strategy`` the entities.

    Strategies: ``simple`` joins tokens of one tag; ``first``, ``average`` and ``max`` give all
    tokens of a word one. ``stride`` reads texts that are longer than the model in windows which
    share so many tokens. With ``is_split_into_words`` a text is a list of words.
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

    def is_one(self, inputs: Any) -> bool:
        """A list of words is one text."""
        words = isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], str)
        return super().is_one(inputs) or (words and self._words)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return the entities of a text, or those of each of several."""
        self._words = {**self.options, **options}.get("is_split_into_words", False)
        return super().__call__(inputs, **options)

    _words = False

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Make a row of each text, or of each of its windows."""
        strategy, stride = self._strategy(options), options.get("stride")
        if stride is not None and strategy == "none":
            raise UsageError(
                "stride reads windows, whose tokens do not add up: give an aggregation_strategy"
            )
        if not self.tokenizer.is_fast:
            raise UsageError(
                f"{type(self.tokenizer).__name__} does not say where tokens stand in the text: "
                "give a fast tokenizer (a tokenizer.json)"
            )
        if stride is not None and (self.limit is None or stride >= self.limit):
            raise UsageError(f"stride {stride}: windows have {self.limit} tokens; give fewer")
        split, joint = options.get("is_split_into_words", False), options.get("delimiter", " ")
        made: list[list[Row] | RejectedInput] = []
        for one in inputs:
            if split:
                words = one.get("tokens") if isinstance(one, Mapping) else one
                if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
                    made.append(RejectedInput(f"words are a list of texts, and not {words!r:.60}"))
                    continue
                text: Any = words
                starts = np.cumsum([0, *(len(word) + len(joint) for word in words)])
                sentence = joint.join(words)
            else:
                text = sentence = input_text(one, "text")
                if isinstance(text, RejectedInput):
                    made.append(text)
                    continue
            more = (
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
                is_split_into_words=split,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                **more,
            )
            rows = []
            for number in range(len(encoded["input_ids"])):
                (row,) = make_row(encoded, number)
                offsets = np.array(encoded["offset_mapping"][number]).reshape(-1, 2)
                if split:
                    offsets += [
                        [0 if word is None else starts[word]] for word in encoded.word_ids(number)
                    ]
                row.notes = sentence, offsets, encoded["special_tokens_mask"][number]
                rows.append(row)
            made.append(rows)
        return made

    def _strategy(self, options: Options) -> str:
        strategy = str(options.get("aggregation_strategy", "none")).lower()
        if strategy not in AGGREGATION_STRATEGIES:
            raise UsageError(
                f"aggregation_strategy {strategy!r}: choose among {', '.join(AGGREGATION_STRATEGIES)}"
            )
        return strategy

    forward = TextClassification.forward

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Return what is no ignored label, of all windows."""
        strategy, ignored = self._strategy(options), options.get("ignore_labels", ["O"])
        found = []
        for row, output in zip(rows, outputs, strict=True):
            entities = self._tokens(row, softmax(output["logits"].astype(np.float64)))
            if strategy in ("first", "average", "max"):
                words = _runs(entities, lambda _, token: token["inside"])
                entities = [self._word(word, strategy) for word in words]
            for one in entities:
                shares = one.pop("scores")
                one["entity"] = self.model.config.id2label[int(shares.argmax())]
                one["score"] = float(shares.max())
                del one["inside"]
            if strategy != "none":
                entities = [self._group(group) for group in _runs(entities, _one_entity)]
            key = "entity" if strategy == "none" else "entity_group"
            found += [one for one in entities if one[key] not in ignored]
        return found if len(rows) == 1 else _without_overlap(found)

    def _tokens(self, row: Row, shares: np.ndarray) -> list[dict[str, Any]]:
        """Return the tokens that are not special; ``inside`` marks those that go on with a word."""
        sentence, offsets, special = row.notes
        prefix = getattr(self.tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
        tokens = []
        for place, (start, end) in enumerate(offsets.tolist()):
            if special[place]:
                continue
            word = str(self.tokenizer.convert_ids_to_tokens(int(row.ids[place])))
            if prefix:
                inside = len(word) != end - start
            else:
                inside = start > 0 and " " not in sentence[start - 1 : start + 1]
            if row.ids[place] == self.tokenizer.unk_token_id:
                word, inside = sentence[start:end], False
            tokens.append(
                {
                    "entity": "",
                    "score": 0.0,
                    "index": place,
                    "word": word,
                    "start": start,
                    "end": end,
                    "scores": shares[place],
                    "inside": inside,
                }
            )
        return tokens

    def _word(self, tokens: list[dict[str, Any]], strategy: str) -> dict[str, Any]:
        """Return a word with the scores of its first token, of the surest, or their mean."""
        shares = np.stack([token["scores"] for token in tokens])
        if strategy == "average":
            scores = shares.mean(axis=0)
        else:
            scores = shares[0 if strategy == "first" else int(shares.max(axis=1).argmax())]
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
            "score": float(np.mean([one["score"] for one in entities])),
            "word": self.tokenizer.convert_tokens_to_string([one["word"] for one in entities]),
            "start": entities[0]["start"],
            "end": entities[-1]["end"],
        }


def _runs(
    items: list[dict[str, Any]], goes_on: Callable[[dict[str, Any], dict[str, Any]], bool]
) -> list[list[dict[str, Any]]]:
    """Return neighbours together: each with the one before it where that ``goes_on`` with it."""
    runs: list[list[dict[str, Any]]] = []
    for one in items:
        if runs and goes_on(runs[-1][-1], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _one_entity(before: dict[str, Any], one: dict[str, Any]) -> bool:
    """Tell whether a tag goes on with that of the token before; ``B-`` begins anew."""
    begins, tag = _tag(one["entity"])
    return not begins and tag == _tag(before["entity"])[1]


def _tag(name: str) -> tuple[bool, str]:
    return name.startswith("B-"), name[2:] if name[:2] in ("B-", "I-") else name


def _without_overlap(entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep of entities that overlap the longest, and of equal ones the surest."""
    kept: list[dict[str, Any]] = []
    for one in sorted(entities, key=lambda entity: entity["start"]):
        if kept and one["start"] < kept[-1]["end"]:
            ranks = [(each["end"] - each["start"], each["score"]) for each in (kept[-1], one)]
            kept[-1] = one if ranks[1] > ranks[0] else kept[-1]
        else:
            kept.append(one)
    return kept


class QuestionAnswering(Pipeline):
    """The span of a context that answers a question: ``{"score", "start", "end", "answer"}``.

    ``top_k`` answers come as a list. Contexts that are longer than ``max_seq_len`` tokens (384) are
    read in windows that share ``doc_stride`` (128); answers have ``max_answer_len`` tokens (15) at
    most. With ``handle_impossible_answer`` the answer may be empty. ``align_to_words`` widens
    answers to whole words.
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
        """Answer ``question`` from ``context`` (or lists of both), or dicts of the two."""
        asked = question if question is not None else inputs if context is not None else None
        if asked is not None:
            if context is None:
                raise UsageError("question-answering: give the context, too")
            questions = [asked] if isinstance(asked, str) else list(asked)
            contexts = [context] * len(questions) if isinstance(context, str) else list(context)
            if len(questions) != len(contexts):
                raise UsageError(
                    f"question-answering: {len(questions)} questions and {len(contexts)} contexts"
                )
            inputs = [
                {"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)
            ]
        for name in ("top_k", "max_answer_len"):
            if options.get(name, 1) < 1:
                raise UsageError(f"{name} {options[name]}: give a number of at least 1")
        if isinstance(inputs, list | tuple) and len(inputs) == 1:
            (inputs,) = inputs
        return super().__call__(inputs, **options)

    def encode(self, inputs: Sequence[Any], options: Options) -> list[list[Row] | RejectedInput]:
        """Put questions and windows of their contexts together."""
        most = min(one for one in (self.limit, 384) if one)
        length = min(options.get("max_seq_len") or most, self.room or most)
        stride = options.get("doc_stride")
        stride = min(length // 2, 128) if stride is None else stride
        made: list[list[Row] | RejectedInput] = []
        for one in inputs:
            sides = [
                input_text(one if isinstance(one, Mapping) else {}, name)
                for name in ("question", "context")
            ]
            refused = next((side for side in sides if isinstance(side, RejectedInput)), None)
            if refused is None and not all(side.strip() for side in sides):
                refused = RejectedInput("its question or its context is empty")
            if refused is not None:
                made.append(refused)
                continue
            question, context = sides
            found = make_windows(self.tokenizer, [question], [context], length, stride)
            rows = []
            for number, ids in enumerate(found.ids):
                types = None if found.token_type_ids is None else found.token_type_ids[number]
                rows.append(Row(ids, types, notes=(found, number)))
            made.append(rows)
        return made

    def forward(self, params: Any, inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the scores of starts and ends."""
        output = self.model(**inputs, params=params)
        return {side: output[f"{side}_logits"].astype(jnp.float32) for side in ("start", "end")}

    def answer(self, given: Any, rows: list[Row], outputs: list[Outputs], options: Options) -> Any:
        """Return the likeliest spans; those with equal texts are one."""
        top, aligned = options.get("top_k", 1), options.get("align_to_words", True)
        nothing, context = 1e6, given["context"]
        answers: list[dict[str, Any]] = []
        for row, output in zip(rows, outputs, strict=True):
            windows, number = row.notes
            spans = windows.offsets[number]
            shares = []
            for side in ("start", "end"):
                logits = output[side].astype(np.float64)
                inside = (spans[:, 0] >= 0) | (np.array(row.ids) == self.tokenizer.cls_token_id)
                shares.append(softmax(np.where(inside, logits, -1e4)))
            nothing = min(nothing, float(shares[0][0] * shares[1][0]))
            longest = options.get("max_answer_len", 15)
            scores = np.tril(np.triu(np.outer(*shares)), longest - 1)
            scores[spans[:, 0] < 0] = scores[:, spans[:, 0] < 0] = 0.0
            count = 2 * top + 10 if aligned else top  # whole words make equal ones of some
            order = np.argsort(-scores, axis=None, kind="stable")[:count]
            firsts, lasts = np.unravel_index(order, scores.shape)
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                if spans[first, 0] < 0 or spans[last, 0] < 0 or last < first:
                    continue
                start, end = _characters(windows, number, first, last, aligned)
                text, score = context[start:end], float(scores[first, last])
                same = next((a for a in answers if a["answer"].lower() == text.lower()), None)
                if same is not None:
                    same["score"] += score
                else:
                    answers.append({"score": score, "start": start, "end": end, "answer": text})
        if options.get("handle_impossible_answer"):
            answers.append({"score": nothing, "start": 0, "end": 0, "answer": ""})
        answers = sorted(answers, key=lambda one: -one["score"])[:top]
        return answers[0] if len(answers) == 1 else answers


def _characters(
    windows: ContextWindows, number: int, first: int, last: int, aligned: bool
) -> tuple[int, int]:
    """Return the characters of tokens of a window, or of the words that these are of."""
    spans, words = windows.offsets[number], windows.word_ids_of_tokens[number]
    if aligned and words[first] >= 0 and words[last] >= 0:
        first = int(np.flatnonzero(words == words[first])[0])
        last = int(np.flatnonzero(words == words[last])[-1])
    return int(spans[first, 0]), int(spans[last, 1])


#: The tasks, under the names of Transformers.
PIPELINES: dict[str, type[Pipeline]] = {
    "fill-mask": FillMask,
    "feature-extraction": FeatureExtraction,
    "text-classification": TextClassification,
    "zero-shot-classification": ZeroShotClassification,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "text-generation": TextGeneration,
    "text2text-generation": Text2Text,
    "summarization": Summarization,
    "translation": Translation,
}
ALIASES = {"sentiment-analysis": "text-classification", "ner": "token-classification"}


def pipeline(
    task: str,
    model: str | FlaxPreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 8,
    dtype: DTypeLike | None = None,
    precision: str | None = None,
    progress: bool = False,
    **options: Any,
) -> Pipeline:
    """Return a function of texts for a task, with the return values of Transformers 4.

    ``task`` is a key of :data:`PIPELINES`, ``sentiment-analysis``, ``ner`` or
    ``translation_xx_to_yy``; ``model`` a directory, an adapter's or a Hub name, or a model, which
    needs its ``tokenizer``. ``dtype`` is what it computes in, or ``precision`` a recipe;
    ``progress`` shows a bar; ``options`` are those of the call. Called with a text, a list, an
    iterator or a ``pathlib.Path`` (:class:`~hfseq.pipelines.base.Pipeline`).

    **Raises:** UsageError for an unknown task or option and for a model without the task's head,
    CheckpointError for what cannot be loaded.
    """
    from transformers import AutoTokenizer

    from hfseq.modeling import auto

    name = ALIASES.get(task, "translation" if task.startswith("translation_") else task)
    if name not in PIPELINES:
        known = [*PIPELINES, *ALIASES, "translation_xx_to_yy"]
        raise UsageError(
            f"unknown task '{task}'{did_you_mean(task, known)}; use {', '.join(known)}"
        )
    kind = PIPELINES[name]
    if isinstance(model, str):
        recipe: dict[str, Any] = {"dtype": dtype, "precision": precision}
        recipe = {name: value for name, value in recipe.items() if value is not None}
        if isinstance(tokenizer, str | None):
            made, words = load(kind.auto_class(), model, tokenizer=tokenizer, **recipe)
        else:
            made, words = auto.load(kind.auto_class(), model, **recipe), tokenizer
        kind.check_head(made, model)
    else:
        if tokenizer is None:
            raise UsageError(f"pipeline('{task}', model): a loaded model needs its tokenizer, too")
        made = model
        words = auto.load(AutoTokenizer, tokenizer) if isinstance(tokenizer, str) else tokenizer
    return kind(made, words, task, batch_size=batch_size, progress=progress, **options)
