"""Kahneman-Tversky optimization (KTO; Ethayarajh et al., 2024)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import KTOArguments
from hfseq.data.batches import RowRandom
from hfseq.data.preferences import Encoded, check_labels, unpair
from hfseq.errors import UsageError
from hfseq.objectives import preference_losses as losses
from hfseq.objectives.base import Arrays, Batch, Loss, Params, RowsAndStats
from hfseq.objectives.preference import AnswerScores, ReferenceObjective

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Prefix of the names of arrays that combine each prompt with the completion of another row.
MISMATCHED = "mismatched"


class KTO(ReferenceObjective):
    """Makes good completions more probable and bad ones less probable.

    The log-ratio of each completion is compared with the KL divergence between the model and its
    reference. The divergence is estimated once per step, from prompts that are combined with the
    completion of the next row. No gradient passes through the divergence. The loss does not depend
    on the number of micro-batches or processes.
    """

    name = "kto"
    data_arguments = KTOArguments
    tags = ("kto",)
    num_answers = 1
    sums = (
        *("chosen_rewards", "rejected_rewards", "chosen_logps", "rejected_logps"),
        *("chosen_logits", "rejected_logits", "chosen_tokens", "rejected_tokens"),
        *("chosen_count", "rejected_count", "entropy", "kl"),
    )

    citation = """\
