"""Optimizers and schedules by name, all of them optax's."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.training.arguments import TrainingArguments
from hfseq.training.state import Tree

Mask = Callable[[Tree], dict]

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
    peak = arguments.learning_rate
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
    decay = _decay(arguments, peak, max(total_steps - warmup - held, 1), max(warmup, 1))
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])


def _decay(arguments: TrainingArguments, peak: float, steps: int, shift: int) -> optax.Schedule:
    """Return what follows the warm-up: ``steps`` of decay, then the rate at which that ended."""
    end = arguments.lr_end_ratio
    decays: dict[str, optax.Schedule] = {
        "linear": optax.linear_schedule(peak, end * peak, steps),
        "cosine": optax.cosine_decay_schedule(peak, steps, alpha=end),
        # Schedules that are joined are all called at every step, this one before its own, too.
        "inverse_sqrt": lambda step: peak * jnp.sqrt(shift / jnp.maximum(step + shift, 1)),
        "constant": optax.constant_schedule(peak),
        "constant_with_warmup": optax.constant_schedule(peak),
    }
    chosen = decays[arguments.lr_scheduler_type]
    if not arguments.lr_constant_steps:
        return chosen
    return lambda step: chosen(jnp.minimum(step, steps))


def noam(factor: float, width: int, warmup: int) -> optax.Schedule:
    """Return ``factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5)``, steps from 1."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return factor * width**-0.5 * jnp.minimum(step**-0.5, step * warmup**-1.5)

    return schedule


def path_mask(patterns: Sequence[str], *, matching: bool) -> Mask:
    """Return a function from parameters to a tree of bools: does the path match a pattern?"""
    compiled = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    def mask(params: Tree) -> Any:
        flat = trees.flatten(params)
        hit = {path: any(p.search(trees.join(path)) for p in compiled) for path in flat}
        return trees.unflatten({path: value == matching for path, value in hit.items()})

    return mask


def make_optimizer(
    factory: Callable[..., optax.GradientTransformation],
    arguments: TrainingArguments,
    schedule: optax.Schedule,
    stacked: Sequence[trees.Path] = (),
) -> optax.GradientTransformation:
    """Chain freezing, clipping and the named optimizer with its decay mask.

    ``stacked`` are path prefixes of scanned layers: an optimizer that looks at a leaf as a whole
    takes these layer by layer, so that scanning does not change what it does.
    """
    parts = []
    if arguments.freeze:
        parts.append(optax.masked(optax.set_to_zero(), path_mask(arguments.freeze, matching=True)))
    if arguments.max_grad_norm > 0:
        parts.append(optax.clip_by_global_norm(arguments.max_grad_norm))
    decayed = path_mask((*NO_DECAY, *arguments.no_decay), matching=False)
    absolute = arguments.weight_decay_mode == "absolute" and arguments.weight_decay
    own = dataclasses.replace(arguments, weight_decay=0.0) if absolute else arguments
    named = factory(schedule, own, decayed)
    parts.append(by_layer(named, stacked) if arguments.optim in PER_LEAF and stacked else named)
    if absolute:
        parts.append(optax.add_decayed_weights(-arguments.weight_decay, decayed))
    if arguments.freeze:
        parts.append(optax.masked(optax.set_to_zero(), path_mask(arguments.freeze, matching=True)))
    return optax.chain(*parts)


def by_layer(
    inner: optax.GradientTransformation, stacked: Sequence[trees.Path]
) -> optax.GradientTransformation:
    """Apply ``inner`` to each layer of the stacks at the prefixes ``stacked``, and to the rest."""

    def parts(tree: Tree) -> dict[str, Any]:
        found: dict[str, dict[trees.Path, Any]] = {}
        for path, leaf in trees.flatten(tree).items():
            inside = any(path[: len(head)] == head for head in stacked)
            # What only some of the layers have is a shorter stack.
            found.setdefault(f"layers_{leaf.shape[0]}" if inside else "", {})[path] = leaf
        return {name: trees.unflatten(part) for name, part in found.items()}

    def init(params: Tree) -> Any:
        return {
            name: (jax.vmap(inner.init) if name else inner.init)(part)
            for name, part in parts(params).items()
        }

    def update(grads: Tree, state: optax.OptState, params: Tree) -> Any:
        cut_grads, cut_params = parts(grads), parts(params)
        flat: dict[trees.Path, Any] = {}
        states = {}
        for name, part in cut_grads.items():
            one = jax.vmap(inner.update) if name else inner.update
            found, states[name] = one(part, state[name], cut_params[name])
            flat |= trees.flatten(found)
        return trees.unflatten({path: flat[path] for path in trees.flatten(grads)}), states

    return optax.GradientTransformation(init, update)


