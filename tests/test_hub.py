"""Pushing: the real client against a local server that speaks the Hub's protocol."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from hfseq import hub as hfseq_hub
from hfseq.errors import CheckpointError, UsageError
from hfseq.hub import BackgroundPusher, HubError, push_folder
from tests.support.fake_hub import FakeHub
from tests.support.hub_fixture import FastClock

# huggingface_hub uploads files through a deprecated argument of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

README = "---\nlicense: apache-2.0\n---\n# a model\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete model folder, with things beside it that must not be pushed."""
    root = tmp_path / "model"
    files = {
        "config.json": b'{"model_type": "bert"}',
        "README.md": README.encode(),
        "model.safetensors": b"weights" * 1000,
        "runs/nov21_host/events.out.tfevents.1": b"events",
        "checkpoint-10/optimizer.msgpack": b"big",
        "checkpoints/20/state/array": b"big",
        "previous-20261121/model.safetensors": b"old",
        ".cache/tokens.bin": b"cache",
        "wandb/run/files": b"private",
        "model.safetensors.tmp": b"half",
    }
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


PUSHED = {
    "config.json",
    "README.md",
    "model.safetensors",
    "runs/nov21_host/events.out.tfevents.1",
}


def commits(hub: FakeHub, name: str = "user/m") -> list[str]:
    return [commit.title for commit in hub.repo(name).history()]


def test_push_makes_one_commit_of_the_complete_folder(hub: FakeHub, folder: Path) -> None:
    url = push_folder(folder, "user/m", message="step 10")
    commit = hub.repo("user/m").at("main")
    assert commit and set(commit.files) == PUSHED
    assert commit.files["model.safetensors"].data == b"weights" * 1000
    assert url == f"{hub.url}/user/m/commit/{commit.oid}"
    assert commits(hub) == ["step 10"]


def test_bare_name_is_pushed_to_the_users_account(hub: FakeHub, folder: Path) -> None:
    push_folder(folder, "m")
    assert ("models", "user/m") in hub.repos


def test_pushing_the_same_folder_again_makes_no_commit(hub: FakeHub, folder: Path) -> None:
    assert push_folder(folder, "user/m") == push_folder(folder, "user/m")
    assert len(commits(hub)) == 1


def test_large_file_goes_up_in_parts(hub: FakeHub, folder: Path) -> None:
    hub.multipart_over, hub.part_size = 1000, 3000
    push_folder(folder, "user/m")
    assert sum("/lfs-part/" in request for request in hub.requests) == 3
    commit = hub.repo("user/m").at("main")
    assert commit and commit.files["model.safetensors"].data == b"weights" * 1000


def test_patterns_choose_the_files(hub: FakeHub, folder: Path) -> None:
    push_folder(folder, "user/m", allow_patterns=["*.json", "*.md"], ignore_patterns=["README.md"])
    commit = hub.repo("user/m").at("main")
    assert commit and set(commit.files) == {"config.json"}


def test_private_repository_and_other_branch(hub: FakeHub, folder: Path) -> None:
    push_folder(folder, "user/m", private=True, revision="trial")
    repo = hub.repo("user/m")
    assert repo.private and repo.at("main").files == {}
    assert set(repo.at("trial").files) == PUSHED


def test_private_push_never_lands_in_a_public_repository(hub: FakeHub, folder: Path) -> None:
    hub.create("user/m")
    with pytest.raises(HubError, match="is public"):
        push_folder(folder, "user/m", private=True)
    assert commits(hub) == []


@pytest.mark.parametrize("name", ["absent", "file"])
def test_folder_that_is_none_is_refused(hub: FakeHub, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="not a directory"):
        push_folder(tmp_path / name, "user/m")


