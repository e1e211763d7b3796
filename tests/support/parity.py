"""Compares models of hfseq with PyTorch: outputs, gradients, hidden states, tokens and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hfseq.nn import trees
from hfseq.testing import case
from tests.support.models import close, ids
from tests.support.torch_counterparts import tensors, torch_counterpart


def compare(
    cls: Any,
    folder: Path,
    inputs: dict[str, np.ndarray],
    ours: Any = None,
    output_mask: np.ndarray | float = 1.0,
    unused: int = 0,
) -> Any:
    """Asserts that the outputs and gradients are equal to those of the PyTorch model.

    Args:
        cls: The model class of hfseq.
        folder: The folder of the checkpoint.
        inputs: The inputs of both models.
        ours: The model of hfseq. By default, the checkpoint is loaded.
        output_mask: A factor for the outputs. It is 0 at positions that are not compared, such as
            padding, and 1 at all others.
        unused: Number of parameters that do not have a gradient in PyTorch.

    Returns:
        The model of hfseq.
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
    # Sinusoidal position embeddings are constants in hfseq. In Transformers, they have gradients if
    # the model was loaded from a checkpoint.
    tables = (n for n, part in theirs.named_modules() if "Sinusoidal" in type(part).__name__)
    for name in tables:
        graded.pop(f"{name}.weight", None)
    assert graded.keys() <= gradients.keys() and len(graded) >= len(gradients) - unused
    assert [n for n, g in graded.items() if not close(gradients[n], g)] == []
    return ours


def compare_states(model: Any, folder: Path) -> None:
    """Asserts that hidden states and attentions are the same as in PyTorch, in the same order."""
    theirs = torch_counterpart(model, folder)
    theirs.set_attn_implementation("eager")
    flags = {"output_hidden_states": True, "output_attentions": True}
    output, expected = model(ids(), **flags), theirs(**tensors(input_ids=ids()), **flags)
    layers = model.config.num_hidden_layers
    for name, count in (("hidden_states", layers + 1), ("attentions", layers)):
        assert len(output[name]) == len(expected[name]) == count
        pairs = zip(output[name], expected[name], strict=True)
        assert all(close(a, b.detach()) for a, b in pairs)


def compare_tokens(
    model: Any, theirs: Any, input_ids: np.ndarray, mask: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """Asserts that both models generate the same tokens, and returns them.

    Args:
        model: The model of hfseq.
        theirs: The PyTorch model.
        input_ids: Prompts, or the inputs of the encoder.
        mask: Attention mask.
        **options: Further arguments of ``generate``.
    """
    inputs = {"input_ids": input_ids} | ({} if mask is None else {"attention_mask": mask})
    sequences = np.asarray(model.generate(**inputs, **options).sequences)
    expected = theirs.generate(**tensors(**inputs), **options)
    assert sequences[:, : expected.shape[1]].tolist() == expected.tolist()
    return sequences


def compare_files(cls: Any, config: Any, folder: Path) -> tuple[Any, Any]:
    """Asserts that hfseq loads the file of a PyTorch model and saves the same tensors.

    The PyTorch model is created from ``config`` with random weights.

    Returns:
        The model of hfseq and the PyTorch model.
    """
    import transformers
    from safetensors.numpy import load_file

    theirs = getattr(transformers, cls.torch_class_name())(config).eval()
    theirs.save_pretrained(folder / "theirs")
    model = cls.from_pretrained(folder / "theirs")
    model.save_pretrained(folder / "ours")
    expected, saved = (
        load_file(folder / name / "model.safetensors") for name in ("theirs", "ours")
    )
    assert expected.keys() == saved.keys()
    assert all(np.array_equal(expected[name], saved[name]) for name in expected)
    return model, theirs
