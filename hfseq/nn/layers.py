"""Layers of model files: parameters, initialization and forward computation.

Parameters have the names that checkpoints use (`kernel`, `bias`, `scale`, `embedding`). After a
model is created, a precision recipe (`hfseq.nn.precision`) sets the computation dtype of its
layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

#: `init(key, shape, dtype)`, as in `jax.nn.initializers`.
Initializer = Callable[..., jax.Array]


def normal(stddev: float) -> Initializer:
    """Returns a normal initializer with mean 0.

    Layers accept any initializer with the signature `init(key, shape, dtype)`, such as those of
    `jax.nn.initializers`. Biases are initialized with zeros and scales with ones.
    """
    return jax.nn.initializers.normal(stddev)


def truncated_normal(stddev: float) -> Initializer:
    """Returns a normal initializer whose values are between -2 and 2.

    As in PyTorch's `trunc_normal_`, and unlike in `jax.nn.initializers`, these limits are not
    multiples of `stddev`.
    """
    limit = 2 / stddev
    return jax.nn.initializers.truncated_normal(stddev, lower=-limit, upper=limit)


class LowRankConfig(NamedTuple):
    """Settings of the low-rank adapter of a layer (LoRA; Hu et al., 2021), as in PEFT.

    Attributes:
        rank: Rank of the adapter.
        scale: Factor of the adapter's output.
        dropout_rate: Dropout rate of the adapter's input in training.
        gaussian: Whether `lora_A` is initialized with a normal distribution. By default it is
            uniform, like the kernel of PyTorch's Linear.
    """

    rank: int
    scale: float
    dropout_rate: float = 0.0
    gaussian: bool = False

    @property
    def init(self) -> Initializer:
        """The initializer of `lora_A`."""
        if self.gaussian:
            return normal(1 / self.rank)
        return jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def initial_bias(features: int, init: Initializer | None, rngs: nnx.Rngs) -> nnx.Param:
    """Returns a bias parameter. Without an initializer it is zero."""
    if init is None:
        return nnx.Param(jnp.zeros(features))
    return nnx.Param(init(rngs.params(), (features,), jnp.float32))


def uniform(fan_in: int) -> Initializer:
    """Returns PyTorch's default initializer of biases, and of kernels with `fan_in` inputs."""
    bound = fan_in**-0.5

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nnx.Module):
    """`y = x @ kernel + bias`, where `kernel` has the Flax layout `(in_features, out_features)`.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        init: Initializer of the kernel, `init(key, shape, dtype)`, such as `hfseq.nn.normal`.
        rngs: Random keys for the initialization.
        use_bias: Whether to add a bias.
        bias_init: Initializer of the bias. Default: zeros.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None
    # If a precision recipe fuses projections, this computes the projection together with the other
    # projections of the same input.
    fused_projection: FusedProjection | None = None
    # The mesh axes that split each dimension of the kernel (hfseq.nn.sharding).
    weight_axes: sharding.Axes | None = None
    # Whether adapters and quantization apply to layers of this class.
    adaptable: ClassVar[bool] = True
    # The axis of the input features in `kernel`.
    input_axis: ClassVar[int] = 0
    # Set by `add_lora`.
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
        bias_init: Initializer | None = None,
    ):
        shape = (out_features, in_features) if self.input_axis else (in_features, out_features)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = initial_bias(out_features, bias_init, rngs) if use_bias else nnx.data(None)
        self.dot_general: DotGeneral = lax.dot_general

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        # An input that already has the right dtype must stay the same object, because fused
        # projections recognize their common input by object identity.
        if self.compute_dtype is not None and x.dtype != self.compute_dtype:
            x = x.astype(self.compute_dtype)
        y = self._product(x)
        if self.bias is not None:
            y = add_bias(y, self.bias[...], True)
        if self.lora is None or self.lora_A is None or self.lora_B is None:
            return y
        adapter_rngs = adapter_keys(len(x)) if self.lora.dropout_rate else None
        adapter_input = dropout(x.astype(y.dtype), self.lora.dropout_rate, adapter_rngs)
        return y + self.lora.scale * self.lora_B(self.lora_A(adapter_input))

    def _product(self, x: jax.Array) -> jax.Array:
        """Computes `x @ kernel` and sets the sharding of its input and result."""
        out_axis = 1 - self.input_axis
        dimensions = (((x.ndim - 1,), (self.input_axis,)), ((), ()))
        inputs = sharding.constrain_product_input(x, self.weight_axes, self.input_axis)
        if is_quantized(self.kernel[...]):
            y = quantized_kernel_product(inputs, self.kernel[...], self.weight_axes, dimensions)
            return sharding.constrain_product_output(y, self.weight_axes, out_axis)
        kernel = self.gathered_kernel()
        if self.dot_general is lax.dot_general:  # other functions cast the kernel themselves
            kernel = kernel.astype(inputs.dtype)
        if self.fused_projection is None:
            y = self.dot_general(inputs, kernel, dimensions)
        else:
            y = self.fused_projection(x, inputs, kernel, dimensions)
        return sharding.constrain_product_output(y, self.weight_axes, out_axis)

    def gathered_kernel(self) -> jax.Array:
        """Returns the kernel gathered over `fsdp`, and dequantized if it is quantized."""
        kernel = self.kernel[...]
        kernel = dequantize(kernel, jnp.float32) if is_quantized(kernel) else kernel
        return sharding.gather_weight(kernel, self.weight_axes)

    def add_lora(self, lora: LowRankConfig, rngs: nnx.Rngs) -> None:
        """Adds a low-rank adapter, `scale * (dropout(x) @ lora_A @ lora_B)`.

        `lora_B` is initialized with zeros, so that the new adapter does not change the output.
        """
        inner, outer = self.kernel.shape[:: -1 if self.input_axis else 1]
        self.lora, zeros = lora, jax.nn.initializers.zeros
        self.lora_A = Linear(inner, lora.rank, lora.init, rngs, use_bias=False)
        self.lora_B = Linear(lora.rank, outer, zeros, rngs, use_bias=False)
        self.lora_A.compute_dtype = self.lora_B.compute_dtype = self.compute_dtype


class Conv1D(Linear):
    """The linear layer of GPT-2: `y = x @ kernel.T + bias`.

    `kernel` has the shape `(out_features, in_features)`, as in Transformers 4.
    """

    input_axis = 1


def per_axis(size: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Returns one size per axis, from one number for all axes or from a sequence."""
    return (size,) * axes if isinstance(size, int) else tuple(size)


