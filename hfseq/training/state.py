"""The training state, and the one pure step that advances it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from hfseq import nn
from hfseq.nn import fp8, sharding, trees
from hfseq.nn.random import batch_keys

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.objectives.base import Objective

#: Parameters and what has their form: nested dicts with string keys.
Tree: TypeAlias = "Mapping[str, jax.Array | Tree]"
Batch: TypeAlias = Mapping[str, jax.Array]
LossScale: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step advances: a pytree, and in a checkpoint a dict without the parts that are None.

    ``extra`` holds the collections beside the parameters. ``window`` sums what was not logged yet,
    so that a resumed run logs the very same numbers. Computing in float16 needs ``loss_scale``;
    training in windows needs ``memory``, what the model knows of the windows before.
    """

    params: Tree
    opt_state: optax.OptState
    extra: Tree
    step: jax.Array
    window: dict[str, jax.Array]
    loss_scale: LossScale | None = None
    memory: Tree | None = None

    def to_dict(self) -> dict[str, Tree | optax.OptState]:
        """Return the parts that are there by name, as checkpoints hold them."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: part for name, part in parts.items() if part is not None}


# Leaves in the order of the dict on disk.
jax.tree_util.register_dataclass(
    TrainState, sorted(field.name for field in dataclasses.fields(TrainState)), []
)


#: ``step(state, frozen, batch) -> (state, measured)``; ``frozen`` are parameters that it only uses.
Step: TypeAlias = Callable[[TrainState, Tree, Batch], tuple[TrainState, dict[str, jax.Array]]]


# -- the loss scale of float16: losses are sums over thousands of targets

INITIAL_SCALE = 2.0**10
MAX_SCALE = 2.0**24
GROWTH_INTERVAL = 1000  # steps without an overflow


def initial_loss_scale(compute_dtype: DTypeLike | None) -> LossScale | None:
    """Return the scale that training starts with, or None where the type needs none."""
    if compute_dtype is None or jnp.dtype(compute_dtype) != jnp.float16:
        return None
    return {"factor": jnp.float32(INITIAL_SCALE), "good_steps": jnp.zeros((), jnp.int32)}


def overflowed(scale: LossScale | None, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Tell whether only the scale is to blame for gradients that are not finite."""
    if scale is None:
        return jnp.zeros((), bool)
    return jnp.isfinite(loss) & ~jnp.isfinite(norm) & (scale["factor"] > 1)


def update_loss_scale(scale: LossScale, overflow: jax.Array) -> LossScale:
    """Return the scale of the next step."""
    good = jnp.where(overflow, 0, scale["good_steps"] + 1)
    full = good == GROWTH_INTERVAL
    grown = jnp.where(full, jnp.minimum(2 * scale["factor"], MAX_SCALE), scale["factor"])
    factor = jnp.where(overflow, scale["factor"] / 2, grown)
    return {"factor": factor, "good_steps": jnp.where(full, 0, good)}


# -- what is carried from window to window


