"""Scores of predicted classes, numbers and translations, computed offline.

Those of classes and numbers are called as those of the ``evaluate`` library,
``compute(predictions=, references=)``, and give the same numbers under the same names.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hfseq.errors import UsageError


def add_cross_entropy(metrics: dict[str, float], totals: dict[str, float]) -> dict[str, float]:
    """Return ``metrics`` of a loss that may be smoothed with those of the plain cross-entropy.

    ``perplexity`` is the exponential of that; ``cross_entropy`` itself is there where it differs.
    """
    plain = totals["cross_entropy"] / max(totals["count"], 1)
    metrics = {**metrics, "perplexity": math.exp(min(plain, 700.0))}
    return metrics if plain == metrics["loss"] else {**metrics, "cross_entropy": plain}


class Metric:
    """A score by name; ``compute`` returns it in a dict, as ``evaluate`` does."""

    def __init__(self, name: str, function: Callable[..., float], for_regression: bool = False):
        self.name, self.for_regression, self._function = name, for_regression, function

    def compute(
        self, *, predictions: ArrayLike, references: ArrayLike, **options: str | int
    ) -> dict[str, float]:
        """Judge ``predictions`` (examples,) by ``references`` (examples,)."""
        predicted, right = np.asarray(predictions), np.asarray(references)
        if predicted.shape != right.shape or predicted.ndim != 1 or not len(predicted):
            raise UsageError(
                f"{self.name}: {predicted.shape} predictions for {right.shape} references; give "
                "one for each, and at least one"
            )
        return {self.name: self._function(predicted, right, **options)}


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the share of equal entries."""
    return float(np.mean(predictions == references))


def edit_distance(found: Sequence[str], wanted: Sequence[str]) -> int:
    """Return how many entries have to be changed, added and left out to make one of the other."""
    names = {name: number for number, name in enumerate({*found, *wanted})}
    target = np.array([names[name] for name in wanted], np.int64)
    places = np.arange(len(target) + 1)
    row = places
    for number, name in enumerate(found, 1):
        kept = np.minimum(row[1:] + 1, row[:-1] + (target != names[name]))
        row = np.concatenate([[number], kept])
        row = np.minimum.accumulate(row - places) + places  # entries of `wanted` that are missing
    return int(row[-1])


