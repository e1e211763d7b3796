"""What a VQ Transformer remembers of a text, in a fixed space, as ``past_key_values``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from .configuration_vq_transformer import VQTransformerConfig


class AttentionState(NamedTuple):
    """The state of one attention.

    ``window_key`` (B, Hk, M, K) float32, ``window_value`` (B, Hk, M, V) and ``window_code``
    (B, Hk, M) are a ring: token i lies in slot i modulo M, the code S marks an empty slot. Keys
    that left the window are kept by code: ``cache_mean`` (B, Hk, S, V) of their values, float32,
    and ``cache_count`` (B, Hk, S), int32.
    """

    window_key: torch.Tensor
    window_value: torch.Tensor
    window_code: torch.Tensor
    cache_mean: torch.Tensor
    cache_count: torch.Tensor


def empty(
    config: VQTransformerConfig, batch: int, device: torch.device, dtype: torch.dtype
) -> AttentionState:
    """Return the state of an attention before the first token; ``dtype`` is that of the values."""
    heads, window, codes = config.key_heads, config.window_size, config.num_codes
    width, narrow = config.value_width, config.head_dim
    return AttentionState(
        torch.zeros(batch, heads, window, narrow, dtype=torch.float32, device=device),
        torch.zeros(batch, heads, window, width, dtype=dtype, device=device),
        torch.full((batch, heads, window), codes, dtype=torch.int32, device=device),
        torch.zeros(batch, heads, codes, width, dtype=torch.float32, device=device),
        torch.zeros(batch, heads, codes, dtype=torch.int32, device=device),
    )


def in_order(state: AttentionState, position: torch.Tensor) -> AttentionState:
    """Put the ring of rows that read ``position`` (B,) tokens in order, the oldest token first."""
    window = state.window_code.shape[-1]
    slots = (position[:, None] + torch.arange(window, device=position.device)) % max(window, 1)
    key, value, code = (take(leaf, slots) for leaf in state[:3])
    return AttentionState(key, value, code, state.cache_mean, state.cache_count)


def as_ring(state: AttentionState, position: torch.Tensor) -> AttentionState:
    """Put a window in order into the slots of a ring; the inverse of :func:`in_order`."""
    window = state.window_code.shape[-1]
    places = (torch.arange(window, device=position.device) - position[:, None]) % max(window, 1)
    key, value, code = (take(leaf, places) for leaf in state[:3])
    return AttentionState(key, value, code.int(), state.cache_mean, state.cache_count)


def take(leaf: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Pick ``places`` (B, n) along the third axis of (B, H, T) or (B, H, T, F)."""
    index = places.long()[:, None].expand(-1, leaf.shape[1], -1)
    if leaf.ndim == 4:
        index = index[..., None].expand(-1, -1, -1, leaf.shape[-1])
    return leaf.gather(2, index)


class VQTransformerState(Cache):
    """The states of all attentions, for ``model(..., past_key_values=...)`` and ``generate``.

    It is empty until its first call and never grows. ``attentions`` holds an
    :class:`AttentionState` for each attention, ``position`` (B,) the number of tokens of each row,
    ``columns`` how many columns of input there were, padding included. A call of the model changes
    the state that it is given.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.attentions: list[AttentionState] = []
        self.rows: list[Any] = []
        self.position: torch.Tensor | None = None
        self.columns = 0

    def fill(
        self, config: VQTransformerConfig, batch: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the state of ``batch`` rows before their first token."""
        count = config.num_hidden_layers * (2 if config.gated else 1)
        self.attentions = [empty(config, batch, device, dtype) for _ in range(count)]
        self.rows = [None] * count
        self.position = torch.zeros(batch, dtype=torch.int32, device=device)
        self.columns = 0

    def check(self, config: VQTransformerConfig, batch: int) -> None:
        """Raise ValueError unless the state is one of ``batch`` rows of such a model."""
        if self.batch_size != batch:
            raise ValueError(
                f"past_key_values is the state of {self.batch_size} rows and the input has {batch}:"
                " give the rows that the state was made from, or begin with past_key_values=None"
            )
        wanted = empty(config, 0, torch.device("meta"), torch.float32)
        count = config.num_hidden_layers * (2 if config.gated else 1)
        found = [tuple(leaf.shape[1:]) for leaf in self.attentions[0]]
        sizes = [tuple(leaf.shape[1:]) for leaf in wanted]
        if found != sizes or len(self.attentions) != count:
            raise ValueError(
                f"past_key_values is the state of another model: {len(self.attentions)} attentions "
                f"with leaves {found}, where this model has {count} with {sizes}"
            )

    # -- what generate asks for
    # -----------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether the state has rows yet."""
        return self.position is not None

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return 0 if self.position is None else self.position.shape[0]

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate`` compiles the model around this state."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Whether layers are of linear attention: no, so ``generate`` gives new tokens only."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return False

    def __len__(self) -> int:
        return len(self.attentions)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={self.batch_size}, columns={self.columns})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many columns of input the state has seen."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: a token that went into the state stays there."""
        if tokens_to_remove:
            raise ValueError(
                "the state of a VQ Transformer cannot be cropped: what it has read is merged. Keep "
                "a copy (copy.deepcopy) of the state to return to"
            )

    def reset(self) -> None:
        """Forget all rows."""
        self.attentions, self.rows, self.position, self.columns = [], [], None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the rows ``beam_idx`` (B,), as beam search does."""
        self._change(lambda leaf: leaf.index_select(0, beam_idx.to(leaf.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``."""
        self._change(lambda leaf: leaf[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self._change(lambda leaf: leaf.repeat_interleave(repeats, 0))

    def detach(self) -> VQTransformerState:
        """Cut the state off from the graph, between the windows of one text; return it."""
        self._change(torch.Tensor.detach)
        return self

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.attentions = [AttentionState(*map(change, leaves)) for leaves in self.attentions]
        if self.position is not None:
            self.position = change(self.position)
