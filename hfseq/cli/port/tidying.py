"""Removes unused variables and attributes from translated methods and constructors."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from hfseq.cli.port.syntax import dotted, names_read, own_attribute, replace

#: Attributes of attention classes that hfseq reads, even if no translated method does.
_KEPT_ATTRIBUTES = {"kv_heads", "head_dim", "cross", "causal"}


def tidy_body(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Removes assignments to local variables that are never read, and assignments `x = x`."""
    lines = list(body)
    while True:
        read = names_read(lines)
        remaining = _without_dead(lines, read)
        if len(list(_walk(remaining))) == len(list(_walk(lines))):
            return remaining
        lines = remaining


def return_directly(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Replaces `x = value; return x` by `return value`."""
    lines = list(body)
    if len(lines) > 1 and isinstance(lines[-1], ast.Return) and isinstance(lines[-2], ast.Assign):
        target, result = lines[-2].targets[0], lines[-1].value
        if isinstance(target, ast.Name) and dotted(result) == target.id:
            lines[-2:] = [ast.Return(lines[-2].value)]
    return lines


def _walk(body: Sequence[ast.stmt]) -> list[ast.AST]:
    return [node for item in body for node in ast.walk(item)]


def _without_dead(body: Sequence[ast.stmt], read: set[str]) -> list[ast.stmt]:
    lines: list[ast.stmt] = []
    for item in body:
        if isinstance(item, ast.Pass):
            continue
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            target = item.targets[0]
            if ast.unparse(target) == ast.unparse(item.value):
                continue
            if isinstance(target, ast.Name) and target.id not in read and is_pure(item.value):
                continue
            if isinstance(target, ast.Tuple) and is_pure(item.value):
                names = [dotted(element) for element in target.elts]
                if all(names) and not set(names) & read:
                    continue
        if isinstance(item, ast.If | ast.For | ast.While | ast.With):
            item.body = _without_dead(item.body, read)
            if isinstance(item, ast.If):
                item.orelse = _without_dead(item.orelse, read)
                if not item.body and not item.orelse:
                    continue
                if not item.body:
                    item.test = ast.UnaryOp(ast.Not(), item.test)
                    item.body, item.orelse = item.orelse, []
            if not item.body:
                if isinstance(item, ast.For):
                    continue
                item.body = [ast.Pass()]
        lines.append(item)
    return lines


def is_pure(node: ast.AST) -> bool:
    """Returns whether an unused expression can be removed.

    Markers of untranslated statements and updates of the cache cannot.
    """
    return "NotTranslated" not in ast.unparse(node) and "extend_cache" not in ast.unparse(node)


def unused_names(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Replaces unused variables in tuple assignments with `_`."""
    read = names_read(body)
    for node in _walk(body):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            elements = node.targets[0].elts
            for element in elements:
                if isinstance(element, ast.Name) and element.id not in read:
                    element.id = "_"
    return list(body)


def is_plain(value: ast.expr) -> bool:
    """Returns whether an attribute holds a plain value rather than a module or parameter."""
    return not re.search(r"\bnn\.(?!activation|is_causal)|nnx\.|rngs|lambda", ast.unparse(value))


def tidy_constructor(
    body: list[ast.stmt], methods: Sequence[ast.AST], read_elsewhere: set[str]
) -> list[ast.stmt]:
    """Removes attributes that no method reads.

    If the constructor reads such an attribute, its value is inlined or stored in a local variable.

    Args:
        body: The statements of the constructor.
        methods: The other methods of the class.
        read_elsewhere: Attributes that other classes read.
    """
    read = read_elsewhere | _KEPT_ATTRIBUTES
    for method in methods:
        read |= {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and dotted(node.value) == "self"
        }
    top_level = [item for item in body if isinstance(item, ast.Assign)]
    targets = [own_attribute(item.targets[0]) for item in top_level]
    inlined: dict[str, ast.expr] = {}
    dropped: set[int] = set()
    for item, name in zip(top_level, targets, strict=True):
        if not name or name in read or not is_plain(item.value) or targets.count(name) > 1:
            continue
        item.value = replace(item.value, inlined)  # type: ignore[assignment]
        if _count(body, name) and not _is_simple(item.value):
            if _count(body, name) > 1:
                item.targets = [ast.Name(name, ast.Store())]
                inlined[f"self.{name}"] = ast.Name(name, ast.Load())
                continue
        inlined[f"self.{name}"] = item.value
        dropped.add(id(item))
    lines = [replace(item, inlined) for item in body if id(item) not in dropped]
    return tidy_body(_drop_dead_attributes(lines, read))


def _count(body: Sequence[ast.stmt], name: str) -> int:
    return sum(
        isinstance(node, ast.Attribute)
        and own_attribute(node) == name
        and isinstance(node.ctx, ast.Load)
        for node in _walk(body)
    )


def _is_simple(value: ast.expr) -> bool:
    return bool(dotted(value)) or isinstance(value, ast.Constant)


def _drop_dead_attributes(body: Sequence[ast.AST], read: set[str]) -> list[ast.stmt]:
    """Removes assignments of plain values to attributes that are never read."""
    reads = read | {
        node.attr
        for item in body
        for node in ast.walk(item)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    lines: list[ast.stmt] = []
    for item in body:
        assert isinstance(item, ast.stmt)
        if isinstance(item, ast.Assign):
            name = own_attribute(item.targets[0])
            if name and name not in reads and is_plain(item.value):
                continue
        if isinstance(item, ast.If):
            item.body = _drop_dead_attributes(item.body, read)
            item.orelse = _drop_dead_attributes(item.orelse, read)
        lines.append(item)
    return lines