@dataclasses.dataclass(frozen=True)
class Carry:
    """Where the rows are in the carried memory: ``rows`` of them, in stacks on the second axis.

    ``windows`` make a sequence; ``stacked`` are path prefixes of scanned layers.
    """

    rows: int
    windows: int
    stacked: tuple[trees.Path, ...] = ()

    def _map(self, change: Callable, *trees_: Tree) -> dict:
        """Call ``change(axis of the rows, *leaves)`` for every path."""
        flat = [trees.flatten(tree) for tree in trees_]

        def changed(path: trees.Path) -> Any:
            axis = int(any(path[: len(head)] == head for head in self.stacked))
            return change(axis, *(tree[path] for tree in flat))

        return trees.unflatten({path: changed(path) for path in flat[0]})

    def shardings(self, tree: Tree, mesh: Mesh) -> dict:
        """Lay the rows over the axes of the batch."""

        def one(axis: int, _: jax.Array) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(None,) * axis, sharding.BATCH_AXES))

        return self._map(one, tree)

    def cut(self, tree: Tree, micro: int) -> dict:
        """Cut the rows as a batch is cut, micro-batches on a new first axis."""

        def one(axis: int, leaf: jax.Array) -> jax.Array:
            shape = (*leaf.shape[:axis], micro, self.rows // micro, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(leaf.reshape(shape), axis, 0)

        return self._map(one, tree)

    def join(self, tree: Tree, like: Tree) -> dict:
        """Undo :meth:`cut`; the types are those of ``like``."""

        def one(axis: int, leaf: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.moveaxis(leaf, 0, axis).reshape(old.shape).astype(old.dtype)

        return self._map(one, tree, like)

    def reset(self, tree: Tree, rows: jax.Array, fresh: Tree) -> dict:
        """Put ``fresh`` in the place of the rows that ``rows`` (bool) names."""

        def one(axis: int, leaf: jax.Array, new: jax.Array) -> jax.Array:
            shape = (1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1)
            return jnp.where(rows.reshape(shape), new.astype(leaf.dtype), leaf)

        return self._map(one, tree, fresh)


# -- the state


def make_state(
    params: Tree,
    optimizer: optax.GradientTransformation,
    extra: Tree,
    sums: tuple[str, ...],
    compute_dtype: DTypeLike | None = None,
    memory: Tree | None = None,
) -> TrainState:
    """Return the state of step 0; ``sums`` are the names of what the log window adds up."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        extra=extra,
        step=jnp.zeros((), jnp.int32),
        window={name: jnp.zeros((), jnp.float32) for name in (*sums, "bad_steps")},
        loss_scale=initial_loss_scale(compute_dtype),
        memory=memory,
    )


def state_shardings(
    abstract: TrainState,
    params: dict[trees.Path, NamedSharding],
    mesh: Mesh,
    carry: Carry | None = None,
) -> TrainState:
    """Lay out the state: optimizer moments like their parameters, everything small replicated.

    The memory of earlier windows lies with its rows.
    """
    shapes = {path: leaf.shape for path, leaf in trees.flatten(abstract.params).items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    everywhere: TrainState = jax.tree.map(lambda _: replicated, abstract)
    return dataclasses.replace(
        everywhere,
        params=trees.unflatten(params),
        opt_state=sharding.optimizer_shardings(abstract.opt_state, params, shapes, mesh),
        memory=carry.shardings(abstract.memory or {}, mesh) if carry else None,
    )


def to_host(params: Tree, layout: sharding.Layout) -> dict:
    """Gather parameters to the host without padding rows, ready to be saved."""

    def gathered(leaf: jax.Array) -> np.ndarray:
        if not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    flat = {path: jax.tree.map(gathered, leaf) for path, leaf in trees.flatten(params).items()}
    cut = {path: layout.cut(path, leaf) for path, leaf in flat.items()}
    return jax.tree.map(np.asarray, trees.unflatten(cut))


# -- the step


def join_frozen(params: Tree, frozen: Tree) -> Tree:
    """Return all parameters of a model of which some are ``frozen``."""
    if not frozen:
        return params
    return trees.unflatten(trees.flatten(frozen) | trees.flatten(params))


def make_step(
    objective: Objective,
    model: FlaxPreTrainedModel,
    optimizer: optax.GradientTransformation,
    seed: int,
    skip_non_finite: bool,
    carry: Carry | None = None,
    calibrate: bool = False,
) -> Step:
    """Build ``step(state, frozen, batch)``; leaves of a batch have micro-batches on the first axis.

    Losses and gradients are summed over micro-batches and devices and divided once by the number of
    targets, so accumulation is exact. Dropout keys belong to (seed, step, row): neither the cut
    into micro-batches nor the number of devices changes a mask. The collections gather what every
    micro-batch adds and are settled once, when all have; a step that is skipped leaves them as they
    were. With ``carry`` a batch is a window of its rows, and what the model knows of the windows
    before goes from step to step; rows that begin with a skipped step still begin afresh.

    Collections that the backward pass overwrites (FP8 scales and histories) are the same for all
    micro-batches of a step; of what these leave the maximum counts. With ``calibrate`` the step
    trains nothing and moves nothing else but these, which it sets from the batch itself.
    """
    overwritten = model.overwrite_with_gradient

    def gradients(state: TrainState, frozen: Tree, batch: Batch, factor: jax.Array | None) -> tuple:
        """Return gradients, sums, collections and memory of all micro-batches."""
        start = state.step if carry is None else state.step - state.step % carry.windows
        root = jax.random.key(seed)
        keys = jax.random.fold_in(root, state.step), jax.random.fold_in(root, start)
        scales, extra = (
            {name: tree for name, tree in state.extra.items() if (name in overwritten) == moved}
            for moved in (True, False)
        )

        def loss_sum(params: Tree, scales: Tree, extra: dict, part: dict, drawn: Any) -> tuple:
            extra = {**extra, **fp8.for_gradient(scales)}
            whole = join_frozen(params, frozen)
            with nn.row_guarantees(objective.row_layout):
                total, count, more = objective.loss(model, whole, part, drawn, True, extra=extra)
            sums = {"loss": total, "count": count, "divisor": more.get("divisor", count)}
            sums |= more.get("totals", {})
            after = {k: v for k, v in more.get("extra", extra).items() if k not in overwritten}
            scaled = total if factor is None else total * factor
            return scaled, (sums, after, more.get("memory"))

        def micro_step(extra: dict, batch: Batch) -> tuple:
            part = dict(batch)
            drawn = batch_keys(keys[0], part.pop("row"), keys[1])
            gradient = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)
            (grads, after), (sums, extra, memory) = gradient(
                state.params, scales, extra, part, drawn
            )
            sums = jax.tree.map(lambda x: x.astype(jnp.float32), sums)
            return (grads, sums, fp8.from_gradient(after)), extra, memory

        def body(carried: tuple, part: Batch) -> tuple:
            (*totals, most), extra = carried
            (*sums, after), extra, memory = micro_step(extra, part)
            added = jax.tree.map(jnp.add, totals, sums)
            return ((*added, jax.tree.map(jnp.maximum, most, after)), extra), memory

        first = jax.tree.map(lambda x: x[0], batch)
        if jax.tree.leaves(batch)[0].shape[0] == 1:
            (grads, sums, after), extra, memory = micro_step(extra, first)
            memory = jax.tree.map(lambda x: x[None], memory)
        else:
            shapes = jax.eval_shape(micro_step, extra, first)[0]
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            ((grads, sums, after), extra), memory = jax.lax.scan(body, (zeros, extra), batch)
        return grads, sums, extra | fp8.overwrite(scales, after), memory

    def step(
        state: TrainState, frozen: Tree, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        scaling = state.loss_scale
        factor = None if scaling is None else scaling["factor"]
        whole: dict[str, Any] = dict(batch)
        if carry is not None:
            whole["memory"] = carry.cut(state.memory or {}, batch["row"].shape[0])
        with fp8.calibrating() if calibrate else contextlib.nullcontext():
            grads, sums, extra, memory = gradients(state, frozen, whole, factor)
        if calibrate:
            seen = {name: extra[name] for name in overwritten}
            return dataclasses.replace(state, extra={**state.extra, **seen}), {}
        mean = 1.0 / jnp.maximum(sums["divisor"], 1.0)
        scale = mean if factor is None else mean / factor
        # The norm of the sums, scaled: that of scaled gradients would first write them all down.
        norm = optax.tree.norm(grads) * scale
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = {
            "params": optax.apply_updates(state.params, updates),
            "opt_state": opt_state,
            "extra": model.finalize_extra(extra),
        }
        good = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        overflow = overflowed(scaling, sums["loss"], norm)
        if skip_non_finite or scaling is not None:
            old = {name: getattr(state, name) for name in new}
            new = _where(good if skip_non_finite else ~overflow, new, old)
        if carry is not None:
            new["memory"] = carry.join(memory, state.memory or {})
            if skip_non_finite:
                fresh = model.init_cache(carry.rows, 0)
                kept = carry.reset(state.memory or {}, batch["reset_rows"].reshape(-1), fresh)
                new["memory"] = _where(jnp.isfinite(sums["loss"]), new["memory"], kept)
        good |= overflow
        if skip_non_finite:
            sums = jax.tree.map(lambda x: jnp.where(good, x, 0.0), sums)
        sums["bad_steps"] = (~good).astype(jnp.float32)
        if scaling is not None:
            new["loss_scale"] = update_loss_scale(scaling, overflow)
        window = {name: state.window[name] + sums[name] for name in state.window}
        loss = sums["loss"] / jnp.maximum(sums["count"], 1.0)
        state = dataclasses.replace(state, **new, step=state.step + 1, window=window)
        return state, {"loss": loss, "grad_norm": norm, "bad": ~good}

    return step


def _where(taken: jax.Array, new: dict, old: dict) -> dict:
    return jax.tree.map(lambda a, b: jnp.where(taken, a, b), new, old)


def make_eval_step(
    objective: Objective, model: FlaxPreTrainedModel
) -> Callable[[Tree, Tree, Tree, Batch], dict[str, jax.Array]]:
    """Build ``evaluate(params, frozen, extra, batch) -> sums``."""

    def evaluate(params: Tree, frozen: Tree, extra: Tree, batch: Batch) -> dict[str, jax.Array]:
        batch = {name: leaf[0] for name, leaf in batch.items() if name != "row"}
        whole = join_frozen(params, frozen)
        with nn.row_guarantees(objective.row_layout):
            total, count, more = objective.loss(model, whole, batch, None, False, extra=extra)
        return {"loss": total, "count": count, **more.get("totals", {})}

    return evaluate
