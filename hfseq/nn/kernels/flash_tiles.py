"""Triton kernels of flash attention, written in Pallas: the forward pass and the backward pass.

Attention is computed in tiles, each of which combines a block of queries with a block of keys. A
running softmax (Dao, 2023: FlashAttention-2) makes it unnecessary to store an array of all queries
and keys. Before the kernels start, this module determines which tiles to compute: one range of key
blocks for each block of queries, and one range of query blocks for each block of keys. The kernels
compute the random bits of dropout from the index of each element, as in
`hfseq.nn.random.element_bits`.

This module imports Pallas. Other modules import `hfseq.nn.kernels.flash`, which imports this module
only when the kernels run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from hfseq.nn.random import element_bits

_LOG2_E = math.log2(math.e)
Leaf = TypeVar("Leaf")

# Settings of each kernel. The key of the dict is (bytes of the dtype, width of a head). The values
# are the block size of a program, the block size of a step of its loop, the number of warps, and
# the number of pipeline stages of loads. The settings for bfloat16 and float16 are published values
# for such kernels, unless these values cause register spills. float32 needs three times as many
# registers.
_SIZES: dict[tuple[int, int], dict[str, tuple[int, int, int, int]]] = {
    (2, 64): {
        "forward": (128, 64, 4, 3),
        "query": (64, 64, 4, 3),
        "key": (128, 64, 8, 3),
        "bias": (64, 64, 4, 2),
    },
    (2, 128): {
        "forward": (128, 64, 8, 2),
        "query": (64, 64, 4, 2),
        "key": (128, 32, 8, 2),
        "bias": (64, 64, 4, 2),
    },
    (2, 256): {
        "forward": (128, 64, 8, 2),
        "query": (128, 32, 8, 2),
        "key": (64, 32, 8, 2),
        "bias": (64, 64, 8, 1),
    },
    (4, 64): {
        "forward": (64, 32, 4, 2),
        "query": (64, 32, 4, 2),
        "key": (64, 32, 8, 2),
        "bias": (64, 32, 4, 1),
    },
    (4, 128): {
        "forward": (64, 32, 4, 1),
        "query": (64, 32, 8, 2),
        "key": (32, 32, 8, 2),
        "bias": (64, 32, 8, 1),
    },
    (4, 256): {
        "forward": (64, 32, 8, 1),
        "query": (16, 32, 8, 1),
        "key": (16, 32, 8, 1),
        "bias": (16, 32, 8, 1),
    },
}


@dataclasses.dataclass(frozen=True)
class AttentionForm:
    """Properties of an attention call that are compiled into the kernels.

    Attributes:
        scale: The factor by which the scores are multiplied.
        left: Number of visible keys before a query's own position. `None` means all.
        right: Number of visible keys after a query's own position. `None` means all.
        threshold: An attention weight is dropped if its random bits are below this number.
        interpret: Whether to run the kernels as plain jax operations.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    threshold: int = 0
    interpret: bool = False


class RowArrays(NamedTuple, Generic[Leaf]):
    """Arrays that describe the rows of a batch. All are int32 except the bias and the seeds.

    A row is one entry of the batch.

    Attributes:
        queries: Segment numbers of the queries, `(batch, queries)`. If this is `None`, keys in
            segment 0 are hidden and all other keys are visible.
        keys: Segment numbers of the keys, `(batch, keys)`.
        lengths: Number of keys in each row that are not padding, `(batch, 1)`.
        seeds: Seeds of the random bits, `(batch, 3)`, from `hfseq.nn.random.LazyBits.seeds`.
        bias: Added to the scores, `(1 or batch, heads, queries, keys)`. It has a gradient.
    """

    queries: Leaf | None = None
    keys: Leaf | None = None
    lengths: Leaf | None = None
    seeds: Leaf | None = None
    bias: Leaf | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
    form: AttentionForm,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: RowArrays[jax.Array],
) -> jax.Array:
    """Computes attention on one device. See `hfseq.nn.kernels.flash.flash_attention`."""
    return _forward(form, query, key, value, rows)[0]


