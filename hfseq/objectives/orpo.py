"""Odds ratio preference optimization (ORPO; Hong et al., 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from hfseq.data.arguments import ORPOArguments
from hfseq.objectives.base import Batch, Loss, Params
from hfseq.objectives.preference import PAIR_SUMS, PreferenceObjective, pair_metrics, pair_totals
from hfseq.objectives.preference_losses import log_odds_ratio, log_sigmoid

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel


class ORPO(PreferenceObjective):
    """Fine-tunes on chosen answers, and makes their odds larger than those of rejected answers.

    The loss is the cross-entropy of prompts and chosen answers (averaged over the tokens of the
    whole step) plus ``--beta`` times the odds ratio loss (averaged over pairs). There is no
    reference model.
    As in TRL, the rewards and the log-probabilities in the metrics are means over tokens.
    """

    name = "orpo"
    data_arguments = ORPOArguments
    tags = ("orpo",)
    sums = (*PAIR_SUMS, "pair_loss", "chosen_nll", "nll_tokens", "log_odds")
    uses_step_totals = True

    citation = """\
@inproceedings{hong2024orpo,
  title = {{ORPO}: Monolithic Preference Optimization without Reference Model},
  author = {Hong, Jiwoo and Lee, Noah and Thorne, James},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year = {2024},
  url = {https://arxiv.org/abs/2403.07691}
}"""

    arguments: ORPOArguments

    @property
    def method(self) -> str:
        """A description of the loss and its parameter, for the model card."""
        return (
            "odds ratio preference optimization, cross-entropy − β log σ(log odds ratio), β = "
            f"{self.arguments.beta:g}"
        )

    def step_totals(
        self, model: FlaxPreTrainedModel, params: Params, batch: Batch, extra: Params | None
    ) -> dict[str, jax.Array]:
        """Returns the numbers of pairs and of predicted tokens in prompts and chosen answers."""
        tokens = self.chosen_tokens(batch, learned_only=False)
        return {"pairs": batch["pairs"].sum(), "tokens": tokens}

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
        valid, step = batch["pairs"].reshape(-1), batch["step_totals"]
        means = scores.logps / scores.lengths
        log_odds = log_odds_ratio(*means.T)
        pair_loss = -jnp.where(valid, log_sigmoid(log_odds), 0.0).sum()
        nll = -jnp.where(valid, scores.full_logps[:, 0], 0.0).sum()
        total = nll * step["pairs"] / jnp.maximum(step["tokens"], 1)
        total += self.arguments.beta * pair_loss
        totals = pair_totals(scores._replace(logps=means), self.arguments.beta * means, valid)
        totals |= jax.lax.stop_gradient(
            {
                "pair_loss": pair_loss,
                "chosen_nll": nll,
                "nll_tokens": self.chosen_tokens(batch, learned_only=False),
                "log_odds": jnp.where(valid, log_odds, 0.0).sum(),
            }
        )
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss, its two terms, and the rewards and accuracies of TRL."""
        metrics, count = pair_metrics(totals), max(totals["count"], 1)
        nll = totals["chosen_nll"] / max(totals["nll_tokens"], 1)
        ratio = totals["pair_loss"] / count
        metrics["loss"] = nll + self.arguments.beta * ratio
        return metrics | {
            "nll_loss": nll,
            "log_odds_ratio": -ratio,
            "log_odds_chosen": totals["log_odds"] / count,
        }
