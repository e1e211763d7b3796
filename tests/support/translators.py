"""Translation helpers: a model that echoes its input, and a tiny T5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import GenerationConfig

PAD, EOS, FIRST = 0, 1, 3
WORDS = (
    "the cat is blue and a small dog reads long books about old laws in the house of many green "
    "trees while seven quick foxes jump over lazy neighbours who write letters to kind friends"
).split()


class CharacterTokenizer:
    """A character tokenizer that appends EOS. Like real tokenizers, it drops ``\\u200b``."""

    name_or_path = "characters"
    model_max_length = int(1e30)
    pad_token_id, eos_token_id, all_special_tokens = PAD, EOS, ()

    def __call__(self, texts: Sequence[str], verbose=True, truncation=False, max_length=None):
        rows = [[ord(c) + FIRST for c in text if c != "\u200b"] for text in texts]
        if truncation:
            rows = [row[: max_length - 1] for row in rows]
        return {"input_ids": [[*row, EOS] for row in rows]}

    def decode(self, row: Sequence[int], skip_special_tokens: bool = False):
        return "".join(chr(i - FIRST) for i in row if i >= FIRST)


class EchoModel:
    """A model that generates its input in upper case. It raises an error for texts with ``$``."""

    def __init__(self, positions: int | None = None):
        self.positions = positions
        self.config = SimpleNamespace(eos_token_id=EOS, pad_token_id=PAD, vocab_size=20_000)
        self.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
        self.calls: list[dict[str, Any]] = []
        self.params: dict[str, Any] = {}
        self.peft_config = None

    def max_length(self) -> int | None:
        return self.positions

    def accepts(self, name: str) -> bool:
        return False

    max_source_length = max_length

    def generate(
        self,
        ids: Any,
        attention_mask: Any,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        **options: Any,
    ) -> Any:
        ids = np.asarray(ids)
        options.setdefault("num_return_sequences", 1)
        max_length = max_length or 1 + max_new_tokens
        self.calls.append({"shape": ids.shape, "max_length": max_length, **options})
        if (ids == ord("$") + FIRST).any():
            raise FloatingPointError("a dollar\nand more")
        expected = options["num_return_sequences"]
        out = np.full((len(ids) * expected, max_length), PAD)
        for position, (row, mask) in enumerate(zip(ids, attention_mask, strict=True)):
            text = "".join(chr(i - FIRST) for i in row[mask.astype(bool)] if i >= FIRST).upper()
            for rank in range(expected):
                new = [ord(c) + FIRST for c in text + "'" * rank] + [EOS]
                new = new[: max_length - 1]
                out[position * expected + rank, 1 : 1 + len(new)] = new
        scores = 0.0 - np.arange(len(out)) % expected
        return SimpleNamespace(sequences=out, sequences_scores=scores)


def echo(positions: int | None = None, **options: Any) -> Any:
    """Returns a translation pipeline with `EchoModel`, which truncates long texts."""
    from hfseq.pipelines.generation import Translation

    options = {"truncation": True, "return_details": True, **options}
    return Translation(EchoModel(positions), CharacterTokenizer(), "translation", **options)


def texts_of(answers: Any) -> list[str]:
    """Returns the best translation of each text from the result of a call or a stream."""
    outputs = [getattr(answer, "output", answer) for answer in answers]
    best = [output[0] if isinstance(output, list) else output for output in outputs]
    return [item["translation_text"] for item in best]


def sentences(count: int, longest: int = 18, seed: int = 0) -> list[str]:
    """Returns random sentences of very different lengths."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest))) for _ in range(count)]


def save_tiny_t5(folder: Path) -> None:
    """Saves a random T5 model with its tokenizer. The model often generates EOS."""
    import jax

    from hfseq import FlaxAutoModelForSeq2SeqLM
    from hfseq.data.tokenizers import train_tokenizer
    from tests.support.models import t5_config

    tokenizer = train_tokenizer([sentences(300)], "marian", None, 120, folder)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = t5_config(
        vocab_size=len(tokenizer),
        decoder_start_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        num_layers=1,
        **ids,
    )
    model = FlaxAutoModelForSeq2SeqLM.from_config(config, seed=1)
    params = jax.tree.map(np.array, model.params)
    params["lm_head"]["kernel"] *= 1.5
    params["lm_head"]["kernel"][:, tokenizer.eos_token_id] *= 2
    model.save_pretrained(folder, params=params)
