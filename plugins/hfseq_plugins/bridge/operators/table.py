"""The table of PyTorch's operators and the functions of jax that compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Operator:
    """A translation of an operator.

    Attributes:
        function: Computes the operator. It receives jax arrays instead of tensors, jax's data types
            instead of PyTorch's, and no arguments for devices and layouts.
        promoted: Positions of two arguments that PyTorch converts to a common data type, or an
            empty tuple.
    """

    function: Callable[..., Any]
    promoted: tuple[int, ...] = ()


#: Operators by the name of their overload, such as `aten.add.Tensor`.
OPERATORS: dict[str, Operator] = {}

Function = Callable[..., Any]
Sizes = Sequence[int]
Dims = int | Sequence[int] | None


def operator(
    *names: str, promoted: tuple[int, int] | tuple[()] = ()
) -> Callable[[Function], Function]:
    """Adds the decorated function to the table.

    Args:
        *names: Names without `aten.`. A name without an overload stands for `default`.
        promoted: As in `Operator`.
    """

    def add(function: Function) -> Function:
        for name in names:
            full = name if "." in name else f"{name}.default"
            full = full if full.count(".") == 2 else f"aten.{full}"
            OPERATORS[full] = Operator(function, promoted)
        return function

    return add


def add_all(functions: dict[str, Function]) -> None:
    """Adds functions to the table. Several names may be separated by spaces."""
    for names, function in functions.items():
        operator(*names.split())(function)