def _forward(
    form: AttentionForm,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: RowArrays[jax.Array],
) -> tuple[jax.Array, tuple[Any, ...]]:
    tiles = _Tiles.of(form, "forward", query, key, rows)
    specs = tiles.specs("queries")
    out, log_sum = tiles.call(
        _forward_kernel,
        "queries",
        [specs.query, specs.key, specs.key],
        rows,
        [query, key, value],
        [specs.query, specs.per_query],
        [jax.ShapeDtypeStruct(query.shape, value.dtype), tiles.per_query_shape()],
    )
    return out, (query, key, value, rows, out, log_sum)


def _backward(
    form: AttentionForm, residuals: tuple[Any, ...], cotangent: jax.Array
) -> tuple[Any, ...]:
    query, key, value, rows, out, log_sum = residuals
    # The derivative of softmax subtracts this number from the weight gradients of each query.
    row_terms = (out.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    arrays = [query, key, value, cotangent.astype(value.dtype), log_sum, row_terms]

    tiles = _Tiles.of(form, "query", query, key, rows)
    specs = tiles.specs("queries")
    (d_query,) = tiles.call(
        _query_kernel,
        "queries",
        [specs.query, specs.key, specs.key, specs.query, specs.per_query, specs.per_query],
        rows,
        arrays,
        [specs.query],
        [jax.ShapeDtypeStruct(query.shape, query.dtype)],
    )
    tiles = _Tiles.of(form, "key", query, key, rows)
    specs = tiles.specs("keys")
    d_key, d_value = tiles.call(
        _key_kernel,
        "keys",
        [specs.query, specs.key, specs.key, specs.query, specs.per_query, specs.per_query],
        rows,
        arrays,
        [specs.key, specs.key],
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (key, value)],
    )
    return d_query, d_key, d_value, RowArrays(bias=_bias_gradient(form, arrays, rows))


def _bias_gradient(
    form: AttentionForm, arrays: list[jax.Array], rows: RowArrays[jax.Array]
) -> jax.Array | None:
    """Returns the gradient of the bias, or `None` without a bias.

    Each program computes one tile of the gradient. It sums over all rows that share the bias.
    """
    if rows.bias is None:
        return None
    tiles = _Tiles.of(form, "bias", arrays[0], arrays[1], rows)
    rows_per_bias = tiles.batch // len(rows.bias)
    heads, group, block_q, block_k = tiles.heads, tiles.group, tiles.block_q, tiles.block_k

    def row(n: jax.Array) -> jax.Array:
        return jax.lax.div(n, heads)

    def head(n: jax.Array) -> jax.Array:
        return jax.lax.rem(n, heads)

    query = pl.BlockSpec(
        (rows_per_bias, block_q, None, tiles.width), lambda i, j, n: (row(n), i, head(n), 0)
    )
    key = pl.BlockSpec(
        (rows_per_bias, block_k, None, tiles.width),
        lambda i, j, n: (row(n), j, jax.lax.div(head(n), group), 0),
    )
    per_query = pl.BlockSpec((rows_per_bias, None, block_q), lambda i, j, n: (row(n), head(n), i))
    bias = pl.BlockSpec((None, None, block_q, block_k), lambda i, j, n: (row(n), head(n), i, j))
    row_specs = RowArrays(
        queries=pl.BlockSpec((rows_per_bias, block_q), lambda i, j, n: (row(n), i)),
        keys=pl.BlockSpec((rows_per_bias, block_k), lambda i, j, n: (row(n), j)),
        lengths=pl.BlockSpec((rows_per_bias, 1), lambda i, j, n: (row(n), 0)),
        seeds=pl.BlockSpec((rows_per_bias, 3), lambda i, j, n: (row(n), 0)),
        bias=bias,
    )
    (out,) = pl.pallas_call(
        functools.partial(_bias_kernel, tiles, rows_per_bias),
        grid=(
            pl.cdiv(tiles.queries, block_q),
            pl.cdiv(tiles.keys, block_k),
            heads * len(rows.bias),
        ),
        in_specs=[query, key, key, query, per_query, per_query, _specs_of_present(row_specs, rows)],
        out_specs=[bias],
        out_shape=[jax.ShapeDtypeStruct(rows.bias.shape, rows.bias.dtype)],
        name="flash_bias_kernel",
        **tiles.options,
    )(*arrays, rows)
    return out


