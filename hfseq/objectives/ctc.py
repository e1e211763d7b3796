"""Connectionist temporal classification (Graves et al., 2006), computed as in PyTorch's models."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.data.arguments import SPLITS, SpeechArguments, TextArguments
from hfseq.data.audio import load_audio
from hfseq.data.batches import IGNORE_INDEX, IndexRows, RowRandom, pad_labels
from hfseq.errors import UsageError, did_you_mean
from hfseq.objectives.audio import AudioInputMixin, draw_time_mask
from hfseq.objectives.base import (
    Arrays,
    Batch,
    Loss,
    Objective,
    Params,
    ProcessorPair,
    RowsAndStats,
    forward,
)
from hfseq.objectives.metrics import error_rates

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfseq.modeling import FlaxPreTrainedModel

logger = logging.getLogger(__name__)
REDUCTIONS = ("sum", "mean", "none")


def ctc_loss(
    logits: jax.Array,
    labels: jax.Array,
    lengths: jax.Array | None = None,
    *,
    blank: int = 0,
    reduction: str = "sum",
    zero_infinity: bool = False,
) -> jax.Array:
    """Computes the CTC loss of ``labels`` given unaligned frame ``logits``, in float32.

    Args:
        logits: Logits, `(batch, frames, vocab_size)`, in any dtype.
        labels: Label IDs, `(batch, num_labels)`, padded on the right with negative numbers such as
            -100.
        lengths: Number of valid frames per row, `(batch,)`. Default: all frames are valid.
        blank: ID of the blank token. This is ``config.pad_token_id`` for wav2vec 2.0.
        reduction: How the losses of the rows are combined, as in ``config.ctc_loss_reduction``:
            "sum" adds them up. "mean" divides the loss of each row by its number of labels, and
            averages over rows. "none" returns the loss of each row.
        zero_infinity: Whether the loss of a row is 0 instead of infinity if it has too few frames
            for its labels.

    Returns:
        The loss, or the loss of each row `(batch,)` with ``reduction="none"``.

    Raises:
        UsageError: ``reduction`` has an unknown value.
    """
    import optax

    if reduction not in REDUCTIONS:
        raise UsageError(f"unknown reduction '{reduction}'{did_you_mean(reduction, REDUCTIONS)}")
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    batch_size, frames, _ = logits.shape
    lengths = jnp.full(batch_size, frames) if lengths is None else jnp.asarray(lengths)
    is_padding, no_label = jnp.arange(frames) >= lengths[:, None], labels < 0
    safe_labels = jnp.where(no_label, 0, labels)
    losses = optax.ctc_loss(
        logits,
        is_padding.astype(jnp.float32),
        safe_labels,
        no_label.astype(jnp.float32),
        blank_id=blank,
    )
    num_labels = (~no_label).sum(-1)
    # Two equal labels require a blank frame between them.
    num_repeats = ((labels[:, 1:] == labels[:, :-1]) & ~no_label[:, 1:]).sum(-1)
    losses = jnp.where(
        num_labels + num_repeats <= lengths, losses, 0.0 if zero_infinity else jnp.inf
    )
    if reduction == "mean":
        return (losses / jnp.maximum(num_labels, 1)).mean()
    return losses.sum() if reduction == "sum" else losses


#: The first tokens of a character vocabulary, as in wav2vec2-base-960h. "|" separates words.
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "|")


def freeze(params: Params, part: str) -> Params:
    """Returns the parameters, and stops the gradient of those whose path contains ``part``."""

    def stop(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = {getattr(key, "key", None) for key in path}
        return jax.lax.stop_gradient(leaf) if part in names else leaf

    return jax.tree_util.tree_map_with_path(stop, params)


class CTC(AudioInputMixin, Objective):
    """Speech recognition with CTC.

    The reported loss is in nats per character. Evaluation also reports the word error rate (WER)
    and the character error rate (CER). Training masks random spans of frames if the configuration
    enables this. Examples are skipped if their audio is too long, or if it has too few frames for
    the characters of the transcript.
    """

    name = "ctc"
    data_arguments = SpeechArguments
    auto_class = "ForCTC"
    default_model_type = "wav2vec2"
    supports_streaming = False
    crops_long_audio = False

    arguments: SpeechArguments

    def setup(self) -> None:
        """Loads the audio files."""
        super().setup()
        self.tokenizer = self.tokenizer.tokenizer
        self.texts: dict[str, list[str]] = {}

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Loads the feature extractor and the CTC tokenizer.

        A checkpoint without a ``vocab.json`` gets a vocabulary of the characters in the training
        text.
        """
        from transformers import Wav2Vec2CTCTokenizer

        assert isinstance(arguments, SpeechArguments)
        extractor = super().load_processor(name, arguments, **options)
        options.pop("trust_remote_code", None)
        if name is not None:
            try:
                return ProcessorPair(
                    extractor, Wav2Vec2CTCTokenizer.from_pretrained(name, **options)
                )
            except (OSError, TypeError):  # no vocab.json
                pass
        splits = load_audio(arguments)
        if "train" not in splits:
            raise UsageError(
                f"'{name}' has no CTC vocabulary. Set --train_file, so that one can be built from "
                "text."
            )
        letters = {
            letter for text in cls.clean_texts(splits["train"], arguments) for letter in text
        }
        vocabulary = [*SPECIAL_TOKENS, *sorted(letters - {" ", *SPECIAL_TOKENS})]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "vocab.json"
            file.write_text(json.dumps({name: number for number, name in enumerate(vocabulary)}))
            return ProcessorPair(extractor, Wav2Vec2CTCTokenizer(str(file)))

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, from_scratch: bool) -> None:
        """Sets the vocabulary size and the special token IDs.

        For a new model, this method also determines whether the model uses an attention mask.
        """
        ctc_tokenizer = tokenizer.tokenizer
        config.vocab_size, config.pad_token_id = len(ctc_tokenizer), ctc_tokenizer.pad_token_id
        config.bos_token_id, config.eos_token_id = (
            ctc_tokenizer.bos_token_id,
            ctc_tokenizer.eos_token_id,
        )
        if from_scratch:
            tokenizer.input_processor.return_attention_mask = config.feat_extract_norm == "layer"

    def prepare(self, model: FlaxPreTrainedModel) -> None:
        """Checks that the model can mask spans of frames."""
        super().prepare(model)
        if self.mask_settings()[0] and not model.accepts("mask_time_indices"):
            raise UsageError(
                f"{type(model).__name__} draws SpecAugment masks when it is compiled, so every "
                "step would use the same masks: add --config_overrides apply_spec_augment=false"
            )

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Tokenizes the transcripts of a split into characters.

        Transcripts are converted to upper case if the vocabulary has no lower-case letters.
        """
        known_letters = self.tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS)
        texts = self.clean_texts(splits[split], self.arguments)
        if not any(letter.islower() for letter in known_letters):
            texts = [text.upper() for text in texts]
        self.texts[split] = texts
        labels = self.tokenizer(texts)["input_ids"]
        padded = pad_labels(labels, max(map(len, labels), default=1))
        rows = IndexRows(splits[split], length, split, {"labels": padded})
        unknown_letters = sorted(
            {letter for text in texts for letter in text} - known_letters - {" "}
        )
        if unknown_letters:
            logger.warning(
                "%s: characters that are not in the vocabulary: %s",
                split,
                " ".join(unknown_letters[:20]),
            )
        logger.info("%s: %d audio examples, %d characters", split, len(rows), sum(map(len, labels)))
        return rows, {"documents": len(rows)}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Reads the audio and, in training, draws the masked spans."""
        audio, labels = self.read_audio(rows, random), rows["labels"]
        split = SPLITS[int(rows["split"][0])]
        frames = self.count_frames(audio.lengths)
        has_label = labels != IGNORE_INDEX
        # Two equal labels require a blank frame between them.
        min_frames = has_label.sum(1) + ((labels[:, 1:] == labels[:, :-1]) & has_label[:, 1:]).sum(
            1
        )
        for row in np.flatnonzero((audio.lengths > 0) & (min_frames > frames)):
            index = int(rows["numbers"][row])
            name = self.splits[split].source(index).name
            self.skip_example(
                split,
                index,
                name,
                f"the transcript requires {min_frames[row]} frames, the audio has {frames[row]}",
            )
        counts = (audio.lengths > 0) & (min_frames <= frames) & (min_frames > 0)
        batch = self.model_inputs(audio) | {
            "frames": frames.astype(np.int32),
            "labels": np.where(counts[:, None], labels, IGNORE_INDEX),
            "counts": counts,
        }
        probability, span = self.mask_settings()
        if split == "train" and probability:
            width = int(self.count_frames(audio.values.shape[1]))
            batch["hidden"] = draw_time_mask(frames, width, probability, span, random.generators())
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
        """Returns the sum of the loss over rows, and the number of characters.

        In evaluation, the totals also contain the most probable label of each frame.
        """
        inputs: dict[str, Any] = {
            name: batch.get(name) for name in ("input_values", "attention_mask")
        }
        if model.accepts("freeze_feature_encoder"):
            inputs["mask_time_indices"] = batch.get("hidden")
            inputs["freeze_feature_encoder"] = self.arguments.freeze_feature_extractor
        elif self.arguments.freeze_feature_extractor:  # PyTorch's code, which --bridge runs
            params = freeze(params, "feature_extractor")
        output, new_extra = forward(model, params, rngs, train, extra, **inputs)
        labels, frames = batch["labels"], batch["frames"]
        losses = ctc_loss(
            output.logits,
            labels,
            frames,
            blank=self.config.pad_token_id,
            reduction="none",
            zero_infinity=True,
        )
        total = jnp.where(batch["counts"], losses, 0).sum()
        totals = {}
        if not train:
            predictions = output.logits.argmax(-1)
            predictions = jnp.where(
                jnp.arange(predictions.shape[1]) < frames[:, None], predictions, -1
            )
            padding = self.choose_length(None) - predictions.shape[1]
            totals["row_letters"] = jnp.pad(predictions, ((0, 0), (0, padding)), constant_values=-1)
        return total, (labels != IGNORE_INDEX).sum(), {"extra": new_extra, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Returns the loss. See :meth:`row_metrics` for the error rates."""
        return {"loss": super().metrics(totals)["loss"]}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Returns the word and character error rates over all audio that could be read."""
        letters, skipped = rows["row_letters"], self.skipped_examples.get(split, {})
        read_rows = [row for row in range(len(letters)) if row not in skipped]
        predicted_texts = self.tokenizer.batch_decode(
            [letters[row][letters[row] >= 0] for row in read_rows], skip_special_tokens=False
        )
        rates = error_rates(predicted_texts, [self.texts[split][row] for row in read_rows])
        return rates | self.skip_metrics(split)
