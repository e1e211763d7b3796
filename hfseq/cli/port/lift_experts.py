"""Translates mixtures of experts by replacing the loop over experts with `nn.mix_experts`."""

from __future__ import annotations

import ast
import re
from typing import Any

from hfseq.cli.port.scope import Scope, statement_lift
from hfseq.cli.port.source import SourceClass
from hfseq.cli.port.syntax import (
    argument,
    call,
    calls,
    dotted,
    expression,
    own_attribute,
    parameters,
    statement,
)
from hfseq.cli.port.tidying import return_directly


def is_experts(owner: SourceClass) -> bool:
    """Returns whether a class loops over its experts, as all experts in Transformers 5 do."""
    return owner.forward is not None and _find_loop(owner.forward.body) is not None


def _find_loop(body: list[ast.stmt]) -> ast.For | None:
    for item in body:
        if isinstance(item, ast.For) and "torch.where(expert_mask[" in ast.unparse(item):
            return item
    return None


@statement_lift
def lift_expert_loop(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Replaces the loop over experts, and drops the statements that only prepare it."""
    if not is_experts(scope.own) or scope.method != "forward":
        return None
    text = ast.unparse(item)
    if isinstance(item, ast.For) and "torch.where(expert_mask[" in text:
        return ExpertLoop(scope, item).lines()
    if isinstance(item, ast.Assign) and re.match(r"expert_(mask|hit)\b", text):
        return []
    assert scope.own.forward is not None
    returned = _returned(scope.own.forward)
    if isinstance(item, ast.Assign) and dotted(item.targets[0]) == returned:
        if "torch.zeros" in text:
            return []
    return None


def _returned(function: ast.FunctionDef) -> str:
    last = function.body[-1]
    return dotted(last.value) if isinstance(last, ast.Return) else ""


class ExpertLoop:
    """Translates the loop over experts.

    The body of the loop selects the tokens of one expert, computes the outputs of the expert,
    multiplies them by the weights of the router, and adds them to the result.

    Args:
        scope: The method that contains the loop.
        loop: The loop.
    """

    def __init__(self, scope: Scope, loop: ast.For):
        self.scope, self.loop = scope, loop
        self.index = dotted(loop.target)
        self.rows, self.tokens, self.choice = "", "", ""
        # For each parameter, whether the port must swap its last two axes.
        self.kernels: dict[str, bool] = {}

    def lines(self) -> list[ast.stmt]:
        """Returns the statements that call `nn.mix_experts` and define its function argument."""
        assert self.scope.own.forward is not None
        inputs, choices, weights = self._inputs()
        body: list[ast.stmt] = []
        for item in self.loop.body:
            body += self._line(item, inputs, weights)
        if not body or not isinstance(body[-1], ast.Return) or not self.rows:
            self.scope.report(self.loop, "a loop over experts in an unsupported form")
            return []
        function = statement(f"def apply_experts({self.rows}, rows): pass")
        assert isinstance(function, ast.FunctionDef)
        function.body = return_directly(body)
        kernel_lines = [
            statement(
                f"{name} = self.{name}{'.swapaxes(1, 2)' if transposed else ''}"
                f".astype({inputs}.dtype)"
            )
            for name, transposed in self.kernels.items()
        ]
        count = re.search(r"self\.(num_experts|num_local_experts)\b", self.scope.own.text)
        number = count[0] if count else f"self.{next(iter(self.kernels))}.shape[0]"
        mixed = call("nn.mix_experts", inputs, choices, weights, number, "apply_experts")
        target = _returned(self.scope.own.forward)
        return [
            *kernel_lines,
            function,
            ast.Assign([ast.Name(target, ast.Store())], mixed, lineno=0),
        ]

    def _inputs(self) -> tuple[str, str, str]:
        """Returns the variables with the hidden states, the expert indices and their weights."""
        assert self.scope.own.forward is not None
        names = parameters(self.scope.own.forward)
        text = self.scope.own.text
        choices = re.search(r"one_hot\(\s*(\w+)", text)
        weights = re.search(r"(\w+)\[\w+, \w+, None\]", text)
        if choices is None or weights is None:
            self.scope.report(self.loop, "a loop over experts in an unsupported form")
            return names[0], names[1], names[2]
        return names[0], choices[1], weights[1]

    def _line(self, item: ast.stmt, inputs: str, weights: str) -> list[ast.stmt]:
        text = ast.unparse(item)
        if text == f"{self.index} = {self.index}[0]":
            return []
        if isinstance(item, ast.If) and isinstance(item.body[0], ast.Continue):
            return []
        if match := re.fullmatch(
            rf"(\w+), (\w+) = torch\.where\(expert_mask\[{self.index}\]\)", text
        ):
            self.choice, self.tokens = match[1], match[2]
            return []
        if match := re.fullmatch(rf"(\w+) = {inputs}\[{self.tokens}\]", text):
            self.rows = match[1]
            return []
        if isinstance(item, ast.Expr) and "index_add_(" in text:
            node = item.value
            assert isinstance(node, ast.Call)
            value: Any = self._product(node.args[2])
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                if value.func.attr not in ("to", "type"):
                    break
                value = value.func.value
            return [ast.Return(value)]
        scale = rf"\* {weights}\[{self.tokens}, {self.choice}, None\]"
        if isinstance(item, ast.Assign) and re.search(scale, text):
            if not isinstance(item.value, ast.BinOp):
                self.scope.report(item, "router weights in an unsupported form")
                return []
            item.value = item.value.left
        if isinstance(item, ast.Assign) and dotted(item.targets[0]) == dotted(item.value) != "":
            return []
        return [self._product(item)]

    def _product(self, node: Any) -> Any:
        loop = self

        class Products(ast.NodeTransformer):
            def visit_Call(self, node: ast.Call) -> ast.AST:
                self.generic_visit(node)
                if dotted(node.func).endswith(("functional.linear", "F.linear")):
                    kernel = loop.kernel(argument(node, 1, "weight"))
                    bias = loop.kernel(argument(node, 2, "bias"))
                    if kernel:
                        loop.kernels[kernel] = True
                        return loop.product(node.args[0], kernel, bias)
                return node

            def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
                self.generic_visit(node)
                kernel = loop.kernel(node.right)
                if isinstance(node.op, ast.MatMult) and kernel:
                    loop.kernels[kernel] = False
                    return loop.product(node.left, kernel, "")
                left = node.left
                if isinstance(node.op, ast.Add) and kernel and isinstance(left, ast.Call):
                    if dotted(left.func) == "rows.product" and len(left.args) == 2:
                        loop.kernels[kernel] = False
                        left.args.append(expression(kernel))
                        return left
                return node

        result = Products().visit(node)
        if any(dotted(part) == self.index for part in ast.walk(result)):
            self.scope.report(self.loop, "parameters of experts in an unsupported form")
        return result

    def kernel(self, node: ast.AST | None) -> str:
        """Returns the name of the parameter in `self.name[expert]`, or `""`."""
        if isinstance(node, ast.Subscript) and dotted(node.slice) == self.index:
            return own_attribute(node.value)
        return ""

    def product(self, x: ast.expr, kernel: str, bias: str) -> ast.Call:
        """Returns the expression that multiplies each row by the kernel of its expert."""
        if bias:
            self.kernels[bias] = False
        return call("rows.product", x, kernel, *([bias] if bias else []))


def expert_parameters(owner: SourceClass) -> set[str]:
    """Returns the names of the parameters of a class that loops over experts."""
    constructor = owner.methods.get("__init__")
    if constructor is None or not is_experts(owner):
        return set()
    return {
        own_attribute(node.targets[0])
        for node in ast.walk(constructor)
        if isinstance(node, ast.Assign)
        and any(dotted(part.func).endswith("nn.Parameter") for part in calls(node))
    }
