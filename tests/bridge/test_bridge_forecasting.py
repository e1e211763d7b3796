"""The training loop of docs/bridge.md with a time-series model."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bridge.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_documented_loop_learns_and_opens_in_torch(tmp_path):
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict = {}
    exec(compile(next(block for block in code if "optax" in block), str(PAGE), "exec"), names)
    model, step = names["model"], names["step"]
    params, state, extra = names["params"], names["state"], model.extra
    phases = np.random.default_rng(0).uniform(0, 6, (16, 1))
    series = np.sin(0.3 * np.arange(40) + phases)[..., None].astype(np.float32)
    past, future, losses = series[:, :32], series[:, 32:], []
    for number in range(40):
        key = jax.random.key(number)
        params, state, extra, loss = step(params, state, extra, past, future, key)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    model.params, model.extra = params, extra
    model.save_pretrained(tmp_path)
    reference = transformers.PatchTSTForPrediction.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = reference(past_values=torch.from_numpy(past)).prediction_outputs
    outputs = model(past_values=past).prediction_outputs
    np.testing.assert_allclose(outputs, expected.numpy(), atol=2e-5)
