"""Comparison with PyTorch on a checkpoint: outputs, and the gradient of every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hfseq.nn import trees
from hfseq.testing import case
from tests.support.models import close


def compare(
    cls: Any,
    folder: Path,
    inputs: dict[str, np.ndarray],
    ours: Any = None,
    output_mask: np.ndarray | float = 1.0,
    unused: int = 0,
) -> Any:
    """Asserts that outputs and gradients equal PyTorch's, and returns hfseq's model.

    Args:
        cls: hfseq's model class.
        folder: The checkpoint.
        inputs: Inputs of the models.
        ours: hfseq's model. The default is the one in ``folder``.
        output_mask: 0 where outputs are not compared (padding).
        unused: Number of parameters without a gradient.
    """
    import jax
    import jax.numpy as jnp
    import torch
    import transformers

    theirs = getattr(transformers, cls.torch_class_name())
    theirs = theirs.from_pretrained(folder, attn_implementation="eager").eval()
    ours = cls.from_pretrained(folder) if ours is None else ours
    expected = theirs(**{name: torch.from_numpy(value).long() for name, value in inputs.items()})
    name = "logits" if "logits" in expected else "last_hidden_state"
    weights = np.random.default_rng(0).normal(size=expected[name].shape) * output_mask
    weights = (weights / np.sqrt(weights.size)).astype(np.float32)

    def loss(params: Any) -> Any:
        output = ours(**inputs, params=params)[name]
        return jnp.sum(output * weights), output

    gradient, output = case.jit(jax.grad(loss, has_aux=True))(ours.params)
    assert close(np.asarray(output) * output_mask, expected[name].detach().numpy() * output_mask)
    (expected[name] * torch.from_numpy(weights)).sum().backward()
    gradients = ours.weight_map.to_torch(trees.flatten(jax.tree.map(np.asarray, gradient)))
    graded = {n: p.grad.numpy() for n, p in theirs.named_parameters() if p.grad is not None}
    # Sinusoidal tables are constants in hfseq. Transformers trains those of loaded models.
    tables = (n for n, part in theirs.named_modules() if "Sinusoidal" in type(part).__name__)
    for name in tables:
        graded.pop(f"{name}.weight", None)
    assert graded.keys() <= gradients.keys() and len(graded) >= len(gradients) - unused
    assert [n for n, g in graded.items() if not close(gradients[n], g)] == []
    return ours