def error_rates(found: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """Return the word and character error rates of texts: edits by what there should be, in all."""
    pairs = list(zip(found, wanted, strict=True))
    words = [(one.split(), other.split()) for one, other in pairs]
    rates = {}
    for name, sides in (("wer", words), ("cer", pairs)):
        total = sum(len(other) for _, other in sides)
        rates[name] = sum(edit_distance(*side) for side in sides) / max(total, 1)
    return rates


def f1(
    predictions: np.ndarray, references: np.ndarray, average: str = "binary", pos_label: int = 1
) -> float:
    """Return F1, 0 where nothing is of a class: of one class, or the ``macro`` mean over classes.

    The mean is over all classes that predictions or references have.
    """
    if average not in ("binary", "macro"):
        raise UsageError(f"f1: average='{average}'; give binary or macro")
    present = np.union1d(predictions, references)
    if average == "binary" and len(present) > 2:
        raise UsageError(f"f1 is of two classes and there are {len(present)}: use f1_macro")
    scores = []
    for one in present if average == "macro" else [pos_label]:
        predicted, right = predictions == one, references == one
        marked = int(predicted.sum() + right.sum())
        scores.append(2 * int((predicted & right).sum()) / marked if marked else 0.0)
    return float(np.mean(scores))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the correlation of two classifications, of any number of classes, from -1 to 1.

    It is 0 where one of the two has a single class. Source: Gorodkin (2004), equation 2.
    """
    classes, numbers = np.unique(np.concatenate([references, predictions]), return_inverse=True)
    right, predicted = np.split(numbers, 2)
    table = np.zeros((len(classes), len(classes)))
    np.add.at(table, (right, predicted), 1)
    total, actual, chosen = table.sum(), table.sum(1), table.sum(0)
    covariance = table.trace() * total - actual @ chosen
    spread = (total**2 - chosen @ chosen) * (total**2 - actual @ actual)
    return float(covariance / np.sqrt(spread)) if spread else 0.0


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the linear correlation; NaN where one side is constant."""
    x, y = (np.asarray(values, np.float64) for values in (predictions, references))
    x, y = x - x.mean(), y - y.mean()
    spread = np.linalg.norm(x) * np.linalg.norm(y)
    # A constant is not exactly its mean; correlations of rounding errors say nothing.
    scales = (np.abs(np.asarray(values, np.float64)).max() for values in (predictions, references))
    size = 1e-13 * np.sqrt(len(x))
    flat = any(np.linalg.norm(v) <= size * s for v, s in zip((x, y), scales, strict=True))
    return float("nan") if flat else float(np.clip(x @ y / spread, -1.0, 1.0))


def spearmanr(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the correlation of ranks, equal values sharing theirs; NaN where one is constant."""
    return pearson(_ranks(predictions), _ranks(references))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[places]


#: Our own metrics by name.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy),
        Metric("f1", f1),
        Metric("f1_macro", partial(f1, average="macro")),
        Metric("matthews_correlation", matthews_correlation),
        Metric("pearson", pearson, for_regression=True),
        Metric("spearmanr", spearmanr, True),
    )
}


def load_metric(name: str) -> Any:
    """Return our own metric, or what ``evaluate.load(name)`` gives (which may need the network).

    Raises:
        UsageError: neither has it.
    """
    if name in METRICS:
        return METRICS[name]
    try:
        import evaluate

        return evaluate.load(name)
    except Exception as error:  # evaluate runs code of the metric's own
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--metrics {name}: hfseq has {', '.join(METRICS)}, and `evaluate` cannot load it "
            f"({reason})"
        ) from error


def compute_metrics(
    metrics: Sequence[Any], predictions: np.ndarray, references: np.ndarray
) -> dict[str, float]:
    """Return the scores of all metrics by name; what is no number is left out."""
    judged: dict[str, float] = {}
    for metric in metrics:
        scores = metric.compute(predictions=predictions, references=references)
        judged |= {k: float(v) for k, v in scores.items() if np.ndim(v) == 0}
    return judged


Entity = tuple[str, int, int]
#: Where a sentence ends and another begins.
SENTENCE_BOUNDARY = re.compile(r"(?<=[.!?])\s+(?=[^\Wa-z_]|[\"'(])")


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """Return the entities of a sentence, (kind, first word, last word), as conlleval finds them.

    Tags are IOB, IOB2, IOE or IOBES; one begins where its kind changes, too.
    """
    found, begun = set(), 0
    before, kind = "O", ""
    for place, tag in enumerate([*tags, "O"]):
        mark, now = tag[:1], tag[1:].split("-", 1)[-1] or "_"
        other = now != kind
        ends = before in "ES" or before in "BI" and mark in "BSO" or before not in "O." and other
        if ends:
            found.add((kind, begun, place - 1))
        if mark in "BS" or before in "ESO" and mark in "EI" or mark not in "O." and other:
            begun = place
        before, kind = mark, now
    return found


def entity_scores(
    predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities and the accuracy of tags, as seqeval.

    Beside the overall scores, those of each kind are called ``PER_precision``; ``PER_number``
    counts what there is of it. Source: Tjong Kim Sang and De Meulder (2003).
    """
    hit: Counter[str] = Counter()
    said, there = Counter[str](), Counter[str]()
    right = total = 0
    for found, wanted in zip(predictions, references, strict=True):
        ours, theirs = find_entities(found), find_entities(wanted)
        said.update(kind for kind, *_ in ours)
        there.update(kind for kind, *_ in theirs)
        hit.update(kind for kind, *_ in ours & theirs)
        right += sum(one == other for one, other in zip(found, wanted, strict=True))
        total += len(wanted)

    def score(hits: int, marked: int, known: int) -> tuple[float, float, float]:
        precision, recall = hits / max(marked, 1), hits / max(known, 1)
        return precision, recall, 2 * precision * recall / (precision + recall or 1)

    names = ("precision", "recall", "f1")
    scores = dict(zip(names, score(hit.total(), said.total(), there.total()), strict=True))
    scores["accuracy"] = right / max(total, 1)
    for kind in sorted(there.keys() | said.keys()):
        values = score(hit[kind], said[kind], there[kind])
        scores |= {f"{kind}_{name}": value for name, value in zip(names, values, strict=True)}
        scores[f"{kind}_number"] = there[kind]
    return scores


def normalized_words(answer: str) -> list[str]:
    """Return the words that answers are compared by: lower case, no punctuation, no articles."""
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def answer_scores(answer: str, wanted: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 of an answer, 0 to 1, by the best of those that are right.

    No answer is "", and right where nothing is ``wanted``. Source: SQuAD's official scorer
    (Rajpurkar et al., 2016; 2018).
    """
    best = (0.0, 0.0)
    found = normalized_words(answer)
    for one in [text for text in wanted if normalized_words(text)] or [""]:
        words = normalized_words(one)
        common = (Counter(found) & Counter(words)).total()
        f1 = 2 * common / (len(found) + len(words)) if found and words else float(found == words)
        best = max(best[0], float(found == words)), max(best[1], f1)
    return best


class Scores(NamedTuple):
    """Values by metric, and the signature of each, which says how it was computed."""

    values: dict[str, float]
    signatures: dict[str, str]


def translation_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lowercase: bool = False,
    tokenizer: str = "13a",
) -> Scores:
    """Return corpus BLEU (``bleu``) and chrF2 (``chrf``), 0 to 100, equal to sacreBLEU's commands.

    One reference a hypothesis. ``lowercase`` is ``sacrebleu -lc``: BLEU as the WMT example reports
    it; chrF stays cased. Sources: Post (2018), https://aclanthology.org/W18-6319; Popović (2015).

    **Raises:** :class:`~hfseq.errors.UsageError` for lists of different lengths, or a tokenizer
    that sacreBLEU does not have.
    """
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    if len(hypotheses) != len(references):
        raise UsageError(
            f"{len(hypotheses)} hypotheses for {len(references)} references: give one for each"
        )
    known = BLEU.TOKENIZERS
    if tokenizer not in known:
        raise UsageError(f"--bleu_tokenizer {tokenizer}: sacreBLEU has {', '.join(known)}")
    values, signatures = {}, {}
    metrics: dict[str, Any] = {
        "bleu": BLEU(lowercase=lowercase, tokenize=tokenizer),
        "chrf": CHRF(),
    }
    for name, metric in metrics.items():
        values[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        signatures[name] = str(metric.get_signature())
    return Scores(values, signatures)


def rouge_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return ROUGE-1, -2, -L and -Lsum as F1, 0 to 100, of stemmed words (Lin, 2004).

    Of several references of a hypothesis the one with the best score counts, for each measure.
    Lsum is of sentences: what ends with a mark before a space and a capital, quote or digit.

    **Raises:** UsageError without the package rouge-score.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UsageError("ROUGE needs rouge-score: pip install 'hfseq[rouge]'") from error
    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    scorer = RougeScorer(list(names), use_stemmer=True)
    sums = dict.fromkeys(names, 0.0)
    for hypothesis, told in zip(hypotheses, references, strict=True):
        shown, *wanted = (SENTENCE_BOUNDARY.sub("\n", text) for text in (hypothesis, *told))
        found = scorer.score_multi(wanted, shown)
        for name in names:
            sums[name] += found[name].fmeasure
    return {name: 100 * total / max(len(hypotheses), 1) for name, total in sums.items()}
