"""Conversion of models and arrays to PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def torch_counterpart(model: Any, folder: Path, class_name: str | None = None) -> Any:
    """Saves ``model`` and loads it with the PyTorch class of the same name."""
    pytest.importorskip("torch")
    import transformers

    model.save_pretrained(folder)
    return (
        getattr(transformers, class_name or model.torch_class_name()).from_pretrained(folder).eval()
    )


def tensors(**arrays: Any) -> dict[str, Any]:
    """Converts arrays to tensors, and integers to int64."""
    import torch

    converted = {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}
    return {n: v if v.is_floating_point() else v.long() for n, v in converted.items()}
