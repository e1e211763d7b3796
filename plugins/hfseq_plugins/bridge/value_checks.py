"""Assumes that checks of tensor values in PyTorch code pass while jax traces the code.

Examples of checks are `assert lengths.max() <= 10` and `if mask.any(): raise ValueError`. jax does
not know the values in a trace. Since the only effect of a check is an error or a warning, the
results of the model do not change if the condition is assumed to have the value that avoids both.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from types import FrameType
from typing import Any

import jax

from hfseq_plugins.bridge.refusals import model_frame

_TORCH_CHECKS = {
    *("_check", "_check_with", "_check_tensor_all", "_check_tensor_all_with", "_check_is_all_true"),
    "torch_compilable_check",
}
_LOGS = {"warn", "warning", "warning_once", "info", "debug", "error"}


class AssumedNumber:
    """Stands for an unknown number in a condition.

    Args:
        answer: The result of all comparisons with the number.
    """

    def __init__(self, answer: bool):
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def _compare(self, other: object) -> bool:
        return self.answer

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = None  # type: ignore[assignment]


def passing_answer(tensor: Any) -> bool | None:
    """Returns the truth value to assume for a tensor in a condition, so that a check passes.

    The condition is the statement of the model's code that is being executed.

    Args:
        tensor: The tensor that is converted to a bool.

    Returns:
        The truth value. `None` if the values of the tensor are known, or if the statement is not a
        check, so that the results of the model depend on the condition.
    """
    if tensor.node.is_constant or not isinstance(tensor.array, jax.core.Tracer):
        return None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(6):
        if frame is not None and frame.f_code.co_name in _TORCH_CHECKS:
            return True
        frame = frame.f_back if frame is not None else None
    frame = model_frame(sys._getframe(2))
    if frame is None:
        return None
    return _answer(frame.f_code.co_filename, frame.f_lineno)


@functools.cache
def _answer(file: str, line: int) -> bool | None:
    """Returns the truth value that `passing_answer` assumes in the statement at a line."""
    for node in ast.walk(_parsed(file)):
        if not isinstance(node, ast.Assert | ast.If):
            continue
        if not node.test.lineno <= line <= (node.test.end_lineno or node.test.lineno):
            continue
        if isinstance(node, ast.Assert):
            return _truth(node.test, True)
        if node.orelse:
            return None
        if all(map(_only_reports, node.body)) or _drops_mask(node):
            return _truth(node.test, False)
        if _clamps_overflow(node):
            return _truth(node.test, True)
    return None


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _only_reports(statement: ast.stmt) -> bool:
    """Returns whether a statement only raises an error or logs a message."""
    if isinstance(statement, ast.Raise):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    return isinstance(function, ast.Attribute) and function.attr in _LOGS


def _drops_mask(node: ast.If) -> bool:
    """Returns whether a statement drops a mask that has no effect.

    An example is `if mask.all(): mask = None`. Keeping such a mask does not change the results.
    """
    if len(node.body) != 1 or not isinstance(node.body[0], ast.Assign):
        return False
    target, value = node.body[0].targets[0], node.body[0].value
    calls = _calls(node.test)
    is_none = isinstance(value, ast.Constant) and value.value is None
    is_mask = isinstance(target, ast.Name) and "mask" in target.id
    return is_none and is_mask and bool(calls) and calls <= {"any", "all"}


def _calls(node: ast.AST) -> set[str]:
    """Returns the names of the methods and functions that a statement calls."""
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {function.attr for function in calls if isinstance(function, ast.Attribute)}


def _clamps_overflow(node: ast.If) -> bool:
    """Returns whether a statement clamps values that overflow.

    An example is `if not torch.isfinite(x).all(): x = torch.clamp(x, min, max)`. Clamping to the
    range of the data type does not change finite values, so it can always be done.
    """
    is_assignment = all(isinstance(statement, ast.Assign) for statement in node.body)
    body = set().union(*map(_calls, node.body))
    tests = _calls(node.test)
    checks_values = bool(tests & {"isfinite", "isinf", "isnan"})
    is_check = checks_values and tests <= {"isfinite", "isinf", "isnan", "any", "all"}
    return is_assignment and is_check and "clamp" in body and body <= {"clamp", "finfo"}


def _truth(test: ast.expr, wanted: bool) -> bool | None:
    """Returns the truth value of tensors with which a condition is true or false as required.

    Args:
        test: The condition.
        wanted: The required truth value of the condition.

    Returns:
        One truth value for all tensors in the condition, or `None` if no single value works.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        answers = {_truth(value, wanted) for value in test.values}
        return wanted if answers == {wanted} else None
    return wanted
