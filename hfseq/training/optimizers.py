"""Optimizers and learning rate schedules, selected by name. The optimizers come from optax."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.training.arguments import TrainingArguments
from hfseq.training.state import Tree

MaskFunction: TypeAlias = Callable[[Tree], dict]
#: A function that creates an optimizer, called as ``factory(schedule, arguments,
#: weight_decay_mask)``.
OptimizerFactory: TypeAlias = Callable[
    [optax.Schedule, TrainingArguments, MaskFunction], optax.GradientTransformation
]

# Parameters without weight decay, as in Transformers 4: biases and normalization layers.
NO_DECAY = (r"(^|/)[^/]*bias$", r"norm[^/]*/[^/]+$", r"(^|/)ln[^/]*/[^/]+$")

# Optimizers whose update depends on a norm or a factorization of the whole parameter array.
PER_LEAF = ("adafactor", "lamb", "lars", "novograd")


def num_warmup_steps(arguments: TrainingArguments, total_steps: int) -> int:
    """Returns the number of warmup steps, from `warmup_steps` or `warmup_ratio`."""
    return arguments.warmup_steps or round(arguments.warmup_ratio * total_steps)


def make_schedule(
    arguments: TrainingArguments, total_steps: int, width: int | None = None
) -> optax.Schedule:
    """Returns the learning rate schedule: linear warmup, then the selected decay.

    Args:
        arguments: The training flags.
        total_steps: The number of steps of the run. `linear` and `cosine` decay to `lr_end_ratio`
            times the peak. They reach this value at the end of the run or, with
            `lr_constant_steps`, that many steps before the end.
        width: The hidden size of the model, which only `noam` requires (Vaswani et al., 2017,
            equation 3). With `noam`, `learning_rate` is a factor, usually 1 or 2, and not the peak.
            `inverse_sqrt` is a schedule of the same shape whose peak is `learning_rate`.

    Raises:
        UsageError: The flags contradict each other or the number of steps.
    """
    peak, end = arguments.learning_rate, arguments.lr_end_ratio
    warmup = num_warmup_steps(arguments, total_steps)
    if arguments.lr_scheduler_type == "noam":
        if not warmup or not width:
            raise UsageError(
                "--lr_scheduler_type noam requires --warmup_steps (Vaswani et al. use 4000)"
                + ("" if width else " and a configuration with hidden_size")
            )
        return noam(peak, width, warmup)
    if warmup > total_steps:
        raise UsageError(
            f"--warmup_steps {warmup} exceeds the {total_steps} steps of this run: use fewer "
            "warmup steps, or train longer"
        )
    constant_steps = arguments.lr_constant_steps
    if constant_steps and warmup + constant_steps >= total_steps:
        raise UsageError(
            f"--lr_constant_steps {constant_steps} and {warmup} warmup steps leave none of the "
            f"{total_steps} steps of this run for the decay: reduce one of these numbers"
        )
    steps, shift = max(total_steps - warmup - constant_steps, 1), max(warmup, 1)
    decays: dict[str, optax.Schedule] = {
        "linear": optax.linear_schedule(peak, end * peak, steps),
        "cosine": optax.cosine_decay_schedule(peak, steps, alpha=end),
        # join_schedules evaluates all schedules at every step, so `step` is negative in the warmup.
        "inverse_sqrt": lambda step: peak * jnp.sqrt(shift / jnp.maximum(step + shift, 1)),
        "warmup_stable_decay": _stable_decay(arguments, peak, steps),
        "constant": optax.constant_schedule(peak),
        "constant_with_warmup": optax.constant_schedule(peak),
    }
    named_decay = decays[arguments.lr_scheduler_type]
    decay = (lambda step: named_decay(jnp.minimum(step, steps))) if constant_steps else named_decay
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])


def _stable_decay(arguments: TrainingArguments, peak: float, steps: int) -> optax.Schedule:
    """Returns a constant schedule with a decay at its end (Hu et al., 2024; Hägele et al., 2024).

    The learning rate before the decay does not depend on the length of the run. A run can therefore
    be resumed with a different length from any checkpoint before the decay.

    Args:
        arguments: The training flags.
        peak: The learning rate before the decay.
        steps: Number of steps after the warmup.

    Raises:
        UsageError: The decay is longer than the run.
    """
    length, end = arguments.lr_decay_steps or 1, arguments.lr_end_ratio
    if length > steps and arguments.lr_decay_steps:
        raise UsageError(
            f"--lr_decay_steps {length} exceeds the {steps} steps after the warmup: use fewer "
            "steps, or train longer"
        )

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip((jnp.asarray(count, jnp.float32) - (steps - length)) / length, 0, 1)
        shape = {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "1-sqrt": 1 - jnp.sqrt(progress),
        }[arguments.lr_decay_type]
        return peak * (end + (1 - end) * shape)

    return schedule


def noam(factor: float, width: int, warmup: int) -> optax.Schedule:
    """Returns the learning rate schedule of Vaswani et al., 2017, equation 3.

    The learning rate is `factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5)`, where steps are
    counted from 1.
    """

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return factor * width**-0.5 * jnp.minimum(step**-0.5, step * warmup**-1.5)

    return schedule


def path_mask(patterns: Sequence[str], *, matching: bool) -> MaskFunction:
    """Returns a function that maps a tree of parameters to a mask, which is a tree of bools.

    Args:
        patterns: Regular expressions for parameter paths, ignoring case.
        matching: The value of the mask for parameters that match a pattern. It is `not matching`
            for all others.
    """
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    def mask(params: Tree) -> Any:
        matches = {
            path: any(pattern.search(trees.join(path)) for pattern in compiled)
            for path in trees.flatten(params)
        }
        return trees.unflatten({path: value == matching for path, value in matches.items()})

    return mask


def make_optimizer(
    factory: OptimizerFactory,
    arguments: TrainingArguments,
    schedule: optax.Schedule,
    stacked: Sequence[trees.Path] = (),
) -> optax.GradientTransformation:
    """Returns the optimizer of a run, with parameter freezing, gradient clipping and weight decay.

    Args:
        factory: The registered factory of the optimizer.
        arguments: The training flags.
        schedule: The learning rate schedule.
        stacked: Path prefixes of scanned layers, whose parameters are stacked into one array. The
            optimizers in `PER_LEAF` are applied to each of these layers separately, so that the
            result is the same as without scanning.
    """
    frozen = []
    if arguments.freeze:
        frozen = [optax.masked(optax.set_to_zero(), path_mask(arguments.freeze, matching=True))]
    parts = list(frozen)
    if arguments.max_grad_norm > 0:
        parts.append(optax.clip_by_global_norm(arguments.max_grad_norm))
    decay_mask = path_mask((*NO_DECAY, *arguments.no_decay), matching=False)
    absolute = arguments.weight_decay_mode == "absolute" and arguments.weight_decay
    factory_arguments = dataclasses.replace(arguments, weight_decay=0.0) if absolute else arguments
    token = _STACKED.set(stacked)
    try:
        optimizer = factory(schedule, factory_arguments, decay_mask)
    finally:
        _STACKED.reset(token)
    parts.append(
        apply_per_layer(optimizer, stacked)
        if arguments.optim in PER_LEAF and stacked
        else optimizer
    )
    if absolute:
        parts.append(optax.add_decayed_weights(-arguments.weight_decay, decay_mask))
    return optax.chain(*parts, *frozen)


def apply_per_layer(
    inner: optax.GradientTransformation, stacked: Sequence[trees.Path]
) -> optax.GradientTransformation:
    """Applies `inner` to each layer of stacked parameters separately.

    Args:
        inner: The optimizer.
        stacked: Path prefixes of stacked layers. `inner` is applied once to all other parameters.
    """

    def parts(tree: Tree) -> dict[str, Any]:
        stacks: dict[str, dict[trees.Path, Any]] = {}
        for path, leaf in trees.flatten(tree).items():
            inside = any(path[: len(head)] == head for head in stacked)
            # Parameters that only some layers have are stacked into a shorter array.
            stacks.setdefault(f"layers_{leaf.shape[0]}" if inside else "", {})[path] = leaf
        return {name: trees.unflatten(part) for name, part in stacks.items()}

    def init(params: Tree) -> Any:
        return {
            name: (jax.vmap(inner.init) if name else inner.init)(part)
            for name, part in parts(params).items()
        }

    def update(grads: Tree, state: optax.OptState, params: Tree) -> Any:
        cut_params = parts(params)
        flat: dict[trees.Path, Any] = {}
        states = {}
        for name, part in parts(grads).items():
            update_part = jax.vmap(inner.update) if name else inner.update
            updates, states[name] = update_part(part, state[name], cut_params[name])
            flat |= trees.flatten(updates)
        return trees.unflatten({path: flat[path] for path in trees.flatten(grads)}), states

    return optax.GradientTransformation(init, update)


# -- the optimizers that hfseq registers


def _factory(
    make: Callable[..., optax.GradientTransformation],
    flags: Mapping[str, str] | None = None,
    decays: bool = False,
) -> OptimizerFactory:
    """Returns the factory of an optax optimizer.

    Args:
        make: The optax function.
        flags: For each argument name of `make`, the flag that contains its value.
        decays: Whether `make` accepts weight decay and a mask. If not, a second transformation
            computes the decoupled weight decay, and its updates are added to those of `make`.
    """

    def factory(
        schedule: optax.Schedule, arguments: TrainingArguments, mask: MaskFunction
    ) -> optax.GradientTransformation:
        options = {name: getattr(arguments, flag) for name, flag in (flags or {}).items()}
        if decays:
            return make(schedule, **options, weight_decay=arguments.weight_decay, mask=mask)
        optimizer = make(schedule, **options)
        if not arguments.weight_decay:
            return optimizer
        decay = optax.chain(
            optax.add_decayed_weights(arguments.weight_decay, mask),
            optax.scale_by_learning_rate(schedule),
        )

        def init(params: Tree) -> Any:
            return optimizer.init(params), decay.init(params)

        def update(grads: Tree, state: optax.OptState, params: Tree) -> Any:
            updates, first = optimizer.update(grads, state[0], params)
            zeros = jax.tree.map(jnp.zeros_like, grads)
            decayed, second = decay.update(zeros, state[1], params)
            return jax.tree.map(jnp.add, updates, decayed), (first, second)

        return optax.GradientTransformation(init, update)

    return factory


_BETAS = {"b1": "adam_beta1", "b2": "adam_beta2"}
_ADAM = _BETAS | {"eps": "adam_epsilon"}


#: Path prefixes of the model's scanned layers, while a factory creates its optimizer.
_STACKED = contextvars.ContextVar[Sequence[trees.Path]]("_STACKED", default=())


def _muon(schedule: optax.Schedule, **options: Any) -> optax.GradientTransformation:
    """Returns an optimizer with Muon for the weight matrices of layers and Adam for the rest.

    Embeddings, poolers and heads do not count as layers, so Adam updates them. Muon updates are
    scaled to the typical RMS of Adam updates, so that both can use the same learning rate.
    """
    stacked = _STACKED.get()

    def axes(path: trees.Path, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        # A number in the path is the index of a layer, unless it directly precedes the last
        # component. It is then the index of a module in a head, e.g. classifier/1/kernel in ResNet.
        in_layers = any(map(str.isdigit, path[:-2])) or any(path[: len(p)] == p for p in stacked)
        if path[-1] != "kernel" or not in_layers:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    def dimensions(params: Tree) -> dict:
        flat = trees.flatten(params)
        return trees.unflatten({path: axes(path, leaf) for path, leaf in flat.items()})

    return optax.contrib.muon(
        schedule, muon_weight_dimension_numbers=dimensions, consistent_rms=0.2, **options
    )


def _schedule_free_adamw(
    schedule: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: MaskFunction,
) -> optax.GradientTransformation:
    """Returns schedule-free AdamW (Defazio et al., 2024).

    Gradients are computed at the parameters in the training state. `TrainState.inference_params`
    is the weighted average of these parameters over the steps, which is evaluated and saved.
    """
    base = optax.chain(
        optax.scale_by_rms(decay=b2, eps=eps, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.contrib.schedule_free(base, schedule, b1)


schedule_free_adamw = _factory(_schedule_free_adamw, _ADAM, decays=True)
adamw = _factory(optax.adamw, _ADAM, decays=True)  # Loshchilov and Hutter, 2019
lion = _factory(optax.lion, _BETAS, decays=True)  # Chen et al., 2023
# Shazeer and Stern, 2018, with an explicit learning rate, as in Transformers 4.
adafactor = _factory(optax.adafactor)
# Jordan et al., 2024, with the scale of Liu et al., 2025
muon = _factory(
    _muon,
    {"adam_b1": "adam_beta1", "adam_b2": "adam_beta2", "eps": "adam_epsilon"},
)
adam = _factory(optax.adam, _ADAM)
adabelief = _factory(optax.adabelief, _ADAM)
adamax = _factory(optax.adamax, _ADAM)
radam = _factory(optax.radam, _ADAM)
novograd = _factory(optax.novograd, _ADAM)
nadamw = _factory(optax.nadam, _ADAM)
# In LAMB and LARS (You et al., 2020 and 2017), the trust ratio includes weight decay.
lamb = _factory(optax.lamb, _ADAM, decays=True)
lars = _factory(
    lambda schedule, weight_decay, mask: optax.lars(schedule, weight_decay, weight_decay_mask=mask),
    decays=True,
)
adagrad = _factory(optax.adagrad)
rmsprop = _factory(optax.rmsprop)
sgd = _factory(functools.partial(optax.sgd, momentum=0.9))
