"""Translates the stochastic depth of vision models."""

from __future__ import annotations

import ast

from hfseq.cli.port.lifting import DROP_PATH
from hfseq.cli.port.scope import Substitute, class_lift
from hfseq.cli.port.source import SourceClass


@class_lift
def lift_inline_drop_path(translator: object, owner: SourceClass) -> Substitute | None:
    """Translates a class whose `forward` computes stochastic depth itself to `nn.DropPath`."""
    if owner.forward is None or not owner.name.endswith(("DropPath", "StochasticDepth")):
        return None
    text = ast.unparse(owner.forward)
    if "torch.rand(" not in text or ".div(keep_prob)" not in text:
        return None
    return DROP_PATH
