"""Translation and summarization with an encoder-decoder.

In training, several pairs of source and target can be packed into one row.
"""

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

    Several pairs can share a row. They do not attend to each other, and each target begins with the
    start token, as in generation. The loss is therefore the same as with one pair per row. Token
    counts (``tokens_seen``, tokens per second) include source and target tokens, but no padding.
    """

    name = "translation"
    data_arguments = TranslationArguments
    default_model_type: ClassVar[str | None] = "wmt_transformer"
    supports_predict = True
    supports_streaming = False

    arguments: TranslationArguments

    def setup(self) -> None:
        """Sets the row lengths that the flags define."""
        super().setup()
        self.pad_id = pad_token_id(self.tokenizer)
        self.lengths: tuple[int, int] = self.arguments.lengths(None)
        self.packing = not self.arguments.line_by_line
        self.splits = PairSplits({})

    @classmethod
    def configure(
        cls, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, from_scratch: bool
    ) -> None:
        """Sets the special token IDs of the tokenizer in the configuration of a new model.

        The decoder of a new model starts with the padding token, unless its configuration has
        another start token.
        """
        if from_scratch and tokenizer.pad_token_id is not None:
            default_starts = {
                None,
                config.pad_token_id,
                getattr(type(config)(), "pad_token_id", None),
            }
            for role in ("pad", "bos", "eos"):
                token = getattr(tokenizer, f"{role}_token_id")
                if token is not None:
                    setattr(config, f"{role}_token_id", token)
            if getattr(config, "decoder_start_token_id", None) in default_starts:
                config.decoder_start_token_id = tokenizer.pad_token_id
        super().configure(config, tokenizer, from_scratch)

    @classmethod
    def make_tokenizer(  # type: ignore[override]
        cls, arguments: TranslationArguments, folder: Path, plugins: Plugins | None
    ) -> PreTrainedTokenizerBase:
        """Loads the tokenizer of this run, or trains one on source and target sentences.

        A resumed run loads the tokenizer that it saved in its output directory.
        """
        return load_or_train_joint_tokenizer(
            folder, arguments, lambda: load_pairs(arguments, plugins)
        )

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Sets row lengths and generation configuration, and checks whether pairs can be packed."""
        self.lengths = self.arguments.lengths(model.max_length())
        separates_pairs = all(
            model.accepts(name) for name in ("segment_ids", "decoder_segment_ids")
        )
        if self.packing and not separates_pairs:
            logger.warning(
                "architecture '%s' does not accept segment_ids, which packing requires: using one "
                "pair per row",
                model.config.model_type,
            )
            self.packing = False
        # This is saved with the model, so that a loaded model generates as in evaluation.
        data, max_positions = self.arguments, model.max_length()
        generation = model.generation_config
        max_length = (data.max_new_tokens or self.lengths[1]) + 1  # includes the start token
        generation.max_length = (
            max_length if max_positions is None else min(max_length, max_positions)
        )
        generation.num_beams = data.num_beams
        if data.num_beams > 1:
            generation.length_penalty = data.length_penalty
            if data.length_penalty_type != "transformers":  # PyTorch's generate lacks it
                generation.length_penalty_type = data.length_penalty_type

    def load_splits(self, plugins: Plugins | None) -> Mapping[str, Any]:
        """Loads the pairs, and sets the languages and the prefix in the model's configuration."""
        self.splits = splits = load_pairs(self.arguments, plugins)
        for name in ("source_lang", "target_lang"):
            if getattr(splits, name):
                setattr(self.config, name, getattr(splits, name))
        if self.arguments.source_prefix:
            self.config.source_prefix = self.arguments.source_prefix
        return splits

    def choose_length(self, limit: int | None) -> int:
        """Returns the number of tokens per source row."""
        return self.lengths[0]

    def target_length(self, length: int) -> int:
        """Returns the number of tokens per target row."""
        return self.lengths[1]

    def make_rows(self, splits: Mapping[str, Any], split: str, length: int) -> RowsAndStats:
        """Tokenizes the pairs, and packs those of the training split into rows.

        In other splits, each pair has its own row, and the rows are sorted by length.
        """
        data, is_training = self.arguments, split == "train"
        pairs = tokenize_pairs(
            splits[split],
            self.tokenizer,
            max_source_length=self.lengths[0],
            max_target_length=self.lengths[1],
            cache_dir=data.cache_directory,
            num_proc=data.preprocessing_num_workers,
            overwrite=data.overwrite_cache,
            drop_long=is_training and not data.truncate_long_pairs,
            description=f"Tokenizing {split}",
            source_prefix=data.source_prefix,
        )
        if not (is_training and self.packing):
            return PairRows(pairs, data.pad_to_max_length), pairs.stats
        packed = PackedPairs(pairs)
        source_fill, target_fill = packed.fill_ratio
        logger.info(
            "packed %d pairs into %d rows; %.1f %% of the source and %.1f %% of the target "
            "positions are filled",
            len(pairs),
            len(packed),
            100 * source_fill,
            100 * target_fill,
        )
        packing_stats = {
            "rows": len(packed),
            "source_fill": source_fill,
            "target_fill": target_fill,
        }
        return packed, pairs.stats | packing_stats

    def full_rows(self, count: int, length: int) -> Arrays:
        """Returns rows whose source and target have no padding."""
        rows, target = super().full_rows(count, length), self.target_length(length)
        token_id = rows["input_ids"][0, 0]
        return rows | {
            "target_ids": np.full((count, target), token_id, np.int32),
            "target_segment_ids": np.ones((count, target), np.int32),
        }

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Sets labels and decoder inputs.

        The decoder input of each packed pair begins with the start token.
        """
        segments = rows["target_segment_ids"]
        labels = np.where(segments > 0, rows["target_ids"], np.int32(IGNORE_INDEX))
        batch = {"input_ids": rows["input_ids"], "segment_ids": rows["segment_ids"]}
        batch |= self.decoder_arrays(rows, labels, self.pad_id, segments)
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
        """Returns the loss, with label smoothing in training.

        The totals also include the cross-entropy without label smoothing.
        """
        logits, new_extra = self.logits(model, params, batch, rngs, train, extra)
        vocab_size = model.vocab_size("decoder_input_ids")
        return self.smoothed_loss(logits, batch["labels"], vocab_size, train, new_extra)

    def count_tokens(self, rows: Arrays) -> np.ndarray:
        """Returns the number of source and target tokens of each row."""
        counts = [(rows[name] > 0).sum(1) for name in ("segment_ids", "target_segment_ids")]
        return np.sum(counts, axis=0) * rows["valid"]

    def samples(
        self, model: FlaxPreTrainedModel, params: Params, rows: Rows, count: int
    ) -> list[Sample]:
        """Returns no samples, because the model card shows translations of the evaluation."""
        return []

    def score_texts(self, hypotheses: list[str], references: list[str]) -> Scores:
        """Returns BLEU and chrF."""
        data = self.arguments
        return translation_scores(hypotheses, references, data.bleu_lowercase, data.bleu_tokenizer)

    def generate_texts(
        self, model: FlaxPreTrainedModel, params: Params, split: str
    ) -> GeneratedTexts | None:
        """Translates a split, or evenly spaced examples of it, and computes the scores."""
        from hfseq.pipelines import generation
        from hfseq.pipelines.lines import one_line

        data = self.arguments
        if split == "validation" and not data.predict_with_generate:
            return None
        pairs = self.splits[split]
        pairs = pairs.select(self.select_for_generation(split, range(len(pairs))))
        sources, references = list(pairs["source"]), list(pairs["target"])
        options: dict[str, Any] = {}
        if data.num_beams > 1:
            options["length_penalty"] = data.length_penalty
            if data.length_penalty_type != "transformers":
                options["length_penalty_type"] = data.length_penalty_type
        translator = generation.Translation(
            model,
            self.tokenizer,
            batch_size=data.generation_batch_size,
            params=params,
            num_beams=data.num_beams,
            max_source_length=self.lengths[0],
            max_new_tokens=data.max_new_tokens,
            source_prefix=data.source_prefix or "",
            truncation=True,
            **options,
        )
        hypotheses = [one_line(answer["translation_text"]) for answer in translator(sources)]
        scores = self.score_texts(hypotheses, references)
        return GeneratedTexts(sources, references, hypotheses, scores.values, scores.signatures)


class Summarization(Translation):
    """Cross-entropy of summaries given documents, evaluated with ROUGE.

    Documents that are longer than a row are truncated. Several short documents share a row and do
    not attend to each other.
    """

    name = "summarization"
    data_arguments = SummarizationArguments
    default_model_type = None
    pipeline_tag = "summarization"

    arguments: SummarizationArguments

    def setup(self) -> None:
        """Checks that the flags specify data, because only translation has built-in data."""
        data = self.arguments
        if not (data.dataset_name or data.train_file or data.validation_file or data.test_file):
            raise UsageError("no data: set --train_file or --dataset_name")
        super().setup()

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Limits summaries to the training target length, unless `--max_new_tokens` is set."""
        lengths = self.arguments.lengths(model.max_length())
        self.arguments.max_new_tokens = self.arguments.max_new_tokens or lengths[1] - 1
        super().prepare(model)

    def score_texts(self, hypotheses: list[str], references: list[str]) -> Scores:
        """Returns ROUGE and the mean number of tokens per summary."""
        by_text = [[reference] for reference in references]
        scores = rouge_scores(hypotheses, by_text, self.arguments.rouge_tokenizer)
        lengths = [len(ids) for ids in self.tokenizer(hypotheses)["input_ids"]]
        scores.values["gen_len"] = sum(lengths) / max(len(lengths), 1)
        return scores
