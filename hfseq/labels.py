"""Labels: which places are ignored, and what a decoder reads to predict the others."""

from __future__ import annotations

import numpy as np

#: The label of places that nothing is predicted at.
IGNORED = -100


def shift_right(labels: np.ndarray, pad_token_id: int, decoder_start_token_id: int) -> np.ndarray:
    """Return decoder inputs: ``labels`` (batch, length) one place later, after the start token.

    Ignored labels become padding; the type of the labels is kept.
    """
    start = np.full_like(labels[:, :1], decoder_start_token_id)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORED, np.asarray(pad_token_id, shifted.dtype), shifted)
