"""Several Linears that read the same input as one product: query, key and value of an attention.

Nothing in a model file or a checkpoint changes: the kernels stay apart, and are stacked where the
product is computed. Stacked and not concatenated, so that a kernel split over devices by its output
stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfseq.nn.stack import current_options

# Attributes that hold the projections of an attention, in the order of their product.
GROUPS = (("query", "key", "value"), ("q", "k", "v"), ("q_proj", "k_proj", "v_proj"))
# Attention to another sequence, by its path: there the query reads something else.
CROSS = re.compile(r"cross|encoder_attn|EncDec", re.IGNORECASE)


class _Pending:
    """Results that wait for the Linear that they belong to, while one forward pass is traced.

    Static for NNX, and compared by identity. What a pass that failed has left is forgotten.
    """

    def __init__(self) -> None:
        self.forward_pass: Any = None
        self.source: Any = None
        self.results: dict[str, jax.Array] = {}

    def current(self) -> dict[str, jax.Array]:
        if self.forward_pass is not current_options():
            self.forward_pass, self.source, self.results = current_options(), None, {}
        return self.results


class FusedPart(nnx.Module):
    """What the Linear ``name`` of ``parent`` calls for its product with those of ``names``.

    The first of them that is called computes for all, with the operation of ``names[0]``, and the
    others fetch. One that is called with another input computes its own product.
    """

    def __init__(self, parent: nnx.Module, names: tuple[str, ...], name: str, pending: _Pending):
        self.parent, self.names, self.name, self.pending = parent, names, name, pending

    def __call__(
        self, source: jax.Array, x: jax.Array, kernel: jax.Array, dimensions: Any
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
    def _operation(self) -> Any:
        return getattr(self.parent, self.names[0]).dot_general

    def _all(self, x: jax.Array, dimensions: Any) -> dict[str, jax.Array]:
        axis = dimensions[0][1][0]  # of the input features: 0 in (in, out), 1 in (out, in)
        kernels = [getattr(self.parent, name).gathered_kernel() for name in self.names]
        stacked = jnp.stack(kernels, axis=1 - axis)
        y = self._operation(x, stacked, (((x.ndim - 1,), (2 * axis,)), ((), ())))
        return {name: y[..., place, :] for place, name in enumerate(self.names)}


def fuse(module: nnx.Module, matches: Callable[[str], bool]) -> set[str]:
    """Make one product of each group of projections that :func:`groups` finds.

    Returns the places of the Linears whose product another one's operation computes.
    """
    served = set()
    for place, parent, names in list(groups(module, matches)):
        pending = _Pending()
        for name in names:
            getattr(parent, name).fused = nnx.data(FusedPart(parent, names, name, pending))
        served |= {f"{place}/{name}" for name in names[1:]}
    return served


def groups(
    module: nnx.Module, matches: Callable[[str], bool]
) -> Iterator[tuple[str, nnx.Module, tuple[str, ...]]]:
    """Find the projections to fuse: siblings of one shape that ``matches`` picks by their paths.

    Yields the place of their parent, the parent, and their names.
    """
    for path, parent in nnx.iter_graph(module):
        if not isinstance(parent, nnx.Module):
            continue
        place = "/".join(map(str, path))
        for names in GROUPS:
            chosen = names[1:] if CROSS.search(place) else names
            # With fewer heads of keys and values than of queries these two are still alike.
            for found in (chosen, names[1:]):
                if _alike(parent, found) and all(matches(f"{place}/{name}") for name in found):
                    yield place, parent, found
                    break


def _alike(parent: nnx.Module, names: tuple[str, ...]) -> bool:
    shapes = [
        getattr(getattr(getattr(parent, name, None), "kernel", None), "shape", None)
        for name in names
    ]
    return shapes[0] is not None and shapes.count(shapes[0]) == len(shapes)
