"""The PyTorch model of the same weights, and arrays as it takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def torch_counterpart(model: Any, folder: Path, class_name: str | None = None) -> Any:
    """Save ``model`` and load it with PyTorch's class of that name."""
    pytest.importorskip("torch")
    import transformers

    model.save_pretrained(folder)
    return (
        getattr(transformers, class_name or model.torch_class_name()).from_pretrained(folder).eval()
    )


def tensors(**arrays: Any) -> dict[str, Any]:
    """Floats as they are, whole numbers as PyTorch's embeddings want them."""
    import torch

    found = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
    return {n: v if v.is_floating_point() else v.long() for n, v in found.items()}
