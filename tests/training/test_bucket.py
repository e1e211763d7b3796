"""Runs whose output directory is a bucket, with gcsfs and an emulator of Google Cloud Storage."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hfseq.cli.launch import free_port
from tests.training.test_kill import logged

pytestmark = [pytest.mark.network, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "scripts" / "run_mlm_flax.py"
EMULATOR = """
import sys, time
from gcp_storage_emulator.server import create_server
create_server("localhost", int(sys.argv[1]), False, "bucket", data_dir=sys.argv[2]).start()
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """Starts the emulator. Returns the environment variables with which gcsfs uses it."""
    folder = tmp_path_factory.mktemp("bucket")
    packages = folder / "packages"
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", packages]
    done = subprocess.run(
        [*command, "gcsfs", "gcp-storage-emulator"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    # After the installed packages, so that these are used where both exist.
    paths = os.pathsep.join([*filter(None, sys.path), str(packages)])
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(EMULATOR), str(port), str(folder / "data")],
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    ) as emulator:
        assert emulator.stdout.readline() == "ready\n"
        yield {"PYTHONPATH": paths, "STORAGE_EMULATOR_HOST": f"http://localhost:{port}"}
        emulator.kill()


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_run_continues_on_another_machine_to_the_bit(bucket, flags, tmp_path, processes):
    options = {"max_steps": 40, "save_steps": 7, "save_total_limit": 2, "eval_strategy": "no"}

    def start(name: str, machine: str) -> list[subprocess.Popen]:
        words = flags(f"{name}{processes}", **options)
        words[0] = f"--output_dir=gs://bucket/{name}{processes}"
        # Processes of one run share the local copy of the output directory.
        environment = os.environ | bucket | {"HFSEQ_CACHE": str(tmp_path / machine)}
        environment |= {"XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
        if processes > 1:
            words += [f"--coordinator_address=localhost:{free_port()}"]
            words += [f"--num_processes={processes}"]
        return [
            subprocess.Popen(
                [sys.executable, SCRIPT, *words, *[f"--process_id={number}"] * (processes > 1)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for number in range(processes)
        ]

    def finish(running: list[subprocess.Popen]) -> str:
        outputs = [process.communicate(timeout=300)[0] for process in running]
        assert not any(process.returncode for process in running), outputs
        return outputs[0]

    def copy_of(name: str, machine: str) -> Path:
        (folder,) = (tmp_path / machine / "workspaces").glob(f"{name}{processes}-*")
        return folder

    assert "training steps 1 to 40" in finish(start("whole", "a"))
    running = start("killed", "b")
    while not list((tmp_path / "b").glob("workspaces/*/metrics.jsonl")):
        assert all(process.poll() is None for process in running)
        time.sleep(0.1)
    while logged(copy_of("killed", "b")) < 25:
        time.sleep(0.01)
    for process in running:
        process.kill()
    for process in running:
        process.communicate()
    first_step = finish(start("killed", "c")).split("training steps ")[1].split()[0]
    assert int(first_step) >= 15, "the run did not continue from the checkpoint in the bucket"
    whole, killed = copy_of("whole", "a"), copy_of("killed", "c")
    for name in ("model.safetensors", "config.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
