"""Direct preference optimization (DPO; Rafailov et al., 2023) and related losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from hfseq.data.arguments import DPOArguments
from hfseq.objectives import preference_losses as losses
from hfseq.objectives.base import Batch, Loss, Params
from hfseq.objectives.preference import (
    PAIR_SUMS,
    AnswerScores,
    ReferenceObjective,
    pair_metrics,
    pair_totals,
)

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel


class DPO(ReferenceObjective):
    """Makes chosen answers more probable than rejected ones, relative to a reference model.

    The loss is averaged over pairs. The loss type "sft" is averaged over the tokens of all chosen
    answers of the step. Neither depends on the number of micro-batches.
    """

    name = "dpo"
    data_arguments = DPOArguments
    tags = ("dpo",)
    sums = (*PAIR_SUMS, "pair_loss", "chosen_nll")

    citation = """\
@inproceedings{rafailov2023direct,
  title = {Direct Preference Optimization: Your Language Model is Secretly a Reward Model},
  author = {Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and Manning, Christopher D. and
            Ermon, Stefano and Finn, Chelsea},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2023},
  url = {https://arxiv.org/abs/2305.18290}
}"""

    arguments: DPOArguments

    @property
    def method(self) -> str:
        """A description of the losses with their weights and formulas, for the model card."""
        data = self.arguments
        terms = [
            f"{'' if weight == 1 else f'{weight:g} × '}`{name}`: {losses.DPO_FORMULAS[name]}"
            for name, weight in data.weighted_losses.items()
        ]
        smoothing = f", ε = {data.label_smoothing:g}" if data.label_smoothing else ""
        return f"direct preference optimization, {' + '.join(terms)}, β = {data.beta:g}{smoothing}"

    def setup(self) -> None:
        """Separates the losses of pairs from the cross-entropy of the chosen answers."""
        super().setup()
        self.pair_weights = dict(self.arguments.weighted_losses)
        self.sft_weight = self.pair_weights.pop("sft", 0.0)
        self.uses_step_totals = bool(self.sft_weight)  # type: ignore[misc]  # per instance

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the loss summed over pairs, and the sums for TRL's metrics."""
        scores, new_extra = self.scores(model, params, batch, rngs, train, extra)
        reference = self.reference_logps(batch, params, model)
        valid, beta = batch["pairs"].reshape(-1), self.arguments.beta
        ratios = scores.logps - reference
        pairs = losses.Pairs(*ratios.T, *scores.lengths.T)
        pair_loss = jnp.zeros(())
        for name, weight in self.pair_weights.items():
            values = losses.DPO[name](pairs, beta, self.arguments.label_smoothing)
            pair_loss += weight * jnp.where(valid, values, 0.0).sum()
        total, nll = pair_loss, chosen_nll(scores, valid)
        if self.sft_weight:
            step = batch["step_totals"]
            total += self.sft_weight * nll * step["pairs"] / jnp.maximum(step["tokens"], 1)
        totals = pair_totals(scores, beta * ratios, valid)
        totals |= jax.lax.stop_gradient({"pair_loss": pair_loss, "chosen_nll": nll})
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss and the rewards, log-probabilities and accuracies of TRL."""
        metrics = pair_metrics(totals)
        tokens = max(totals["chosen_tokens"], 1)
        metrics["loss"] = (
            totals["pair_loss"] / max(totals["count"], 1)
            + self.sft_weight * totals["chosen_nll"] / tokens
        )
        return metrics


def chosen_nll(scores: AnswerScores, valid: jax.Array) -> jax.Array:
    """Returns the cross-entropy of the chosen answers, summed over their tokens."""
    return -jnp.where(valid, scores.logps[:, 0], 0.0).sum()
