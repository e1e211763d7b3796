"""A checkpoint and its tokenizer at work on text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel


def load(
    auto: type,
    name: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> tuple[FlaxPreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model ``name`` (a directory or on the Hub) by an Auto class, and its tokenizer.

    ``tokenizer`` is where that lies, if elsewhere: by default beside the model, or where an adapter
    has none beside its base. ``revision`` is that of a repository on the Hub; ``options`` are those
    of ``from_pretrained``.

    **Raises:** CheckpointError for what is absent or cannot be read, UsageError for a tokenizer
    with more entries than the model has rows.
    """
    from transformers import AutoTokenizer

    from hfseq.checkpoints.config import fetcher
    from hfseq.data.tokenizers import check_vocabulary
    from hfseq.modeling import auto as models
    from hfseq.modeling import lora

    version = {} if revision is None else {"revision": revision}
    model = models.load(auto, name, **version, **options)
    if tokenizer is None and (adapter := lora.find_adapter(name, version)):
        if fetcher(name, version)("tokenizer_config.json") is None:
            tokenizer, version = adapter.base, {}
    loaded = models.load(AutoTokenizer, tokenizer or name, **version)
    # Of two models in one the second writes.
    check_vocabulary(loaded, getattr(model.config, "decoder", model.config))
    return model, loaded


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any
) -> dict[str, np.ndarray]:
    """Return texts as int32 arrays (rows, width of the longest): ids, attention mask and types.

    Of the tokenizer only ids are needed: it may return no mask, and have no padding token. Types
    are there if it returns them; ``options`` are those of its call.
    """
    import numpy as np

    encoded = tokenizer(list(texts), **options)
    rows = encoded["input_ids"]
    lengths = np.array([[len(row)] for row in rows])
    shape = len(rows), int(lengths.max())
    pad = tokenizer.pad_token_id or 0
    inputs = {
        name: np.full(shape, value, np.int32)
        for name, value in (("input_ids", pad), ("token_type_ids", 0))
        if name in encoded
    }
    for name, array in inputs.items():
        for number, row in enumerate(encoded[name]):
            array[number, : len(row)] = row
    return inputs | {"attention_mask": (np.arange(shape[1]) < lengths).astype(np.int32)}
