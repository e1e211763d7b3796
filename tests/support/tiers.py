"""Matrices of which a part runs at every change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

#: What the battery checks at every change of a family whose sibling has all of it then.
CHECKS = ["save_and_load", "torch_loads_it", "torch_tree", "torch_parity"]


def first(values: Iterable[Any], *default: Any) -> list[Any]:
    """``values`` as parameters of a test; all but ``default`` belong to the slow tier."""
    return [
        value if value in default else pytest.param(*_row(value), marks=pytest.mark.slow)
        for value in values
    ]


def battery(heads: Iterable[str], quick: str) -> list[Any]:
    """Heads with what is checked of them: `CHECKS` of ``quick``; all of all in the slow tier."""
    return first([(quick, CHECKS), *((head, None) for head in heads)], (quick, CHECKS))


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
