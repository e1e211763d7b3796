"""The Triton kernels of flash attention, through Pallas: forward, and those of the backward pass.

Attention is computed in tiles of some queries and some keys, with a running softmax (Dao 2023,
FlashAttention-2), so nothing of the size queries x keys is ever kept. Which tiles there are to
compute is found out before the kernels start: each block of queries meets the keys' blocks of one
range, and each block of keys the queries' of one range. Tiles make the random bits of their own
elements, as :func:`hfseq.nn.random.element_bits` numbers them, in all kernels.

This module imports Pallas; :mod:`hfseq.nn.kernels.flash` is what others import.
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

# Queries or keys of a program's block, of a step's; warps; stages of the pipeline of loads: by the
# bytes of the type and the width of a head. Half types: as published for such kernels, where that
# compiles without keeping registers in memory; float32 takes three times as many registers.
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
    """What the compiler knows of an attention.

    A query sees ``before`` keys to the left of its own and ``after`` to the right, None: all. An
    element is dropped when its bits are below ``threshold``.
    """

    scale: float
    before: int | None = None
    after: int | None = None
    threshold: int = 0
    interpret: bool = False


class RowArrays(NamedTuple, Generic[Leaf]):
    """What is known of each row of a batch, int32: segments (batch, queries) and (batch, keys).

    Without segments of queries the keys of segment 0 are hidden. ``lengths`` (batch, 1) counts the
    keys that are there; ``seeds`` (batch, 3) are :meth:`hfseq.nn.random.LazyBits.seeds`. ``bias`` (1
    or batch, heads, queries, keys), of any type, is added to the scores and has a gradient.
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
    """Attend on one device; see :func:`hfseq.nn.kernels.flash.flash_attention`."""
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
        [specs.query, specs.number],
        [jax.ShapeDtypeStruct(query.shape, value.dtype), tiles.numbers()],
    )
    return out, (query, key, value, rows, out, log_sum)


