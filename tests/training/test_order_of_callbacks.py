"""The documented order after a step: log, evaluate, the user's callbacks, save.

Observed from outside: by the files in the output directory when a user's callback is called.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from safetensors.numpy import load_file

from hfseq.nn import trees

STEPS = 6


def test_callback_order_within_a_step(train, tmp_path):
    """The callback also sets the bias of the head to zero after step 2, which is saved."""
    folder = tmp_path / "run"
    weights, observed = folder / "model.safetensors", []

    def look(info):
        step = info.progress.step
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        reported = [
            prefix
            for record in records
            for prefix in ("train", "eval")
            if record["step"] == step and f"{prefix}_loss" in record
        ]
        saved = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
        observed.append((step, reported, saved))
        if step == 2:
            flat = trees.flatten(info.state.params)
            path = ("lm_head", "bias")
            assert flat[path].any()
            params = trees.unflatten(flat | {path: flat[path] * 0})
            return dataclasses.replace(info.state, params=params)
        if step == 3:  # this step has not been saved yet
            assert not load_file(weights)["lm_head.bias"].any()
        return None

    train(
        callbacks=[look],
        devices=1,
        do_train=True,
        eval_steps=1,
        save_steps=1,
        save_total_limit=STEPS,
    )
    # Logging precedes evaluation, and both precede the callback.
    assert [(step, reported) for step, reported, _ in observed] == [
        (step, ["train", "eval"]) for step in range(1, STEPS + 1)
    ]
    # Saving follows it: the first call finds no weights, and later ones those of the previous step.
    saved = [digest for *_, digest in observed]
    assert saved[0] is None and None not in saved[1:] and len({*saved}) == STEPS
    last = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert last not in saved
    # Evaluation precedes saving: the first checkpoint contains the first evaluation.
    record = json.loads((folder / "checkpoints" / "1" / "record" / "metadata").read_text())
    assert record["step"] == record["best_step"] == 1 and record["best_metric"] is not None
