"""Similarities of vectors, MaxSim scores of token vectors, and quantization, in NumPy.

The functions accept arrays with one vector per row. Sparse vectors can also be sparse SciPy arrays,
for which only the similarity functions "cosine" and "dot" are supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hfseq.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    Vectors: TypeAlias = ArrayLike | csr_array

#: Score of a document without tokens.
NO_TOKENS = -1e9
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


def _rows(vectors: Vectors) -> Any:
    """Converts vectors to float32 rows. Sparse arrays are returned unchanged."""
    if hasattr(vectors, "tocsr"):
        return vectors
    return np.atleast_2d(np.asarray(vectors, np.float32))


def _unit(vectors: Any) -> Any:
    """Scales rows to length 1."""
    if hasattr(vectors, "tocsr"):
        norms = np.sqrt(np.asarray(vectors.multiply(vectors).sum(axis=1))).reshape(-1, 1)
        return vectors.multiply(1 / np.maximum(norms, 1e-12)).tocsr()
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _dense(scores: Any) -> np.ndarray:
    return np.asarray(scores.toarray() if hasattr(scores, "toarray") else scores, np.float32)


def dot_score(a: Vectors, b: Vectors) -> np.ndarray:
    """Returns the dot products of all rows of `a` and all rows of `b`, `(len(a), len(b))`."""
    return _dense(_rows(a) @ _rows(b).T)


def cosine_similarity(a: Vectors, b: Vectors) -> np.ndarray:
    """Returns the cosines of all rows of `a` and all rows of `b`, `(len(a), len(b))`."""
    return dot_score(_unit(_rows(a)), _unit(_rows(b)))


def euclidean_similarity(a: Vectors, b: Vectors) -> np.ndarray:
    """Returns the negative Euclidean distances of rows of `a` and `b`, `(len(a), len(b))`."""
    return -_distances(a, b, lambda difference: np.sqrt(np.square(difference).sum(axis=-1)))


def manhattan_similarity(a: Vectors, b: Vectors) -> np.ndarray:
    """Returns the negative Manhattan distances of rows of `a` and `b`, `(len(a), len(b))`."""
    return -_distances(a, b, lambda difference: np.abs(difference).sum(axis=-1))


def _distances(a: Vectors, b: Vectors, distance: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Computes the distances of each row of `a` to all rows of `b`.

    The rows of `a` are processed one at a time, so that memory is only needed for the differences
    of one row.
    """
    rows, other_rows = _rows(a), _rows(b)
    return (
        np.stack([distance(row - other_rows) for row in rows])
        if len(rows)
        else _empty(rows, other_rows)
    )


def _empty(a: Any, b: Any) -> np.ndarray:
    return np.zeros((a.shape[0], b.shape[0]), np.float32)


SIMILARITIES: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "cosine": cosine_similarity,
    "dot": dot_score,
    "euclidean": euclidean_similarity,
    "manhattan": manhattan_similarity,
}


def similarity(name: str, a: Vectors, b: Vectors) -> np.ndarray:
    """Returns the similarities of all rows of `a` and all rows of `b`, `(len(a), len(b))`.

    Args:
        name: "cosine", "dot", "euclidean" or "manhattan" for vectors. "maxsim" or "meanmaxsim" for
            lists of token vectors.
        a: Vectors, or token vectors of queries.
        b: Vectors, or token vectors of documents.

    Raises:
        UsageError: The name is unknown, or the vectors have different sizes.
    """
    if name in ("maxsim", "meanmaxsim"):
        return maxsim(a, b, mean=name == "meanmaxsim")
    rows, other_rows = _rows(a), _rows(b)
    _check(name, rows, other_rows)
    return SIMILARITIES[name](rows, other_rows)


def pairwise_similarity(name: str, a: Vectors, b: Vectors) -> np.ndarray:
    """Returns the similarity of each row of `a` to the row of `b` at the same index, `(len(a),)`.

    The arguments are those of :func:`similarity`.

    Raises:
        UsageError: The name is unknown, or `a` and `b` have different lengths.
    """
    is_tokens = name in ("maxsim", "meanmaxsim")
    convert: Callable[[Any], Any] = _token_list if is_tokens else _rows
    rows, other_rows = convert(a), convert(b)
    count, other_count = (len(v) if is_tokens else v.shape[0] for v in (rows, other_rows))
    if count != other_count:
        raise UsageError(
            f"pairwise similarity requires the same number of vectors, not {count} and "
            f"{other_count}"
        )
    if is_tokens:
        pairs = zip(rows, other_rows, strict=True)
        scores = [maxsim([x], [y], mean=name == "meanmaxsim")[0, 0] for x, y in pairs]
        return np.array(scores, np.float32)
    _check(name, rows, other_rows)
    if hasattr(rows, "tocsr"):
        if name == "cosine":
            rows, other_rows = _unit(rows), _unit(other_rows)
        return np.asarray(rows.multiply(other_rows).sum(axis=1), np.float32).reshape(-1)
    if name == "cosine":
        return (_unit(rows) * _unit(other_rows)).sum(axis=1)
    if name == "dot":
        return (rows * other_rows).sum(axis=1)
    difference = rows - other_rows
    if name == "euclidean":
        return -np.sqrt(np.square(difference).sum(axis=1))
    return -np.abs(difference).sum(axis=1)