def _specs_of_present(
    specs: RowArrays[pl.BlockSpec], rows: RowArrays[jax.Array]
) -> RowArrays[pl.BlockSpec]:
    """Returns the specs of the arrays that are not `None`."""
    pairs = zip(specs, rows, strict=True)
    return RowArrays(*(None if array is None else spec for spec, array in pairs))


attention.defvjp(_forward, _backward)


# -- tiles
# ---------------------------------------------------------------------------------------


class _Specs(NamedTuple):
    """The block specs of one program, for each kind of array.

    Attributes:
        query: Specs of arrays with the shape of the queries.
        key: Specs of arrays with the shape of the keys.
        per_query: Specs of arrays with one number per head and query.
        rows: Specs of the arrays that describe the rows.
    """

    query: pl.BlockSpec
    key: pl.BlockSpec
    per_query: pl.BlockSpec
    rows: RowArrays[pl.BlockSpec]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiling of one kernel: sizes of the arrays, the blocks and the programs."""

    form: AttentionForm
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    block_q: int
    block_k: int
    warps: int
    stages: int
    exact: bool

    @classmethod
    def of(
        cls,
        form: AttentionForm,
        kernel: str,
        query: jax.Array,
        key: jax.Array,
        rows: RowArrays[jax.Array],
    ) -> _Tiles:
        """Selects the tile sizes of a kernel.

        Args:
            form: Properties of the attention.
            kernel: The name of the kernel: "forward", or "query", "key" or "bias" for the kernel
                that computes the gradient with respect to this input.
            query: The queries.
            key: The keys.
            rows: The arrays that describe the rows.
        """
        batch, queries, heads, head_dim = query.shape
        keys, kv_heads = key.shape[1:3]
        width, itemsize = _width(head_dim), query.dtype.itemsize
        outer, inner, warps, stages = _SIZES[itemsize, max(width, 64)][kernel]
        if kernel == "forward" and rows.seeds is not None and width <= 64 and itemsize == 2:
            outer = 64  # the hash of the dropout bits needs registers
        if rows.bias is not None:
            stages = max(1, stages - 1)  # tiles of the bias need the shared memory of one stage
        block_q, block_k = (inner, outer) if kernel == "key" else (outer, inner)
        return cls(
            form,
            batch,
            queries,
            keys,
            heads,
            kv_heads,
            head_dim,
            min(block_q, _width(queries)),
            min(block_k, _width(keys)),
            warps,
            stages,
            query.dtype == jnp.float32,
        )

    @property
    def width(self) -> int:
        return _width(self.head_dim)

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.kv_heads

    def per_query_shape(self) -> jax.ShapeDtypeStruct:
        """Returns the shape of arrays with one float32 number per head and query."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.queries), jnp.float32)

    @property
    def options(self) -> dict[str, Any]:
        """The options of `pallas_call`."""
        params = triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)
        return {"compiler_params": params, "interpret": self.form.interpret}

    def call(
        self,
        kernel: Any,
        over: str,
        in_specs: list[pl.BlockSpec],
        rows: RowArrays[jax.Array],
        arrays: list[jax.Array],
        out_specs: list[pl.BlockSpec],
        out: list[jax.ShapeDtypeStruct],
    ) -> list[jax.Array]:
        """Runs one program for each block, each head and each row.

        Args:
            kernel: The kernel function.
            over: Which blocks and heads are counted: "queries" for blocks of queries and query
                heads, or "keys" for blocks of keys and key heads.
            in_specs: Block specs of `arrays`.
            rows: The arrays that describe the rows.
            arrays: The other input arrays.
            out_specs: Block specs of the outputs.
            out: Shapes of the outputs.
        """
        spans = self.spans(rows, over)
        heads = self.heads if over == "queries" else self.kv_heads
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=(spans.shape[1], heads, self.batch),
            in_specs=[
                *in_specs,
                pl.BlockSpec((None, None, 2), lambda i, h, b: (b, i, 0)),
                _specs_of_present(
                    self.specs(over, len(rows.bias) if rows.bias is not None else 1).rows, rows
                ),
            ],
            out_specs=out_specs,
            out_shape=out,
            name=f"flash{kernel.__name__}",
            **self.options,
        )(*arrays, spans, rows)

    def specs(self, over: str, biases: int = 1) -> _Specs:
        """Returns the block specs of a program.

        Args:
            over: "queries" if a program reads one block of queries and all keys, or "keys" if it
                reads one block of keys and all queries.
            biases: Size of the batch axis of the bias, 1 or the batch size.
        """
        block_q, block_k, group = self.block_q, self.block_k, self.group
        row: RowArrays[pl.BlockSpec] = RowArrays(
            lengths=pl.BlockSpec((None, 1), lambda i, h, b: (b, 0)),
            seeds=pl.BlockSpec((None, 3), lambda i, h, b: (b, 0)),
        )
        if over == "queries":
            keys = pl.cdiv(self.keys, block_k) * block_k
            return _Specs(
                pl.BlockSpec((None, block_q, None, self.width), lambda i, h, b: (b, i, h, 0)),
                pl.BlockSpec(
                    (None, keys, None, self.width),
                    lambda i, h, b: (b, 0, jax.lax.div(h, group), 0),
                ),
                pl.BlockSpec((None, None, block_q), lambda i, h, b: (b, h, i)),
                row._replace(
                    queries=pl.BlockSpec((None, block_q), lambda i, h, b: (b, i)),
                    keys=pl.BlockSpec((None, keys), lambda i, h, b: (b, 0)),
                    bias=pl.BlockSpec(
                        (None, None, block_q, keys),
                        lambda i, h, b: (b if biases > 1 else 0, h, i, 0),
                    ),
                ),
            )
        queries = pl.cdiv(self.queries, block_q) * block_q
        return _Specs(
            pl.BlockSpec((None, queries, group, self.width), lambda i, h, b: (b, 0, h, 0)),
            pl.BlockSpec((None, block_k, None, self.width), lambda i, h, b: (b, i, h, 0)),
            pl.BlockSpec((None, group, queries), lambda i, h, b: (b, h, 0)),
            row._replace(
                queries=pl.BlockSpec((None, queries), lambda i, h, b: (b, 0)),
                keys=pl.BlockSpec((None, block_k), lambda i, h, b: (b, i)),
                bias=pl.BlockSpec(
                    (None, group, queries, block_k),
                    lambda i, h, b: (b if biases > 1 else 0, h, 0, i),
                ),
            ),
        )

    def spans(self, rows: RowArrays[jax.Array], over: str) -> jax.Array:
        """Returns which tiles to compute for each block.

        With `over="queries"`, the result is the range of key blocks for each block of queries. With
        `over="keys"`, it is the range of query blocks for each block of keys. A tile outside of the
        range contains no query that sees a key. This may also be true for some tiles in the range.

        Returns:
            The number of the first block in the range, and the number of the first block after it,
            int32 `(batch, blocks, 2)`.
        """
        offset, left, right = self.keys - self.queries, self.form.left, self.form.right
        lengths = self.keys if rows.lengths is None else rows.lengths
        outer: tuple[int, int, int | jax.Array] = (self.queries, self.block_q, self.queries)
        inner_side: tuple[int, int, int | jax.Array] = (self.keys, self.block_k, lengths)
        if over == "keys":
            outer, inner_side, offset, left, right = inner_side, outer, -offset, right, left
        (size, block, outer_length), (inner_size, inner, inner_length) = outer, inner_side
        start = jnp.arange(pl.cdiv(size, block)) * block
        last = jnp.minimum(start + block, size) - 1
        low = jnp.zeros_like(start) if left is None else jnp.maximum(start + offset - left, 0)
        high = jnp.full_like(start, inner_size) if right is None else last + offset + right + 1
        end = jnp.minimum(high, inner_length)
        end = jnp.where(start < outer_length, end, 0)
        first, stop = low // inner, -(-end // inner)
        if rows.keys is not None:
            may_meet = self.may_share_segment(rows.queries, rows.keys)
            if over == "keys":
                may_meet = may_meet.swapaxes(1, 2)
            number = jnp.arange(may_meet.shape[2])
            first = jnp.maximum(first, jnp.where(may_meet, number, may_meet.shape[2]).min(2))
            stop = jnp.minimum(stop, jnp.where(may_meet, number + 1, 0).max(2))
        spans = jnp.stack(jnp.broadcast_arrays(first, jnp.maximum(stop, first)), -1)
        return jnp.broadcast_to(spans, (self.batch, len(start), 2)).astype(jnp.int32)

    def may_share_segment(self, queries: jax.Array | None, keys: jax.Array) -> jax.Array:
        """Returns which query blocks and key blocks may have a segment number in common.

        The result has the shape `(batch, query blocks, key blocks)`.
        """
        if queries is None:
            queries, keys = jnp.ones((1, self.queries), jnp.int32), (keys != 0).astype(jnp.int32)
        (low, high), (key_low, key_high) = (
            _segment_range(queries, self.block_q),
            _segment_range(keys, self.block_k),
        )
        return (low[:, :, None] <= key_high[:, None]) & (key_low[:, None] <= high[:, :, None])

    # The following methods run inside of the kernels.

    def read(self, ref: Any, positions: jax.Array, size: int) -> jax.Array:
        """Loads a block `(positions, width)` of an array with `size` positions.

        Elements outside of the array, beyond its positions or its `head_dim` features, are 0.
        """
        valid = None
        if size % len(positions):
            valid = (positions < size)[:, None]
        if self.width != self.head_dim:
            inside = (jnp.arange(self.width) < self.head_dim)[None, :]
            valid = inside if valid is None else valid & inside
        return triton.load(ref, mask=valid, other=None if valid is None else 0.0)

    def write(self, ref: Any, value: jax.Array, positions: jax.Array, size: int) -> None:
        """Stores a block, without positions beyond `size` and features beyond `head_dim`."""
        valid = (positions < size)[:, None] & (jnp.arange(self.width) < self.head_dim)[None, :]
        triton.store(ref, value.astype(ref.dtype), mask=valid)

    def dot(self, left: jax.Array, right: jax.Array, transposed: bool = False) -> jax.Array:
        """Multiplies with float32 accumulation.

        float32 inputs are multiplied in three TF32 passes, whose error is as small as that of
        float32.

        Args:
            left: The left matrix.
            right: The right matrix.
            transposed: Whether `right` is stored transposed.
        """
        precision: jax.lax.DotAlgorithmPreset | jax.lax.Precision | None = None
        if self.exact:
            precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            if self.form.interpret:
                precision = jax.lax.Precision.HIGHEST
        return triton.dot(left, right, trans_b=transposed, precision=precision)

    def read_bias(
        self, ref: Any, query_positions: jax.Array, key_positions: jax.Array
    ) -> jax.Array:
        """Loads the tile `(queries, keys)` of a bias and scales it for a softmax with base 2."""
        valid = None
        if self.queries % self.block_q or self.keys % self.block_k:
            valid = (query_positions < self.queries)[:, None] & (key_positions < self.keys)[None, :]
        tile = triton.load(ref, mask=valid, other=None if valid is None else 0.0)
        return tile.astype(jnp.float32) * _LOG2_E

    def hide(
        self,
        scores: jax.Array,
        query_positions: jax.Array,
        key_positions: jax.Array,
        rows: RowArrays[Any],
        query_segments: Any,
        key_segments: Any,
    ) -> jax.Array:
        """Sets the scores of hidden keys to -inf.

        Positions and segments broadcast to a tile `(queries, keys)` or `(keys, queries)`.
        """
        own_positions = query_positions + (self.keys - self.queries)
        conditions = []
        if rows.lengths is not None:
            conditions.append(key_positions < rows.lengths[0])
        elif self.keys % self.block_k:
            conditions.append(key_positions < self.keys)
        if self.form.left is not None:
            conditions.append(key_positions >= own_positions - self.form.left)
        if self.form.right is not None:
            conditions.append(key_positions <= own_positions + self.form.right)
        if rows.queries is not None:
            conditions.append(query_segments == key_segments)
        elif rows.keys is not None:
            conditions.append(key_segments != 0)
        for visible in conditions:
            scores = jnp.where(visible, scores, -jnp.inf)
        return scores

    def keep(
        self,
        rows: RowArrays[Any],
        head: jax.Array,
        query_positions: jax.Array,
        key_positions: jax.Array,
    ) -> jax.Array | bool:
        """Returns which weights of a tile are not dropped."""
        if rows.seeds is None:
            return True
        row = (head * self.queries + query_positions).astype(jnp.uint32) * jnp.uint32(self.keys)
        index = row + key_positions.astype(jnp.uint32) + rows.seeds[2]
        bits = element_bits(index, rows.seeds[0], rows.seeds[1])
        return bits >= jnp.uint16(self.form.threshold)

    @property
    def keep_scale(self) -> float:
        """The factor by which weights that are not dropped are multiplied."""
        return 1.0 / (1.0 - self.form.threshold / 65536)


