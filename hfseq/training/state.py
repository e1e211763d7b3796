"""The training state, and the one pure step that advances it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq import trees
from hfseq.nn.random import row_keys
from hfseq.training import loss_scale, sharding

State = dict[str, Any]


def make_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    extra: Any,
    sums: dict[str, Any],
    compute_dtype: Any = None,
) -> State:
    """Return the state of step 0: parameters, optimizer state, collections, and the log window.

    ``window`` sums what was not logged yet, so that a resumed run logs the very same numbers.
    Computing in float16 adds ``loss_scale``.
    """
    scale = loss_scale.initial(compute_dtype)
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "extra": extra,
        "step": jnp.zeros((), jnp.int32),
        "window": sums,
        **({} if scale is None else {"loss_scale": scale}),
    }


def state_shardings(abstract: State, params: dict[trees.Path, NamedSharding], mesh: Mesh) -> Any:
    """Lay out the state: optimizer moments like their parameters, everything small replicated."""
    shapes = {path: leaf.shape for path, leaf in trees.flatten(abstract["params"]).items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    small = jax.tree.map(
        lambda _: replicated,
        {name: part for name, part in abstract.items() if name not in ("params", "opt_state")},
    )
    return {
        "params": trees.unflatten(params),
        "opt_state": sharding.like_params(abstract["opt_state"], params, shapes, mesh),
        **small,
    }


def zero_window(names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return empty sums for the log window."""
    return {name: jnp.zeros((), jnp.float32) for name in (*names, "bad_steps")}


def make_step(
    objective: Any, model: Any, optimizer: Any, seed: int, skip_non_finite: bool
) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    """Build ``step(state, batch)``; every leaf of the batch has a leading axis of micro-batches.

    Losses and gradients are summed over micro-batches and devices and divided once by the number of
    targets, so accumulation is exact. Dropout keys belong to (seed, step, row): neither the cut
    into micro-batches nor the number of devices changes a mask.
    """

    def sums(params: Any, extra: Any, batch: Any, keys: Any, factor: Any) -> Any:
        total, count, more = objective.loss(model, params, batch, keys, True, extra=extra)
        scaled = total if factor is None else total * factor
        return scaled, (total, count, more.get("totals", {}), more.get("extra", extra))

    def micro_step(
        params: Any, extra: Any, batch: dict[str, Any], key: jax.Array, factor: Any
    ) -> Any:
        batch = dict(batch)
        keys = row_keys(key, batch.pop("row"))
        grads, (total, count, more, extra) = jax.grad(sums, has_aux=True)(
            params, extra, batch, keys, factor
        )
        found = {"loss": total, "count": count, **more}
        return grads, jax.tree.map(lambda x: x.astype(jnp.float32), found), extra

    def accumulate(params: Any, extra: Any, batch: Any, key: jax.Array, factor: Any) -> Any:
        first = jax.tree.map(lambda x: x[0], batch)
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            return micro_step(params, extra, first, key, factor)

        def body(carry: Any, part: Any) -> Any:
            grads, found, extra = micro_step(params, carry[2], part, key, factor)
            return (*jax.tree.map(jnp.add, carry[:2], (grads, found)), extra), None

        shapes = jax.eval_shape(micro_step, params, extra, first, key, factor)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[:2])
        return jax.lax.scan(body, (*zeros, extra), batch)[0]

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])
        scaling = state.get("loss_scale")
        factor = None if scaling is None else scaling["factor"]
        grads, found, extra = accumulate(state["params"], state["extra"], batch, key, factor)
        mean = 1.0 / jnp.maximum(found["count"], 1.0)
        scale = mean if factor is None else mean / factor
        # The norm of the sums, scaled: that of scaled gradients would first write them all down.
        norm = optax.tree.norm(grads) * scale
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "extra": extra,
        }
        good = jnp.isfinite(found["loss"]) & jnp.isfinite(norm)
        overflow = loss_scale.overflowed(scaling, found["loss"], norm)
        if skip_non_finite or scaling is not None:
            old = {name: state[name] for name in new}
            taken = good if skip_non_finite else ~overflow
            new = jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)
        good |= overflow
        if skip_non_finite:
            found = jax.tree.map(lambda x: jnp.where(good, x, 0.0), found)
        found["bad_steps"] = (~good).astype(jnp.float32)
        if scaling is not None:
            new["loss_scale"] = loss_scale.update(scaling, overflow)
        window = {name: state["window"][name] + found[name] for name in state["window"]}
        new |= {"step": state["step"] + 1, "window": window}
        return new, {"loss": found["loss"] * mean, "grad_norm": norm, "bad": ~good}

    return step


def make_eval_step(objective: Any, model: Any) -> Callable[..., dict[str, jax.Array]]:
    """Build ``evaluate(params, extra, batch) -> sums``."""

    def evaluate(params: Any, extra: Any, batch: dict[str, Any]) -> dict[str, jax.Array]:
        batch = {name: leaf[0] for name, leaf in batch.items() if name != "row"}
        total, count, more = objective.loss(model, params, batch, None, False, extra=extra)
        return {"loss": total, "count": count, **more.get("totals", {})}

    return evaluate
