"""A checkpoint and its tokenizer at work on text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel


def load(
    auto: type, name: str, *, tokenizer: str | None = None, **options: Any
) -> tuple[FlaxPreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model ``name`` (a directory or on the Hub) by an Auto class, and its tokenizer.

    ``tokenizer`` is where that lies, if elsewhere; ``options`` are those of ``from_pretrained``.

    **Raises:** CheckpointError for what is absent or cannot be read, UsageError for a tokenizer
    with more entries than the model has rows.
    """
    from transformers import AutoTokenizer

    from hfseq.data.tokenizers import check_vocabulary
    from hfseq.modeling import auto as models

    model = models.load(auto, name, **options)
    loaded = models.load(AutoTokenizer, tokenizer or name)
    check_vocabulary(loaded, model.config)
    return model, loaded
