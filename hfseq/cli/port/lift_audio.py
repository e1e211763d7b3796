"""Translates weight normalization and the masks of SpecAugment in audio models."""

from __future__ import annotations

import ast
import re

from hfseq.cli.port.scope import Scope, statement_lift
from hfseq.cli.port.syntax import call, dotted, keyword

WEIGHT_NORM = re.compile(r"(torch\.)?(nn\.utils\.(parametrizations\.)?)?weight_norm")


@statement_lift
def lift_random_masks(scope: Scope, item: ast.stmt) -> list[ast.stmt] | None:
    """Drops the branches that draw SpecAugment masks, because hfseq passes them as inputs."""
    if not isinstance(item, ast.If) or "_compute_mask_indices(" not in ast.unparse(item):
        return None
    if any("_compute_mask_indices(" in ast.unparse(line) for line in item.body):
        return item.orelse
    others = [new for line in item.orelse for new in lift_random_masks(scope, line) or ()]
    item.orelse = others
    return [item]


def weight_norm_statement(item: ast.stmt) -> list[ast.stmt] | None:
    """Simplifies the statements of a constructor that apply weight normalization.

    Returns:
        The statements without the branches for other versions of PyTorch and for DeepSpeed, or
        `None` if the statement does not choose between such branches.
    """
    text = ast.unparse(item)
    if re.fullmatch(r"weight_norm = nn\.utils\.weight_norm", text) or text.startswith(
        "if hasattr(nn.utils.parametrizations, 'weight_norm')"
    ):
        return []
    if isinstance(item, ast.If) and "deepspeed" in text and "weight_norm(" in text:
        return item.orelse
    return None


def weight_norm_call(node: ast.Call) -> ast.Call | None:
    """Returns `nn.WeightNormConv(layer, axis)` for a call of `weight_norm`, or `None`."""
    if not WEIGHT_NORM.fullmatch(dotted(node.func)) or not node.args:
        return None
    name = node.args[1] if len(node.args) > 1 else keyword(node, "name")
    if name is not None and ast.unparse(name) != "'weight'":
        return None
    axis = node.args[2] if len(node.args) > 2 else keyword(node, "dim")
    return call("nn.WeightNormConv", node.args[0], *([] if axis is None else [axis]))
