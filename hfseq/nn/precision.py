"""Precision recipes: the dtype and the function that layers use for matrix multiplication.

A recipe is applied to a model after the model is created (`apply_precision`), so that model files
do not mention dtypes. It sets the computation dtype of all layers. It may also replace
`dot_general`, the function that multiplies input and kernel, in each Linear whose path matches one
of the recipe's `sites`. A replaced function can have a state, such as the scales of FP8. Recipes
with `fused=True` compute the query, key and value projections of an attention layer in one matrix
multiplication (`FusedProjection`).
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

# Attribute names of the projections of an attention layer, in the order in which they are stacked.
PROJECTION_GROUPS = (("query", "key", "value"), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
# Paths of cross-attention layers, whose queries have a different input from keys and values.
CROSS_ATTENTION_PATH = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


class _FusedResults:
    """Results of one fused projection that the individual projections have not fetched yet.

    The projections of an attention layer share one instance, which is only used while a forward
    pass is traced. NNX treats the instance as a static attribute and compares it by identity.
    """

    def __init__(self) -> None:
        self.forward_pass: Options | None = None
        self.source: jax.Array | None = None
        self.results: dict[str, jax.Array] = {}

    def drop_stale(self) -> None:
        """Drops results that remain from another forward pass, which failed while it was traced."""
        if self.forward_pass is not current_options():
            self.forward_pass, self.source, self.results = current_options(), None, {}

    def store(self, source: jax.Array, results: dict[str, jax.Array]) -> None:
        """Stores one result per projection, all computed from the input `source`."""
        self.source, self.results = source, results

    def fetch(self, name: str, source: jax.Array) -> jax.Array | None:
        """Removes and returns the result of a projection for the input `source`.

        Returns `None` if no such result is stored.
        """
        if self.source is not source or name not in self.results:
            return None
        result = self.results.pop(name)
        if not self.results:
            self.source = None
        return result


class FusedProjection(nnx.Module):
    """Computes the projection of one Linear together with its sibling projections.

    The query, key and value projections of an attention layer usually read the same array. Model
    files call them one after the other, so they are fused within `Linear.__call__`:

    * Each of these Linears has its own `FusedProjection`. All of them share one `_FusedResults`.
    * The first Linear that is called stacks the kernels of all projections, and computes all of
      them in one matrix multiplication. It uses the `dot_general` of the first Linear in `names`.
      Then it stores the results of the other projections.
    * Another Linear fetches its result if it is called with the same array in the same forward
      pass. Arrays are compared by object identity, which needs no computation and works for traced
      arrays.
    * A Linear that is called with another array computes its own projection.

    Args:
        parent: The module that has the projections as attributes.
        names: Attribute names of the projections, in the order in which their kernels are stacked.
        name: Attribute name of the projection that this object belongs to.
        shared: The results that the projections share.
    """

    def __init__(
        self, parent: nnx.Module, names: tuple[str, ...], name: str, shared: _FusedResults
    ):
        self.parent, self.names, self.name, self.shared = parent, names, name, shared

    def __call__(
        self, source: jax.Array, x: jax.Array, kernel: jax.Array, dimensions: Dimensions
    ) -> jax.Array:
        """Returns the matrix product of `x` and the kernel of the Linear.

        Args:
            source: The array that the Linear was called with. Linears that are called with the same
                array object are fused into one matrix multiplication.
            x: The values of `source`, `(..., in_features)`, with the sharding that the
                multiplication requires.
            kernel: The kernel of this Linear.
            dimensions: The contracted dimensions, as in `jax.lax.dot_general`.
        """
        self.shared.drop_stale()
        if not self.shared.results:
            self.shared.store(source, self._product_of_all(x, dimensions))
        result = self.shared.fetch(self.name, source)
        if result is None:
            return self._operation(x, kernel, dimensions)
        return result

    @property
    def _operation(self) -> DotGeneral:
        return getattr(self.parent, self.names[0]).dot_general

    def _product_of_all(self, x: jax.Array, dimensions: Dimensions) -> dict[str, jax.Array]:
        axis = dimensions[0][1][0]  # axis of input features: 0 for (in, out), 1 for (out, in)
        kernels = [getattr(self.parent, name).gathered_kernel() for name in self.names]
        stacked = jnp.stack(kernels, axis=1 - axis)
        y = self._operation(x, stacked, (((x.ndim - 1,), (2 * axis,)), ((), ())))
        return {name: y[..., index, :] for index, name in enumerate(self.names)}


def fuse_projections(module: nnx.Module, matches: Callable[[str], bool]) -> set[str]:
    """Fuses each group of projections that `projection_groups` finds.

    Args:
        module: The model.
        matches: Returns whether the Linear at a path may be fused.

    Returns:
        The paths of all fused Linears except the first one of each group. They do not need a
        `dot_general`, because the `dot_general` of the first Linear computes their results.
    """
    covered = set()
    for path, parent, names in list(projection_groups(module, matches)):
        shared = _FusedResults()
        for name in names:
            getattr(parent, name).fused_projection = nnx.data(
                FusedProjection(parent, names, name, shared)
            )
        covered |= {f"{path}/{name}" for name in names[1:]}
    return covered


def projection_groups(
    module: nnx.Module, matches: Callable[[str], bool]
) -> Iterator[tuple[str, nnx.Module, tuple[str, ...]]]:
    """Finds projections of the same shape that can be fused.

    Args:
        module: The model.
        matches: Returns whether the Linear at a path may be fused.

    Yields:
        The path of the module that has the projections, the module itself, and the attribute names
        of the projections.
    """

    def same_shape(parent: nnx.Module, names: tuple[str, ...]) -> bool:
        """Returns whether all names refer to Linears whose kernels have the same shape."""
        linears = (getattr(parent, name, None) for name in names)
        shapes = [getattr(getattr(linear, "kernel", None), "shape", None) for linear in linears]
        return shapes[0] is not None and shapes.count(shapes[0]) == len(shapes)

    for keys, parent in nnx.iter_graph(module):
        if not isinstance(parent, nnx.Module):
            continue
        path = "/".join(map(str, keys))
        for names in PROJECTION_GROUPS:
            siblings = names[1:] if CROSS_ATTENTION_PATH.search(path) else names
            # With grouped-query attention only the key and value kernels have the same shape.
            for group in (siblings, names[1:]):
                if same_shape(parent, group) and all(matches(f"{path}/{name}") for name in group):
                    yield path, parent, group
                    break


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision recipe: the computation dtype, and the matrix multiplication of some Linears.

    Attributes:
        name: The name of the recipe, for messages.
        compute_dtype: The dtype of activations and matrix multiplications. `None` keeps the dtype
            of the inputs.
        make_dot_general: Creates the function that replaces `jax.lax.dot_general` in one matching
            Linear. `None` replaces nothing.
        sites: Regular expressions. A Linear matches if one of them is found in its path, such as
            `encoder/layer/0/attention/self/query`. Other Linears multiply in `compute_dtype`.
        fused: Whether the query, key and value projections of an attention layer are computed in
            one matrix multiplication.
    """

    name: str
    compute_dtype: DTypeLike | None = None
    make_dot_general: Callable[[], DotGeneral] | None = None
    sites: tuple[str, ...] = (".*",)
    fused: bool = False

    def matches(self, path: str) -> bool:
        """Returns whether the Linear at `path` gets the `dot_general` of this recipe."""
        return any(re.search(site, path) for site in self.sites)


