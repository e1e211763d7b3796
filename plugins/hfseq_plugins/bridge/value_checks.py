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


def passing_answer(tensor: Any) -> bool | None:
    """Returns the answer to a condition on an unknown value that avoids errors and warnings.

    Args:
        tensor: The tensor whose truth is asked for.

    Returns:
        The answer, or `None` if the value is known, or decides about more than an error.
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


@functools.lru_cache(maxsize=None)
def _answer(file: str, line: int) -> bool | None:
    """Returns the answer for the statement at a line of a file."""
    for node in ast.walk(_parsed(file)):
        if not isinstance(node, ast.Assert | ast.If):
            continue
        if not node.test.lineno <= line <= (node.test.end_lineno or node.test.lineno):
            continue
        if isinstance(node, ast.Assert):
            return _truth(node.test, True)
        if not node.orelse and all(map(_only_reports, node.body)):
            return _truth(node.test, False)
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


def _truth(test: ast.expr, wanted: bool) -> bool | None:
    """Returns the truth of a tensor that gives a condition the required truth.

    Every tensor in the condition gets the same answer, so conditions that compare Python numbers
    have none.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        answers = {_truth(value, wanted) for value in test.values}
        return wanted if answers == {wanted} else None
    if isinstance(test, ast.Compare):
        calls = [
            n.func.attr
            for n in ast.walk(test)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        ]
        return None if {"item", "tolist"} & set(calls) else wanted
    return wanted
