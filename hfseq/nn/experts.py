"""Mixture-of-experts layers, in which a router chooses a few experts for each token.

The computation is exact: no token is dropped, even if the experts get different numbers of tokens.
There is one row for each pair of a token and one of its experts. The rows are sorted by expert, so
that the rows of each expert are adjacent.

The rows of each expert are padded to a multiple of a block size. A block therefore belongs to one
expert, and is multiplied by the kernels of that expert. `jax.lax.ragged_dot` could multiply all
blocks in one call. However, XLA then lets every expert compute every row, and needs an array for
all experts and rows (jax 0.10, programs for CPU, H200 and v5e).

On a mesh, `mix_sharded_experts` distributes the experts over the mesh axis `expert`. Each device
gathers the tokens of all devices along this axis, and computes its own experts for these tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hfseq.errors import UsageError
from hfseq.nn.context import current_options, platform
from hfseq.nn.layers import LowRankConfig
from hfseq.nn.sharding import BATCH_AXES, EXPERT, FSDP, SEQUENCE, TENSOR, Axes

# Minimum and maximum number of rows per block on CPUs and on accelerators. Small blocks need less
# padding, and large blocks are multiplied at a higher rate.
_CPU_BLOCKS, _ACCELERATOR_BLOCKS = (8, 128), (64, 512)


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of all experts, sorted by expert.

    Attributes:
        expert: Index of the expert of each row, int32 `(rows,)`.
        sizes: Number of rows of each expert, int32 `(experts,)`, if `jax.lax.ragged_dot` multiplies
            the rows. `None` if the rows are in blocks.
        block_expert: Index of the expert of each block, int32 `(blocks,)`. `None` if the rows are
            not in blocks.
        num_blocks: Number of blocks that contain rows, as an int32 scalar. The remaining blocks are
            at the end and are not computed.
    """

    expert: jax.Array
    sizes: jax.Array | None = None
    block_expert: jax.Array | None = None
    num_blocks: jax.Array | None = None

    def product(
        self,
        rows: jax.Array,
        kernel: jax.Array,
        bias: jax.Array | None = None,
        *,
        transposed: bool = False,
    ) -> jax.Array:
        """Multiplies each row by the kernel of its expert.

        Args:
            rows: `(rows, inputs)`.
            kernel: `(experts, inputs, outputs)`.
            bias: Added to each row, `(experts, outputs)`.
            transposed: Whether the shape of the kernel is `(experts, outputs, inputs)`, as in
                PyTorch.

        Returns:
            `(rows, outputs)`.
        """
        if self.sizes is not None:
            kernel = kernel.swapaxes(1, 2) if transposed else kernel
            outputs = lax.ragged_dot(rows, kernel, self.sizes)
        else:
            assert self.block_expert is not None
            assert self.num_blocks is not None
            outputs = _blocked_product(rows, kernel, self.block_expert, self.num_blocks, transposed)
        return outputs if bias is None else outputs + bias[self.expert]


#: Computes the outputs `(rows, features)` from the inputs `(rows, features)` and their layout.
ExpertFunction = Callable[[jax.Array, ExpertRows], jax.Array]


