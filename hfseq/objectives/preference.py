"""Base classes of objectives that train on preferences, such as DPO and reward modeling."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfseq import nn
from hfseq.data.arguments import PreferenceArguments, ReferenceArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows, shift_right
from hfseq.data.chat import configure_tokenizer
from hfseq.data.preferences import (
    AnswerRows,
    Answers,
    Encoded,
    PackedAnswerRows,
    PreferenceEncoder,
    PromptRows,
    encode_preferences,
)
from hfseq.data.records import load_records
from hfseq.data.tokenizers import pad_token_id
from hfseq.errors import UsageError
from hfseq.objectives import base
from hfseq.objectives.base import (
    Arrays,
    AuxiliaryModel,
    Batch,
    Objective,
    Params,
    RowsAndStats,
    Sample,
)
from hfseq.objectives.log_probabilities import TokenStatistics, segment_sums, token_statistics
from hfseq.objectives.seq2seq import set_decoder_start
from hfseq.objectives.sft import add_stop_token, generate_samples

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)

#: Key of the reference model in the dictionary of auxiliary models.
REFERENCE = "reference"


class AnswerScores(NamedTuple):
    """Sums over the tokens of each answer, `(examples, answers)`.

    Attributes:
        logps: Sum of the log-probabilities of the tokens of the answer.
        lengths: Number of tokens of the answer, at least 1.
        full_logps: Sum of the log-probabilities of the tokens of prompt and answer.
        full_lengths: Number of predicted tokens of prompt and answer, at least 1.
        entropy: Sum of the entropies of the predicted distributions of the answer's tokens.
        mean_logits: Sum over the answer's tokens of the mean of the logits over the vocabulary.
        correct: Number of the answer's tokens that have the largest predicted probability.
    """

    logps: jax.Array
    lengths: jax.Array
    full_logps: jax.Array
    full_lengths: jax.Array
    entropy: jax.Array
    mean_logits: jax.Array
    correct: jax.Array


class PreferenceObjective(Objective):
    """Base class of objectives whose examples are prompts with one or two answers.

    Batches contain:

    - "answer_ids": The input IDs of the decoder, int32 `(rows, answers, width)`. If a row contains
      several packed answers, the shape is `(rows, width)`.
    - "segments": For each token, the number of its answer in the row. 0 for padding.
    - "targets": The token to predict at each position, or -100 if no token is predicted.
    - "learned": 1 where the target is part of an answer, 0 elsewhere.
    - "pairs": Mask of the examples in each row, bool `(rows, examples)`.
    - "prompts" and "prompt_segments": The input IDs and the mask of the encoder, `(rows,
      prompt_width)`. Decoder-only models do not have them.

    All arrays without a shape have the shape of "answer_ids".
    """

    data_arguments = PreferenceArguments
    auto_class = "ForCausalLM"
    supports_streaming = False
    default_length = 1024
    compares_samples = True
    row_guarantees = base.RowGuarantees()
    #: Number of answers per row.
    num_answers: ClassVar[int] = 2
    #: Whether the loss depends on where the prompt ends.
    requires_prompt: ClassVar[bool] = True
    #: Whether examples that are too long are dropped instead of truncated.
    drop_long: ClassVar[bool] = False

    arguments: PreferenceArguments

    @classmethod
    def task_head(cls, config: PreTrainedConfig, **download: Any) -> str:
        """Returns the task of the model class: causal or sequence-to-sequence language modeling."""
        is_pair = getattr(config, "is_encoder_decoder", False)
        return "ForSeq2SeqLM" if is_pair else "ForCausalLM"

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Sets the decoder start token of an encoder-decoder, if it is not configured."""
        if getattr(config, "is_encoder_decoder", False):
            set_decoder_start(config, tokenizer)

    def setup(self) -> None:
        """Sets the tokenizer's chat template and end-of-turn token."""
        configure_tokenizer(self.tokenizer, self.arguments)
        self.packing = getattr(self.arguments, "packing", False)
        self.encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Adds the end-of-turn token to the model's EOS tokens, and checks support for packing."""
        add_stop_token(model, self.tokenizer)
        self.vocab_size = model.vocab_size(
            "decoder_input_ids" if self.encoder_decoder else "input_ids"
        )
        if self.packing and (self.encoder_decoder or not model.accepts("segment_ids")):
            logger.warning(
                "--packing requires a decoder that accepts segment_ids, which the architecture "
                "'%s' does not: using one answer per row instead",
                model.config.model_type,
            )
            self.packing = False

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Loads the examples of all splits."""
        return load_records(self.arguments, plugins)

    # -- data

    def row_length(self, length: int) -> int:
        """Returns the number of tokens per row.

        Packed rows have twice the maximum length of prompt and answer, so that a pair fits.
        """
        return 2 * length if self.packing else length

    def encode(self, splits: Mapping[str, Any], split: str, length: int) -> Encoded:
        """Tokenizes the examples of a split.

        Prompt and answer together have at most ``length`` tokens.
        """
        encoder = PreferenceEncoder(
            self.tokenizer,
            self.arguments,
            splits[split],
            self.num_answers == 2,
            self.encoder_decoder,
            self.requires_prompt,
        )
        return encode_preferences(encoder, splits[split], split, length, self.drop_long)

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the examples of a split."""
        max_length = length // 2 if self.packing else length
        examples, num_truncated, num_invalid = self.encode(splits, split, max_length)
        pad = pad_token_id(self.tokenizer)
        rows: Any
        if self.packing:
            rows = PackedAnswerRows(examples, pad, length)
        else:
            row_class = PromptRows if self.encoder_decoder else AnswerRows
            rows = row_class(examples, pad, max_length, self.arguments.pad_to_max_length)
        num_targets = sum(
            len(ids) - prompt_length
            for item in examples
            for ids, prompt_length in zip(item.answers, item.prompt_lengths, strict=True)
        )
        logger.info(
            "%s: %d examples in %d rows; %d of %d tokens belong to answers%s",
            *(split, len(examples), len(rows), num_targets, rows.total_tokens),
            f", {num_truncated} examples truncated to {max_length} tokens" if num_truncated else "",
        )
        stats: dict[str, Any] = {
            "documents": len(examples),
            "tokens": rows.total_tokens,
            "targets": num_targets,
            "truncated": num_truncated,
            "dropped": num_invalid,
        }
        if self.num_answers == 2:
            chosen, rejected = answer_lengths(examples)
            stats["answer_tokens"] = [float(chosen.mean()), float(rejected.mean())]
            stats["chosen_longer"] = float(
                (chosen > rejected).mean() + (chosen == rejected).mean() / 2
            )
        return rows, stats

    # -- the model card

    @property
    def method(self) -> str:
        """The method and its formula, for the model card."""
        raise NotImplementedError

    def card_rows(
        self, counts: Mapping[str, Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        """Returns the method, the examples, and the results on the validation split."""
        rows = {"Method": self.method}
        for split, name in (("train", "Training"), ("validation", "Validation")):
            if split in counts:
                numbers = counts[split]
                rows[f"{name} examples"] = (
                    f"{numbers['documents']:,} used, of which {numbers['truncated']:,} truncated; "
                    f"{numbers['dropped']:,} left out"
                )
        train = counts.get("train", {})
        if "answer_tokens" in train:
            chosen, rejected = train["answer_tokens"]
            rows["Tokens per answer"] = (
                f"{chosen:.1f} (chosen) and {rejected:.1f} (rejected). The chosen answer is the "
                f"longer one in {train['chosen_longer']:.1%} of the training pairs. Pairs with "
                "answers of equal length count as one half"
            )
        series = {
            name: [record[name] for record in log if name in record]
            for name in ("eval_rewards/accuracies", "eval_accuracy", "train_logps/chosen")
        }
        accuracies = series["eval_rewards/accuracies"] or series["eval_accuracy"]
        number = counts.get("validation", {}).get("documents")
        if accuracies and number:
            low, high = binomial_interval(accuracies[-1], number)
            rows["Chosen answer preferred"] = (
                f"{accuracies[-1]:.1%} of {number:,} validation pairs (95% interval: {low:.1%} to "
                f"{high:.1%})"
            )
        if logps := series["train_logps/chosen"]:
            rows["Log-probability of chosen answers"] = (
                f"{logps[0]:.4g} in the first logged step, {logps[-1]:.4g} in the last"
            )
        return rows

    @property
    def sequences_per_row(self) -> int:
        """The number of sequences per row, which is the number of answers of an example."""
        return self.num_answers

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns ``count`` rows of answers without padding."""
        width = self.row_length(length)
        shape = (count, width) if self.packing else (count, self.num_answers, width)
        ids = np.full(shape, len(self.tokenizer.all_special_ids), np.int32)
        ones = np.ones(shape, np.int32)
        segments = 1 + np.arange(width, dtype=np.int32) * 2 // width if self.packing else 1
        rows = {"input_ids": ids, "segment_ids": ones * segments, "learned": ones}
        if self.encoder_decoder:
            rows |= {"prompt_ids": ids[:, 0], "prompt_segments": ones[:, 0]}
        return rows | {"valid": np.ones(count, bool)}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Creates a batch with the arrays that the docstring of the class describes."""
        segments, valid = rows["segment_ids"], rows["valid"]
        pairs = rows.get("pairs", np.ones((len(segments), 1), bool)) & valid[:, None]
        batch = self.answer_arrays(rows["input_ids"], segments, rows["learned"], valid)
        batch["pairs"] = pairs
        if self.encoder_decoder:
            batch |= {
                "prompts": rows["prompt_ids"],
                "prompt_segments": rows["prompt_segments"],
            }
        for name in ("label", "margin", "reference_logps"):
            if name in rows:
                batch[name] = rows[name]
        return batch

    def answer_arrays(
        self, ids: np.ndarray, segments: np.ndarray, learned: np.ndarray, valid: np.ndarray
    ) -> Arrays:
        """Returns the arrays "answer_ids", "segments", "targets" and "learned" of a batch.

        Args:
            ids: Token IDs of prompts and answers, `(..., width)`.
            segments: For each token, the number of its answer in the row. 0 for padding.
            learned: 1 for the tokens of answers, 0 for those of prompts.
            valid: False for rows that only pad the batch, `(rows,)`.
        """
        if self.encoder_decoder:
            targets = np.where(segments > 0, ids, IGNORE_INDEX).astype(np.int32)
            width = ids.shape[-1]
            inputs = shift_right(
                targets.reshape(-1, width),
                pad_token_id(self.tokenizer),
                self.config.decoder_start_token_id,
            ).reshape(ids.shape)
            learned = (segments > 0).astype(np.int32)
        else:
            inputs = ids
            targets = np.full_like(ids, IGNORE_INDEX)
            same = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] > 0)
            targets[..., :-1] = np.where(same, ids[..., 1:], IGNORE_INDEX)
            learned = np.concatenate([learned[..., 1:], np.zeros_like(learned[..., :1])], axis=-1)
        rows = valid.reshape(-1, *(1,) * (ids.ndim - 1))
        targets = np.where(rows, targets, IGNORE_INDEX).astype(np.int32)
        learned = np.where(targets != IGNORE_INDEX, learned, 0).astype(np.int32)
        return {"answer_ids": inputs, "segments": segments, "targets": targets, "learned": learned}

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of tokens of each row, including its prompt."""
        counts = super().count_tokens(rows)
        if "prompt_segments" in rows:
            counts = counts + (rows["prompt_segments"] > 0).sum(1) * rows["valid"]
        return counts

    # -- the model

    def scores(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None,
    ) -> tuple[AnswerScores, Params]:
        """Runs a model on all answers of a batch, and sums the results over the tokens.

        Returns:
            The sums, and the model's non-parameter collections after the call.
        """
        segments, width = batch["segments"], batch["segments"].shape[-1]
        # Without packing, a row of the batch contains an array per answer, which becomes a separate
        # row of the model's inputs.
        packed = segments.ndim == 2
        num_answers = self.num_answers if packed else segments.shape[1]
        ids, segments, targets, learned = (
            batch[name].reshape(-1, width)
            for name in ("answer_ids", "segments", "targets", "learned")
        )
        if self.encoder_decoder:
            prompts, prompt_segments = (
                jnp.repeat(batch[name], num_answers, axis=0)
                for name in ("prompts", "prompt_segments")
            )
            inputs: dict[str, Any] = {"input_ids": prompts, "decoder_input_ids": ids}
            inputs["attention_mask"] = prompt_segments
        elif packed:
            inputs = {"input_ids": ids, **base.attention_inputs(model, segments)}
        else:  # more attention kernels support attention_mask than segment IDs
            inputs = {"input_ids": ids, "attention_mask": (segments > 0).astype(jnp.int32)}
        dropout: jax.Array | Literal[False] | None = rngs
        if train and self.arguments.disable_dropout:
            dropout = False
        with nn.defer_logits():
            output, new_extra = base.forward(model, params, dropout, train, extra, **inputs)
        counted = targets != IGNORE_INDEX
        statistics = token_statistics(
            output.logits, jnp.where(counted, targets, 0), self.vocab_size or 0
        )
        count = batch["pairs"].shape[1] * num_answers if packed else 1
        return self._sum_tokens(
            statistics, counted, learned, segments, count, num_answers
        ), new_extra

    @staticmethod
    def _sum_tokens(
        statistics: TokenStatistics,
        counted: jax.Array,
        learned: jax.Array,
        segments: jax.Array,
        count: int,
        num_answers: int,
    ) -> AnswerScores:
        def total(values: jax.Array, mask: jax.Array) -> jax.Array:
            sums = segment_sums(jnp.where(mask, values, 0.0), segments, count)
            return sums.reshape(-1, num_answers)

        answer = learned > 0
        ones = jnp.ones(counted.shape, jnp.float32)
        return AnswerScores(
            logps=total(statistics.logps, answer),
            lengths=jnp.maximum(total(ones, answer), 1.0),
            full_logps=total(statistics.logps, counted),
            full_lengths=jnp.maximum(total(ones, counted), 1.0),
            entropy=total(statistics.entropy, answer),
            mean_logits=total(statistics.mean_logits, answer),
            correct=total(statistics.correct.astype(jnp.float32), answer),
        )

    def step_totals(
        self, model: FlaxPreTrainedModel, params: Params, batch: Batch, extra: Params | None
    ) -> dict[str, jax.Array]:
        """Returns the numbers of pairs and of chosen tokens."""
        return {"pairs": batch["pairs"].sum(), "tokens": self.chosen_tokens(batch)}

    def chosen_tokens(self, batch: Batch, learned_only: bool = True) -> jax.Array:
        """Returns the number of predicted tokens in the chosen answers of a batch.

        Args:
            batch: The batch.
            learned_only: Whether only the tokens of answers count. Otherwise, those of prompts
                count as well.
        """
        counted = batch["learned"] > 0 if learned_only else batch["targets"] != IGNORE_INDEX
        if counted.ndim == 3:
            return counted[:, 0].sum()
        return (counted & (batch["segments"] % 2 == 1)).sum()

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Generates answers to the prompts of a few rows with greedy search."""
        examples: Any = getattr(rows, "examples", None)
        if not examples:
            return []
        indices = sorted({number * len(examples) // count for number in range(count)})
        prompts = [examples[index].prompt for index in indices]
        return generate_samples(model, params, self.tokenizer, [ids for ids in prompts if len(ids)])


def answer_lengths(examples: Sequence[Answers]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of tokens of the chosen and of the rejected answers."""
    chosen, rejected = (
        np.array([len(item.answers[side]) - item.prompt_lengths[side] for item in examples])
        for side in range(2)
    )
    return chosen, rejected


def binomial_interval(fraction: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Returns the confidence interval of an observed fraction (Wilson, 1927).

    Args:
        fraction: The fraction of trials with success.
        count: Number of trials.
        z: Quantile of the normal distribution. The default corresponds to a confidence of 95%.
    """
    center = fraction + z * z / (2 * count)
    spread = z * math.sqrt((fraction * (1 - fraction) + z * z / (4 * count)) / count)
    scale = 1 + z * z / count
    return max((center - spread) / scale, 0.0), min((center + spread) / scale, 1.0)


# -- the sums of pairs and the metrics of TRL

#: Names of sums over pairs or over tokens. `pair_metrics` computes metrics from these sums.
PAIR_SUMS = (
    *("chosen_rewards", "rejected_rewards", "accurate", "chosen_logps", "rejected_logps"),
    *("chosen_logits", "rejected_logits", "chosen_tokens", "rejected_tokens"),
    *("reward_margins", "entropy", "correct_tokens"),
)


def pair_totals(scores: AnswerScores, rewards: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
    """Returns the sums that `PAIR_SUMS` names.

    Args:
        scores: The scores of the policy, which is the trained model.
        rewards: The reward of each answer, `(pairs, 2)`.
        valid: Mask of the entries that are pairs (not padding), `(pairs,)`.
    """
    counted = jnp.where(valid[:, None], 1.0, 0.0)
    scores, rewards = jax.lax.stop_gradient((scores, rewards))
    totals = {"accurate": ((rewards[:, 0] > rewards[:, 1]) & valid).sum()}
    for number, name in enumerate(("chosen", "rejected")):
        column = counted[:, 0]
        totals |= {
            f"{name}_rewards": (rewards[:, number] * column).sum(),
            f"{name}_logps": (scores.logps[:, number] * column).sum(),
            f"{name}_logits": (scores.mean_logits[:, number] * column).sum(),
            f"{name}_tokens": (scores.lengths[:, number] * column).sum(),
        }
    totals["reward_margins"] = ((rewards[:, 0] - rewards[:, 1]) * counted[:, 0]).sum()
    totals["entropy"] = (scores.entropy * counted).sum()
    totals["correct_tokens"] = (scores.correct[:, 0] * counted[:, 0]).sum()
    return totals


def pair_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Computes the metrics of pairs, with their names in TRL, from the sums in `PAIR_SUMS`."""
    count = max(totals["count"], 1)
    tokens = {name: max(totals[f"{name}_tokens"], 1) for name in ("chosen", "rejected")}
    metrics = {"loss": totals["loss"] / count}
    for name in ("chosen", "rejected"):
        metrics[f"rewards/{name}"] = totals[f"{name}_rewards"] / count
    metrics["rewards/accuracies"] = totals["accurate"] / count
    metrics["rewards/margins"] = totals["reward_margins"] / count
    for name in ("chosen", "rejected"):
        metrics[f"logps/{name}"] = totals[f"{name}_logps"] / count
        metrics[f"logits/{name}"] = totals[f"{name}_logits"] / tokens[name]
    metrics["entropy"] = totals["entropy"] / sum(tokens.values())
    metrics["mean_token_accuracy"] = totals["correct_tokens"] / tokens["chosen"]
    return metrics


# -- the reference model


class ReferenceObjective(PreferenceObjective):
    """Base class of objectives that compare the model with a reference model.

    The policy is the trained model. The log-probabilities of the reference come from one of these:

    - The base model, if the policy is a new adapter, or the initial adapter, if an existing adapter
      is trained further. The reference then shares the parameters of the base model with the
      policy.
    - A second model with its own parameters.
    - Log-probabilities that were computed before training ("reference_logps" in batches).
    - No model (``--reference_free``). All log-probabilities are 0.
    """

    data_arguments = ReferenceArguments

    arguments: ReferenceArguments

    def setup(self) -> None:
        """Also sets whether the reference model only runs before training."""
        super().setup()
        if self.arguments.precompute_ref_log_probs:
            self.precomputed_auxiliary = frozenset({REFERENCE})

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Also compares the vocabulary sizes of the reference model and the tokenizer.

        Raises:
            UsageError: The reference model has no embedding for a token of the tokenizer.
        """
        super().prepare(model)
        reference = self.auxiliary.get(REFERENCE)
        if reference is None or self.arguments.ref_model_name_or_path is None:
            return
        size = reference.model.vocab_size(
            "decoder_input_ids" if self.encoder_decoder else "input_ids"
        )
        if size is not None and size < len(self.tokenizer):
            raise UsageError(
                f"--ref_model_name_or_path {self.arguments.ref_model_name_or_path} has a "
                f"vocabulary of {size} entries, but the tokenizer has {len(self.tokenizer)} "
                "tokens: use a reference model with the tokenizer of --model_name_or_path"
            )

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns ``count`` rows of answers without padding."""
        rows = super().full_rows(count, length)
        if REFERENCE in self.precomputed_auxiliary:
            pairs = (1,) if self.packing else ()
            rows["reference_logps"] = np.zeros((count, *pairs, self.num_answers), np.float32)
        return rows

    def card_rows(
        self, counts: Mapping[str, Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
    ) -> dict[str, str]:
        """Adds a description of the reference model."""
        data, rows = self.arguments, super().card_rows(counts, log)
        reference = self.auxiliary.get(REFERENCE)
        if data.reference_free:
            description = "none: all answers have the same probability"
        elif data.ref_model_name_or_path is not None:
            description = f"`{data.ref_model_name_or_path}`"
        elif reference is not None and reference.shared_paths is not None:
            is_adapter = reference.model.peft_config is not None
            description = f"the {'first state of the adapter' if is_adapter else 'base model'}"
        else:
            description = "the weights from which the training started"
        if data.precompute_ref_log_probs:
            description += ", whose log-probabilities were computed before training"
        return {"Method": rows.pop("Method"), "Reference model": description, **rows}

    def auxiliary_models(self) -> dict[str, AuxiliaryModel]:
        """Returns the reference model, if there is one."""
        if self.arguments.reference_free:
            return {}
        return {REFERENCE: AuxiliaryModel(self.arguments.ref_model_name_or_path)}

    def reference_logps(
        self, batch: Batch, params: Params, model: FlaxPreTrainedModel
    ) -> jax.Array:
        """Returns the log-probability of each answer under the reference model.

        Args:
            batch: The batch.
            params: The parameters of the policy.
            model: The policy.

        Returns:
            The log-probabilities, float32 `(examples, answers)`. No gradient passes through them.
        """
        if "reference_logps" in batch:
            return batch["reference_logps"].reshape(-1, self.num_answers)
        if self.arguments.reference_free:
            return jnp.zeros((batch["pairs"].size, self.num_answers))
        reference = self.auxiliary[REFERENCE]
        stored: Any = batch["auxiliary"]
        reference_params = reference.params(params, stored[REFERENCE])
        scores, _ = self.scores(
            reference.model,
            jax.lax.stop_gradient(reference_params),
            batch,
            None,
            False,
            reference.model.extra,
        )
        return jax.lax.stop_gradient(scores.logps)
