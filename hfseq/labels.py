"""Labels: which places are ignored, and what a decoder reads to predict the others."""

from __future__ import annotations

from typing import Any

import numpy as np

#: The label of places that nothing is predicted at.
IGNORED = -100


def shift_right(labels: Any, pad_token_id: int, decoder_start_token_id: int, xp: Any = np) -> Any:
    """Return decoder inputs: ``labels`` (batch, length) one place later, after the start token.

    Ignored labels become padding. ``xp`` is numpy or jax.numpy; the type of the labels is kept.
    """
    start = xp.full_like(labels[:, :1], decoder_start_token_id)
    shifted = xp.concatenate([start, labels[:, :-1]], axis=1)
    return xp.where(shifted == IGNORED, xp.asarray(pad_token_id, shifted.dtype), shifted)
