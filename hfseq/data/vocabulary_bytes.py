"""A vocabulary of bytes: the 256 bytes and the special tokens, nothing to train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies.

    Visible characters of Latin-1 stand for themselves, the others for those from U+0100 on (the
    table of GPT-2, which ``tokenizers`` uses).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    codes = {byte: byte for byte in visible} | {b: 0x100 + i for i, b in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


def byte_backend(specials: Sequence[str]) -> Any:
    """Return a ``tokenizers.Tokenizer``: special tokens first, then byte *b* as ``specials`` + *b*.

    A byte-level BPE without merges, which takes a text as it is; plain ``tokenizers`` reads it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = byte_characters()
    vocabulary = {token: i for i, token in enumerate([*specials, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_ids(tokenizer: Any) -> np.ndarray | None:
    """Return the id of each byte, int32 (256,), or None where a token can be more than a byte."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    state = json.loads(backend.to_str())
    model = state["model"]
    if model.get("type") != "BPE" or model.get("merges") or state.get("normalizer"):
        return None
    vocabulary = model["vocab"]
    ids = [vocabulary.get(character) for character in byte_characters()]
    return None if None in ids else np.array(ids, np.int32)
