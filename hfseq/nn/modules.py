"""Modules for PyTorch layers that few model families use.

`hfseq port` needs them, for example, for transposed convolutions, for `torch.nn.Sequential`, and
for modules without parameters, such as pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from hfseq.nn.attention import attend
from hfseq.nn.context import ConstructorSignature
from hfseq.nn.functional.linear import linear
from hfseq.nn.functional.sliding import conv_transpose
from hfseq.nn.layers import Conv, Dropout, Initializer, Linear, initial_bias, per_axis
from hfseq.nn.random import Keys


def identity(x: Any, *_: Any) -> Any:
    """Returns the first argument and ignores all others."""
    return x


#: Name of the collection of buffers.
BUFFERS = "buffers"


class Buffer(nnx.Variable):
    """An array that is not trained, like a buffer of PyTorch.

    Buffers belong to the collection `buffers`. If checkpoints contain a buffer, the model class
    lists its name in `stored_collections`, such as `{"buffers": ("correction_bias",)}`.
    """


nnx.register_variable_name(BUFFERS, Buffer)


class Function:
    """A function with fixed keyword arguments, such as pooling with a window size.

    Two objects are equal if their functions and arguments are equal. Thus `scan_layers` can treat
    layers that contain such objects as layers of the same structure.

    Args:
        function: The function.
        **arguments: The fixed keyword arguments.
    """

    def __init__(self, function: Callable[..., Any], **arguments: Any):
        self.function = function
        self.arguments = arguments

    def __call__(self, *inputs: Any) -> Any:
        """Calls the function with the fixed keyword arguments."""
        return self.function(*inputs, **self.arguments)

    def _key(self) -> tuple[Any, str]:
        return self.function, repr(sorted(self.arguments.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"Function({getattr(self.function, '__name__', self.function)}{arguments})"


class Sequential(nnx.Module):
    """Calls modules and functions one after the other, like `torch.nn.Sequential`.

    In checkpoints, the name of a module is its index among all layers. Functions are counted too,
    because PyTorch has modules without parameters in their place.

    Args:
        *layers: The modules and functions. Only `Dropout` and `Sequential` get the random keys.
    """

    __signature__ = ConstructorSignature()

    def __init__(self, *layers: Callable[..., Any]):
        self.functions = tuple(
            (number, layer)
            for number, layer in enumerate(layers)
            if not isinstance(layer, nnx.Module)
        )
        self.count = len(layers)
        for number, layer in enumerate(layers):
            if isinstance(layer, nnx.Module):
                setattr(self, str(number), layer)

    def __call__(self, x: Any, rngs: Keys | None = None) -> Any:
        """Calls all layers in order."""
        for layer in self:
            x = layer(x, rngs) if isinstance(layer, Dropout | Sequential) else layer(x)
        return x

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        number = range(self.count)[number]
        functions = dict(self.functions)
        return functions[number] if number in functions else getattr(self, str(number))

    def __iter__(self) -> Any:
        return (self[number] for number in range(self.count))


class WeightNormConv(Conv):
    """A convolution with weight normalization (Salimans and Kingma, 2016).

    As in PyTorch, two parameters replace the kernel. `parametrizations.weight.original0` contains
    the norm of each slice of the kernel along an axis. `parametrizations.weight.original1`, of
    shape `(out, in / groups, *kernel_size)`, contains the directions of the slices.

    Args:
        conv: The convolution whose kernel is replaced.
        axis: The axis of the slices in the layout of `original1`.
    """

    def __init__(self, conv: Conv, axis: int = 0):
        for name in ("bias", "stride", "padding", "dilation", "groups", "channels_first"):
            setattr(self, name, getattr(conv, name))
        kernel = conv.kernel[...]
        direction = kernel.transpose(kernel.ndim - 1, kernel.ndim - 2, *range(kernel.ndim - 2))
        self.other_axes = tuple(n for n in range(kernel.ndim) if n != axis % kernel.ndim)
        weight = nnx.Dict(
            original0=nnx.Param(self._norm(direction)), original1=nnx.Param(direction)
        )
        self.parametrizations = nnx.Dict(weight=weight)

    def _norm(self, direction: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.square(direction).sum(self.other_axes, keepdims=True))

    def gathered_kernel(self) -> jax.Array:
        """Returns the kernel, `(*kernel_size, in / groups, out)`."""
        parameters = self.parametrizations.weight
        direction = parameters.original1[...].astype(jnp.float32)
        weight = direction * (parameters.original0[...] / self._norm(direction))
        return weight.transpose(*range(2, weight.ndim), 1, 0)

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """The size of the kernel for each spatial axis."""
        return tuple(self.parametrizations.weight.original1.shape[2:])


class MultiheadAttention(nnx.Module):
    """The layer `torch.nn.MultiheadAttention`.

    The kernels of the query, key and value projections are one parameter.

    Args:
        features: Size of the inputs and outputs.
        num_heads: Number of attention heads.
        init: Initializer of the projections, `init(key, shape, dtype)`.
        rngs: Random keys for the initialization.
        use_bias: Whether the projections have biases.
        batch_first: Whether the inputs are `(batch, length, features)`. Otherwise they are
            `(length, batch, features)`.
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        features: int,
        num_heads: int,
        init: Initializer,
        rngs: nnx.Rngs,
        *,
        use_bias: bool = True,
        batch_first: bool = False,
    ):
        shape = (3 * features, features)
        self.in_proj_weight = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.in_proj_bias = initial_bias(3 * features, None, rngs) if use_bias else nnx.data(None)
        self.out_proj = Linear(features, features, init, rngs, use_bias=use_bias)
        self.num_heads, self.batch_first = num_heads, batch_first

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        key_padding_mask: jax.Array | None = None,
        need_weights: bool = True,
        attn_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes attention.

        Args:
            query: The queries.
            key: The inputs of the key projection.
            value: The inputs of the value projection.
            key_padding_mask: True for keys that are padding, `(batch, keys)`.
            need_weights: Whether to return the attention weights, averaged over heads.
            attn_mask: Booleans that are true where a key is masked, or numbers that are added to
                the scores. The shape is `(queries, keys)` or `(batch * heads, queries, keys)`.

        Returns:
            The outputs in the layout of the inputs, and the attention weights
            `(batch, queries, keys)` or `None`.
        """
        if not self.batch_first:
            query, key, value = (x.swapaxes(0, 1) for x in (query, key, value))
        kernels = jnp.split(self.in_proj_weight[...], 3)
        biases = [None] * 3 if self.in_proj_bias is None else jnp.split(self.in_proj_bias[...], 3)
        q, k, v = (
            linear(x, kernel, bias).reshape(*x.shape[:2], self.num_heads, -1)
            for x, kernel, bias in zip((query, key, value), kernels, biases, strict=True)
        )
        visible, bias = None, None
        if key_padding_mask is not None:
            visible = ~key_padding_mask.astype(bool)[:, None, None]
        if attn_mask is not None:
            if attn_mask.ndim == 3:
                attn_mask = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
            if attn_mask.dtype == bool:
                visible = ~attn_mask if visible is None else visible & ~attn_mask
            else:
                bias = attn_mask
        if visible is not None:
            visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)
        outputs, weights = attend(q, k, v, mask=visible, bias=bias, return_weights=need_weights)
        outputs = self.out_proj(outputs.reshape(*outputs.shape[:2], -1))
        weights = None if weights is None else weights.mean(1)
        return (outputs if self.batch_first else outputs.swapaxes(0, 1)), weights


class ConvTranspose(nnx.Module):
    """A transposed convolution, which enlarges its input.

    As in PyTorch, inputs and outputs are `(batch, channels, *sizes)`. The kernel has the shape
    `(*kernel_size, out_features // groups, in_features)`.

    Args:
        in_features: Input channels.
        out_features: Output channels.
        kernel_size: Size of the kernel for each spatial axis.
        init: Initializer of the kernel, `init(key, shape, dtype)`.
        rngs: Random keys for the initialization.
        stride: Factor by which each spatial axis is enlarged, or one number for all.
        padding: Number of elements that are removed at both ends of each axis.
        output_padding: Number of additional elements at the end of each axis.
        dilation: Distance between the elements of a window.
        groups: Number of channel groups.
        use_bias: Whether to add a bias.
        bias_init: Initializer of the bias. Default: zeros.
    """

    __signature__ = ConstructorSignature()
    compute_dtype: DTypeLike | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: Sequence[int],
        init: Initializer,
        rngs: nnx.Rngs,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        use_bias: bool = True,
        bias_init: Initializer | None = None,
    ):
        size = tuple(kernel_size)
        shape = (*size, out_features // groups, in_features)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.float32))
        self.bias = initial_bias(out_features, bias_init, rngs) if use_bias else nnx.data(None)
        self.stride, self.padding, self.output_padding, self.dilation = (
            per_axis(value, len(size)) for value in (stride, padding, output_padding, dilation)
        )
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, in_features, ...)` to `(batch, out_features, ...)`."""
        x = x.astype(self.compute_dtype or x.dtype)
        kernel = self.kernel[...]
        return conv_transpose(
            x,
            kernel.transpose(kernel.ndim - 1, kernel.ndim - 2, *range(kernel.ndim - 2)),
            None if self.bias is None else self.bias[...],
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )
