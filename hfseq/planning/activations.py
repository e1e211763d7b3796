"""What a step keeps between its forward and its backward pass, from its trace alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from hfseq.nn.random import batch_keys
from hfseq.planning.options import Options
from hfseq.planning.subject import Subject, abstract_mesh, build


class Kept(NamedTuple):
    """Bytes kept for the backward pass: in any case, and for each row of a micro-batch."""

    fixed: float
    row: float

    def of(self, rows: int) -> float:
        """Return the bytes that ``rows`` rows keep."""
        return self.fixed + self.row * rows


def trace(options: Options, remat: bool) -> Kept:
    """Return what one device keeps that has whole rows and whole layers.

    Counted is what the backward pass takes from the forward pass, other than parameters and batch.
    Layers are traced as one scanned layer: unrolled, the trace has copies that XLA merges. ``fsdp``
    and ``data`` change nothing for a row; ``sequence`` divides it, ``tensor`` a part of it.
    """
    alone = build(
        options, abstract_mesh("data=1", 1), scan_layers=True, gradient_checkpointing=remat
    )
    one, two = (kept_bytes(alone, rows) for rows in (1, 2))
    return Kept(max(2 * one - two, 0), two - one)


def kept_bytes(subject: Subject, rows: int) -> int:
    """Return the bytes kept for ``rows`` rows of a run on one device."""
    state, _ = subject.state()
    shapes, _ = subject.batch(rows)
    batch = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in shapes.items()}

    def backward(params: Any, extra: Any, batch: Any) -> Any:
        inputs, root = dict(batch), jax.random.key(0)
        keys = batch_keys(root, inputs.pop("row"), root)

        def loss(params: Any) -> jax.Array:
            model = subject.model
            return subject.objective.loss(model, params, inputs, keys, True, extra=extra)[0]

        return jax.vjp(loss, params)[1]

    found = jax.make_jaxpr(backward)(state["params"], state["extra"], batch).jaxpr
    given = set(found.invars)
    kept = {var for var in found.outvars if not isinstance(var, Literal) and var not in given}
    return sum(_bytes(var.aval) for var in kept)


def _bytes(aval: Any) -> int:
    return int(aval.size * getattr(aval.dtype, "itemsize", 4))


__all__ = ["Kept", "kept_bytes", "trace"]
