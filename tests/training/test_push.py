"""Pushing from a run: one commit per save, all artifacts, and a Hub that does not respond."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from hfseq.checkpoints.storage import Workspace
from hfseq.errors import HfseqError
from hfseq.reports.log import read_metrics
from hfseq.training import export
from hfseq.training.arguments import TrainingArguments, parse
from hfseq.training.export import Publisher
from hfseq.training.processes import StopSignal

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
PUSH = {"push_to_hub": True, "hub_model_id": "user/tiny", "report_to": "tensorboard,jsonl"}


@pytest.mark.slow
def test_a_run_pushes_everything_and_loads_back_by_name(train, hub):
    train("tiny", devices=1, save_steps=3, learning_curve=True, **PUSH)
    repo = hub.repo("user/tiny")
    files = set(repo.at("main").files)
    assert [commit.title for commit in repo.history()][-1] == "Training in progress, step 3"
    assert files >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "README.md",
        "learning_curve.png",
        "metrics.jsonl",
        "eval_results.json",
        "training_args.json",
        "train_results.json",
    }
    assert any("tfevents" in name for name in files)
    assert not any(name.startswith("checkpoints") for name in files)

    from hfseq import FlaxAutoModelForMaskedLM

    model = FlaxAutoModelForMaskedLM.from_pretrained("user/tiny")
    assert model.config.hidden_size == 32


@pytest.mark.slow
def test_a_pushed_translator_translates_alike_in_jax_and_in_pytorch(train, hub):
    """From pairs to the Hub and back, by name, with the PyTorch classes."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from hfseq import FlaxAutoModelForSeq2SeqLM

    sizes = (
        "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,"
        "decoder_attention_heads=4,encoder_ffn_dim=64,decoder_ffn_dim=64,max_position_embeddings=40"
    )
    train(
        "tiny",
        1,
        "translation",
        model_type=None,
        tokenizer_name=None,
        vocab_size=300,
        config_overrides=sizes,
        source_column="source",
        target_column="target",
        num_beams=2,
        **PUSH,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained("user/tiny")
    ids = tokenizer(["the law of every land", "who do not yet know"], padding=True)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained("user/tiny")
    assert type(theirs).__name__ == "PegasusForConditionalGeneration"
    generated = FlaxAutoModelForSeq2SeqLM.from_pretrained("user/tiny").generate(
        **{name: np.asarray(value) for name, value in ids.items()}, max_new_tokens=8
    )
    with torch.no_grad():
        expected = theirs.generate(
            **{name: torch.tensor(value) for name, value in ids.items()}, max_new_tokens=8
        )
    width = expected.shape[1]
    np.testing.assert_array_equal(np.asarray(generated.sequences)[:, :width], expected.numpy())


def test_a_refusing_hub_does_not_stop_training(train, hub, no_waiting, tmp_path):
    hub.fail("POST", ".*", times=10_000, status=403)
    with pytest.raises(HfseqError, match="hfseq push"):
        train("tiny", devices=1, save_steps=3, **PUSH)
    assert (tmp_path / "tiny" / "model.safetensors").exists()
    assert (tmp_path / "tiny" / "README.md").exists()


def test_hub_strategy_end_makes_one_commit(train, hub):
    train("tiny", devices=1, save_steps=2, hub_strategy="end", **PUSH)
    titles = [commit.title for commit in hub.repo("user/tiny").history()]
    assert titles == ["End of training"]


@pytest.mark.slow
def test_run_resumes_from_the_hub_checkpoint(train, flags, hub, tmp_path):
    """The output directory is lost, and the run is resumed from the Hub."""
    from huggingface_hub import snapshot_download

    uninterrupted = train("whole", devices=1, save_steps=2)
    part = train(
        "part",
        devices=1,
        max_steps=4,
        lr_scheduler_type="constant",
        save_steps=2,
        hub_strategy="checkpoint",
        **PUSH,
    )
    del part
    names = set(hub.repo("user/tiny").at("main").files)
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"4"}
    snapshot_download("user/tiny", local_dir=tmp_path / "elsewhere")
    again = train("elsewhere", devices=1, lr_scheduler_type="constant", save_steps=2)
    assert again.start_step == 4 and again.progress.step == uninterrupted.progress.step == 6
    steps = [record["step"] for record in read_metrics(tmp_path / "elsewhere" / "metrics.jsonl")]
    assert steps == sorted(steps) and {1, 4, 5, 6} <= set(steps)


@pytest.mark.slow
def test_the_flags_of_a_run_are_a_file_that_runs_it_again(train, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    first = train("tiny", devices=1, max_steps=2)
    file = tmp_path / "tiny" / "training_args.json"
    assert str(tmp_path) not in file.read_text()
    again = parse([str(file)], objective="mlm")
    assert again.as_dict() == first.run.arguments.as_dict()


# -- a Hub that stalls


def publisher(folder, **flags):
    training = TrainingArguments(
        output_dir=str(folder), push_to_hub=True, hub_model_id="user/tiny", **flags
    )
    return Publisher(training, Workspace(folder), None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_hanging_push_with_the_completion_command(hub, model_folder, messages, number):
    hung = hub.fail("POST", "/commit/main", action="hang")

    def when_it_hangs():
        hung.met.wait()
        os.kill(os.getpid(), number)

    with StopSignal() as stop:
        sender = threading.Thread(target=when_it_hangs)
        sender.start()
        publisher(model_folder).finish("End of training", stop)
        sender.join()
    assert stop.received == number
    assert f"{number.name}. Finish it with: hfseq push {model_folder}" in messages()


def test_a_run_that_a_signal_has_stopped_waits_for_less(hub, model_folder, messages, monkeypatch):
    monkeypatch.setattr(export, "FINAL_UPLOAD_SECONDS", 0.2)
    hub.fail("POST", "/commit/main", action="hang")
    with StopSignal() as stop:
        stop.received = signal.SIGTERM
        publisher(model_folder).finish("End of training", stop)
    assert "no network traffic for 0.2 s. Finish it with: hfseq push" in messages()


def test_a_finished_run_ends_well_although_the_hub_hangs(train, hub, messages, tmp_path):
    hub.fail("POST", "/commit/main", action="hang")
    result = train("tiny", devices=1, hub_strategy="end", hub_timeout=0.5, **PUSH)
    assert result.progress.step == 6 and (tmp_path / "tiny" / "model.safetensors").exists()
    assert "no network traffic for 0.5 s. Finish it with: hfseq push" in messages()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_exit_code_of_a_signal_survives_publishing(train, hub, number, code):
    hung = hub.fail("POST", "/commit/main", action="hang")

    def when_it_hangs():
        hung.met.wait()
        os.kill(os.getpid(), number)

    threading.Thread(target=when_it_hangs, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        train("tiny", devices=1, hub_strategy="end", sigterm_exit_code=143, **PUSH)
    assert ended.value.code == code