def _check(name: str, a: Any, b: Any) -> None:
    if name not in SIMILARITIES:
        raise UsageError(
            f"unknown similarity function {name!r}{did_you_mean(name, SIMILARITIES)} (known: "
            f"{', '.join(SIMILARITIES)})"
        )
    if a.shape[1] != b.shape[1] and a.shape[0] and b.shape[0]:
        raise UsageError(f"vectors of {a.shape[1]} and {b.shape[1]} features cannot be compared")
    if name not in ("cosine", "dot") and hasattr(a, "tocsr"):
        raise UsageError(f"sparse vectors do not support {name!r} (supported: cosine, dot)")


# -- token vectors
# ----------------------------------------------------------------------------------------------


def _token_list(vectors: Any) -> list[np.ndarray]:
    """Converts token vectors to a list with one float32 array per text."""
    if isinstance(vectors, np.ndarray) and vectors.ndim == 2:
        return [vectors]
    return [np.asarray(item, np.float32) for item in vectors]


def maxsim(queries: Vectors, documents: Vectors, *, mean: bool = False) -> np.ndarray:
    """Returns the MaxSim scores of queries and documents (Khattab and Zaharia, 2020).

    For each token of the query, the largest dot product with a token of the document is taken. The
    score is the sum of these over the tokens of the query.

    Args:
        queries: The token vectors of each query, `(tokens, features)`.
        documents: The token vectors of each document, `(tokens, features)`.
        mean: Whether to divide the score by the number of tokens of the query.

    Returns:
        Float32 scores, `(queries, documents)`. The score of documents without tokens is -1e9.
    """
    queries, documents = _token_list(queries), _token_list(documents)
    scores = np.zeros((len(queries), len(documents)), np.float32)
    if not len(queries) or not len(documents):
        return scores
    query_tokens = np.concatenate(queries)
    ends = np.cumsum([len(tokens) for tokens in queries])
    starts = ends - [len(tokens) for tokens in queries]
    has_tokens = ends > starts
    for number, tokens in enumerate(documents):
        if not len(tokens):
            scores[:, number] = NO_TOKENS
            continue
        best = (query_tokens @ tokens.T).max(axis=1)
        # reduceat does not support empty segments, so queries without tokens are skipped. Their
        # score is 0.
        if has_tokens.any():
            scores[has_tokens, number] = np.add.reduceat(best, starts[has_tokens])
    if mean:
        scores /= np.maximum(ends - starts, 1)[:, None]
    return scores


# -- precision
# ----------------------------------------------------------------------------------------------


def quantize(
    vectors: np.ndarray,
    precision: str,
    ranges: np.ndarray | None = None,
    calibration: np.ndarray | None = None,
) -> np.ndarray:
    """Quantizes vectors as sentence-transformers does.

    Args:
        vectors: Float vectors, `(texts, features)`.
        precision: "float32" does not quantize. "int8" and "uint8" divide the range of each feature
            into 256 levels. "binary" and "ubinary" store one bit per feature, which is set for
            positive values, and pack eight features into an int8 or uint8.
        ranges: The smallest and the largest value of each feature, `(2, features)`. Default: they
            are computed from ``calibration``.
        calibration: Vectors from which the ranges are computed. Default: ``vectors``.

    Raises:
        UsageError: The precision is unknown, or ranges cannot be computed from a single vector.
    """
    if precision not in PRECISIONS:
        raise UsageError(
            f"unknown precision {precision!r}{did_you_mean(precision, PRECISIONS)} (known: "
            f"{', '.join(PRECISIONS)})"
        )
    if precision == "float32":
        return np.asarray(vectors, np.float32)
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None:
        samples = vectors if calibration is None else calibration
        if len(samples) < 2:
            raise UsageError(
                f"precision {precision!r} divides the range of each feature into 256 levels, so it "
                "requires at least two vectors, or ranges"
            )
        ranges = np.stack([np.min(samples, axis=0), np.max(samples, axis=0)])
    low, high = np.asarray(ranges, np.float32)
    step = (high - low) / 255
    levels = np.clip(np.floor((vectors - low) / np.where(step == 0, 1, step)), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)
