"""Scores of texts, computed offline: sacreBLEU's BLEU and chrF. Which way numbers are better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hfseq.errors import UsageError

#: Metrics of which less is better, and all that end with "_loss".
SMALLER = ("loss", "perplexity", "word_perplexity", "bits_per_byte")


def smaller_is_better(name: str) -> bool:
    """Tell of which metrics the smallest is the best, with or without the prefix "eval_"."""
    plain = name.removeprefix("eval_")
    return plain in SMALLER or plain.endswith("_loss")


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
        "bleu": BLEU(lowercase=lowercase, tokenize=tokenizer), "chrf": CHRF(),
    }  # fmt: skip
    for name, metric in metrics.items():
        values[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        signatures[name] = str(metric.get_signature())
    return Scores(values, signatures)
