"""Fixtures and helpers: tokenizers by family, packed rows, and losses of objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hfseq.data.batches import PackedRows, RowRandom
from hfseq.data.store import TokenStore
from tests.data.samples import make_texts


def store_of(documents: list[list[int]], pad: int = 0) -> TokenStore:
    offsets = np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int64)
    return TokenStore(np.concatenate(documents).astype(np.int32), offsets, pad)


def rows_of(documents: list[list[int]], length: int, pad: int = 0, **options: Any) -> dict:
    """Returns all packed rows of the documents."""
    rows = PackedRows(store_of(documents, pad), length, **options)
    return rows.fetch(np.arange(len(rows)))


def numbers(rows: dict, seed: int = 0) -> RowRandom:
    return RowRandom(seed, 0, np.arange(len(rows["input_ids"])))


def loss_of(objective: Any, model: Any, rows: dict) -> tuple[float, int]:
    """Returns the sum of the losses and their count."""
    return loss_of_batch(objective, model, objective.collate(rows, numbers(rows), 1))


def loss_of_batch(objective: Any, model: Any, batch: dict) -> tuple[float, int]:
    """Returns the sum of the losses of a batch and their count."""
    import jax

    step = jax.jit(lambda params, batch: objective.loss(model, params, batch, None, False))
    total, count, extra = step(model.params, batch)
    assert set(extra["totals"]) == set(objective.sums)
    return float(total), int(count)


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[[str], Any]:
    """Returns a function from a family name to a tokenizer trained on sentences."""
    from hfseq.data.tokenizers import train_tokenizer

    texts = [f"{text.capitalize()}. " * 2 for text in make_texts(200)]
    output: dict[str, Any] = {}

    def make(family: str) -> Any:
        if family not in output:
            output[family] = train_tokenizer(texts, family, vocab_size=400)
        return output[family]

    return make


@pytest.fixture(params=["all rows", "few rows"])
def rows_together(request, monkeypatch) -> None:
    """Runs a test with cross-entropy over all rows, and in chunks as on a single CPU."""
    from hfseq.objectives import cross_entropy

    def few(logits: Any) -> int:
        return 2 if logits[..., 0].size % 2 == 0 else 1

    if request.param == "few rows":
        monkeypatch.setattr(cross_entropy, "rows_per_chunk", few)
