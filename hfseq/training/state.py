"""The training state, and the one pure step that advances it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfseq.nn import fp8, sharding, trees
from hfseq.nn.random import batch_keys

FIRST = 2.0**10  # losses are sums over thousands of targets


LARGEST = 2.0**24


PATIENCE = 1000


Scale = dict[str, jax.Array]


def initial(compute_dtype: Any) -> Scale | None:
    """Return the scale that training starts with, or None where the type needs none."""
    if compute_dtype is None or jnp.dtype(compute_dtype) != jnp.float16:
        return None
    return {"factor": jnp.float32(FIRST), "good_steps": jnp.zeros((), jnp.int32)}


def overflowed(scale: Scale | None, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Tell whether only the scale is to blame for gradients that are not finite."""
    if scale is None:
        return jnp.zeros((), bool)
    return jnp.isfinite(loss) & ~jnp.isfinite(norm) & (scale["factor"] > 1)


def update(scale: Scale, overflow: jax.Array) -> Scale:
    """Return the scale of the next step."""
    good = jnp.where(overflow, 0, scale["good_steps"] + 1)
    grown = jnp.where(good == PATIENCE, jnp.minimum(2 * scale["factor"], LARGEST), scale["factor"])
    factor = jnp.where(overflow, scale["factor"] / 2, grown)
    return {"factor": factor, "good_steps": jnp.where(good == PATIENCE, 0, good)}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Where the rows are in the carried state: ``rows`` of them, in stacks on the second axis.

    ``windows`` make a sequence; ``stacked`` are path prefixes of scanned layers.
    """

    rows: int
    windows: int
    stacked: tuple[trees.Path, ...] = ()

    def _axis(self, path: trees.Path) -> int:
        return int(any(path[: len(head)] == head for head in self.stacked))

    def _map(self, change: Any, *given: Any) -> Any:
        flat = [trees.flatten(tree) for tree in given]
        return trees.unflatten(
            {path: change(self._axis(path), *(tree[path] for tree in flat)) for path in flat[0]}
        )

    def shardings(self, tree: Any, mesh: Mesh) -> Any:
        """Lay the rows over the axes of the batch."""

        def place(axis: int, leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(None,) * axis, sharding.BATCH))

        return self._map(place, tree)

    def cut(self, tree: Any, micro: int) -> Any:
        """Cut the rows as a batch is cut, micro-batches on a new first axis."""

        def one(axis: int, leaf: jax.Array) -> jax.Array:
            shape = (*leaf.shape[:axis], micro, self.rows // micro, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(leaf.reshape(shape), axis, 0)

        return self._map(one, tree)

    def join(self, tree: Any, like: Any) -> Any:
        """Undo :meth:`cut`; the types are those of ``like``."""

        def one(axis: int, leaf: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.moveaxis(leaf, 0, axis).reshape(old.shape).astype(old.dtype)

        return self._map(one, tree, like)

    def reset(self, tree: Any, rows: jax.Array, fresh: Any) -> Any:
        """Put the state ``fresh`` in the place of the rows that ``rows`` (bool) names."""

        def one(axis: int, leaf: jax.Array, new: jax.Array) -> jax.Array:
            shape = (1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1)
            return jnp.where(rows.reshape(shape), new.astype(leaf.dtype), leaf)

        return self._map(one, tree, fresh)


State = dict[str, Any]


def make_state(
    params: Any,
    optimizer: optax.GradientTransformation,
    extra: Any,
    sums: dict[str, Any],
    compute_dtype: Any = None,
    memory: Any = None,
) -> State:
    """Return the state of step 0: parameters, optimizer state, collections, and the log window.

    ``window`` sums what was not logged yet, so that a resumed run logs the very same numbers.
    Computing in float16 adds ``loss_scale``; training in windows adds ``memory``, what the model
    knows of the windows before.
    """
    scale = initial(compute_dtype)
    return {
        "params": params,
        "opt_state": optimizer.init(params),
        "extra": extra,
        "step": jnp.zeros((), jnp.int32),
        "window": sums,
        **({} if scale is None else {"loss_scale": scale}),
        **({} if memory is None else {"memory": memory}),
    }


def state_shardings(
    abstract: State,
    params: dict[trees.Path, NamedSharding],
    mesh: Mesh,
    memory: Memory | None = None,
) -> Any:
    """Lay out the state: optimizer moments like their parameters, everything small replicated.

    The memory of earlier windows lies with its rows.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(abstract["params"]).items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    apart = ("params", "opt_state", "memory")
    small = jax.tree.map(
        lambda _: replicated, {name: part for name, part in abstract.items() if name not in apart}
    )
    if memory is not None:
        small["memory"] = memory.shardings(abstract["memory"], mesh)
    return {
        "params": trees.unflatten(params),
        "opt_state": sharding.like_params(abstract["opt_state"], params, shapes, mesh),
        **small,
    }


