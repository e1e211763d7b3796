"""What all layers share while they are traced: how a forward pass runs, and for which device."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Options:
    """How a forward pass runs: remat of each layer, the mesh, the attention that was named.

    ``attention`` is a function like ``jax.nn.dot_product_attention``, an
    :class:`hfseq.nn.Implementation` or several; None leaves the choice to the platform.
    """

    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    attention: Any = None
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


# -- what is known of the rows of a batch
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowGuarantees:
    """What whoever built a batch knows of each of its rows, and arrays cannot tell while traced.

    Padding stands at the end, and attention masks are non-zero where segments are. No row has more
    than ``max_runs`` runs of equal segments, padding being one of them; None where nobody counted.
    """

    max_runs: int | None = None


_rows: contextvars.ContextVar[RowGuarantees | None] = contextvars.ContextVar(
    "hfseq_rows", default=None
)


def current_row_guarantees() -> RowGuarantees | None:
    """Return what is known of the rows that are traced; None if nothing is."""
    return _rows.get()


@contextlib.contextmanager
def row_guarantees(rows: RowGuarantees | None) -> Iterator[None]:
    """Trace what is inside with rows of which so much is known."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


# -- the device that is traced for
# ---------------------------------------------------------------------------------------

_target: contextvars.ContextVar[jax.Device | None] = contextvars.ContextVar(
    "hfseq_target", default=None
)
# What was traced for one kind of device is not taken from jax's caches for another.
_kind = jax.make_user_context(None)


@contextlib.contextmanager
def tracing_for(device: jax.Device) -> Iterator[None]:
    """Trace what is inside for ``device``, which may be one that is only described."""
    token = _target.set(device)
    try:
        with _kind((device.platform, getattr(device, "device_kind", None))):
            yield
    finally:
        _target.reset(token)


def target_device() -> jax.Device:
    """Return a device like those that what is traced will run on; by default jax's first."""
    return _target.get() or jax.devices()[0]


def platform() -> str:
    """Return the platform that is traced for: cpu, cuda, rocm, tpu, or what a plugin calls itself.

    jax says "gpu" for two of them, which differ in what ``compute_capability`` is.
    """
    device = target_device()
    if device.platform != "gpu":
        return device.platform
    return "cuda" if capability() else "rocm"


def capability() -> tuple[int, int] | None:
    """Return the compute capability of the NVIDIA GPU that is traced for, as (9, 0)."""
    parts = str(getattr(target_device(), "compute_capability", "")).split(".")
    if len(parts) == 2 and all(part.isdigit() for part in parts):
        return int(parts[0]), int(parts[1])
    return None
