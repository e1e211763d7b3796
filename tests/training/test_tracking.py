"""Trackers: output, resumption, and that they never stop training."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.reports.log import read_metrics
from hfseq.training import event_file, trackers
from hfseq.training.trackers import drop_secrets, make_trackers, tracker_names


def jsonl(directory: Path, resume_step: int | None = None) -> trackers.Tracker:
    return make_trackers(["jsonl"], directory, None, {}, resume_step)[0]


@pytest.mark.parametrize(
    ("report_to", "names"),
    [
        (None, []),
        ([], []),
        ("none", []),
        (["none"], []),
        ("all", ["all"]),
        ("tensorboard,wandb", ["tensorboard", "wandb"]),
        (["tensorboard,wandb", "jsonl"], ["tensorboard", "wandb", "jsonl"]),
        (["jsonl", "tensorboard", "jsonl"], ["jsonl", "tensorboard"]),
    ],
)
def test_report_to_is_parsed(report_to: Any, names: list[str]) -> None:
    assert tracker_names(report_to) == names


@pytest.mark.parametrize("word", ["all", "none"])
def test_report_to_all_and_none_exclude_others(word: str) -> None:
    with pytest.raises(UsageError, match=f"{word} cannot be combined with wandb"):
        tracker_names([word, "wandb"])


def test_unknown_tracker_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="tensorboard.*did you mean 'tensorboard'"):
        make_trackers(["tensorbord"], tmp_path, None, {})


def test_missing_package_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'hfseq\[wandb\]'"):
        make_trackers(["wandb"], tmp_path, None, {})
    names = [tracker.name for tracker in make_trackers("all", tmp_path, None, {})]  # type: ignore[attr-defined]
    assert "wandb" not in names and {"tensorboard", "jsonl"} <= set(names)


def test_package_that_fails_to_import_is_reported_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text("import no_such_dependency")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="wandb, whose import fails .*'no_such_dependency'"):
        make_trackers(["wandb"], tmp_path, None, {})
    assert make_trackers("all", tmp_path, None, {})
    assert "omits the tracker wandb" in caplog.text and "no_such_dependency" in caplog.text


def test_tracker_of_a_plugin_gets_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Mine:
        def __init__(self, run_directory: Path, arguments: Any, run_config: dict) -> None:
            calls.append((run_directory, arguments, run_config))

        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append((metrics, step))

    registry = {"mine": Mine}
    monkeypatch.setattr(plugins, "load", lambda: types.SimpleNamespace(trackers=registry))
    (tracker,) = make_trackers(["mine"], tmp_path, "arguments", {"a": 1, "hub_token": "x"}, 5)
    tracker.log({"loss": 1.0}, 3)
    assert calls == [(tmp_path, "arguments", {"a": 1}), ({"loss": 1.0}, 3)]


def test_secrets_are_not_configuration() -> None:
    config = {"hub_token": 1, "token": 2, "api_key": 3, "max_tokens": 4, "tokenizer_name": 5}
    assert drop_secrets(config) == {"max_tokens": 4, "tokenizer_name": 5}


# JSON lines


def test_jsonl_has_one_object_a_line_with_step_and_time(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path)
    tracker.log({"train_loss": 2.5, "tokens_seen": 123_456_789_012}, 10)
    tracker.text("sample", "blåbær\n", 10)
    tracker.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first.pop("time") > 1e9
    assert first == {"step": 10, "train_loss": 2.5, "tokens_seen": 123_456_789_012}
    assert second["text"] == {"sample": "blåbær\n"}


def test_jsonl_is_strict_json_for_any_loss(tmp_path: Path) -> None:
    jsonl(tmp_path).log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1}, 1)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert [record[key] for key in "abcd"] == [None, None, None, 1]


def test_jsonl_is_on_disk_without_closing(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from hfseq.training.trackers import JsonlTracker;"
        "JsonlTracker(pathlib.Path(sys.argv[1])).log({'loss': 1.0}, 1); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=_environment())
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_jsonl_resume_drops_later_steps(tmp_path: Path) -> None:
    tracker = jsonl(tmp_path)
    for step in range(1, 8):
        tracker.log({"loss": float(step)}, step)
    resumed = jsonl(tmp_path, resume_step=4)
    resumed.log({"loss": 50.0}, 5)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in records] == [*((n, n) for n in range(1, 5)), (5, 50.0)]
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.jsonl"]


def test_jsonl_opened_without_resuming_keeps_everything(tmp_path: Path) -> None:
    jsonl(tmp_path).log({"loss": 1.0}, 7)
    jsonl(tmp_path).log({"eval_loss": 2.0}, 0)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [7, 0]


def test_jsonl_repairs_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert [record["step"] for record in read_metrics(path)] == [1]
    jsonl(tmp_path).log({"loss": 2.0}, 2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_failed_rewrite_on_resume_keeps_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = jsonl(tmp_path)
    for step in (1, 2):
        tracker.log({"loss": 1.0}, step)
    old_log = (tmp_path / "metrics.jsonl").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    resumed = jsonl(tmp_path, resume_step=1)
    open_files = len(os.listdir("/proc/self/fd"))
    resumed.close()
    assert len(os.listdir("/proc/self/fd")) == open_files - 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == old_log
    assert len(list(tmp_path.iterdir())) == 1


def test_repeated_steps_replace_their_lines(tmp_path: Path) -> None:
    """A run that was killed after its last step evaluates again. An incomplete line is dropped."""
    path = tmp_path / "metrics.jsonl"
    for begun, torn in ((None, b'{"step": 4, "eval_lo'), (4, b'{"step": 4, "te'), (4, b"\0\0")):
        tracker = jsonl(tmp_path, begun)
        if begun is None:
            tracker.log({"eval_loss": 9.0}, 2)
            tracker.log({"train_loss": 3.0, "epoch": 1.0}, 4)
        for value in (2.0, 1.0):  # the last weights, then those that stay
            tracker.log({"eval_loss": value, "eval_runtime": 0.1}, 4)
        tracker.text("eval_samples", "a", 4)
        tracker.text("eval_samples", "b", 4)
        tracker.text("test_samples", "c", 4)
        tracker.close()
        with path.open("ab") as file:
            file.write(torn)
    records = read_metrics(path)
    assert [record.get("eval_loss") for record in records] == [9.0, None, 2.0, 1.0, *[None] * 3]
    texts = [record["text"] for record in records[4:]]
    assert texts == [{"eval_samples": "a"}, {"eval_samples": "b"}, {"test_samples": "c"}]


def test_resume_keeps_the_evaluation_at_its_first_step(
    tmp_path: Path,
) -> None:
    tracker = jsonl(tmp_path)
    tracker.log({"train_loss": 1.0}, 4)
    tracker.log({"eval_loss": 2.0}, 4)
    jsonl(tmp_path, resume_step=4).log({"train_loss": 0.5}, 5)
    steps = [(r["step"], r.get("eval_loss")) for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [(4, None), (4, 2.0), (5, None)]


def test_resume_record_is_written_when_space_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = jsonl(tmp_path)
    for step in (1, 2, 3):
        tracker.log({"loss": 1.0}, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        resumed = jsonl(tmp_path, resume_step=1)
    resumed.log({"loss": 2.0}, 2)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


# TensorBoard


def read_events(directory: Path) -> Any:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (run,) = (directory / "runs").iterdir()
    return accumulators.EventAccumulator(str(run)).Reload()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_curves_and_texts_back(tmp_path: Path) -> None:
    (tracker,) = make_trackers(["tensorboard"], tmp_path, None, {})
    for step in (1, 300, 70_000):
        tracker.log({"train_loss": 1.0 / step, "train_learning_rate": 1e-4}, step)
    tracker.log({"eval_loss": math.nan, "tokens_seen": 10**12, "huge": 1e300}, 70_000)
    tracker.text("samples", "**bold** blåbær " + "x" * 40_000, 300)
    events = read_events(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        *("train_loss", "train_learning_rate", "eval_loss", "tokens_seen", "huge")
    }
    points = events.Scalars("train_loss")
    assert [point.step for point in points] == [1, 300, 70_000]
    assert points[1].value == pytest.approx(1 / 300) and points[0].wall_time > 1e9
    assert math.isnan(events.Scalars("eval_loss")[0].value)
    (text,) = events.Tensors("samples/text_summary")
    assert text.tensor_proto.dtype == 7  # DT_STRING
    logged_text = text.tensor_proto.string_val[0].decode()
    assert logged_text.startswith("**bold** blåbær") and len(logged_text) > 40_000
    plugin = events.SummaryMetadata("samples/text_summary").plugin_data.plugin_name
    assert plugin == "text" and text.step == 300


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_resumed_is_one_curve_without_overlap(tmp_path: Path) -> None:
    for resume, steps in ((None, range(1, 8)), (4, range(5, 10))):
        (tracker,) = make_trackers(["tensorboard"], tmp_path, None, {}, resume)
        for step in steps:
            tracker.log({"train_loss": 10.0 * (resume or 0) + step}, step)
        tracker.close()
    points = read_events(tmp_path).Scalars("train_loss")
    assert [point.step for point in points] == list(range(1, 10))
    assert points[3].value == 4.0 and points[4].value == 45.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_repeated_steps_once(tmp_path: Path) -> None:
    for resume, loss in ((None, 3.0), (4, 2.0), (4, 1.0)):
        (tracker,) = make_trackers(["tensorboard"], tmp_path, None, {"seed": 1}, resume)
        if resume is None:
            tracker.log({"train_loss": 5.0}, 3)
            tracker.log({"train_loss": 4.0}, 4)
        tracker.log({"eval_loss": loss, "eval_runtime": 0.1}, 4)
        tracker.text("eval_samples", f"loss {loss}", 4)
        tracker.close()
    events = read_events(tmp_path)
    assert [(p.step, p.value) for p in events.Scalars("train_loss")] == [(3, 5.0), (4, 4.0)]
    assert [(p.step, p.value) for p in events.Scalars("eval_loss")] == [(4, 1.0)]
    (text,) = events.Tensors("eval_samples/text_summary")
    assert text.tensor_proto.string_val == [b"loss 1.0"]


def test_tensorboard_does_not_need_torch_or_tensorboardx(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from hfseq.training.trackers import TensorBoardTracker;"
        "TensorBoardTracker(pathlib.Path(sys.argv[1])).log({'loss': 1.0}, 1);"
        "assert not {'torch', 'tensorboardX', 'jax', 'transformers'} & set(sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=_environment())
    assert process.returncode == 0


# Faults


def open_files(directory: Path) -> list[str]:
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return [
        str(link.readlink())
        for link in links
        if link.is_symlink() and str(link.readlink()).startswith(str(directory))
    ]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_full_disk_leaves_no_open_or_empty_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tracker,) = make_trackers(["tensorboard"], tmp_path, None, {"learning_rate": 1e-3})

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(event_file.os, "write", full)
        for step in range(5):  # each tries again
            tracker.log({"train_loss": 1.0}, step)
        assert open_files(tmp_path) == []
        assert list(tmp_path.rglob("*tfevents*")) == []
    tracker.log({"train_loss": 1.0}, 5)
    with monkeypatch.context() as patch:
        patch.setattr(event_file.os, "write", full)
        tracker.close()
    assert open_files(tmp_path) == []
    assert len(list(tmp_path.rglob("*tfevents*"))) == 1


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_full_disk_is_one_warning_and_the_file_stays_readable(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tracker,) = make_trackers([name], tmp_path, None, {})
    tracker.log({"train_loss": 1.0}, 1)
    real_write = os.write

    def half(descriptor: int, data: bytes) -> int:
        return real_write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(event_file.os, "write", half)
        for step in (2, 3):
            tracker.log({"train_loss": 1.0}, step)
    tracker.log({"train_loss": 4.0}, 4)
    tracker.close()
    warnings = [r for r in caplog.records if r.name == "hfseq.tracking"]
    assert [r.levelno for r in warnings] == [logging.WARNING]
    assert "No space left on device" in warnings[0].getMessage()
    if name == "jsonl":
        steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    else:
        steps = [point.step for point in read_events(tmp_path).Scalars("train_loss")]
    assert steps == [1, 4]


@pytest.mark.parametrize("name", ["jsonl", "tensorboard"])
def test_directory_without_write_permission_is_one_warning(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(event_file.os, "open", denied)
        (tracker,) = make_trackers([name], tmp_path, None, {}, resume_step=3)
        for step in (4, 5):
            tracker.log({"train_loss": 1.0}, step)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    tracker.log({"train_loss": 1.0}, 6)  # the permission is back
    assert list(tmp_path.iterdir())


# Weights & Biases


class FakeWandb(types.ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict] = []
        self.logged: list[tuple[dict, int]] = []
        self.finished = 0

    def init(self, **options: Any) -> FakeWandb:
        self.inits.append(options)
        return self

    def log(self, metrics: dict, step: int) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.finished += 1

    def Html(self, text: str) -> str:
        return text


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_PROJECT", "WANDB_RUN_ID", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_wandb_gets_config_metrics_and_texts(tmp_path: Path, fake_wandb: FakeWandb) -> None:
    (tracker,) = make_trackers(["wandb"], tmp_path, None, {"lr": 1.0, "hub_token": "x"})
    tracker.log({"train_loss": 2.0}, 5)
    tracker.text("sample", "a < b", 5)
    tracker.close()
    (options,) = fake_wandb.inits
    assert options["project"] == "hfseq" and options["resume"] == "allow"
    assert options["config"] == {"lr": 1.0} and options["dir"] == str(tmp_path)
    assert fake_wandb.logged == [
        ({"train_loss": 2.0}, 5),
        ({"sample": "<pre>a &lt; b</pre>"}, 5),
    ]
    assert fake_wandb.finished == 1


def test_wandb_run_is_resumed_by_its_id(
    tmp_path: Path, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "norsk")
    make_trackers(["wandb"], tmp_path, None, {})
    make_trackers(["wandb"], tmp_path, None, {}, resume_step=10)
    (tmp_path / "other").mkdir()
    make_trackers(["wandb"], tmp_path / "other", None, {})
    first, resumed, other = (options["id"] for options in fake_wandb.inits)
    assert first == resumed != other
    assert (tmp_path / "wandb_run_id").read_text().strip() == first
    assert fake_wandb.inits[0]["project"] == "norsk"


def test_wandb_that_cannot_start_is_one_warning_and_not_tried_again(
    tmp_path: Path,
    fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def init(**_: Any) -> None:
        calls.append(1)
        raise RuntimeError("no API key configured")

    monkeypatch.setattr(fake_wandb, "init", init)
    (tracker,) = make_trackers(["wandb"], tmp_path, None, {})
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
    assert len(calls) == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_real_wandb_works_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "import sys, pathlib; from hfseq.training.trackers import make_trackers;"
        "t, = make_trackers(['wandb'], pathlib.Path(sys.argv[1]), None, {'lr': 0.1});"
        "t.log({'train_loss': 1.0}, 1); t.text('sample', 'text', 1); t.close()"
    )
    environment = {**_environment(), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0 and "cannot write" not in process.stderr, process.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert any(path.name.endswith(run_id) for path in (tmp_path / "wandb").iterdir())
