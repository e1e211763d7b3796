"""Pushes with the real client to a local server that implements the protocol of the Hub."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hfseq.checkpoints.hub import HubError, push_folder
from hfseq.errors import CheckpointError, UsageError
from tests.support.fake_hub import FakeHub
from tests.support.hub_fixture import FastClock
from tests.support.pushed_folder import PUSHED, commits

# huggingface_hub uploads files through a deprecated argument of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def folder(model_folder: Path) -> Path:
    return model_folder


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


def test_empty_folder_is_rejected_before_creating_a_repository(
    hub: FakeHub, tmp_path: Path
) -> None:
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
    ("POST", "objects/batch", {"status": 402}, "quota"),
    ("POST", CREATE, {"status": 402}, "quota"),
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


def test_invalid_token_error_does_not_show_the_token(
    hub: FakeHub,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    planted = "hf_" + "planted" * 5
    hub.fail("POST", CREATE, status=401, error=f"Invalid token {planted} and s3cr3t-token")
    with pytest.raises(HubError, match="hf auth login") as caught:
        push_folder(folder, "user/m", token="s3cr3t-token")
    text = str(caught.value) + "\n".join(r.getMessage() for r in caplog.records)
    assert "s3cr3t-token" not in text and planted not in text


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


def test_link_outside_the_folder_is_not_published(hub: FakeHub, folder: Path) -> None:
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "notes.txt").symlink_to(folder.parent / "secret.txt")
    with pytest.raises(UsageError, match="notes.txt is a link to .*secret.txt"):
        push_folder(folder, "user/m")
    assert hub.requests == []


def test_a_snapshot_of_the_cache_is_published_through_its_links(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / "0a1b"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    for directory in (blob.parent, snapshot):
        directory.mkdir(parents=True)
    blob.write_text('{"model_type": "bert"}')
    (snapshot / "config.json").symlink_to("../../blobs/0a1b")
    push_folder(snapshot, "user/m")
    assert set(hub.repo("user/m").at("main").files) == {"config.json"}
