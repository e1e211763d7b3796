"""One vocabulary for both languages of a translator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hfseq.data.tokenizers import Family, save_generic, train_backend, wrap
from hfseq.errors import UsageError

ALGORITHMS = ("unigram", "bpe")
FAMILY = Family(
    algorithm="unigram",
    first=("<pad>", "<s>", "</s>", "<unk>"),
    roles={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    single="$A </s>",
    pair="$A $B </s>",
)
STEP = 1e-4  # between the scores that the unigram trainer gives to characters it would have pruned
DIGITS = 6  # of a score; the order of additions, which varies, changes the 15th


def joint_tokenizer(
    texts: Iterable[list[str]],
    algorithm: str = "unigram",
    vocab_size: int = 32_000,
    output_dir: str | Path | None = None,
    max_corpus_chars: int = 10_000_000,
    *,
    model_max_length: int | None = None,
    show_progress: bool | None = None,
) -> Any:
    """Train one vocabulary on sentences of both languages and save it in ``output_dir``.

    ``texts`` are lists of sentences, the languages in turns, since only the first
    ``max_corpus_chars`` characters count. ``algorithm`` is "unigram" (SentencePiece's, pieces with
    ``▁`` for a space; every character of the texts is in the vocabulary) or "bpe" (byte-level,
    nothing is unknown). Ids are ``<pad>`` 0, ``<s>`` 1, ``</s>`` 2, ``<unk>`` 3; a text is its
    pieces and ``</s>``. Decoding gives back what was written: composed characters (NFC), single
    spaces. Equal texts give an equal vocabulary.

    Returns what ``AutoTokenizer.from_pretrained(output_dir)`` gives, whatever ``config.json`` is
    there; ``len`` of it is the model's vocab_size, less than asked for where the texts are few.

    Raises:
        UsageError: an unknown algorithm, or a size that does not hold the characters.
    """
    from tokenizers import normalizers

    if algorithm not in ALGORITHMS:
        raise UsageError(f"--tokenizer_algorithm {algorithm}: one of {', '.join(ALGORITHMS)}")
    # Not NFKC: it would turn "…" into "...", "½" into "1⁄2", and references are not so written.
    normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFC()])
    texts = _first_characters(texts, max_corpus_chars)
    if algorithm == "bpe":  # see _spaced
        texts = ([f" {text}" for text in batch] for batch in texts)
    backend = train_backend(
        texts, FAMILY, algorithm, vocab_size, normalizer=normalizer, show_progress=show_progress
    )
    backend = _reproducible(backend) if algorithm == "unigram" else _spaced(backend)
    tokenizer = wrap(backend, FAMILY, "translation", model_max_length)
    return tokenizer if output_dir is None else save_generic(tokenizer, Path(output_dir))


def _first_characters(texts: Iterable[list[str]], count: int) -> Iterator[list[str]]:
    for batch in texts:
        kept = []
        for text in batch:
            if count <= 0:
                break
            kept.append(text[:count])
            count -= len(text)
        if kept:
            yield kept
        if count <= 0:
            return


def _reproducible(backend: Any) -> Any:
    """Sort the pieces by score and text, after undoing what hash tables and threads did to scores.

    The trainer adds the characters that it pruned in the order of a hash table, each ``STEP`` above
    the one before; they all get the lowest score.
    """
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    pieces = state["model"]["vocab"]
    special, pieces = pieces[: len(FAMILY.first)], pieces[len(FAMILY.first) :]
    lowest = min((score for _, score in pieces), default=0.0)

    def canonical(piece: str, score: float) -> float:
        steps = (score - lowest) / STEP
        pruned = len(piece) == 1 and steps < len(pieces) and abs(steps - round(steps)) < STEP
        return round(lowest if pruned else score, DIGITS)

    scored = [[piece, canonical(piece, score)] for piece, score in pieces]
    scored.sort(key=lambda entry: (-entry[1], entry[0]))
    state["model"]["vocab"] = special + scored
    return Tokenizer.from_str(json.dumps(state))


def _spaced(backend: Any) -> Any:
    """Begin a byte-level text with a space, so that a word is the same piece wherever it stands."""
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return backend
