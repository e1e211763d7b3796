"""Checks of values in PyTorch code, which are assumed to pass while jax traces it.

A statement such as `assert lengths.max() <= 10`, or `if mask.any(): raise ValueError`, asks for a
value that is not known during a trace. Its only effect is an error or a warning, so the answer that
avoids both leaves the result of the model unchanged.
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
    """A number in a condition. All its comparisons return the answer that avoids errors."""

    def __init__(self, answer: bool):
        self.answer = answer

    def __bool__(self) -> bool:
        return self.answer

    def _compare(self, other: object) -> bool:
        return self.answer

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = None  # type: ignore[assignment]


def passing_answer(tensor: Any) -> bool | None:
    """Returns the answer to a condition on an unknown value that avoids errors and warnings.

    Args:
        tensor: The tensor that is converted to a bool.

    Returns:
        The answer, or `None` if the value is known, or if it affects more than an error.
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
    """Returns the answer for the statement at a line of a file."""
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
    """Whether a statement raises an error or logs a message."""
    if isinstance(statement, ast.Raise):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    return isinstance(function, ast.Attribute) and function.attr in _LOGS


def _drops_mask(node: ast.If) -> bool:
    """Whether a statement drops a mask that hides nothing: `if not mask.any(): mask = None`.

    Such a mask has no effect, so it can be kept.
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
    """Whether a statement limits overflow: `if not torch.isfinite(x).all(): x = torch.clamp(x)`.

    Clamping to the range of the data type changes no finite value, so it may always be done.
    """
    is_assignment = all(isinstance(statement, ast.Assign) for statement in node.body)
    body = set().union(*map(_calls, node.body))
    tests = _calls(node.test)
    checks_values = bool(tests & {"isfinite", "isinf", "isnan"})
    is_check = checks_values and tests <= {"isfinite", "isinf", "isnan", "any", "all"}
    return is_assignment and is_check and "clamp" in body and body <= {"clamp", "finfo"}


def _truth(test: ast.expr, wanted: bool) -> bool | None:
    """Returns the truth of a tensor that gives a condition the required truth.

    Every tensor in the condition gets the same answer.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        answers = {_truth(value, wanted) for value in test.values}
        return wanted if answers == {wanted} else None
    return wanted
