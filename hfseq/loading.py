"""Loading for commands: what Transformers raises becomes an error that says what is missing."""

from __future__ import annotations

from typing import Any

from hfseq.errors import CheckpointError, HfseqError


def load(auto: Any, name: str, **options: Any) -> Any:
    """Return ``auto.from_pretrained(name)``; what Transformers raises becomes one of our errors."""
    try:
        return auto.from_pretrained(name, **options)
    except HfseqError:
        raise
    except ImportError as error:
        package = "sentencepiece" if "sentencepiece" in str(error).lower() else error.name
        hint = f": pip install {package}" if package else f": {_first_line(error)}"
        raise CheckpointError(f"'{name}' needs a package that is not installed{hint}") from error
    except Exception as error:  # transformers' and tokenizers' own; the latter are no more exact
        first = _first_line(error)
        raise CheckpointError(f"{auto.__name__} cannot load '{name}': {first}") from error


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
