"""Precision recipes: which type each product runs in, chosen by rules on parameter paths.

A recipe is applied to a finished module (:func:`apply_precision`), so no model file mentions types.
A recipe may give each Linear that its ``sites`` match an operation of its own (FP8 keeps scales
there).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from hfseq.errors import UsageError
from hfseq.nn import sharding
from hfseq.nn.context import Options, current_options, platform

DotGeneral = Callable[..., jax.Array]
Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

# Attributes that hold the projections of an attention, in the order of their product.
PROJECTION_GROUPS = (("query", "key", "value"), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
# Attention to another sequence, by its path: there the query reads something else.
CROSS_ATTENTION_PATH = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


class _Pending:
    """Results that wait for the Linear that they belong to, while one forward pass is traced.

    Static for NNX, and compared by identity. What a pass that failed has left is forgotten.
    """

    def __init__(self) -> None:
        self.forward_pass: Options | None = None
        self.source: jax.Array | None = None
        self.results: dict[str, jax.Array] = {}

    def current(self) -> dict[str, jax.Array]:
        if self.forward_pass is not current_options():
            self.forward_pass, self.source, self.results = current_options(), None, {}
        return self.results


class FusedProjection(nnx.Module):
    """What the Linear ``name`` of ``parent`` calls for its product with those of ``names``.

    The first of them that is called computes for all, with the operation of ``names[0]``, and the
    others fetch. One that is called with another input computes its own product.
    """

    def __init__(self, parent: nnx.Module, names: tuple[str, ...], name: str, pending: _Pending):
        self.parent, self.names, self.name, self.pending = parent, names, name, pending

    def __call__(
        self, source: jax.Array, x: jax.Array, kernel: jax.Array, dimensions: Dimensions
    ) -> jax.Array:
        """Return the product of ``x`` (..., k) and the Linear's kernel.

        ``source`` is the Linear's own input, by whose identity the others are known; ``x`` is that
        input, laid out for the product.
        """
        pending = self.pending
        if not pending.current():
            pending.source, pending.results = source, self._all(x, dimensions)
        if pending.source is not source or self.name not in pending.results:
            return self._operation(x, kernel, dimensions)
        result = pending.results.pop(self.name)
        if not pending.results:
            pending.source = None
        return result

    @property
    def _operation(self) -> DotGeneral:
        return getattr(self.parent, self.names[0]).dot_general

    def _all(self, x: jax.Array, dimensions: Dimensions) -> dict[str, jax.Array]:
        axis = dimensions[0][1][0]  # of the input features: 0 in (in, out), 1 in (out, in)
        kernels = [getattr(self.parent, name).gathered_kernel() for name in self.names]
        stacked = jnp.stack(kernels, axis=1 - axis)
        y = self._operation(x, stacked, (((x.ndim - 1,), (2 * axis,)), ((), ())))
        return {name: y[..., index, :] for index, name in enumerate(self.names)}


def fuse_projections(module: nnx.Module, matches: Callable[[str], bool]) -> set[str]:
    """Make one product of each group of projections that :func:`groups` finds.

    Returns the paths of the Linears whose product another one's operation computes.
    """
    served = set()
    for path, parent, names in list(projection_groups(module, matches)):
        pending = _Pending()
        for name in names:
            getattr(parent, name).fused = nnx.data(FusedProjection(parent, names, name, pending))
        served |= {f"{path}/{name}" for name in names[1:]}
    return served


def projection_groups(
    module: nnx.Module, matches: Callable[[str], bool]
) -> Iterator[tuple[str, nnx.Module, tuple[str, ...]]]:
    """Find the projections to fuse: siblings of one shape that ``matches`` picks by their paths.

    Yields the path of their parent, the parent, and their names.
    """

    def alike(parent: nnx.Module, names: tuple[str, ...]) -> bool:
        linears = (getattr(parent, name, None) for name in names)
        shapes = [getattr(getattr(linear, "kernel", None), "shape", None) for linear in linears]
        return shapes[0] is not None and shapes.count(shapes[0]) == len(shapes)

    for keys, parent in nnx.iter_graph(module):
        if not isinstance(parent, nnx.Module):
            continue
        path = "/".join(map(str, keys))
        for names in PROJECTION_GROUPS:
            siblings = names[1:] if CROSS_ATTENTION_PATH.search(path) else names
            # With fewer heads of keys and values than of queries these two are still alike.
            for group in (siblings, names[1:]):
                if alike(parent, group) and all(matches(f"{path}/{name}") for name in group):
                    yield path, parent, group
                    break


@dataclasses.dataclass(frozen=True)
class Precision:
    """A recipe: the type of computation, and the product that matching Linears use.

    **Arguments:** ``compute_dtype`` is the type of activations and products (``None`` leaves them
    as they come); ``make_dot_general`` builds one operation for each matching Linear; ``sites`` are
    regular expressions searched in the Linear's path (``encoder/layer/0/attention/self/query``),
    and the other Linears compute in ``compute_dtype``; with ``fused`` query, key and value of an
    attention are one product (:mod:`hfseq.nn.precision`).
    """

    name: str
    compute_dtype: DTypeLike | None = None
    make_dot_general: Callable[[], DotGeneral] | None = None
    sites: tuple[str, ...] = (".*",)
    fused: bool = False

    def matches(self, path: str) -> bool:
        """Tell whether the Linear at ``path`` gets this recipe's operation."""
        return any(re.search(site, path) for site in self.sites)


