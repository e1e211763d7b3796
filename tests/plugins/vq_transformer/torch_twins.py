"""PyTorch versions of tiny VQ Transformers, with the parameters of the JAX models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hfseq.nn import trees
from hfseq_plugins.vq_transformer.torch_files import modeling_vq_transformer as modeling
from hfseq_plugins.vq_transformer.torch_files.configuration_vq_transformer import (
    VQTransformerConfig,
)
from tests.plugins.vq_transformer import vq_cases

NAMES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
torch.set_num_threads(1)


def to_state_dict(params: Any, extra: Any = None) -> dict[str, torch.Tensor]:
    """Converts a tree of parameters and codebooks to a PyTorch state dict."""
    tensors = {}
    for tree in (params, (extra or {}).get("codebook", {})):
        for path, leaf in trees.flatten(tree).items():
            if path[-1].startswith("new_"):
                continue
            leaf = np.asarray(leaf).T if path[-1] == "kernel" else np.asarray(leaf)
            name = ".".join((*path[:-1], NAMES.get(path[-1], path[-1])))
            tensors[name] = torch.from_numpy(np.array(leaf))
    return tensors


def make_torch_model(config: Any, params: Any, extra: Any, head: str = "ForCausalLM") -> Any:
    """Returns a PyTorch model in evaluation mode with these parameters."""
    torch_config = VQTransformerConfig.from_dict(config.to_dict())
    model = getattr(modeling, f"VQTransformer{head}")(torch_config).eval()
    state = to_state_dict(params, extra)
    if head == "ForCausalLM" and config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def model_pair(head: str = "shga", seed: int = 0, **changes: Any) -> tuple[Any, Any, Any, Any]:
    """Returns a JAX model, its parameters and collections, and the PyTorch model."""
    ours = vq_cases.model(head, **changes)
    params, extra = vq_cases.variables(ours, seed)
    return ours, params, extra, make_torch_model(ours.config, params, extra)


def tiny_model(head: str = "shga", seed: int = 0, **changes: Any) -> Any:
    """Returns a PyTorch model with random parameters."""
    return model_pair(head, seed, **changes)[3]


def ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(vq_cases.ids(rows, length, seed)).long()


def run_in_steps(model: Any, tokens: torch.Tensor, length: int = 1) -> tuple[torch.Tensor, Any]:
    """Returns logits and state after calls with `length` tokens each."""
    state, parts = None, []
    with torch.no_grad():
        for part in tokens.split(length, 1):
            output = model(part, past_key_values=state, use_cache=True)
            state = output.past_key_values
            parts.append(output.logits)
    return torch.cat(parts, 1), state


def leaves(state: Any) -> list[torch.Tensor]:
    """Returns all tensors of a state."""
    return [leaf for attention in state.attentions for leaf in attention] + [state.position]


def max_difference(ours: Any, theirs: Any) -> float:
    ours, theirs = (x.detach().numpy() if torch.is_tensor(x) else x for x in (ours, theirs))
    return vq_cases.max_difference(ours, theirs)


def gradients(model: Any) -> Mapping[str, np.ndarray]:
    return {name: leaf.grad.numpy() for name, leaf in model.named_parameters()}
