"""Connectionist temporal classification (Graves et al., 2006), as PyTorch's models count it."""

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
    """Return the loss of reading ``labels`` from ``logits``, whose frames need not be aligned.

    **Arguments:** ``logits`` (batch, frames, vocabulary) in any type, of which the first
    ``lengths`` (batch,) of a row count; ``labels`` (batch, letters), padded on the right with
    negative numbers such as -100; ``blank`` the id of no letter, ``config.pad_token_id`` of
    wav2vec 2.0; ``reduction`` is ``config.ctc_loss_reduction``: "sum" over the rows, "mean" of each
    row's loss by its letters, or "none". More letters than frames cost infinity, or with
    ``zero_infinity`` nothing. float32.
    """
    import optax

    if reduction not in REDUCTIONS:
        raise UsageError(f"no reduction '{reduction}'{did_you_mean(reduction, REDUCTIONS)}")
    logits, labels = jnp.asarray(logits, jnp.float32), jnp.asarray(labels)
    rows, frames, _ = logits.shape
    lengths = jnp.full(rows, frames) if lengths is None else jnp.asarray(lengths)
    padded, absent = jnp.arange(frames) >= lengths[:, None], labels < 0
    safe = jnp.where(absent, 0, labels)
    losses = optax.ctc_loss(
        logits, padded.astype(jnp.float32), safe, absent.astype(jnp.float32), blank_id=blank
    )
    letters = (~absent).sum(-1)
    # Between two equal letters stands a frame without one.
    twice = ((labels[:, 1:] == labels[:, :-1]) & ~absent[:, 1:]).sum(-1)
    losses = jnp.where(letters + twice <= lengths, losses, 0.0 if zero_infinity else jnp.inf)
    if reduction == "mean":
        return (losses / jnp.maximum(letters, 1)).mean()
    return losses.sum() if reduction == "sum" else losses


#: What begins a vocabulary of letters, as in wav2vec2-base-960h; "|" stands between words.
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "|")


