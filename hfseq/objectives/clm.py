"""Causal language modeling: predict each token from the tokens before it in its document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import CausalArguments, TextArguments, has_arrays
from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows
from hfseq.data.sources import is_raw
from hfseq.errors import UsageError
from hfseq.objectives import base
from hfseq.objectives.base import Arrays, Batch, Loss, LossExtra, Objective, Params, Sample
from hfseq.objectives.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

#: Number of tokens to generate for a sample.
SAMPLE_NEW_TOKENS = 32


class CausalLM(Objective):
    """Next-token prediction on packed rows.

    The target of a token is the next token of the same document. If the document continues in the
    next row, the target of the last token is the first token of that row. Packing documents does
    not change which tokens are predicted, and documents do not attend to each other. With
    ``--cross_documents``, all text is one document. With ``--start_with_eos``, the inputs start
    with the end-of-text token and are shifted by one token, so that every token of the row is a
    target.
    """

    name = "clm"
    data_arguments: ClassVar[type[TextArguments]] = CausalArguments
    auto_class = "ForCausalLM"
    sums: ClassVar[tuple[str, ...]] = ("correct",)
    default_length = 1024
    supports_predict = True
    evaluates_test = True
    carries_state = True
    row_guarantees = base.RowGuarantees()

    def setup(self) -> None:
        """Looks up the start token of the inputs, if the flags require one."""
        # Whether to pass `code_mask`, a mask of the tokens that contribute to the model's
        # statistics.
        self.uses_code_mask = False
        self.start_token_id = None
        self._arrays: Mapping[str, Any] | None = None
        self._per_position = getattr(self.arguments, "loss_per_position", False)
        if getattr(self.arguments, "start_with_eos", False) or has_arrays(self.arguments):
            self.start_token_id = self.tokenizer.eos_token_id
            if self.start_token_id is None:
                raise UsageError(
                    "--start_with_eos requires a tokenizer with an end-of-text token. Omit the "
                    "flag."
                )

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Sets ``is_decoder`` for encoders such as BERT, so that their attention is causal."""
        if hasattr(config, "is_decoder"):
            config.is_decoder = True

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks whether the model returns an auxiliary loss and whether it uses ``code_mask``.

        ``code_mask`` excludes padding from statistics that the model collects, such as codebooks.
        """
        # A model without statistics ignores the mask, even if it accepts arbitrary inputs.
        self.uses_code_mask = bool(model.statistics) and model.accepts("code_mask")

        def call(params: Params, extra: Params) -> object:
            ids, key = jnp.zeros((1, 2), jnp.int32), jax.random.key(0)
            return model(ids, params=params, extra=extra, dropout_rng=key, train=True)[0]

        if not model.statistics and not base.has_router_loss(model):
            return
        output = jax.eval_shape(call, model.abstract_params, model.extra_shape_tree)
        if getattr(output, "auxiliary_loss", None) is not None:
            self.sums = (*type(self).sums, "auxiliary_loss")  # type: ignore[misc]

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Loads the splits. Arrays are opened only once."""
        return super().load_splits(plugins) if self._arrays is None else self._arrays

    def natural_length(self) -> int | None:
        """Returns the number of bytes per image for arrays, or ``None`` for text.

        Also returns ``None`` if a flag specifies the row length.
        """
        if not has_arrays(self.arguments) or self.arguments.row_length:
            return None
        self._arrays = self.load_splits(None)
        return next(iter(self._arrays.values())).size

    @property
    def cross_documents(self) -> bool:
        """Whether a row is one sequence.

        This is always the case for raw text and for byte arrays.
        """
        return super().cross_documents or is_raw(self.arguments)

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Computes the inputs and the labels. The label of each position is the next token."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        if self.start_token_id is not None:  # shift the inputs right by one token
            starts_document = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] > 0)
            first_ids = rows.get("previous_ids", np.full(len(ids), -1, np.int32))
            first_ids = np.where(first_ids < 0, self.start_token_id, first_ids)
            shifted_ids = np.where(starts_document, self.start_token_id, ids[:, :-1])
            labels = np.where(segments > 0, ids, np.int32(IGNORE_INDEX))
            ids = np.concatenate([first_ids[:, None], shifted_ids], axis=1, dtype=ids.dtype)
        else:
            # The next token of the same document.
            labels = np.full_like(ids, IGNORE_INDEX)
            same_document = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
            labels[:, :-1] = np.where(same_document, ids[:, 1:], IGNORE_INDEX)
            if "next_ids" in rows:
                next_ids = rows["next_ids"]
                labels[:, -1] = np.where(
                    (segments[:, -1] > 0) & (next_ids >= 0), next_ids, IGNORE_INDEX
                )
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORE_INDEX
        batch = {"input_ids": ids, "segment_ids": segments, "labels": labels}
        if (self.uses_code_mask or self._per_position) and "valid" in rows:
            batch["valid"] = rows["valid"]
        if "fresh" in rows:
            batch["reset_rows"] = rows["fresh"]
        return batch

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Returns the cross-entropy of the labels, plus the model's auxiliary loss in training.

        As in Transformers, the load-balancing loss of experts is added to the mean loss per label.
        It is a product of means over the tokens of a micro-batch, so it depends on the number of
        gradient accumulation steps.
        """
        inputs: dict[str, Any] = base.attention_inputs(model, batch["segment_ids"])
        if self.uses_code_mask and "valid" in batch:
            inputs["code_mask"] = inputs["attention_mask"] * batch["valid"][:, None]
        if "memory" in batch:  # state after the previous windows
            inputs.pop("segment_ids", None)  # a row is one sequence here
            inputs |= {"past_key_values": batch["memory"], "reset_rows": batch["reset_rows"]}
        output, new_extra = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            input_ids=batch["input_ids"],
            **inputs,
        )
        labels = batch["labels"]
        total, count, correct = cross_entropy(output.logits, labels, model.config.vocab_size)
        loss_extra: LossExtra = {"extra": new_extra, "totals": {"correct": correct}}
        auxiliary_loss = getattr(output, "auxiliary_loss", None)
        if auxiliary_loss is not None:
            if base.has_router_loss(model):
                auxiliary_loss = (
                    auxiliary_loss * count / jnp.maximum((batch["segment_ids"] > 0).sum(), 1)
                )
            reported = {"loss": total, "auxiliary_loss": auxiliary_loss}
            loss_extra["totals"] |= jax.tree.map(jax.lax.stop_gradient, reported)
            total = total + auxiliary_loss
        if train and self._per_position:
            num_rows = batch["valid"].sum() if "valid" in batch else len(labels)
            loss_extra["divisor"] = jnp.asarray(num_rows * labels.shape[1], jnp.float32)
        if "memory" in batch:
            loss_extra["memory"] = output.past_key_values
        return total, count, loss_extra

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns loss, perplexity and accuracy per token.

        If words or bytes are counted, the perplexity per word or the bits per byte are included.
        The bits per byte are the loss in nats per token, divided by ln 2 and multiplied by the
        number of tokens per byte.
        """
        metrics = super().metrics(totals)
        if "auxiliary_loss" in totals:
            metrics["auxiliary_loss"] = totals["auxiliary_loss"] / max(totals["count"], 1)
        if "words" in totals:
            nats = totals["loss"] / max(totals["words"], 1)
            metrics["word_perplexity"] = math.exp(min(nats, 700.0))
        if "bytes" in totals:
            tokens_per_byte = totals["tokens"] / max(totals["bytes"], 1)
            metrics["bits_per_byte"] = metrics["loss"] * tokens_per_byte / math.log(2)
        return metrics

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Generates continuations of the first halves of a few rows of text with greedy search."""
        if has_arrays(self.arguments):
            return []
        rows_shown = base.sample_rows(rows, count)
        lengths = np.maximum(rows_shown["segment_ids"].sum(axis=1) // 2, 1)
        max_positions = model.max_length()
        max_new_tokens = (
            SAMPLE_NEW_TOKENS
            if max_positions is None
            else min(SAMPLE_NEW_TOKENS, max_positions - int(lengths.max()))
        )
        if max_new_tokens < 1:
            return []
        samples = []
        for ids, length in zip(rows_shown["input_ids"], lengths, strict=True):
            prompt = ids[None, :length]
            sequences = model.generate(
                prompt, params=params, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1
            ).sequences
            parts = (np.asarray(part).tolist() for part in (prompt[0], sequences[0, length:]))
            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            prompt_text, generated_text = (str(decode(part)).strip() for part in parts)
            samples.append((prompt_text, generated_text))
        return samples
