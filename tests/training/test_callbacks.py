"""Callbacks: the example in the guide, the events, and invalid callbacks."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from hfseq.errors import UsageError
from hfseq.training.callbacks import Callback, StepInfo, call_handlers, every, find_handlers
from hfseq.training.checkpointer import Progress

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_the_example_of_the_guide_runs(flags, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"### Callbacks\n\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    flag_values = dict(flag[2:].split("=", 1) for flag in flags(max_steps=4, do_train=True))
    monkeypatch.chdir(tmp_path)
    Path("roberta.yaml").write_text(yaml.safe_dump(flag_values))
    names: dict = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    result, mean = names["result"], names["average"].mean
    assert result.run.arguments.training.seed == 7 and result.progress.step == 4
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in printed if len(line) == 2 and line[0].isdigit()] == ["2", "4"]
    assert jax.tree.all(jax.tree.map(np.array_equal, result.state.params, mean))
    saved = load_file(result.folder / "model.safetensors")["lm_head.bias"]
    assert np.array_equal(saved, mean["lm_head"]["bias"])


def info(step: int) -> StepInfo:
    return StepInfo(None, "state 0", Progress(step=step))  # type: ignore[arg-type]


def test_each_sees_the_state_that_the_one_before_it_left():
    observed_states = []

    def first(info):
        observed_states.append(info.state)
        return "state 1"

    def second(info):
        observed_states.append(info.state)

    functions = find_handlers("on_step_end", [first, second])
    assert call_handlers(functions, info(1)).state == "state 1" and observed_states == [
        "state 0",
        "state 1",
    ]


def test_every_calls_after_each_nth_step():
    steps: list[int] = []
    function = every(3, lambda info: steps.append(info.progress.step))
    for step in range(1, 8):
        call_handlers(find_handlers("on_step_end", [function]), info(step))
    assert steps == [3, 6]


def test_an_object_may_have_some_of_the_moments_and_a_function_is_for_the_end_of_a_step():
    class Silent(Callback):
        pass

    begun = SimpleNamespace(on_train_begin=lambda info: "begun")
    callback_list = [Silent(), begun, lambda info: "done"]
    assert call_handlers(find_handlers("on_train_begin", callback_list), info(0)).state == "begun"
    assert call_handlers(find_handlers("on_step_end", callback_list), info(0)).state == "done"
    assert call_handlers(find_handlers("on_train_end", callback_list), info(0)).state == "state 0"


def test_invalid_callbacks_are_rejected():
    with pytest.raises(UsageError, match="is not a callback: .*StepInfo.*on_train_begin"):
        find_handlers("on_step_begin", [3])  # type: ignore[list-item]
