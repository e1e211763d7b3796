"""Test matrices of which only a part runs without ``-m slow``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from hfseq import plugins

#: Checks that run without ``-m slow`` for a family, if all checks already run for a similar family.
CHECKS = ["torch_loads_it", "torch_tree", "torch_parity"]

#: The checks that run for a decoder, if all checks already run for an encoder.
DECODER_CHECKS = [
    *CHECKS,
    "scan_layers",
    "packing",
    "cached_decoding",
    "generation",
    "torch_generation",
]


def first(values: Iterable[Any], *default: Any) -> list[Any]:
    """Returns ``values`` as test parameters. Values that are not in ``default`` are slow."""
    return [
        value if value in default else pytest.param(*_row(value), marks=pytest.mark.slow)
        for value in values
    ]


def heads(name: str) -> list[str]:
    """Returns the tasks of an architecture. If tasks share a class, only the last one counts."""
    registered = plugins.load().architectures.get(name).heads
    return list({target: task for task, target in registered.items()}.values())


def battery(name: str, quick: str) -> list[Any]:
    """Returns test parameters, which are tuples of a head and its checks.

    The head ``quick`` with the checks in `CHECKS` is the only parameter that is not slow. All other
    parameters combine a head with `None`, which stands for all checks.
    """
    return first([(quick, CHECKS), *((head, None) for head in heads(name))], (quick, CHECKS))


def batteries(quick: Mapping[str, str]) -> list[Any]:
    """Returns the parameters of `battery` for several families, each preceded by its name.

    Args:
        quick: Maps the names of families to the head that is not slow.
    """
    return [
        pytest.param(name, *getattr(row, "values", row), marks=getattr(row, "marks", ()))
        for name, head in quick.items()
        for row in battery(name, head)
    ]


def _row(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
