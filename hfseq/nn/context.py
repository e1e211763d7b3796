"""How a forward pass runs, known to the layers while they are traced."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Options:
    """How a forward pass runs: remat of each layer, the attention implementation, the mesh."""

    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    attention: Callable[..., jax.Array] = jax.nn.dot_product_attention
    fill_encoder_cache: bool = False
    train: bool = False
    mesh: jax.sharding.Mesh | None = None
    sequence_parallel: bool = False
    # What was put together for several products, by the id of its parts (hfseq.nn.sharding).
    gathered: dict[int, tuple[jax.Array, jax.Array]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )


_DEFAULT = Options()
_options: contextvars.ContextVar[Options | None] = contextvars.ContextVar(
    "hfseq_options", default=None
)


def current_options() -> Options:
    """Return the options of the forward pass being traced."""
    return _options.get() or _DEFAULT


@contextlib.contextmanager
def options(value: Options) -> Iterator[None]:
    """Trace what is inside with ``value`` in force."""
    token = _options.set(value)
    try:
        yield
    finally:
        _options.reset(token)
