"""Attention over quantised keys in linear time (Lingle, 2024, Transformer-VQ), in PyTorch.

Shapes: B rows, T tokens, Hk key heads with G query heads each, K the width of queries and keys, V
of values, S codes, M the window, L the tokens of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .codebook_vq_transformer import (
    Tally,
    VQTransformerCodebook,
    VQTransformerRMSNorm,
    by_code,
    merge,
    pick,
    unit,
)
from .configuration_vq_transformer import VQTransformerConfig
from .state_vq_transformer import AttentionState, as_ring, empty, in_order, take

LOWEST = -1e30

#: Queries (B, Hk, G, T, K) with the offset of contents, and with that of positions.
Queries = tuple[torch.Tensor, torch.Tensor]


class Tokens(NamedTuple):
    """Which tokens (B, T) are there, and which count for the codebook; None where all do."""

    there: torch.Tensor | None = None
    counted: torch.Tensor | None = None


def sinusoids(positions: torch.Tensor, width: int, base: float) -> torch.Tensor:
    """Return (..., width): the sines of all frequencies, then their cosines, float32."""
    steps = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * base ** (-2.0 * steps / width)
    return torch.cat([angles.sin(), angles.cos()], -1)


def advance(
    kept: AttentionState, length: int, codes: int, read: torch.Tensor | None
) -> AttentionState:
    """Let the oldest tokens of window and block leave for the cache.

    ``kept`` holds M + L tokens, of which ``read`` (B,) of the last L are there (None: all).
    """
    leaving, window = kept.window_code[:, :, :length], kept.window_code.shape[2] - length
    if read is None:
        near = [leaf[:, :, length:] for leaf in kept[:3]]
    else:
        index = torch.arange(max(window, length), device=read.device)
        leaving = leaving.masked_fill((index[:length] >= read[:, None])[:, None], codes)
        near = [take(leaf, read[:, None] + index[:window]) for leaf in kept[:3]]
    mean, count = kept.cache_mean, kept.cache_count
    mean, count = merge(mean, count, kept.window_value[:, :, :length], leaving)
    return AttentionState(near[0], near[1], near[2], mean, count)


def attend(
    query: Queries,
    near: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    relative: torch.Tensor,
    far: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Attend from a block to the keys up to it, and to older ones by code, in one softmax.

    **Arguments:** ``query`` (B, Hk, G, L, K), with the offsets for contents and for positions;
    ``near`` keys (B, Hk, N, K), values and which are there (B, N), the block being the last L;
    ``relative`` (R + 1, Hk, K) for distances R to 0, R >= N - L; ``far`` codebook, means and
    counts; without them no key is seen from further than R.

    **Returns:** (B, Hk, G, L, V).
    """
    (content, position), (keys, values, there) = query, near
    length, total, reach = content.shape[-2], keys.shape[2], relative.shape[0] - 1
    scores = torch.einsum("bhglk,bhnk->bhgln", content, keys)
    places = torch.einsum("bhglk,dhk->bhgld", position, relative)
    # Row l moves l to the right, by reading rows that are one too long.
    wide = F.pad(places, (0, length)).flatten(-2)[..., : length * (reach + length)]
    scores = scores + wide.unflatten(-1, (length, reach + length))[..., -total:]
    index = torch.arange(total, device=keys.device)
    distance = index[-length:, None] - index
    seen = (distance >= 0) & (distance <= reach) if far is None else distance >= 0
    scores = scores.masked_fill(~(seen & there[:, None])[:, None, None], LOWEST)
    if far is not None:
        rows, mean, count = far
        old = torch.einsum("bhglk,hsk->bhgls", content, rows)
        old = old + count.clamp(min=1).log()[:, :, None, None]
        old = old.masked_fill((count == 0)[:, :, None, None], LOWEST)
        scores = torch.cat([scores, old], -1)
        values = torch.cat([values, mean.to(values.dtype)], 2)
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    return (weights @ values).unflatten(2, scores.shape[2:4])


