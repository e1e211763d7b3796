"""run_bert_flax.py: what it measures and compares, what it claims, and its mistakes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from hfseq.errors import CheckpointError, DataError, UsageError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "run_bert_flax.py"
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import harness
import inference
from inference import InferenceArguments

TINY = (
    "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,vocab_size=99,"
    "max_position_embeddings=24"
)
SMALL = {
    "config_overrides": TINY,
    "batch_size": 3,
    "max_seq_length": 8,
    "num_warmup": 1,
    "num_runs": 4,
    "precision": "bfloat16",
}


def command(*flags):
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)


@pytest.mark.slow
def test_both_precisions_alternate_and_are_compared(tmp_path, capsys):
    result = inference.run(InferenceArguments(**SMALL, json=str(tmp_path / "r.json")))
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert set(result["rows"]) == {"float32", "bfloat16"}
    for row in result["rows"].values():
        assert len(row["seconds"]) == 4
        assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["examples_per_second"] == pytest.approx(3e3 / row["p50_ms"])
        assert row["tokens_per_second"] == pytest.approx(24e3 / row["p50_ms"])
    found = result["comparison"]
    assert 0 < found["max_absolute_difference"] < 0.1 and found["min_cosine"] > 0.999
    shown, progress = capsys.readouterr()
    assert "p50 ms" in shown and "largest difference" in shown
    first, second = progress.splitlines()
    assert "3 x 8 tokens" in first and "1 warm-up and 4 timed runs in float32 and bfloat16" in first
    assert "1 warm-up and 4 timed runs will take" in second and "--time_limit" not in second


@pytest.mark.slow
def test_inputs_are_not_constant_folded():
    """The compiled run takes every parameter and input: other inputs give other outputs."""
    arguments = InferenceArguments(**SMALL)
    models, params = inference.load(arguments)
    batch = inference.make_batch(arguments, models["float32"])
    other = {**batch, "input_ids": (batch["input_ids"] + 1) % 99}
    runs = [inference.compiled(models["bfloat16"], params, b)() for b in (batch, other)]
    assert not np.allclose(*(np.asarray(run, np.float32) for run in runs))


@pytest.mark.slow
def test_matrices_cast_beforehand_give_the_same_result():
    arguments = InferenceArguments(**SMALL)
    models, params = inference.load(arguments)
    batch = inference.make_batch(arguments, models["float32"])
    direct = jax.jit(lambda p, b: models["bfloat16"](**b, params=p).last_hidden_state)
    cast = inference.compiled(models["bfloat16"], params, batch)()
    a, b = (np.asarray(found, np.float32) for found in (direct(params, batch), cast))
    assert np.allclose(a, b, atol=0.03)


@pytest.mark.slow
def test_a_trained_model_runs_on_text(trained_bert, tmp_path):
    (tmp_path / "texts.txt").write_text("A cat sat on the mat.\n\nIt was grey.\n")
    sizes = {"batch_size": 3, "max_seq_length": 8, "num_warmup": 0, "num_runs": 2}
    sizes["precision"] = "bfloat16"
    result = inference.run(
        InferenceArguments(
            model_name_or_path=str(trained_bert), text_file=str(tmp_path / "texts.txt"), **sizes
        )
    )
    assert result["model"] == {
        "class": "FlaxBertModel",
        "layers": 6,
        "width": 384,
        "parameters": 22_713_216,
        "weights": "loaded",
    }
    assert result["comparison"]["min_cosine"] > 0.999
    row = result["rows"]["bfloat16"]
    # Three rows of 8, 6 and 8 tokens, the second one padded.
    assert row["real_tokens_per_second"] == pytest.approx(row["tokens_per_second"] * 22 / 24)


def test_padding_is_not_compared():
    outputs = {"float32": np.ones((1, 2, 4)), "bfloat16": np.ones((1, 2, 4))}
    outputs["bfloat16"][0, 1] = 9
    seconds = {"float32": [2.0, 3.0, 8.0], "bfloat16": [1.0, 1.0, 2.0]}
    found = inference.compare(outputs, seconds, {"attention_mask": np.array([[1, 0]])}, ["units"])
    assert found["max_absolute_difference"] == 0 and found["min_cosine"] == 1
    assert found["speedup"] == 3


def test_no_speed_is_claimed_without_units():
    outputs = {"float32": np.ones((1, 1, 4)), "bfloat16": np.ones((1, 1, 4))}
    seconds = {"float32": [2.0], "bfloat16": [1.0]}
    found = inference.compare(outputs, seconds, {"attention_mask": np.ones((1, 1))}, [])
    assert found["speedup"] is None
    said = inference.verdict(found)[0]
    assert "no bfloat16 units" in said and "speed is not reported" in said and "times" not in said


@pytest.mark.parametrize(
    ("seconds", "plan"),
    [(0.01, (5, 100)), (1.0, (5, 100)), (2.0, (5, 55)), (50.0, (0, 2)), (200.0, (0, 1))],
)
def test_slow_runs_are_fewer_and_announced(seconds, plan, capsys):
    arguments = InferenceArguments()
    assert arguments.precisions == ("float32",) and "float32, of at most 120 s" in (
        inference.announcement(arguments)
    )
    assert inference.plan_runs(arguments, seconds) == plan
    assert ("--time_limit is 120" in capsys.readouterr().err) == (plan != (5, 100))


def test_runs_stop_at_the_time_limit_and_report_their_progress(monkeypatch, capsys):
    """The machine becomes slower than the first run: each run takes a second."""
    times = itertools.count()
    monkeypatch.setattr(inference.time, "perf_counter", lambda: next(times))
    calls = {name: lambda: None for name in inference.PRECISIONS}
    seconds = inference.time_runs(calls, (2, 100), time_limit=20)
    assert seconds == {"float32": [1, 1, 1], "bfloat16": [1, 1, 1]}
    progress = capsys.readouterr().err
    assert "3 of 102 runs" in progress and "stopped after 3 of 100 runs" in progress
    assert inference.time_runs(calls, (0, 1), time_limit=0.5)["float32"] == [1]


@pytest.mark.parametrize(
    ("cpuinfo", "units"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n", ["avx512_bf16", "amx_bf16"]),
        ("flags\t\t: fpu avx2 avx512f\nbugs\t: avx512_bf16\n", []),
        ("Features\t: fp asimd bf16 i8mm\n", ["bf16"]),
        ("Features\t: fp asimd\n", []),
        ("model name\t: avx512_bf16\n", []),
        ("", []),
    ],
)
def test_units_are_read_from_the_flags_of_the_processor(cpuinfo, units):
    assert harness.bfloat16_units(cpuinfo) == units


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"precision": "bf16"}, UsageError, "--precision bf16: .*float32, bfloat16"),
        ({"num_runs": 0, "batch_size": 0}, UsageError, "--batch_size 0.*--num_runs 0"),
        (
            {"text": ["a"], "text_file": "b", "model_name_or_path": "m"},
            UsageError,
            "--text and --text_file",
        ),
        ({"text": ["a"]}, UsageError, "--model_name_or_path"),
        ({"config_overrides": "a=1", "model_name_or_path": "m"}, UsageError, "--config_overrides"),
        ({"config_overrides": "hiden_size=8"}, UsageError, "hiden_size"),
        (SMALL | {"max_seq_length": 25}, UsageError, "--max_seq_length 25 exceeds.*at most 24"),
        ({"model_name_or_path": "/no/such/place"}, CheckpointError, "no such directory"),
    ],
)
def test_mistakes_are_named(given, error, message):
    with pytest.raises(error, match=message):
        inference.run(InferenceArguments(**given))


def test_a_text_file_that_is_absent_or_empty_is_an_error(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    for name, message in (("empty.txt", "contains no text"), ("absent.txt", "cannot read")):
        with pytest.raises(DataError, match=message):
            inference.read_texts(
                InferenceArguments(model_name_or_path="m", text_file=str(tmp_path / name))
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--precision", "int8"], 2, "error: --precision int8"),
        (["--num_rums", "3"], 2, "did you mean '--num_runs'?"),
        (["--model_name_or_path", "./absent"], 1, "./absent: no such directory"),
    ],
)
def test_the_command_ends_with_an_exit_code_and_one_line(flags, code, message):
    done = command(*flags)
    assert done.returncode == code and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
