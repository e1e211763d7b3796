"""Invalid runs are rejected before training, in bounded time, with a solution."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hfseq.cli.launch import free_port
from hfseq.errors import HfseqError, UsageError
from hfseq.training import processes
from hfseq.training.arguments import ProcessArguments, parse
from tests.support import machines
from tests.training.test_distributed import no_cluster, store  # noqa: F401
from tests.training.test_distributed_processes import SCRIPTS, Processes

# -- a port in use ---------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_port_in_use_is_named_at_once(host, shared):
    with socket.socket() as other:
        if shared:  # as gRPC does, and would share the port with another run's coordinator
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((host, 0))
        other.listen()
        address = f"localhost:{other.getsockname()[1]}"
        mine = ProcessArguments(coordinator_address=address, num_processes=2, process_id=0)
        with pytest.raises(HfseqError, match=f"port .* of --coordinator_address {address} is in"):
            processes.join(mine)


def test_free_port_remains_free(monkeypatch):
    processes.check_port(f"localhost:{(port := free_port())}")
    with socket.socket() as later:
        later.bind(("localhost", port))
        later.listen()
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"10.0.0.1:{port}")
        processes.check_port(f"localhost:{port}")  # another interface, which jax has to try


# -- Kubernetes ------------------------------------------------------------------------------------


def test_a_pod_is_numbered_by_its_completion_index(monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert not ProcessArguments().is_distributed  # an indexed Job of runs that are one process each
    monkeypatch.setenv("COORDINATOR_ADDRESS", "hfseq-worker-0-0.hfseq:1234")
    monkeypatch.setenv("NUM_PROCESSES", "4")
    cluster = processes.resolve_cluster(ProcessArguments())
    assert cluster == ("hfseq-worker-0-0.hfseq:1234", 4, 3)
    monkeypatch.setenv("PROCESS_ID", "1")  # flags take precedence
    assert processes.resolve_cluster(ProcessArguments())[2] == 1
    monkeypatch.delenv("PROCESS_ID")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "x")
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX in the environment is 'x'"):
        processes.resolve_cluster(ProcessArguments())


def test_missing_pod_addresses_error_names_the_setting(monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with (
        pytest.warns(UserWarning, match="kubernetes"),
        pytest.raises(
            UsageError, match=r"NUM_PROCESSES in the manifest \(as scripts/launch/jobset"
        ),
    ):
        processes.resolve_cluster(ProcessArguments(distributed=True))


def test_wrong_address_error_names_its_source(monkeypatch):
    monkeypatch.setenv("COORDINATOR_ADDRESS", "node0")
    with pytest.raises(UsageError, match="COORDINATOR_ADDRESS in the environment, node0: "):
        assert ProcessArguments().address


# -- different code --------------------------------------------------------------------------------


def test_code_digest_does_not_depend_on_location(tmp_path, monkeypatch):
    for name, text in (("a", "x = 1\n"), ("b", "x = 1\n"), ("c", "x = 2\n")):
        (tmp_path / name / "part").mkdir(parents=True)
        (tmp_path / name / "part" / "m.py").write_text(text)
    first, same, other = (
        processes.files_digest(tmp_path / name, (tmp_path / name).rglob("*.py")) for name in "abc"
    )
    assert first == same != other
    (tmp_path / "b" / "part" / "m.py").rename(tmp_path / "b" / "part" / "n.py")
    assert first != processes.files_digest(tmp_path / "b", (tmp_path / "b").rglob("*.py"))
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "run_mlm_flax.py")])
    digests = processes.program_digests([str(tmp_path / "a" / "part" / "m.py"), "absent.py"])
    assert digests.keys() >= {
        "the code of hfseq",
        "the code of hfseq_plugins",
        "the code of run_mlm_flax.py",
        "the code of m.py",
    }
    assert "the code of absent.py" not in digests


def test_other_code_in_one_process_is_refused(store, monkeypatch):  # noqa: F811
    monkeypatch.setattr(processes, "program_digests", lambda _: {"the code of hfseq": "0a1b"})
    fake_store = store(1)
    fake_store.values["hfseq/agree/0/result"] = "[]"
    processes.check_flags_agree(parse(["--output_dir=x"]).as_dict(), "mlm")
    del fake_store.values["hfseq/agree/0/result"]
    store(0)
    monkeypatch.setattr(processes, "program_digests", lambda _: {"the code of hfseq": "2c3d"})
    text = 'the code of hfseq is "2c3d" in process 0 and "0a1b" in process 1: .* same code'
    with pytest.raises(UsageError, match=text):
        processes.check_flags_agree(parse(["--output_dir=x"]).as_dict(), "mlm")


@pytest.mark.slow
def test_two_checkouts_end_both_processes(flags, tmp_path):
    copy = tmp_path / "copy"
    for name in ("hfseq", "plugins", "scripts"):
        shutil.copytree(machines.ROOT / name, copy / name)
    with (copy / "hfseq" / "keys.py").open("a") as file:
        file.write("# changed\n")
    address = f"localhost:{free_port()}"
    running = []
    for number, root in enumerate((machines.ROOT, copy)):
        env = machines.environment(
            tmp_path / "m", COORDINATOR_ADDRESS=address, NUM_PROCESSES=2, PROCESS_ID=number
        )
        env["PYTHONPATH"] = env["PYTHONPATH"].replace(str(machines.ROOT), str(root))
        script = root / "scripts" / "run_mlm_flax.py"
        running.append(machines.start([sys.executable, str(script), *flags()], env))
    for text in machines.wait_for_all(running, 2, within=300):
        assert "the code of hfseq is " in text and "and the same code" in text


# -- a read-only volume ----------------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path):
    """A folder that is mounted read-only, so that even root cannot write it."""
    folder = tmp_path / "volume"
    folder.mkdir()
    process = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "hfseq-test", str(folder)])
    if process.returncode:
        pytest.skip("mounting a volume needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("name", [".", "run", "run/of/mine"])
def test_read_only_volume_is_rejected_before_loading(train, read_only, name):
    text = "cannot be written on .*Read-only file system.*Mount the volume as writable"
    with pytest.raises(UsageError, match=text) as caught:
        # neither of the files exists, and neither is read
        train(output_dir=read_only / name, tokenizer_name="absent", train_file="absent.jsonl")
    assert caught.value.exit_code == 2


def test_separate_checkpoint_volume_is_checked(tmp_path):
    folder = tmp_path / "run"
    processes.check_writable(folder / "deeper")
    assert not folder.exists()  # nothing is left behind
    folder.mkdir()
    process = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "hfseq-test", str(tmp_path / "run")],
        stderr=subprocess.DEVNULL,
    )
    if process.returncode:
        pytest.skip("mounting a volume needs root")
    subprocess.run(["umount", str(folder)], check=True)
    (folder / "checkpoints").mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "hfseq-test", str(folder / "checkpoints")], check=True
    )
    try:
        with pytest.raises(UsageError, match="Read-only file system: .*checkpoints"):
            processes.check_writable(folder)
    finally:
        subprocess.run(["umount", str(folder / "checkpoints")], check=True)


@pytest.mark.slow
def test_a_volume_that_one_machine_has_read_only_ends_all(flags, read_only):
    """Process 1 has another folder at the path, mounted read-only in its mount namespace."""
    shared = read_only.parent / "run"
    shared.mkdir()
    argument_list = [*flags(), "--heartbeat_timeout=600"]
    address = f"localhost:{free_port()}"
    hidden = f'mount --bind {read_only} {shared} && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", hidden, "_"]
    running = [
        machines.start(
            [
                *(prefix if number else []),
                sys.executable,
                str(SCRIPTS / "run_mlm_flax.py"),
                *argument_list,
            ],
            machines.environment(
                read_only.parent / "m",
                COORDINATOR_ADDRESS=address,
                NUM_PROCESSES=2,
                PROCESS_ID=number,
            ),
        )
        for number in (0, 1)
    ]
    for text in machines.wait_for_all(running, 2, within=300):
        assert "cannot be written on" in text and "Read-only file system" in text


# -- a mesh larger than the devices ----------------------------------------------------------------


@pytest.mark.slow
def test_a_mesh_larger_than_all_processes_have(flags):
    for text in Processes([*flags(mesh="data=2,fsdp=4"), "--heartbeat_timeout=600"], 2).ends(2):
        assert "--mesh data=2,fsdp=4 describes 8 devices, but there are 2" in text


# -- another program at the address of the coordinator --------------------------------------------


@pytest.mark.slow
def test_silent_port_times_out(flags, tmp_path):
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        silent.listen()
        env = machines.environment(
            tmp_path / "m",
            COORDINATOR_ADDRESS=f"localhost:{silent.getsockname()[1]}",
            NUM_PROCESSES=2,
            PROCESS_ID=1,
        )
        command = [sys.executable, str(SCRIPTS / "run_mlm_flax.py"), *flags()]
        running = machines.start([*command, "--coordinator_timeout=5"], env)
        (text,) = machines.wait_for_all([running], 1, within=200)
    assert "not all 2 processes connected to the coordinator at localhost:" in text
