"""Translation and summaries: the target of a pair from its source, several pairs a row."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from hfseq.data.arguments import SummarizationArguments, TranslationArguments
from hfseq.data.batches import IGNORE_INDEX, RowRandom, Rows
from hfseq.data.pairs import PackedPairs, PairRows, tokenize_pairs
from hfseq.data.parallel import PairSplits, load_pairs
from hfseq.data.tokenizers import load_or_train_joint_tokenizer, pad_token_id
from hfseq.errors import UsageError
from hfseq.objectives.base import Arrays, Batch, GeneratedTexts, Loss, Params, RowsAndStats, Sample
from hfseq.objectives.metrics import Scores, rouge_scores, translation_scores
from hfseq.objectives.seq2seq import Seq2SeqLM, TextTargetObjective

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.plugins import Plugins

logger = logging.getLogger(__name__)


class Translation(TextTargetObjective, Seq2SeqLM):
    """Cross-entropy of target sentences given source sentences, with label smoothing in training.

    Pairs that share a row see nothing of each other, and each starts with the start token, as it
    will when the model translates: the losses are those of the pairs one by one. Tokens that are
    counted (``tokens_seen``, tokens per second) are those of both sides, without padding.
    """

    name = "translation"
    data_arguments = TranslationArguments
    default_model_type: ClassVar[str | None] = "wmt_transformer"
    supports_predict = True
    supports_streaming = False

    arguments: TranslationArguments

    def setup(self) -> None:
        """Settle the lengths as far as flags do."""
        super().setup()
        self.pad = pad_token_id(self.tokenizer)
        self.lengths: tuple[int, int] = self.arguments.lengths(None)
        self.packs = not self.arguments.line_by_line
        self.splits = PairSplits({})

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, fresh: bool
    ) -> None:
        """Give a fresh model the tokenizer's special tokens; most start with padding."""
        if fresh and tokenizer.pad_token_id is not None:
            before = {None, config.pad_token_id, getattr(type(config)(), "pad_token_id", None)}
            for role in ("pad", "bos", "eos"):
                token = getattr(tokenizer, f"{role}_token_id")
                if token is not None:
                    setattr(config, f"{role}_token_id", token)
            if getattr(config, "decoder_start_token_id", None) in before:
                config.decoder_start_token_id = tokenizer.pad_token_id
        super().configure(config, tokenizer, fresh)

    @classmethod
    def make_tokenizer(  # type: ignore[override]
        cls, arguments: TranslationArguments, folder: Path, plugins: Plugins | None
    ) -> PreTrainedTokenizerBase:
        """Load the vocabulary that the run made when it first began, or make it of both sides."""
        return load_or_train_joint_tokenizer(
            folder, arguments, lambda: load_pairs(arguments, plugins)
        )

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Settle the lengths, whether pairs are packed, and how the model will generate."""
        self.lengths = self.arguments.lengths(model.max_length())
        apart = all(model.accepts(name) for name in ("segment_ids", "decoder_segment_ids"))
        if self.packs and not apart:
            logger.warning(
                "architecture '%s' takes no segment_ids, which keep packed pairs apart: every row "
                "has one pair",
                model.config.model_type,
            )
            self.packs = False
        # Whoever loads the model translates as its evaluation does.
        data, room = self.arguments, model.max_length()
        generation = model.generation_config
        longest = (data.max_new_tokens or self.lengths[1]) + 1  # the start token counts
        generation.max_length = longest if room is None else min(longest, room)
        generation.num_beams = data.num_beams
        if data.num_beams > 1:
            generation.length_penalty = data.length_penalty
            if data.length_penalty_type != "transformers":  # PyTorch's generate knows no other
                generation.length_penalty_type = data.length_penalty_type

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Load the pairs; the configuration says from now on what the model translates."""
        self.splits = splits = load_pairs(self.arguments, plugins)
        for name in ("source_lang", "target_lang"):
            if getattr(splits, name):
                setattr(self.config, name, getattr(splits, name))
        if self.arguments.source_prefix:
            self.config.source_prefix = self.arguments.source_prefix
        return splits

    def choose_length(self, limit: int | None) -> int:
        """Return tokens of a source row."""
        return self.lengths[0]

    def target_length(self, length: int) -> int:
        """Return tokens of a target row."""
        return self.lengths[1]

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Pack the training pairs; validation pairs have a row each, the short ones first."""
        data, training = self.arguments, split == "train"
        pairs = tokenize_pairs(
            splits[split],
            self.tokenizer,
            max_source_length=self.lengths[0],
            max_target_length=self.lengths[1],
            cache_dir=data.cache_directory,
            num_proc=data.preprocessing_num_workers,
            overwrite=data.overwrite_cache,
            drop_long=training and not data.truncate_long_pairs,
            description=f"Tokenising {split}",
            source_prefix=data.source_prefix,
        )
        if not (training and self.packs):
            return PairRows(pairs, data.pad_to_max_length), pairs.facts
        packed = PackedPairs(pairs)
        source, target = packed.fill_ratio
        logger.info(
            "%d pairs make %d rows, where %.1f %% of the source and %.1f %% of the target columns "
            "hold tokens",
            len(pairs),
            len(packed),
            100 * source,
            100 * target,
        )
        filled = {"rows": len(packed), "source_fill": source, "target_fill": target}
        return packed, pairs.facts | filled

    def full_rows(self, count: int, length: int) -> Arrays:
        """Return rows that are full on both sides."""
        rows, target = super().full_rows(count, length), self.target_length(length)
        word = rows["input_ids"][0, 0]
        return rows | {
            "target_ids": np.full((count, target), word, np.int32),
            "target_segment_ids": np.ones((count, target), np.int32),
        }

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Make labels of the targets; what the decoder reads starts anew in every pair."""
        segments = rows["target_segment_ids"]
        labels = np.where(segments > 0, rows["target_ids"], np.int32(IGNORE_INDEX))
        batch = {"input_ids": rows["input_ids"], "segment_ids": rows["segment_ids"]}
        batch |= self.decoder_arrays(rows, labels, self.pad, segments)
        packed = "target_position_ids" in rows
        return batch | ({"decoder_segment_ids": segments} if packed else {})

    def loss(
        self,
        model: FlaxPreTrainedModel,
        params: Params,
        batch: Batch,
        rngs: jax.Array | None,
        train: bool,
        extra: Params | None = None,
    ) -> Loss:
        """Sum the loss, smoothed in training only, and the cross-entropy in any case."""
        logits, changed = self.logits(model, params, batch, rngs, train, extra)
        size = model.vocab_size("decoder_input_ids")
        return self.smoothed(logits, batch["labels"], size, train, changed)

    def tokens(self, rows: Arrays) -> int:
        """Return how many tokens the sources and targets of the rows have."""
        names = ("segment_ids", "target_segment_ids")
        return sum(int((rows[name] > 0)[rows["valid"]].sum()) for name in names)

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Return nothing: translations that were judged serve as samples."""
        return []

    def judge(self, hypotheses: list[str], references: list[str]) -> Scores:
        """Return BLEU and chrF."""
        data = self.arguments
        return translation_scores(hypotheses, references, data.bleu_lowercase, data.bleu_tokenizer)

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Write the targets of a split, or of samples spread evenly over it, and judge them."""
        from hfseq.pipelines.translation import Translator

        data = self.arguments
        if split == "validation" and not data.predict_with_generate:
            return None
        pairs = self.splits[split]
        pairs = pairs.select(self.chosen(split, range(len(pairs))))
        sources, references = list(pairs["source"]), list(pairs["target"])
        options: dict[str, Any] = {}
        if data.num_beams > 1:
            options["length_penalty"] = data.length_penalty
            if data.length_penalty_type != "transformers":
                options["length_penalty_type"] = data.length_penalty_type
        translator = Translator(
            model,
            self.tokenizer,
            num_beams=data.num_beams,
            batch_size=data.generation_batch_size,
            max_source_length=self.lengths[0],
            max_new_tokens=data.max_new_tokens,
            source_prefix=data.source_prefix or "",
            **options,
        )
        hypotheses = [beams[0].text for beams in translator(sources, params)]
        scores = self.judge(hypotheses, references)
        return GeneratedTexts(sources, references, hypotheses, scores.values, scores.signatures)


