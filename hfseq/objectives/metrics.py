"""Metrics of predicted classes, numbers, entities, answers and texts.

The metrics are computed without network access. Metrics of classes and numbers have the interface
of the ``evaluate`` library, ``compute(predictions=, references=)``, and return the same values
under the same names.
"""

from __future__ import annotations

import logging
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hfseq.errors import UsageError, optional_import

logger = logging.getLogger(__name__)


def add_cross_entropy(metrics: dict[str, float], totals: dict[str, float]) -> dict[str, float]:
    """Adds metrics of the cross-entropy without label smoothing to the metrics of a smoothed loss.

    Args:
        metrics: The metrics. "loss" is the optimized loss.
        totals: Sums over tokens, including "cross_entropy" and "count".

    Returns:
        The metrics with ``perplexity``, computed from the cross-entropy without smoothing, and with
        ``cross_entropy`` itself if it differs from the loss.
    """
    cross_entropy = totals["cross_entropy"] / max(totals["count"], 1)
    metrics = {**metrics, "perplexity": math.exp(min(cross_entropy, 700.0))}
    if cross_entropy == metrics["loss"]:
        return metrics
    return {**metrics, "cross_entropy": cross_entropy}


class Metric:
    """A named score with the ``compute`` interface of the ``evaluate`` library.

    Args:
        name: Name of the score.
        function: Function that computes the score from predictions and references, both
            `(examples,)`.
        for_regression: Whether the metric applies to numbers instead of classes.
        for_multi_label: Whether predictions and references can also be arrays
            `(examples, classes)` that are 1 for the classes of an example and 0 for others.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., float],
        for_regression: bool = False,
        for_multi_label: bool = False,
    ):
        self.name, self._function = name, function
        self.for_regression, self.for_multi_label = for_regression, for_multi_label

    def compute(
        self, *, predictions: ArrayLike, references: ArrayLike, **options: str | int
    ) -> dict[str, float]:
        """Scores ``predictions`` against ``references``, arrays of the same shape.

        Raises:
            UsageError: The numbers of predictions and references differ or are 0.
        """
        predictions, references = np.asarray(predictions), np.asarray(references)
        shape = predictions.shape
        dimensions = (1, 2) if self.for_multi_label else (1,)
        if shape != references.shape or len(shape) not in dimensions or not len(predictions):
            raise UsageError(
                f"{self.name}: predictions have shape {predictions.shape}, but references have "
                f"shape {references.shape}; give one prediction per reference, and at least one"
            )
        return {self.name: self._function(predictions, references, **options)}


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Returns the fraction of examples whose predicted class is correct.

    If examples have several classes, all of them must be correct.
    """
    equal = np.asarray(predictions == references)
    return float(equal.reshape(len(equal), -1).all(1).mean())


def edit_distance(hypothesis: Sequence[str], reference: Sequence[str]) -> int:
    """Returns the Levenshtein distance of two sequences.

    This is the minimum number of substitutions, insertions and deletions.
    """
    ids = {entry: number for number, entry in enumerate({*hypothesis, *reference})}
    target = np.array([ids[entry] for entry in reference], np.int64)
    positions = np.arange(len(target) + 1)
    # distances[i] is the distance between the processed part of the hypothesis and the first i
    # entries of the reference.
    distances = positions
    for length, entry in enumerate(hypothesis, 1):
        insertions = distances[1:] + 1
        substitutions = distances[:-1] + (target != ids[entry])
        distances = np.concatenate([[length], np.minimum(insertions, substitutions)])
        # Deletions are entries of the reference that the hypothesis does not contain.
        distances = np.minimum.accumulate(distances - positions) + positions
    return int(distances[-1])


