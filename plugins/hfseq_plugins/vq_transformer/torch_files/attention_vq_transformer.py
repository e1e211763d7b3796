"""Attention over quantized keys in linear time (Lingle, 2024, Transformer-VQ), in PyTorch.

A key is quantized to the nearest vector of a codebook. Its code is the index of this vector. A
query attends individually to the keys of its block and of the window before the block. All older
keys with the same code are represented by the vector of the code, their number, and the mean of
their values, which are stored in a cache.

Shapes use these symbols: B batch size, T tokens, Hk key heads, G query heads per key head, K width
of queries and keys, V width of values, S number of codes, M window size, L block size, D hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .codebook_vq_transformer import (
    KeyStatistics,
    VQTransformerCodebook,
    VQTransformerRMSNorm,
    gather_rows,
    merge,
    rms_normalize,
    sum_by_code,
)
from .configuration_vq_transformer import VQTransformerConfig
from .state_vq_transformer import AttentionState, empty_state, take, window_in_order, window_to_ring

MASKED_SCORE = -1e30

#: Queries for content scores and queries for position scores, each `(B, Hk, G, T, K)`. They are the
#: same queries plus two different biases, as in Transformer-XL.
Queries = tuple[torch.Tensor, torch.Tensor]


class TokenMasks(NamedTuple):
    """Token masks.

    Attributes:
        valid: False for padding, `(B, T)`. `None` without padding.
        counted: Whether each token is included in the statistics of the codebook, `(B, T)`. `None`
            includes all tokens.
    """

    valid: torch.Tensor | None = None
    counted: torch.Tensor | None = None


def sinusoids(positions: torch.Tensor, width: int, base: float) -> torch.Tensor:
    """Returns sinusoids of positions. The sines precede the cosines.

    Args:
        positions: Positions, `(...)`.
        width: Number of features.
        base: Base of the frequencies. Frequency n is `base ** (-2 * n / width)`.

    Returns:
        Float32 tensor, `(..., width)`.
    """
    steps = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * base ** (-2.0 * steps / width)
    return torch.cat([angles.sin(), angles.cos()], -1)


def advance(
    context: AttentionState, length: int, codes: int, lengths: torch.Tensor | None
) -> AttentionState:
    """Moves the tokens that leave the window after a block to the cache.

    Args:
        context: The M + L tokens of the window and the block.
        length: The block size L.
        codes: The number of codes S, which marks an empty slot.
        lengths: The number of tokens of the block that are not padding, `(B,)`. `None` for a block
            without padding.

    Returns:
        The state after the block.
    """
    leaving, window = context.window_code[:, :, :length], context.window_code.shape[2] - length
    if lengths is None:
        near = [leaf[:, :, length:] for leaf in context[:3]]
    else:
        index = torch.arange(max(window, length), device=lengths.device)
        leaving = leaving.masked_fill((index[:length] >= lengths[:, None])[:, None], codes)
        near = [take(leaf, lengths[:, None] + index[:window]) for leaf in context[:3]]
    mean, count = context.cache_mean, context.cache_count
    mean, count = merge(mean, count, context.window_value[:, :, :length], leaving)
    return AttentionState(near[0], near[1], near[2], mean, count)


def attend(
    query: Queries,
    near: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    relative: torch.Tensor,
    far: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Computes the attention of a block to individual keys, and to older keys by code.

    A single softmax covers the individual keys and the codes.

    Args:
        query: Queries of the block for content scores and for position scores, each
            `(B, Hk, G, L, K)`.
        near: N individual keys, `(B, Hk, N, K)`, their values, and their mask, `(B, N)`. The last L
            keys are those of the block.
        relative: Key vectors of the distances from R down to 0, `(R + 1, Hk, K)`, with R >= N - L.
        far: The codebook, and the mean value and the count of each code. If it is `None`, queries
            attend to keys at distances of at most R.

    Returns:
        The attention output, `(B, Hk, G, L, V)`.
    """
    (content, position), (keys, values, valid) = query, near
    length, total, reach = content.shape[-2], keys.shape[2], relative.shape[0] - 1
    scores = torch.einsum("bhglk,bhnk->bhgln", content, keys)
    position_scores = torch.einsum("bhglk,dhk->bhgld", position, relative)
    # Shift row l by l columns to the right, by padding and reshaping.
    padded = F.pad(position_scores, (0, length)).flatten(-2)[..., : length * (reach + length)]
    scores = scores + padded.unflatten(-1, (length, reach + length))[..., -total:]
    index = torch.arange(total, device=keys.device)
    distance = index[-length:, None] - index
    visible = (distance >= 0) & (distance <= reach) if far is None else distance >= 0
    scores = scores.masked_fill(~(visible & valid[:, None])[:, None, None], MASKED_SCORE)
    if far is not None:
        rows, mean, count = far
        cache_scores = torch.einsum("bhglk,hsk->bhgls", content, rows)
        cache_scores = cache_scores + count.clamp(min=1).log()[:, :, None, None]
        cache_scores = cache_scores.masked_fill((count == 0)[:, :, None, None], MASKED_SCORE)
        scores = torch.cat([scores, cache_scores], -1)
        values = torch.cat([values, mean.to(values.dtype)], 2)
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    return (weights @ values).unflatten(2, scores.shape[2:4])