def test_empty_folder_is_refused_before_a_repository_is_made(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to push"):
        push_folder(tmp_path, "user/m")
    assert hub.requests == []


COMMIT, CREATE, PREUPLOAD = "/commit/main", "/api/repos/create", "/preupload/"
PASSING_FAULTS = [
    ("POST", COMMIT, {"status": 429, "headers": {"Retry-After": "7"}}),
    ("POST", COMMIT, {"status": 409}),
    ("POST", COMMIT, {"status": 412}),
    ("POST", COMMIT, {"status": 503, "times": 3}),
    ("POST", COMMIT, {"action": "drop"}),
    ("POST", COMMIT, {"action": "cut"}),
    ("POST", COMMIT, {"action": "lost"}),
    ("POST", CREATE, {"status": 500}),
    ("POST", CREATE, {"action": "drop"}),
    ("POST", PREUPLOAD, {"status": 503}),
    ("POST", "objects/batch", {"status": 429}),
    ("PUT", "/lfs-upload/", {"status": 500}),
    ("PUT", "/lfs-upload/", {"action": "cut"}),
    ("PUT", "/lfs-upload/", {"action": "drop", "times": 7}),
    ("POST", "/lfs-verify", {"action": "drop"}),
]


@pytest.mark.parametrize(("method", "path", "how"), PASSING_FAULTS)
def test_passing_fault_is_survived_with_one_commit(
    hub: FakeHub,
    folder: Path,
    no_waiting: FastClock,
    method: str,
    path: str,
    how: dict,
) -> None:
    fault = hub.fail(method, path, **how)
    push_folder(folder, "user/m", message="save")
    assert fault.times == 0
    commit = hub.repo("user/m").at("main")
    assert commit and set(commit.files) == PUSHED and commits(hub) == ["save"]


def test_retry_after_is_honoured(hub: FakeHub, folder: Path, no_waiting: FastClock) -> None:
    hub.fail("POST", COMMIT, status=429, headers={"Retry-After": "7"})
    hub.fail("POST", COMMIT, status=429, headers={"ratelimit": '"api";r=0;t=11'})
    push_folder(folder, "user/m")
    assert no_waiting.waits == [7.0, 11.0]


LASTING_FAULTS = [
    ("POST", CREATE, {"status": 401, "error": "Invalid username or password."}, "hf auth login"),
    ("POST", COMMIT, {"status": 403, "error": "Forbidden"}, "write access"),
    ("POST", PREUPLOAD, {"status": 403}, "write access"),
    ("POST", PREUPLOAD, {"status": 404, "headers": {"X-Error-Code": "RepoNotFound"}}, "no such"),
    ("POST", COMMIT, {"status": 413}, "too large"),
    ("PUT", "/lfs-upload/", {"status": 507}, "quota"),
    ("POST", COMMIT, {"status": 429, "headers": {"Retry-After": "86400"}}, "too many requests"),
]


@pytest.mark.parametrize(("method", "path", "how", "says"), LASTING_FAULTS)
def test_lasting_fault_is_explained_without_waiting(
    hub: FakeHub,
    folder: Path,
    no_waiting: FastClock,
    method: str,
    path: str,
    how: dict,
    says: str,
) -> None:
    hub.fail(method, path, times=99, **how)
    with pytest.raises(HubError, match=says) as caught:
        push_folder(folder, "user/m")
    assert str(how["status"]) in str(caught.value) and "user/m" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert no_waiting.waits == []


def test_endless_fault_ends_after_bounded_attempts(
    hub: FakeHub,
    folder: Path,
    no_waiting: FastClock,
) -> None:
    hub.fail("POST", COMMIT, times=99, status=503)
    with pytest.raises(HubError, match="503"):
        push_folder(folder, "user/m")
    assert no_waiting.waits == [1.0, 2.0, 4.0]


def test_wrong_token_is_explained_and_never_shown(
    hub: FakeHub,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.fail("POST", CREATE, status=401, error="Invalid token hf_planted and s3cr3t-token")
    with pytest.raises(HubError, match="hf auth login") as caught:
        push_folder(folder, "user/m", token="s3cr3t-token")
    shown = str(caught.value) + "\n".join(r.getMessage() for r in caplog.records)
    assert "s3cr3t-token" not in shown and "hf_planted" not in shown


def test_unreachable_hub_is_explained(
    hub: FakeHub,
    folder: Path,
    no_waiting: FastClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid:1")
    with pytest.raises(HubError, match="no connection to the Hub"):
        push_folder(folder, "user/m")


def test_broken_card_is_named(hub: FakeHub, folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(HubError, match="README|YAML|metadata"):
        push_folder(folder, "user/m")


def test_background_push_does_not_wait_for_the_upload(hub: FakeHub, folder: Path) -> None:
    release = hub.fail("POST", COMMIT, action="delay", seconds=0.5)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("step 1")
    assert commits_or_none(hub) == []
    assert pusher.finish() is None
    assert release.times == 0 and commits(hub) == ["step 1"]
    assert pusher.commit_url.endswith(hub.repo("user/m").branches["main"])


def commits_or_none(hub: FakeHub) -> list[str]:
    return commits(hub) if ("models", "user/m") in hub.repos else []


def test_saves_during_an_upload_are_coalesced(hub: FakeHub, folder: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()
    original = hfseq_hub.push_folder

    def slow(*args: object, **kwargs: object) -> str:
        reached.set()
        go_on.wait(10)
        return original(*args, **kwargs)  # type: ignore[arg-type]

    pusher = BackgroundPusher(folder, "user/m")
    hfseq_hub.push_folder = slow
    try:
        for step in range(1, 5):
            (folder / "config.json").write_text(f'{{"step": {step}}}')
            pusher.push(f"step {step}")
            assert reached.wait(10)
        go_on.set()
        assert pusher.finish() is None
    finally:
        hfseq_hub.push_folder = original
    assert commits(hub) == ["step 4", "step 1"]
    newest, first = hub.repo("user/m").history()
    assert first.files["config.json"].data == b'{"step": 1}'
    assert newest.files["config.json"].data == b'{"step": 4}'


def test_commit_is_the_state_at_the_call_although_files_change_meanwhile(
    hub: FakeHub,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hfseq_hub, "LINK_ABOVE", 1000)  # weights are hard-linked
    hub.fail("POST", CREATE, action="delay", seconds=0.3)
    events = folder / "runs/nov21_host/events.out.tfevents.1"
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("step 1")
    with events.open("ab") as file:
        file.write(b"more")
    (folder / "model.safetensors.tmp").write_bytes(b"newer")
    os.replace(folder / "model.safetensors.tmp", folder / "model.safetensors")
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
    pusher._join(None)
    assert [r.levelname for r in caplog.records if r.name == "hfseq.hub"] == ["WARNING"]
    pusher.push("step 2")
    assert pusher.finish() is None
    assert commits(hub) == ["step 2"]


def test_failed_last_push_is_repeated_at_the_end(hub: FakeHub, folder: Path) -> None:
    hub.fail("POST", COMMIT, status=403)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("last")
    assert pusher.finish() is None
    assert commits(hub) == ["last"]


def test_push_that_stays_failed_names_the_command_that_finishes_it(
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
    hub.fail("POST", CREATE, action="delay", seconds=1.0)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("last")
    left = pusher.finish(timeout=0.05)
    assert left and "still under way" in left and "hfseq push" in left
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
        patch.setattr(hfseq_hub, "_link_or_copy", full)
        pusher.push("step 1")
    assert "No space left" in caplog.text
    assert pusher.finish() is None
    assert commits(hub) == ["step 1"]


def test_finish_without_any_push_has_nothing_to_report(tmp_path: Path) -> None:
    assert BackgroundPusher(tmp_path, "user/m").finish() is None
