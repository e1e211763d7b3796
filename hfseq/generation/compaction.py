"""Decoding without the rows that are finished: the loop stops for breath, and smaller ones go on.

The compiled loop comes back as soon as half of the sentences are finished. The others, with their
caches, move into arrays of half the size, and the loop goes on with these. Sizes are halved, so a
batch needs as many programs as it can be halved, whatever its sentences do.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfseq.generation.plan import Operands, Plan
from hfseq.generation.programs import find_program, search
from hfseq.nn import kv_cache

logger = logging.getLogger(__name__)

#: Fewer sentences than this stay together: reading the weights takes all the time then.
SMALLEST_BATCH = 8


def can_compact(plan: Plan, operands: Operands) -> bool:
    """Tell whether rows may leave: without chance, recorded steps and several devices."""
    devices = getattr(getattr(operands.prompt, "sharding", None), "device_set", (None,))
    return not plan.options.do_sample and not plan.steps and len(devices) == 1


def halved(batch: int) -> int:
    """Return the number of sentences after the next move; the same number if there is none."""
    return (batch + 1) // 2 if batch > SMALLEST_BATCH else batch


def run_compacted(model: Any, plan: Plan, operands: Operands) -> Any:
    """Search like ``run_compiled``, with the same result; finished sentences leave the work."""
    begin, go_on, shrink = find_program(model, plan, "compacted", lambda: _programs(model, plan))
    rows = np.arange(operands.prompt.shape[0])
    state, found = begin(operands), _Found(len(rows))
    while True:
        state, output, done, ended = go_on(operands, state)
        found.keep(rows, output)
        if ended:
            return found.output()
        done = np.asarray(done)
        # Finished ones fill up what is spare: they stay as they are.
        places = np.argsort(done, kind="stable")[: halved(len(rows))].astype(np.int32)
        logger.debug("%d of %d sentences go on", int((~done).sum()), len(rows))
        operands, state = shrink(operands, state, places)
        rows = rows[places]


class _Found:
    """The results of all sentences, each as it was when its arrays were last looked at."""

    def __init__(self, count: int):
        self.count = count
        self.latest: Any = None
        self.fields: dict[str, np.ndarray] = {}

    def keep(self, rows: np.ndarray, output: Any) -> None:
        """Note the fields of ``output``, whose rows are those of the sentences ``rows``."""
        self.latest = output
        for name, value in output.items():
            new = np.asarray(value)
            times = len(new) // len(rows)
            if name not in self.fields:
                self.fields[name] = np.zeros((self.count * times, *new.shape[1:]), new.dtype)
            self.fields[name][_beams_of(rows, times)] = new

    def output(self) -> Any:
        """Return them as an output of generation."""
        return dataclasses.replace(self.latest, **jax.device_put(self.fields))


def _programs(model: Any, plan: Plan) -> tuple[Any, Any, Any]:
    def begin(operands: Operands) -> Any:
        return search(model, plan, operands).begin()

    def go_on(operands: Operands, state: Any) -> Any:
        chosen: Any = search(model, plan, operands)
        batch = operands.prompt.shape[0]
        fewer = halved(batch)

        def crowded(state: Any) -> jax.Array:
            many = (~chosen.done(state)).sum() > fewer if fewer < batch else True
            return chosen.unfinished(state) & many

        state = jax.lax.while_loop(crowded, chosen.advance, state)
        return state, chosen.result(state), chosen.done(state), ~chosen.unfinished(state)

    def shrink(operands: Operands, state: Any, places: jax.Array) -> tuple[Operands, Any]:
        return _pick_operands(operands, places), _pick_state(plan, state, places)

    return jax.jit(begin), jax.jit(go_on, donate_argnums=1), jax.jit(shrink)


def _pick_operands(operands: Operands, places: jax.Array) -> Operands:
    batch = operands.prompt.shape[0]
    names = ("prompt", "mask", "encoder", "encoder_outputs", "model_kwargs")
    return operands._replace(**{n: _pick(getattr(operands, n), batch, places) for n in names})


def _pick_state(plan: Plan, state: Any, places: jax.Array) -> Any:
    """Pick sentences from every array of a state, the model's inputs among them."""
    times = plan.options.rows_per_input
    rows = _beams_of(places, times)
    batch = len(state.sequences if times == 1 else state.hopeful)
    inputs = {}
    for name, value in state.inputs.items():
        if name == "past_key_values":
            inputs[name] = kv_cache.select(value, rows, places)
        elif name.startswith("encoder"):
            inputs[name] = _pick(value, batch, places)
        else:
            inputs[name] = _pick(value, batch * times, rows)
    rest = {n: v for n, v in state._asdict().items() if n not in ("inputs", "length", "recorded")}
    picked = {name: _pick(value, batch, places) for name, value in rest.items()}
    return state._replace(inputs=inputs, **picked)


def _pick(tree: Any, batch: int, places: jax.Array) -> Any:
    """Pick from the leaves that have a row for each of ``batch``."""

    def pick(leaf: Any) -> Any:
        ours = getattr(leaf, "ndim", 0) and leaf.shape[0] == batch
        return jnp.take(leaf, places, axis=0, mode="clip") if ours else leaf

    return jax.tree.map(pick, tree)


def _beams_of(rows: Any, times: int) -> Any:
    """Return the places of the ``times`` beams of each of ``rows``."""
    return (rows[:, None] * times + np.arange(times, dtype=rows.dtype)).reshape(-1)
