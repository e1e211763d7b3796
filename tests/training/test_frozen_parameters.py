"""Parameters that a step uses, but does not train."""

from __future__ import annotations

import jax
import numpy as np
import optax

from hfseq.nn import trees
from hfseq.training.state import make_state, make_step


def test_frozen_parameters_are_not_in_the_train_state(train):
    observed = []
    result = train(
        devices=1, max_steps=2, do_train=True, callbacks=[lambda info: observed.append(info.batch)]
    )
    run, optimizer = result.run, optax.sgd(0.1)
    every = trees.flatten(jax.tree.map(np.asarray, result.state.params))
    frozen = {path: leaf for path, leaf in every.items() if "encoder" not in path}
    trained = {path: leaf for path, leaf in every.items() if path not in frozen}
    assert frozen and trained
    step = jax.jit(make_step(run.objective, run.model, optimizer, 0, False))
    sums = ("loss", "count", *run.objective.sums)

    def take(params, extra):
        state = make_state(trees.unflatten(params), optimizer, {}, tuple(sorted(set(sums))))
        return step(state, trees.unflatten(extra) if extra else {}, observed[0])

    all_params, measured = take(every, {})
    part, measured_part = take(trained, frozen)
    updated = trees.flatten(part.params)
    assert updated.keys() == trained.keys()
    assert float(measured["loss"]) == float(measured_part["loss"])
    for path, leaf in trees.flatten(all_params.params).items():
        if path in trained:
            np.testing.assert_allclose(updated[path], leaf, rtol=1e-6, atol=1e-7)
    changed = [path for path in trained if not np.array_equal(updated[path], trained[path])]
    assert len(changed) > len(trained) / 2