class VQTransformerAttention(nn.Module):
    """One attention with its norm and projections; returns what is added to the stream."""

    def __init__(self, config: VQTransformerConfig):
        super().__init__()
        self.config, width = config, config.hidden_size
        queries, keys = config.query_heads, config.key_heads
        self.input_norm = VQTransformerRMSNorm(config)
        self.q_proj = nn.Linear(width, queries * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, keys * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, keys * config.value_width, bias=False)
        if config.gated:
            self.g_proj = nn.Linear(width, queries * config.value_width, bias=False)
        self.r_proj = nn.Linear(width, keys * config.head_dim, bias=False)
        self.o_proj = nn.Linear(queries * config.value_width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(queries * config.head_dim))
        self.position_bias = nn.Parameter(torch.zeros(queries * config.head_dim))
        self.codebook = VQTransformerCodebook(config)
        self.scale = config.head_dim**-0.25

    def forward(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        tokens: Tokens,
        state: AttentionState | None,
    ) -> tuple[torch.Tensor, AttentionState, Tally | None]:
        """Compute the block-wise form.

        **Arguments:** ``hidden`` (B, T, D), ``position`` (B,) the tokens before these, ``tokens``
        which of them are there and count, ``state`` of the tokens before.

        **Returns:** (B, T, D), the state after these tokens, and in training the codebook's tally.
        """
        query, key, value, gate = self.project(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            if state is None:
                state = empty(self.config, hidden.shape[0], hidden.device, value.dtype)
            rows = self.codebook.rows()
            code = self.codebook.nearest(key, rows)
            near = pick(rows, code)
            tally = self._tally(key, near, code, tokens.counted) if self.training else None
            if self.config.attention_type == "full":
                mixed = self._full(query, key, value, tokens.there)
            else:
                # In this order the value is the codebook's to the last bit.
                key = near + (key - key.detach())
                code = self._hide(code, tokens.there)
                new = (key, value, code)
                mixed, state = self._blocks(query, new, rows, tokens.there, position, state)
        return self.output(mixed, gate), state, tally

    def project(self, hidden: torch.Tensor) -> tuple[Any, ...]:
        """Return queries (with either offset), keys and values by heads, and the gate."""
        config, normed = self.config, self.input_norm(hidden)
        groups = (config.key_heads, config.query_heads // config.key_heads)
        query = self.q_proj(normed).unflatten(-1, (*groups, config.head_dim))
        query = (unit(query, config.rms_norm_eps) * self.scale).permute(0, 2, 3, 1, 4)
        offsets = [
            (bias.float() * self.scale).view(*groups, 1, config.head_dim)
            for bias in (self.content_bias, self.position_bias)
        ]
        key = self.k_proj(normed).unflatten(-1, (groups[0], config.head_dim))
        key = (unit(key, config.rms_norm_eps) * self.scale).transpose(1, 2)
        value = self.v_proj(normed)
        value = F.silu(value) if config.gated else value
        value = value.unflatten(-1, (groups[0], config.value_width)).transpose(1, 2)
        gate = F.silu(self.g_proj(normed)) if config.gated else None
        return (query + offsets[0], query + offsets[1]), key, value, gate

    def output(self, mixed: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Return what is added to the stream for values (B, Hk, G, T, V)."""
        mixed = mixed.permute(0, 3, 1, 2, 4).flatten(2)
        return self.o_proj(mixed if gate is None else mixed * gate)

    def relative(self, reach: int) -> torch.Tensor:
        """Return the rows (R + 1, Hk, K) of the distances R to 0."""
        config, weight = self.config, self.r_proj.weight
        waves = sinusoids(
            torch.arange(reach, -1, -1, device=weight.device),
            config.hidden_size,
            config.sinusoid_base,
        )
        waves = F.dropout(waves, config.sinusoid_dropout, self.training)
        rows = F.linear(waves.to(weight.dtype), weight).float() * self.scale
        return rows.unflatten(-1, (config.key_heads, config.head_dim))

    def _full(
        self, query: Queries, key: torch.Tensor, value: torch.Tensor, there: torch.Tensor | None
    ) -> torch.Tensor:
        rows = self.relative(key.shape[2] - 1)
        if there is None:
            there = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
        return attend(query, (key, value, there), rows, None)

    def _blocks(
        self,
        query: Queries,
        new: list[torch.Tensor],
        rows: torch.Tensor,
        there: torch.Tensor | None,
        position: torch.Tensor,
        state: AttentionState,
    ) -> tuple[torch.Tensor, AttentionState]:
        """Run the blocks one after the other; a token that is not ``there`` has the code S."""
        config, total = self.config, new[2].shape[2]
        relative, outputs = self.relative(config.window_size), []
        state = in_order(state, position)
        for start in range(0, total, config.block_size):
            block = slice(start, start + config.block_size)
            parts = (query[0][..., block, :], query[1][..., block, :])
            read = None if there is None else there[:, block].sum(1)
            mixed, state = self._block(
                parts, [leaf[:, :, block] for leaf in new], state, relative, rows, read
            )
            outputs.append(mixed)
        read = total if there is None else there.sum(1)
        return torch.cat(outputs, 3), as_ring(state, position + read)

    def _block(
        self,
        query: Queries,
        new: list[torch.Tensor],
        state: AttentionState,
        relative: torch.Tensor,
        rows: torch.Tensor,
        read: torch.Tensor | None,
    ) -> tuple[torch.Tensor, AttentionState]:
        """Compute one block after ``state``, whose window is in order."""
        config = self.config
        if config.stop_gradient_cache:
            state = AttentionState(*(leaf.detach() for leaf in state))
        near = [torch.cat(pair, 2) for pair in zip(state[:3], new, strict=True)]
        kept = AttentionState(near[0], near[1], near[2], state.cache_mean, state.cache_count)
        there = kept.window_code[:, 0] < config.num_codes
        far = (rows, kept.cache_mean, kept.cache_count) if config.use_compressive_cache else None
        mixed = attend(query, (kept.window_key, kept.window_value, there), relative, far)
        return mixed, advance(kept, new[0].shape[2], config.num_codes, read)

    def _hide(self, code: torch.Tensor, there: torch.Tensor | None) -> torch.Tensor:
        """Give tokens (B, T) that are not ``there`` the code S, which belongs to nothing."""
        return code if there is None else code.masked_fill(~there[:, None], self.config.num_codes)

    def _tally(
        self,
        key: torch.Tensor,
        near: torch.Tensor,
        code: torch.Tensor,
        counted: torch.Tensor | None,
    ) -> Tally:
        error, size = (key - near).square().sum(-1), self.config.num_codes
        error = error if counted is None else error * counted[:, None]
        code = self._hide(code, counted)
        heads = key.detach().transpose(0, 1).flatten(1, 2)
        sums, counts = by_code(heads, code.transpose(0, 1).flatten(1), size)
        return Tally(error.sum(), sums, counts.float())

    # -- one token
    # -----------------------------------------------------------------------------------

    def step(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        there: torch.Tensor | None,
        state: AttentionState,
        relative: torch.Tensor,
    ) -> torch.Tensor:
        """Compute one token (B, 1, D), without a gradient, and put it into ``state`` in place."""
        query, key, value, gate = self.project(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = self.codebook.rows()
            code = self.codebook.nearest(key, rows)
            key = pick(rows, code)
            mixed = self._look(query, key, value, position, state, relative, rows)
            self._store(key[:, :, 0], value[:, :, 0], code[:, :, 0], position, there, state)
        return self.output(mixed, gate)

    def _look(
        self,
        query: Queries,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor,
        state: AttentionState,
        relative: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to the ring, the token itself and the cache: (B, Hk, G, 1, V)."""
        content, place = query
        window = state.window_code.shape[-1]
        slots = torch.arange(window, device=position.device)
        # ``relative`` begins with distance M, and slots hold distances from 1 to M.
        order = window - 1 - (position[:, None] - 1 - slots) % window
        places = torch.einsum("bhglk,dhk->bhgld", place, relative)
        order = order.long()[:, None, None, None].expand(*places.shape[:-1], -1)
        near = content @ state.window_key[:, :, None].mT + places.gather(-1, order)
        empty_slots = state.window_code[:, 0] == self.config.num_codes
        near = near.masked_fill(empty_slots[:, None, None, None], LOWEST)
        own = (content * key[:, :, None]).sum(-1, keepdim=True) + places[..., -1:]
        far = torch.einsum("bhglk,hsk->bhgls", content, rows)
        count = state.cache_count if self.config.use_compressive_cache else 0 * state.cache_count
        far = (far + count.clamp(min=1).log()[:, :, None, None]).masked_fill(
            (count == 0)[:, :, None, None], LOWEST
        )
        weights = torch.cat([near, own, far], -1).softmax(-1).to(value.dtype)
        near, own, far = weights.split([window, 1, far.shape[-1]], -1)
        mixed = near @ state.window_value[:, :, None].to(value.dtype) + own * value[:, :, None]
        return mixed + far @ state.cache_mean[:, :, None].to(value.dtype)

    def _store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        code: torch.Tensor,
        position: torch.Tensor,
        there: torch.Tensor | None,
        state: AttentionState,
    ) -> None:
        """Let a token take the slot of the oldest one, which goes into the cache."""
        size, heads = self.config.num_codes, torch.arange(key.shape[1], device=key.device)
        batch = torch.arange(key.shape[0], device=key.device)[:, None]
        slot = (batch, heads, (position % state.window_code.shape[-1]).long()[:, None])
        there = batch >= 0 if there is None else there
        old_code, old_value = state.window_code[slot], state.window_value[slot]
        leaves = there & (old_code < size)
        place = (batch, heads, old_code.clamp(max=size - 1).long())
        count, mean = state.cache_count[place], state.cache_mean[place]
        total = count + leaves
        moved = (count * 1.0)[..., None] * mean + leaves[..., None] * old_value.float()
        state.cache_mean[place] = torch.where(
            leaves[..., None], moved / total.clamp(min=1)[..., None], mean
        )
        state.cache_count[place] = total.int()
        pairs = ((state.window_key, key), (state.window_value, value))
        for leaf, new in pairs:
            leaf[slot] = torch.where(there[..., None], new.to(leaf.dtype), leaf[slot])
        state.window_code[slot] = torch.where(there, code.int(), old_code)
