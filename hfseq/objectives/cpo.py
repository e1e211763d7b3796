"""Contrastive preference optimization (CPO; Xu et al., 2024) and SimPO (Meng et al., 2024)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from hfseq.data.arguments import CPOArguments
from hfseq.objectives.base import Batch, Loss, Params
from hfseq.objectives.dpo import chosen_nll
from hfseq.objectives.preference import PAIR_SUMS, PreferenceObjective, pair_metrics, pair_totals
from hfseq.objectives.preference_losses import Likelihoods, alpha_reward, cpo_loss

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)

#: Losses of log-probabilities per token.
MEAN_LOSSES = ("ipo", "simpo", "alphapo")

CITATIONS = {
    "cpo": """\
@inproceedings{xu2024contrastive,
  title = {Contrastive Preference Optimization: Pushing the Boundaries of {LLM} Performance in
           Machine Translation},
  author = {Xu, Haoran and Sharaf, Amr and Chen, Yunmo and Tan, Weiting and Shen, Lingfeng and
            Van Durme, Benjamin and Murray, Kenton and Kim, Young Jin},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  url = {https://arxiv.org/abs/2401.08417}
}""",
    "simpo": """\
@inproceedings{meng2024simpo,
  title = {{SimPO}: Simple Preference Optimization with a Reference-Free Reward},
  author = {Meng, Yu and Xia, Mengzhou and Chen, Danqi},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2024},
  url = {https://arxiv.org/abs/2405.14734}
}""",
    "alphapo": """\
@inproceedings{gupta2025alphapo,
  title = {{AlphaPO}: Reward Shape Matters for {LLM} Alignment},
  author = {Gupta, Aman and others},
  booktitle = {International Conference on Machine Learning},
  year = {2025},
  url = {https://arxiv.org/abs/2501.03884}
}""",
}


class CPO(PreferenceObjective):
    """Makes chosen answers more probable than rejected ones, without a reference model.

    The loss is averaged over pairs. The cross-entropy of the chosen answers is averaged over the
    tokens of the whole step, multiplied by ``--cpo_alpha``, and added to the loss.
    """

    name = "cpo"
    data_arguments = CPOArguments
    tags = ("cpo",)
    sums = (*PAIR_SUMS, "pair_loss", "chosen_nll")

    arguments: CPOArguments

    @property
    def method(self) -> str:
        """A description of the loss and its parameters, for the model card."""
        data, names = self.arguments, {"simpo": "SimPO", "alphapo": "AlphaPO"}
        name = names.get(data.loss_type, f"contrastive preference optimization, `{data.loss_type}`")
        margin = f", γ = {data.simpo_gamma:g}" if data.loss_type in names else ""
        nll = f", {self.nll_weight:g} × cross-entropy" if self.nll_weight else ""
        return f"{name}, β = {data.beta:g}{margin}{nll}"

    def setup(self) -> None:
        """Selects the weight of the cross-entropy, and the citation."""
        super().setup()
        data = self.arguments
        self.citation = CITATIONS.get(data.loss_type, CITATIONS["cpo"])  # type: ignore[misc]  # per instance
        margin_losses = ("simpo", "alphapo")
        default = 0.0 if data.loss_type in margin_losses else 1.0
        self.nll_weight = default if data.cpo_alpha is None else data.cpo_alpha
        self.uses_step_totals = bool(self.nll_weight)  # type: ignore[misc]  # per instance
        if data.loss_type in margin_losses and data.beta < 1:
            logger.warning(
                "--beta %g is small for --loss_type %s: the authors of SimPO use 2 to 10, and "
                "--simpo_gamma about 0.3 to 0.6 times beta",
                data.beta,
                data.loss_type,
            )

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
        data = self.arguments
        scores, new_extra = self.scores(model, params, batch, rngs, train, extra)
        valid, means = batch["pairs"].reshape(-1), scores.logps / scores.lengths
        pairs = Likelihoods(*scores.logps.T, *means.T)
        values = cpo_loss(
            data.loss_type, pairs, data.beta, data.label_smoothing, data.simpo_gamma, data.alpha
        )
        pair_loss, nll = jnp.where(valid, values, 0.0).sum(), chosen_nll(scores, valid)
        total = pair_loss
        if self.nll_weight:
            step = batch["step_totals"]
            total += self.nll_weight * nll * step["pairs"] / jnp.maximum(step["tokens"], 1)
        if data.loss_type in MEAN_LOSSES:
            scores = scores._replace(logps=means)
        rewards = scores.logps
        if data.loss_type == "alphapo":
            rewards = alpha_reward(rewards, data.alpha)
        totals = pair_totals(scores, data.beta * rewards, valid)
        totals |= jax.lax.stop_gradient({"pair_loss": pair_loss, "chosen_nll": nll})
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss, the cross-entropy, and the rewards and accuracies of TRL."""
        metrics = pair_metrics(totals)
        nll = totals["chosen_nll"] / max(totals["chosen_tokens"], 1)
        metrics["loss"] = totals["pair_loss"] / max(totals["count"], 1) + self.nll_weight * nll
        return metrics | {"nll_loss": nll}
