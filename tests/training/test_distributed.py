"""Communication between processes, without starting any: flags, agreement, failures."""

from __future__ import annotations

import pytest

from hfseq.cli.launch import free_port
from hfseq.errors import HfseqError, UsageError
from hfseq.training import processes
from hfseq.training.arguments import ProcessArguments, parse
from hfseq.training.processes import StopSignal

CLUSTERS = (
    *("COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"),
    *("LOCAL_DEVICE_IDS", "MASTER_ADDR", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"),
)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in CLUSTERS:
        monkeypatch.delenv(name, raising=False)


class Store:
    """A replacement of the coordinator's key-value store, for one process after the other."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key, value, overwrite):
        if key in self.values and not overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_try_get(self, key):
        return self.values[key]

    def blocking_key_value_get(self, key, timeout):
        return self.values[key]

    def key_value_dir_get(self, folder):
        return [item for item in self.values.items() if item[0].startswith(folder)]


# -- flags and their sources -----------------------------------------------------------------------


def test_without_flags_a_run_is_one_process(monkeypatch):
    monkeypatch.setenv("NUM_PROCESSES", "4")  # of another program, without an address
    assert not parse(["--output_dir=x"]).processes.is_distributed
    assert processes.process_count() == 1


def test_flags_and_environment_are_equivalent(monkeypatch):
    flags = ["--coordinator_address=a:1", "--num_processes=4", "--process_id=2"]
    from_flags = parse(["--output_dir=x", *flags, "--local_device_ids=0,3"]).processes
    assert processes.resolve_cluster(from_flags) == ("a:1", 4, 2) and from_flags.devices == [0, 3]
    for name, value in (("COORDINATOR_ADDRESS", "a:1"), ("NUM_PROCESSES", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PROCESS_ID", "2")
    from_environment = ProcessArguments()
    assert from_environment.is_distributed and processes.resolve_cluster(from_environment) == (
        "a:1",
        4,
        2,
    )
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "b:2")
    monkeypatch.delenv("COORDINATOR_ADDRESS")
    assert from_environment.address == "b:2"


def test_variables_of_torchrun_are_used_without_others(monkeypatch):
    values = {"MASTER_ADDR": "a", "MASTER_PORT": "5", "WORLD_SIZE": "4", "RANK": "3"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert not ProcessArguments().is_distributed  # set by something else
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert processes.resolve_cluster(ProcessArguments()) == ("a:5", 4, 3)
    assert ProcessArguments().devices == [1]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun listens on the port
    assert processes.resolve_cluster(ProcessArguments()) == ("a:6", 4, 3)
    monkeypatch.setenv("COORDINATOR_ADDRESS", "b:1")
    flags = ProcessArguments(process_id=2, local_device_ids="0")
    assert processes.resolve_cluster(flags) == ("b:1", 4, 2) and flags.devices == [0]


def test_slurm_is_detected(monkeypatch):
    for name, value in {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    address, count, number = processes.resolve_cluster(ProcessArguments(distributed=True))
    assert address.startswith("node3:") and (count, number) == (2, 1)


def test_flags_do_not_reach_logs_and_cards():
    arguments = parse(["--output_dir=x", "--coordinator_address=a:1", "--process_id=1"])
    assert not {"process_id", "coordinator_address"} & arguments.as_dict().keys()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"coordinator_address": "a"}, "--coordinator_address a: .*host:port"),
        ({"coordinator_address": "a:1"}, "require --num_processes, --process_id"),
        ({"distributed": True}, "Slurm, Open MPI or a Kubernetes"),
        (
            {"coordinator_address": "a:1", "num_processes": 2, "process_id": 2},
            "--process_id 2 .*with --num_processes 2, use 0 to 1",
        ),
        ({"num_processes": 0}, "--num_processes 0"),
        ({"process_id": -1}, "--process_id -1"),
        ({"local_device_ids": "a"}, "--local_device_ids a"),
        ({"coordinator_timeout": 0}, "--coordinator_timeout 0"),
        ({"heartbeat_timeout": 1}, "--heartbeat_timeout 1"),
    ],
)
def test_flags_that_cannot_work(flags, text):
    with pytest.raises(UsageError, match=text):
        process_arguments = ProcessArguments(**flags)
        assert process_arguments.is_distributed
        processes.resolve_cluster(process_arguments)


def test_an_environment_that_is_not_a_number(monkeypatch):
    monkeypatch.setenv("PROCESS_ID", "first")
    with pytest.raises(UsageError, match="PROCESS_ID in the environment is 'first'"):
        processes.resolve_cluster(ProcessArguments(coordinator_address="a:1", num_processes=2))


def test_a_coordinator_that_does_not_answer():
    address = f"localhost:{free_port()}"
    with pytest.raises(HfseqError, match=f"{address} did not answer within 1 s") as caught:
        processes.join(
            ProcessArguments(
                coordinator_address=address, num_processes=2, process_id=1, coordinator_timeout=1
            )
        )
    assert caught.value.exit_code == 1


def test_one_process_of_one_needs_no_coordinator():
    cluster_flags = {"coordinator_address": f"localhost:{free_port()}", "num_processes": 1}
    processes.join(ProcessArguments(**cluster_flags, process_id=0))
    assert processes.coordination_client() is None


# -- agreement -------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch):
    """A function that makes this process the one with index `me` of two, with a common store."""
    fake_store = Store()

    def become(me: int) -> Store:
        monkeypatch.setattr(processes, "coordination_client", lambda: fake_store)
        monkeypatch.setattr(processes, "process_count", lambda: 2)
        monkeypatch.setattr(processes, "process_index", lambda: me)
        monkeypatch.setattr(processes, "_rounds", iter(range(9)))
        return fake_store

    return become


def test_differences_are_named_once_with_both_values():
    adamw = {"--optim": '"adamw"'}
    values = [{"--seed": "1", **adamw}, {"--seed": "2", **adamw}, {"--seed": "3"}]
    assert processes.differences(values) == [
        '--optim is "adamw" in process 0 and absent in process 2',
        "--seed is 1 in process 0 and 2 in process 1",
    ]


def test_processes_that_agree_go_on_and_others_end(store):
    for seed, problem in ((1, ""), (2, "--seed is 1 in process 0 and 2 in process 1")):
        fake_store = store(1)
        fake_store.values.clear()
        fake_store.values["hfseq/agree/0/result"] = "[]"
        processes.check_agreement({"--seed": seed}, "fix it")  # writes the values of process 1
        del fake_store.values["hfseq/agree/0/result"]
        store(0)
        if not problem:
            processes.check_agreement({"--seed": 1}, "fix it")
            continue
        with pytest.raises(UsageError, match=f"{problem}: fix it"):
            processes.check_agreement({"--seed": 1}, "fix it")


def test_machine_specific_values_may_differ(store, monkeypatch):
    compared = []
    monkeypatch.setattr(
        processes, "check_agreement", lambda values, advice: compared.append(values)
    )
    store(0)
    for cache, seed in (("a", 1), ("b", 1)):
        flags = ["--output_dir=x", f"--data_cache_dir={cache}", f"--seed={seed}"]
        arguments = parse([*flags, f"--process_id={seed}"])
        processes.check_flags_agree(arguments.as_dict(), "mlm")
    assert compared[0] == compared[1] and compared[0]["--seed"] == 1


def test_an_output_folder_that_is_not_shared(store, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "FILE_VISIBILITY_SECONDS", 0.2)
    fake_store = store(1)
    fake_store.values["hfseq/mark/0"] = "1 2"
    with pytest.raises(UsageError, match="is not the folder that process 0 writes"):
        processes.check_shared(tmp_path)


def test_single_process_does_not_communicate(tmp_path):
    processes.check_agreement({"--seed": 1}, "")
    processes.check_shared(tmp_path / "new")
    processes.barrier()
    with processes.main_process_first() as leads, processes.session(ProcessArguments()):
        assert leads and not (tmp_path / "new").exists()
    assert not processes.reached_stop_step(1)


# -- failures --------------------------------------------------------------------------------------


@pytest.fixture
def leaving(monkeypatch):
    """The exit codes with which this process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(processes.atexit, "register", lambda leave, code: codes.append(code))
    monkeypatch.setattr(processes, "SHUTDOWN_SECONDS", 0.1)
    monkeypatch.setattr(processes, "LOST_CONNECTION_SECONDS", 0.1)
    return codes


def test_errors_reach_other_processes_with_the_exit_code(store, leaving):
    fake_store = store(0)
    with pytest.raises(UsageError, match="bad"), processes.fail_together():
        raise UsageError("bad\nlines")
    assert leaving == [2]
    assert '"text": "process 0 on ' in fake_store.values[processes.FAILURE_KEY]
    assert ': bad", "code": 2' in fake_store.values[processes.FAILURE_KEY]


def test_broken_connection_error_names_the_process(store, leaving):
    fake_store = store(1)
    fake_store.values[processes.FAILURE_KEY] = '{"text": "process 0 on here: bad", "code": 2}'
    with pytest.raises(HfseqError, match="^process 0 on here: bad$"), processes.fail_together():
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    assert leaving == [2]


def test_other_errors_are_not_taken_for_a_broken_connection(store, leaving):
    fake_store = store(0)
    with pytest.raises(ValueError, match="^bad shape$"), processes.fail_together():
        raise ValueError("bad shape")
    assert leaving == [1] and ": bad shape" in fake_store.values[processes.FAILURE_KEY]


def test_a_broken_connection_without_a_word(store, leaving):
    store(1)
    with pytest.raises(HfseqError, match="connection to another process was lost"):  # noqa: SIM117
        with processes.fail_together():
            raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    assert leaving == [1]


def test_an_exit_that_all_agreed_on_is_not_a_failure(store, leaving):
    fake_store = store(0)
    with pytest.raises(SystemExit), processes.fail_together():
        raise SystemExit(143)
    assert leaving == [] and not fake_store.values


# -- signals ---------------------------------------------------------------------------------------


def test_a_signal_to_one_of_several_stops_at_the_step_that_is_agreed(store, monkeypatch):
    import os
    import signal

    sent = []
    monkeypatch.setattr(processes, "reached_stop_step", lambda step: step == 3 and bool(sent))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    store(1)
    original = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) is original  # jax's own
        signal.raise_signal(signal.SIGINT)
        assert sent == [signal.SIGTERM]
        assert [stop.should_stop_after(step) for step in (1, 2, 3, 4)] == [False, False, True, True]
    assert stop.received == signal.SIGINT