def low_precision_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Dimensions, **ignored: Any
) -> jax.Array:
    """Multiplies in the dtype of `lhs` with float32 accumulation, forward and backward.

    The kernel `rhs` is cast inside of the function, so that its gradient is accumulated in float32
    and returned in the dtype of `rhs`. The cotangent is cast to the dtype of `lhs`, so that the
    matrix multiplications of the backward pass are fast too. The kernel's gradient is computed in
    one matrix multiplication over all leading axes. The transposed multiplication that automatic
    differentiation would use runs at half the speed on a CPU (docs/benchmarks.md).

    Forward-mode differentiation is not supported. If you need it, use a recipe that does not
    replace `dot_general`, such as `Precision("plain", jnp.float32)`.

    Args:
        lhs: The input, `(..., in_features)`.
        rhs: The kernel, `(in_features, out_features)` or `(out_features, in_features)`, in float32
            or a half precision dtype.
        dimension_numbers: The contracted dimensions, as in `jax.lax.dot_general`.
        **ignored: Other arguments of `jax.lax.dot_general`, which have no effect.
    """
    axis = dimension_numbers[0][1][0]
    return _product(lhs, rhs, axis, not sharding.splits_sequence())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, w: jax.Array, axis: int, flatten: bool) -> jax.Array:
    """Multiplies `x` and the kernel `w`.

    Args:
        x: `(..., in_features)`.
        w: The kernel.
        axis: The axis of input features in `w`.
        flatten: Whether the computation of the kernel's gradient may merge the leading axes of its
            operands into one. This must be False if the length is split over devices, because XLA
            would then gather the operands.
    """
    return _contract(x, w.astype(x.dtype), x.ndim - 1, axis)