class Conv(nnx.Module):
    """A convolution over `(batch, length, in_features)` or `(batch, height, width, in_features)`.

    There may also be three spatial axes. The kernel has the shape `(*kernel_size, in_features //
    groups, out_features)`.

    Args:
        in_features: Input channels.
        out_features: Output channels.
        kernel_size: Size of the kernel for each spatial axis.
        init: Initializer of the kernel, `init(key, shape, dtype)`.
        rngs: Random keys for the initialization.
        stride: Stride for each spatial axis, or one number for all.
        padding: A pair for each spatial axis, the numbers of zeros before and after the input. One
            number stands for a pair of equal numbers, or for all axes. "same" keeps the size of the
            input if the stride is 1, and "valid" is 0.
        dilation: Distance between the elements of a window for each spatial axis, or one number for
            all.
        groups: Number of channel groups. Output channels only depend on the input channels of their
            group.
        use_bias: Whether to add a bias.
        bias_init: Initializer of the bias. Default: zeros.
        channels_first: Whether the input and the output have PyTorch's layout, `(batch, channels,
            ...)`.
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
        padding: int | str | Sequence[int | tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        bias_init: Initializer | None = None,
        channels_first: bool = False,
    ):
        size = tuple(kernel_size)
        if in_features % groups or out_features % groups:
            raise UsageError(
                f"{groups} groups do not divide {in_features} and {out_features} channels evenly"
            )
        shape = (*size, in_features // groups, out_features)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = initial_bias(out_features, bias_init, rngs) if use_bias else nnx.data(None)
        self.stride = per_axis(stride, len(size))
        self.dilation = per_axis(dilation, len(size))
        self.padding = _padding(padding, size, self.dilation)
        self.groups = groups
        self.channels_first = channels_first

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, ..., in_features)` to `(batch, ..., out_features)`."""
        if self.channels_first:
            return jnp.moveaxis(self._convolve(jnp.moveaxis(x, 1, -1)), -1, 1)
        return self._convolve(x)

    def _convolve(self, x: jax.Array) -> jax.Array:
        x = x.astype(self.compute_dtype or x.dtype)
        kernel = self.gathered_kernel().astype(x.dtype)
        size = kernel.shape[:-2]
        if size == self.stride and self.groups == 1 and not any(map(any, self.padding)):
            # If the windows do not overlap, the convolution is one matrix multiplication, which is
            # faster than XLA's convolution on CPUs.
            x, kernel = _blocks(x, size), kernel.reshape(-1, kernel.shape[-1])
            y = low_precision_dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
        else:
            options = (self.stride, self.padding, self.dilation, self.groups)
            convolve = _convolve if self.groups == 1 else _convolve_groups
            if self.groups == 1 and len(size) > 1:
                y = convolve(x, kernel, *options)
            else:
                # Each device computes its own part of the batch. Otherwise XLA gathers the batch of
                # a grouped convolution, and returns wrong results if the length is split over
                # devices (jax 0.10).
                y = sharding.map_over_rows(lambda x, k: convolve(x, k, *options), x, kernel)
        return y if self.bias is None else add_bias(y, self.bias[...])

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """The size of the kernel for each spatial axis."""
        return tuple(self.kernel.shape[:-2])

    def gathered_kernel(self) -> jax.Array:
        """Returns the kernel gathered over `fsdp`."""
        return sharding.gather_weight(self.kernel[...], self.weight_axes)


