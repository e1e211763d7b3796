"""Codebooks of keys, and the norm, in PyTorch.

Shapes use these symbols: B batch size, T tokens, Hk key heads, K width of keys, V width of values,
S number of codes, L block size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .configuration_vq_transformer import VQTransformerConfig


def rms_normalize(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales the last axis to a root mean square of 1, in float32."""
    values = values.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


class VQTransformerRMSNorm(nn.Module):
    """RMSNorm in float32 with optional scale and bias."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__()
        affine, width = config.norm_affine, config.hidden_size
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None
        self.eps = config.rms_norm_eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalizes hidden states, `(..., hidden)`."""
        normed = rms_normalize(hidden, self.eps)
        if self.weight is not None and self.bias is not None:
            normed = normed * self.weight.float() + self.bias.float()
        return normed.to(hidden.dtype)


class KeyStatistics(NamedTuple):
    """Statistics of the keys of a training step, in float32.

    Attributes:
        error: The sum of the squared quantization errors.
        sums: The sum of the keys of each code, `(Hk, S, K)`.
        counts: The number of keys of each code, `(Hk, S)`.
    """

    error: torch.Tensor
    sums: torch.Tensor
    counts: torch.Tensor


class VQTransformerCodebook(nn.Module):
    """Moving averages of the number and the sum of the keys of each code.

    They stay float32 when the model is cast to another dtype. `collected` contains the statistics
    of the forward passes since the last :meth:`update`. It is not a buffer, because
    DistributedDataParallel copies the buffers of one process to all others.
    """

    sums: torch.Tensor
    counts: torch.Tensor

    def __init__(self, config: VQTransformerConfig):
        super().__init__()
        shape = (config.key_heads, config.num_codes, config.head_dim)
        self.register_buffer("sums", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("counts", torch.ones(shape[:2], dtype=torch.float32))
        self.floor, self.block = config.count_floor, config.block_size
        self.collected: tuple[torch.Tensor, torch.Tensor] | None = None

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any
    ) -> VQTransformerCodebook:
        def convert(leaf: torch.Tensor) -> torch.Tensor:
            out = fn(leaf)
            if not out.is_floating_point() or out.dtype.itemsize >= 4:
                return out
            if leaf.is_meta or out.is_meta:
                return torch.empty_like(out, dtype=torch.float32)
            return leaf.to(out.device)

        return super()._apply(convert, *args, **kwargs)

    def rows(self) -> torch.Tensor:
        """Returns the codebook, `(Hk, S, K)`."""
        return self.sums / self.counts.clamp(min=self.floor)[..., None]

    @torch.no_grad()
    def nearest(self, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the codes of keys, which are the indices of the nearest codebook vectors.

        The nearest vector c of a key k has the largest `k.c - |c|^2 / 2`.

        Args:
            keys: Keys, `(B, Hk, T, K)`.
            rows: The codebook, `(Hk, S, K)`.

        Returns:
            Codes, `(B, Hk, T)`.
        """
        halves = 0.5 * rows.square().sum(-1)[:, None]
        parts = [(part @ rows.mT - halves).argmax(-1) for part in keys.split(self.block, 2)]
        return torch.cat(parts, 2)

    def collect(self, statistics: KeyStatistics) -> None:
        """Adds the statistics of a forward pass."""
        old = self.collected or (0.0, 0.0)
        self.collected = (old[0] + statistics.sums, old[1] + statistics.counts)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Updates the moving averages with the statistics of all processes."""
        if self.collected is None:
            return
        for buffer, new in zip((self.sums, self.counts), self.collected, strict=True):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(new)
            buffer.mul_(decay).add_(new, alpha=1 - decay)
        self.collected = None


def gather_rows(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Returns the codebook vectors, `(B, Hk, T, K)`, of codes, `(B, Hk, T)`."""
    heads = torch.arange(rows.shape[0], device=rows.device)
    return rows[heads[:, None], codes]


def sum_by_code(
    values: torch.Tensor, codes: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums values by code.

    Args:
        values: N groups of vectors with F features, `(N, T, F)`.
        codes: The code of each vector, `(N, T)`. Vectors with the code `size` are ignored.
        size: The number of codes S.

    Returns:
        Float32 sums, `(N, S, F)`, and integer counts, `(N, S)`.
    """
    groups, _, width = values.shape
    start = (size + 1) * torch.arange(groups, device=codes.device)
    flat = (codes + start[:, None]).reshape(-1)
    sums = values.new_zeros(groups * (size + 1), width, dtype=torch.float32)
    sums = sums.index_add(0, flat, values.reshape(-1, width).float())
    counts = torch.bincount(flat, minlength=groups * (size + 1))
    sums, counts = sums.view(groups, size + 1, width), counts.view(groups, size + 1)
    return sums[:, :size], counts[:, :size]


def merge(
    mean: torch.Tensor, count: torch.Tensor, values: torch.Tensor, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds values to the mean value and the count of each code.

    Args:
        mean: The mean value of each code, `(B, Hk, S, V)`.
        count: The number of values of each code, `(B, Hk, S)`.
        values: The values to add, `(B, Hk, L, V)`.
        codes: The codes of these values, `(B, Hk, L)`.

    Returns:
        The new means and counts.
    """
    sums, new = sum_by_code(values.flatten(0, 1), codes.flatten(0, 1), count.shape[-1])
    total = count + new.view(count.shape).int()
    divisor = total.clamp(min=1)
    return (count / divisor)[..., None] * mean + sums.view(mean.shape) / divisor[..., None], total