def error_rates(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns the word and character error rates, ``wer`` and ``cer``.

    Each rate is the number of edits in all texts, divided by the total length of the references in
    words or characters.
    """
    characters = list(zip(hypotheses, references, strict=True))
    words = [(hypothesis.split(), reference.split()) for hypothesis, reference in characters]
    rates = {}
    for name, pairs in (("wer", words), ("cer", characters)):
        total = sum(len(reference) for _, reference in pairs)
        rates[name] = sum(edit_distance(*pair) for pair in pairs) / max(total, 1)
    return rates


def f1(
    predictions: np.ndarray, references: np.ndarray, average: str = "binary", pos_label: int = 1
) -> float:
    """Returns the F1 score. It is 0 for a class that occurs in neither predictions nor references.

    Args:
        predictions: Predicted classes, `(examples,)`. For multi-label classification, an array
            `(examples, classes)` that is 1 for the classes of an example and 0 for others.
        references: Correct classes, in the same shape.
        average: "binary" for the score of the class ``pos_label``, "macro" for the mean of the
            scores of all classes, or "micro" for a single score over all examples and classes. For
            classes of shape `(examples,)`, "macro" only includes classes that occur in predictions
            or references.
        pos_label: The class to score with "binary".

    Raises:
        UsageError: ``average`` has an unknown value, or there are more than two classes with
            "binary".
    """
    if average not in ("binary", "macro", "micro"):
        raise UsageError(f"f1: unknown average '{average}'. Use binary, macro or micro.")
    if predictions.ndim == 2:
        axis = None if average == "micro" else 0
        common = np.sum((predictions == 1) & (references == 1), axis)
        count = np.sum(predictions == 1, axis) + np.sum(references == 1, axis)
        return float(np.mean(2 * common / np.maximum(count, 1)))
    if average == "micro":  # every wrong class is one false positive and one false negative
        return accuracy(predictions, references)
    classes = np.union1d(predictions, references)
    if average == "binary" and len(classes) > 2:
        raise UsageError(f"f1 requires two classes, but there are {len(classes)}. Use f1_macro.")
    scores = []
    for label in classes if average == "macro" else [pos_label]:
        is_predicted, is_reference = predictions == label, references == label
        count = int(is_predicted.sum() + is_reference.sum())
        score = 2 * int((is_predicted & is_reference).sum()) / count if count else 0.0
        scores.append(score)
    return float(np.mean(scores))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Returns the Matthews correlation for any number of classes, from -1 to 1.

    It is 0 if the predictions or the references are all of the same class. Source: Gorodkin (2004),
    equation 2.
    """
    classes, ids = np.unique(np.concatenate([references, predictions]), return_inverse=True)
    reference_ids, prediction_ids = np.split(ids, 2)
    confusion = np.zeros((len(classes), len(classes)))
    np.add.at(confusion, (reference_ids, prediction_ids), 1)
    total, actual, predicted = confusion.sum(), confusion.sum(1), confusion.sum(0)
    covariance = confusion.trace() * total - actual @ predicted
    spread = (total**2 - predicted @ predicted) * (total**2 - actual @ actual)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Returns Pearson's linear correlation, or NaN if predictions or references are constant."""
    x, y = (np.asarray(values, np.float64) for values in (predictions, references))
    x, y = x - x.mean(), y - y.mean()
    spread = np.linalg.norm(x) * np.linalg.norm(y)
    # Because of rounding errors, constant values may differ slightly from their mean. The
    # correlation of these differences is meaningless.
    scales = (np.abs(np.asarray(values, np.float64)).max() for values in (predictions, references))
    tolerance = 1e-13 * np.sqrt(len(x))
    is_constant = any(
        np.linalg.norm(values) <= tolerance * scale
        for values, scale in zip((x, y), scales, strict=True)
    )
    return float("nan") if is_constant else float(np.clip(x @ y / spread, -1.0, 1.0))


def spearmanr(predictions: np.ndarray, references: np.ndarray) -> float:
    """Returns Spearman's rank correlation, or NaN if predictions or references are constant.

    Equal values have equal ranks.
    """
    return pearson(_ranks(predictions), _ranks(references))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]


#: The metrics that hfseq defines, by name.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy, for_multi_label=True),
        Metric("f1", f1),
        Metric("f1_macro", partial(f1, average="macro"), for_multi_label=True),
        Metric("f1_micro", partial(f1, average="micro"), for_multi_label=True),
        Metric("matthews_correlation", matthews_correlation),
        Metric("pearson", pearson, for_regression=True),
        Metric("spearmanr", spearmanr, for_regression=True),
    )
}


def load_metric(name: str) -> Any:
    """Returns a metric of hfseq, or otherwise ``evaluate.load(name)``, which may download code.

    Raises:
        UsageError: Neither hfseq nor ``evaluate`` has the metric.
    """
    if name in METRICS:
        return METRICS[name]
    try:
        import evaluate

        return evaluate.load(name)
    except Exception as error:  # evaluate runs the metric's code
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--metrics {name}: `evaluate` cannot load this metric ({reason}). Without access to "
            f"the Hub, use {', '.join(METRICS)}, or the path of a metric script"
        ) from error


def compute_metrics(
    metrics: Sequence[Any], predictions: np.ndarray, references: np.ndarray
) -> dict[str, float]:
    """Returns the scores of all metrics by name. Values that are not scalars are omitted."""
    results: dict[str, float] = {}
    for metric in metrics:
        scores = metric.compute(predictions=predictions, references=references)
        results |= {name: float(value) for name, value in scores.items() if np.ndim(value) == 0}
    return results


