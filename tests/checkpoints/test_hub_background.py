"""Background pushes: snapshots, the thread, and failures that do not stop training."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hfseq.checkpoints import hub as hub_background
from hfseq.checkpoints.hub import BackgroundPusher
from tests.support.fake_hub import FakeHub
from tests.support.pushed_folder import PUSHED, commits, push_in_subprocess

# huggingface_hub uploads files through a deprecated argument of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
COMMIT, CREATE = "/commit/main", "/api/repos/create"


@pytest.fixture
def folder(model_folder: Path) -> Path:
    return model_folder


def test_background_push_does_not_wait_for_the_upload(hub: FakeHub, folder: Path) -> None:
    fault = hub.fail("POST", COMMIT, action="hold")
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("step 1")
    assert fault.met.wait(60) and commits(hub) == []
    hub.release.set()
    assert pusher.finish() is None
    assert commits(hub) == ["step 1"]
    assert pusher.commit_url.endswith(hub.repo("user/m").branches["main"])


def test_saves_during_an_upload_are_coalesced(hub: FakeHub, folder: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    original = hub_background.push_folder

    def slow(*args: object, **kwargs: object) -> str:
        reached.set()
        go_on.wait(60)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    pusher = BackgroundPusher(folder, "user/m")
    hub_background.push_folder = slow
    try:
        for step in range(1, 5):
            (folder / "config.json").write_text(f'{{"step": {step}}}')
            pusher.push(f"step {step}")
            assert reached.wait(60)
        go_on.set()
        assert pusher.finish() is None
    finally:
        hub_background.push_folder = original
    assert commits(hub) == ["step 4", "step 1"]
    newest, first = hub.repo("user/m").history()
    assert first.files["config.json"].data == b'{"step": 1}'
    assert newest.files["config.json"].data == b'{"step": 4}'


def test_commit_is_the_state_at_the_call_although_files_change_meanwhile(
    hub: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_background, "HARD_LINK_MIN_BYTES", 1000)  # weights are hard-linked
    hub.fail("POST", CREATE, action="hold")
    events = folder / "runs/nov21_host/events.out.tfevents.1"
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("step 1")
    with events.open("ab") as file:
        file.write(b"more")
    (folder / "model.safetensors.tmp").write_bytes(b"newer")
    os.replace(folder / "model.safetensors.tmp", folder / "model.safetensors")
    hub.release.set()
    assert pusher.finish() is None
    files = hub.repo("user/m").at("main").files
    assert files["model.safetensors"].data == b"weights" * 1000
    assert files["runs/nov21_host/events.out.tfevents.1"].data == b"events"
    assert set(files) == PUSHED


def test_failed_push_is_a_warning_and_the_next_one_makes_it_good(
    hub: FakeHub,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.fail("POST", COMMIT, status=403)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("step 1")
    if thread := pusher._thread:
        thread.join()
    assert [r.levelname for r in caplog.records if r.name == "hfseq.checkpoints.hub"] == ["WARNING"]
    pusher.push("step 2")
    assert pusher.finish() is None
    assert commits(hub) == ["step 2"]


def test_failed_last_push_is_repeated_at_the_end(hub: FakeHub, folder: Path) -> None:
    hub.fail("POST", COMMIT, status=403)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("last")
    assert pusher.finish() is None
    assert commits(hub) == ["last"]


def test_failed_push_names_the_command_to_complete_it(
    hub: FakeHub,
    folder: Path,
) -> None:
    hub.fail("POST", COMMIT, times=99, status=403)
    pusher = BackgroundPusher(folder, "user/m", private=True, token="hf_test")
    pusher.push("last")
    left = pusher.finish()
    assert left and f"hfseq push {folder} --hub_model_id user/m --hub_private_repo" in left
    assert "403" in left and "hf_test" not in left and ".cache" not in left


def test_finish_gives_up_after_its_timeout(hub: FakeHub, folder: Path) -> None:
    hub.fail("POST", CREATE, action="hold")
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("last")
    left = pusher.finish(timeout=0.05)
    assert left and "no network traffic for 0.05 s" in left and "hfseq push" in left
    hub.release.set()
    assert pusher.finish() is None


def test_snapshots_are_removed_also_those_of_a_killed_run(hub: FakeHub, folder: Path) -> None:
    stale = folder / ".cache/push/123-1/model.safetensors"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"old")
    pusher = BackgroundPusher(folder, "user/m")
    assert not stale.exists()
    pusher.push("step 1")
    assert pusher.finish() is None
    assert not (folder / ".cache/push").exists() and (folder / ".cache/tokens.bin").exists()


def test_full_disk_during_the_snapshot_does_not_reach_training(
    hub: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    pusher = BackgroundPusher(folder, "user/m")
    with monkeypatch.context() as patch:
        patch.setattr(hub_background.shutil, "copy2", full)
        pusher.push("step 1")
    assert "No space left" in caplog.text
    assert pusher.finish() is None
    assert commits(hub) == ["step 1"]


def test_finish_without_any_push_has_nothing_to_report(tmp_path: Path) -> None:
    assert BackgroundPusher(tmp_path, "user/m").finish() is None


# -- training checkpoints


def saved(folder: Path, step: int) -> None:
    state_dir = folder / "checkpoints" / str(step) / "state"
    state_dir.mkdir(parents=True)
    (state_dir / f"array-{step}").write_bytes(b"state" * step)


def on_the_hub(hub: FakeHub) -> set[str]:
    return {name for name in hub.repo("user/m").at("main").files if name.startswith("checkpoints")}


def test_the_newest_checkpoint_replaces_the_one_on_the_hub(hub: FakeHub, folder: Path) -> None:
    pusher = BackgroundPusher(folder, "user/m", checkpoint=True)
    pusher.push("step 20")
    assert pusher.finish() is None
    assert on_the_hub(hub) == {"checkpoints/20/state/array"}
    saved(folder, 100)
    (folder / "checkpoints/120.orbax-checkpoint-tmp-1/state").mkdir(parents=True)
    (folder / "checkpoints/120.orbax-checkpoint-tmp-1/state/half").write_bytes(b"half")
    pusher.push("step 100")
    assert pusher.finish() is None
    assert on_the_hub(hub) == {"checkpoints/100/state/array-100"}
    assert commits(hub) == ["step 100", "step 20"]
    assert set(hub.repo("user/m").at("main").files) >= PUSHED


def test_push_contains_complete_checkpoint_although_run_deletes_it(
    hub: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import shutil

    monkeypatch.setattr(hub_background, "HARD_LINK_MIN_BYTES", 1)
    hub.fail("POST", CREATE, action="hold")
    pusher = BackgroundPusher(folder, "user/m", checkpoint=True)
    pusher.push("step 20")
    shutil.rmtree(folder / "checkpoints/20")
    hub.release.set()
    assert pusher.finish() is None
    assert on_the_hub(hub) == {"checkpoints/20/state/array"}


def test_completion_command_includes_the_checkpoint(hub: FakeHub, folder: Path) -> None:
    hub.fail("POST", COMMIT, times=99, status=402)
    pusher = BackgroundPusher(folder, "user/m", checkpoint=True)
    pusher.push("last")
    left = pusher.finish()
    assert left and left.endswith("--hub_model_id user/m --checkpoint") and "quota" in left


@pytest.mark.slow
def test_a_process_that_ends_does_not_wait_for_a_push_that_hangs(folder: Path) -> None:
    hang = "hub.push_folder = lambda *given, **options: time.sleep(600)"
    assert "it hangs" in push_in_subprocess(folder, timeout=0.1, setup=hang)