class CTC(AudioInputMixin, Objective):
    """The letters of speech; the loss is in nats a letter, judged by word and character errors.

    In training spans of the frames are hidden, as the configuration says. A sound that is longer
    than allowed, or has more letters than frames, counts for nothing.
    """

    name = "ctc"
    data_arguments = SpeechArguments
    auto_class = "ForCTC"
    default_model_type = "wav2vec2"
    supports_streaming = False
    cuts = False

    arguments: SpeechArguments

    def setup(self) -> None:
        """Find the sounds."""
        super().setup()
        self.tokenizer = self.tokenizer.tokenizer
        self.texts: dict[str, list[str]] = {}

    @classmethod
    def load_processor(cls, name: str | None, arguments: TextArguments, **options: Any) -> Any:
        """Load feature extractor and letters; the letters of the training text where none are."""
        from transformers import Wav2Vec2CTCTokenizer

        assert isinstance(arguments, SpeechArguments)
        extractor = super().load_processor(name, arguments, **options)
        options.pop("trust_remote_code", None)
        if name is not None:
            try:
                return ProcessorPair(
                    extractor, Wav2Vec2CTCTokenizer.from_pretrained(name, **options)
                )
            except (OSError, TypeError):  # there is no vocab.json
                pass
        splits = load_audio(arguments)
        if "train" not in splits:
            raise UsageError(
                f"'{name}' has no letters, and there is no training text: give --train_file"
            )
        letters = {letter for text in cls.clean(splits["train"], arguments) for letter in text}
        names = [*SPECIAL_TOKENS, *sorted(letters - {" ", *SPECIAL_TOKENS})]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "vocab.json"
            file.write_text(json.dumps({name: number for number, name in enumerate(names)}))
            return ProcessorPair(extractor, Wav2Vec2CTCTokenizer(str(file)))

    @classmethod
    def configure(cls, config: PreTrainedConfig, tokenizer: Any, fresh: bool) -> None:
        """Let the model have the letters, and the mask that it was trained with."""
        letters = tokenizer.tokenizer
        config.vocab_size, config.pad_token_id = len(letters), letters.pad_token_id
        config.bos_token_id, config.eos_token_id = letters.bos_token_id, letters.eos_token_id
        if fresh:
            tokenizer.inputs.return_attention_mask = config.feat_extract_norm == "layer"

    def make_rows(self, splits: Any, split: str, length: int) -> RowsAndStats:
        """Turn what is said into letters, in the case that the vocabulary has."""
        known = self.tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS)
        texts = self.clean(splits[split], self.arguments)
        if not any(letter.islower() for letter in known):
            texts = [text.upper() for text in texts]
        self.texts[split] = texts
        labels = self.tokenizer(texts)["input_ids"]
        padded = pad_labels(labels, max(map(len, labels), default=1))
        rows = IndexRows(splits[split], length, split, {"labels": padded})
        unknown = sorted({letter for text in texts for letter in text} - known - {" "})
        if unknown:
            logger.warning("%s: letters that are not known: %s", split, " ".join(unknown[:20]))
        logger.info("%s: %d sounds, %d letters", split, len(rows), sum(map(len, labels)))
        return rows, {"documents": len(rows)}

    def collate(self, rows: Arrays, random: RowRandom, groups: int) -> Arrays:
        """Read the sounds; hide spans of them in training."""
        heard, labels = self.read(rows, random), rows["labels"]
        split = SPLITS[int(rows["split"][0])]
        frames = self.frames_of(heard.lengths)
        known = labels != IGNORE_INDEX
        # Between two equal letters stands a frame without one.
        needed = known.sum(1) + ((labels[:, 1:] == labels[:, :-1]) & known[:, 1:]).sum(1)
        for row in np.flatnonzero((heard.lengths > 0) & (needed > frames)):
            number = int(rows["numbers"][row])
            name = self.splits[split].source(number).name
            self.skip_example(split, number, name, f"{needed[row]} letters, {frames[row]} frames")
        counts = (heard.lengths > 0) & (needed <= frames) & (needed > 0)
        batch = self.inputs(heard) | {
            "frames": frames.astype(np.int32),
            "labels": np.where(counts[:, None], labels, IGNORE_INDEX),
            "counts": counts,
        }
        probability, span = self.spans()
        if split == "train" and probability:
            width = int(self.frames_of(heard.values.shape[1]))
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
        """Sum the loss over sounds; in evaluation the likeliest of each frame comes along."""
        output, changed = forward(
            model,
            params,
            rngs,
            train,
            extra,
            batch["input_values"],
            attention_mask=batch.get("attention_mask"),
            mask_time_indices=batch.get("hidden"),
            freeze_feature_encoder=self.arguments.freeze_feature_extractor,
        )
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
            best = output.logits.argmax(-1)
            best = jnp.where(jnp.arange(best.shape[1]) < frames[:, None], best, -1)
            missing = self.choose_length(None) - best.shape[1]
            totals["row_letters"] = jnp.pad(best, ((0, 0), (0, missing)), constant_values=-1)
        return total, (labels != IGNORE_INDEX).sum(), {"extra": changed, "totals": totals}

    def metrics(self, totals: dict[str, float]) -> dict[str, float]:
        """Return the loss."""
        return {"loss": super().metrics(totals)["loss"]}

    def row_metrics(self, rows: Arrays, split: str) -> dict[str, float]:
        """Compare what is read from the sounds with what is said, in all that can be read."""
        letters, missed = rows["row_letters"], self.skipped_examples.get(split, {})
        kept = [row for row in range(len(letters)) if row not in missed]
        found = self.tokenizer.batch_decode(
            [letters[row][letters[row] >= 0] for row in kept], skip_special_tokens=False
        )
        rates = error_rates(found, [self.texts[split][row] for row in kept])
        return rates | self.skip_metrics(split)
