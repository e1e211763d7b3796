"""The table of PyTorch's operators and the functions of jax arrays that compute them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Operator:
    """The translation of a PyTorch operator to jax.

    Attributes:
        function: The function that computes the operator. Its arguments are those of the operator,
            with jax arrays instead of tensors and jax's data types instead of PyTorch's. It does
            not receive arguments for devices and layouts.
        promoted: Positions of two arguments that are first converted to a common data type, or an
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
    """Adds the decorated function to the table of operators.

    Args:
        *names: Names of operators, without `aten.`. A name without an overload, such as `relu`,
            stands for the overload `default`.
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
    """Adds functions to the table of operators.

    Args:
        functions: A function for each key. A key may contain several names, separated by spaces.
    """
    for names, function in functions.items():
        operator(*names.split())(function)
