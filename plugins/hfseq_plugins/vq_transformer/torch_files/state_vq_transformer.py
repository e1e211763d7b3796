"""The state of a VQ Transformer, which is passed as `past_key_values` and has a fixed size.

Shapes use these symbols: B batch size, Hk key heads, K width of keys, V width of values, S number
of codes, M window size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from .configuration_vq_transformer import VQTransformerConfig


class AttentionState(NamedTuple):
    """The state of one attention module.

    The window is a ring buffer: token i is in slot i modulo M. The code S marks an empty slot. The
    cache groups the tokens that left the window by code.

    Attributes:
        window_key: Keys of the window, float32 `(B, Hk, M, K)`.
        window_value: Values of the window, `(B, Hk, M, V)`.
        window_code: Codes of the window, `(B, Hk, M)`.
        cache_mean: The mean value of each code, float32 `(B, Hk, S, V)`.
        cache_count: The number of tokens of each code, int32 `(B, Hk, S)`.
    """

    window_key: torch.Tensor
    window_value: torch.Tensor
    window_code: torch.Tensor
    cache_mean: torch.Tensor
    cache_count: torch.Tensor


def empty_state(
    config: VQTransformerConfig, batch: int, device: torch.device, dtype: torch.dtype
) -> AttentionState:
    """Returns the state before the first token. `dtype` is the dtype of the values."""
    heads, window, codes = config.key_heads, config.window_size, config.num_codes
    width, narrow = config.value_width, config.head_dim
    return AttentionState(
        torch.zeros(batch, heads, window, narrow, dtype=torch.float32, device=device),
        torch.zeros(batch, heads, window, width, dtype=dtype, device=device),
        torch.full((batch, heads, window), codes, dtype=torch.int32, device=device),
        torch.zeros(batch, heads, codes, width, dtype=torch.float32, device=device),
        torch.zeros(batch, heads, codes, dtype=torch.int32, device=device),
    )


def window_in_order(state: AttentionState, position: torch.Tensor) -> AttentionState:
    """Sorts the window, oldest token first. `position`, `(B,)`, is the number of tokens so far."""
    window = state.window_code.shape[-1]
    slots = (position[:, None] + torch.arange(window, device=position.device)) % max(window, 1)
    key, value, code = (take(leaf, slots) for leaf in state[:3])
    return AttentionState(key, value, code, state.cache_mean, state.cache_count)


def window_to_ring(state: AttentionState, position: torch.Tensor) -> AttentionState:
    """Moves the tokens of a sorted window to their slots. Inverse of :func:`window_in_order`."""
    window = state.window_code.shape[-1]
    indices = (torch.arange(window, device=position.device) - position[:, None]) % max(window, 1)
    key, value, code = (take(leaf, indices) for leaf in state[:3])
    return AttentionState(key, value, code.int(), state.cache_mean, state.cache_count)


def take(leaf: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Selects the tokens `indices`, `(B, n)`, of a tensor `(B, H, T)` or `(B, H, T, F)`."""
    index = indices.long()[:, None].expand(-1, leaf.shape[1], -1)
    if leaf.ndim == 4:
        index = index[..., None].expand(-1, -1, -1, leaf.shape[-1])
    return leaf.gather(2, index)


class VQTransformerState(Cache):
    """The state of a model, for `model(..., past_key_values=...)` and `generate`.

    It is empty before the first call and has a fixed size afterwards. The model updates it in
    place.

    Attributes:
        attentions: One :class:`AttentionState` per attention module.
        rows: For each attention module, its key vectors of relative positions, or `None` if they
            have not been computed yet.
        position: The number of tokens of each row so far, `(B,)`.
        columns: The number of input columns so far, including padding.
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
        """Initializes the state of `batch` rows before their first token."""
        count = config.num_hidden_layers * (2 if config.gated else 1)
        self.attentions = [empty_state(config, batch, device, dtype) for _ in range(count)]
        self.rows = [None] * count
        self.position = torch.zeros(batch, dtype=torch.int32, device=device)
        self.columns = 0

    def check(self, config: VQTransformerConfig, batch: int) -> None:
        """Raises ValueError if the state belongs to another batch size or another model."""
        if self.batch_size != batch:
            raise ValueError(
                f"past_key_values is the state of {self.batch_size} rows, but the input has {batch}"
                " rows. Pass the rows of the state, or start with past_key_values=None"
            )
        expected = empty_state(config, 0, torch.device("meta"), torch.float32)
        count = config.num_hidden_layers * (2 if config.gated else 1)
        shapes = [tuple(leaf.shape[1:]) for leaf in self.attentions[0]]
        sizes = [tuple(leaf.shape[1:]) for leaf in expected]
        if shapes != sizes or len(self.attentions) != count:
            raise ValueError(
                f"past_key_values is the state of another model with {len(self.attentions)} "
                f"attentions of shapes {shapes}, but this model has {count} of shapes {sizes}"
            )

    # -- the interface of Transformers' caches
    # -----------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether the state has rows."""
        return self.position is not None

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return 0 if self.position is None else self.position.shape[0]

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile the model with this state."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """Whether layers use linear attention. With `False`, `generate` passes only new tokens."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed."""
        return False

    def __len__(self) -> int:
        return len(self.attentions)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={self.batch_size}, columns={self.columns})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of input columns."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Returns -1, because the length is unlimited."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError, because tokens cannot be removed from the state."""
        if tokens_to_remove:
            raise ValueError(
                "the state of a VQ Transformer cannot be cropped, since it merges tokens. Keep a "
                "copy (copy.deepcopy) of a state that you need again"
            )

    def reset(self) -> None:
        """Removes all rows."""
        self.attentions, self.rows, self.position, self.columns = [], [], None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Selects the rows `beam_idx`, `(B,)`, for beam search."""
        self._change(lambda leaf: leaf.index_select(0, beam_idx.to(leaf.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Selects the rows `indices`."""
        self._change(lambda leaf: leaf[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self._change(lambda leaf: leaf.repeat_interleave(repeats, 0))

    def detach(self) -> VQTransformerState:
        """Detaches the state from the autograd graph, for truncated back-propagation.

        Returns:
            The state itself.
        """
        self._change(torch.Tensor.detach)
        return self

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.attentions = [AttentionState(*map(change, leaves)) for leaves in self.attentions]
        if self.position is not None:
            self.position = change(self.position)
