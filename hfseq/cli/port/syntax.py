"""Small functions that read and build syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence


def dotted(node: ast.AST | None) -> str:
    """Returns the text of a name or a chain of attributes, such as `self.config`, or `""`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr}" if value else ""
    return ""


def own_attribute(node: ast.AST | None) -> str:
    """Returns `x` for the expression `self.x`, or `""` for any other expression."""
    is_own = isinstance(node, ast.Attribute) and dotted(node.value) == "self"
    return node.attr if is_own else ""  # type: ignore[union-attr]


def expression(text: str) -> ast.expr:
    """Parses an expression. Its nodes have no line numbers."""
    return _without_lines(ast.parse(text, mode="eval")).body  # type: ignore[attr-defined]


def statements(text: str) -> list[ast.stmt]:
    """Parses statements. Their nodes have no line numbers."""
    return _without_lines(ast.parse(text)).body  # type: ignore[attr-defined]


def _without_lines(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = 0  # type: ignore[attr-defined]
    return tree


def statement(text: str) -> ast.stmt:
    """Parses one statement."""
    return statements(text)[0]


def call(function: str | ast.expr, *args: ast.expr | str, **kwargs: ast.expr | str) -> ast.Call:
    """Builds a call. The function and the arguments are expressions or their source text."""

    def node(argument: ast.expr | str) -> ast.expr:
        return expression(argument) if isinstance(argument, str) else argument

    keywords = [ast.keyword(name, node(value)) for name, value in kwargs.items()]
    return ast.Call(node(function), [node(argument) for argument in args], keywords)


def assign(target: str | ast.expr, value: ast.expr | str) -> ast.Assign:
    """Builds an assignment. The target and the value are expressions or their source text."""
    target = expression(target) if isinstance(target, str) else target
    value = expression(value) if isinstance(value, str) else value
    return ast.Assign([target], value, lineno=0)


def keyword(node: ast.Call, *names: str) -> ast.expr | None:
    """Returns the value of the first keyword argument with one of the names, or `None`."""
    return next((word.value for word in node.keywords if word.arg in names), None)


def argument(node: ast.Call, position: int | None, name: str) -> ast.expr | None:
    """Returns an argument that is passed by position or by name, or `None`."""
    if position is not None and position < len(node.args):
        return node.args[position]
    return keyword(node, name)


def bind(node: ast.Call, names: Sequence[str]) -> dict[str, ast.expr]:
    """Returns the arguments of a call by name, without `**` arguments.

    Args:
        node: The call.
        names: The names of the positional arguments.
    """
    values = dict(zip(names, node.args, strict=False))
    return values | {word.arg: word.value for word in node.keywords if word.arg}


def is_none(node: ast.AST | None) -> bool:
    """Returns whether an expression is the constant `None`."""
    return isinstance(node, ast.Constant) and node.value is None


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yields all calls in a tree."""
    yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def names_read(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the names of the variables that the nodes read."""
    return {
        inner.id
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    }


def names_written(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the names of the variables that the nodes assign."""
    return {
        inner.id
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def attributes_written(nodes: Sequence[ast.AST]) -> set[str]:
    """Returns the attributes that the nodes assign, such as `config.hidden_size`."""
    return {
        dotted(inner)
        for node in nodes
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
    }


def method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Returns a method of a class, or `None` if the class does not define it."""
    methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
    return next((item for item in methods if item.name == name), None)


def located(item: ast.stmt, node: ast.AST) -> ast.stmt:
    """Gives a statement and all of its parts the line number of a node, and returns it."""
    for inner in ast.walk(item):
        ast.copy_location(inner, node)
    return item


def parameters(function: ast.FunctionDef) -> list[str]:
    """Returns the names of a function's parameters, without `self`, `*args` and `**kwargs`."""
    arguments = function.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name != "self"]


def default_values(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Returns the default values of a function's parameters."""
    arguments = function.args
    positional = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    defaults = dict(zip(positional[::-1], arguments.defaults[::-1], strict=False))
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return defaults | {arg.arg: value for arg, value in keywords if value is not None}


class Replace(ast.NodeTransformer):
    """Replaces names and attributes with other expressions, where they are read.

    Args:
        texts: The new expression for each name, such as `{"self.width": "config.width"}`.
    """

    def __init__(self, texts: Mapping[str, str | ast.expr]):
        self.texts = texts

    def _replacement(self, node: ast.Name | ast.Attribute) -> ast.AST:
        value = self.texts.get(dotted(node)) if isinstance(node.ctx, ast.Load) else None
        if value is None:
            return self.generic_visit(node)
        return expression(value if isinstance(value, str) else ast.unparse(value))

    visit_Name = _replacement
    visit_Attribute = _replacement


def replace(node: ast.AST, texts: Mapping[str, str | ast.expr]) -> ast.AST:
    """Replaces names and attributes in a tree, as described in `Replace`."""
    return Replace(texts).visit(node)
