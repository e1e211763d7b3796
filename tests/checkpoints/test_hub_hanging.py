"""Timeouts for stalled transfers to the Hub and to remote directories."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfseq import cli
from hfseq.checkpoints import hub as hub_module
from hfseq.checkpoints import network
from hfseq.checkpoints.hub import BackgroundPusher, push_folder, resolve_file
from hfseq.checkpoints.storage import Workspace
from hfseq.errors import CheckpointError
from tests.support.fake_hub import FakeHub
from tests.support.hub_fixture import FastClock
from tests.support.pushed_folder import commits, push_in_subprocess
from tests.support.tiers import first

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.skipif(
        not Path("/proc/self/fd").is_dir(), reason="only Linux reports the traffic of connections"
    ),
]
COMMIT = "/commit/main"


@pytest.fixture
def folder(model_folder: Path) -> Path:
    return model_folder


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "stall_timeout", 0.3)


def test_traffic_excludes_connections_between_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "_ignored", frozenset())
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client, server.accept()[0] as other:
            clock = iter(range(100))
            monkeypatch.setattr(network.time, "monotonic", lambda: next(clock))
            traffic = network.TrafficMonitor()

            def silence_after(size: int) -> float:
                client.sendall(b"x" * size)
                received = 0
                while received < size:
                    received += len(other.recv(size))
                return traffic.idle_seconds()

            assert [silence_after(size) for size in (10, 10)] == [1, 2]  # a trickling response
            assert silence_after(network.MIN_PROGRESS_BYTES) == 1
            network.ignore_open_connections()
            assert [silence_after(network.MIN_PROGRESS_BYTES) for _ in range(2)] == [2, 3]


@pytest.mark.parametrize(
    ("method", "path"),
    first(
        [
            ("POST", "/api/repos/create"),
            ("GET", "/api/models/user/m$"),  # explicitly without timeouts
            ("POST", "/preupload/"),
            ("PUT", "/lfs-upload/"),
            ("POST", COMMIT),
        ],
        ("GET", "/api/models/user/m$"),
        ("PUT", "/lfs-upload/"),
    ),
)
def test_unanswered_request_is_repeated(
    hub: FakeHub,
    folder: Path,
    no_waiting: FastClock,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
) -> None:
    # Long enough for an attempt on a busy machine.
    monkeypatch.setattr(hub_module, "ATTEMPT_TIMEOUT", 1.5)
    monkeypatch.setattr(network, "stall_timeout", 30.0)
    fault = hub.fail(method, path, action="hang")
    push_folder(folder, "user/m", private=True)
    assert fault.met.is_set() and len(commits(hub)) == 1


@pytest.mark.parametrize("action", ["hang", "drip"])
def test_last_push_is_abandoned_without_traffic(
    hub: FakeHub, folder: Path, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub.fail("POST", COMMIT, times=99, action=action, seconds=0.05)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("last")
    left = pusher.finish()
    assert left and "no network traffic for 0.3 s" in left and pusher.stalled
    assert left.endswith(f"hfseq push {folder} --hub_model_id user/m")
    # The client may log retries of an abandoned thread.
    assert not [record for record in caplog.records if record.name.startswith("hfseq")]


def test_a_slow_large_upload_is_not_cut(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "model.safetensors").write_bytes(os.urandom(3_000_000))
    slow = hub.fail("PUT", "/lfs-upload/", action="slow", seconds=0.04)
    # On a busy machine, real pauses can be of any length. Here, each of 30 pieces takes 50 ms.
    clock = SimpleNamespace(monotonic=lambda: 0.05 * slow.pieces)
    monkeypatch.setattr(network, "time", clock)
    pusher = BackgroundPusher(folder, "user/m")
    pusher.push("last")
    assert pusher.finish(timeout=0.6) is None and slow.met.is_set()
    assert commits(hub)[0] == "last"


def test_an_interrupt_abandons_the_transfer_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: network.TrafficMonitor) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(network.TrafficMonitor, "idle_seconds", interrupt)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        network.wait_for_transfer(thread, 0.1, network.TrafficMonitor())
    assert thread in network._LEFT
    end.set()


def test_process_exits_when_a_multipart_upload_hangs(hub: FakeHub, folder: Path) -> None:
    """Uploads of several files use a thread pool, for which Python would wait at exit."""
    (folder / "flax_model.msgpack").write_bytes(b"others" * 1000)
    hub.multipart_over, hub.part_size = 1000, 4000
    hub.fail("PUT", "/lfs-part/.*/2", action="cut")
    hung = hub.fail("PUT", "/lfs-part/.*/2", times=99, action="hang")
    assert "no network traffic" in push_in_subprocess(folder, timeout=1.5)
    assert hung.met.is_set() and not hub.release.is_set()


def test_hfseq_push_error_names_the_command_to_continue(
    hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail("POST", COMMIT, action="hang")
    command = ["push", str(folder), "--hub_model_id", "user/m"]
    assert cli.main([*command, "--hub_timeout", "0.2"]) == 1
    error = capsys.readouterr().err
    assert "no network traffic for 0.2 s" in error
    assert f"hfseq push {folder} --hub_model_id user/m" in error
    assert cli.main([*command, "--hub_timeout", "0"]) == 2
    assert cli.main(command) == 0


@pytest.mark.parametrize(("method", "action"), [("HEAD", "hang"), ("GET", "drip")])
def test_hanging_download_is_abandoned(
    hub: FakeHub, folder: Path, method: str, action: str
) -> None:
    hub.seed("user/m", folder)
    hub.fail(method, "/resolve/", times=99, action=action, seconds=0.05)
    with pytest.raises(CheckpointError, match="no network traffic.*same command.*resume"):
        resolve_file("user/m", "config.json")


# -- remote directories


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """In-memory storage whose uploads and downloads wait for this event."""
    from fsspec.implementations.memory import MemoryFileSystem

    release = threading.Event()

    def until_released(name: str) -> None:
        original = getattr(MemoryFileSystem, name)

        def waits(*args: object, **options: object) -> object:
            release.wait(20)
            return original(*args, **options)

        monkeypatch.setattr(MemoryFileSystem, name, waits)

    for name in ("put_file", "find"):
        until_released(name)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return release


def test_hanging_remote_directory_is_abandoned_and_writes_nothing_later(
    hanging: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace("memory://hanging/run", tmp_path / "copy")
    workspace.path.mkdir()
    (workspace.path / "config.json").write_text("{}")
    assert not workspace.push()
    assert "no network traffic" in caplog.text and "next save retries" in caplog.text
    with pytest.raises(
        CheckpointError, match="files are kept in .*copy.*same command on this machine"
    ):
        workspace.push(strict=True)
    with pytest.raises(CheckpointError, match="cannot read memory://.*same command.*resume"):
        workspace.pull()
    left = [thread for thread in threading.enumerate() if thread.name == "hfseq-transfer"]
    hanging.set()
    for thread in left:
        thread.join()
    assert workspace.push(strict=True)
    latest = workspace._fs.cat_file("/hanging/run/latest.json")
    assert workspace._id and workspace._id.encode() in latest
