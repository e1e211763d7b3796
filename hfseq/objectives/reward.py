"""Reward models: sequence classifiers with one output, trained on pairs of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import RewardArguments
from hfseq.errors import UsageError
from hfseq.objectives import base
from hfseq.objectives.base import Arrays, Batch, Loss, Params, Sample
from hfseq.objectives.preference import PreferenceObjective
from hfseq.objectives.preference_losses import reward_loss

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.data.batches import Rows
    from hfseq.modeling import FlaxPreTrainedModel


class RewardModeling(PreferenceObjective):
    """Trains a reward model with the Bradley-Terry loss (Bradley and Terry, 1952).

    The reward of an answer is the output of the model at the last token that is not padding. The
    padding token therefore must not be the EOS token. An optional column "margin" contains the
    difference by which the reward of the chosen answer should exceed that of the rejected answer.
    """

    name = "reward"
    data_arguments = RewardArguments
    auto_class = "ForSequenceClassification"
    tags = ("reward-trainer",)
    has_vocabulary = False
    drop_long = True
    requires_prompt = False
    sums = ("accurate", "reward_margins", "rewards")

    citation = """\
@article{bradley1952rank,
  title = {Rank Analysis of Incomplete Block Designs: {I}. The Method of Paired Comparisons},
  author = {Bradley, Ralph Allan and Terry, Milton E.},
  journal = {Biometrika},
  volume = {39},
  number = {3/4},
  pages = {324--345},
  year = {1952}
}"""

    arguments: RewardArguments

    @property
    def method(self) -> str:
        """The loss and its formula, for the model card."""
        centering = self.arguments.center_rewards_coefficient
        extra = f" + {centering:g} (s₊ + s₋)²" if centering is not None else ""
        return f"Bradley-Terry, −log σ(s₊ − s₋ − margin){extra}"

    def card_rows(
        self, counts: Mapping[str, Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        """Adds the range of the rewards, and a description of how to compute a reward."""
        rows, tokenizer = super().card_rows(counts, log), self.tokenizer
        last: dict[str, Any] = {}
        for record in log:
            last |= record
        if "eval_min_reward" in last:
            rows["Rewards on the validation split"] = (
                f"{last['eval_min_reward']:.3g} to {last['eval_max_reward']:.3g}, mean "
                f"{last['eval_mean_reward']:.3g}"
            )
        end = "the end of the chat template" if getattr(tokenizer, "chat_template", None) else ""
        rows["Reward"] = (
            "the output without a sigmoid. Larger is better. Texts must end with "
            f"{end or f'`{tokenizer.eos_token}`'}, as in training"
        )
        return rows

    @classmethod
    def task_head(cls, config: PreTrainedConfig, **download: Any) -> str:
        """Returns the task of the model class, sequence classification."""
        return cls.auto_class

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Sets the number of outputs to one, their type to regression, and the padding token."""
        config.id2label, config.label2id = {0: "LABEL_0"}, {"LABEL_0": 0}
        # Otherwise, text-classification pipelines would apply a sigmoid to the single output.
        config.problem_type = "regression"

    def setup(self) -> None:
        """Checks the type of the model and the padding token."""
        super().setup()
        if self.encoder_decoder:
            raise UsageError(
                f"reward models are decoders or encoders, but '{self.config.model_type}' is an "
                "encoder-decoder: use another --model_name_or_path"
            )
        tokenizer: Any = self.tokenizer
        if (token := self.arguments.pad_token) is not None:
            if token not in tokenizer.get_vocab():
                raise UsageError(f"--pad_token {token}: the tokenizer does not have this token")
            tokenizer.pad_token = token
        pad = tokenizer.pad_token_id
        if pad is None or pad == tokenizer.eos_token_id:
            problem = "has no padding token" if pad is None else "uses its EOS token as padding"
            raise UsageError(
                f"the tokenizer {problem}. The reward is computed at the last token that is not "
                "padding, so the EOS token of an answer must differ from padding: set --pad_token "
                "to another token of the vocabulary"
            )
        self.config.pad_token_id = pad

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Does nothing, because the model does not generate text."""
        self.vocab_size = model.vocab_size()

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the sum of the losses of pairs, their number, and the totals for the metrics.

        In evaluation, the totals include the rewards of each pair.
        """
        width = batch["segments"].shape[-1]
        ids, segments = (batch[name].reshape(-1, width) for name in ("answer_ids", "segments"))
        dropout: jax.Array | Literal[False] | None = rngs
        if train and self.arguments.disable_dropout:
            dropout = False
        mask = (segments > 0).astype(jnp.int32)
        output, new_extra = base.forward(
            model, params, dropout, train, extra, ids, attention_mask=mask
        )
        rewards = output.logits.astype(jnp.float32).reshape(-1, 2)
        valid, margin = batch["pairs"][:, 0], batch.get("margin", 0.0)
        centering = self.arguments.center_rewards_coefficient
        values = reward_loss(rewards[:, 0], rewards[:, 1], margin, centering)
        total = jnp.where(valid, values, 0.0).sum()
        fixed = jax.lax.stop_gradient(rewards)
        difference = jnp.where(valid, fixed[:, 0] - fixed[:, 1], 0.0)
        totals: dict[str, jax.Array] = {
            "accurate": (difference > 0).sum(),
            "reward_margins": difference.sum(),
            "rewards": jnp.where(valid[:, None], fixed, 0.0).sum(),
        }
        if not train:
            totals["pair_rewards"] = fixed
        return total, valid.sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss, the accuracy, the mean difference of rewards, and the mean reward."""
        count = max(totals["count"], 1)
        return {
            "loss": totals["loss"] / count,
            "accuracy": totals["accurate"] / count,
            "margin": totals["reward_margins"] / count,
            "mean_reward": totals["rewards"] / (2 * count),
        }

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Returns the smallest and the largest reward of the split."""
        rewards = np.asarray(rows["pair_rewards"])
        return {"min_reward": float(rewards.min()), "max_reward": float(rewards.max())}

    def reported_metrics(self, split: str) -> set[str] | None:
        """Returns the names of all metrics of a split."""
        return {"loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"}

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Returns the answers of a few examples with their rewards."""
        examples: Any = getattr(rows, "examples", [])
        indices = sorted({number * len(examples) // count for number in range(count)})
        samples = []
        for index in indices:
            for name, ids in zip(("chosen", "rejected"), examples[index].answers, strict=True):
                ones = np.ones((1, len(ids)), np.int32)
                logits = model(ids[None], attention_mask=ones, params=params).logits
                text = str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)).strip()
                samples.append((f"{text} ({name})", f"{float(np.asarray(logits)[0, 0]):.3f}"))
        return samples
