"""Optimizers and schedules by name, all of them optax's."""

from __future__ import annotations

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
#: ``factory(schedule, arguments, mask of what decays)``.
OptimizerFactory: TypeAlias = Callable[
    [optax.Schedule, TrainingArguments, MaskFunction], optax.GradientTransformation
]

# v4's rule: biases and everything in a normalisation layer are not decayed.
NO_DECAY = (r"(^|/)[^/]*bias$", r"norm[^/]*/[^/]+$", r"(^|/)ln[^/]*/[^/]+$")

# Optimizers whose update of a leaf depends on norms or factors of the whole leaf.
PER_LEAF = ("adafactor", "lamb", "lars", "novograd")


def make_schedule(
    arguments: TrainingArguments, total_steps: int, width: int | None = None
) -> optax.Schedule:
    """Return learning rate as a function of the step: linear warm-up, then the named decay.

    ``linear`` and ``cosine`` end at ``lr_end_ratio`` of the peak, and the last
    ``lr_constant_steps`` steps keep the rate at which the decay ended. ``noam`` (Vaswani et al.,
    2017, equation 3) needs the model's ``width``; the learning rate is a factor there, usually 1 or
    2. Its shape is that of ``inverse_sqrt``, which has a peak instead.
    """
    peak, end = arguments.learning_rate, arguments.lr_end_ratio
    warmup = arguments.warmup_steps or round(arguments.warmup_ratio * total_steps)
    if arguments.lr_scheduler_type == "noam":
        if not warmup or not width:
            raise UsageError(
                "--lr_scheduler_type noam needs --warmup_steps (4000 in the paper)"
                + ("" if width else " and a configuration with hidden_size")
            )
        return noam(peak, width, warmup)
    if warmup > total_steps:
        raise UsageError(
            f"--warmup_steps {warmup} is more than the {total_steps} steps of this run: warm "
            "up for less, or train longer"
        )
    held = arguments.lr_constant_steps
    if held and warmup + held >= total_steps:
        raise UsageError(
            f"--lr_constant_steps {held} and {warmup} steps of warm-up leave nothing of the "
            f"{total_steps} steps of this run to decay in: give less of either"
        )
    steps, shift = max(total_steps - warmup - held, 1), max(warmup, 1)
    decays: dict[str, optax.Schedule] = {
        "linear": optax.linear_schedule(peak, end * peak, steps),
        "cosine": optax.cosine_decay_schedule(peak, steps, alpha=end),
        # Schedules that are joined are all called at every step, this one before its own, too.
        "inverse_sqrt": lambda step: peak * jnp.sqrt(shift / jnp.maximum(step + shift, 1)),
        "constant": optax.constant_schedule(peak),
        "constant_with_warmup": optax.constant_schedule(peak),
    }
    named = decays[arguments.lr_scheduler_type]
    decay = (lambda step: named(jnp.minimum(step, steps))) if held else named
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])


