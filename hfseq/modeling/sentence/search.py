"""Exact search for the documents with the largest similarities to queries.

Documents with the same similarity are returned in their original order, on any number of devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq.errors import UsageError
from hfseq.modeling.sentence.encoder import TextEncoder

#: Number of queries whose similarities are computed at the same time.
QUERY_BLOCK = 256
#: Number of documents per device whose similarities are computed at the same time.
DOCUMENT_BLOCK = 1 << 16


def search(
    model: TextEncoder, queries: Any, documents: Any, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the most similar documents of each query.

    Args:
        model: The model that computed the vectors. It defines the similarity.
        queries: The vectors of the queries, as ``encode_query`` returns them.
        documents: The vectors of the documents, as ``encode_document`` returns them.
        k: Number of documents per query.

    Returns:
        The similarities, float32, and the indices of the documents, int64. Both are `(queries,
        min(k, documents))` and sorted by decreasing similarity.

    Raises:
        UsageError: ``k`` is not positive, or a similarity is not a number.
    """
    if k < 1:
        raise UsageError(f"the number of documents per query, k, must be at least 1, not {k}")
    name = model.similarity_fn_name
    if name in ("cosine", "dot") and isinstance(documents, np.ndarray):
        queries, documents = np.asarray(queries, np.float32), np.asarray(documents, np.float32)
        if name == "cosine":
            queries, documents = (_unit(vectors) for vectors in (queries, documents))
        scores, indices = _search_dense(queries, documents, k)
    else:
        scores, indices = _search_blocks(model, queries, documents, k)
    if np.isnan(scores).any():
        raise UsageError(
            "some similarities are not numbers (NaN), because the model computes vectors that are "
            "not finite"
        )
    return scores, indices


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _search_blocks(
    model: TextEncoder, queries: Any, documents: Any, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Searches with the similarity function of the model, one block of queries at a time."""
    count = queries.shape[0] if hasattr(queries, "shape") else len(queries)
    parts = []
    for start in range(0, count, QUERY_BLOCK):
        scores = model.similarity(queries[start : start + QUERY_BLOCK], documents)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        parts.append((np.take_along_axis(scores, order, axis=1), order))
    if not parts:
        return np.zeros((0, k), np.float32), np.zeros((0, k), np.int64)
    scores, indices = (np.concatenate(part) for part in zip(*parts, strict=True))
    return scores, indices


def _search_dense(
    queries: np.ndarray, documents: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Searches dense vectors by their dot products.

    The documents are divided among the local devices.
    """
    devices = jax.local_devices()
    k = min(k, len(documents))
    if not len(queries) or not k:
        return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
    mesh = Mesh(np.array(devices), ("data",))
    best: tuple[np.ndarray, np.ndarray] | None = None
    for start in range(0, len(documents), DOCUMENT_BLOCK * len(devices)):
        block = documents[start : start + DOCUMENT_BLOCK * len(devices)]
        per_device = -(-len(block) // len(devices))
        padded = np.zeros((len(devices) * per_device, block.shape[1]), np.float32)
        padded[: len(block)] = block
        shards = jax.device_put(
            padded.reshape(len(devices), per_device, -1), NamedSharding(mesh, PartitionSpec("data"))
        )
        parts = []
        for first in range(0, len(queries), QUERY_BLOCK):
            rows = queries[first : first + QUERY_BLOCK]
            padding = np.zeros((min(QUERY_BLOCK, len(queries)) - len(rows), rows.shape[1]))
            rows = np.concatenate([rows, padding.astype(np.float32)])
            found = _top(rows, shards, len(block), k)
            parts.append([np.asarray(part)[: len(queries) - first] for part in found])
        scores, indices = (np.concatenate(part) for part in zip(*parts, strict=True))
        indices = indices.astype(np.int64) + start
        if best is not None:  # the stable sort keeps the order of equally similar documents
            scores = np.concatenate([best[0], scores], axis=1)
            indices = np.concatenate([best[1], indices], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            scores = np.take_along_axis(scores, order, axis=1)
            indices = np.take_along_axis(indices, order, axis=1)
        best = scores, indices
    assert best is not None
    return best


@functools.partial(jax.jit, static_argnums=3)
def _top(
    queries: jax.Array, documents: jax.Array, count: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the most similar documents of each query in a block of documents.

    Args:
        queries: The vectors of the queries, `(queries, features)`.
        documents: The vectors of the documents, `(devices, documents per device, features)`.
        count: Number of documents without padding.
        k: Number of documents per query.

    Returns:
        The similarities and the indices in the block, `(queries, min(k, documents))`.
    """
    devices, per_device, _ = documents.shape
    scores = jnp.einsum("qd,snd->sqn", queries, documents, precision=jax.lax.Precision.HIGHEST)
    positions = jnp.arange(devices)[:, None] * per_device + jnp.arange(per_device)
    # The similarity of padding is set to minus infinity. Padding follows all documents, so it is
    # not preferred to a document with the same value.
    scores = jnp.where((positions < count)[:, None], scores, -jnp.inf)
    # Each device selects its own best documents.
    values, indices = jax.lax.top_k(scores, min(k, per_device))
    indices += jnp.arange(devices)[:, None, None] * per_device
    values, indices = (
        array.swapaxes(0, 1).reshape(len(queries), -1) for array in (values, indices)
    )
    best, order = jax.lax.top_k(values, min(k, values.shape[1]))
    return best, jnp.take_along_axis(indices, order, axis=1)