def mix_experts(
    x: jax.Array,
    expert_index: jax.Array,
    expert_weights: jax.Array,
    num_experts: int,
    experts: ExpertFunction,
) -> jax.Array:
    """Computes the weighted sum of the chosen experts' outputs for each token.

    Args:
        x: Tokens, `(tokens, features)`.
        expert_index: Indices of the experts that are chosen for each token, integers
            `(tokens, choices)`. An index of `num_experts` or more is ignored.
        expert_weights: Weight of each chosen expert, `(tokens, choices)`. The gradient of the
            router flows through these weights.
        num_experts: Number of experts.
        experts: Function that computes the feed-forward layers of the experts. Its arguments are
            the rows, `(rows, features)`, and an `ExpertRows`, whose method `product` multiplies
            each row by the kernel of its expert. The function must process each row independently
            of the others.

    Returns:
        The outputs, `(tokens, features)`, in the data type of `x`. Sums are computed in float32.
    """
    tokens, choices = expert_index.shape
    index = expert_index.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(index, stable=True).astype(jnp.int32)
    sizes = jnp.bincount(jnp.minimum(index, num_experts), length=num_experts + 1)
    sizes = sizes[:num_experts].astype(jnp.int32)
    starts = jnp.cumsum(sizes) - sizes
    is_valid = index < num_experts
    expert = jnp.minimum(index, num_experts - 1)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=jnp.int32))
    size = _block_size(len(order), num_experts)
    blocks = -(-len(order) // size) + num_experts
    block_counts = -(-sizes // size)
    block_ends = jnp.cumsum(block_counts)
    row_numbers = (block_ends - block_counts)[expert] * size + rank - starts[expert]
    block_expert = jnp.searchsorted(block_ends, jnp.arange(blocks), side="right")
    block_expert = jnp.minimum(block_expert, num_experts - 1).astype(jnp.int32)
    num_rows = blocks * size
    num_blocks = block_ends[-1].astype(jnp.int32)
    layout = ExpertRows(
        jnp.repeat(block_expert, size), block_expert=block_expert, num_blocks=num_blocks
    )
    # The index of the token-expert pair in each row. Rows that are padding get the index after the
    # last pair.
    pairs = jnp.full(num_rows, len(order), jnp.int32)
    pairs = pairs.at[jnp.where(is_valid, row_numbers, num_rows)].set(
        jnp.arange(len(order), dtype=jnp.int32), mode="drop"
    )
    row_numbers = jnp.where(is_valid, row_numbers, 0).reshape(tokens, choices)
    is_valid = is_valid.reshape(tokens, choices)
    outputs = experts(_spread(x, pairs, row_numbers, is_valid), layout)
    choice_outputs = _gather(outputs, pairs, row_numbers, is_valid).astype(jnp.float32)
    return jnp.einsum("tkf,tk->tf", choice_outputs, expert_weights.astype(jnp.float32)).astype(
        x.dtype
    )


def _block_size(pairs: int, num_experts: int) -> int:
    """Returns the number of rows per block.

    This is the largest power of two that is at most a quarter of the mean number of rows per
    expert, within the minimum and maximum of the platform. The padding then adds about an eighth of
    the number of rows.
    """
    size, maximum = _CPU_BLOCKS if platform() == "cpu" else _ACCELERATOR_BLOCKS
    while size < maximum and 8 * size * num_experts <= pairs:
        size *= 2
    return size


def _take_rows(x: jax.Array, pairs: jax.Array, choices: int) -> jax.Array:
    """Returns the token of each pair as a row, and zeros for rows that are padding."""
    is_pair = pairs < x.shape[0] * choices
    return jnp.where(is_pair[:, None], x[jnp.minimum(pairs // choices, x.shape[0] - 1)], 0)


# The two functions below are gathers, and so are their gradients. JAX would derive a scatter as the
# gradient of a gather. A scatter is slower, and on GPUs it adds in an undefined order.


@jax.custom_vjp
def _spread(
    x: jax.Array, pairs: jax.Array, row_numbers: jax.Array, is_valid: jax.Array
) -> jax.Array:
    """Copies each token, `(tokens, features)`, to the rows of its experts."""
    return _take_rows(x, pairs, row_numbers.shape[1])


def _spread_forward(
    x: jax.Array, pairs: jax.Array, row_numbers: jax.Array, is_valid: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _spread(x, pairs, row_numbers, is_valid), (row_numbers, is_valid)


def _spread_backward(
    residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None, None]:
    row_numbers, is_valid = residuals
    rows = jnp.where(is_valid[..., None], gradient[row_numbers], 0).astype(jnp.float32)
    return rows.sum(1).astype(gradient.dtype), None, None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _gather(
    outputs: jax.Array, pairs: jax.Array, row_numbers: jax.Array, is_valid: jax.Array
) -> jax.Array:
    """Returns the outputs of each token's experts, `(tokens, choices, features)`."""
    return jnp.where(is_valid[..., None], outputs[row_numbers], 0)


def _gather_forward(
    outputs: jax.Array, pairs: jax.Array, row_numbers: jax.Array, is_valid: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _gather(outputs, pairs, row_numbers, is_valid), pairs


def _gather_backward(pairs: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None, None]:
    return _take_rows(gradient.reshape(-1, gradient.shape[-1]), pairs, 1), None, None, None


_gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked_product(
    rows: jax.Array,
    kernel: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    transposed: bool,
) -> jax.Array:
    """Multiplies each block of rows by the kernel of its expert.

    Args:
        rows: `(blocks * block size, inputs)`.
        kernel: `(experts, inputs, outputs)`, or `(experts, outputs, inputs)` if `transposed`.
        block_expert: Index of the expert of each block, `(blocks,)`.
        num_blocks: Number of blocks to compute. The outputs of the remaining blocks are zeros.
        transposed: Whether the last two axes of the kernel are swapped.
    """
    size = len(rows) // len(block_expert)

    def multiply(block: jax.Array, outputs: jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(rows, block * size, size)
        product = x @ _oriented(kernel[block_expert[block]], transposed)
        return lax.dynamic_update_slice_in_dim(outputs, product, block * size, 0)

    features = kernel.shape[1 if transposed else 2]
    start = jnp.zeros((len(rows), features), jnp.result_type(rows, kernel))
    return lax.fori_loop(0, num_blocks, multiply, start)


def _oriented(matrix: jax.Array, transposed: bool) -> jax.Array:
    return matrix.T if transposed else matrix


#: The arguments `rows`, `kernel`, `block_expert` and `num_blocks` of `_blocked_product`.
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _blocked_forward(
    rows: jax.Array,
    kernel: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    transposed: bool,
) -> tuple[jax.Array, Residuals]:
    outputs = _blocked_product(rows, kernel, block_expert, num_blocks, transposed)
    return outputs, (rows, kernel, block_expert, num_blocks)


def _blocked_backward(
    transposed: bool, residuals: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    rows, kernel, block_expert, num_blocks = residuals
    size = len(rows) // len(block_expert)

    def step(
        block: jax.Array, gradients: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        kernel_gradient, row_gradient = gradients
        x, g = (lax.dynamic_slice_in_dim(part, block * size, size) for part in (rows, gradient))
        expert = block_expert[block]
        left, right = (g, x) if transposed else (x, g)
        update = jnp.matmul(left.T, right, preferred_element_type=jnp.float32)
        product = g @ _oriented(kernel[expert], not transposed)
        return (
            kernel_gradient.at[expert].add(update),
            lax.dynamic_update_slice_in_dim(row_gradient, product, block * size, 0),
        )

    start = jnp.zeros(kernel.shape, jnp.float32), jnp.zeros(rows.shape, rows.dtype)
    kernel_gradient, row_gradient = lax.fori_loop(0, num_blocks, step, start)
    return row_gradient, kernel_gradient.astype(kernel.dtype), None, None


_blocked_product.defvjp(_blocked_forward, _blocked_backward)


# -- experts on a mesh
# ---------------------------------------------------------------------------------------


def choose_experts(scores: jax.Array, choices: int) -> tuple[jax.Array, jax.Array]:
    """Returns the highest scores of each token and the indices of their experts.

    Each device computes this for its own tokens, with `shard_map`. Without it, XLA would gather the
    scores of all devices.

    Args:
        scores: `(batch, length, experts)`.
        choices: Number of experts per token.

    Returns:
        The scores in descending order and the indices, `(batch, length, choices)` each.
    """

    def choose(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        best, index = lax.top_k(scores, choices)
        return best, index

    mesh = current_options().mesh
    if mesh is None or mesh.size == 1:
        return choose(scores)
    spec = _token_spec(mesh, scores)
    run = jax.shard_map(
        choose,
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec, spec),
        check_vma=False,
    )
    best, index = run(scores)
    return best, index


#: Computes the outputs `(rows, features)` from the inputs `(rows, features)`, their layout, and the
#: parameters of the experts.
ShardedExpertFunction = Callable[[jax.Array, ExpertRows, Mapping[str, jax.Array]], jax.Array]


def mix_sharded_experts(
    x: jax.Array,
    expert_index: jax.Array,
    expert_weights: jax.Array,
    num_experts: int,
    experts: ShardedExpertFunction,
    arrays: Mapping[str, jax.Array],
    axes: Mapping[str, Axes],
) -> jax.Array:
    """Computes `mix_experts` for a batch of sequences, on the mesh of the current options.

    The mesh axis `expert` splits both the experts and the batch. Each device gathers the tokens of
    all devices along this axis, and computes its own experts for them. The outputs are then summed
    over the devices, and each device gets the sums of its own tokens. The result equals that of one
    device, except for rounding.

    Args:
        x: Hidden states, `(batch, length, features)`.
        expert_index: Indices of the experts that are chosen for each token,
            `(batch, length, choices)`.
        expert_weights: Weight of each chosen expert, `(batch, length, choices)`.
        num_experts: Number of experts.
        experts: Function that computes the feed-forward layers of the experts, as in `mix_experts`.
            Its third argument contains the parameters of the experts on this device. If the mesh
            axis `tensor` splits a parameter, the function must return a partial sum, because the
            results are summed over this axis.
        arrays: The parameters of the experts by name. The first axis of each array is the expert.
            The arrays are converted to the data type of `x`.
        axes: For each array, the mesh axes that split its dimensions. Arrays are gathered over
            `fsdp`.

    Returns:
        The outputs, `(batch, length, features)`, in the data type of `x`.

    Raises:
        UsageError: The size of the mesh axis `expert` does not divide the number of experts.
    """
    mesh = current_options().mesh
    if mesh is None or mesh.size == 1:
        arrays = {name: jnp.asarray(array, x.dtype) for name, array in arrays.items()}
        outputs = mix_experts(
            x.reshape(-1, x.shape[-1]),
            expert_index.reshape(-1, expert_index.shape[-1]),
            expert_weights.reshape(-1, expert_weights.shape[-1]),
            num_experts,
            functools.partial(_with_arrays, experts, arrays),
        )
        return outputs.reshape(x.shape)
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    shards = sizes.get(EXPERT, 1)
    if num_experts % shards:
        raise UsageError(
            f"--mesh expert={shards} does not divide the {num_experts} experts of the model. Use "
            f"a divisor of {num_experts}"
        )
    used = {
        name: tuple(entry if entry in sizes else None for entry in entries)
        for name, entries in axes.items()
    }
    splits_tensor = any(TENSOR in entries for entries in used.values())
    tokens = _token_spec(mesh, x)
    splits_rows = EXPERT in (tokens[0] or ())

    def compute(
        x: jax.Array, index: jax.Array, weights: jax.Array, arrays: Mapping[str, jax.Array]
    ) -> jax.Array:
        arrays = {
            name: _gathered(array, used[name]).astype(x.dtype) for name, array in arrays.items()
        }
        if shards > 1:
            if splits_rows:
                x, index, weights = (
                    lax.all_gather(part, EXPERT, tiled=True) for part in (x, index, weights)
                )
            count = num_experts // shards
            index = index - lax.axis_index(EXPERT) * count
            index = jnp.where((index >= 0) & (index < count), index, count)
        outputs = mix_experts(
            x.reshape(-1, x.shape[-1]),
            index.reshape(-1, index.shape[-1]),
            weights.reshape(-1, weights.shape[-1]),
            num_experts // shards,
            functools.partial(_with_arrays, experts, arrays),
        ).reshape(x.shape)
        if splits_tensor:
            outputs = lax.psum(outputs, TENSOR)
        if shards > 1 and not splits_rows:
            return lax.psum(outputs, EXPERT)
        return lax.psum_scatter(outputs, EXPERT, tiled=True) if shards > 1 else outputs

    specs = {name: PartitionSpec(*entries) for name, entries in used.items()}
    run = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, specs),
        out_specs=tokens,
        check_vma=False,
    )
    return run(x, expert_index, expert_weights, dict(arrays))


def _with_arrays(
    experts: ShardedExpertFunction,
    arrays: Mapping[str, jax.Array],
    rows: jax.Array,
    layout: ExpertRows,
) -> jax.Array:
    return experts(rows, layout, arrays)


def _token_spec(mesh: Mesh, x: jax.Array) -> PartitionSpec:
    """Returns the mesh axes that split an array `(batch, length, features)`.

    A dimension is not split if its length is not a multiple of the number of shards.
    """

    def entry(axes: tuple[str, ...], length: int) -> tuple[str, ...] | None:
        present = tuple(axis for axis in axes if mesh.shape.get(axis, 1) > 1)
        divides = length % math.prod(mesh.shape[axis] for axis in present) == 0
        return present if present and divides else None

    return PartitionSpec(entry(BATCH_AXES, x.shape[0]), entry((SEQUENCE,), x.shape[1]))


def _gathered(array: jax.Array, axes: Axes) -> jax.Array:
    """Gathers an array over the mesh axis `fsdp`. Must be called within `shard_map`."""
    if FSDP not in axes:
        return array
    return lax.all_gather(array, FSDP, axis=axes.index(FSDP), tiled=True)


def tensor_rank(mesh: Mesh | None) -> jax.Array | int:
    """Returns the index of the device on the mesh axis `tensor`, or 0 without such an axis.

    Must be called within `mix_sharded_experts`.
    """
    return lax.axis_index(TENSOR) if mesh is not None and mesh.shape.get(TENSOR, 1) > 1 else 0


# -- low-rank adapters
# ---------------------------------------------------------------------------------------


class ExpertAdapter(nnx.Module):
    """Low-rank adapters for a kernel that contains the weights of all experts.

    The parameters have the layout of PEFT.

    Args:
        num_experts: Number of experts.
        inputs: Number of input features.
        outputs: Number of output features.
        lora: Settings of the adapter.
        rngs: Random keys for the initialization.

    Attributes:
        lora_A: `(experts * rank, inputs)`. The rows of each expert are adjacent.
        lora_B: `(outputs, rank * experts)`. The columns with the same rank index are adjacent.
    """

    def __init__(
        self, num_experts: int, inputs: int, outputs: int, lora: LowRankConfig, rngs: nnx.Rngs
    ):
        self.num_experts, self.lora = num_experts, lora
        initial = lora.init(rngs.params(), (inputs, num_experts * lora.rank), jnp.float32)
        self.lora_A = nnx.Param(initial.T)
        self.lora_B = nnx.Param(jnp.zeros((outputs, lora.rank * num_experts)))

    def factors(self) -> tuple[jax.Array, jax.Array]:
        """Returns the two low-rank factors of each expert.

        Their shapes are `(experts, inputs, rank)` and `(experts, rank, outputs)`. The second factor
        is multiplied by the scale of the adapter.
        """
        a, b = self.lora_A[...], self.lora_B[...]
        first = a.reshape(self.num_experts, self.lora.rank, -1).swapaxes(1, 2)
        second = b.reshape(-1, self.lora.rank, self.num_experts).transpose(2, 1, 0)
        return first, self.lora.scale * second


class ExpertLayer(nnx.Module):
    """Base class of modules that contain the kernels of all experts of a layer.

    A kernel is an `nnx.Param` with three axes, the first of which is the expert. The adapter of the
    kernel `name` is the attribute `{name}_adapter`.

    Attributes:
        kernel_names: Names of the kernels, in PyTorch's order.
        transposed: Whether the kernels have the shape `(experts, outputs, inputs)`. Otherwise, it
            is `(experts, inputs, outputs)`.
    """

    kernel_names: ClassVar[tuple[str, ...]] = ("gate_up_proj", "down_proj")
    transposed: ClassVar[bool] = True

    def add_lora(self, name: str, lora: LowRankConfig, rngs: nnx.Rngs) -> None:
        """Adds low-rank adapters to the kernel `name`."""
        num_experts, *features = getattr(self, name).shape
        inputs, outputs = features[::-1] if self.transposed else features
        adapter = ExpertAdapter(num_experts, inputs, outputs, lora, rngs)
        setattr(self, f"{name}_adapter", adapter)

    def adapter(self, name: str) -> ExpertAdapter | None:
        """Returns the adapter of the kernel `name`, or `None`."""
        return getattr(self, f"{name}_adapter", None)
