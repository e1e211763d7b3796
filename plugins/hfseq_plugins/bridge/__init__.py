"""The bridge: runs the PyTorch classes of Transformers in JAX, with their own Python code.

This module does not import PyTorch. hfseq calls the hook `fallback_architecture` only for models
that are loaded with ``bridge=True``, ``bridge="auto"`` or ``--bridge``.
"""

from __future__ import annotations

from typing import Any

from hfseq import hookimpl


@hookimpl
def fallback_architecture(model_type: str, task: str) -> dict[str, Any]:
    """Describes how the bridge runs a model type of Transformers."""
    from hfseq_plugins.bridge.heads import describe_architecture

    return describe_architecture(model_type, task)
