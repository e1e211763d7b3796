"""Causal language modelling: predict each token from those before it in its document."""

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

#: Tokens that the model writes for a sample.
SAMPLE_NEW_TOKENS = 32


class CausalLM(Objective):
    """Next-token prediction on packed rows; losses are those of the documents one by one.

    The target at a token is the one after it in the same document, at the end of a row the one that
    begins the next row. With ``--cross_documents`` all text is one document. With
    ``--start_with_eos`` the input is one token behind instead, the end of text before the first:
    every token of the row is a target, whether or not anything comes before it.
    """

    name = "clm"
    data_arguments: ClassVar[type[TextArguments]] = CausalArguments
    auto_class = "ForCausalLM"
    sums: ClassVar[tuple[str, ...]] = ("correct",)
    default_length = 1024
    supports_predict = True
    evaluates_test = True
    carries_state = True
    row_layout = base.KnownRows()

    def setup(self) -> None:
        """Find the token that rows begin with, where they do."""
        self.counts_rows = False  # whether the model asks which tokens count in its statistics
        self.first_id = None
        self._arrays: Mapping[str, Any] | None = None
        self._per_position = getattr(self.arguments, "loss_per_position", False)
        if getattr(self.arguments, "start_with_eos", False) or has_arrays(self.arguments):
            self.first_id = self.tokenizer.eos_token_id
            if self.first_id is None:
                raise UsageError(
                    "--start_with_eos: the tokenizer has no end-of-text token; drop the flag"
                )

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, fresh: bool
    ) -> None:
        """Make an encoder (BERT, RoBERTa) a decoder: nothing else could predict the next token."""
        if hasattr(config, "is_decoder"):
            config.is_decoder = True

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Learn whether the model adds to the loss, and what it wants to know of a batch."""
        # A model without statistics has nothing to count, even where it takes inputs of any name.
        self.counts_rows = bool(model.statistics) and model.accepts("code_mask")

        def call(params: Params, extra: Params) -> object:
            ids, key = jnp.zeros((1, 2), jnp.int32), jax.random.key(0)
            return model(ids, params=params, extra=extra, dropout_rng=key, train=True)[0]

        if not model.statistics:
            return
        output = jax.eval_shape(call, model.abstract_params, model.extra_shape_tree)
        if getattr(output, "auxiliary_loss", None) is not None:
            self.sums = (*type(self).sums, "auxiliary_loss")  # type: ignore[misc]

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Load the splits; arrays are opened once."""
        return super().load_splits(plugins) if self._arrays is None else self._arrays

    def natural_length(self) -> int | None:
        """Return the bytes of an image."""
        if not has_arrays(self.arguments) or self.arguments.row_length:
            return None
        self._arrays = self.load_splits(None)
        return next(iter(self._arrays.values())).size

    @property
    def cross_documents(self) -> bool:
        """Whether a row is one sequence; raw text has no documents, an image is one."""
        return super().cross_documents or is_raw(self.arguments)

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Set each token's label to its successor, so that every position's logits are used."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        if self.first_id is not None:  # inputs are one token behind the row
            begins = (segments[:, 1:] != segments[:, :-1]) & (segments[:, 1:] > 0)
            before = rows.get("previous_ids", np.full(len(ids), -1, np.int32))
            before = np.where(before < 0, self.first_id, before)
            after = np.where(begins, self.first_id, ids[:, :-1])
            labels = np.where(segments > 0, ids, np.int32(IGNORE_INDEX))
            ids = np.concatenate([before[:, None], after], axis=1, dtype=ids.dtype)
        else:
            # The token after each one of the same document.
            labels = np.full_like(ids, IGNORE_INDEX)
            same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
            labels[:, :-1] = np.where(same, ids[:, 1:], IGNORE_INDEX)
            if "next_ids" in rows:
                follows = rows["next_ids"]
                labels[:, -1] = np.where(
                    (segments[:, -1] > 0) & (follows >= 0), follows, IGNORE_INDEX
                )
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORE_INDEX
        batch = {"input_ids": ids, "segment_ids": segments, "labels": labels}
        if (self.counts_rows or self._per_position) and "valid" in rows:
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
        """Sum the cross-entropy of the labels, and in training what the model adds to it."""
        inputs: dict[str, Any] = base.attention_inputs(model, batch["segment_ids"])
        if self.counts_rows and "valid" in batch:
            inputs["code_mask"] = inputs["attention_mask"] * batch["valid"][:, None]
        if "memory" in batch:  # what is known of the windows before
            inputs.pop("segment_ids", None)  # a row is one sequence here
            inputs |= {"past_key_values": batch["memory"], "reset_rows": batch["reset_rows"]}
        output, changed = base.forward(
            model,
            params,
            rngs,
            train,
            extra,
            input_ids=batch["input_ids"],
            **inputs,
        )
        labels = batch["labels"]
        total, count, right = cross_entropy(output.logits, labels, model.config.vocab_size)
        more: LossExtra = {"extra": changed, "totals": {"correct": right}}
        added = getattr(output, "auxiliary_loss", None)
        if added is not None:
            plain = {"loss": total, "auxiliary_loss": added}
            more["totals"] |= jax.tree.map(jax.lax.stop_gradient, plain)
            total = total + added
        if train and self._per_position:
            rows = batch["valid"].sum() if "valid" in batch else len(labels)
            more["divisor"] = jnp.asarray(rows * labels.shape[1], jnp.float32)
        if "memory" in batch:
            more["memory"] = output.past_key_values
        return total, count, more

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Loss, perplexity and accuracy a token; those a word and a byte where they were counted.

        Bits per byte are nats a token x tokens of the text / bytes of the text / ln 2.
        """
        metrics = super().metrics(totals)
        if "auxiliary_loss" in totals:
            metrics["auxiliary_loss"] = totals["auxiliary_loss"] / max(totals["count"], 1)
        if "words" in totals:
            nats = totals["loss"] / max(totals["words"], 1)
            metrics["word_perplexity"] = math.exp(min(nats, 700.0))
        if "bytes" in totals:
            rate = totals["tokens"] / max(totals["bytes"], 1)
            metrics["bits_per_byte"] = metrics["loss"] * rate / math.log(2)
        return metrics

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Let the model go on, greedily, where the first half of each row of text ends."""
        if has_arrays(self.arguments):
            return []
        shown = base.sample_rows(rows, count)
        lengths = np.maximum(shown["segment_ids"].sum(axis=1) // 2, 1)
        limit = model.max_length()
        most = (
            SAMPLE_NEW_TOKENS
            if limit is None
            else min(SAMPLE_NEW_TOKENS, limit - int(lengths.max()))
        )
        if most < 1:
            return []
        samples = []
        for ids, length in zip(shown["input_ids"], lengths, strict=True):
            prompt = ids[None, :length]
            made = model.generate(
                prompt, params=params, max_new_tokens=most, do_sample=False, num_beams=1
            ).sequences
            parts = (np.asarray(part).tolist() for part in (prompt[0], made[0, length:]))
            decode = partial(self.tokenizer.decode, skip_special_tokens=True)
            begun, written = (str(decode(part)).strip() for part in parts)
            samples.append((begun, written))
        return samples
