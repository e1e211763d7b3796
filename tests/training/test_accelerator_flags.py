"""XLA flags for accelerators: their variables, and that they are tested before they are set."""

from __future__ import annotations

import json
import logging

import pytest

from hfseq import cli
from hfseq.errors import UsageError
from hfseq.training import accelerator_flags, aot
from hfseq.training.arguments import parse

GONE = "xla_gpu_enable_async_collectives=true"  # XLA once had it


@pytest.fixture
def environment(monkeypatch):
    """Two GPUs, jax before its start, and variables without flags."""
    monkeypatch.setattr(aot, "jax_has_started", lambda: False)
    monkeypatch.setattr(accelerator_flags, "local_accelerator", lambda: "cuda")
    monkeypatch.setattr(accelerator_flags, "local_device_count", lambda: 2)
    for name in (accelerator_flags.XLA_VARIABLE, accelerator_flags.LIBTPU_VARIABLE):
        monkeypatch.setenv(name, "")
    return accelerator_flags.current_flags


@pytest.fixture
def knows_all_but(monkeypatch):
    """Replaces tests of flags: the given flags fail, without a process."""

    def install(*unknown: str) -> None:
        def trial(variable: str, flags: list[str]) -> str:
            return next((f"no {flag}" for flag in flags if flag[2:] in unknown), "")

        monkeypatch.setattr(accelerator_flags, "try_flags", trial)

    return install


def test_no_flags_are_set_by_default(environment):
    accelerator_flags.apply_flags(
        parse(["--output_dir=x"], objective="mlm").training.accelerator_flags
    )
    assert environment() == {}


@pytest.mark.parametrize("value", ["recomended", "", "--lr=1", "xla_gpu_deterministic_ops=true x"])
def test_invalid_flags_are_usage_errors(value):
    with pytest.raises(UsageError, match="XLA flags.*recommended, none"):
        parse(["--output_dir=x", f"--accelerator_flags={value}"], objective="mlm")


def test_recommended_flags_follow_existing_flags(environment, knows_all_but, monkeypatch):
    knows_all_but()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    accelerator_flags.apply_flags("recommended")
    argument_list = [f"--{flag}" for flag in accelerator_flags.GPU_FLAGS]
    assert environment() == {
        "XLA_FLAGS": " ".join(["--xla_gpu_deterministic_ops=true", *argument_list])
    }
    accelerator_flags.apply_flags("recommended")  # they are there
    assert environment()["XLA_FLAGS"].count(argument_list[0]) == 1


def test_unknown_recommended_flag_is_skipped_with_a_message(environment, knows_all_but, caplog):
    knows_all_but(accelerator_flags.GPU_FLAGS[1])
    with caplog.at_level(logging.INFO, "hfseq"):
        accelerator_flags.apply_flags("recommended")
    flags = environment()["XLA_FLAGS"].split()
    assert flags == [
        f"--{f}" for f in accelerator_flags.GPU_FLAGS if f != accelerator_flags.GPU_FLAGS[1]
    ]
    assert f"skipping --{accelerator_flags.GPU_FLAGS[1]}" in caplog.text


def test_tpu_flags_are_set_in_libtpu_init_args(environment, knows_all_but):
    knows_all_but()
    accelerator_flags.apply_flags(f"{accelerator_flags.TPU_FLAGS[3]} --xla_dump_to=there")
    assert environment() == {
        "LIBTPU_INIT_ARGS": f"--{accelerator_flags.TPU_FLAGS[3]}",
        "XLA_FLAGS": "--xla_dump_to=there",
    }


@pytest.mark.parametrize(("platform", "several"), [("cuda", False), ("", True), ("tpu", False)])
def test_nothing_is_recommended_without_several_accelerators(platform, several):
    assert accelerator_flags.recommended_flags(platform, several) == ()


def test_a_flag_that_xla_does_not_know_is_one_line_before_jax_starts(environment):
    with pytest.raises(UsageError, match="(?i)unknown flag.*async_collectives") as raised:
        accelerator_flags.apply_flags(f"xla_gpu_deterministic_ops=true {GONE}")
    assert "\n" not in str(raised.value) and environment() == {}
    assert accelerator_flags.try_flags("XLA_FLAGS", ["--xla_gpu_deterministic_ops=true"]) == ""


def test_a_jax_that_has_started_takes_no_flags(environment, monkeypatch):
    monkeypatch.setattr(aot, "jax_has_started", lambda: True)
    with pytest.raises(UsageError, match="jax has started.*XLA_FLAGS='--xla_gpu_auto"):
        accelerator_flags.apply_flags("xla_gpu_autotune_level=0")


@pytest.mark.slow
@pytest.mark.parametrize("flag", [*accelerator_flags.GPU_FLAGS, *accelerator_flags.TPU_FLAGS])
def test_recommended_flags_exist(flag):
    variable = accelerator_flags.variable_for(flag)
    if variable == accelerator_flags.LIBTPU_VARIABLE and (reason := aot.unavailable_reason("v5e")):
        pytest.skip(reason)
    assert accelerator_flags.try_flags(variable, [f"--{flag}"]) == ""


@pytest.mark.slow
def test_an_unknown_flag_of_tpus_is_one_line_too():
    if reason := aot.unavailable_reason("v5e"):
        pytest.skip(reason)
    assert "'xla_tpu_x'" in accelerator_flags.try_flags("LIBTPU_INIT_ARGS", ["--xla_tpu_x=1"])


def test_env_lists_set_and_recommended_flags(environment, monkeypatch, capsys):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=1")
    assert cli.main(["env", "--json", "--no_devices"]) == 0
    assert json.loads(capsys.readouterr().out)["accelerator_flags"] == {
        "set": {"LIBTPU_INIT_ARGS": "--xla_tpu_x=1"},
        "recommended": list(accelerator_flags.GPU_FLAGS),
    }
    assert cli.main(["env", "--no_devices"]) == 0
    out = capsys.readouterr().out
    assert (
        "LIBTPU_INIT_ARGS" in out
        and "flags to try" in out
        and accelerator_flags.GPU_FLAGS[0] in out
    )