Padding = tuple[tuple[int, int], ...]


def _padding(
    padding: int | str | Sequence[int | tuple[int, int]],
    size: Sequence[int],
    dilation: Sequence[int],
) -> Padding:
    """Returns the numbers of zeros before and after each axis."""
    if padding == "same":
        spans = [gap * (taps - 1) for gap, taps in zip(dilation, size, strict=True)]
        return tuple((span // 2, span - span // 2) for span in spans)
    if padding == "valid":
        padding = 0
    if isinstance(padding, str):
        raise UsageError(
            f"unknown padding '{padding}' of a convolution (supported: 'same', 'valid')"
        )
    counts = (padding,) * len(size) if isinstance(padding, int) else padding
    return tuple((count, count) if isinstance(count, int) else count for count in counts)


def _convolve(
    x: jax.Array,
    kernel: jax.Array,
    stride: tuple[int, ...],
    padding: Padding,
    dilation: tuple[int, ...],
    groups: int,
) -> jax.Array:
    letters = "DHW"[-len(stride) :]
    return lax.conv_general_dilated(
        x,
        kernel,
        stride,
        padding,
        rhs_dilation=dilation,
        feature_group_count=groups,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
    )


# XLA's gradient of a grouped kernel is wrong if the batch is split over devices (jax 0.10). On CPUs
# it also takes forty times as long as the gradient below, which computes one matrix multiplication
# per kernel position.
_convolve_groups = jax.custom_vjp(_convolve, nondiff_argnums=(2, 3, 4, 5))


def _groups_forward(
    x: jax.Array,
    kernel: jax.Array,
    stride: tuple[int, ...],
    padding: Padding,
    dilation: tuple[int, ...],
    groups: int,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolve(x, kernel, stride, padding, dilation, groups), (x, kernel)


def _groups_backward(
    stride: tuple[int, ...],
    padding: Padding,
    dilation: tuple[int, ...],
    groups: int,
    saved: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    _, input_vjp = jax.vjp(lambda x: _convolve(x, kernel, stride, padding, dilation, groups), x)
    (input_gradient,) = input_vjp(cotangent)
    spans = [(n - 1) * step + 1 for n, step in zip(cotangent.shape[1:-1], stride, strict=True)]
    steps = tuple(slice(None, None, step) for step in stride)
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    grouped_cotangent = cotangent.reshape(-1, groups, cotangent.shape[-1] // groups)

    def tap(first: jax.Array) -> jax.Array:
        window = lax.dynamic_slice(padded, (0, *first, 0), (x.shape[0], *spans, x.shape[-1]))[
            :, *steps
        ].reshape(-1, groups, x.shape[-1] // groups)
        return jnp.einsum(
            "ngi,ngo->igo", window, grouped_cotangent, preferred_element_type=jnp.float32
        )

    taps = jnp.indices(kernel.shape[:-2]).reshape(len(stride), -1).T * jnp.asarray(dilation)
    return input_gradient, lax.map(tap, taps).reshape(kernel.shape).astype(kernel.dtype)


_convolve_groups.defvjp(_groups_forward, _groups_backward)


def _blocks(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """Cuts `(batch, ..., channels)` into blocks of `size` and flattens each block to a vector."""
    counts = [length // taps for length, taps in zip(x.shape[1:], size, strict=False)]
    covered = (slice(count * taps) for count, taps in zip(counts, size, strict=True))
    pairs = [number for pair in zip(counts, size, strict=True) for number in pair]
    x = x[:, *covered].reshape(x.shape[0], *pairs, x.shape[-1])
    block_axes, taps = range(1, x.ndim - 1, 2), range(2, x.ndim - 1, 2)
    return x.transpose(0, *block_axes, *taps, x.ndim - 1).reshape(x.shape[0], *counts, -1)


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Converts a size from a configuration, one number or a pair, to (height, width)."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def embed_patches(conv: Conv, pixel_values: jax.Array) -> jax.Array:
    """Maps images `(batch, channels, height, width)` to `(batch, patches, features)`.

    Patches are in row-major order.
    """
    x = conv(pixel_values.transpose(0, 2, 3, 1))
    return x.reshape(x.shape[0], -1, x.shape[-1])


class Embed(nnx.Module):
    """An embedding matrix. A tied output head uses the same matrix as its weight (`attend`).

    Args:
        num_embeddings: Number of vectors.
        features: Size of each vector.
        init: Initializer of the matrix, `init(key, shape, dtype)`.
        rngs: Random keys for the initialization.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None
    weight_axes: sharding.Axes | None = None
    # Set by `add_lora`.
    lora_embedding_A: nnx.Param | None = None
    lora_embedding_B: nnx.Param | None = None
    lora: LowRankConfig | None = None

    def __init__(self, num_embeddings: int, features: int, init: Initializer, rngs: nnx.Rngs):
        self.embedding = nnx.Param(init(rngs.params(), (num_embeddings, features), jnp.float32))
        self.dot_general: DotGeneral = lax.dot_general

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the vectors of token IDs `(...)`, with the shape `(..., features)`."""
        # Cast after the lookup, because the matrix is far larger than the selected vectors.
        ids = sharding.constrain_token_ids(ids, self.weight_axes)
        rows = jnp.take(self._table(), ids, axis=0).astype(self._dtype)
        rows = sharding.constrain_lookup(rows, self.weight_axes)
        if self.lora is None or self.lora_embedding_A is None or self.lora_embedding_B is None:
            return rows
        projected = jnp.take(self.lora_embedding_A[...], ids, axis=1).astype(rows.dtype)
        return rows + self.lora.scale * jnp.einsum(
            "r...,hr->...h", projected, self.lora_embedding_B[...].astype(rows.dtype)
        )

    def add_lora(self, lora: LowRankConfig, rngs: nnx.Rngs) -> None:
        """Adds a low-rank adapter, `scale * (lora_embedding_B @ lora_embedding_A)[:, ids]`.

        Only the lookup uses the adapter. A tied output head does not.
        """
        num_embeddings, features = self.embedding.shape
        self.lora = lora
        self.lora_embedding_A = nnx.Param(jnp.zeros((lora.rank, num_embeddings)))
        initial = normal(1.0)(rngs.params(), (features, lora.rank), jnp.float32)
        self.lora_embedding_B = nnx.Param(initial)

    def attend(self, x: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Computes the logits of a tied head, `x @ embedding.T + bias`.

        Args:
            x: Hidden states, `(..., features)`.
            bias: `(num_embeddings,)`, a parameter of the head's module such as
                `nnx.Param(jnp.zeros(config.vocab_size))`, or `None`.
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
    """Layer normalization over the last axis, always computed in float32.

    Args:
        features: Size of the last axis, or the shape of the scale and the bias. With a shape such
            as `(heads, features)`, each head has its own scale. Only the last axis is normalized.
        epsilon: Added to the variance.
        rngs: Not used. It is accepted so that all layers have this argument.
        use_bias: Whether there is a `bias`.
        use_scale: Whether there is a `scale`. Without bias and scale, the layer equals PyTorch's
            `LayerNorm` with `elementwise_affine=False`.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(
        self,
        features: int | tuple[int, ...],
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
        """Normalizes `(..., features)`."""
        dtype = self.compute_dtype or x.dtype
        x = x.astype(jnp.float32)
        centered = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centered).mean(-1, keepdims=True)
        y = centered * lax.rsqrt(variance + self.epsilon)
        y = y if self.scale is None else y * self.scale[...]
        y = y if self.bias is None else y + self.bias[...]
        return y.astype(dtype)


class GroupNorm(nnx.Module):
    """Group normalization over all positions and a group of channels, in float32 (Wu and He, 2018).

    Args:
        groups: Number of groups of adjacent channels.
        features: Number of channels on the last axis.
        epsilon: Added to the variance.
        rngs: Not used. It is accepted so that all layers have this argument.
        channels_first: Whether channels are the second axis, as in PyTorch, and not the last.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(
        self,
        groups: int,
        features: int,
        epsilon: float,
        rngs: nnx.Rngs | None = None,
        *,
        channels_first: bool = False,
    ):
        if features % groups:
            raise UsageError(f"{groups} groups do not divide {features} channels evenly")
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.groups, self.epsilon, self.channels_first = groups, epsilon, channels_first

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes each example of `(batch, ..., features)`."""
        if self.channels_first:
            return jnp.moveaxis(self._normalize(jnp.moveaxis(x, 1, -1)), -1, 1)
        return self._normalize(x)

    def _normalize(self, x: jax.Array) -> jax.Array:
        dtype, shape = self.compute_dtype or x.dtype, x.shape
        x = x.astype(jnp.float32).reshape(shape[0], -1, self.groups, shape[-1] // self.groups)
        centered = x - x.mean((1, 3), keepdims=True)
        variance = jnp.square(centered).mean((1, 3), keepdims=True)
        y = (centered * lax.rsqrt(variance + self.epsilon)).reshape(shape)
        return (y * self.scale[...] + self.bias[...]).astype(dtype)


class BatchNorm(nnx.Module):
    """Batch normalization of each channel, computed in float32 (Ioffe and Szegedy, 2015).

    In evaluation the layer uses the running mean and variance. These are not parameters, but belong
    to the collection `batch_stats`. In training the layer uses the statistics of the batch, and
    updates the running statistics: `running = momentum * running + (1 - momentum) * batch`. As in
    PyTorch, the running variance is updated with the unbiased variance of the batch. Under `jit`
    the statistics are computed from the global batch, on any number of devices.

    Args:
        features: Number of channels on the last axis.
        epsilon: Added to the variance.
        rngs: Not used. It is accepted so that all layers have this argument.
        momentum: Weight of the old running statistics in an update. It is 1 minus the `momentum` of
            PyTorch.
        channels_first: Whether channels are the second axis, as in PyTorch, and not the last.
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
        channels_first: bool = False,
    ):
        self.scale, self.bias = nnx.Param(jnp.ones(features)), nnx.Param(jnp.zeros(features))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(features)), nnx.BatchStat(jnp.ones(features))
        self.epsilon, self.momentum = epsilon, momentum
        self.channels_first = channels_first

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes `(batch, ..., features)`."""
        if self.channels_first:
            return jnp.moveaxis(self._normalize(jnp.moveaxis(x, 1, -1)), -1, 1)
        return self._normalize(x)

    def _normalize(self, x: jax.Array) -> jax.Array:
        dtype = self.compute_dtype or x.dtype
        x = x.astype(jnp.float32)
        mean, variance = self.mean[...], self.var[...]
        if current_options().train:
            axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
            batch_mean, batch_variance = x.mean(axes), x.var(axes)
            momentum, update = self.momentum, 1 - self.momentum
            unbiased = batch_variance * (count / max(count - 1, 1))
            self.mean.set_value(lax.stop_gradient(momentum * mean + update * batch_mean))
            self.var.set_value(lax.stop_gradient(momentum * variance + update * unbiased))
            mean, variance = batch_mean, batch_variance
        y = (x - mean) * lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square normalization over the last axis, in float32 (Zhang and Sennrich, 2019).

    Args:
        features: Size of the last axis.
        epsilon: Added to the mean square.
        rngs: Not used. It is accepted so that all layers have this argument.
        leaf: Name of the parameter (`weight` in Llama).
        offset: Added to the parameter before the multiplication (1 in Gemma). The parameter is
            initialized with `1 - offset`.
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
        """Normalizes `(..., features)`."""
        dtype = self.compute_dtype or x.dtype
        x = x.astype(jnp.float32)
        y = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        scale = getattr(self, self.leaf)[...]
        return (y * (scale + self.offset if self.offset else scale)).astype(dtype)


class Dropout(nnx.Module):
    """Inverted dropout.

    With `rngs=None` (evaluation) or a rate of 0 the input is returned unchanged.

    Args:
        rate: The probability that an element is dropped.
    """

    __signature__ = ConstructorSignature()

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x: jax.Array, rngs: Keys | None) -> jax.Array:
        """Drops elements of `x`."""
        return dropout(x, self.rate, rngs)


class DropPath(Dropout):
    """Stochastic depth (Huang et al., 2016): drops a residual branch for whole examples of a batch.

    The branch of the other examples is scaled up. With `rngs=None` (evaluation) or a rate of 0 the
    input is returned unchanged.

    Args:
        rate: The probability that an example is dropped.
    """

    def __call__(
        self, x: jax.Array, rngs: Keys | None, rate: float | jax.Array | None = None
    ) -> jax.Array:
        """Drops examples of `x`.

        Args:
            x: The output of the branch, `(batch, ...)`.
            rngs: Random keys, or `None` in evaluation.
            rate: Overrides the dropout rate of the module. If layers have different rates, pass
                them as an array in the argument `per_layer` of `hfseq.nn.run_layers`.
        """
        if rngs is None or self.rate == 0.0:
            return x
        threshold = jnp.round((self.rate if rate is None else jnp.asarray(rate)) * 65536)
        bits = rngs.bits((x.shape[0], *(1 for _ in x.shape[1:])))
        keep_rate = 1.0 - jnp.minimum(threshold, 65535) / 65536
        scaled = (x / keep_rate).astype(x.dtype)
        return jnp.where(bits.astype(jnp.int32) >= threshold, scaled, jnp.zeros_like(x))


def dropout(x: jax.Array, rate: float, rngs: Keys | None) -> jax.Array:
    """Sets each element to zero with probability `rate`, and scales up all other elements.

    The rate is rounded to a multiple of 2**-16.
    """
    if rngs is None or rate == 0.0:
        return x
    if rate >= 1.0:
        return jnp.zeros_like(x)
    return dropout_with_bits(x, rate, rngs.bits(x.shape))


def dropout_with_bits(x: jax.Array, rate: float, bits: jax.Array) -> jax.Array:
    """Applies dropout with random bits that the caller provides.

    Args:
        x: The input.
        rate: Dropout rate.
        bits: Random uint16 bits of the shape of `x`.
    """
    # 16 random bits per element cost half as much as 32, and 1/65536 is precise enough for a rate.
    threshold = round(rate * 65536)
    keep = bits >= jnp.uint16(min(threshold, 65535))
    return jnp.where(keep, x / (1.0 - threshold / 65536), jnp.zeros_like(x))


Activation = Callable[[jax.Array], jax.Array]


@jax.checkpoint
def _gelu(x: jax.Array) -> jax.Array:
    """Exact GELU with `erf`, computed in float32.

    The result equals PyTorch's. The function takes half the time of `jax.nn.gelu`. It is
    rematerialized: the forward pass stores only `x` for the backward pass, instead of three arrays
    of this size.
    """
    y = x.astype(jnp.float32)
    return (0.5 * y * (1.0 + jax.lax.erf(y * math.sqrt(0.5)))).astype(x.dtype)


@jax.checkpoint
def _tanh_gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU, computed in float32.

    It is `0.5 * x * (1 + tanh(z))` with `z = sqrt(2 / pi) * (x + 0.044715 * x**3)`, computed as
    `x * sigmoid(2 * z)`. `jax.nn.gelu` is not used, because it rounds its constants to the half
    precision dtype, and XLA's CPU kernels store the constants as arrays of the size of `x`. These
    arrays make the feed-forward layer 1.7 times slower in bfloat16. The function is rematerialized.
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
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "hardswish": jax.nn.hard_swish,
    "gelu_10": lambda x: jnp.clip(_gelu(x), -10, 10),
    "gelu_python": _gelu,
    "gelu_python_tanh": _tanh_gelu,
    "gelu_accurate": _tanh_gelu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "mish": jax.nn.mish,
    "linear": lambda x: x,
}


def activation(name: str) -> Activation:
    """Returns the activation function with this name in Hugging Face configurations.

    Raises:
        UsageError: The name is unknown.
    """
    if name not in ACTIVATIONS:
        names = ", ".join(sorted(ACTIVATIONS))
        raise UsageError(
            f"unknown activation '{name}' in the configuration{did_you_mean(name, ACTIVATIONS)} "
            f"(supported: {names})"
        )
    return ACTIVATIONS[name]