def _product_backward(
    axis: int, flatten: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    g = g.astype(x.dtype)
    dx = _contract(g, w.astype(x.dtype), g.ndim - 1, 1 - axis)
    factors = [x, g] if axis == 0 else [g, x]
    if platform() == "cpu":
        # The barrier prevents XLA from fusing the computation of an operand into the matrix
        # multiplication, where it would be repeated for each transposed element. In float32,
        # merging the leading axes into one avoids a transposed copy. In half precision, matrix
        # units are used only with two leading axes.
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
    """Adds a bias `(features,)` to `y`, `(..., features)`, in the dtype of `y`.

    The gradient of the bias is accumulated in float32. A sum in half precision would be inexact and
    slow to compute.

    Args:
        y: The result of a matrix multiplication.
        bias: The bias.
        round_first: Whether to round the gradient of `y` to the dtype of `y` before it is summed to
            the gradient of the bias. This only has an effect on NVIDIA GPUs. Set it if the gradient
            of `y` is stored for a matrix multiplication anyway, because XLA would otherwise sum the
            unrounded values and also store them in float32. Do not set it for an output head. The
            gradient of its logits is padded while it is stored, and rounding it first would cause
            a copy.
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
    """Multiplies with float32 accumulation and returns the dtype of `x`.

    Accelerators accumulate in float32 and round when they store the result. There the operation
    returns the dtype of `x`, because another operation would have to read a float32 result again to
    round it. On CPUs the operation returns float32, which is cast afterwards, because XLA's CPU
    code for half precision results rounds during the accumulation.
    """
    result_dtype = jnp.float32 if platform() == "cpu" else x.dtype
    dimensions = (((x_axis,), (w_axis,)), ((), ()))
    return lax.dot_general(x, w, dimensions, preferred_element_type=result_dtype).astype(x.dtype)


_product.defvjp(
    lambda x, w, axis, flatten: (_product(x, w, axis, flatten), (x, w)), _product_backward
)


def _make_low_precision() -> DotGeneral:
    """Returns the function that multiplies matrices in the built-in recipes.

    Recipes must be picklable, so they refer to this function instead of a lambda.
    """
    return low_precision_dot_general


FLOAT32 = Precision("float32", jnp.float32, _make_low_precision)
BFLOAT16 = Precision("bfloat16", jnp.bfloat16, _make_low_precision)
FLOAT16 = Precision("float16", jnp.float16, _make_low_precision)

_BY_DTYPE = {recipe.name: recipe for recipe in (FLOAT32, BFLOAT16, FLOAT16)}


def precision_for(dtype: DTypeLike | None) -> Precision:
    """Returns the built-in recipe that computes in `dtype`. `None` means float32."""
    return _BY_DTYPE.get(jnp.dtype(dtype or jnp.float32).name, FLOAT32)


def resolve_precision(precision: str | Precision | None, dtype: DTypeLike | None) -> Precision:
    """Returns a precision recipe.

    Args:
        precision: A recipe, which is returned unchanged, the name of a recipe, or `None`.
        dtype: Selects the built-in recipe that computes in this dtype if `precision` is `None`.
    """
    if isinstance(precision, Precision):
        return precision
    if precision is None:
        return precision_for(dtype)
    return choose_precision(precision)


def choose_precision(
    name: str, dtype: DTypeLike | None = None, sites: tuple[str, ...] = (), **options: Any
) -> Precision:
    """Returns a recipe by name.

    Args:
        name: The registered name.
        dtype: Replaces the computation dtype of the recipe.
        sites: Regular expressions that replace the `sites` of the recipe.
        **options: Arguments of the function that creates the recipe. `None` values are ignored.

    Raises:
        UsageError: The recipe does not have these options, or a regular expression is invalid.
    """
    from hfseq import plugins

    recipe = plugins.load().precisions.get(name)
    arguments = {option: value for option, value in options.items() if value is not None}
    if arguments and (
        isinstance(recipe, Precision)
        or not arguments.keys() <= inspect.signature(recipe).parameters.keys()
    ):
        raise UsageError(
            f"precision '{name}' does not support all of the options {', '.join(arguments)}. "
            "Remove them, or use fp8_delayed"
        )
    for site in sites:
        try:
            re.compile(site)
        except re.error as error:
            raise UsageError(
                f"precision_sites: '{site}' is not a valid regular expression ({error}). Commas "
                "separate expressions, so an expression cannot contain a comma"
            ) from error
    result = recipe if isinstance(recipe, Precision) else recipe(**arguments)
    changes: dict[str, Any] = {"sites": tuple(sites)} if sites else {}
    if dtype is not None:
        changes["compute_dtype"] = precision_for(dtype).compute_dtype
    return dataclasses.replace(result, **changes)


def apply_precision(module: nnx.Module, precision: Precision, sites: tuple[str, ...] = ()) -> None:
    """Sets the computation dtype of every layer and the `dot_general` of every Linear.

    Args:
        module: The model, which is changed in place.
        precision: The recipe.
        sites: Regular expressions in addition to the `sites` of the recipe, such as those that a
            model class defines.

    Raises:
        UsageError: The recipe replaces `dot_general`, but no Linear matches its `sites`.
    """
    layers = {"/".join(map(str, path)): layer for path, layer in nnx.iter_graph(module)}
    for layer in layers.values():
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype = precision.compute_dtype
    make = precision.make_dot_general
    if make is None:
        return
    recipe = dataclasses.replace(precision, sites=(*precision.sites, *sites))
    multipliers = {path: layer for path, layer in layers.items() if hasattr(layer, "dot_general")}
    matching = {
        path: layer
        for path, layer in multipliers.items()
        # An embedding matrix is multiplied only if there is a tied output head. The FP8 recipes,
        # which set `fused`, therefore do not apply to it: a state must be updated in every step.
        if recipe.matches(path) and (hasattr(layer, "kernel") or not precision.fused)
    }
    if multipliers and not matching:
        linears = sorted(path for path, layer in multipliers.items() if hasattr(layer, "kernel"))
        raise UsageError(
            f"precision '{precision.name}': no Linear matches {', '.join(recipe.sites)}. The "
            f"Linears of this model are {', '.join(linears[:8])}"
            f"{' ...' if len(linears) > 8 else ''}"
        )
    covered = fuse_projections(module, matching.__contains__) if precision.fused else set()
    for path, layer in multipliers.items():
        if path not in matching or path in covered:
            layer.dot_general = low_precision_dot_general
            continue
        operation = make()
        stateful = isinstance(operation, nnx.Module)
        layer.dot_general = nnx.data(operation) if stateful else operation
