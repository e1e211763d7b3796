"""Loading what a translator needs from a checkpoint, with errors that say what is missing."""

from __future__ import annotations

from typing import Any

from hfseq.errors import CheckpointError, HfseqError, UsageError


def load_pair(name: str, precision: str | None = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of ``name``, a directory or a model on the Hub.

    ``precision`` names a recipe; ``None`` computes in float32.

    **Raises:** CheckpointError for what is absent or cannot be read, UsageError for a checkpoint of
    another kind or without a tokenizer.
    """
    from transformers import AutoTokenizer

    from hfseq import FlaxAutoModelForSeq2SeqLM
    from hfseq.data.tokenizers import check_vocabulary

    options = {"precision": precision} if precision else {}
    model = _load(FlaxAutoModelForSeq2SeqLM, name, **options)
    tokenizer = _load(AutoTokenizer, name)
    if not getattr(model.config, "is_encoder_decoder", False) or not model.can_generate():
        raise UsageError(f"'{name}' is no encoder-decoder with a head: it cannot translate")
    check_vocabulary(tokenizer, model.config)
    return model, tokenizer


def _load(auto: Any, name: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(name, **options)
    except HfseqError:
        raise
    except ImportError as error:
        package = "sentencepiece" if "sentencepiece" in str(error).lower() else error.name
        hint = f": pip install {package}" if package else f": {_first_line(error)}"
        raise CheckpointError(f"'{name}' needs a package that is not installed{hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:  # transformers' own
        first = _first_line(error)
        raise CheckpointError(f"{auto.__name__} cannot load '{name}': {first}") from error


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
