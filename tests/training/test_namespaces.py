"""Processes on machines with separate addresses: network namespaces on a bridge."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import machines
from tests.training.conftest import losses
from tests.training.test_distributed_processes import OF_OBJECTIVE, SCRIPTS

# tests/launch/test_jobset_run.py runs two pods of the JobSet this way in the default suite.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def root() -> None:
    if reason := machines.missing_requirements():
        pytest.skip(reason)


@pytest.fixture
def on(flags, tmp_path: Path) -> Callable[..., list]:
    """Starts a run with one process on each of these machines."""

    def start(
        all_machines: machines.Machines, objective: str, devices: int, **options: object
    ) -> list:
        command = [sys.executable, str(SCRIPTS / OF_OBJECTIVE[objective])]
        command += flags("several", objective, **options)
        return [
            machines.start(
                [*all_machines.command_prefix(index), *command],
                machines.environment(
                    tmp_path / "modules",
                    devices,
                    COORDINATOR_ADDRESS="node0:1234",
                    NUM_PROCESSES=len(all_machines.names),
                    PROCESS_ID=index,
                ),
            )
            for index in range(len(all_machines.names))
        ]

    return start


@pytest.mark.parametrize(
    ("objective", "count", "devices", "mesh"),
    [
        ("mlm", 2, 1, "data=2"),
        ("mlm", 4, 1, "data=2,fsdp=2"),
        ("clm", 2, 2, "data=2,tensor=2"),
    ],
)
def test_separate_network_namespaces_form_one_run(
    on, train, tmp_path, objective, count, devices, mesh
):
    options = {"mesh": mesh, "max_steps": 4, "save_steps": 2, "heartbeat_timeout": 600}
    with machines.Machines([f"node{index}" for index in range(count)]) as all_machines:
        machines.wait_for_all(on(all_machines, objective, devices, **options), 0)
    train("one", devices=count * devices, objective=objective, **options)
    first, several = losses(tmp_path / "one"), losses(tmp_path / "several")
    assert first.keys() == several.keys()
    assert max(abs(first[step] - several[step]) for step in first) < 1e-5
    results = [
        json.loads((tmp_path / name / "eval_results.json").read_text())["eval_loss"]
        for name in ("one", "several")
    ]
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def test_a_coordinator_on_a_machine_that_is_off(on, tmp_path):
    with machines.Machines(["node0", "node1"]) as all_machines:
        running = on(all_machines, "mlm", 1, coordinator_timeout=4)
        running[0].kill()
        texts = machines.wait_for_all(running[1:], 1, within=120)
        running[0].communicate()
    assert "the coordinator at node0:1234 did not answer within 4 s" in texts[0]
