"""Which vectors of sound are hidden, and which others they are told apart from: NumPy, for data.

Both draw from ``np.random``, which programs of Transformers 4 seed.
"""

# ruff: noqa: NPY002
from __future__ import annotations

import numpy as np

from hfseq.errors import UsageError


def _compute_mask_indices(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: np.ndarray | None = None,
    min_masks: int = 0,
) -> np.ndarray:
    """Draw spans to hide, with ``np.random``: a boolean array of ``shape`` (batch, frames).

    Of each row about ``mask_prob`` is hidden (less, where spans overlap), in spans of
    ``mask_length``, at least ``min_masks`` of them; ``attention_mask`` (batch, frames) tells how
    long each row is, and spans begin where they fit into it. The draws are those of PyTorch's
    function.
    """
    batch, length = shape
    if not 1 <= mask_length <= length:
        raise UsageError(
            f"mask_length is {mask_length}: it has to be from 1 to the {length} frames of a row"
        )
    rounding = np.random.rand(1).item()

    def spans(frames: int) -> int:
        wanted = max(int(mask_prob * frames / mask_length + rounding), min_masks)
        return max(min(wanted, length // mask_length, frames - mask_length + 1), 0)

    mask = np.zeros(shape, bool)
    if not spans(length):
        return mask
    frames = [length] * batch if attention_mask is None else np.asarray(attention_mask).sum(-1)
    for row, own in zip(mask, map(int, frames), strict=True):
        starts = np.arange(max(own - mask_length + 1, 0))
        chosen = np.random.choice(starts, spans(own), replace=False)
        row[chosen[:, None] + np.arange(mask_length)] = True
        if not len(chosen):  # as PyTorch: it hides a frame of padding rather than none
            row[-1] = True
    return mask


def _sample_negative_indices(
    features_shape: tuple[int, ...], num_negatives: int, attention_mask: np.ndarray | None = None
) -> np.ndarray:
    """Draw, for every frame, others of its row: int32 (batch, frames * num_negatives).

    ``features_shape`` begins with (batch, frames). The numbers are those of the frames of the whole
    batch, one row after the other; ``attention_mask`` (batch, frames) tells how long each row is.
    """
    batch, length = features_shape[:2]
    if length < 2:
        raise UsageError(
            f"features of shape {tuple(features_shape)} have nothing to be told apart from: rows "
            "need 2 frames or more"
        )
    frames = [length] * batch if attention_mask is None else np.asarray(attention_mask).sum(-1)
    own = np.repeat(np.arange(length), num_negatives)
    rows = [np.random.randint(0, max(int(n) - 1, 1), size=len(own)) for n in frames]
    drawn = np.asarray(rows, np.int32)
    drawn[drawn >= own] += 1  # any frame but its own, each as often
    return drawn + np.arange(batch, dtype=np.int32)[:, None] * length
