"""What a trained model answers to a few rows of its validation data: examples for the card."""

from __future__ import annotations

from typing import Any

import numpy as np

from hfseq._compat import prepare_jax
from hfseq.data.batches import RowRandom

prepare_jax()

import jax  # noqa: E402

#: Tokens of a row that an example shows, and that a model writes for it.
SHOWN, WRITTEN = 32, 32
GUESSES = 3

Sample = tuple[str, str]


def pick(rows: Any, count: int) -> dict[str, np.ndarray]:
    """Return the beginnings of ``count`` rows spread over ``rows``, cut where a document ends.

    "input_ids" and "segment_ids" (1 on what is shown, 0 after it) are int32 (count, width).
    """
    places = sorted({number * len(rows) // count for number in range(count)})
    fetched = rows.fetch(np.array(places, np.int64))
    ids, segments = (fetched[name][:, :SHOWN] for name in ("input_ids", "segment_ids"))
    shown = (segments > 0) & (segments == segments[:, :1])
    return {"input_ids": ids, "segment_ids": shown.astype(np.int32)}


def filled(model: Any, params: Any, tokenizer: Any, rows: Any, special: np.ndarray) -> list[Sample]:
    """Hide a token in the middle of each row and let the model guess it."""
    ids, shown = rows["input_ids"].copy(), rows["segment_ids"] > 0
    ordinary = shown & ~special[ids]
    kept = ordinary.any(axis=1)
    ids, shown, ordinary = ids[kept], shown[kept], ordinary[kept]
    if not len(ids):
        return []
    hidden = [int(np.flatnonzero(row)[row.sum() // 2]) for row in ordinary]
    row_numbers = np.arange(len(ids))
    ids[row_numbers, hidden] = tokenizer.mask_token_id
    logits = model(ids, attention_mask=shown.astype(np.int32), params=params).logits
    chances = np.asarray(jax.nn.softmax(logits[row_numbers, np.array(hidden)], axis=-1))
    best = np.argsort(-chances, axis=-1)[:, :GUESSES].tolist()
    visible = ordinary | (ids == tokenizer.mask_token_id)
    return [
        (
            tokenizer.decode(row[mask].tolist()).strip(),
            ", ".join(f"{tokenizer.decode([i]).strip()} ({chance[i]:.0%})" for i in guesses),
        )
        for row, mask, guesses, chance in zip(ids, visible, best, chances, strict=True)
    ]


def continued(model: Any, params: Any, tokenizer: Any, rows: Any) -> list[Sample]:
    """Let the model go on, greedily, where the first half of each row ends."""
    lengths = np.maximum(rows["segment_ids"].sum(axis=1) // 2, 1)
    limit = model.max_length()
    most = WRITTEN if limit is None else min(WRITTEN, limit - int(lengths.max()))
    if most < 1:
        return []
    samples = []
    for ids, length in zip(rows["input_ids"], lengths, strict=True):
        prompt = ids[None, :length]
        made = model.generate(
            prompt, params=params, max_new_tokens=most, do_sample=False, num_beams=1
        ).sequences
        texts = [
            tokenizer.decode(np.asarray(part).tolist(), skip_special_tokens=True).strip()
            for part in (prompt[0], made[0, length:])
        ]
        samples.append((texts[0], texts[1]))
    return samples


def restored(model: Any, params: Any, objective: Any, rows: Any) -> list[Sample]:
    """Noise the rows as in training and let the model write what they were, greedily."""
    tokenizer = objective.tokenizer
    batch = objective.collate(dict(rows), RowRandom(0, 0, np.arange(len(rows["input_ids"]))), 1)
    inputs, real = batch["input_ids"], batch["segment_ids"] > 0
    limit = model.max_length()
    most = 2 * SHOWN if limit is None else min(2 * SHOWN, limit - 1)
    made = model.generate(
        inputs, attention_mask=real.astype(np.int32), params=params, max_new_tokens=most,
        do_sample=False, num_beams=1,
    ).sequences  # fmt: skip
    roles = ("bos", "eos", "pad")
    # Masks and sentinels are what the task is about: they are shown.
    unseen = {getattr(tokenizer, f"{role}_token_id") for role in roles}
    unseen.add(getattr(model.config, "decoder_start_token_id", None))

    def text(ids: np.ndarray) -> str:
        return tokenizer.decode([i for i in np.asarray(ids).tolist() if i not in unseen]).strip()

    return [(text(row[mask]), text(out)) for row, mask, out in zip(inputs, real, made, strict=True)]
