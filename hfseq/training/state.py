"""The training state, and the pure function that performs a training step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from hfseq import nn
from hfseq.nn import fp8, sharding, trees
from hfseq.nn.random import batch_keys

if TYPE_CHECKING:
    from hfseq.modeling import FlaxPreTrainedModel
    from hfseq.objectives.base import Objective

#: Parameters, or a tree of the same structure: nested dicts with string keys.
Tree: TypeAlias = "Mapping[str, jax.Array | Tree]"
Batch: TypeAlias = Mapping[str, jax.Array]
LossScale: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state. It is a pytree.

    Checkpoints store the state as a dict without the entries that are `None`.

    Attributes:
        params: The trained parameters.
        opt_state: The state of the optimizer.
        extra: The model's non-parameter collections, such as batch statistics.
        step: The number of completed steps.
        window: The sums of losses and metrics since the last log. They are part of the state, so
            that a resumed run logs the same numbers.
        loss_scale: The loss scale, or `None` if the computation dtype is not float16.
        memory: The model's memory of earlier windows, or `None` if rows are not split into windows
            (`--update_length`).
    """

    params: Tree
    opt_state: optax.OptState
    extra: Tree
    step: jax.Array
    window: dict[str, jax.Array]
    loss_scale: LossScale | None = None
    memory: Tree | None = None

    @property
    def inference_params(self) -> Tree:
        """The parameters to evaluate and to save.

        With schedule-free optimizers, these are an average of the parameters of all steps.
        """
        kind = optax.contrib.ScheduleFreeState
        leaves = jax.tree.leaves(self.opt_state, is_leaf=lambda leaf: isinstance(leaf, kind))
        for leaf in leaves:
            if isinstance(leaf, kind):
                averaged: Tree = optax.contrib.schedule_free_eval_params(leaf, self.params)
                return averaged
        return self.params

    def to_dict(self) -> dict[str, Tree | optax.OptState]:
        """Returns the entries that are not `None` by name, as stored in checkpoints."""
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: part for name, part in parts.items() if part is not None}


# The fields are sorted by name, because jax sorts the keys of the dictionaries in checkpoints. The
# leaves therefore have the same order in both.
jax.tree_util.register_dataclass(
    TrainState, sorted(field.name for field in dataclasses.fields(TrainState)), []
)


#: The type of the training step, ``step(state, frozen, batch) -> (state, step_metrics)``.
#: ``frozen`` contains the parameters that are not trained.
Step: TypeAlias = Callable[[TrainState, Tree, Batch], tuple[TrainState, dict[str, jax.Array]]]


# -- the loss scale of float16. The initial scale is small, because it multiplies a loss that is a
# sum over thousands of targets.

INITIAL_SCALE = 2.0**10
MAX_SCALE = 2.0**24
GROWTH_INTERVAL = 1000  # steps without an overflow


def initial_loss_scale(compute_dtype: DTypeLike | None) -> LossScale | None:
    """Returns the initial loss scale, or `None` if the dtype does not require a loss scale."""
    if compute_dtype is None or jnp.dtype(compute_dtype) != jnp.float16:
        return None
    return {"factor": jnp.float32(INITIAL_SCALE), "good_steps": jnp.zeros((), jnp.int32)}


