"""Kill -9 at random moments: only unsaved steps are lost, and the result is the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.support import stored_runs
from tests.support.models import trees_equal
from tests.training.conftest import losses

SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS = 80


def start(flags: list[str], script: str, xla_flags: str = "") -> subprocess.Popen:
    environment = os.environ | {"XLA_FLAGS": xla_flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPTS / script), *flags]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def logged(folder: Path) -> int:
    try:
        return max(losses(folder), default=0)
    except (FileNotFoundError, ValueError):  # not begun, or a line is half written
        return 0


def log_of(run: subprocess.Popen, folder: Path, step: int) -> None:
    while run.poll() is None and logged(folder) < step:
        time.sleep(0.01)


# Script, objective, extra flags, number of kills. Of a pair of numbers, the second is the number of
# kills after which the run goes back to a random checkpoint.
RUNS = {
    "mlm": ("run_mlm_flax.py", "mlm", {}, (8, 5)),
    "fp8": ("run_mlm_flax.py", "mlm", {"precision": "fp8_delayed"}, (8, 3)),
    "streaming": ("run_mlm_flax.py", "mlm", {"streaming": True}, (6, 3)),
    "clm": ("run_clm_flax.py", "clm", {}, (8, 5)),
    "span_mlm": ("run_t5_mlm_flax.py", "span_mlm", {}, (8, 2)),
    "denoising": ("run_bart_dlm_flax.py", "denoising", {}, 6),
    "translation": ("run_translation_flax.py", "translation", {}, (8, 2)),
    "sft": ("run_sft_flax.py", "mlm", {}, 4),
    "dpo": ("run_dpo_flax.py", "mlm", {}, 4),
    "kto": ("run_kto_flax.py", "mlm", {}, 4),
    "orpo": ("run_orpo_flax.py", "mlm", {}, 2),
    "cpo": ("run_cpo_flax.py", "mlm", {}, 2),
    "reward": ("run_reward_flax.py", "mlm", {}, 2),
    "token_classification": ("run_ner_flax.py", "mlm", {}, 2),
    "question_answering": ("run_qa_flax.py", "mlm", {}, 2),
    "summarization": ("run_summarization_flax.py", "mlm", {}, 2),
    "embedding": ("run_embedding_flax.py", "mlm", {}, 2),
    "embedding_no_duplicates": (
        *("run_embedding_flax.py", "mlm", {"batch_sampler": "no_duplicates"}, 2),
    ),
    "embedding_mixture": ("run_embedding_flax.py", "mlm", {"train_mixture": "pairs"}, 2),
    "mlm_mixture": ("run_mlm_flax.py", "mlm", {"train_mixture": "texts"}, 2),
    "cross_encoder": ("run_cross_encoder_flax.py", "mlm", {}, 2),
    "sparse_encoder": ("run_sparse_encoder_flax.py", "mlm", {}, 2),
    "multi_vector": ("run_multi_vector_flax.py", "mlm", {}, 2),
    "classification": ("run_classification_flax.py", "mlm", {"train_file": "labelled"}, 6),
    "image_classification": ("run_image_classification_flax.py", "mlm", {}, 4),
    "image_text": ("run_clip_flax.py", "mlm", {}, 4),
    "image_to_text": ("run_image_captioning_flax.py", "mlm", {}, 4),
    "wav2vec2": ("run_wav2vec2_pretrain_flax.py", "mlm", {}, 4),
    "ctc": ("run_speech_recognition_ctc_flax.py", "mlm", {}, 4),
    "speech_recognition": ("run_speech_recognition_flax.py", "mlm", {}, 4),
}
#: Objectives that use the data of the stored runs.
OTHER_DATA = (
    *("image", "speech", "wav2vec2", "ctc", "sft", "token", "question", "summ", "embed"),
    *("cross", "sparse", "multi", "dpo", "kto", "orpo", "cpo", "reward"),
)


@pytest.fixture
def labelled(corpus):
    """Writes the texts of the corpus in two classes to a table, and returns its path."""
    rows = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    lines = [f"{'long' if len(text) > 100 else 'short'}\t{text}" for text in rows]
    (corpus / "labelled.tsv").write_text("\n".join(["label\tsentence", *lines]) + "\n")
    return corpus / "labelled.tsv"


def mixture(data: str, corpus: Path) -> Path:
    """Writes the file of a mixture of two datasets, and returns its path."""
    folder = stored_runs.STORED / "data"
    first, second = {
        "pairs": (
            {"train_file": str(folder / "texts.jsonl"), "batch_sampler": "no_duplicates"},
            {"train_file": str(folder / "texts.jsonl")},
        ),
        "texts": (
            {"train_file": str(corpus / "train.jsonl")},
            {"train_file": str(corpus / "valid.jsonl")},
        ),
    }[data]
    path = corpus / f"{data}-mixture.yaml"
    path.write_text(json.dumps([first, {**second, "weight": 2}]))  # JSON is also YAML
    return path


def without_text(name: str) -> dict[str, Any]:
    """The flags of a stored run on other data, instead of those for text."""
    none = ("model_type", "tokenizer_name", "train_file", "validation_file", "max_seq_length")
    objective_flags = stored_runs.RUNS[name.split("_no_")[0].removesuffix("_mixture")][1]
    all_flags = {
        flag: value.replace(stored_runs.DATA, str(stored_runs.STORED / "data"))
        if isinstance(value, str)
        else value
        for flag, value in objective_flags.items()
    }
    return {**dict.fromkeys((*none, "config_overrides")), **all_flags, "global_batch_size": 8}


def test_one_kill_does_not_change_the_result(flags, train, tmp_path):
    options = {"max_steps": 18, "save_steps": 5, "do_train": True}
    uninterrupted = train("whole", devices=2, **options)
    xla_flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    run = start(flags("killed", **options), "run_mlm_flax.py", xla_flags)
    log_of(run, tmp_path / "killed", 7)
    run.kill()
    output, _ = run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL, output
    resumed = train("killed", devices=2, **options)
    assert 5 <= resumed.start_step < 18
    assert trees_equal(resumed.state.params, uninterrupted.state.params)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_kills_at_random_moments_do_not_change_results(flags, labelled, tmp_path, name):
    script, objective, objective_flags, counts = RUNS[name]
    kills, times_back = counts if isinstance(counts, tuple) else (counts, 0)
    options = {"max_steps": STEPS, "save_steps": 7, "save_total_limit": 2, "eval_steps": 40}
    options |= {"objective": objective, **objective_flags}
    if objective_flags.get("train_file"):
        options |= {"train_file": labelled, "validation_file": labelled}
    if name.startswith(OTHER_DATA):
        options |= without_text(name)
    if data := objective_flags.get("train_mixture"):
        path = mixture(data, labelled.parent)
        options |= {"train_file": None, "train_mixture": path, "eval_strategy": "no"}
    uninterrupted = start(flags("whole", **options), script)
    output, _ = uninterrupted.communicate(timeout=900)
    assert uninterrupted.returncode == 0, output
    draw = random.Random(20261121)
    moments = sorted(draw.randint(1, STEPS - 1) for _ in range(kills))
    back: dict[str, Path] = {}
    for number, moment in enumerate(moments):
        run = start(flags("killed", **options, **back), script)
        while run.poll() is None and logged(tmp_path / "killed") < moment:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        run.send_signal(signal.SIGKILL)
        run.communicate(timeout=60)
        back = {}
        checkpoints = (tmp_path / "killed" / "checkpoints").glob("*")
        saved = sorted((p for p in checkpoints if p.name.isdigit()), key=lambda p: int(p.name))
        if number >= kills - times_back and saved:
            back = {"resume_from_checkpoint": draw.choice(saved)}
    last = start(flags("killed", **options, **back), script)
    output, _ = last.communicate(timeout=900)
    assert last.returncode == 0, output
    first, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")
    )
    assert first.keys() == other.keys()
    assert all((first[name] == other[name]).all() for name in first)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")


def test_all_training_scripts_are_killed_and_go_back():
    trained = {
        path.name for path in SCRIPTS.glob("run_*.py") if "script.train(" in path.read_text()
    }
    assert trained == {script for script, *_ in RUNS.values()}
    counts = [count if isinstance(count, tuple) else (count, 0) for *_, count in RUNS.values()]
    assert (sum(kills for kills, _ in counts), sum(back for _, back in counts)) == (120, 20)


# -- other ways to end a run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        pytest.param([signal.SIGINT], 130, id="ctrl-c"),
        pytest.param([signal.SIGINT] * 2, 130, id="ctrl-c twice"),
        pytest.param([signal.SIGTERM], 0, id="sigterm"),
    ],
)
def test_signal_saves_and_second_ctrl_c_exits(flags, tmp_path, signals, code):
    """The first signal stops after the step and saves. In all cases, the run can be resumed."""
    options = {"max_steps": 4000, "save_steps": 50, "eval_strategy": "no", "report_to": "jsonl"}
    run = start(flags("signalled", **options), "run_mlm_flax.py")
    log_of(run, tmp_path / "signalled", 60)
    for number in signals:
        run.send_signal(number)
        time.sleep(0.001)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == code, output
    assert "Traceback" not in output
    steps = sorted(
        int(path.name)
        for path in (tmp_path / "signalled" / "checkpoints").iterdir()
        if path.name.isdigit()
    )
    if len(signals) == 1:
        assert "received: saving after this step" in output
        assert steps[-1] == logged(tmp_path / "signalled")  # not a step is lost
    assert steps[-1] >= 50
