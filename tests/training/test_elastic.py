"""A run resumes with other devices, another mesh and another number of processes.

In all cases its steps train on the same rows as in an uninterrupted run, without repetition or
omission, and its losses are the same.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hfseq.cli.launch import free_port
from hfseq.training.checkpointer import Checkpointer
from tests.support import machines, recording_run
from tests.training.conftest import losses

OPTIONS = {
    "save_steps": 2,
    "do_train": True,
    "lr_scheduler_type": "constant_with_warmup",
    "save_total_limit": 100,
}
RUN = machines.ROOT / "tests" / "support" / "recording_run.py"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict]]]:
    """A function that returns the notes under a name. Runs in this process use "here"."""
    from hfseq.training import loader

    for name in ("make_batch", "batches"):  # put back at the end
        monkeypatch.setattr(loader.Loader, name, getattr(loader.Loader, name))
    recording_run.record(tmp_path / "here.notes")
    yield lambda name: [
        json.loads(line) for line in (tmp_path / f"{name}.notes").read_text().splitlines()
    ]


@pytest.fixture
def processes(flags, tmp_path) -> Callable[..., list]:
    """Starts a run in several processes with several devices each; `output` names the notes."""

    def start(output: str, count: int, devices: int, **options: object) -> list:
        arguments = flags(output, **OPTIONS | options)
        address = f"localhost:{free_port()}"
        return [
            machines.start(
                [sys.executable, str(RUN), str(tmp_path / f"{output}.notes"), "mlm", *arguments],
                machines.environment(
                    tmp_path / "modules",
                    devices,
                    COORDINATOR_ADDRESS=address,
                    NUM_PROCESSES=count,
                    PROCESS_ID=number,
                ),
            )
            for number in range(count)
        ]

    return start


def of_line(line: dict, rows: list[str]) -> list[str]:
    """The rows of a whole batch that the process of a line reads."""
    return [rows[position] for position in line["positions"]]


def assert_same_losses(reference_folder: Path, other: Path) -> None:
    first, second = losses(reference_folder), losses(other)
    assert first.keys() == second.keys()
    assert max(abs(first[step] - second[step]) for step in first) < 1e-5


@pytest.mark.slow
def test_run_resumes_on_other_meshes_with_the_same_rows(train, notes, tmp_path):
    train("whole", devices=1, max_steps=6, **OPTIONS)
    uninterrupted = notes("here")
    (tmp_path / "here.notes").unlink()
    meshes = ((1, "data=1"), (2, "data=2"), (2, "fsdp=2"))
    for (devices, mesh), until in zip(meshes, (2, 4, 6), strict=True):
        loop = train("parts", devices=devices, mesh=mesh, max_steps=until, **OPTIONS)
        assert loop.start_step == until - 2
    parts = notes("here")
    assert [line["step"] for line in parts] == list(range(6))  # each once, in order
    assert [line["rows"] for line in parts] == [line["rows"] for line in uninterrupted]
    assert_same_losses(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow  # by default test_a_killed_process_ends_the_others_soon, and test_kill.py
def test_killed_worker_ends_the_run_which_resumes_elsewhere(train, notes, processes, tmp_path):
    options = OPTIONS | {"save_steps": 40}
    running = processes("parts", 2, 1, **options, max_steps=4000, logging_steps=1)
    log, end = tmp_path / "parts" / "metrics.jsonl", time.monotonic() + 600
    # Between two saves. While it is saving, a process would wait for the heartbeat timeout.
    while not log.exists() or max(losses(log.parent), default=0) < 45:
        assert time.monotonic() < end and not any(p.poll() is not None for p in running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGKILL)
    texts = machines.wait_for_all(running, 1, -signal.SIGKILL, within=120)
    assert "the connection to another process was lost" in texts[0]

    notes_before = notes("parts")
    last = Checkpointer(tmp_path / "parts", limit=None).steps()[-1]
    steps = last + 12
    loop = train("parts", devices=1, max_steps=steps, **options)
    assert loop.start_step == last
    notes_after = notes("here")
    (tmp_path / "here.notes").unlink()
    train("whole", devices=1, max_steps=steps, **options)
    uninterrupted = {line["step"]: line["rows"] for line in notes("here")}
    # The checkpoint contains the steps below `last`. The resumed run starts with that one.
    assert [line["step"] for line in notes_after] == list(range(last, steps))
    for line in notes_before + notes_after:
        if line["step"] < steps:
            assert line["rows"] == of_line(line, uninterrupted[line["step"]])
    for process in (0, 1):  # each process reads its half of each batch once
        lines = [line for line in notes_before if line["process"] == process]
        assert [line["step"] for line in lines] == list(range(len(lines))) and len(lines) >= last
        half = list(range(8 * process, 8 * process + 8))
        assert all(line["positions"] == half for line in lines)
    assert_same_losses(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_run_resumes_between_devices_and_processes(train, notes, processes, tmp_path):
    train("whole", devices=1, max_steps=10, **OPTIONS)
    uninterrupted = [line["rows"] for line in notes("here")]
    (tmp_path / "here.notes").unlink()
    train("parts", devices=2, mesh="data=2", max_steps=2, **OPTIONS)
    machines.wait_for_all(processes("parts", 2, 1, max_steps=4, mesh="data=2"), 0)
    machines.wait_for_all(processes("parts", 2, 2, max_steps=6, mesh="data=2,fsdp=2"), 0)
    machines.wait_for_all(processes("parts", 4, 1, max_steps=8, mesh="fsdp=4"), 0)
    train("parts", devices=2, mesh="fsdp=2", max_steps=10, **OPTIONS)
    inside = notes("here")
    assert [line["step"] for line in inside] == [0, 1, 8, 9]
    for process in range(4):
        observed_rows = [line for line in notes("parts") if line["process"] == process]
        steps = range(2, 8) if process < 2 else range(6, 8)
        assert [line["step"] for line in observed_rows] == list(steps)
        for line in observed_rows:
            assert line["rows"] == of_line(line, uninterrupted[line["step"]])
    for step in range(2, 8):  # together, the processes read each row of a batch once
        read = [line["positions"] for line in notes("parts") if line["step"] == step]
        assert sorted(position for part in read for position in part) == list(range(16))
    assert [line["rows"] for line in inside] == [uninterrupted[step] for step in (0, 1, 8, 9)]
    assert_same_losses(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_every_row_of_an_epoch_is_read_once_through_a_change(train, notes, tmp_path):
    """In a whole epoch, all parts together train on each row of the corpus once."""
    first = train("parts", devices=1, max_steps=2, **OPTIONS)
    epoch = len(first.run.data.train)
    train("parts", devices=4, mesh="data=2,tensor=2", max_steps=epoch, **OPTIONS)
    read = [digest for line in notes("here") for digest in line["rows"]]
    rows = len(first.run.data.train.rows)
    assert len(set(read[:rows])) == rows  # beyond: the rows that fill up the last batch
