"""The bridge: runs any architecture of Transformers in JAX, with the code of its PyTorch class.

This module does not import PyTorch. The hook is called only for models that are loaded with
``bridge=True``, ``bridge="auto"`` or ``--bridge``.
"""

from __future__ import annotations

from typing import Any

from hfseq import hookimpl


@hookimpl
def fallback_architecture(model_type: str, task: str) -> dict[str, Any]:
    """Returns the bridged architecture of a model type of Transformers."""
    from hfseq_plugins.bridge.heads import describe_architecture

    return describe_architecture(model_type, task)
