"""Remote output directories with a local copy, and validation of output directories."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hfseq.checkpoints.storage import Workspace, check_output_dir
from hfseq.errors import CheckpointError, UsageError

URL = "memory://bucket/run"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("HFSEQ_CACHE", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def remote(fs: Any) -> set[str]:
    return {path.removeprefix("/bucket/run/") for path in fs.find("/bucket/run")}


def local(path: Path) -> set[str]:
    files = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return {name for name in files if not name.startswith(".hfseq")}


def save(path: Path, step: int, text: str = "") -> None:
    """Writes the files of a save: a checkpoint, the weights and a longer log."""
    for name in (f"checkpoints/{step}/state/array", f"checkpoints/{step}/record"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{step}{text}")
    (path / "model.safetensors").write_text(f"weights {step:4}")
    with (path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": step}) + "\n")


STATE = {
    *("checkpoints/10/state/array", "checkpoints/10/record"),
    *("model.safetensors", "metrics.jsonl"),
}


def fail_after(fs: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Makes the storage fail after ``count`` more files."""
    left, real = [count], type(fs).put_file

    def put_file(self: Any, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("connection lost")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(type(fs), "put_file", put_file)


def test_local_directory_is_used_as_it_is(tmp_path: Path) -> None:
    for name in (str(tmp_path / "run"), f"file://{tmp_path}/run"):
        workspace = Workspace(name)
        assert workspace.path == tmp_path / "run" and not workspace.is_remote
        workspace.pull()
        assert workspace.push() and not workspace.path.exists()


def test_scratch_directory_is_stable_per_url_and_in_the_cache(tmp_path: Path) -> None:
    path, same, other = (Workspace(u).path for u in (URL, URL + "/", "memory://other/run"))
    assert path == same != other
    assert path.is_relative_to(tmp_path / "cache") and path.name.startswith("run-")


def test_run_continues_on_another_machine(tmp_path: Path, bucket: Any) -> None:
    first = Workspace(URL, tmp_path / "a")
    first.pull()
    save(first.path, 10)
    assert first.push() and remote(bucket) == STATE | {"latest.json"}
    second = Workspace(URL, tmp_path / "b")
    second.pull()
    assert local(second.path) == STATE
    assert (second.path / "model.safetensors").read_text() == "weights   10"


def test_only_new_and_changed_files_are_sent(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    workspace.push()
    sent, real = [], type(bucket).put_file

    def put_file(self: Any, source: str, target: str, **kwargs: Any) -> Any:
        sent.append(target.removeprefix("/bucket/run/"))
        return real(self, source, target, **kwargs)

    monkeypatch.setattr(type(bucket), "put_file", put_file)
    workspace = Workspace(URL, tmp_path / "a")  # a new process on the same machine
    workspace.pull()
    workspace.push()
    assert sent == []
    save(workspace.path, 20)
    workspace.push()
    assert set(sent[:2]) == {"checkpoints/20/state/array", "checkpoints/20/record"}
    assert set(sent[2:]) == {"model.safetensors", "metrics.jsonl"}


def test_local_deletion_is_mirrored_remotely(tmp_path: Path, bucket: Any) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    workspace.push()
    save(workspace.path, 20)
    for name in ("state/array", "record"):
        (workspace.path / "checkpoints/10" / name).unlink()
    workspace.push()
    checkpoints = {name for name in remote(bucket) if name.startswith("checkpoints")}
    assert checkpoints == {"checkpoints/20/state/array", "checkpoints/20/record"}


@pytest.mark.parametrize("accepted", range(4))
def test_interrupted_push_keeps_the_previous_state(
    tmp_path: Path,
    bucket: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    accepted: int,
) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    workspace.push()
    save(workspace.path, 20)
    with monkeypatch.context() as patch:
        fail_after(bucket, patch, accepted)
        assert workspace.push() is False
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "connection lost" in caplog.text and "next save retries" in caplog.text
    other = Workspace(URL, tmp_path / f"b{accepted}")
    other.pull()
    assert {n for n in local(other.path) if "checkpoints" in n} == {
        *("checkpoints/10/state/array", "checkpoints/10/record")
    }
    assert workspace.push()
    Workspace(URL, tmp_path / "c").pull()
    assert "checkpoints/20/record" in local(tmp_path / "c")


def test_strict_push_raises(tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    fail_after(bucket, monkeypatch, 0)
    with pytest.raises(CheckpointError, match=r"cannot write memory://bucket/run.*connection lost"):
        workspace.push(strict=True)


def test_unpushed_save_survives_a_restart_on_the_same_machine(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    workspace.push()
    save(workspace.path, 20)
    with monkeypatch.context() as patch:
        fail_after(bucket, patch, 0)
        workspace.push()
    again = Workspace(URL, tmp_path / "a")
    again.pull()
    assert (again.path / "checkpoints/20/record").exists()
    assert (again.path / "model.safetensors").read_text() == "weights   20"
    again.push()
    assert bucket.cat_file("/bucket/run/model.safetensors") == b"weights   20"


def test_newer_remote_state_replaces_a_stale_copy(tmp_path: Path, bucket: Any) -> None:
    stale = Workspace(URL, tmp_path / "a")
    stale.pull()
    save(stale.path, 10)
    stale.push()
    save(stale.path, 15)  # never pushed
    other = Workspace(URL, tmp_path / "b")
    other.pull()
    save(other.path, 20)
    other.push()
    back = Workspace(URL, tmp_path / "a")
    back.pull()
    assert (back.path / "model.safetensors").read_text() == "weights   20"
    assert {p.name for p in (back.path / "checkpoints").iterdir()} == {"10", "20"}
    (aside,) = back.path.glob("previous-*/checkpoints/15/record")
    assert aside.read_text() == "15"


def test_deleted_remote_state_restarts_and_backs_up_the_copy(tmp_path: Path, bucket: Any) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    workspace.push()
    bucket.rm("/bucket/run", recursive=True)
    again = Workspace(URL, tmp_path / "a")
    again.pull()
    assert all(name.startswith("previous-") for name in local(again.path))
    assert list(again.path.glob("previous-*/checkpoints/10/record"))


def test_prepared_config_is_downloaded_without_unfinished_checkpoints(
    tmp_path: Path, bucket: Any
) -> None:
    bucket.pipe("/bucket/run/config.json", b"{}")
    bucket.pipe("/bucket/run/checkpoints/10/record", b"half of a checkpoint")
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    assert local(workspace.path) == {"config.json"}


def test_checkpoint_with_a_missing_or_short_file_is_left_out(
    tmp_path: Path, bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    for step in (10, 20, 30):
        save(workspace.path, step)
    workspace.push()
    bucket.rm_file("/bucket/run/checkpoints/30/record")
    bucket.pipe("/bucket/run/checkpoints/20/record", b"")
    other = Workspace(URL, tmp_path / "b")
    other.pull()
    assert [p.name for p in (other.path / "checkpoints").iterdir()] == ["10"]
    assert "incomplete checkpoint memory://bucket/run/checkpoints/20" in caplog.text


def test_temporary_and_private_files_are_not_uploaded(tmp_path: Path, bucket: Any) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    unfinished = "checkpoints/20.orbax-checkpoint-tmp-5/array"
    for name in ("model.safetensors.tmp", ".cache/push/1/config.json", "wandb/run", unfinished):
        (workspace.path / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace.path / name).write_text("x")
    save(workspace.path, 10)
    workspace.push()
    assert remote(bucket) == STATE | {"latest.json"}


def test_overwrite_backs_up_the_remote_run(tmp_path: Path, bucket: Any) -> None:
    workspace = Workspace(URL, tmp_path / "a")
    workspace.pull()
    save(workspace.path, 10)
    workspace.push()
    workspace.pull()
    check_output_dir(workspace.path, overwrite=True)
    workspace.push()
    names = remote(bucket) - {"latest.json"}
    assert {name.partition("/")[2] for name in names} == STATE
    assert all(name.startswith("previous-") for name in names)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nosuch://bucket/run", "unknown protocol 'nosuch://'"),
        ("gs://bucket/run", "pip install gcsfs"),
        ("s3://key:secret@bucket/run", "pip install s3fs"),
    ],
)
def test_unusable_storage_error_suggests_a_fix(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for package in ("gcsfs", "s3fs"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=says) as caught:
        Workspace(url)
    assert "secret" not in str(caught.value)


def test_unreadable_storage_is_a_clear_error(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*_: Any, **__: Any) -> None:
        raise PermissionError("access denied")

    workspace = Workspace(URL, tmp_path / "a")
    monkeypatch.setattr(type(bucket), "find", find)
    with pytest.raises(CheckpointError, match=r"cannot read memory://bucket/run.*access denied"):
        workspace.pull()


# -- validation of output directories


def fill(path: Path, *names: str) -> None:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)


PREPARED = ["config.json", "tokenizer.json", "tokenizer_config.json", "README.md", ".gitattributes"]
OLD_RUN = ["checkpoints/10/record", "model.safetensors", "metrics.jsonl", "runs/nov21/tfevents"]


def test_absent_empty_and_prepared_directories_are_fine(tmp_path: Path) -> None:
    check_output_dir(tmp_path / "absent")
    check_output_dir(tmp_path)
    fill(tmp_path, *PREPARED, "vocab.json", "merges.txt", "generation_config.json", "train.log")
    files_before = local(tmp_path)
    check_output_dir(tmp_path)
    check_output_dir(tmp_path, overwrite=True)
    assert local(tmp_path) == files_before


def test_existing_run_is_accepted_unchanged(tmp_path: Path) -> None:
    fill(tmp_path, *PREPARED, *OLD_RUN, "learning_curve.png", "eval_results.json", "run.json")
    fill(tmp_path, "generated_predictions.txt", "generated_references.txt")  # of --do_predict
    fill(tmp_path, "test_results_mnli_matched.tsv", "test_results.tsv", "fp8_params.safetensors")
    files_before = local(tmp_path)
    check_output_dir(tmp_path)
    assert local(tmp_path) == files_before


@pytest.mark.parametrize("overwrite", [False, True])
def test_unrelated_directory_error_names_it_and_changes_nothing(
    tmp_path: Path, overwrite: bool
) -> None:
    fill(tmp_path, *PREPARED, *OLD_RUN, "thesis.tex", "photos/me.jpg")
    files_before = local(tmp_path)
    with pytest.raises(UsageError, match=r"unrelated files \(photos, thesis.tex\)"):
        check_output_dir(tmp_path, overwrite)
    assert local(tmp_path) == files_before


def test_many_foreign_files_are_counted(tmp_path: Path) -> None:
    fill(tmp_path, *(f"{n}.doc" for n in range(9)))
    with pytest.raises(UsageError, match=r"0.doc, .*4.doc and 4 more\)"):
        check_output_dir(tmp_path)


def test_further_names_can_be_allowed(tmp_path: Path) -> None:
    fill(tmp_path, "thesis.tex")
    check_output_dir(tmp_path, allowed=["*.tex"])


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "out")
    with pytest.raises(UsageError, match="is a file"):
        check_output_dir(tmp_path / "out")


def test_weights_without_checkpoint_are_not_trained_over(tmp_path: Path) -> None:
    fill(tmp_path, *PREPARED, "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match="no checkpoint to resume from.*--overwrite_output_dir"):
        check_output_dir(tmp_path)


def test_overwrite_backs_up_the_previous_run(tmp_path: Path) -> None:
    fill(tmp_path, *PREPARED, *OLD_RUN)
    check_output_dir(tmp_path, overwrite=True)
    (aside,) = tmp_path.glob("previous-*")
    assert local(aside) == set(OLD_RUN)
    assert {p.name for p in tmp_path.iterdir()} == {*PREPARED, aside.name}
    assert (aside / "model.safetensors").read_text() == "model.safetensors"


def test_overwriting_twice_keeps_both_old_runs(tmp_path: Path) -> None:
    for _ in range(3):
        fill(tmp_path, *OLD_RUN)
        check_output_dir(tmp_path, overwrite=True)
    previous = sorted(tmp_path.glob("previous-*"))
    assert len(previous) == 3 and all(local(path) == set(OLD_RUN) for path in previous)
