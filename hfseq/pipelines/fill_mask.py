"""What a masked language model puts in the place of masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfseq.errors import UsageError
from hfseq.pipelines import encode, load

MASK = "<mask>"


def fill_masks(name: str, texts: Sequence[str], top: int) -> list[list[list[tuple[str, float]]]]:
    """Return for each text and each of its masks the likeliest tokens and their probabilities.

    ``name`` is a directory or a model on the Hub; a mask is written ``<mask>`` whatever the
    tokenizer calls it; ``top`` tokens are returned, the likeliest first.

    **Raises:** CheckpointError for what cannot be read; UsageError for a tokenizer without a mask
    token, a text without a mask, and texts that are too long.
    """
    import jax
    import numpy as np

    from hfseq.modeling.auto import FlaxAutoModelForMaskedLM

    model, tokenizer = load(FlaxAutoModelForMaskedLM, name)
    if tokenizer.mask_token_id is None:
        raise UsageError(f"the tokenizer of {name} has no mask token: take a masked language model")
    filled = [text.replace(MASK, tokenizer.mask_token) for text in texts]
    inputs: dict[str, Any] = encode(tokenizer, filled)
    if not model.takes("token_type_ids"):
        inputs.pop("token_type_ids", None)
    masked = (inputs["input_ids"] == tokenizer.mask_token_id) & (inputs["attention_mask"] > 0)
    bare = [text for text, row in zip(texts, masked, strict=True) if not row.any()]
    if bare:
        raise UsageError(f"no {MASK} in '{bare[0]}': put one where a token is to be guessed")
    limit = model.max_length()
    if limit and masked.shape[1] > limit:
        raise UsageError(f"a text of {masked.shape[1]} tokens is too long: give at most {limit}")
    probabilities = np.asarray(jax.nn.softmax(model(**inputs).logits[masked]))
    best = np.argsort(-probabilities, axis=-1)[:, :top].tolist()
    guesses = [
        [(str(tokenizer.decode([token])).strip(), float(row[token])) for token in tokens]
        for tokens, row in zip(best, probabilities, strict=True)
    ]
    ends = np.cumsum(masked.sum(axis=1)).tolist()
    return [guesses[start:end] for start, end in zip([0, *ends], ends, strict=False)]
