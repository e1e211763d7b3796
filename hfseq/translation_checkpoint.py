"""Loading what a translator needs from a checkpoint, with errors that say what is missing."""

from __future__ import annotations

from typing import Any

from hfseq.errors import UsageError


def load_pair(name: str, precision: str | None = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of ``name``, a directory or a model on the Hub.

    ``precision`` names a recipe; ``None`` computes in float32.

    **Raises:** CheckpointError for what is absent or cannot be read, UsageError for a checkpoint of
    another kind or without a tokenizer.
    """
    from transformers import AutoTokenizer

    from hfseq.auto import FlaxAutoModelForSeq2SeqLM
    from hfseq.data.tokenizers import check_vocabulary
    from hfseq.loading import load

    options = {"precision": precision} if precision else {}
    model = load(FlaxAutoModelForSeq2SeqLM, name, **options)
    tokenizer = load(AutoTokenizer, name)
    if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        raise UsageError(f"'{name}' is no encoder-decoder with a head: it cannot translate")
    check_vocabulary(tokenizer, model.config)
    return model, tokenizer
