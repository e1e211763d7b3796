"""The layers of every model file: parameters, their initialisation and one line of arithmetic each.

Attribute names are the checkpoint's (``kernel``, ``bias``, ``scale``, ``embedding``). The type of
computation is set afterwards by a precision recipe (:mod:`hfseq.nn.precision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from hfseq.errors import UsageError, did_you_mean
from hfseq.nn import sharding
from hfseq.nn.context import ConstructorSignature, current_options
from hfseq.nn.precision import DotGeneral, FusedProjection, add_bias, low_precision_dot_general
from hfseq.nn.qwix import dequantize, is_quantized, quantized_kernel_product
from hfseq.nn.random import Keys, adapter_keys

#: ``init(key, shape, dtype)``, as in ``jax.nn.initializers``.
Initializer = Callable[..., jax.Array]


def normal(stddev: float) -> Initializer:
    """Return a normal initialiser with mean 0 and standard deviation ``stddev``.

    Layers take any initialiser by jax's convention, ``init(key, shape, dtype)``: those of
    ``jax.nn.initializers``, or a function of one's own. Biases begin at zero, scales at one.
    """
    return jax.nn.initializers.normal(stddev)


class LowRankConfig(NamedTuple):
    """A low-rank adapter (Hu et al., 2021) of a layer, as PEFT has it.

    ``rate`` of its input's elements are dropped in training; ``gaussian`` draws its first matrix
    from a normal distribution and not, as PyTorch a Linear's kernel, uniformly.
    """

    rank: int
    scale: float
    rate: float = 0.0
    gaussian: bool = False

    @property
    def init(self) -> Initializer:
        """What draws ``lora_A``."""
        if self.gaussian:
            return normal(1 / self.rank)
        return jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class Linear(nnx.Module):
    """``y = x @ kernel + bias`` with ``kernel`` of shape (in, out), the Flax layout.

    **Arguments:** ``in_features`` and ``out_features`` are the last axes of what goes in and out;
    ``init(key, shape, dtype)`` makes the kernel (:func:`hfseq.nn.normal`, or any of
    ``jax.nn.initializers``) with a key of ``rngs``; without ``use_bias`` there is no ``bias``.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None
    # The product of this Linear and of others with the same input, where they are one.
    fused: FusedProjection | None = None
    # How the kernel is split over the mesh, if it is (hfseq.nn.sharding).
    weight_axes: sharding.Axes | None = None
    # The axis of ``kernel`` that holds the input features.
    input_axis: ClassVar[int] = 0
    # What :meth:`add_lora` adds.
    lora_A: Linear | None = None
    lora_B: Linear | None = None
    lora: LowRankConfig | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        init: Initializer,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = True,
    ):
        shape = (out_features, in_features) if self.input_axis else (in_features, out_features)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(out_features)) if use_bias else nnx.data(None)
        self.dot_general: DotGeneral = lax.dot_general

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (..., in_features) to (..., out_features)."""
        kernel, dtype = self.kernel[...], self.compute_dtype
        # Not cast where it need not be: fused products know their input by its identity.
        x = x if dtype is None or x.dtype == dtype else x.astype(dtype)
        given, dimensions = x, (((x.ndim - 1,), (self.input_axis,)), ((), ()))
        x = sharding.constrain_product_input(x, self.weight_axes, self.input_axis)
        if is_quantized(kernel):
            y = quantized_kernel_product(x, kernel, self.weight_axes, dimensions)
        else:
            kernel = self.gathered_kernel()
            kernel = kernel.astype(x.dtype) if self.dot_general is lax.dot_general else kernel
            multiply = self.dot_general if self.fused is None else partial(self.fused, given)
            y = multiply(x, kernel, dimensions)
        y = sharding.constrain_product_output(y, self.weight_axes, 1 - self.input_axis)
        y = y if self.bias is None else add_bias(y, self.bias[...], True)
        if self.lora is None or self.lora_A is None or self.lora_B is None:
            return y
        keys = adapter_keys(len(given)) if self.lora.rate else None
        given = dropout(given.astype(y.dtype), self.lora.rate, keys)
        return y + self.lora.scale * self.lora_B(self.lora_A(given))

    def gathered_kernel(self) -> jax.Array:
        """Return the kernel as a product needs it, put together where ``fsdp`` splits it."""
        kernel = self.kernel[...]
        kernel = dequantize(kernel, jnp.float32) if is_quantized(kernel) else kernel
        return sharding.gather_weight(kernel, self.weight_axes)

    def add_lora(self, lora: LowRankConfig, rngs: nnx.Rngs) -> None:
        """Add a low-rank product, ``scale * (dropout(x) @ lora_A @ lora_B)``, which begins at 0."""
        inner, outer = self.kernel.shape[:: -1 if self.input_axis else 1]
        self.lora, zeros = lora, jax.nn.initializers.zeros
        self.lora_A = Linear(inner, lora.rank, lora.init, rngs, use_bias=False)
        self.lora_B = Linear(lora.rank, outer, zeros, rngs, use_bias=False)
        self.lora_A.compute_dtype = self.lora_B.compute_dtype = self.compute_dtype


class Conv1D(Linear):
    """The Linear of GPT-2: ``y = x @ kernel.T + bias``, ``kernel`` of shape (out, in) as in v4."""

    input_axis = 1


class Conv(nnx.Module):
    """A convolution, channels last: (batch, length, in) or (batch, height, width, in).

    **Arguments:** ``in_features`` and ``out_features`` are the channels of what goes in and out;
    ``kernel_size`` has a number for each axis that is convolved, and so do ``stride`` and
    ``padding`` (zeros before and after), where one number stands for all; ``groups`` of channels
    see one another alone; ``init(key, shape, dtype)`` makes ``kernel`` (taps, in / groups, out)
    with a key of ``rngs``; without ``use_bias`` there is no ``bias``.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None
    weight_axes: sharding.Axes | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        init: Initializer,
        rngs: nnx.Rngs,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[tuple[int, int]] = 0,
        groups: int = 1,
        use_bias: bool = True,
    ):
        size = tuple(kernel_size)
        if in_features % groups or out_features % groups:
            raise UsageError(
                f"{groups} groups do not divide {in_features} and {out_features} channels"
            )
        shape = (*size, in_features // groups, out_features)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(out_features)) if use_bias else nnx.data(None)
        self.stride = (stride,) * len(size) if isinstance(stride, int) else tuple(stride)
        if isinstance(padding, int):
            padding = [(padding, padding)] * len(size)
        self.padding = tuple(padding)
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, ..., in_features) to (batch, ..., out_features)."""
        x = x.astype(self.compute_dtype or x.dtype)
        kernel = self.gathered_kernel().astype(x.dtype)
        size = kernel.shape[:-2]
        if size == self.stride and self.groups == 1 and not any(map(any, self.padding)):
            # Taps that do not overlap are one product: faster than XLA's convolution on CPUs.
            x, kernel = _blocks(x, size), kernel.reshape(-1, kernel.shape[-1])
            y = low_precision_dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
        else:
            options = (self.stride, self.padding, self.groups)
            convolve = _convolve if self.groups == 1 else _convolve_groups
            if self.groups == 1 and len(size) > 1:
                y = convolve(x, kernel, *options)
            else:  # XLA gathers the batch of groups, and errs where a length is split (jax 0.10)
                y = sharding.map_over_rows(lambda x, k: convolve(x, k, *options), x, kernel)
        return y if self.bias is None else add_bias(y, self.bias[...])

    def gathered_kernel(self) -> jax.Array:
        """Return the kernel as the convolution needs it, put together where ``fsdp`` splits it."""
        return sharding.gather_weight(self.kernel[...], self.weight_axes)


Padding = tuple[tuple[int, int], ...]


def _convolve(
    x: jax.Array, kernel: jax.Array, stride: tuple[int, ...], padding: Padding, groups: int
) -> jax.Array:
    letters = "HW"[: len(stride)]
    return lax.conv_general_dilated(
        x,
        kernel,
        stride,
        padding,
        feature_group_count=groups,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )


# XLA's own gradient of the kernel of several groups is wrong where the batch is split over devices
# (jax 0.10), and on CPUs takes forty times as long as a product for each tap.
_convolve_groups = jax.custom_vjp(_convolve, nondiff_argnums=(2, 3, 4))


def _groups_forward(
    x: jax.Array, kernel: jax.Array, stride: tuple[int, ...], padding: Padding, groups: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, kernel, stride, padding, groups), (x, kernel)


def _groups_backward(
    stride: tuple[int, ...],
    padding: Padding,
    groups: int,
    saved: tuple[jax.Array, jax.Array],
    change: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    before = jax.vjp(lambda x: _convolve(x, kernel, stride, padding, groups), x)[1](change)[0]
    spans = [(n - 1) * step + 1 for n, step in zip(change.shape[1:-1], stride, strict=True)]
    steps = tuple(slice(None, None, step) for step in stride)
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    behind = change.reshape(-1, groups, change.shape[-1] // groups)

    def tap(first: jax.Array) -> jax.Array:
        seen = lax.dynamic_slice(padded, (0, *first, 0), (x.shape[0], *spans, x.shape[-1]))[
            :, *steps
        ].reshape(-1, groups, x.shape[-1] // groups)
        return jnp.einsum("ngi,ngo->igo", seen, behind, preferred_element_type=jnp.float32)

    taps = jnp.indices(kernel.shape[:-2]).reshape(len(stride), -1).T
    return before, lax.map(tap, taps).reshape(kernel.shape).astype(kernel.dtype)


_convolve_groups.defvjp(_groups_forward, _groups_backward)


def _blocks(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Cut (batch, ..., channels) into blocks of ``size``, and put each block into one vector."""
    counts = [length // taps for length, taps in zip(x.shape[1:], size, strict=False)]
    kept = (slice(count * taps) for count, taps in zip(counts, size, strict=True))
    pairs = [number for pair in zip(counts, size, strict=True) for number in pair]
    x = x[:, *kept].reshape(x.shape[0], *pairs, x.shape[-1])
    places, taps = range(1, x.ndim - 1, 2), range(2, x.ndim - 1, 2)
    return x.transpose(0, *places, *taps, x.ndim - 1).reshape(x.shape[0], *counts, -1)


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return what a configuration gives as one number or as two, as two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def embed_patches(conv: Conv, pixel_values: jax.Array) -> jax.Array:
    """Map pictures (batch, channels, height, width) to (batch, patches, features), row by row."""
    x = conv(pixel_values.transpose(0, 2, 3, 1))
    return x.reshape(x.shape[0], -1, x.shape[-1])


class Embed(nnx.Module):
    """A table of vectors, read by id and, where the head is tied, multiplied from the right.

    **Arguments:** ``num_embeddings`` vectors of ``features`` numbers, which ``init(key, shape,
    dtype)`` makes with a key of ``rngs``.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None
    weight_axes: sharding.Axes | None = None
    # What :meth:`add_lora` adds.
    lora_embedding_A: nnx.Param | None = None
    lora_embedding_B: nnx.Param | None = None
    lora: LowRankConfig | None = None

    def __init__(self, num_embeddings: int, features: int, init: Initializer, rngs: nnx.Rngs):
        self.embedding = nnx.Param(init(rngs.params(), (num_embeddings, features), jnp.float32))
        self.dot_general: DotGeneral = lax.dot_general

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the rows of ``ids``: (...) to (..., features)."""
        # Take first, cast afterwards: the table is far larger than the rows that are read.
        ids = sharding.constrain_token_ids(ids, self.weight_axes)
        rows = jnp.take(self._table(), ids, axis=0).astype(self._dtype)
        rows = sharding.constrain_lookup(rows, self.weight_axes)
        if self.lora is None or self.lora_embedding_A is None or self.lora_embedding_B is None:
            return rows
        few = jnp.take(self.lora_embedding_A[...], ids, axis=1).astype(rows.dtype)
        return rows + self.lora.scale * jnp.einsum(
            "r...,hr->...h", few, self.lora_embedding_B[...].astype(rows.dtype)
        )

    def add_lora(self, lora: LowRankConfig, rngs: nnx.Rngs) -> None:
        """Add a table of low rank, ``scale * (lora_embedding_B @ lora_embedding_A)[:, ids]``.

        Its head, if it is tied, goes without.
        """
        many, features = self.embedding.shape
        self.lora = lora
        self.lora_embedding_A = nnx.Param(jnp.zeros((lora.rank, many)))
        drawn = normal(1.0)(rngs.params(), (features, lora.rank), jnp.float32)
        self.lora_embedding_B = nnx.Param(drawn)

    def attend(self, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Return ``x @ embedding.T + bias``: logits for hidden states (..., features).

        This is the tied head. ``bias`` (num_embeddings,) is a parameter of the head's module,
        ``nnx.Param(jnp.zeros(config.vocab_size))``; without one nothing is added.
        """
        table, x = self._table(), x.astype(self._dtype)
        if self.dot_general is lax.dot_general:
            table = table.astype(x.dtype)
        x = sharding.constrain_product_input(x, self.weight_axes, 1)
        y = self.dot_general(x, table, (((x.ndim - 1,), (1,)), ((), ())))
        y = sharding.constrain_product_output(y, self.weight_axes, 0)
        return y if bias is None else add_bias(y, jnp.asarray(bias))

    def _table(self) -> jax.Array:
        return sharding.gather_weight(self.embedding[...], self.weight_axes)

    @property
    def _dtype(self) -> DTypeLike:
        return self.compute_dtype or self.embedding[...].dtype


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, in float32 whatever the type of computation is.

    **Arguments:** ``features`` numbers are normalised, ``epsilon`` is added to their variance;
    ``use_scale`` and ``use_bias`` tell whether there is a ``scale`` and a ``bias`` (without both:
    PyTorch's ``elementwise_affine=False``). ``rngs`` is taken as by other layers, and not needed.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(
        self,
        features: int,
        epsilon: float,
        rngs: nnx.Rngs | None = None,
        *,
        use_bias: bool = True,
        use_scale: bool = True,
    ):
        self.scale = nnx.Param(jnp.ones(features)) if use_scale else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(features)) if use_bias else nnx.data(None)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise (..., features)."""
        dtype = self.compute_dtype or x.dtype
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        y = centred * lax.rsqrt(variance + self.epsilon)
        y = y if self.scale is None else y * self.scale[...]
        y = y if self.bias is None else y + self.bias[...]
        return y.astype(dtype)


class GroupNorm(nnx.Module):
    """Normalisation over all places and a group of channels, in float32 (Wu and He, 2018).

    **Arguments:** ``groups`` divide the ``features`` on the last axis, one after the other;
    ``epsilon`` is added to their variance; ``rngs`` is taken as by other layers, and not needed.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(self, groups: int, features: int, epsilon: float, rngs: nnx.Rngs | None = None):
        if features % groups:
            raise UsageError(f"{groups} groups do not divide {features} channels")
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.groups, self.epsilon = groups, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise (batch, ..., features), each row of the batch by itself."""
        dtype, shape = self.compute_dtype or x.dtype, x.shape
        x = x.astype(jnp.float32).reshape(shape[0], -1, self.groups, shape[-1] // self.groups)
        centred = x - x.mean((1, 3), keepdims=True)
        variance = jnp.square(centred).mean((1, 3), keepdims=True)
        y = (centred * lax.rsqrt(variance + self.epsilon)).reshape(shape)
        return (y * self.scale[...] + self.bias[...]).astype(dtype)


class BatchNorm(nnx.Module):
    """Normalisation of each channel over the batch and all places, in float32 (Ioffe and Szegedy).

    Outside of training the running mean and variance count, which are the collection
    ``batch_stats`` and no parameters. While training each call moves them towards those of the
    batch, by ``1 - momentum``, the variance without bias, as PyTorch does. Under ``jit`` they are
    those of the whole batch, on however many devices it lies.

    **Arguments:** ``features`` is the number of channels on the last axis; ``epsilon`` is added to
    the variance; ``rngs`` is taken as by other layers, and not needed.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(
        self,
        features: int,
        epsilon: float = 1e-5,
        rngs: nnx.Rngs | None = None,
        *,
        momentum: float = 0.9,
    ):
        self.scale, self.bias = nnx.Param(jnp.ones(features)), nnx.Param(jnp.zeros(features))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(features)), nnx.BatchStat(jnp.ones(features))
        self.epsilon, self.momentum = epsilon, momentum

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise (batch, ..., features)."""
        dtype = self.compute_dtype or x.dtype
        x = x.astype(jnp.float32)
        mean, variance = self.mean[...], self.var[...]
        if current_options().train:
            axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
            seen, around = x.mean(axes), x.var(axes)
            kept, new = self.momentum, 1 - self.momentum
            unbiased = around * (count / max(count - 1, 1))
            self.mean.set_value(lax.stop_gradient(kept * mean + new * seen))
            self.var.set_value(lax.stop_gradient(kept * variance + new * unbiased))
            mean, variance = seen, around
        y = (x - mean) * lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, in float32 (Zhang and Sennrich, 2019).

    **Arguments:** ``features`` numbers are normalised, ``epsilon`` is added to their mean square;
    ``rngs`` is taken as by other layers, and not needed. ``leaf`` names the parameter (Llama's tree
    has ``weight``), to which ``offset`` is added (Gemma: 1, and the parameter begins at zero).
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(
        self,
        features: int,
        epsilon: float,
        rngs: nnx.Rngs | None = None,
        *,
        leaf: str = "scale",
        offset: float = 0.0,
    ):
        setattr(self, leaf, nnx.Param(jnp.full(features, 1.0 - offset)))
        self.leaf, self.offset, self.epsilon = leaf, offset, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise (..., features)."""
        dtype = self.compute_dtype or x.dtype
        x = x.astype(jnp.float32)
        y = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        scale = getattr(self, self.leaf)[...]
        return (y * (scale + self.offset if self.offset else scale)).astype(dtype)


class Dropout(nnx.Module):
    """Inverted dropout; ``rngs=None`` (evaluation) or a rate of 0 returns the input itself.

    **Arguments:** ``rate`` is the probability of each element to be dropped.
    """

    __signature__ = ConstructorSignature()

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Drop elements of ``x``."""
        return dropout(x, self.rate, rngs)


class DropPath(Dropout):
    """Stochastic depth (Huang et al., 2016): a branch is dropped for whole rows of the batch.

    ``rngs=None`` (evaluation) or a rate of 0 returns the input itself; rows that stay are scaled
    up. **Arguments:** ``rate`` is the probability of each row to be dropped.
    """

    def __call__(
        self, x: jax.Array, rngs: Keys | None, rate: float | jax.Array | None = None
    ) -> jax.Array:
        """Drop rows of ``x``, with the probability ``rate`` (default: the module's) where given.

        A rate that differs between layers comes as an array, one of ``per_layer`` of
        :func:`hfseq.nn.run_layers`.
        """
        if rngs is None or self.rate == 0.0:
            return x
        threshold = jnp.round((self.rate if rate is None else jnp.asarray(rate)) * 65536)
        bits = rngs.bits((x.shape[0], *(1 for _ in x.shape[1:])))
        kept = 1.0 - jnp.minimum(threshold, 65535) / 65536
        scaled = (x / kept).astype(x.dtype)
        return jnp.where(bits.astype(jnp.int32) >= threshold, scaled, jnp.zeros_like(x))


def dropout(x: jax.Array, rate: float, rngs: Keys | None) -> jax.Array:
    """Zero each element with probability ``rate`` (in steps of 2**-16) and scale the others up."""
    if rngs is None or rate == 0.0:
        return x
    if rate >= 1.0:
        return jnp.zeros_like(x)
    return dropout_with_bits(x, rate, rngs.bits(x.shape))


def dropout_with_bits(x: jax.Array, rate: float, bits: jax.Array) -> jax.Array:
    """Zero the elements of ``x`` whose ``bits`` (uint16, as many) say so; see :func:`dropout`."""
    # 16 random bits an element: half of the cost of 32, and 1/65536 is fine enough for a rate.
    threshold = round(rate * 65536)
    keep = bits >= jnp.uint16(min(threshold, 65535))
    return jnp.where(keep, x / (1.0 - threshold / 65536), jnp.zeros_like(x))


Activation = Callable[[jax.Array], jax.Array]


@jax.checkpoint
def _gelu(x: jax.Array) -> jax.Array:
    """Exact GELU by erf, in float32: half of the time of jax.nn.gelu's erfc, PyTorch's values.

    Rematerialised: only ``x`` is kept for the backward pass, not three arrays of its size.
    """
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


@jax.checkpoint
def _tanh_gelu(x: jax.Array) -> jax.Array:
    """GELU by tanh, in float32, as ``x sigmoid(2 z)``, which is ``0.5 x (1 + tanh z)``.

    jax.nn.gelu rounds its constants to a half type, and XLA's CPU kernels write them down as arrays
    of the size of ``x``: in bfloat16 the wide layer takes 1.7 times as long. Rematerialised.
    """
    y = x.astype(jnp.float32)
    slope = 2.0 * math.sqrt(2.0 / math.pi)
    return (y * jax.nn.sigmoid(y * (slope + 0.044715 * slope * y * y))).astype(x.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": _gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "mish": jax.nn.mish,
    "linear": lambda x: x,
}


def activation(name: str) -> Activation:
    """Return the activation called ``name`` in a Hugging Face configuration."""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise UsageError(
            f"unknown activation '{name}' in the configuration{did_you_mean(name, ACTIVATIONS)} "
            f"(known: {known})"
        )
    return ACTIVATIONS[name]