#: The type of an entity, and the indices of its first and last word.
Entity = tuple[str, int, int]


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """Returns the entities of a sentence, according to the rules of conlleval.

    Args:
        tags: One tag per word in IOB, IOB2, IOE or IOBES format. A change of the type also begins
            a new entity.
    """
    entities, start = set(), 0
    previous_prefix, previous_type = "O", ""
    for position, tag in enumerate([*tags, "O"]):
        prefix, entity_type = tag[:1], tag[1:].split("-", 1)[-1] or "_"
        type_changes = entity_type != previous_type
        if _ends_entity(previous_prefix, prefix, type_changes):
            entities.add((previous_type, start, position - 1))
        if _starts_entity(previous_prefix, prefix, type_changes):
            start = position
        previous_prefix, previous_type = prefix, entity_type
    return entities


def _ends_entity(previous_prefix: str, prefix: str, type_changes: bool) -> bool:
    """Returns whether an entity ends before a word, like conlleval's ``endOfChunk``."""
    if previous_prefix in "ES":
        return True
    if previous_prefix in "BI" and prefix in "BSO":
        return True
    return previous_prefix not in "O." and type_changes


def _starts_entity(previous_prefix: str, prefix: str, type_changes: bool) -> bool:
    """Returns whether an entity starts at a word, like conlleval's ``startOfChunk``."""
    if prefix in "BS":
        return True
    if previous_prefix in "ESO" and prefix in "EI":
        return True
    return prefix not in "O." and type_changes


