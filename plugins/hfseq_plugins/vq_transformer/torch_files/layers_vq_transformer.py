"""Layers of the VQ Transformer in PyTorch, and how rows are freed of their padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_vq_transformer import Tokens, VQTransformerAttention
from .codebook_vq_transformer import Tally, VQTransformerRMSNorm
from .configuration_vq_transformer import VQTransformerConfig
from .state_vq_transformer import AttentionState


class Rows(NamedTuple):
    """How tokens are moved so that each row begins with its own.

    ``lengths`` (B,), ``order`` (B, T) with the tokens first, ``back`` (B, T) their way back: the
    place of padding is that of the token before it.
    """

    lengths: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor


def move(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Pick ``places`` (B, T) of (B, T, D)."""
    return values.gather(1, places[..., None].expand(-1, -1, values.shape[-1]))


def find_rows(mask: torch.Tensor | None, hidden: torch.Tensor, columns: int) -> Rows | None:
    """Return how to move the tokens to the left of their rows; None if nothing is hidden.

    ``mask`` (B, T), or (B, columns + T) with the columns of earlier calls.
    """
    if mask is None:
        return None
    batch, length = hidden.shape[:2]
    if tuple(mask.shape) not in {(batch, length), (batch, columns + length)}:
        past = f" or ({batch}, {columns + length}) with what was read before" if columns else ""
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)} and has to be ({batch}, {length}){past}"
        )
    mask = mask[:, -length:] != 0
    if mask.all():
        return None
    order = torch.argsort((~mask).byte(), dim=1, stable=True)
    return Rows(mask.sum(1), order, (mask.long().cumsum(1) - 1).clamp(min=0))


def name_tokens(rows: Rows | None, code_mask: torch.Tensor | None) -> Tokens:
    """Say which tokens are there once moved, and which of them count for codebooks."""
    counted = None if code_mask is None else code_mask != 0
    if rows is None:
        return Tokens(None, counted)
    index = torch.arange(rows.order.shape[1], device=rows.order.device)
    there = index < rows.lengths[:, None]
    return Tokens(there, there if counted is None else there & counted.gather(1, rows.order))


class VQTransformerMLP(nn.Module):
    """Norm, projection, squared ReLU, projection."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__()
        self.input_norm = VQTransformerRMSNorm(config)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_width, bias=False)
        self.down_proj = nn.Linear(config.inner_width, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(self.input_norm(hidden))).square())


class VQTransformerLayer(GradientCheckpointingLayer):
    """Two attentions (gated head types), or an attention and an MLP."""

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
        """The attentions in order."""
        return [self.attention, *([self.attention_2] if self.config.gated else [])]

    def forward(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: Tokens,
        states: list[AttentionState] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[AttentionState], list[Tally | None]]:
        """Return the stream, the squared distances of its keys, new states and tallies."""
        found, tallies = [], []
        for number, attention in enumerate(self.attentions):
            old = None if states is None else states[number]
            residual, state, tally = attention(hidden, position, tokens, old)
            dropped = F.dropout(residual, self.config.residual_dropout, self.training)
            hidden = hidden + self.drop(dropped)
            found.append(state)
            tallies.append(tally)
        if not self.config.gated:
            hidden = hidden + self.drop(self.mlp(hidden))
        errors = [tally.error for tally in tallies if tally is not None]
        return hidden, sum(errors, hidden.new_zeros((), dtype=torch.float32)), found, tallies

    def step(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        there: torch.Tensor | None,
        states: list[Any],
        rows: list[Any],
    ) -> torch.Tensor:
        """Compute one token, which goes into ``states`` in place."""
        for attention, state, relative in zip(self.attentions, states, rows, strict=True):
            hidden = hidden + attention.step(hidden, position, there, state, relative)
        return hidden if self.config.gated else hidden + self.mlp(hidden)

    def drop(self, residual: torch.Tensor) -> torch.Tensor:
        """Drop the whole sub-module for some rows of the batch (LayerDrop)."""
        rate = self.config.layer_dropout
        if not self.training or rate == 0:
            return residual
        return residual * F.dropout(residual.new_ones(residual.shape[0], 1, 1), rate)
