"""Supervised fine-tuning on conversations, prompt-completion pairs or texts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfseq.data.arguments import ChatArguments
from hfseq.data.batches import IGNORE_INDEX, FieldRows, RowRandom, Rows
from hfseq.data.chat import ChatEncoder, PackedChatRows, configure_tokenizer, encode_examples
from hfseq.data.records import load_records
from hfseq.data.tokenizers import pad_token_id
from hfseq.objectives.base import Arrays, Params, RowsAndStats, Sample
from hfseq.objectives.clm import SAMPLE_NEW_TOKENS, CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)


class InstructionTuning(CausalLM):
    """Next-token prediction on a part of each example. The remaining tokens are only inputs.

    As in TRL, the loss is computed on the completions of prompt-completion pairs, and on the
    assistant's messages with ``--assistant_only_loss``. Otherwise, it is computed on the whole
    example. Examples that share a row (``--packing``) do not attend to each other.
    """

    name = "sft"
    data_arguments = ChatArguments
    supports_streaming = False
    carries_state = False
    tags = ("sft",)

    arguments: ChatArguments

    def setup(self) -> None:
        """Sets the tokenizer's chat template and end-of-turn token."""
        super().setup()
        configure_tokenizer(self.tokenizer, self.arguments)
        self.packing = self.arguments.packing

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Adds the end-of-turn token to the model's EOS tokens, and checks support for packing."""
        super().prepare(model)
        self.stop_ids = add_stop_token(model, self.tokenizer)
        if self.packing and not model.accepts("segment_ids"):
            logger.warning(
                "architecture '%s' does not accept segment_ids, which packing requires: using one "
                "example per row",
                model.config.model_type,
            )
            self.packing = False

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Loads the examples."""
        return load_records(self.arguments, plugins)

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the examples of a split into packed rows, or into one row per example."""
        records = splits[split]
        encode = ChatEncoder(self.tokenizer, self.arguments, records)
        if split == "train" and encode.conversational:
            self._check_end(encode)
        examples, num_truncated = encode_examples(encode, records, split, length)
        pad = pad_token_id(self.tokenizer)
        rows: PackedChatRows | FieldRows
        if self.packing:
            rows = PackedChatRows(examples, pad, length)
        else:
            ids: Any = [example.ids for example in examples]
            learned: Any = [example.loss_mask for example in examples]
            rows = FieldRows(
                ids, pad, length, {"learned": (learned, 0)}, {}, self.arguments.pad_to_max_length
            )
        num_targets = sum(int(example.loss_mask[1:].sum()) for example in examples)
        logger.info(
            "%s: %d examples in %d rows; the loss is computed on %.3g %% of the tokens%s%s",
            split,
            len(examples),
            len(rows),
            100 * num_targets / rows.total_tokens,
            f", {num_truncated} examples truncated to {length} tokens" if num_truncated else "",
            ""
            if encode.assistant_only or encode.completion_only
            else " (to compute it on answers only, use --assistant_only_loss or the columns prompt "
            "and completion)",
        )
        stats = {"documents": len(examples), "tokens": rows.total_tokens, "targets": num_targets}
        return rows, stats

    def _check_end(self, encode: ChatEncoder) -> None:
        """Logs a warning if the model would not learn to end an answer.

        Also logs a warning if generation would not stop at the end of an answer.
        """
        end, learned = encode.end_of_turn()
        if not learned:
            logger.warning(
                "the chat template does not mark the token that ends an answer as part of the "
                "answer, so the model will not learn to stop. Move the token before {% "
                "endgeneration %}."
            )
        elif end is not None and self.tokenizer.convert_tokens_to_ids(end) not in self.stop_ids:
            logger.warning(
                "the chat template ends an answer with %s, but generation stops at %s. Set "
                "--eos_token '%s'.",
                end,
                " ".join(map(str, self.tokenizer.convert_ids_to_tokens(self.stop_ids))),
                end,
            )

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Sets the label of each token to the next token, if that token is in the loss mask."""
        batch = super().collate(rows, random, groups)
        labels = batch["labels"]
        labels[:, :-1][rows["learned"][:, 1:] == 0] = IGNORE_INDEX
        labels[:, -1] = IGNORE_INDEX
        return batch

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Generates the first answer in a few rows with greedy search."""
        indices = sorted({number * len(rows) // count for number in range(count)})
        batch = rows.fetch(np.array(indices, np.int64))
        prompts = [
            ids[: int(learned.argmax())]
            for ids, learned in zip(batch["input_ids"], batch["learned"], strict=True)
        ]
        samples = generate_samples(model, params, self.tokenizer, prompts)
        return samples or super().samples(model, params, rows, count)


def add_stop_token(model: FlaxPreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Adds the tokenizer's end-of-text token to the tokens at which the model stops generation.

    Returns:
        The tokens at which the model stops generation.
    """
    eos_token_id = model.generation_config.eos_token_id
    stop_ids: list[int] = (
        eos_token_id
        if isinstance(eos_token_id, list)
        else []
        if eos_token_id is None
        else [eos_token_id]
    )
    end: Any = tokenizer.eos_token_id
    if end is not None and end not in stop_ids:
        stop_ids = [end, *stop_ids]
        model.generation_config.eos_token_id = stop_ids
        model.config.eos_token_id = end
    return stop_ids


def generate_samples(
    model: FlaxPreTrainedModel,
    params: Params,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[np.ndarray],
) -> list[Sample]:
    """Generates answers to prompts with greedy search.

    Empty prompts and prompts that leave no space for an answer are skipped.
    """
    max_positions, samples = model.max_length(), []
    for prompt in prompts:
        # An encoder-decoder has separate positions for the answer, and returns only the answer.
        used = 0 if model.config.is_encoder_decoder else len(prompt)
        max_new_tokens = (
            SAMPLE_NEW_TOKENS
            if max_positions is None
            else min(SAMPLE_NEW_TOKENS, max_positions - used - (not used))
        )
        if not len(prompt) or max_new_tokens < 1:
            continue
        sequences = model.generate(
            prompt[None],
            params=params,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
        ).sequences
        parts = (np.asarray(part).tolist() for part in (prompt, sequences[0, used:]))
        prompt_text, generated_text = (
            str(tokenizer.decode(part, skip_special_tokens=True)).strip() for part in parts
        )
        samples.append((prompt_text, generated_text))
    return samples
