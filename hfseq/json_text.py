"""JSON that strangers wrote: whatever is wrong with it is one kind of error."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON text.

    Python takes the last of equal keys; with ``unique`` they are an error.

    **Raises:** ``json.JSONDecodeError`` (a ValueError) for text that is no JSON, no UTF-8, nested
    too deeply, or has an integer of thousands of digits.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("it is nested too deeply", _shown(text), 0) from error
    except ValueError as error:
        raise json.JSONDecodeError(str(error), _shown(text), 0) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.80} stands there twice")
    return found


def _shown(text: str | bytes) -> str:
    return text[:100].decode("utf-8", "replace") if isinstance(text, bytes) else text[:100]


__all__ = ["parse"]