def overflowed(scale: LossScale | None, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns whether only the loss scale is to blame for gradients that are not finite.

    This is assumed if the loss is finite and the scale can still be reduced.

    Args:
        scale: The loss scale, or `None`.
        loss: The loss without the scale.
        norm: The norm of the gradients.
    """
    if scale is None:
        return jnp.zeros((), bool)
    return jnp.isfinite(loss) & ~jnp.isfinite(norm) & (scale["factor"] > 1)


def update_loss_scale(scale: LossScale, overflow: jax.Array) -> LossScale:
    """Returns the loss scale for the next step.

    An overflow halves the scale. `GROWTH_INTERVAL` steps without an overflow double it.
    """
    good = jnp.where(overflow, 0, scale["good_steps"] + 1)
    full = good == GROWTH_INTERVAL
    grown = jnp.where(full, jnp.minimum(2 * scale["factor"], MAX_SCALE), scale["factor"])
    factor = jnp.where(overflow, scale["factor"] / 2, grown)
    return {"factor": factor, "good_steps": jnp.where(full, 0, good)}


# -- the memory that is carried from window to window


@dataclasses.dataclass(frozen=True)
class Carry:
    """The layout of the memory that is carried between windows.

    The memory is a tree of arrays, which have an axis with one entry per row of the batch. It is
    the first axis, or the second axis in arrays of scanned layers, which are stacked over the
    layers.

    Attributes:
        rows: The number of rows of the batch.
        windows: The number of windows per row.
        stacked: Path prefixes of scanned layers.
    """

    rows: int
    windows: int
    stacked: tuple[trees.Path, ...] = ()

    def _map(self, change: Callable, *trees_: Tree) -> dict:
        """Applies `change(row_axis, *leaves)` to the leaves at each path of the trees."""
        flat = [trees.flatten(tree) for tree in trees_]

        def changed(path: trees.Path) -> Any:
            axis = int(any(path[: len(head)] == head for head in self.stacked))
            return change(axis, *(tree[path] for tree in flat))

        return trees.unflatten({path: changed(path) for path in flat[0]})

    def shardings(self, tree: Tree, mesh: Mesh) -> dict:
        """Returns shardings that split the memory over devices like the rows of a batch."""

        def one(axis: int, _: jax.Array) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(None,) * axis, sharding.batch_axes(mesh)))

        return self._map(one, tree)

    def cut(self, tree: Tree, micro: int) -> dict:
        """Splits the rows into `micro` micro-batches, which are on a new first axis."""

        def one(axis: int, leaf: jax.Array) -> jax.Array:
            shape = (*leaf.shape[:axis], micro, self.rows // micro, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(leaf.reshape(shape), axis, 0)

        return self._map(one, tree)

    def join(self, tree: Tree, like: Tree) -> dict:
        """Reverses `cut`. The result has the shapes and dtypes of `like`."""

        def one(axis: int, leaf: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.moveaxis(leaf, 0, axis).reshape(old.shape).astype(old.dtype)

        return self._map(one, tree, like)

    def reset(self, tree: Tree, rows: jax.Array, fresh: Tree) -> dict:
        """Replaces the rows of `tree` for which `rows` is true by the rows of `fresh`."""

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
    """Returns the state before the first step.

    Args:
        params: The trained parameters.
        optimizer: The optimizer.
        extra: The model's non-parameter collections.
        sums: The names of the sums in `TrainState.window`.
        compute_dtype: The computation dtype. float16 requires a loss scale.
        memory: The initial memory, if rows are split into windows.
    """
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
    """Returns the shardings of the state.

    Optimizer moments are sharded like their parameters. The memory of earlier windows is sharded
    like the rows of a batch. All other arrays are replicated.

    Args:
        abstract: The shapes of the state.
        params: The shardings of the parameters by path.
        mesh: The device mesh.
        carry: The layout of the carried memory, if any.
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


# -- the step


#: The key of the parameters of auxiliary models in the tree of frozen parameters.
AUXILIARY = "auxiliary"


def join_frozen(params: Tree, frozen: Tree) -> Tree:
    """Combines the trained and the frozen parameters of a model in one tree.

    The parameters of auxiliary models are not included.
    """
    own = {name: part for name, part in frozen.items() if name != AUXILIARY}
    if not own:
        return params
    return trees.unflatten(trees.flatten(own) | trees.flatten(params))


def with_auxiliary(batch: Batch, frozen: Tree) -> dict[str, Any]:
    """Adds the parameters of auxiliary models to a batch, if there are any."""
    return {**batch, AUXILIARY: frozen[AUXILIARY]} if AUXILIARY in frozen else dict(batch)


def make_step(
    objective: Objective,
    model: FlaxPreTrainedModel,
    optimizer: optax.GradientTransformation,
    seed: int,
    skip_non_finite: bool,
    carry: Carry | None = None,
    calibrate: bool = False,
) -> Step:
    """Builds the training step `step(state, frozen, batch) -> (state, step_metrics)`.

    Losses and gradients are summed over micro-batches and devices, and divided once by the number
    of targets. The result of gradient accumulation is therefore exact. The PRNG keys for dropout
    depend on the seed, the step and the row. Dropout masks therefore do not depend on the number of
    micro-batches or devices.

    The model's non-parameter collections are passed from micro-batch to micro-batch and finalized
    once per step. A skipped step does not change them. FP8 scales and histories are not passed from
    micro-batch to micro-batch, because the backward pass computes their new values. All
    micro-batches of a step use the old values, and the maximum of the new values is kept.

    Args:
        objective: Computes the loss.
        model: The model.
        optimizer: The optimizer.
        seed: Random seed for dropout.
        skip_non_finite: Whether a step with a NaN or infinite loss or gradient is skipped.
        carry: The layout of the memory that is carried between windows, or `None` if rows are not
            split into windows. With windows, a batch contains one window of each row. The memory of
            a row is reset at its first window, even if this step is skipped.
        calibrate: Whether the step only sets the FP8 scales from the batch, without training.

    Returns:
        The step function. The arrays of `batch` have the micro-batches on their first axis. The
        array "row" contains the position of each row in the batch. The optional array "tokens"
        contains the number of tokens of each row.
    """

    def step(
        state: TrainState, frozen: Tree, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        scaling = state.loss_scale
        factor = None if scaling is None else scaling["factor"]
        inputs: dict[str, Any] = dict(batch)
        tokens = inputs.pop("tokens", jnp.zeros((), jnp.int32)).sum()
        if carry is not None:
            inputs["memory"] = carry.cut(state.memory or {}, batch["row"].shape[0])
        first_step = state.step if carry is None else state.step - state.step % carry.windows
        root = jax.random.key(seed)
        keys = jax.random.fold_in(root, state.step), jax.random.fold_in(root, first_step)
        with fp8.calibrating() if calibrate else contextlib.nullcontext():
            grads, sums, extra, memory = _gradients(
                objective, model, keys, state, frozen, inputs, factor
            )
        if calibrate:
            scales = {name: extra[name] for name in model.overwrite_with_gradient}
            return dataclasses.replace(state, extra={**state.extra, **scales}), {}
        grads, norm = _mean_gradients(grads, state.params, sums["divisor"], factor)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = {
            "params": optax.apply_updates(state.params, updates),
            "opt_state": opt_state,
            "extra": model.finalize_extra(extra),
        }
        is_finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        overflow = overflowed(scaling, sums["loss"], norm)
        if skip_non_finite or scaling is not None:
            old = {name: getattr(state, name) for name in new}
            new = _where(is_finite if skip_non_finite else ~overflow, new, old)
        if carry is not None:
            new["memory"] = carry.join(memory, state.memory or {})
            if skip_non_finite:
                fresh = model.init_cache(carry.rows, 0)
                reset_rows = batch["reset_rows"].reshape(-1)
                old_memory = carry.reset(state.memory or {}, reset_rows, fresh)
                new["memory"] = _where(jnp.isfinite(sums["loss"]), new["memory"], old_memory)
        # An overflow because of the loss scale is expected and does not count as a bad step.
        is_good = is_finite | overflow
        if skip_non_finite:
            sums = jax.tree.map(lambda x: jnp.where(is_good, x, 0.0), sums)
        sums["bad_steps"] = (~is_good).astype(jnp.float32)
        if scaling is not None:
            new["loss_scale"] = update_loss_scale(scaling, overflow)
        window = {name: state.window[name] + sums[name] for name in state.window}
        loss = sums["loss"] / jnp.maximum(sums["count"], 1.0)
        state = dataclasses.replace(state, **new, step=state.step + 1, window=window)
        return state, {"loss": loss, "grad_norm": norm, "bad": ~is_good, "tokens": tokens}

    return step


def _gradients(
    objective: Objective,
    model: FlaxPreTrainedModel,
    keys: tuple[jax.Array, jax.Array],
    state: TrainState,
    frozen: Tree,
    batch: Mapping[str, Any],
    factor: jax.Array | None,
) -> tuple[Tree, dict[str, jax.Array], dict[str, Any], Tree]:
    """Returns gradients, sums, collections and memory of all micro-batches.

    Args:
        objective: Computes the loss.
        model: The model.
        keys: Two PRNG keys for dropout. The first changes in every step. The second is the same for
            all windows of a row.
        state: The state before the step.
        frozen: Parameters that are not trained.
        batch: The arrays and the carried memory, with the micro-batches on the first axis.
        factor: The loss scale, if any.
    """
    overwritten = model.overwrite_with_gradient
    step_key, sequence_key = keys
    scales = {name: tree for name, tree in state.extra.items() if name in overwritten}
    extra = {name: tree for name, tree in state.extra.items() if name not in overwritten}

    step_totals: dict[str, Any] = {}
    if objective.uses_step_totals:
        all_params = join_frozen(state.params, frozen)

        def totals_of(micro_batch: Mapping[str, Any]) -> dict[str, jax.Array]:
            with nn.row_guarantees(objective.row_guarantees):
                return objective.step_totals(
                    model, all_params, with_auxiliary(micro_batch, frozen), state.extra
                )

        step_totals = {"step_totals": _sum_totals(totals_of, batch)}

    def loss_sum(params: Tree, scales: Tree, extra: dict, micro_batch: dict, keys: Any) -> tuple:
        extra = {**extra, **fp8.for_gradient(scales)}
        all_params = join_frozen(params, frozen)
        micro_batch = with_auxiliary(micro_batch, frozen) | step_totals
        with nn.row_guarantees(objective.row_guarantees):
            total, count, outputs = objective.loss(
                model, all_params, micro_batch, keys, True, extra=extra
            )
        sums = {"loss": total, "count": count, "divisor": outputs.get("divisor", count)}
        sums |= outputs.get("totals", {})
        new_extra = outputs.get("extra", extra)
        new_extra = {name: tree for name, tree in new_extra.items() if name not in overwritten}
        scaled = total if factor is None else total * factor
        return scaled, (sums, new_extra, outputs.get("memory"))

    def micro_step(extra: dict, batch: Mapping[str, Any]) -> tuple:
        micro_batch = dict(batch)
        row_keys = batch_keys(step_key, micro_batch.pop("row"), sequence_key)
        gradient = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)
        # Gradients have the dtype of the parameters, which are converted to float32, because
        # gradients are summed over rows and micro-batches.
        params = trees.cast_floating(state.params, jnp.float32)
        (grads, scale_grads), (sums, extra, memory) = gradient(
            params, scales, extra, micro_batch, row_keys
        )
        sums = jax.tree.map(lambda x: x.astype(jnp.float32), sums)
        return (grads, sums, fp8.from_gradient(scale_grads)), extra, memory

    (grads, sums, new_scales), extra, memory = _accumulate(micro_step, extra, batch)
    return grads, sums, extra | fp8.overwrite(scales, new_scales), memory


def _sum_totals(
    totals_of: Callable[[Mapping[str, Any]], dict[str, jax.Array]], batch: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Sums the results of `totals_of` over all micro-batches. No gradient passes through them."""
    arrays = {name: leaf for name, leaf in batch.items() if name != "row"}
    parts = jax.lax.map(totals_of, arrays)
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x.astype(jnp.float32).sum(0)), parts)


def _accumulate(
    micro_step: Callable[[dict, Mapping[str, Any]], tuple], extra: dict, batch: Mapping[str, Any]
) -> tuple:
    """Runs `micro_step` on all micro-batches.

    Args:
        micro_step: Accepts collections and a micro-batch. Returns `(grads, sums, scales)`, the new
            collections, and the memory.
        extra: The collections before the first micro-batch.
        batch: The arrays, with the micro-batches on the first axis.

    Returns:
        A tuple with three entries:

        - `(grads, sums, scales)`. The first two are summed over the micro-batches. The scales are
          the maximum over the micro-batches.
        - The collections after the last micro-batch.
        - The memory, with the micro-batches on the first axis.
    """
    first = jax.tree.map(lambda x: x[0], batch)
    if jax.tree.leaves(batch)[0].shape[0] == 1:
        results, extra, memory = micro_step(extra, first)
        return results, extra, jax.tree.map(lambda x: x[None], memory)

    def body(carried: tuple, micro_batch: Mapping[str, Any]) -> tuple:
        (grads, sums, scales), extra = carried
        (micro_grads, micro_sums, micro_scales), extra, memory = micro_step(extra, micro_batch)
        grads = jax.tree.map(jnp.add, grads, micro_grads)
        sums = jax.tree.map(jnp.add, sums, micro_sums)
        scales = jax.tree.map(jnp.maximum, scales, micro_scales)
        return ((grads, sums, scales), extra), memory

    shapes = jax.eval_shape(micro_step, extra, first)[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (results, extra), memory = jax.lax.scan(body, (zeros, extra), batch)
    return results, extra, memory


def _mean_gradients(
    grads: Tree, params: Tree, divisor: jax.Array, factor: jax.Array | None
) -> tuple[Tree, jax.Array]:
    """Divides summed gradients by `divisor` and by the loss scale `factor`.

    Returns:
        The mean gradients, rounded to the dtypes of the parameters, and their norm.
    """
    mean = 1.0 / jnp.maximum(divisor, 1.0)
    scale = mean if factor is None else mean / factor
    # The norm of the summed gradients is computed and then scaled. Computing the norm of the scaled
    # gradients would require all of them in memory at the same time.
    norm = optax.tree.norm(grads) * scale
    return jax.tree.map(lambda g, param: (g * scale).astype(param.dtype), grads, params), norm


def _where(condition: jax.Array, new: dict, old: dict) -> dict:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def make_eval_step(
    objective: Objective, model: FlaxPreTrainedModel
) -> Callable[[Tree, Tree, Tree, Batch], dict[str, jax.Array]]:
    """Builds the function `evaluate(params, frozen, extra, batch) -> sums`.

    `sums` contains the loss, the number of targets and the totals of the objective by name. The
    batch must consist of a single micro-batch.
    """

    def evaluate(params: Tree, frozen: Tree, extra: Tree, batch: Batch) -> dict[str, jax.Array]:
        batch = with_auxiliary({name: leaf[0] for name, leaf in batch.items()}, frozen)
        all_params = join_frozen(params, frozen)
        if objective.uses_step_totals:
            batch["step_totals"] = objective.step_totals(model, all_params, batch, extra)
        with nn.row_guarantees(objective.row_guarantees):
            total, count, loss_outputs = objective.loss(
                model, all_params, batch, None, False, extra=extra
            )
        return {"loss": total, "count": count, **loss_outputs.get("totals", {})}

    return evaluate
