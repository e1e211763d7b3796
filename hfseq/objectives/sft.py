"""Instruction tuning: causal language modelling of answers, of conversations or after prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)


class InstructionTuning(CausalLM):
    """Next-token prediction of what is to be learned of an example; the rest is only read.

    That is a completion, with ``--assistant_only_loss`` what the assistant says, and otherwise all
    of it, as in TRL. Examples that share a row (``--packing``) see nothing of each other.
    """

    name = "sft"
    data_arguments = ChatArguments
    supports_streaming = False
    carries_state = False
    tags = ("sft",)

    arguments: ChatArguments

    def setup(self) -> None:
        """Give the tokenizer its chat template, and tokenizer and model the end of a turn."""
        super().setup()
        configure_tokenizer(self.tokenizer, self.arguments)
        self.packs = self.arguments.packing

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Let whoever loads the model stop where a turn ends; learn whether rows can be shared."""
        super().prepare(model)
        known = model.generation_config.eos_token_id
        self.stops = known if isinstance(known, list) else [] if known is None else [known]
        end = self.tokenizer.eos_token_id
        if end is not None and end not in self.stops:
            self.stops = [end, *self.stops]
            model.generation_config.eos_token_id = self.stops
            model.config.eos_token_id = end
        if self.packs and not model.accepts("segment_ids"):
            logger.warning(
                "architecture '%s' takes no segment_ids, which keep packed examples apart: every "
                "row has one example",
                model.config.model_type,
            )
            self.packs = False

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Load the examples."""
        return load_records(self.arguments, plugins)

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenise the examples of a split: a row each, or several."""
        records = splits[split]
        encode = ChatEncoder(self.tokenizer, self.arguments, records)
        if split == "train" and encode.conversational:
            self._check_end(encode)
        examples, cut = encode_examples(encode, records, split, length)
        pad = pad_token_id(self.tokenizer)
        rows: PackedChatRows | FieldRows
        if self.packs:
            rows = PackedChatRows(examples, pad, length)
        else:
            ids: Any = [one.ids for one in examples]
            learned: Any = [one.loss_mask for one in examples]
            rows = FieldRows(
                ids, pad, length, {"learned": (learned, 0)}, {}, self.arguments.pad_to_max_length
            )
        count = sum(int(one.loss_mask[1:].sum()) for one in examples)
        logger.info(
            "%s: %d examples make %d rows; %.3g %% of the tokens are learned%s%s",
            split,
            len(examples),
            len(rows),
            100 * count / rows.total_tokens,
            f", and {cut} examples were cut to {length} tokens" if cut else "",
            ""
            if encode.assistant_only or encode.completion_only
            else " (answers alone: --assistant_only_loss, or columns prompt and completion)",
        )
        facts = {"documents": len(examples), "tokens": rows.total_tokens, "targets": count}
        return rows, facts

    def _check_end(self, encode: ChatEncoder) -> None:
        """Warn where the model would not learn to end an answer, or nobody would stop there."""
        end, learned = encode.end_of_turn()
        if not learned:
            logger.warning(
                "the chat template does not mark the token that ends an answer as part of it: the "
                "model will not learn to stop. Put it before {%% endgeneration %%}"
            )
        elif end is not None and self.tokenizer.convert_tokens_to_ids(end) not in self.stops:
            logger.warning(
                "the chat template ends an answer with %s, and generation stops at %s: give "
                "--eos_token '%s'",
                end,
                " ".join(map(str, self.tokenizer.convert_ids_to_tokens(self.stops))),
                end,
            )

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Set each token's label to its successor, where that one is learned."""
        batch = super().collate(rows, random, groups)
        labels = batch["labels"]
        labels[:, :-1][rows["learned"][:, 1:] == 0] = IGNORE_INDEX
        labels[:, -1] = IGNORE_INDEX
        return batch

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Let the model answer what comes before the first answer of a few rows, greedily."""
        chosen = sorted({number * len(rows) // count for number in range(count)})
        shown = rows.fetch(np.array(chosen, np.int64))
        limit, samples = model.max_length(), []
        for ids, learned in zip(shown["input_ids"], shown["learned"], strict=True):
            begins = int(learned.argmax())
            most = SAMPLE_NEW_TOKENS if limit is None else min(SAMPLE_NEW_TOKENS, limit - begins)
            if not begins or most < 1:
                continue
            made = model.generate(
                ids[None, :begins],
                params=params,
                max_new_tokens=most,
                do_sample=False,
                num_beams=1,
            ).sequences
            parts = (np.asarray(part).tolist() for part in (ids[:begins], made[0, begins:]))
            begun, written = (
                str(self.tokenizer.decode(part, skip_special_tokens=True)).strip() for part in parts
            )
            samples.append((begun, written))
        return samples or super().samples(model, params, rows, count)