class VQTransformerAttention(nn.Module):
    """Norm, projections and attention. The output does not include the residual connection."""

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
        tokens: TokenMasks,
        state: AttentionState | None,
    ) -> tuple[torch.Tensor, AttentionState, KeyStatistics | None]:
        """Computes attention block by block.

        Args:
            hidden: Hidden states, `(B, T, D)`.
            position: The number of tokens before this call, `(B,)`.
            tokens: Token masks.
            state: The state before this call, or `None`.

        Returns:
            The output, `(B, T, D)`, the state after this call, and the statistics of the keys in
            training, otherwise `None`.
        """
        query, key, value, gate = self.project(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            if state is None:
                state = empty_state(self.config, hidden.shape[0], hidden.device, value.dtype)
            rows = self.codebook.rows()
            code = self.codebook.nearest(key, rows)
            near = gather_rows(rows, code)
            statistics = (
                self._key_statistics(key, near, code, tokens.counted) if self.training else None
            )
            if self.config.attention_type == "full":
                attn_output = self._full(query, key, value, tokens.valid)
            else:
                # This order of operations returns the exact value of the codebook vector.
                key = near + (key - key.detach())
                code = self._mask_codes(code, tokens.valid)
                new = (key, value, code)
                attn_output, state = self._blocks(query, new, rows, tokens.valid, position, state)
        return self.output(attn_output, gate), state, statistics

    def project(self, hidden: torch.Tensor) -> tuple[Any, ...]:
        """Projects hidden states.

        Returns:
            The queries for content scores and for position scores, the keys, the values, and the
            gate or `None`.
        """
        config, normed = self.config, self.input_norm(hidden)
        groups = (config.key_heads, config.query_heads // config.key_heads)
        query = self.q_proj(normed).unflatten(-1, (*groups, config.head_dim))
        query = (rms_normalize(query, config.rms_norm_eps) * self.scale).permute(0, 2, 3, 1, 4)
        offsets = [
            (bias.float() * self.scale).view(*groups, 1, config.head_dim)
            for bias in (self.content_bias, self.position_bias)
        ]
        key = self.k_proj(normed).unflatten(-1, (groups[0], config.head_dim))
        key = (rms_normalize(key, config.rms_norm_eps) * self.scale).transpose(1, 2)
        value = self.v_proj(normed)
        value = F.silu(value) if config.gated else value
        value = value.unflatten(-1, (groups[0], config.value_width)).transpose(1, 2)
        gate = F.silu(self.g_proj(normed)) if config.gated else None
        return (query + offsets[0], query + offsets[1]), key, value, gate

    def output(self, attn_output: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """Gates and projects the attention output `(B, Hk, G, T, V)` to `(B, T, D)`."""
        attn_output = attn_output.permute(0, 3, 1, 2, 4).flatten(2)
        return self.o_proj(attn_output if gate is None else attn_output * gate)

    def relative(self, reach: int) -> torch.Tensor:
        """Returns the key vectors of the distances from R down to 0, `(R + 1, Hk, K)`.

        Args:
            reach: The maximum distance R.
        """
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
        self, query: Queries, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None
    ) -> torch.Tensor:
        rows = self.relative(key.shape[2] - 1)
        if valid is None:
            valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
        return attend(query, (key, value, valid), rows, None)

    def _blocks(
        self,
        query: Queries,
        new: Sequence[torch.Tensor],
        rows: torch.Tensor,
        valid: torch.Tensor | None,
        position: torch.Tensor,
        state: AttentionState,
    ) -> tuple[torch.Tensor, AttentionState]:
        """Computes the blocks one after the other. The code of padding is S."""
        config, total = self.config, new[2].shape[2]
        relative, outputs = self.relative(config.window_size), []
        state = window_in_order(state, position)
        for start in range(0, total, config.block_size):
            block = slice(start, start + config.block_size)
            parts = (query[0][..., block, :], query[1][..., block, :])
            lengths = None if valid is None else valid[:, block].sum(1)
            attn_output, state = self._block(
                parts, [leaf[:, :, block] for leaf in new], state, relative, rows, lengths
            )
            outputs.append(attn_output)
        new_tokens: int | torch.Tensor = total if valid is None else valid.sum(1)
        return torch.cat(outputs, 3), window_to_ring(state, position + new_tokens)

    def _block(
        self,
        query: Queries,
        new: Sequence[torch.Tensor],
        state: AttentionState,
        relative: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, AttentionState]:
        """Computes one block. The window of `state` starts with the oldest token."""
        config = self.config
        if config.stop_gradient_cache:
            state = AttentionState(*(leaf.detach() for leaf in state))
        near = [torch.cat(pair, 2) for pair in zip(state[:3], new, strict=True)]
        context = AttentionState(near[0], near[1], near[2], state.cache_mean, state.cache_count)
        valid = context.window_code[:, 0] < config.num_codes
        far = (
            (rows, context.cache_mean, context.cache_count)
            if config.use_compressive_cache
            else None
        )
        attn_output = attend(
            query, (context.window_key, context.window_value, valid), relative, far
        )
        return attn_output, advance(context, new[0].shape[2], config.num_codes, lengths)

    def _mask_codes(self, code: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Replaces the codes of padding by S. `valid` is False for padding, `(B, T)`."""
        return code if valid is None else code.masked_fill(~valid[:, None], self.config.num_codes)

    def _key_statistics(
        self,
        key: torch.Tensor,
        near: torch.Tensor,
        code: torch.Tensor,
        counted: torch.Tensor | None,
    ) -> KeyStatistics:
        error, size = (key - near).square().sum(-1), self.config.num_codes
        error = error if counted is None else error * counted[:, None]
        code = self._mask_codes(code, counted)
        heads = key.detach().transpose(0, 1).flatten(1, 2)
        sums, counts = sum_by_code(heads, code.transpose(0, 1).flatten(1), size)
        return KeyStatistics(error.sum(), sums, counts.float())

    # -- one token
    # -----------------------------------------------------------------------------------

    def step(
        self,
        hidden: torch.Tensor,
        position: torch.Tensor,
        valid: torch.Tensor | None,
        state: AttentionState,
        relative: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the output of one token per row, and updates `state` in place.

        This method supports no gradients.

        Args:
            hidden: Hidden states, `(B, 1, D)`.
            position: The number of tokens before this call, `(B,)`.
            valid: False for padding, `(B, 1)`, or `None`.
            state: The state before this call.
            relative: The key vectors of relative positions, see :meth:`relative`.
        """
        query, key, value, gate = self.project(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            rows = self.codebook.rows()
            code = self.codebook.nearest(key, rows)
            key = gather_rows(rows, code)
            attn_output = self._attend_one_token(query, key, value, position, state, relative, rows)
            self._update_state(key[:, :, 0], value[:, :, 0], code[:, :, 0], position, valid, state)
        return self.output(attn_output, gate)

    def _attend_one_token(
        self,
        query: Queries,
        key: torch.Tensor,
        value: torch.Tensor,
        position: torch.Tensor,
        state: AttentionState,
        relative: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Computes attention to the window, the token itself and the cache.

        Returns:
            The attention output, `(B, Hk, G, 1, V)`.
        """
        content, position_query = query
        window = state.window_code.shape[-1]
        slots = torch.arange(window, device=position.device)
        # `relative` starts with distance M, and the slots have the distances 1 to M.
        order = window - 1 - (position[:, None] - 1 - slots) % window
        position_scores = torch.einsum("bhglk,dhk->bhgld", position_query, relative)
        order = order.long()[:, None, None, None].expand(*position_scores.shape[:-1], -1)
        near = content @ state.window_key[:, :, None].mT + position_scores.gather(-1, order)
        empty_slots = state.window_code[:, 0] == self.config.num_codes
        near = near.masked_fill(empty_slots[:, None, None, None], MASKED_SCORE)
        current = (content * key[:, :, None]).sum(-1, keepdim=True) + position_scores[..., -1:]
        far = torch.einsum("bhglk,hsk->bhgls", content, rows)
        count = state.cache_count if self.config.use_compressive_cache else 0 * state.cache_count
        far = (far + count.clamp(min=1).log()[:, :, None, None]).masked_fill(
            (count == 0)[:, :, None, None], MASKED_SCORE
        )
        weights = torch.cat([near, current, far], -1).softmax(-1).to(value.dtype)
        near, current, far = weights.split([window, 1, far.shape[-1]], -1)
        output = near @ state.window_value[:, :, None].to(value.dtype) + current * value[:, :, None]
        return output + far @ state.cache_mean[:, :, None].to(value.dtype)

    def _update_state(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        code: torch.Tensor,
        position: torch.Tensor,
        valid: torch.Tensor | None,
        state: AttentionState,
    ) -> None:
        """Moves the oldest token of the window to the cache and writes the new one in its slot."""
        size, heads = self.config.num_codes, torch.arange(key.shape[1], device=key.device)
        batch = torch.arange(key.shape[0], device=key.device)[:, None]
        slot = (batch, heads, (position % state.window_code.shape[-1]).long()[:, None])
        valid = batch >= 0 if valid is None else valid
        old_code, old_value = state.window_code[slot], state.window_value[slot]
        evicted = valid & (old_code < size)
        target = (batch, heads, old_code.clamp(max=size - 1).long())
        count, mean = state.cache_count[target], state.cache_mean[target]
        total = count + evicted
        sums = (count * 1.0)[..., None] * mean + evicted[..., None] * old_value.float()
        state.cache_mean[target] = torch.where(
            evicted[..., None], sums / total.clamp(min=1)[..., None], mean
        )
        state.cache_count[target] = total.int()
        pairs = ((state.window_key, key), (state.window_value, value))
        for leaf, new in pairs:
            leaf[slot] = torch.where(valid[..., None], new.to(leaf.dtype), leaf[slot])
        state.window_code[slot] = torch.where(valid, code.int(), old_code)
