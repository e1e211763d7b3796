"""State that all layers share while a model is traced.

This module keeps the options of the forward pass, guarantees about the rows of the batch, and the
device that the program is traced for. All three are context variables.
"""

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
    """Options of a forward pass.

    Attributes:
        remat: Whether each layer is rematerialized in the backward pass (gradient checkpointing).
        remat_policy: Which intermediate values rematerialized layers save, as in `jax.checkpoint`.
        attention: The requested attention implementation: a function with the signature of
            `jax.nn.dot_product_attention`, an `hfseq.nn.Implementation`, or several of them. `None`
            selects one for the platform.
        fill_encoder_cache: Whether cross-attention computes its keys and values and stores them in
            the cache.
        train: Whether the model is in training mode.
        mesh: The device mesh, or `None`.
        sequence_parallel: Whether the `tensor` axis also splits hidden states by length between
            the layers.
    """

    remat: bool = False
    remat_policy: Callable[..., bool] | None = None
    attention: Any = None
    fill_encoder_cache: bool = False
    train: bool = False
    mesh: jax.sharding.Mesh | None = None
    sequence_parallel: bool = False
    # Gathered inputs that several products share, by the id of the split array (hfseq.nn.sharding).
    gathered: dict[int, tuple[jax.Array, jax.Array]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )


class ConstructorSignature:
    """The `__signature__` of a layer class: its constructor's, which NNX's metaclass hides."""

    def __get__(self, layer: object, owner: type) -> inspect.Signature:
        """Returns the constructor's signature for the class; instances use that of `__call__`."""
        if layer is not None:
            raise AttributeError("__signature__")
        constructor = inspect.signature(owner.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])


_DEFAULT = Options()
_options: contextvars.ContextVar[Options | None] = contextvars.ContextVar(
    "hfseq_options", default=None
)


def current_options() -> Options:
    """Returns the options of the forward pass that is being traced."""
    return _options.get() or _DEFAULT


@contextlib.contextmanager
def options(value: Options) -> Iterator[None]:
    """Sets the forward pass options within a `with` block."""
    token = _options.set(value)
    try:
        yield
    finally:
        _options.reset(token)


# -- guarantees about the rows of a batch
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowGuarantees:
    """Properties of the batch that its producer guarantees and that traced arrays cannot show.

    Padding is at the end of each row, and attention masks are nonzero exactly where segment ids
    are nonzero.

    Attributes:
        max_runs: Upper bound on the number of runs of equal segment ids in a row, where padding
            counts as a run. `None` if unknown.
    """

    max_runs: int | None = None


_row_guarantees: contextvars.ContextVar[RowGuarantees | None] = contextvars.ContextVar(
    "hfseq_rows", default=None
)


def current_row_guarantees() -> RowGuarantees | None:
    """Returns the guarantees about the rows that are being traced, or `None`."""
    return _row_guarantees.get()


@contextlib.contextmanager
def row_guarantees(rows: RowGuarantees | None) -> Iterator[None]:
    """Sets the guarantees about the rows of the batch within a `with` block."""
    token = _row_guarantees.set(rows)
    try:
        yield
    finally:
        _row_guarantees.reset(token)


# -- the target device
# ---------------------------------------------------------------------------------------

_target: contextvars.ContextVar[jax.Device | None] = contextvars.ContextVar(
    "hfseq_target", default=None
)
# Part of the key of jax's caches, so that a trace for one kind of device is not reused for another.
_device_context = jax.make_user_context(None)


@contextlib.contextmanager
def tracing_for(device: jax.Device) -> Iterator[None]:
    """Traces programs for `device` within a `with` block. The device need not be attached."""
    token = _target.set(device)
    try:
        with _device_context((device.platform, getattr(device, "device_kind", None))):
            yield
    finally:
        _target.reset(token)


def target_device() -> jax.Device:
    """Returns a device of the kind that the program is traced for; by default jax's first."""
    return _target.get() or jax.devices()[0]


def platform() -> str:
    """Returns the target platform: "cpu", "cuda", "rocm", "tpu", or the name of a jax plugin.

    jax reports "gpu" for both CUDA and ROCm. Only CUDA devices have a numeric
    `compute_capability`.
    """
    device = target_device()
    if device.platform != "gpu":
        return device.platform
    return "cuda" if capability() else "rocm"


def capability() -> tuple[int, int] | None:
    """Returns the CUDA compute capability of the target device, such as (9, 0), or `None`."""
    parts = str(getattr(target_device(), "compute_capability", "")).split(".")
    if len(parts) == 2 and all(part.isdigit() for part in parts):
        return int(parts[0]), int(parts[1])
    return None