@inproceedings{ethayarajh2024kto,
  title = {Model Alignment as Prospect Theoretic Optimization},
  author = {Ethayarajh, Kawin and Xu, Winnie and Muennighoff, Niklas and Jurafsky, Dan and
            Kiela, Douwe},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  url = {https://arxiv.org/abs/2402.01306}
}"""

    arguments: KTOArguments

    @property
    def method(self) -> str:
        """A description of the loss and its parameters, for the model card."""
        data = self.arguments
        return (
            f"Kahneman-Tversky optimization, `{data.loss_type}`, β = {data.beta:g}, weights "
            f"{data.desirable_weight:g} (good) and {data.undesirable_weight:g} (bad)"
        )

    def setup(self) -> None:
        """Determines whether the loss needs an estimate of the KL divergence."""
        super().setup()
        self.estimates_kl = self.arguments.loss_type == "kto"
        self.uses_step_totals = self.estimates_kl  # type: ignore[misc]  # per instance
        if self.estimates_kl and self.arguments.precompute_ref_log_probs:
            raise UsageError(
                "--precompute_ref_log_probs: the loss kto pairs each prompt with a different "
                "completion in each epoch, so the log-probabilities of the reference model cannot "
                "be computed in advance. Drop the flag, or use --loss_type apo_zero_unpaired"
            )

    def encode(self, splits: Mapping[str, Any], split: str, length: int) -> Encoded:
        """Tokenizes the examples of a split, and splits each pair into two examples."""
        encoded = super().encode(splits, split, length)
        examples = encoded.examples
        if len(examples[0].answers) == 2:
            examples = unpair(examples)
        if split == "train":
            check_labels(examples, split)
            self._check_weights(examples)
        return encoded._replace(examples=examples)

    def _check_weights(self, examples: Any) -> None:
        good = sum(item.values["label"] for item in examples)
        data = self.arguments
        ratio = data.desirable_weight * good / (data.undesirable_weight * (len(examples) - good))
        if not 0.9 <= ratio <= 1.4:
            logger.warning(
                "the weights of %d good and %d bad completions have the ratio %.3g. The authors of "
                "KTO recommend 1 to 4/3: set --desirable_weight or --undesirable_weight",
                good,
                len(examples) - good,
                ratio,
            )

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the examples of a split."""
        rows, stats = super().make_rows(splits, split, length)
        answer_rows: Any = rows
        answer_rows.mismatched = self.estimates_kl
        return rows, stats

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns ``count`` rows of completions without padding."""
        rows = super().full_rows(count, length)
        if self.estimates_kl:
            rows |= {
                f"{MISMATCHED}_{name}": rows[source]
                for name, source in (
                    ("ids", "input_ids"),
                    ("segments", "segment_ids"),
                    ("learned", "learned"),
                )
            }
        return rows | {"label": (np.arange(count) % 2).astype(np.float32)}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Computes the arrays of the completions, and of prompts with the next row's completion."""
        batch = super().collate(rows, random, groups)
        if f"{MISMATCHED}_ids" in rows:
            ids, segments, learned = (
                rows[f"{MISMATCHED}_{name}"] for name in ("ids", "segments", "learned")
            )
            other = self.answer_arrays(ids, segments, learned, rows["valid"])
            batch |= {f"{MISMATCHED}_{name}": array for name, array in other.items()}
        return batch

    def step_totals(
        self, model: FlaxPreTrainedModel, params: Params, batch: Batch, extra: Params | None
    ) -> dict[str, jax.Array]:
        """Returns the sum and the number of the log-ratios from which the KL is estimated."""
        ratios = self._mismatched_ratios(model, params, batch, extra)
        valid = batch["pairs"][:, 0]
        return {"kl": jnp.where(valid, ratios, 0.0).sum(), "count": valid.sum()}

    def _mismatched_ratios(
        self, model: FlaxPreTrainedModel, params: Params, batch: Batch, extra: Params | None
    ) -> jax.Array:
        other = dict(batch)
        for name in ("answer_ids", "segments", "targets", "learned"):
            other[name] = batch[f"{MISMATCHED}_{name}"]
        scores, _ = self.scores(model, jax.lax.stop_gradient(params), other, None, False, extra)
        return scores.logps[:, 0] - self.reference_logps(other, params, model)[:, 0]

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss summed over completions, and the sums for TRL's metrics.

        In evaluation, the totals include the log-ratios of all rows, from which
        :meth:`row_metrics` computes the loss of the whole split.
        """
        data = self.arguments
        scores, new_extra = self.scores(model, params, batch, rngs, train, extra)
        ratios = scores.logps[:, 0] - self.reference_logps(batch, params, model)[:, 0]
        labels, valid = batch["label"], batch["pairs"][:, 0]
        kl = jnp.zeros(())
        if self.estimates_kl:
            step = batch["step_totals"]
            kl = jnp.maximum(step["kl"] / jnp.maximum(step["count"], 1), 0.0)
        weights = (data.desirable_weight, data.undesirable_weight)
        if self.estimates_kl:
            values = losses.kto_loss(ratios, labels, kl, data.beta, weights)
        else:
            values = losses.apo_zero_unpaired_loss(ratios, labels, data.beta, weights)
        total = jnp.where(valid, values, 0.0).sum()
        totals = self._totals(scores, data.beta * ratios, labels, valid, kl)
        if not train:
            totals |= {"log_ratios": ratios, "labels": labels}
            if self.estimates_kl:
                mismatched = self._mismatched_ratios(model, params, batch, extra)
                totals["mismatched_ratios"] = mismatched
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    @staticmethod
    def _totals(
        scores: AnswerScores,
        rewards: jax.Array,
        labels: jax.Array,
        valid: jax.Array,
        kl: jax.Array,
    ) -> dict[str, jax.Array]:
        scores, rewards = jax.lax.stop_gradient((scores, rewards))
        totals = {
            "entropy": jnp.where(valid, scores.entropy[:, 0], 0.0).sum(),
            "kl": kl * valid.sum(),
        }
        for name, selected in (("chosen", labels > 0.5), ("rejected", labels <= 0.5)):
            mask = jnp.where(selected & valid, 1.0, 0.0)
            totals |= {
                f"{name}_rewards": (rewards * mask).sum(),
                f"{name}_logps": (scores.logps[:, 0] * mask).sum(),
                f"{name}_logits": (scores.mean_logits[:, 0] * mask).sum(),
                f"{name}_tokens": (scores.lengths[:, 0] * mask).sum(),
                f"{name}_count": mask.sum(),
            }
        return totals

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss, and TRL's rewards, log-probabilities and KL divergence.

        Metrics of good (or bad) completions are NaN if there are no such completions.
        """
        count = max(totals["count"], 1)
        metrics = {"loss": totals["loss"] / count}
        for part, divisor in (("rewards", "count"), ("logps", "count"), ("logits", "tokens")):
            for name in ("chosen", "rejected"):
                number = totals[f"{name}_{divisor}"]
                value = totals[f"{name}_{part}"] / number if number else float("nan")
                metrics[f"{part}/{name}"] = value
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        tokens = totals["chosen_tokens"] + totals["rejected_tokens"]
        metrics["entropy"] = totals["entropy"] / max(tokens, 1)
        if self.estimates_kl:
            metrics["kl"] = totals["kl"] / count
        return metrics

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Returns the loss with the KL divergence of the whole split.

        It therefore does not depend on the batch size of the evaluation.
        """
        if not self.estimates_kl:
            return {}
        data = self.arguments
        kl = max(float(np.mean(rows["mismatched_ratios"])), 0.0)
        values = losses.kto_loss(
            jnp.asarray(rows["log_ratios"]),
            jnp.asarray(rows["labels"]),
            jnp.float32(kl),
            data.beta,
            (data.desirable_weight, data.undesirable_weight),
        )
        return {"loss": float(np.mean(values)), "kl": kl}

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        return set(self.metrics(dict.fromkeys(("loss", "count", *self.sums), 1.0)))