def noam(factor: float, width: int, warmup: int) -> optax.Schedule:
    """Return ``factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5)``, steps from 1."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return factor * width**-0.5 * jnp.minimum(step**-0.5, step * warmup**-1.5)

    return schedule


def path_mask(patterns: Sequence[str], *, matching: bool) -> MaskFunction:
    """Return a function from parameters to a tree of bools: does the path match a pattern?"""
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    def mask(params: Tree) -> Any:
        hit = {
            path: any(pattern.search(trees.join(path)) for pattern in compiled)
            for path in trees.flatten(params)
        }
        return trees.unflatten({path: value == matching for path, value in hit.items()})

    return mask


def make_optimizer(
    factory: OptimizerFactory,
    arguments: TrainingArguments,
    schedule: optax.Schedule,
    stacked: Sequence[trees.Path] = (),
) -> optax.GradientTransformation:
    """Chain freezing, clipping and the named optimizer with its decay mask.

    ``stacked`` are path prefixes of scanned layers: an optimizer that looks at a leaf as a whole
    takes these layer by layer, so that scanning does not change what it does.
    """
    frozen = []
    if arguments.freeze:
        frozen = [optax.masked(optax.set_to_zero(), path_mask(arguments.freeze, matching=True))]
    parts = list(frozen)
    if arguments.max_grad_norm > 0:
        parts.append(optax.clip_by_global_norm(arguments.max_grad_norm))
    decayed = path_mask((*NO_DECAY, *arguments.no_decay), matching=False)
    absolute = arguments.weight_decay_mode == "absolute" and arguments.weight_decay
    given = dataclasses.replace(arguments, weight_decay=0.0) if absolute else arguments
    named = factory(schedule, given, decayed)
    parts.append(
        apply_per_layer(named, stacked) if arguments.optim in PER_LEAF and stacked else named
    )
    if absolute:
        parts.append(optax.add_decayed_weights(-arguments.weight_decay, decayed))
    return optax.chain(*parts, *frozen)


def apply_per_layer(
    inner: optax.GradientTransformation, stacked: Sequence[trees.Path]
) -> optax.GradientTransformation:
    """Apply ``inner`` to each layer of the stacks at the prefixes ``stacked``, and to the rest."""

    def parts(tree: Tree) -> dict[str, Any]:
        stacks: dict[str, dict[trees.Path, Any]] = {}
        for path, leaf in trees.flatten(tree).items():
            inside = any(path[: len(head)] == head for head in stacked)
            # What only some of the layers have is a shorter stack.
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
            one = jax.vmap(inner.update) if name else inner.update
            updates, states[name] = one(part, state[name], cut_params[name])
            flat |= trees.flatten(updates)
        return trees.unflatten({path: flat[path] for path in trees.flatten(grads)}), states

    return optax.GradientTransformation(init, update)


# -- the optimizers that hfseq registers, by their names


def _factory(
    make: Callable[..., optax.GradientTransformation],
    flags: Mapping[str, str] | None = None,
    decays: bool = False,
) -> OptimizerFactory:
    """Return the factory of an optax optimizer that takes these ``flags``, its name of each first.

    Where it ``decays`` weights by itself it gets decay and mask, too; to others decoupled decay is
    added, a second transformation that works on zeros.
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


def _muon_dimensions(params: Tree) -> dict:
    """Tell Muon which parameters are its own, the kernels, and their two axes."""

    def axes(path: trees.Path, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        # BERT's head is named "decoder": like other tables it is Adam's.
        hidden = path[-1] == "kernel" and path[-2:-1] not in (("decoder",), ("lm_head",))
        if not hidden:
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    flat = trees.flatten(params)
    return trees.unflatten({path: axes(path, leaf) for path, leaf in flat.items()})


adamw = _factory(optax.adamw, _ADAM, decays=True)  # Loshchilov and Hutter, 2019
lion = _factory(optax.lion, _BETAS, decays=True)  # Chen et al., 2023
# Shazeer and Stern, 2018, at the given learning rate, as v4 ran it.
adafactor = _factory(optax.adafactor)
# Jordan et al., 2024, on the kernels, Adam on all else. Updates are scaled to Adam's size (Liu et
# al., 2025), so one learning rate serves both.
muon = _factory(
    functools.partial(
        optax.contrib.muon, muon_weight_dimension_numbers=_muon_dimensions, consistent_rms=0.2
    ),
    {"adam_b1": "adam_beta1", "adam_b2": "adam_beta2", "eps": "adam_epsilon"},
)
adam = _factory(optax.adam, _ADAM)
adabelief = _factory(optax.adabelief, _ADAM)
adamax = _factory(optax.adamax, _ADAM)
radam = _factory(optax.radam, _ADAM)
novograd = _factory(optax.novograd, _ADAM)
nadamw = _factory(optax.nadam, _ADAM)
lamb = _factory(optax.lamb, _ADAM)
lars = _factory(optax.lars)
adagrad = _factory(optax.adagrad)
rmsprop = _factory(optax.rmsprop)
sgd = _factory(functools.partial(optax.sgd, momentum=0.9))
