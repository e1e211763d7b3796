"""Flags in trackers: the HParams tab, the first line of the log, and nothing private."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hfseq.reports.log import read_metrics
from hfseq.training.trackers import make_trackers, redact_config

CONFIG = {
    "learning_rate": 1e-3,
    "max_steps": 5,
    "adafactor": True,
    "optim": "adamw",
    "train_file": ["a.txt"],
    "eval_steps": None,
    "freeze": [],
    "hub_token": "hf_secret",
}


def information(folder: Path, tag: str) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams import metadata

    (run,) = (folder / "runs").iterdir()
    events = accumulators.EventAccumulator(str(run)).Reload()
    content = events.SummaryMetadata(f"_hparams_/{tag}").plugin_data.content
    return getattr(metadata, f"parse_{tag}_plugin_data")(content)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_flags_for_its_hparams_tab(tmp_path):
    (tracker,) = make_trackers(["tensorboard"], tmp_path, None, CONFIG, 0)
    tracker.log({"train_loss": 1.0}, 1)
    tracker.close()
    result = information(tmp_path, "session_start_info").hparams
    assert result["learning_rate"].number_value == 1e-3
    assert result["max_steps"].number_value == 5 and result["adafactor"].bool_value is True
    assert result["optim"].string_value == "adamw"
    assert result["train_file"].string_value == '["a.txt"]'
    assert not {"eval_steps", "freeze", "hub_token"} & set(result)
    assert information(tmp_path, "session_end_info").status == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_failed_run_is_recorded_as_failure(tmp_path):
    (tracker,) = make_trackers(["tensorboard"], tmp_path, None, CONFIG, 0)
    tracker.log({"train_loss": 1.0}, 1)
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        finally:
            tracker.close()
    assert information(tmp_path, "session_end_info").status == 2


def test_log_contains_flags_and_resume_steps(tmp_path):
    for resume in (0, 4):
        (tracker,) = make_trackers(["jsonl"], tmp_path, None, CONFIG, resume)
        for step in range(resume + 1, resume + 7):
            tracker.log({"train_loss": 1.0}, step)
    starts = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "run" in r]
    assert [record["step"] for record in starts] == [0, 4]
    assert starts[0]["run"] == {
        "learning_rate": 1e-3,
        "max_steps": 5,
        "adafactor": True,
        "optim": "adamw",
        "train_file": ["a.txt"],
    }


def test_tokens_and_home_directory_are_redacted(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "kari"))
    token = "hf_" + "a1B2" * 9
    config = {"file": [f"{tmp_path}/home/kari/data.txt"], "url": f"https://x:{token}@y", "n": 3}
    written_bytes = redact_config(config)
    assert written_bytes["file"] == ["~/data.txt"] and written_bytes["n"] == 3
    assert token not in written_bytes["url"]


# -- Weights & Biases: the real client, offline


def offline_records(folder: Path) -> Iterator[Any]:
    """The records of an offline run. The file is a LevelDB log after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, content = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, record_type = struct.unpack("<IHB", data[at : at + 7])
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
        if record_type in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            yield record
            content = b""


@pytest.mark.slow
def test_a_training_run_is_all_in_wandb_s_offline_file(flags, tmp_path):
    pytest.importorskip("wandb")
    import os

    arguments = flags(report_to="wandb,jsonl", log_histograms=3, eval_steps=3)
    code = (
        "import sys; from hfseq.training.arguments import parse\n"
        "from hfseq.training.run import main; main(parse(sys.argv[1:]), 'mlm')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
    )
    assert process.returncode == 0 and "cannot write" not in process.stderr, process.stderr
    folder = tmp_path / "run"
    records = list(offline_records(folder))
    (run,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: item.value_json for item in run.config.update}
    assert (run.project, run.display_name) == ("hfseq", "run")
    assert run.run_id == (folder / "wandb_run_id").read_text().strip()
    assert config["learning_rate"] == "0.003" and config["total_steps"] == "6"
    rows = [record.history for record in records if record.HasField("history")]
    logged: dict[str, list[Any]] = {}
    for row in rows:
        for item in row.item:
            logged.setdefault(item.key or "/".join(item.nested_key), []).append(item.value_json)
    ours = [r["train_loss"] for r in read_metrics(folder / "metrics.jsonl") if "train_loss" in r]
    assert [float(value) for value in logged["train_loss"]] == pytest.approx(ours)
    assert len(logged["eval_loss"]) == 2
    assert any(name.startswith("gradients/") for name in logged)
