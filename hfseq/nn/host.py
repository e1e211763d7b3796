"""Whether a program runs on one CPU alone, where what fits into its caches decides its speed."""

from __future__ import annotations

import jax


def one_cpu() -> bool:
    """Tell whether the only device is a CPU: then work may be cut so that caches hold a piece.

    Elsewhere passes over memory are fused, and rows that lie on several devices must not be cut
    otherwise.
    """
    return jax.default_backend() == "cpu" and jax.device_count() == 1