def low_precision_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Dimensions, **ignored: Any
) -> jax.Array:
    """Multiply in ``lhs``'s type (half, or float32) with float32 sums, forward and backward.

    ``lhs`` is (..., k), ``rhs`` a float32 or half (k, n) or (n, k) matrix. The matrix is cast
    inside, so its gradient is summed and returned in its own type. Casting the cotangent to half
    keeps the backward products on the fast units too. The weight's gradient is written as one
    product over all leading axes: what automatic differentiation makes of it, transposed, runs at
    half of the speed on a CPU (docs/benchmarks.md). Forward-mode differentiation needs a recipe
    without an operation, ``Precision("plain", jnp.float32)``.
    """
    axis = dimension_numbers[0][1][0]
    return _product(lhs, rhs, axis, not sharding.splits_sequence())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, w: jax.Array, axis: int, flatten: bool) -> jax.Array:
    """Multiply; ``flatten`` unless rows split by their length would have to be gathered for it."""
    return _contract(x, w.astype(x.dtype), x.ndim - 1, axis)


def _product_backward(
    axis: int, flatten: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    g = g.astype(x.dtype)
    dx = _contract(g, w.astype(x.dtype), g.ndim - 1, 1 - axis)
    factors = [x, g] if axis == 0 else [g, x]
    if platform() == "cpu":
        # The barrier keeps what made a factor out of the product, where it would be repeated
        # element by transposed element. With one leading axis float32 needs no transposed copy;
        # half types reach the matrix units only with two.
        for index, part in enumerate(factors):
            part = lax.optimization_barrier(part)
            flat = flatten and part.dtype == jnp.float32
            factors[index] = part.reshape(-1, part.shape[-1]) if flat else part
    rows, columns = factors
    batch = tuple(range(rows.ndim - 1))
    dw = lax.dot_general(
        rows, columns, ((batch, batch), ((), ())), preferred_element_type=jnp.float32
    )
    return dx, dw.astype(w.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias(y: jax.Array, bias: jax.Array, round_first: bool = False) -> jax.Array:
    """Add ``bias`` (features,) to ``y`` (..., features) in the type of ``y``.

    The gradient of the bias is summed in float32: in a half type it would be rounded, and is slow.
    ``round_first`` where the gradient of ``y`` is written down for a product anyway: on NVIDIA GPUs
    XLA would sum what it was before it was rounded, and write that down in float32 as well. Where
    it is made from logits and padded as it is written, as in a head, this costs a copy instead.
    """
    return y + bias.astype(y.dtype)


def _add_bias_backward(
    round_first: bool, bias: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if round_first and platform() == "cuda":
        g = lax.optimization_barrier(g)
    total = g.astype(jnp.float32).sum(tuple(range(g.ndim - 1)))
    return g, total.astype(bias.dtype)


add_bias.defvjp(
    lambda y, bias, round_first: (add_bias(y, bias, round_first), bias), _add_bias_backward
)


def _contract(x: jax.Array, w: jax.Array, x_axis: int, w_axis: int) -> jax.Array:
    """Multiply, with float32 sums, into the type of ``x``.

    Accelerators round a sum as they write it. XLA's CPU kernels for half results would round within
    the sum; on a GPU a float32 result is written, read and rounded by kernels of their own.
    """
    made = jnp.float32 if platform() == "cpu" else x.dtype
    dimensions = (((x_axis,), (w_axis,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=made).astype(x.dtype)


_product.defvjp(
    lambda x, w, axis, flatten: (_product(x, w, axis, flatten), (x, w)), _product_backward
)


FLOAT32 = Precision("float32", jnp.float32, lambda: low_precision_dot_general)
BFLOAT16 = Precision("bfloat16", jnp.bfloat16, lambda: low_precision_dot_general)
FLOAT16 = Precision("float16", jnp.float16, lambda: low_precision_dot_general)

_BY_DTYPE = {recipe.name: recipe for recipe in (FLOAT32, BFLOAT16, FLOAT16)}


def precision_for(dtype: DTypeLike | None) -> Precision:
    """Return the built-in recipe that computes in ``dtype`` (``float32`` where none is given)."""
    return _BY_DTYPE.get(jnp.dtype(dtype or jnp.float32).name, FLOAT32)


def resolve_precision(precision: str | Precision | None, dtype: DTypeLike | None) -> Precision:
    """Return the recipe given by name or itself, or the one that computes in ``dtype``."""
    if isinstance(precision, Precision):
        return precision
    if precision is None:
        return precision_for(dtype)
    return choose_precision(precision)


def choose_precision(
    name: str, dtype: DTypeLike | None = None, sites: tuple[str, ...] = (), **options: Any
) -> Precision:
    """Return the recipe ``name``, made with ``options`` and changed where the others are given.

    ``dtype`` is its type of computation, ``sites`` the Linears where its product is used.
    """
    from hfseq import plugins

    recipe = plugins.load().precisions.get(name)
    given = {option: value for option, value in options.items() if value is not None}
    if given and (
        isinstance(recipe, Precision)
        or not given.keys() <= inspect.signature(recipe).parameters.keys()
    ):
        raise UsageError(
            f"precision '{name}' takes no {', '.join(given)}: fp8_delayed does, or drop them"
        )
    for site in sites:
        try:
            re.compile(site)
        except re.error as error:
            raise UsageError(
                f"precision_sites: '{site}' is no regular expression ({error}); commas separate "
                "them, so none can hold one"
            ) from error
    made = recipe if isinstance(recipe, Precision) else recipe(**given)
    changes: dict[str, Any] = {"sites": tuple(sites)} if sites else {}
    if dtype is not None:
        changes["compute_dtype"] = precision_for(dtype).compute_dtype
    return dataclasses.replace(made, **changes)


def apply_precision(module: nnx.Module, precision: Precision, sites: tuple[str, ...] = ()) -> None:
    """Set the computation type of every layer and the operation of every Linear.

    ``sites`` are expressions beside the recipe's (a model class may name some). UsageError where a
    recipe with an operation of its own finds no Linear at all.
    """
    named = {"/".join(map(str, path)): layer for path, layer in nnx.iter_graph(module)}
    for layer in named.values():
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = precision.compute_dtype
    make = precision.make_dot_general
    if make is None:
        return
    recipe = dataclasses.replace(precision, sites=(*precision.sites, *sites))
    products = {path: layer for path, layer in named.items() if hasattr(layer, "dot_general")}
    chosen = {
        path: layer
        for path, layer in products.items()
        # A table is multiplied only as a head: no place for a state that every step must renew.
        if recipe.matches(path) and (hasattr(layer, "kernel") or not precision.fused)
    }
    if products and not chosen:
        linears = sorted(path for path, layer in products.items() if hasattr(layer, "kernel"))
        raise UsageError(
            f"precision '{precision.name}': no Linear matches {', '.join(recipe.sites)}; this "
            f"model has {', '.join(linears[:8])}{' ...' if len(linears) > 8 else ''}"
        )
    served = fuse_projections(module, chosen.__contains__) if precision.fused else set()
    for path, layer in products.items():
        if path not in chosen or path in served:
            layer.dot_general = low_precision_dot_general
            continue
        operation = make()
        stateful = isinstance(operation, nnx.Module)
        layer.dot_general = nnx.data(operation) if stateful else operation
