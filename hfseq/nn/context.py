"""State that all layers share while a model is traced.

This module has three context variables: the options of the forward pass, guarantees about the rows
of the batch, and the device that the program is traced for.
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
        remat_policy: The argument `policy` of `jax.checkpoint`, which selects the intermediate
            values that rematerialized layers save.
        attention: The requested attention implementation. It is a function with the signature of
            `jax.nn.dot_product_attention`, an `hfseq.nn.Implementation`, or several
            implementations in order of preference. With `None`, hfseq selects an implementation
            for the platform.
        fill_encoder_cache: Whether cross-attention computes the keys and values of the encoder's
            output and stores them in the cache, instead of reading them from the cache.
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
    # Gathered inputs that several layers share, by the `id` of the array before it was gathered.
    # Used by hfseq.nn.sharding.
    gathered: dict[int, tuple[jax.Array, jax.Array]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )


class ConstructorSignature:
    """A descriptor for the attribute `__signature__` of layer classes.

    It returns the signature of the constructor, which NNX's metaclass hides from `inspect`.
    """

    def __get__(self, layer: object, owner: type) -> inspect.Signature:
        """Returns the signature of the constructor for a class.

        Raises:
            AttributeError: `layer` is an instance. `inspect` then uses the signature of its
                `__call__` method.
        """
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
    """Sets the options of the forward pass within a `with` block."""
    token = _options.set(value)
    try:
        yield
    finally:
        _options.reset(token)


# -- guarantees about the rows of a batch
# ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RowGuarantees:
    """Properties of a batch that the data pipeline guarantees.

    A row is one entry of the batch. It contains a sequence or several packed documents. While an
    object of this class is set, padding is at the end of each row, and attention masks are nonzero
    exactly where segment IDs are nonzero. Traced code cannot check this itself, because the values
    of traced arrays are unknown.

    Attributes:
        max_runs: Maximum number of runs in a row, or `None` if it is unknown. A run consists of all
            adjacent positions with the same segment ID. Padding is a run too.
    """

    max_runs: int | None = None


_row_guarantees: contextvars.ContextVar[RowGuarantees | None] = contextvars.ContextVar(
    "hfseq_rows", default=None
)


def current_row_guarantees() -> RowGuarantees | None:
    """Returns the guarantees about the batch that is being traced, or `None` without guarantees."""
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
# jax includes this in the keys of its caches, so that a program that was traced for one kind of
# device is not reused for another.
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
    """Returns the device of `tracing_for`, or jax's first device by default."""
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