def _width(size: int) -> int:
    """Returns the smallest power of two that is at least `size` and at least 16.

    Tensor cores require blocks of at least 16 elements.
    """
    return max(16, pl.next_power_of_2(size))


def _segment_range(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the smallest and largest segment number of each block, `(batch, blocks)` each."""
    padded = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % block)), mode="edge")
    blocks = padded.reshape(len(segments), -1, block)
    return blocks.min(2), blocks.max(2)


# -- kernels
# ---------------------------------------------------------------------------------------
# Softmax is computed with exp2, which is a hardware instruction: exp(x) = exp2(x * log2(e)).


def _forward_kernel(
    tiles: _Tiles,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    span: Any,
    rows: RowArrays[Any],
    out_ref: Any,
    log_sum_ref: Any,
) -> None:
    """Computes the attention of a block of queries."""
    head = pl.program_id(1)
    query_positions = pl.program_id(0) * tiles.block_q + jnp.arange(tiles.block_q)
    query = tiles.read(query_ref, query_positions, tiles.queries)
    query_segments = None if rows.queries is None else rows.queries[...][:, None]

    def tile(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, maximum, total = carry
        key_slice = pl.ds(block * tiles.block_k, tiles.block_k)
        key_positions = block * tiles.block_k + jnp.arange(tiles.block_k)
        key = tiles.read(key_ref.at[key_slice, :], key_positions, tiles.keys)
        key_segments = None if rows.keys is None else rows.keys[key_slice][None, :]
        scores = tiles.dot(query, key, transposed=True) * (tiles.form.scale * _LOG2_E)
        if rows.bias is not None:
            scores = scores + tiles.read_bias(
                rows.bias.at[:, key_slice], query_positions, key_positions
            )
        scores = tiles.hide(
            scores,
            query_positions[:, None],
            key_positions[None, :],
            rows,
            query_segments,
            key_segments,
        )
        new_maximum = jnp.maximum(maximum, scores.max(1))
        # The maximum of a query is -inf until the query sees a key. Until then subtract 0.
        base = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        weights = jnp.exp2(scores - base[:, None])
        rescale = jnp.exp2(maximum - base)
        total = total * rescale + weights.sum(1)
        keep = tiles.keep(rows, head, query_positions[:, None], key_positions[None, :])
        weights = jnp.where(keep, weights, 0.0)
        value = tiles.read(value_ref.at[key_slice, :], key_positions, tiles.keys)
        out = out * rescale[:, None] + tiles.dot(weights.astype(value.dtype), value)
        return out, new_maximum, total

    start = (
        jnp.zeros((tiles.block_q, tiles.width), jnp.float32),
        jnp.full(tiles.block_q, -jnp.inf, jnp.float32),
        jnp.zeros(tiles.block_q, jnp.float32),
    )
    out, maximum, total = jax.lax.fori_loop(span[0], span[1], tile, start)
    masked = total == 0.0
    total = jnp.where(masked, 1.0, total)
    tiles.write(out_ref, out * (tiles.keep_scale / total)[:, None], query_positions, tiles.queries)
    # In the backward pass the weights of a fully masked query are exp2(score - inf) = 0.
    log_sum = jnp.where(masked, jnp.inf, maximum + jnp.log2(total))
    triton.store(log_sum_ref, log_sum, mask=query_positions < tiles.queries)


def _query_kernel(
    tiles: _Tiles,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    cotangent_ref: Any,
    log_sum_ref: Any,
    row_terms_ref: Any,
    span: Any,
    rows: RowArrays[Any],
    out_ref: Any,
) -> None:
    """Computes the gradient with respect to a block of queries."""
    head = pl.program_id(1)
    query_positions = pl.program_id(0) * tiles.block_q + jnp.arange(tiles.block_q)
    query = tiles.read(query_ref, query_positions, tiles.queries)
    cotangent = tiles.read(cotangent_ref, query_positions, tiles.queries)
    log_sum = triton.load(log_sum_ref, mask=query_positions < tiles.queries, other=jnp.inf)[:, None]
    row_terms = triton.load(row_terms_ref, mask=query_positions < tiles.queries, other=0.0)[:, None]
    query_segments = None if rows.queries is None else rows.queries[...][:, None]

    def tile(block: jax.Array, total: jax.Array) -> jax.Array:
        key_slice = pl.ds(block * tiles.block_k, tiles.block_k)
        key_positions = block * tiles.block_k + jnp.arange(tiles.block_k)
        key = tiles.read(key_ref.at[key_slice, :], key_positions, tiles.keys)
        value = tiles.read(value_ref.at[key_slice, :], key_positions, tiles.keys)
        key_segments = None if rows.keys is None else rows.keys[key_slice][None, :]
        scores = tiles.dot(query, key, transposed=True) * (tiles.form.scale * _LOG2_E)
        if rows.bias is not None:
            scores = scores + tiles.read_bias(
                rows.bias.at[:, key_slice], query_positions, key_positions
            )
        scores = tiles.hide(
            scores,
            query_positions[:, None],
            key_positions[None, :],
            rows,
            query_segments,
            key_segments,
        )
        weight_gradients = tiles.dot(cotangent, value, transposed=True) * tiles.keep_scale
        keep = tiles.keep(rows, head, query_positions[:, None], key_positions[None, :])
        score_gradients = jnp.exp2(scores - log_sum) * (
            jnp.where(keep, weight_gradients, 0.0) - row_terms
        )
        return total + tiles.dot(score_gradients.astype(key.dtype), key)

    start = jnp.zeros((tiles.block_q, tiles.width), jnp.float32)
    total = jax.lax.fori_loop(span[0], span[1], tile, start)
    tiles.write(out_ref, total * tiles.form.scale, query_positions, tiles.queries)


def _key_kernel(
    tiles: _Tiles,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    cotangent_ref: Any,
    log_sum_ref: Any,
    row_terms_ref: Any,
    span: Any,
    rows: RowArrays[Any],
    key_out: Any,
    value_out: Any,
) -> None:
    """Computes the gradients with respect to a block of keys and values.

    They are summed over the query heads that share these keys and values. The tiles have the shape
    `(keys, queries)`, so that no tile has to be transposed.
    """
    first_head = pl.program_id(1) * tiles.group
    key_positions = pl.program_id(0) * tiles.block_k + jnp.arange(tiles.block_k)
    key = tiles.read(key_ref, key_positions, tiles.keys)
    value = tiles.read(value_ref, key_positions, tiles.keys)
    key_segments = None if rows.keys is None else rows.keys[...][:, None]
    begin, count = span[0], span[1] - span[0]

    def tile(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key_gradient, value_gradient = carry
        head, block = jax.lax.div(step, count), begin + jax.lax.rem(step, count)
        query_slice = pl.ds(block * tiles.block_q, tiles.block_q)
        query_positions = block * tiles.block_q + jnp.arange(tiles.block_q)
        valid = query_positions < tiles.queries
        query = tiles.read(query_ref.at[query_slice, head, :], query_positions, tiles.queries)
        cotangent = tiles.read(
            cotangent_ref.at[query_slice, head, :], query_positions, tiles.queries
        )
        log_sum = triton.load(log_sum_ref.at[head, query_slice], mask=valid, other=jnp.inf)[None, :]
        row_terms = triton.load(row_terms_ref.at[head, query_slice], mask=valid, other=0.0)[None, :]
        query_segments = None if rows.queries is None else rows.queries[query_slice][None, :]
        scores = tiles.dot(key, query, transposed=True) * (tiles.form.scale * _LOG2_E)
        if rows.bias is not None:
            scores = (
                scores
                + tiles.read_bias(
                    rows.bias.at[head, query_slice, :], query_positions, key_positions
                ).T
            )
        scores = tiles.hide(
            scores,
            query_positions[None, :],
            key_positions[:, None],
            rows,
            query_segments,
            key_segments,
        )
        weights = jnp.exp2(scores - log_sum)
        keep = tiles.keep(rows, first_head + head, query_positions[None, :], key_positions[:, None])
        kept_weights = jnp.where(keep, weights, 0.0)
        value_gradient = value_gradient + tiles.dot(kept_weights.astype(cotangent.dtype), cotangent)
        weight_gradients = tiles.dot(value, cotangent, transposed=True) * tiles.keep_scale
        score_gradients = weights * (jnp.where(keep, weight_gradients, 0.0) - row_terms)
        return key_gradient + tiles.dot(score_gradients.astype(query.dtype), query), value_gradient

    start = jnp.zeros((tiles.block_k, tiles.width), jnp.float32)
    key_gradient, value_gradient = jax.lax.fori_loop(0, tiles.group * count, tile, (start, start))
    tiles.write(key_out, key_gradient * tiles.form.scale, key_positions, tiles.keys)
    tiles.write(value_out, value_gradient * tiles.keep_scale, key_positions, tiles.keys)


def _bias_kernel(
    tiles: _Tiles,
    rows_per_bias: int,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    cotangent_ref: Any,
    log_sum_ref: Any,
    row_terms_ref: Any,
    rows: RowArrays[Any],
    out_ref: Any,
) -> None:
    """Computes the gradient of a tile of the bias, summed over the rows that share it."""
    head = jax.lax.rem(pl.program_id(2), tiles.heads)
    query_positions = pl.program_id(0) * tiles.block_q + jnp.arange(tiles.block_q)
    key_positions = pl.program_id(1) * tiles.block_k + jnp.arange(tiles.block_k)
    bias = tiles.read_bias(rows.bias, query_positions, key_positions)

    def add_row(row: jax.Array, total: jax.Array) -> jax.Array:
        query = tiles.read(query_ref.at[row, :, :], query_positions, tiles.queries)
        key = tiles.read(key_ref.at[row, :, :], key_positions, tiles.keys)
        value = tiles.read(value_ref.at[row, :, :], key_positions, tiles.keys)
        cotangent = tiles.read(cotangent_ref.at[row, :, :], query_positions, tiles.queries)
        valid = query_positions < tiles.queries
        log_sum = triton.load(log_sum_ref.at[row, :], mask=valid, other=jnp.inf)[:, None]
        row_terms = triton.load(row_terms_ref.at[row, :], mask=valid, other=0.0)[:, None]
        this_row = rows._replace(
            lengths=None if rows.lengths is None else [rows.lengths[row, 0]],
            seeds=None if rows.seeds is None else [rows.seeds[row, n] for n in range(3)],
        )
        query_segments = None if rows.queries is None else rows.queries[row, :][:, None]
        key_segments = None if rows.keys is None else rows.keys[row, :][None, :]
        scores = tiles.dot(query, key, transposed=True) * (tiles.form.scale * _LOG2_E) + bias
        scores = tiles.hide(
            scores,
            query_positions[:, None],
            key_positions[None, :],
            this_row,
            query_segments,
            key_segments,
        )
        weight_gradients = tiles.dot(cotangent, value, transposed=True) * tiles.keep_scale
        keep = tiles.keep(this_row, head, query_positions[:, None], key_positions[None, :])
        weight_gradients = jnp.where(keep, weight_gradients, 0.0)
        return total + jnp.exp2(scores - log_sum) * (weight_gradients - row_terms)

    total = jnp.zeros((tiles.block_q, tiles.block_k), jnp.float32)
    total = jax.lax.fori_loop(0, rows_per_bias, add_row, total)
    valid = (query_positions < tiles.queries)[:, None] & (key_positions < tiles.keys)[None, :]
    triton.store(out_ref, total.astype(out_ref.dtype), mask=valid)