def zero_window(names: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return empty sums for the log window."""
    return {name: jnp.zeros((), jnp.float32) for name in (*names, "bad_steps")}


def make_step(
    objective: Any,
    model: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    skip_non_finite: bool,
    memory: Memory | None = None,
    calibrate: bool = False,
) -> Callable[[State, Any], tuple[State, dict[str, jax.Array]]]:
    """Build ``step(state, batch)``; every leaf of the batch has a leading axis of micro-batches.

    Losses and gradients are summed over micro-batches and devices and divided once by the number of
    targets, so accumulation is exact. Dropout keys belong to (seed, step, row): neither the cut
    into micro-batches nor the number of devices changes a mask. The collections gather what every
    micro-batch adds and are settled once, when all have; a step that is skipped leaves them as they
    were. With ``memory`` a batch is a window of its rows, and what the model knows of the windows
    before is carried from step to step; rows that begin with a skipped step still begin afresh.

    Collections that the backward pass overwrites (FP8 scales and histories) are the same for all
    micro-batches of a step; of what these leave the maximum counts. With ``calibrate`` the step
    trains nothing and moves nothing else but these, which it sets from the batch itself.
    """
    overwritten = model.overwritten_extra

    def sums(params: Any, scales: Any, extra: Any, batch: Any, keys: Any, factor: Any) -> Any:
        extra = extra | fp8.for_gradient(scales)
        total, count, more = objective.loss(model, params, batch, keys, True, extra=extra)
        scaled = total if factor is None else total * factor
        found = {"loss": total, "count": count, "divisor": more.get("divisor", count)}
        found |= more.get("totals", {})
        after = {k: v for k, v in more.get("extra", extra).items() if k not in overwritten}
        return scaled, (found, after, more.get("memory"))

    def micro_step(
        params: Any, scales: Any, extra: Any, batch: dict[str, Any], keys: Any, factor: Any
    ) -> Any:
        batch = dict(batch)
        drawn = batch_keys(keys[0], batch.pop("row"), keys[1])
        (grads, scales), (found, extra, left) = jax.grad(sums, argnums=(0, 1), has_aux=True)(
            params, scales, extra, batch, drawn, factor
        )
        found = jax.tree.map(lambda x: x.astype(jnp.float32), found)
        return grads, found, fp8.from_gradient(scales), extra, left

    def accumulate(params: Any, extra: Any, batch: Any, keys: Any, factor: Any) -> Any:
        scales, extra = (
            {name: tree for name, tree in extra.items() if (name in overwritten) == moved}
            for moved in (True, False)
        )
        first = jax.tree.map(lambda x: x[0], batch)
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            grads, found, after, extra, left = micro_step(
                params, scales, extra, first, keys, factor
            )
            left = jax.tree.map(lambda x: x[None], left)
            return grads, found, extra | fp8.overwrite(scales, after), left

        def body(carry: Any, part: Any) -> Any:
            *sums, after, extra, left = micro_step(params, scales, carry[3], part, keys, factor)
            added = jax.tree.map(jnp.add, carry[:2], tuple(sums))
            return (*added, jax.tree.map(jnp.maximum, carry[2], after), extra), left

        shapes = jax.eval_shape(micro_step, params, scales, extra, first, keys, factor)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[:3])
        (grads, found, after, extra), left = jax.lax.scan(body, (*zeros, extra), batch)
        return grads, found, extra | fp8.overwrite(scales, after), left

    def keys_of(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = step if memory is None else step - step % memory.windows
        root = jax.random.key(seed)
        return jax.random.fold_in(root, step), jax.random.fold_in(root, start)

    def memory_before(state: State, batch: Any) -> Any:
        assert memory is not None
        fresh = model.init_cache(memory.rows, 0)
        return memory.reset(state["memory"], batch["reset_rows"].reshape(-1), fresh)

    def step(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        scaling = state.get("loss_scale")
        factor = None if scaling is None else scaling["factor"]
        if memory is not None:
            batch = batch | {"memory": memory.cut(state["memory"], batch["row"].shape[0])}
        grads, found, extra, left = accumulate(
            state["params"], state["extra"], batch, keys_of(state["step"]), factor
        )
        if calibrate:
            seen = {name: extra[name] for name in overwritten}
            return state | {"extra": state["extra"] | seen}, {}
        mean = 1.0 / jnp.maximum(found["divisor"], 1.0)
        scale = mean if factor is None else mean / factor
        # The norm of the sums, scaled: that of scaled gradients would first write them all down.
        norm = optax.tree.norm(grads) * scale
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "extra": model.settle_extra(extra),
        }
        good = jnp.isfinite(found["loss"]) & jnp.isfinite(norm)
        overflow = overflowed(scaling, found["loss"], norm)
        if skip_non_finite or scaling is not None:
            new = _where(good if skip_non_finite else ~overflow, new, state)
        if memory is not None:
            new["memory"] = memory.join(left, state["memory"])
            if skip_non_finite:
                kept = {"memory": memory_before(state, batch)}
                known = {"memory": new["memory"]}
                new |= _where(jnp.isfinite(found["loss"]), known, kept)
        good |= overflow
        if skip_non_finite:
            found = jax.tree.map(lambda x: jnp.where(good, x, 0.0), found)
        found["bad_steps"] = (~good).astype(jnp.float32)
        if scaling is not None:
            new["loss_scale"] = update(scaling, overflow)
        window = {name: state["window"][name] + found[name] for name in state["window"]}
        new |= {"step": state["step"] + 1, "window": window}
        loss = found["loss"] / jnp.maximum(found["count"], 1.0)
        return new, {"loss": loss, "grad_norm": norm, "bad": ~good}

    if not calibrate:
        return step

    def calibration(state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        with fp8.calibrating():
            return step(state, batch)

    return calibration


def _where(taken: jax.Array, new: State, old: State) -> State:
    """Choose the parts of ``new``, or those of ``old`` with the same names."""
    return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, {name: old[name] for name in new})


def make_eval_step(objective: Any, model: Any) -> Callable[..., dict[str, jax.Array]]:
    """Build ``evaluate(params, extra, batch) -> sums``."""

    def evaluate(params: Any, extra: Any, batch: dict[str, Any]) -> dict[str, jax.Array]:
        batch = {name: leaf[0] for name, leaf in batch.items() if name != "row"}
        total, count, more = objective.loss(model, params, batch, None, False, extra=extra)
        return {"loss": total, "count": count, **more.get("totals", {})}

    return evaluate