def _backward(form: AttentionForm, kept: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    query, key, value, rows, out, log_sum = kept
    # What a change of all weights of a query by one factor would do, which softmax takes back.
    common = (out.astype(jnp.float32) * change.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    arrays = [query, key, value, change.astype(value.dtype), log_sum, common]

    tiles = _Tiles.of(form, "query", query, key, rows)
    specs = tiles.specs("queries")
    (d_query,) = tiles.call(
        _query_kernel,
        "queries",
        [specs.query, specs.key, specs.key, specs.query, specs.number, specs.number],
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
        [specs.query, specs.key, specs.key, specs.query, specs.number, specs.number],
        rows,
        arrays,
        [specs.key, specs.key],
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in (key, value)],
    )
    return d_query, d_key, d_value, RowArrays(bias=_bias_gradient(form, arrays, rows))


def _bias_gradient(
    form: AttentionForm, arrays: list[jax.Array], rows: RowArrays[jax.Array]
) -> jax.Array | None:
    """Return the gradient of the bias, if there is one, summed over the rows that share it."""
    if rows.bias is None:
        return None
    tiles = _Tiles.of(form, "bias", arrays[0], arrays[1], rows)
    shared = tiles.batch // len(rows.bias)  # rows that a program sums
    heads, group, block_q, block_k = tiles.heads, tiles.group, tiles.block_q, tiles.block_k

    def row(n: jax.Array) -> jax.Array:
        return jax.lax.div(n, heads)

    def head(n: jax.Array) -> jax.Array:
        return jax.lax.rem(n, heads)

    query = pl.BlockSpec(
        (shared, block_q, None, tiles.width), lambda i, j, n: (row(n), i, head(n), 0)
    )
    key = pl.BlockSpec(
        (shared, block_k, None, tiles.width),
        lambda i, j, n: (row(n), j, jax.lax.div(head(n), group), 0),
    )
    number = pl.BlockSpec((shared, None, block_q), lambda i, j, n: (row(n), head(n), i))
    bias = pl.BlockSpec((None, None, block_q, block_k), lambda i, j, n: (row(n), head(n), i, j))
    known = RowArrays(
        queries=pl.BlockSpec((shared, block_q), lambda i, j, n: (row(n), i)),
        keys=pl.BlockSpec((shared, block_k), lambda i, j, n: (row(n), j)),
        lengths=pl.BlockSpec((shared, 1), lambda i, j, n: (row(n), 0)),
        seeds=pl.BlockSpec((shared, 3), lambda i, j, n: (row(n), 0)),
        bias=bias,
    )
    (out,) = pl.pallas_call(
        functools.partial(_bias_kernel, tiles, shared),
        grid=(
            pl.cdiv(tiles.queries, block_q),
            pl.cdiv(tiles.keys, block_k),
            heads * len(rows.bias),
        ),
        in_specs=[query, key, key, query, number, number, _present(known, rows)],
        out_specs=[bias],
        out_shape=[jax.ShapeDtypeStruct(rows.bias.shape, rows.bias.dtype)],
        name="flash_bias_kernel",
        **tiles.options,
    )(*arrays, rows)
    return out


def _present(specs: RowArrays[pl.BlockSpec], rows: RowArrays[jax.Array]) -> RowArrays[pl.BlockSpec]:
    """Return the specs of what is there."""
    pairs = zip(specs, rows, strict=True)
    return RowArrays(*(None if leaf is None else spec for spec, leaf in pairs))


attention.defvjp(_forward, _backward)


# -- tiles
# ---------------------------------------------------------------------------------------


class _Specs(NamedTuple):
    """Which part of each kind of array a program of a kernel is given."""

    query: pl.BlockSpec
    key: pl.BlockSpec
    number: pl.BlockSpec
    rows: RowArrays[pl.BlockSpec]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How one kernel cuts an attention: sizes of the arrays, of the tiles, and of the programs."""

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
        """Choose the tiles of a kernel: "forward", or whose gradients it makes."""
        batch, queries, heads, head_dim = query.shape
        keys, kv_heads = key.shape[1:3]
        width, itemsize = _width(head_dim), query.dtype.itemsize
        outer, inner, warps, stages = _SIZES[itemsize, max(width, 64)][kernel]
        if kernel == "forward" and rows.seeds is not None and width <= 64 and itemsize == 2:
            outer = 64  # to hash takes registers
        if rows.bias is not None:
            stages = max(1, stages - 1)  # its tiles take the shared memory of one
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
        """How many query heads share a head of keys."""
        return self.heads // self.kv_heads

    def numbers(self) -> jax.ShapeDtypeStruct:
        """Return the shape of what is kept of each query, float32."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.queries), jnp.float32)

    @property
    def options(self) -> dict[str, Any]:
        """Return how Pallas compiles the kernel."""
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
        """Run a program for each block of ``over``, "queries" or "keys", each head and row."""
        spans = self.spans(rows, over)
        heads = self.heads if over == "queries" else self.kv_heads
        return pl.pallas_call(
            functools.partial(kernel, self),
            grid=(spans.shape[1], heads, self.batch),
            in_specs=[
                *in_specs,
                pl.BlockSpec((None, None, 2), lambda i, h, b: (b, i, 0)),
                _present(
                    self.specs(over, len(rows.bias) if rows.bias is not None else 1).rows, rows
                ),
            ],
            out_specs=out_specs,
            out_shape=out,
            name=f"flash{kernel.__name__}",
            **self.options,
        )(*arrays, spans, rows)

    def specs(self, over: str, biases: int = 1) -> _Specs:
        """Return the parts of programs that have a block of ``over`` and all of the others.

        ``biases`` is how many rows of the batch have a bias of their own, or 1.
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
        """Return the first and the last + 1 inner block of each block of ``over``.

        int32 (batch, blocks, 2). Tiles outside of them are empty; some inside may be too.
        """
        offset, before, after = self.keys - self.queries, self.form.before, self.form.after
        lengths = self.keys if rows.lengths is None else rows.lengths
        own: tuple[int, int, int | jax.Array] = (self.queries, self.block_q, self.queries)
        other: tuple[int, int, int | jax.Array] = (self.keys, self.block_k, lengths)
        if over == "keys":
            own, other, offset, before, after = other, own, -offset, after, before
        (size, block, there), (inner_size, inner, inner_there) = own, other
        start = jnp.arange(pl.cdiv(size, block)) * block
        last = jnp.minimum(start + block, size) - 1
        low = jnp.zeros_like(start) if before is None else jnp.maximum(start + offset - before, 0)
        high = jnp.full_like(start, inner_size) if after is None else last + offset + after + 1
        end = jnp.minimum(high, inner_there)
        end = jnp.where(start < there, end, 0)
        first, stop = low // inner, -(-end // inner)
        if rows.keys is not None:
            met = self.meet(rows.queries, rows.keys)
            if over == "keys":
                met = met.swapaxes(1, 2)
            number = jnp.arange(met.shape[2])
            first = jnp.maximum(first, jnp.where(met, number, met.shape[2]).min(2))
            stop = jnp.minimum(stop, jnp.where(met, number + 1, 0).max(2))
        spans = jnp.stack(jnp.broadcast_arrays(first, jnp.maximum(stop, first)), -1)
        return jnp.broadcast_to(spans, (self.batch, len(start), 2)).astype(jnp.int32)

    def meet(self, queries: jax.Array | None, keys: jax.Array) -> jax.Array:
        """Return which blocks may have a segment in common, (batch, query blocks, key blocks)."""
        if queries is None:
            queries, keys = jnp.ones((1, self.queries), jnp.int32), (keys != 0).astype(jnp.int32)
        (low, high), (key_low, key_high) = _ends(queries, self.block_q), _ends(keys, self.block_k)
        return (low[:, :, None] <= key_high[:, None]) & (key_low[:, None] <= high[:, :, None])

    # What follows runs in the kernels.

    def read(self, ref: Any, at: jax.Array, size: int) -> jax.Array:
        """Load (positions, width) from ``at``; what lies past ``size`` is 0."""
        there = None
        if size % len(at):
            there = (at < size)[:, None]
        if self.width != self.head_dim:
            inside = (jnp.arange(self.width) < self.head_dim)[None, :]
            there = inside if there is None else there & inside
        return triton.load(ref, mask=there, other=None if there is None else 0.0)

    def write(self, ref: Any, value: jax.Array, at: jax.Array, size: int) -> None:
        """Store what :meth:`read` would load."""
        there = (at < size)[:, None] & (jnp.arange(self.width) < self.head_dim)[None, :]
        triton.store(ref, value.astype(ref.dtype), mask=there)

    def dot(self, left: jax.Array, right: jax.Array, turned: bool = False) -> jax.Array:
        """Multiply, summing in float32; ``turned`` says that ``right`` lies transposed.

        float32 is multiplied in three products of TF32, whose error is that of float32.
        """
        precision: jax.lax.DotAlgorithmPreset | jax.lax.Precision | None = None
        if self.exact:
            precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
            if self.form.interpret:
                precision = jax.lax.Precision.HIGHEST
        return triton.dot(left, right, trans_b=turned, precision=precision)

    def read_bias(self, ref: Any, query_at: jax.Array, key_at: jax.Array) -> jax.Array:
        """Load the tile (queries, keys) of a bias."""
        there = None
        if self.queries % self.block_q or self.keys % self.block_k:
            there = (query_at < self.queries)[:, None] & (key_at < self.keys)[None, :]
        tile = triton.load(ref, mask=there, other=None if there is None else 0.0)
        return tile.astype(jnp.float32) * _LOG2_E

    def hide(
        self,
        scores: jax.Array,
        query_at: jax.Array,
        key_at: jax.Array,
        rows: RowArrays[Any],
        query: Any,
        key: Any,
    ) -> jax.Array:
        """Set the scores of keys that are not seen to -inf.

        Positions and segments broadcast to a tile, of either orientation.
        """
        own = query_at + (self.keys - self.queries)
        seen = []
        if rows.lengths is not None:
            seen.append(key_at < rows.lengths[0])
        elif self.keys % self.block_k:
            seen.append(key_at < self.keys)
        if self.form.before is not None:
            seen.append(key_at >= own - self.form.before)
        if self.form.after is not None:
            seen.append(key_at <= own + self.form.after)
        if rows.queries is not None:
            seen.append(query == key)
        elif rows.keys is not None:
            seen.append(key != 0)
        for each in seen:
            scores = jnp.where(each, scores, -jnp.inf)
        return scores

    def keep(
        self, rows: RowArrays[Any], head: jax.Array, query_at: jax.Array, key_at: jax.Array
    ) -> jax.Array | bool:
        """Return which weights of a tile are not dropped."""
        if rows.seeds is None:
            return True
        row = (head * self.queries + query_at).astype(jnp.uint32) * jnp.uint32(self.keys)
        index = row + key_at.astype(jnp.uint32) + rows.seeds[2]
        bits = element_bits(index, rows.seeds[0], rows.seeds[1])
        return bits >= jnp.uint16(self.form.threshold)

    @property
    def raised(self) -> float:
        """By how much the weights that are kept grow."""
        return 1.0 / (1.0 - self.form.threshold / 65536)


def _width(size: int) -> int:
    """Return the least power of two that tensor cores take: at least 16."""
    return max(16, pl.next_power_of_2(size))


def _ends(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the least and the greatest segment of each block, both (batch, blocks)."""
    filled = jnp.pad(segments, ((0, 0), (0, -segments.shape[1] % block)), mode="edge")
    blocks = filled.reshape(len(segments), -1, block)
    return blocks.min(2), blocks.max(2)


# -- kernels
# ---------------------------------------------------------------------------------------
# Softmax is taken to the base 2, which processors compute: exp(x) = exp2(x log2 e).


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
    """Attend from a block of queries."""
    head = pl.program_id(1)
    at = pl.program_id(0) * tiles.block_q + jnp.arange(tiles.block_q)
    query = tiles.read(query_ref, at, tiles.queries)
    own = None if rows.queries is None else rows.queries[...][:, None]

    def tile(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, most, total = carry
        cut = pl.ds(block * tiles.block_k, tiles.block_k)
        key_at = block * tiles.block_k + jnp.arange(tiles.block_k)
        key = tiles.read(key_ref.at[cut, :], key_at, tiles.keys)
        segments = None if rows.keys is None else rows.keys[cut][None, :]
        scores = tiles.dot(query, key, turned=True) * (tiles.form.scale * _LOG2_E)
        if rows.bias is not None:
            scores = scores + tiles.read_bias(rows.bias.at[:, cut], at, key_at)
        scores = tiles.hide(scores, at[:, None], key_at[None, :], rows, own, segments)
        new = jnp.maximum(most, scores.max(1))
        # Of a query that has seen nothing yet the greatest score is -inf: nothing to subtract.
        base = jnp.where(new == -jnp.inf, 0.0, new)
        weights = jnp.exp2(scores - base[:, None])
        shrunk = jnp.exp2(most - base)
        total = total * shrunk + weights.sum(1)
        keep = tiles.keep(rows, head, at[:, None], key_at[None, :])
        weights = jnp.where(keep, weights, 0.0)
        value = tiles.read(value_ref.at[cut, :], key_at, tiles.keys)
        out = out * shrunk[:, None] + tiles.dot(weights.astype(value.dtype), value)
        return out, new, total

    start = (
        jnp.zeros((tiles.block_q, tiles.width), jnp.float32),
        jnp.full(tiles.block_q, -jnp.inf, jnp.float32),
        jnp.zeros(tiles.block_q, jnp.float32),
    )
    out, most, total = jax.lax.fori_loop(span[0], span[1], tile, start)
    blind = total == 0.0
    total = jnp.where(blind, 1.0, total)
    tiles.write(out_ref, out * (tiles.raised / total)[:, None], at, tiles.queries)
    # The weights of a blind query are exp2(score - inf) = 0 in the backward pass.
    log_sum = jnp.where(blind, jnp.inf, most + jnp.log2(total))
    triton.store(log_sum_ref, log_sum, mask=at < tiles.queries)


def _query_kernel(
    tiles: _Tiles,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    change_ref: Any,
    log_sum_ref: Any,
    common_ref: Any,
    span: Any,
    rows: RowArrays[Any],
    out_ref: Any,
) -> None:
    """Make the gradient of a block of queries."""
    head = pl.program_id(1)
    at = pl.program_id(0) * tiles.block_q + jnp.arange(tiles.block_q)
    query = tiles.read(query_ref, at, tiles.queries)
    change = tiles.read(change_ref, at, tiles.queries)
    log_sum = triton.load(log_sum_ref, mask=at < tiles.queries, other=jnp.inf)[:, None]
    common = triton.load(common_ref, mask=at < tiles.queries, other=0.0)[:, None]
    own = None if rows.queries is None else rows.queries[...][:, None]

    def tile(block: jax.Array, total: jax.Array) -> jax.Array:
        cut = pl.ds(block * tiles.block_k, tiles.block_k)
        key_at = block * tiles.block_k + jnp.arange(tiles.block_k)
        key = tiles.read(key_ref.at[cut, :], key_at, tiles.keys)
        value = tiles.read(value_ref.at[cut, :], key_at, tiles.keys)
        segments = None if rows.keys is None else rows.keys[cut][None, :]
        scores = tiles.dot(query, key, turned=True) * (tiles.form.scale * _LOG2_E)
        if rows.bias is not None:
            scores = scores + tiles.read_bias(rows.bias.at[:, cut], at, key_at)
        scores = tiles.hide(scores, at[:, None], key_at[None, :], rows, own, segments)
        of_weights = tiles.dot(change, value, turned=True) * tiles.raised
        keep = tiles.keep(rows, head, at[:, None], key_at[None, :])
        of_scores = jnp.exp2(scores - log_sum) * (jnp.where(keep, of_weights, 0.0) - common)
        return total + tiles.dot(of_scores.astype(key.dtype), key)

    start = jnp.zeros((tiles.block_q, tiles.width), jnp.float32)
    total = jax.lax.fori_loop(span[0], span[1], tile, start)
    tiles.write(out_ref, total * tiles.form.scale, at, tiles.queries)


def _key_kernel(
    tiles: _Tiles,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    change_ref: Any,
    log_sum_ref: Any,
    common_ref: Any,
    span: Any,
    rows: RowArrays[Any],
    key_out: Any,
    value_out: Any,
) -> None:
    """Make the gradients of a block of keys and values, summed over the heads that share them.

    Its tiles are (keys, queries), so that no tile is transposed.
    """
    first_head = pl.program_id(1) * tiles.group
    at = pl.program_id(0) * tiles.block_k + jnp.arange(tiles.block_k)
    key = tiles.read(key_ref, at, tiles.keys)
    value = tiles.read(value_ref, at, tiles.keys)
    segments = None if rows.keys is None else rows.keys[...][:, None]
    begin, count = span[0], span[1] - span[0]

    def tile(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_key, of_value = carry
        head, block = jax.lax.div(step, count), begin + jax.lax.rem(step, count)
        cut = pl.ds(block * tiles.block_q, tiles.block_q)
        query_at = block * tiles.block_q + jnp.arange(tiles.block_q)
        there = query_at < tiles.queries
        query = tiles.read(query_ref.at[cut, head, :], query_at, tiles.queries)
        change = tiles.read(change_ref.at[cut, head, :], query_at, tiles.queries)
        log_sum = triton.load(log_sum_ref.at[head, cut], mask=there, other=jnp.inf)[None, :]
        common = triton.load(common_ref.at[head, cut], mask=there, other=0.0)[None, :]
        own = None if rows.queries is None else rows.queries[cut][None, :]
        scores = tiles.dot(key, query, turned=True) * (tiles.form.scale * _LOG2_E)
        if rows.bias is not None:
            scores = scores + tiles.read_bias(rows.bias.at[head, cut, :], query_at, at).T
        scores = tiles.hide(scores, query_at[None, :], at[:, None], rows, own, segments)
        weights = jnp.exp2(scores - log_sum)
        keep = tiles.keep(rows, first_head + head, query_at[None, :], at[:, None])
        kept = jnp.where(keep, weights, 0.0)
        of_value = of_value + tiles.dot(kept.astype(change.dtype), change)
        of_weights = tiles.dot(value, change, turned=True) * tiles.raised
        of_scores = weights * (jnp.where(keep, of_weights, 0.0) - common)
        return of_key + tiles.dot(of_scores.astype(query.dtype), query), of_value

    start = jnp.zeros((tiles.block_k, tiles.width), jnp.float32)
    of_key, of_value = jax.lax.fori_loop(0, tiles.group * count, tile, (start, start))
    tiles.write(key_out, of_key * tiles.form.scale, at, tiles.keys)
    tiles.write(value_out, of_value * tiles.raised, at, tiles.keys)


def _bias_kernel(
    tiles: _Tiles,
    shared: int,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    change_ref: Any,
    log_sum_ref: Any,
    common_ref: Any,
    rows: RowArrays[Any],
    out_ref: Any,
) -> None:
    """Make the gradient of a tile of the bias, summed over the ``shared`` rows it is added to."""
    head = jax.lax.rem(pl.program_id(2), tiles.heads)
    at = pl.program_id(0) * tiles.block_q + jnp.arange(tiles.block_q)
    key_at = pl.program_id(1) * tiles.block_k + jnp.arange(tiles.block_k)
    bias = tiles.read_bias(rows.bias, at, key_at)

    def one(row: jax.Array, total: jax.Array) -> jax.Array:
        query = tiles.read(query_ref.at[row, :, :], at, tiles.queries)
        key = tiles.read(key_ref.at[row, :, :], key_at, tiles.keys)
        value = tiles.read(value_ref.at[row, :, :], key_at, tiles.keys)
        change = tiles.read(change_ref.at[row, :, :], at, tiles.queries)
        there = at < tiles.queries
        log_sum = triton.load(log_sum_ref.at[row, :], mask=there, other=jnp.inf)[:, None]
        common = triton.load(common_ref.at[row, :], mask=there, other=0.0)[:, None]
        of_row = rows._replace(
            lengths=None if rows.lengths is None else [rows.lengths[row, 0]],
            seeds=None if rows.seeds is None else [rows.seeds[row, n] for n in range(3)],
        )
        own = None if rows.queries is None else rows.queries[row, :][:, None]
        segments = None if rows.keys is None else rows.keys[row, :][None, :]
        scores = tiles.dot(query, key, turned=True) * (tiles.form.scale * _LOG2_E) + bias
        scores = tiles.hide(scores, at[:, None], key_at[None, :], of_row, own, segments)
        of_weights = tiles.dot(change, value, turned=True) * tiles.raised
        keep = tiles.keep(of_row, head, at[:, None], key_at[None, :])
        of_weights = jnp.where(keep, of_weights, 0.0)
        return total + jnp.exp2(scores - log_sum) * (of_weights - common)

    total = jnp.zeros((tiles.block_q, tiles.block_k), jnp.float32)
    total = jax.lax.fori_loop(0, shared, one, total)
    there = (at < tiles.queries)[:, None] & (key_at < tiles.keys)[None, :]
    triton.store(out_ref, total.astype(out_ref.dtype), mask=there)
