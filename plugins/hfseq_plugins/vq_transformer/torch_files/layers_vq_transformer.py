"""Layers of the VQ Transformer in PyTorch, and the order of tokens and padding.

Shapes use these symbols: B batch size, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_vq_transformer import TokenMasks, VQTransformerAttention
from .codebook_vq_transformer import KeyStatistics, VQTransformerRMSNorm
from .configuration_vq_transformer import VQTransformerConfig
from .state_vq_transformer import AttentionState


class TokenOrder(NamedTuple):
    """An order of the columns of each row in which all tokens precede the padding.

    Attributes:
        lengths: The number of tokens of each row, `(B,)`.
        order: The columns of the tokens, followed by the columns of padding, `(B, T)`.
        back: The position in `order` of each column, `(B, T)`. A column of padding has the position
            of the token before it.
    """

    lengths: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor


def gather_tokens(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Selects the tokens `indices`, `(B, T)`, of `values`, `(B, T, D)`."""
    return values.gather(1, indices[..., None].expand(-1, -1, values.shape[-1]))


def find_token_order(
    mask: torch.Tensor | None, hidden: torch.Tensor, columns: int
) -> TokenOrder | None:
    """Returns the order in which tokens precede padding, or `None` without padding.

    Args:
        mask: Attention mask, `(B, T)`, or `(B, columns + T)` with the columns of earlier calls.
        hidden: Hidden states, `(B, T, D)`.
        columns: The number of columns of earlier calls.
    """
    if mask is None:
        return None
    batch, length = hidden.shape[:2]
    if tuple(mask.shape) not in {(batch, length), (batch, columns + length)}:
        past = f" or ({batch}, {columns + length}) with all earlier columns" if columns else ""
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} instead of ({batch}, {length}){past}"
        )
    mask = mask[:, -length:] != 0
    if mask.all():
        return None
    order = torch.argsort((~mask).byte(), dim=1, stable=True)
    return TokenOrder(mask.sum(1), order, (mask.long().cumsum(1) - 1).clamp(min=0))


def token_masks(rows: TokenOrder | None, code_mask: torch.Tensor | None) -> TokenMasks:
    """Returns the token masks after the tokens have been moved before the padding."""
    counted = None if code_mask is None else code_mask != 0
    if rows is None:
        return TokenMasks(None, counted)
    index = torch.arange(rows.order.shape[1], device=rows.order.device)
    valid = index < rows.lengths[:, None]
    return TokenMasks(valid, valid if counted is None else valid & counted.gather(1, rows.order))


class VQTransformerMLP(nn.Module):
    """Feed-forward block: norm, projection, squared ReLU and projection."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__()
        self.input_norm = VQTransformerRMSNorm(config)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_width, bias=False)
        self.down_proj = nn.Linear(config.inner_width, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies norm and MLP to hidden states, `(B, T, D)`, without residual connection."""
        return self.down_proj(F.relu(self.up_proj(self.input_norm(hidden))).square())


class VQTransformerLayer(GradientCheckpointingLayer):
    """Two attention blocks if heads are gated, otherwise an attention block and an MLP."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__()
        self.config = config
        self.attention = VQTransformerAttention(config)
        if config.gated:
            self.attention_2 = VQTransformerAttention(config)
        else:
            self.mlp = VQTransformerMLP(config)

    @property
    def attentions(self) -> list[VQTransformerAttention]:
        """The attention modules in order."""
        return [self.attention, *([self.attention_2] if self.config.gated else [])]

    def forward(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: TokenMasks,
        states: list[AttentionState] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[AttentionState], list[KeyStatistics | None]]:
        """Returns hidden states, the sum of quantization errors, new states and statistics."""
        new_states, all_statistics = [], []
        for number, attention in enumerate(self.attentions):
            old = None if states is None else states[number]
            residual, state, statistics = attention(hidden, position, tokens, old)
            dropped = F.dropout(residual, self.config.residual_dropout, self.training)
            hidden = hidden + self.drop(dropped)
            new_states.append(state)
            all_statistics.append(statistics)
        if not self.config.gated:
            hidden = hidden + self.drop(self.mlp(hidden))
        errors = [statistics.error for statistics in all_statistics if statistics is not None]
        return (
            hidden,
            sum(errors, hidden.new_zeros((), dtype=torch.float32)),
            new_states,
            all_statistics,
        )

    def step(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        valid: torch.Tensor | None,
        states: list[Any],
        rows: list[Any],
    ) -> torch.Tensor:
        """Computes the output of one token per row, `(B, 1, D)`, and updates `states` in place."""
        for attention, state, relative in zip(self.attentions, states, rows, strict=True):
            hidden = hidden + attention.step(hidden, position, valid, state, relative)
        return hidden if self.config.gated else hidden + self.mlp(hidden)

    def drop(self, residual: torch.Tensor) -> torch.Tensor:
        """Drops a block for some rows of the batch (LayerDrop)."""
        rate = self.config.layer_dropout
        if not self.training or rate == 0:
            return residual
        return residual * F.dropout(residual.new_ones(residual.shape[0], 1, 1), rate)