def entity_scores(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Returns precision, recall and F1 of entities, and the accuracy of tags, like seqeval.

    Source: Tjong Kim Sang and De Meulder (2003).

    Args:
        predictions: For each sentence, the predicted tag of each word.
        references: For each sentence, the correct tag of each word.

    Returns:
        The overall scores, and the scores of each entity type, e.g. ``PER_precision`` for PER. The
        number of reference entities of a type is included, e.g. ``PER_number``.
    """
    num_predicted, num_actual, num_correct = Counter[str](), Counter[str](), Counter[str]()
    correct_tags = num_tags = 0
    for predicted_tags, actual_tags in zip(predictions, references, strict=True):
        predicted, actual = find_entities(predicted_tags), find_entities(actual_tags)
        num_predicted.update(entity_type for entity_type, *_ in predicted)
        num_actual.update(entity_type for entity_type, *_ in actual)
        num_correct.update(entity_type for entity_type, *_ in predicted & actual)
        tag_pairs = zip(predicted_tags, actual_tags, strict=True)
        correct_tags += sum(predicted_tag == tag for predicted_tag, tag in tag_pairs)
        num_tags += len(actual_tags)

    scores = _precision_recall_f1(num_correct.total(), num_predicted.total(), num_actual.total())
    scores["accuracy"] = correct_tags / max(num_tags, 1)
    for entity_type in sorted(num_actual.keys() | num_predicted.keys()):
        type_scores = _precision_recall_f1(
            num_correct[entity_type], num_predicted[entity_type], num_actual[entity_type]
        )
        scores |= {f"{entity_type}_{name}": value for name, value in type_scores.items()}
        scores[f"{entity_type}_number"] = num_actual[entity_type]
    return scores


def _precision_recall_f1(num_correct: int, num_predicted: int, num_actual: int) -> dict[str, float]:
    precision, recall = num_correct / max(num_predicted, 1), num_correct / max(num_actual, 1)
    f1 = 2 * precision * recall / (precision + recall or 1)
    return {"precision": precision, "recall": recall, "f1": f1}


def normalized_words(answer: str) -> list[str]:
    """Returns the words of an answer in lower case, without punctuation and articles."""
    text = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def answer_scores(answer: str, references: Sequence[str]) -> tuple[float, float]:
    """Returns the exact match and the F1 score of an answer, both from 0 to 1.

    Each score is the maximum over all references. Source: SQuAD's official scorer (Rajpurkar et
    al., 2016; 2018).

    Args:
        answer: The predicted answer. "" means that the question is predicted to have no answer.
        references: The correct answers. Empty if the question has no answer.
    """
    best_match = best_f1 = 0.0
    answer_words = normalized_words(answer)
    for reference in [text for text in references if normalized_words(text)] or [""]:
        words = normalized_words(reference)
        match = float(answer_words == words)
        f1 = match
        if answer_words and words:
            common = (Counter(answer_words) & Counter(words)).total()
            f1 = 2 * common / (len(answer_words) + len(words))
        best_match, best_f1 = max(best_match, match), max(best_f1, f1)
    return best_match, best_f1


class Scores(NamedTuple):
    """Scores of generated texts.

    Attributes:
        values: The value of each metric by name.
        signatures: A description of how each metric was computed, by name.
    """

    values: dict[str, float]
    signatures: dict[str, str]


def translation_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lowercase: bool = False,
    tokenizer: str = "13a",
) -> Scores:
    """Returns corpus BLEU (``bleu``) and chrF2 (``chrf``), both from 0 to 100.

    The values are the same as from the ``sacrebleu`` command. Sources: Post (2018),
    https://aclanthology.org/W18-6319; Popović (2015).

    Args:
        hypotheses: The translations.
        references: One reference per translation.
        lowercase: Whether to compute BLEU on lower-case text, like ``sacrebleu -lc`` and Flax's WMT
            example. chrF always distinguishes upper and lower case.
        tokenizer: Name of sacreBLEU's tokenizer for BLEU.

    Raises:
        UsageError: The lists have different lengths, or sacreBLEU does not have the tokenizer.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if len(hypotheses) != len(references):
        raise UsageError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: give one hypothesis "
            "per reference"
        )
    tokenizers = BLEU.TOKENIZERS
    if tokenizer not in tokenizers:
        raise UsageError(
            f"--bleu_tokenizer {tokenizer}: sacreBLEU has no such tokenizer, only "
            f"{', '.join(tokenizers)}"
        )
    values, signatures = {}, {}
    metrics: dict[str, Any] = {
        "bleu": BLEU(lowercase=lowercase, tokenize=tokenizer),
        "chrf": CHRF(),
    }
    for name, metric in metrics.items():
        values[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        signatures[name] = str(metric.get_signature())
    return Scores(values, signatures)


#: Whitespace between two sentences: after ".", "!" or "?", and before a capital letter, a digit, a
#: quotation mark or an opening parenthesis.
SENTENCE_BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[^\Wa-z_]|[\"'(])")


class UnicodeTokenizer:
    """Tokenizer for ROUGE that splits text of all scripts into lower-case words.

    A word consists of letters, marks and digits. In scripts without spaces (Chinese, Japanese,
    Thai, Lao, Khmer, Burmese), each letter is a word. Words of ASCII characters are stemmed as in
    rouge-score.
    """

    _UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")

    def __init__(self) -> None:
        from rouge_score.tokenizers import DefaultTokenizer

        self._default = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        """Returns the words of a text."""
        words, current = [], ""
        for character in unicodedata.normalize("NFC", text).lower() + " ":
            category = unicodedata.category(character)[0]
            starts_word = category in "LN" and unicodedata.name(character, "").startswith(
                self._UNSPACED
            )
            if category not in "LMN" or starts_word:
                words += [current] if current else []
                current = ""
            current += character if category in "LMN" else ""
        return [self._default.tokenize(word)[0] if word.isascii() else word for word in words]


def rouge_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], tokenizer: str = "default"
) -> Scores:
    """Returns ROUGE-1, -2, -L and -Lsum (Lin, 2004): F1 scores of stemmed words, from 0 to 100.

    ROUGE-Lsum compares sentences. Texts are split into sentences at :data:`SENTENCE_BOUNDARY`.

    Args:
        hypotheses: The generated texts.
        references: One or more references per text. Each score is the maximum over the references.
        tokenizer: "default" for the tokenizer of rouge-score, which ignores all letters except a
            to z, or "unicode" for :class:`UnicodeTokenizer`, which supports all scripts.

    Raises:
        UsageError: The package rouge-score is not installed.
    """
    with optional_import("ROUGE", "rouge_score", "hfseq[rouge]"):
        from rouge_score.rouge_scorer import RougeScorer
    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    unicode = UnicodeTokenizer() if tokenizer == "unicode" else None
    scorer = RougeScorer(list(names), use_stemmer=True, tokenizer=unicode)
    if unicode is None:
        letters = [c for texts in references for text in texts for c in text if c.isalpha()]
        ignored = [letter for letter in letters if not letter.isascii()]
        if 50 * len(ignored) > len(letters):
            logger.warning(
                "ROUGE ignores %.0f %% of the letters in the references, e.g. %r, because the "
                "tokenizer of rouge-score only supports a to z: use --rouge_tokenizer unicode",
                100 * len(ignored) / len(letters),
                ignored[0],
            )
    sums = dict.fromkeys(names, 0.0)
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        hypothesis_lines = SENTENCE_BOUNDARY.sub("\n", hypothesis)
        reference_lines = [SENTENCE_BOUNDARY.sub("\n", text) for text in texts]
        scores = scorer.score_multi(reference_lines, hypothesis_lines)
        for name in names:
            sums[name] += scores[name].fmeasure
    values = {name: 100 * total / max(len(hypotheses), 1) for name, total in sums.items()}
    words = "" if unicode is None else ", words of all scripts"
    return Scores(values, {"rouge": f"rouge-score, stemmed, F1{words}"})
