"""Translates the stochastic depth of vision models."""

from __future__ import annotations

import ast

from hfseq.cli.port.scope import Substitute, class_lift
from hfseq.cli.port.source import SourceClass
from hfseq.cli.port.syntax import call, expression


@class_lift
def lift_inline_drop_path(translator: object, owner: SourceClass) -> Substitute | None:
    """Translates a class whose `forward` computes stochastic depth itself to `nn.DropPath`."""
    if owner.forward is None or not owner.name.endswith(("DropPath", "StochasticDepth")):
        return None
    text = ast.unparse(owner.forward)
    if "torch.rand(" not in text or ".div(keep_prob)" not in text:
        return None

    def construct(scope: object, node: ast.Call) -> ast.expr:
        values = [*node.args, *(word.value for word in node.keywords)]
        return call("nn.DropPath", values[0] if values else "0.0")

    def use(function: ast.expr, args: list[ast.expr], words: dict[str, ast.expr]) -> ast.expr:
        return ast.Call(function, [*args[:1], expression("rngs")], [])

    return Substitute(construct, use)
