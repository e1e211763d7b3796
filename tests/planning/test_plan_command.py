"""The command ``hfseq plan``: its output and its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from hfseq import cli
from tests.planning.conftest import GPT2

TINY = ["plan", "--config", "gpt2", "--config_overrides", GPT2, "--length", "16"]


def plan(capsys, *flags: str, code: int = 0) -> tuple[str, str]:
    """Runs the command without compiling; returns its output and its errors."""
    assert cli.main([*TINY, "--no_compile", *flags]) == code
    out, err = capsys.readouterr()
    return out, " ".join(err.split())


def test_the_text_answers_every_question(capsys):
    out, _ = plan(capsys, "--devices", "h200:64", "--mesh", "data=8,fsdp=8", "--tokens", "1e9")
    for answer in (
        *("18.1 k parameters", "64 x h200", "512 rows", "optimizer state (adamw)", "gradients"),
        *("without gradient checkpointing", "with gradient checkpointing", "all-gather"),
        *("reduce-scatter", "FLOP per step", "MFU of 40%", "largest batch", "days", "Not compiled"),
    ):
        assert answer in out, out
    assert "no communication" not in out
    assert "no communication" in plan(capsys, "--devices", "h200")[0]


def test_flags_of_the_training_script_may_follow(capsys):
    flags = ("--devices", "h200:8", "--mesh", "fsdp=8", "--json")
    script = ("--optim=adafactor", "--max_grad_norm=1", "--attn_implementation=explicit")
    run = json.loads(plan(capsys, *flags, "--", *script)[0])["run"]
    assert (run["optimizer"], run["attention"]) == ("adafactor", "explicit")


@pytest.mark.slow
def test_recomputing_keeps_less_and_a_second_micro_batch_keeps_no_more(capsys):
    base, _ = plan(capsys, "--devices", "h200:8", "--json")
    doubled, _ = plan(capsys, "--devices", "h200:8", "--json", "--gradient_accumulation_steps", "2")
    plain, two = json.loads(base), json.loads(doubled)
    assert plain["activations"]["recomputed"] < plain["activations"]["kept"]
    assert two["activations"] == plain["activations"]
    assert two["time"]["flops"] == 2 * plain["time"]["flops"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "h2000:8"], "'h2000'; did you mean 'h200'? (known: b200, h200"),
        (["--devices", "h200:none"], "--devices h200:none: "),
        (["--devices", "h200:64", "--mesh", "data=8"], "describes 8 devices, but there are 64"),
        (["--devices", "h200:3", "--mesh", "tensor=3"], "does not divide the 4 attention heads"),
        (["--devices", "h200:5", "--mesh", "fsdp=5"], "of size 32 is not divisible by fsdp=5"),
        (["--devices", "h200:3", "--mesh", "sequence=3"], "a multiple of 3"),
        (["--devices", "h200:8", "--config", "gpt-2"], "did you mean 'gpt2'?"),
        (["--devices", "h200:8", "--length", "64"], "64 exceeds the "),
        (["--devices", "h200:8", "--objective", "clmm"], "cannot be planned; did you mean 'clm'?"),
        (["--devices", "h200", "--config", "bert", "--objective", "sop", "--length", "4",
          "--config_overrides", ""], "of --objective sop. Use at least 5"),
        (["--devices", "h200:8", "--global_batch_size", "12"], "a multiple of 8"),
        (["--devices", "h200:8", "--mfu", "40"], "--mfu 40.0"),
        (["--devices", "h200:8", "--optim", "adamm"], "adam"),
        (["--devices", "h200:8", "--batch", "0"], "at least 1"),
    ],
)  # fmt: skip
def test_impossible_plans_are_usage_errors(capsys, flags, message):
    _, errors = plan(capsys, *flags, code=2)
    assert errors.startswith("error: ") and message in errors


def test_run_out_of_memory_plan_suggests_changes(capsys):
    out, errors = plan(
        capsys, "--devices", "h200:8", "--memory_gb", "0.002", "--batch", "200", code=1
    )
    assert "too much" in out and "too much" in errors
    assert re.search(r"--per_device_train_batch_size \d", errors)
    assert "--gradient_accumulation_steps" in errors
    out, errors = plan(capsys, "--devices", "h200:8", "--memory_gb", "0.0001", code=1)
    assert "largest batch: 0 rows" in out
    assert "single row" in errors and "--gradient_checkpointing" in errors


@pytest.mark.slow
def test_preferences_are_planned_with_the_memory_of_the_reference_model(capsys):
    flags = ("--devices", "h200:2", "--json", "--objective", "dpo")
    full, adapter, stored = (
        json.loads(plan(capsys, *flags, *more)[0])
        for more in ((), ("--", "--use_peft"), ("--", "--precompute_ref_log_probs"))
    )
    assert full["bytes"]["auxiliary"] == full["bytes"]["parameters"]
    assert adapter["bytes"]["auxiliary"]["all"] == stored["bytes"]["auxiliary"]["all"] == 0
    assert full["fit"]["needed"] > stored["fit"]["needed"]
    # Each row has two answers, and the reference model adds a forward pass.
    clm = json.loads(plan(capsys, *flags[:-1], "clm")[0])
    assert full["time"]["tokens"] == 2 * clm["time"]["tokens"]
    assert full["time"]["flops"] == pytest.approx(2 * clm["time"]["flops"] * 4 / 3)
    text, _ = plan(capsys, "--devices", "h200:2", "--objective", "kto")
    assert "reference model or teacher" in text


@pytest.mark.slow
def test_sixty_four_devices_are_compiled_for_and_no_accelerator_is_looked_for():
    command = [sys.executable, "-m", "hfseq.cli", *TINY, "--devices", "h200:64", "--json"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}  # not available
    process = subprocess.run(
        [*command, "--mesh", "data=8,fsdp=8"], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["compiled"]["problem"] == "" and report["fit"]["source"] == "compiled"
    programs = report["compiled"]["programs"]
    assert [(p["rows"], p["remat"]) for p in programs] == [(8, False), (16, False), (8, True)]
    parts = report["bytes"]
    state = sum(parts[name]["device"] for name in ("parameters", "optimizer", "other", "batch"))
    assert programs[0]["arguments"] == pytest.approx(state, rel=0.05)
    assert report["exchange"]["compiled"]


@pytest.mark.slow
def test_compilation_timeout_falls_back_to_the_estimate(capsys):
    assert cli.main([*TINY, "--devices", "h200:8", "--compile_timeout", "0.1"]) == 0
    assert "--compile_timeout 0.1 seconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": 1e308}, "cannot read the configuration of .*hidden_act"),
        ({"vocab_size": 10**30}, "is not valid: vocab_size is 1e[+]30"),
        ({"num_attention_heads": 7}, "is not valid: .*7"),
        ({"model_type": ["bert"]}, "cannot read the configuration of"),
        ({"auto_map": {"AutoConfig": "a.B"}, "model_type": "mine"}, "is not run unless you trust"),
    ],
)
def test_a_configuration_that_describes_no_model_is_one_line(tmp_path, capsys, values, message):
    from transformers import BertConfig

    stored = {**BertConfig(num_hidden_layers=1).to_dict(), **values}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    words = ["plan", "--config", str(tmp_path), "--devices", "h200", "--no_compile"]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.startswith("error: ") and error.count("\n") == 1
