"""Inference with a checkpoint and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from hfseq.modeling import FlaxPreTrainedModel


def load(
    auto_class: type,
    name: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> tuple[FlaxPreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a model with an Auto class, and its tokenizer.

    Args:
        auto_class: The Auto class.
        name: Directory or Hub name of the checkpoint, which may be an adapter.
        tokenizer: Directory or Hub name of the tokenizer. Default: the tokenizer in the checkpoint.
            For an adapter without a tokenizer, it is the tokenizer of the base model.
        revision: Revision of a Hub repository.
        **options: Options of ``from_pretrained``.

    Returns:
        The model and the tokenizer.

    Raises:
        CheckpointError: A file is missing or cannot be read.
        UsageError: The tokenizer has more entries than the model's vocabulary.
    """
    from hfseq.modeling import auto

    if revision is not None:
        options["revision"] = revision
    model = auto.load(auto_class, name, **options)
    return model, load_tokenizer(model, name, tokenizer, revision=revision)


def load_tokenizer(
    model: FlaxPreTrainedModel,
    name: str,
    tokenizer: str | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model.

    Args:
        model: The model.
        name: Directory or Hub name of the checkpoint, which may be an adapter.
        tokenizer: Directory or Hub name of the tokenizer. Default: the tokenizer in the checkpoint.
            For an adapter without a tokenizer, it is the tokenizer of the base model.
        revision: Revision of a Hub repository.
        token: Access token of the Hub.

    Raises:
        CheckpointError: A file is missing or cannot be read.
        UsageError: The tokenizer has more entries than the model's vocabulary.
    """
    from transformers import AutoTokenizer

    from hfseq.checkpoints.config import fetcher
    from hfseq.data.tokenizers import check_vocabulary
    from hfseq.modeling import auto as models
    from hfseq.modeling import lora

    options = {"revision": revision, "token": token}
    revision_options = {name: value for name, value in options.items() if value is not None}
    if tokenizer is None and (adapter := lora.find_adapter(name, revision_options)):
        if fetcher(name, revision_options)("tokenizer_config.json") is None:
            tokenizer, revision_options = adapter.base, adapter.base_download({})
    loaded_tokenizer = models.load(AutoTokenizer, tokenizer or name, **revision_options)
    # In a composite model, the decoder or the text model defines the vocabulary.
    config = model.config
    for side in ("decoder", "text_config"):
        config = getattr(config, side, None) or config
    check_vocabulary(loaded_tokenizer, config)
    return loaded_tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: Any
) -> dict[str, np.ndarray]:
    """Tokenizes texts into int32 arrays `(num_texts, length)`, padded to the longest text.

    The tokenizer only has to return ``input_ids``. It need not return an attention mask or have a
    padding token.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        **options: Options of the tokenizer's call.

    Returns:
        "input_ids", "attention_mask" and, if the tokenizer returns them, "token_type_ids".
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
        for index, row in enumerate(encoded[name]):
            array[index, : len(row)] = row
    return inputs | {"attention_mask": (np.arange(shape[1]) < lengths).astype(np.int32)}
