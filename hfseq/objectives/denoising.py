"""Denoising, BART's objective (Lewis et al., 2019, section 2.2): restore text from noised text."""

from __future__ import annotations

from typing import Any

import numpy as np

from hfseq.data.sentences import sentence_tables
from hfseq.data.tokenization import pad_token_id
from hfseq.data.tokenizers import special_ids
from hfseq.errors import UsageError
from hfseq.labels import IGNORED, shift_right
from hfseq.objectives import samples
from hfseq.objectives.infilling import infill, permute_sentences
from hfseq.objectives.seq2seq import Seq2SeqLM


class Denoising(Seq2SeqLM):
    """Shuffled sentences with masks for spans in, the original row out.

    Documents of a packed row keep to themselves, in the encoder, the decoder and between the two,
    unless ``--cross_documents`` makes the row one sequence.
    """

    name = "denoising"
    default_model_type = "bart"

    def __init__(self, arguments: Any, tokenizer: Any, config: Any):
        super().__init__(arguments, tokenizer, config)
        if tokenizer.mask_token_id is None:
            raise UsageError(
                "denoising needs a tokenizer with a mask token; this one has none: train one with "
                "scripts/train_tokenizer.py --model_type bart, or set tokenizer.mask_token"
            )
        self.pad = pad_token_id(tokenizer)
        self.special = special_ids(tokenizer, config.vocab_size)
        roles = ("bos", "eos", "pad", "cls", "sep", "mask")
        if tokenizer.unk_token_id not in [getattr(tokenizer, f"{r}_token_id") for r in roles]:
            self.special[tokenizer.unk_token_id] = False  # it stands for text
        self.sentences = sentence_tables(tokenizer, config.vocab_size)

    def target_length(self, length: int) -> int:
        """The decoder writes the whole row."""
        return length

    def collate(
        self, rows: dict[str, np.ndarray], random: Any, groups: int
    ) -> dict[str, np.ndarray]:
        """Shuffle and mask; labels are the rows as they were, special tokens included."""
        ids, segments = rows["input_ids"], rows["segment_ids"]
        inputs, documents = self.noise(ids, segments, random)
        labels = np.where(segments > 0, ids, np.int32(IGNORED))
        start = self.config.decoder_start_token_id
        decoder = shift_right(labels, self.pad, start)
        # Each document starts as if it were alone.
        decoder[:, 1:][segments[:, 1:] > segments[:, :-1]] = start
        if "valid" in rows:
            labels[~rows["valid"]] = IGNORED
        batch = {"input_ids": inputs, "segment_ids": documents, "decoder_input_ids": decoder,
                 "labels": labels}  # fmt: skip
        return batch | ({} if self.cross_documents else {"decoder_segment_ids": segments})

    def noise(
        self, ids: np.ndarray, segments: np.ndarray, random: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Shuffle the sentences of each document and replace spans by masks."""
        arguments, real = self.arguments, segments > 0
        ordinary = real & ~self.special[ids]
        columns = permute_sentences(
            real, real & ~ordinary, segments, self.sentences.ends(ids, ordinary), random,
            arguments.permute_sentence_ratio,
        )  # fmt: skip
        return infill(
            np.take_along_axis(ids, columns, axis=1), ordinary, segments, random,
            mask_id=self.tokenizer.mask_token_id, pad=self.pad,
            probability=arguments.mlm_probability, poisson_lambda=arguments.poisson_lambda,
        )  # fmt: skip

    def samples(self, model: Any, params: Any, rows: Any, count: int) -> list[samples.Sample]:
        """Restore noised text."""
        return samples.restored(model, params, self, samples.pick(rows, count))
