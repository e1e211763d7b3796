"""One CPU alone, where what fits into its caches decides the speed: whether, and in what parts."""

from __future__ import annotations

import jax


def one_cpu() -> bool:
    """Tell whether the only device is a CPU: then work may be cut so that caches hold a piece.

    Elsewhere passes over memory are fused, and rows that lie on several devices must not be cut
    otherwise.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def equal_part(size: int, most: int) -> int:
    """Return the largest divisor of ``size`` up to ``most``, at least 1: what to take at once."""
    return next(part for part in range(max(min(most, size), 1), 0, -1) if size % part == 0)
