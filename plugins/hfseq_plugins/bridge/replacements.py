"""Replacements for layers of Transformers whose Python code depends on the values of tensors.

jax cannot trace such code. It occurs in mixtures of experts that do not use Transformers' registry,
because they loop over the experts that the tokens of a batch select. The replacements compute all
experts with `hfseq.nn.mix_experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfseq import nn
from hfseq_plugins.bridge.tensor import as_arrays, from_array

#: A replacement for the forward pass of a module. Its first argument is the module.
Forward = Callable[..., Any]


def _kernels(experts: Any, names: tuple[str, str]) -> list[tuple[jax.Array, jax.Array | None]]:
    """Stacks the parameters of all experts.

    Args:
        experts: The PyTorch module with the experts.
        names: The names of the two linear layers of each expert.

    Returns:
        For each of the two layers, the kernels, `(experts, inputs, outputs)`, and the biases,
        `(experts, outputs)`, or `None`.
    """
    stacks: list[tuple[jax.Array, jax.Array | None]] = []
    for name in names:
        layers = [getattr(experts[f"expert_{i}"], name) for i in range(experts.num_experts)]
        kernel = jnp.stack([as_arrays(layer.weight).T for layer in layers])
        has_bias = layers[0].bias is not None
        bias = jnp.stack([as_arrays(layer.bias) for layer in layers]) if has_bias else None
        stacks.append((kernel, bias))
    return stacks


def _dense_experts(
    experts: Any,
    names: tuple[str, str],
    x: jax.Array,
    index: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Computes a mixture of experts, each of which has two linear layers.

    Args:
        experts: The PyTorch module with the experts.
        names: The names of the two linear layers.
        x: The inputs, `(tokens, features)`.
        index: Numbers of the experts of each token.
        weights: The weight of each of these experts in the output.
    """
    up, down = _kernels(experts, names)
    first = experts["expert_0"]

    def compute(rows: jax.Array, layout: nn.ExpertRows) -> jax.Array:
        inner = first.dropout(first.act(from_array(layout.product(rows, *up))))
        return layout.product(as_arrays(inner), *down)

    return nn.mix_experts(x, index, weights, experts.num_experts, compute)


def switch_experts(
    self: Any, hidden_states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Computes `SwitchTransformersExperts`.

    In this model, a token has no expert if its expert has reached its capacity.
    """
    x, chosen, weight = as_arrays((hidden_states, selected, weights))
    has_expert = chosen.sum(-1) > 0
    index = jnp.where(has_expert, chosen.argmax(-1), self.num_experts)
    return from_array(_dense_experts(self, ("wi", "wo"), x, index, weight))


def nllb_experts(
    self: Any, hidden_states: torch.Tensor, router_mask: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """Computes `NllbMoeExperts`, whose argument `router_mask` contains the numbers of experts."""
    x, index, weights = as_arrays((hidden_states, router_mask, probabilities))
    outputs = from_array(_dense_experts(self, ("fc1", "fc2"), x, index, weights))
    if self.moe_token_dropout > 0:
        if self.training:
            return self.token_dropout(outputs)
        return outputs * (1 - self.moe_token_dropout)
    return outputs


def longcat_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Computes `LongcatFlashExperts`.

    Experts whose number is at least `num_routed_experts` have no weights and return their input.
    """
    x, index, weights = as_arrays((hidden_states, top_k_index, top_k_weights))
    kernel, down = as_arrays(self.gate_up_proj).swapaxes(1, 2), as_arrays(self.down_proj)
    count = self.num_routed_experts

    def compute(rows: jax.Array, layout: nn.ExpertRows) -> jax.Array:
        gate, up = jnp.split(layout.product(rows, kernel[:count]), 2, -1)
        inner = as_arrays(self.act_fn(from_array(gate))) * up
        return layout.product(inner, down.swapaxes(1, 2))

    routed = nn.mix_experts(x, index, weights, count, compute)
    unchanged = jnp.where(index >= count, weights, 0).sum(-1, keepdims=True)
    return from_array((routed + unchanged * x).astype(x.dtype))


def dbrx_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Computes `DbrxExperts`, which stores the kernels of all experts in one matrix."""
    x, index, weights = as_arrays((hidden_states, top_k_index, top_k_weights))
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    gate, up, down = (
        as_arrays(getattr(self.mlp, name)).reshape(shape) for name in ("w1", "v1", "w2")
    )

    def compute(rows: jax.Array, layout: nn.ExpertRows) -> jax.Array:
        inner = self.mlp.activation_fn(from_array(layout.product(rows, gate.swapaxes(1, 2))))
        inner = as_arrays(inner) * layout.product(rows, up.swapaxes(1, 2))
        return layout.product(inner, down)

    rows = x.reshape(-1, self.hidden_size)
    outputs = nn.mix_experts(rows, index, weights, self.num_experts, compute)
    return from_array(outputs.reshape(x.shape[0], -1, self.hidden_size))


def jetmoe_experts(self: Any, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
    """Computes `JetMoeParallelExperts`, which receives tokens that are sorted by expert."""
    rows, kernel, sizes = as_arrays((inputs, self.weight, expert_size))
    layout = nn.ExpertRows(rows, sizes=sizes.astype(jnp.int32))
    return from_array(layout.product(rows, kernel.swapaxes(1, 2)))


#: The replacement for the forward pass of each of these classes of Transformers.
FORWARDS: dict[str, Forward] = {
    "SwitchTransformersExperts": switch_experts,
    "NllbMoeExperts": nllb_experts,
    "LongcatFlashExperts": longcat_experts,
    "DbrxExperts": dbrx_experts,
    "JetMoeParallelExperts": jetmoe_experts,
}
