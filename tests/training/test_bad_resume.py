"""Resuming from damaged checkpoints, and two runs in one directory."""

from __future__ import annotations

import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file

from hfseq.errors import CheckpointError, UsageError
from hfseq.training import checkpointer, output_directory
from hfseq.training.callbacks import every
from tests.training.conftest import losses

OPTIONS = {
    "devices": 1,
    "save_steps": 2,
    "max_steps": 6,
    "save_total_limit": 3,
    "do_train": True,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The parent folder of a finished run, which tests copy."""
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def run(train, finished, tmp_path):
    """The directory of a run with 6 steps and checkpoints of steps 2, 4 and 6."""
    if not finished.exists():
        shutil.copytree(train("first", **OPTIONS).folder, finished)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def array_file(step):
    """The largest file of a checkpoint, which contains arrays."""
    return max(
        (path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def flip(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "a bit flipped in the arrays": lambda step: flip(array_file(step)),
    "arrays cut": lambda step: array_file(step).write_bytes(array_file(step).read_bytes()[:-99]),
    "arrays gone": lambda step: array_file(step).unlink(),
    "the record cut": lambda step: (step / "record" / "metadata").write_text('{"step": 6, "tok'),
    "the state gone": lambda step: shutil.rmtree(step / "state"),
    "the sums cut": lambda step: (step / checkpointer.CHECKSUMS_FILE).write_text('{"state'),
}


@pytest.mark.parametrize(
    "damage",
    [
        "a bit flipped in the arrays",
        *(pytest.param(name, marks=pytest.mark.slow) for name in list(DAMAGE)[1:]),
    ],
)
def test_damaged_checkpoint_falls_back_to_the_previous_one(train, run, damage, caplog):
    uninterrupted, weights = losses(run), load_file(run / "model.safetensors")
    DAMAGE[damage](run / "checkpoints" / "6")
    (run / "checkpoints" / "6" / "mine").touch()  # by which the very directory is known again
    with caplog.at_level("WARNING"):
        loop = train("run", **OPTIONS)
    assert loop.start_step == 4 and losses(run) == uninterrupted
    assert "damaged: " in caplog.text and "Resuming from step 4" in caplog.text
    assert (run / "checkpoint-6-damaged" / "mine").exists()
    again = load_file(run / "model.safetensors")
    assert all((weights[name] == again[name]).all() for name in weights)
    assert checkpointer.find_damage(run / "checkpoints" / "6") == ""


def test_a_checkpoint_that_does_not_fit_is_an_error_that_names_the_kept_one(
    train, run, monkeypatch
):
    full = SimpleNamespace(**(vars(shutil) | {"disk_usage": lambda path: (10**6, 10**6, 0)}))
    monkeypatch.setattr(checkpointer, "shutil", full)
    with pytest.raises(CheckpointError, match="step 8 to .*no space left.* of step 6 is kept"):
        train("run", **OPTIONS | {"max_steps": 8})
    assert checkpointer.Checkpointer(run).steps()[-1] == 6


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_is_detected_and_named(run, damage):
    step = run / "checkpoints" / "6"
    assert checkpointer.find_damage(step) == ""
    DAMAGE[damage](step)
    assert checkpointer.find_damage(step)


def test_without_a_complete_checkpoint_nothing_is_moved(train, run):
    for step in (2, 4, 6):
        flip(array_file(run / "checkpoints" / str(step)))
    files = sorted(run.rglob("*"))  # the file of the lock is there since the first run
    with pytest.raises(
        CheckpointError, match="no checkpoint can be restored .*/2: .* has changed since the save"
    ):
        train("run", **OPTIONS)
    assert sorted(run.rglob("*")) == files


def test_explicitly_requested_damaged_checkpoint_is_an_error(train, run):
    flip(array_file(run / "checkpoints" / "4"))
    with pytest.raises(
        CheckpointError, match="/4 cannot be restored .* has changed since the save"
    ):
        train("other", resume_from_checkpoint=run / "checkpoints" / "4", **OPTIONS)


@pytest.mark.slow
def test_newest_checkpoint_is_determined_by_step(train, run):
    """The step decides, not the time: clocks jump, and copying changes file times."""
    for step, when in ((2, time.time() + 10**8), (4, 0), (6, 10**6)):
        for path in [
            run / "checkpoints" / str(step),
            *(run / "checkpoints" / str(step)).rglob("*"),
        ]:
            os.utime(path, (when, when))
    loop = train("run", **OPTIONS | {"max_steps": 8, "lr_scheduler_type": "constant"})
    assert loop.start_step == 6


# -- two runs in one directory


def test_a_second_run_is_refused_and_the_first_named(train, tmp_path):
    refused = []

    def start_another(info):
        with pytest.raises(UsageError) as error:
            train("run", **OPTIONS)
        refused.append(error.value)

    train("run", callbacks=[every(3, start_another)], **OPTIONS)
    assert len(refused) == 2 and refused[0].exit_code == 2
    assert f"is in use by process {os.getpid()} on " in str(refused[0])
    assert losses(tmp_path / "run").keys() == {1, 2, 3, 4, 5, 6}


def test_leftovers_of_a_killed_run_do_not_block(train, run):
    (run / output_directory.LOCK_FILE).write_text(
        json.dumps({"process": 1, "machine": "x", "since": "y"})
    )
    assert train("run", **OPTIONS).start_step == 6
    (run / output_directory.LOCK_FILE).write_text("no JSON")
    with output_directory.lock_directory(run), pytest.raises(UsageError, match="in use by process"):
        with output_directory.lock_directory(run):
            pass


# -- going back to an earlier checkpoint


def test_going_back_to_an_earlier_checkpoint_starts_a_new_branch(train, run, tmp_path, caplog):
    """Checkpoints of the abandoned branch are moved aside, so that nothing continues from them."""
    branch = OPTIONS | {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_steps": 7}
    named = run / "checkpoints" / "2"
    shutil.copytree(run, tmp_path / "source")
    train("other", resume_from_checkpoint=tmp_path / "source" / "checkpoints" / "2", **branch)
    expected = losses(tmp_path / "other")

    short = branch | {"max_steps": 5, "save_total_limit": 1}
    train("run", resume_from_checkpoint=named, **short)
    steps = {path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()}
    assert steps == {"2", "5"}  # the named one is kept, so that the command can be repeated
    assert "going back to step 2: the checkpoints of the steps 4, 6 are moved aside" in caplog.text
    (aside,) = run.glob("previous-*")
    assert sorted(path.name for path in (aside / "checkpoints").iterdir()) == ["4", "6"]
    assert losses(run) == {
        step: loss for step, loss in losses(tmp_path / "source").items() if step <= 2
    } | {step: expected[step] for step in (3, 4, 5)}

    continued = train("run", **branch)  # from the new branch, without the flag
    assert continued.start_step == 5
    assert [losses(run)[step] for step in (6, 7)] == [expected[step] for step in (6, 7)]
    shutil.rmtree(named, ignore_errors=True)
    with pytest.raises(CheckpointError, match=r"checkpoints/2 does not exist; .*steps \d"):
        train("run", resume_from_checkpoint=named, **branch)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("stage", ["move", "push"])
def test_a_kill_while_going_back_leaves_no_newer_checkpoint(tmp_path, monkeypatch, remote, stage):
    from hfseq.checkpoints import storage
    from hfseq.training.checkpointer import finish_going_back, move_newer_aside

    url = f"memory://back-{stage}/run" if remote else str(tmp_path / "run")
    workspace = storage.Workspace(url, tmp_path / "copy")
    folder = workspace.path
    for step in (2, 4, 6):
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "state").write_text(str(step))
    workspace.push()

    def killed(*args):
        raise KeyboardInterrupt

    rename = os.rename
    if stage == "move":
        renames = iter([rename, killed])
        monkeypatch.setattr(storage.os, "rename", lambda *paths: next(renames)(*paths))
    with pytest.raises(KeyboardInterrupt):
        move_newer_aside(folder, 2, killed)
    monkeypatch.setattr(storage.os, "rename", rename)

    again = storage.Workspace(url, tmp_path / "copy")
    again.pull()
    finish_going_back(folder, again.push)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]
    moved = sorted(path.name for path in folder.glob("previous-*/checkpoints/*"))
    assert set(moved) == {"4", "6"}
    finish_going_back(folder, killed)  # nothing is left to do
    if remote:
        elsewhere = storage.Workspace(url, tmp_path / "elsewhere")
        elsewhere.pull()
        assert [p.name for p in (elsewhere.path / "checkpoints").iterdir()] == ["2"]
