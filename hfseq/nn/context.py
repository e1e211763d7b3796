"""What all layers share: how a forward pass runs while they are traced, and how help shows them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
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


class ConstructorSignature:
    """The ``__signature__`` of a layer's class: its constructor's, which NNX's metaclass hides."""

    def __get__(self, layer: object, kind: type) -> inspect.Signature:
        """Return it, of the class that is asked; a layer's own is that of its call."""
        if layer is not None:
            raise AttributeError("__signature__")
        constructor = inspect.signature(kind.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])


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
