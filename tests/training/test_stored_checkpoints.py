"""Checkpoints from older code are restored exactly, and their runs resume with the same losses.

`tests/support/stored_runs.py` describes the files.
"""

from __future__ import annotations

import json
import re

import pytest

from hfseq.data.arguments import OBJECTIVES
from tests.support import stored_runs
from tests.support.stored_runs import STEP, STORED, ContinuedRun
from tests.support.tiers import first

#: In the default suite: one of each part of a state, and of each objective that no other test of
#: the default suite trains.
EVERY_CHANGE = (*("mlm", "span_mlm", "denoising", "fp8", "windows", "ctc"),)


@pytest.fixture(scope="module", params=first(stored_runs.names(), *EVERY_CHANGE))
def continued(request, tmp_path_factory) -> tuple[str, ContinuedRun]:
    """The resumed run of each stored checkpoint."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, stored_runs.continue_run(request.param, folder)


def test_stored_checkpoints_cover_objectives_and_state():
    objectives = {stored_runs.record(name)["objective"] for name in stored_runs.names()}
    assert objectives == set(OBJECTIVES)
    paths = {name: set(stored_runs.stored_state(name)) for name in stored_runs.names()}
    parts = {path.split("/")[0] for run_paths in paths.values() for path in run_paths}
    assert parts >= {"params", "opt_state", "extra", "step", "window", "loss_scale", "memory"}
    assert any(path.startswith("extra/fp8_params/") for path in paths["fp8"])
    assert any(path.startswith("extra/codebook/") for path in paths["windows"])
    progress = [stored_runs.record(name)["progress"] for name in stored_runs.names()]
    assert all(
        any(run_progress[field] is not None for run_progress in progress) for field in progress[0]
    )


def test_the_state_is_restored_to_the_last_bit(continued):
    name, run = continued
    expected = stored_runs.stored_state(name)
    assert run.state.keys() == expected.keys()
    for path, leaf in expected.items():
        restored = run.state[path]
        assert (restored.dtype, restored.shape) == (leaf.dtype, leaf.shape), path
        assert restored.tobytes() == leaf.tobytes(), path


def test_the_progress_is_that_of_the_run(continued):
    name, run = continued
    later = {"data": None, "first_samples": None}  # fields that older checkpoints lack
    assert run.progress == later | stored_runs.record(name)["progress"]
    assert run.progress["step"] == STEP


#: The gradients of bfloat16 parameters were summed in bfloat16 when the run was stored.
TOLERANCES = {"bfloat16_params": 1e-4}


def test_the_next_losses_are_those_that_the_run_had(continued):
    name, run = continued
    tolerance = TOLERANCES.get(name, 1e-5)
    expected = stored_runs.record(name)["losses"]
    assert len(expected) == 3 and [str(step) for step in run.losses] == list(expected)
    for step, loss in run.losses.items():
        assert loss == pytest.approx(expected[str(step)], rel=0, abs=tolerance), step


def test_the_next_checkpoint_has_the_same_names(continued):
    """No array or entry has another name. The oldest checkpoints have no entry "data"."""
    name, run = continued
    last = max((run.folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    assert int(last.name) > STEP
    stored_checkpoint = STORED / name / "checkpoints" / str(STEP)
    arrays, entries = stored_runs.names_on_disk(last)
    stored_arrays, stored_entries = stored_runs.names_on_disk(stored_checkpoint)
    if "data" not in stored_entries:
        entries.remove("data")
    assert (arrays, entries) == (stored_arrays, stored_entries)


def test_no_stored_file_has_a_path_of_a_machine():
    for path in STORED.rglob("*"):
        if path.is_file():
            match = re.search(rb"(?<![\w.}])/(home|root|tmp|work|Users)/", path.read_bytes())
            assert not match, path
    for name in stored_runs.names():
        flags = stored_runs.record(name)["flags"]
        assert "output_dir" not in flags and not re.search(r'"/', json.dumps(flags))
