"""Dynamic masking for masked language models (Devlin et al. 2019, arXiv:1810.04805, §3.1)."""

from __future__ import annotations

import math

import numpy as np

from hfseq.data.batches import RowRandom
from hfseq.labels import IGNORED


def mask_tokens(
    rows: dict[str, np.ndarray],
    random: RowRandom,
    *,
    mask_id: int,
    vocab_size: int,
    special: np.ndarray,
    probability: float = 0.15,
    word_starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose tokens to predict and hide them: 80 % behind the mask, 10 % behind a random token.

    ``rows`` are arrays of ``Rows.fetch``, (n, length); rows marked not "valid" get no targets.
    ``special``, bool (vocab,), marks ids that are never chosen; neither is padding. With
    ``word_starts``, bool (vocab,), words are chosen as a whole, and "continues" in ``rows`` adds
    tokens that continue one. A row's masks depend on ``random`` and the row alone.

    Returns input_ids and labels, int32 (n, length); labels are -100 where nothing is predicted.
    """
    ids, segments = rows["input_ids"], rows["segment_ids"]
    length = ids.shape[1]
    candidates = (segments > 0) & ~special[ids]
    if "valid" in rows:
        candidates &= rows["valid"][:, None]
    draw = random.uniform(length)
    if word_starts is not None:
        draw = np.take_along_axis(draw, _word_begins(rows, candidates, word_starts), axis=1)
    chosen = candidates & (draw < probability)
    kind, others = random.uniform(length), random.integers(vocab_size, length)
    hidden = np.where(kind < 0.8, np.int32(mask_id), np.where(kind < 0.9, others, ids))
    return np.where(chosen, hidden, ids), np.where(chosen, ids, np.int32(IGNORED))


def _word_begins(
    rows: dict[str, np.ndarray], candidates: np.ndarray, word_starts: np.ndarray
) -> np.ndarray:
    """The column where the word of each token begins; words end at special tokens and documents."""
    starts = word_starts[rows["input_ids"]]
    if "continues" in rows:
        starts &= rows["continues"] == 0
    segments = rows["segment_ids"]
    starts[:, 0] = True
    starts[:, 1:] |= ~candidates[:, :-1] | (segments[:, 1:] != segments[:, :-1])
    return np.maximum.accumulate(np.where(starts, np.arange(starts.shape[1]), 0), axis=1)


def capacity(tokens: int, probability: float) -> int:
    """Targets to make room for among ``tokens``: the mean and five deviations, a multiple of 8."""
    mean = tokens * probability
    room = math.ceil((mean + 5 * math.sqrt(mean * (1 - probability))) / 8) * 8
    return max(8, min(room, math.ceil(tokens / 8) * 8))


def gather_masked(
    labels: np.ndarray, groups: int, probability: float
) -> tuple[np.ndarray, np.ndarray]:
    """Collect the targets of ``groups`` equal parts of a batch, for a head that sees only them.

    Returns positions, int32 (groups, K), into the flattened rows of the group, and their labels,
    int32 (groups, K). K is ``capacity``, so that shapes stay the same from step to step; should a
    group have more targets, K grows in steps of a quarter, and none is lost. Free places have
    position 0 and label -100.
    """
    flat = labels.reshape(groups, -1)
    group, position = np.nonzero(flat != IGNORED)
    counts = np.bincount(group, minlength=groups)
    room = capacity(flat.shape[1], probability)
    while room < counts.max():
        room = math.ceil(room * 1.25 / 8) * 8
    rank = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.zeros((groups, room), np.int32)
    targets = np.full((groups, room), IGNORED, np.int32)
    positions[group, rank] = position
    targets[group, rank] = flat[group, position]
    return positions, targets
