"""Synthetic text of any size, and a tokenizer for it: no network, the same text for everyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = 50_000
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou", "ee")


def write(path: Path, size: int, seed: int = 0) -> int:
    """Write about ``size`` bytes of text, a document a line; returns the bytes written.

    Words are made up of syllables and drawn by Zipf's law (the share of the n-th is 1/n), documents
    have 20 to 600 of them. It is written in blocks, so memory does not grow with the size.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    words = np.array(_words(random), dtype=object)
    shares = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            count = min(200_000, max(1000, (size - written) // 6))
            drawn = words[np.searchsorted(shares, random.random(count) * shares[-1])]
            places = np.cumsum(random.integers(20, 600, count // 20))
            for part in np.split(drawn, places[places < count]):
                if len(part):
                    written += file.write(" ".join(part) + ".\n")
    return written


def _words(random: Any) -> list[str]:
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    found: dict[str, None] = {}
    while len(found) < WORDS:
        lengths = random.integers(1, 5, WORDS)
        flat = iter(random.integers(0, len(syllables), int(lengths.sum())))
        for length in lengths:
            found["".join(syllables[next(flat)] for _ in range(length))] = None
    return list(found)[:WORDS]


def tokenizer(path: Path, vocab_size: int) -> Any:
    """Train a byte-level BPE with RoBERTa's special tokens on the text in ``path``."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train([str(path)], vocab_size=vocab_size, special_tokens=list(SPECIAL),
               show_progress=False)  # fmt: skip
    made._tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>", cls_token="<s>",
        sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
        model_max_length=512,
    )  # fmt: skip


def lines(path: Path) -> list[str]:
    """Read the documents."""
    return path.read_text(encoding="utf-8").splitlines()