def _with_decay(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    arguments: TrainingArguments,
    mask: Mask,
) -> Any:
    """Add decoupled weight decay to an optimizer that has none of its own."""
    if not arguments.weight_decay:
        return optimizer
    decay = optax.chain(
        optax.add_decayed_weights(arguments.weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
    return _sum_updates(optimizer, decay)


def _sum_updates(
    first: optax.GradientTransformation, second: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Apply ``first`` to the gradients and ``second`` to zeros, and add what they give."""

    def init(params: Tree) -> Any:
        return first.init(params), second.init(params)

    def update(grads: Tree, state: optax.OptState, params: Tree) -> Any:
        own, first_state = first.update(grads, state[0], params)
        zeros = jax.tree.map(jnp.zeros_like, grads)
        extra, second_state = second.update(zeros, state[1], params)
        return jax.tree.map(jnp.add, own, extra), (first_state, second_state)

    return optax.GradientTransformation(init, update)


def adamw(
    schedule: optax.Schedule, arguments: TrainingArguments, mask: Mask
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019)."""
    return optax.adamw(
        schedule, b1=arguments.adam_beta1, b2=arguments.adam_beta2, eps=arguments.adam_epsilon,
        weight_decay=arguments.weight_decay, mask=mask,
    )  # fmt: skip


def adafactor(
    schedule: optax.Schedule, arguments: TrainingArguments, mask: Mask
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, 2018) at the given learning rate, as v4 ran it."""
    return _with_decay(optax.adafactor(schedule), schedule, arguments, mask)


def lion(
    schedule: optax.Schedule, arguments: TrainingArguments, mask: Mask
) -> optax.GradientTransformation:
    """Lion (Chen et al., 2023)."""
    return optax.lion(
        schedule,
        b1=arguments.adam_beta1,
        b2=arguments.adam_beta2,
        weight_decay=arguments.weight_decay,
        mask=mask,
    )


def _betas(
    make: Callable[..., optax.GradientTransformation],
    schedule: optax.Schedule,
    arguments: TrainingArguments,
    mask: Mask,
) -> optax.GradientTransformation:
    """An optimizer with Adam's two betas and epsilon."""
    optimizer = make(
        schedule, b1=arguments.adam_beta1, b2=arguments.adam_beta2, eps=arguments.adam_epsilon
    )
    return _with_decay(optimizer, schedule, arguments, mask)


def _plain(
    make: Callable[..., optax.GradientTransformation],
    schedule: optax.Schedule,
    arguments: TrainingArguments,
    mask: Mask,
) -> optax.GradientTransformation:
    """An optimizer that needs no more than a learning rate."""
    return _with_decay(make(schedule), schedule, arguments, mask)


adam = functools.partial(_betas, optax.adam)
adabelief = functools.partial(_betas, optax.adabelief)
adamax = functools.partial(_betas, optax.adamax)
radam = functools.partial(_betas, optax.radam)
novograd = functools.partial(_betas, optax.novograd)
nadamw = functools.partial(_betas, optax.nadam)
lamb = functools.partial(_betas, optax.lamb)
lars = functools.partial(_plain, optax.lars)
adagrad = functools.partial(_plain, optax.adagrad)
rmsprop = functools.partial(_plain, optax.rmsprop)
sgd = functools.partial(_plain, functools.partial(optax.sgd, momentum=0.9))


def muon(
    schedule: optax.Schedule, arguments: TrainingArguments, mask: Mask
) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) on the kernels, Adam on all else.

    Updates are scaled to Adam's size (Liu et al., 2025), so one learning rate serves both.
    """
    from optax.contrib import MuonDimensionNumbers
    from optax.contrib import muon as make

    def kernels(params: Tree) -> Any:
        def axes(path: trees.Path, leaf: jax.Array) -> MuonDimensionNumbers | None:
            # BERT's head is named "decoder": like other tables it is Adam's.
            hidden = path[-1] == "kernel" and path[-2:-1] not in (("decoder",), ("lm_head",))
            return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if hidden else None

        return trees.unflatten(
            {path: axes(path, leaf) for path, leaf in trees.flatten(params).items()}
        )

    optimizer = make(
        schedule, adam_b1=arguments.adam_beta1, adam_b2=arguments.adam_beta2,
        eps=arguments.adam_epsilon, muon_weight_dimension_numbers=kernels, consistent_rms=0.2,
    )  # fmt: skip
    return _with_decay(optimizer, schedule, arguments, mask)