class Summarization(Translation):
    """Cross-entropy of summaries given texts, as of translations; judged by ROUGE.

    Texts that are longer than a row are cut; several short ones share a row, and see nothing of
    each other.
    """

    name = "summarization"
    data_arguments = SummarizationArguments
    default_model_type = None
    pipeline_tag = "summarization"

    arguments: SummarizationArguments

    def setup(self) -> None:
        """Refuse to summarise nothing; translation has data of its own to show itself with."""
        data = self.arguments
        if not (data.dataset_name or data.train_file or data.validation_file or data.test_file):
            raise UsageError("no data: give --train_file or --dataset_name")
        super().setup()

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Let what is written be as long as what is learned from, where no flag says how long."""
        lengths = self.arguments.lengths(model.max_length())
        self.arguments.max_new_tokens = self.arguments.max_new_tokens or lengths[1] - 1
        super().prepare(model)

    def judge(self, hypotheses: list[str], references: list[str]) -> Scores:
        """Return ROUGE, and how many tokens a summary has."""
        scores = rouge_scores(hypotheses, [[one] for one in references])
        lengths = [len(ids) for ids in self.tokenizer(hypotheses)["input_ids"]]
        scores["gen_len"] = sum(lengths) / max(len(lengths), 1)
        return Scores(scores, {"rouge": "rouge-score, stemmed, F1"})
