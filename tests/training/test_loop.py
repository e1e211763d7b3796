"""The training loop: the same losses on any layout, exact resumption, and exit codes."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq.errors import CheckpointError, NonFiniteLoss, UsageError
from hfseq.nn import trees
from hfseq.nn.precision import FLOAT32
from hfseq.training.arguments import TrainingArguments
from hfseq.training.callbacks import Callback, StepResults
from hfseq.training.run import log_settings
from hfseq.training.setup import BatchPlan
from tests.training.conftest import TINY, TWO_LAYERS, assert_same, losses, stop_at


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Losses and weights of six steps on one device, for comparison in several tests."""
    return {}


def one_device(train, reference):
    if not reference:
        loop = train("one", devices=1, do_train=True)
        reference |= losses(loop.folder)
    return dict(reference)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("data=8", marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=4", marks=pytest.mark.slow),
        pytest.param("data=4,tensor=2", marks=pytest.mark.slow),
        "fsdp=2,tensor=2,sequence=2",
        pytest.param("data=-1,sequence=4", marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_device_on_every_mesh(train, reference, mesh):
    expected = one_device(train, reference)
    assert_same(losses(train("many", mesh=mesh, do_train=True).folder), expected)


@pytest.mark.parametrize("micro", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradient_accumulation_does_not_change_the_losses_even_with_dropout(
    train, reference, micro
):
    expected = one_device(train, reference)
    loop = train("micro", devices=1, gradient_accumulation_steps=micro, do_train=True)
    assert (
        loop.run.batch.micro_batches == micro and loop.run.model.config.hidden_dropout_prob == 0.1
    )
    assert_same(losses(loop.folder), expected)


@pytest.mark.slow
def test_scanned_and_rematerialised_layers_give_the_same_losses(train):
    options = {"devices": 1, "config_overrides": TWO_LAYERS}
    expected = losses(train("loop", **options).folder)
    assert_same(losses(train("scan", scan_layers=True, **options).folder), expected)
    assert_same(losses(train("remat", gradient_checkpointing=True, **options).folder), expected)


def test_the_values_that_a_run_uses_are_logged(caplog):
    training = TrainingArguments(output_dir="model", warmup_ratio=0.5, eval_steps=5)
    run = types.SimpleNamespace(
        arguments=types.SimpleNamespace(
            training=training, model=types.SimpleNamespace(param_dtype="float32")
        ),
        model=types.SimpleNamespace(precision=FLOAT32),
        batch=BatchPlan(rows=16, micro_batches=2, length=32),
        total_steps=10,
    )
    with caplog.at_level("INFO", "hfseq"):
        log_settings(run, first_step=3)
    (message,) = caplog.messages
    assert message.startswith("training steps 4 to 10, 16 rows per step in 2 micro-batches, with ")
    # The defaults of Transformers 4, and values that follow from other flags.
    flags = ("seed 42", "max_grad_norm 0.0", "logging_steps 500", "warmup_steps 5", "eval_steps 5")
    assert all(f"--{flag}" in message for flag in flags)


def test_json_is_the_only_standard_output(train, capsys):
    train("json", devices=1, max_steps=2, do_train=True, do_eval=True, json=True)
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    evaluation = json.loads((Path(result["output_dir"]) / "eval_results.json").read_text())
    assert result["steps"] == 2 and result["metrics"].items() >= evaluation.items()
    assert "Step... (2 |" in captured.err


@pytest.mark.slow
def test_fsdp_shards_parameters_and_optimizer_state(train):
    loop = train("fsdp", mesh="fsdp=8", max_steps=2)
    for part in ("params", "opt_state"):
        leaves = [leaf for leaf in jax.tree.leaves(getattr(loop.state, part)) if leaf.size > 1]
        total_size = sum(leaf.nbytes for leaf in leaves)
        device_size = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        bias = [leaf.nbytes for leaf in leaves if leaf.shape == (loop.run.model.config.vocab_size,)]
        assert device_size <= total_size / 8 + sum(bias)  # the vocabulary's bias alone is not split


def test_run_learns_and_output_loads_in_jax_and_pytorch(train):
    loop = train(
        "full",
        devices=1,
        max_steps=60,
        eval_steps=20,
        save_steps=20,
        logging_steps=5,
        learning_rate=1e-2,
        learning_curve=True,
    )
    train_losses = losses(loop.folder)
    assert train_losses[60] < train_losses[1] - 1.5
    files = {path.name for path in loop.folder.iterdir()}
    assert files >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "eval_results.json",
        "learning_curve.png",
        "README.md",
        "metrics.jsonl",
        "checkpoints",
    }
    results = json.loads((loop.folder / "eval_results.json").read_text())
    assert results["eval_perplexity"] == pytest.approx(np.exp(results["eval_loss"]))
    assert 0 < results["eval_accuracy"] <= 1
    assert f"{results['eval_loss']:.4g}" in (loop.folder / "README.md").read_text()
    _assert_torch_gives_the_same_logits(loop)


def _assert_torch_gives_the_same_logits(loop):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForMaskedLM

    from hfseq import FlaxAutoModelForMaskedLM

    ids = np.arange(5, 25, dtype=np.int32)[None]
    ours = FlaxAutoModelForMaskedLM.from_pretrained(loop.folder)(ids).logits
    theirs = AutoModelForMaskedLM.from_pretrained(loop.folder, attn_implementation="eager").eval()
    np.testing.assert_allclose(
        ours, theirs(torch.tensor(ids)).logits.detach().numpy(), rtol=0, atol=2e-5
    )


def test_resume_is_bit_exact(train):
    options = {"devices": 1, "save_steps": 4, "logging_steps": 3, "do_train": True}
    uninterrupted = train("whole", **options)
    with pytest.raises(SystemExit) as left:
        train("parts", callbacks=[stop_at(5)], sigterm_exit_code=143, **options)
    assert left.value.code == 143
    parts = train("parts", **options)
    assert parts.progress.tokens_seen == uninterrupted.progress.tokens_seen
    # the log window of step 4 to 6 was cut at 5
    assert losses(parts.folder) == losses(uninterrupted.folder)
    first, other = (load_file(loop.folder / "model.safetensors") for loop in (uninterrupted, parts))
    assert all(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.slow
def test_the_next_twenty_losses_are_the_same_on_another_number_of_devices(train):
    options = {"global_batch_size": None, "per_device_train_batch_size": 2, "max_steps": 24}
    expected = losses(train("whole", mesh="data=8", **options).folder)
    with pytest.raises(SystemExit):
        train("moved", mesh="data=8", callbacks=[stop_at(4)], **options)
    loop = train("moved", devices=1, **options)
    assert loop.run.batch.rows == 16  # the run's own, where the flags alone would give 2
    assert len(expected) == 24
    assert_same(losses(loop.folder), expected)


def test_resume_from_a_directory_without_checkpoints_is_an_error(train, tmp_path):
    with pytest.raises(
        CheckpointError, match="--resume_from_checkpoint .* contains no checkpoints"
    ):
        train("x", devices=1, resume_from_checkpoint=tmp_path)


@pytest.mark.slow
def test_save_total_limit_keeps_the_newest_and_the_best(train):
    loop = train(
        "limit",
        devices=1,
        max_steps=8,
        save_steps=1,
        eval_steps=1,
        save_total_limit=2,
        learning_rate=0.0,
    )
    kept_steps = sorted(int(path.name) for path in (loop.folder / "checkpoints").iterdir())
    # nothing is learned: the first stays the best
    assert kept_steps == [1, 7, 8] and loop.progress.best_step == 1


@pytest.mark.slow
def test_evaluation_does_not_depend_on_batch_size_and_does_not_disturb_training(train):
    plain = train("plain", devices=1)
    small = train("small", devices=1, eval_steps=2, per_device_eval_batch_size=3)
    assert losses(small.folder) == losses(plain.folder)
    assert small.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=1e-5)


def test_bfloat16_parameters_sum_their_gradients_in_float32(train):
    options = {"devices": 1, "max_steps": 1, "optim": "sgd", "learning_rate": 1000.0}
    options |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "global_batch_size": None}
    starts = []

    class Start(Callback):
        def on_train_begin(self, info):
            starts.append(to_float32(info.state.params))

    def to_float32(params):
        return {p: np.asarray(x, np.float32) for p, x in trees.flatten(params).items()}

    def step(dtype, micro_batches):
        loop = train(
            dtype,
            callbacks=[Start()],
            param_dtype=dtype,
            per_device_train_batch_size=64 // micro_batches,
            gradient_accumulation_steps=micro_batches,
            do_train=True,
            **options,
        )
        return {p: x - starts[0][p] for p, x in to_float32(loop.state.params).items()}

    def norm(tree):
        return np.sqrt(sum((leaf**2).sum() for leaf in tree.values()))

    exact, rounded = step("float32", 1), step("bfloat16", 64)
    assert norm({path: rounded[path] - exact[path] for path in exact}) / norm(exact) < 2**-8


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_checkpoint(train, tmp_path):
    with pytest.raises(NonFiniteLoss, match="the checkpoint of step 2 is kept"):
        train("nan", devices=1, do_train=True, save_steps=2, callbacks=[poison_at(3)])
    kept_steps = sorted(path.name for path in (tmp_path / "nan" / "checkpoints").iterdir())
    assert kept_steps == ["2"]
    assert np.isfinite(load_file(tmp_path / "nan" / "model.safetensors")["lm_head.bias"]).all()


@pytest.mark.slow
def test_a_non_finite_loss_is_noticed_before_the_next_log(train, tmp_path):
    steps = []
    with pytest.raises(NonFiniteLoss, match="at step 4; nothing was saved"):
        train(
            "nan",
            devices=1,
            do_train=True,
            logging_steps=500,
            save_steps=500,
            callbacks=[poison_at(3), lambda info: steps.append(info.progress.step)],
        )
    assert steps == [1, 2, 3]
    assert not (tmp_path / "nan" / "model.safetensors").exists()


@pytest.mark.parametrize(("delay", "noticed"), [(0, 3), (2, 5)])
def test_flag_of_a_step_is_read_after_the_delay(delay, noticed):
    kept = types.SimpleNamespace(wait_and_log_errors=lambda: None, latest_step=lambda: 2)
    check = StepResults(kept, delay)
    training = types.SimpleNamespace(on_non_finite="stop")
    run = types.SimpleNamespace(arguments=types.SimpleNamespace(training=training))

    progress = types.SimpleNamespace(step=0, tokens_seen=0)
    info = types.SimpleNamespace(run=run, progress=progress)

    def end(step):
        progress.step = step
        info.step_metrics = {"bad": np.asarray(step == 3), "tokens": np.asarray(10)}
        check.on_step_end(info)

    for step in range(1, noticed):
        end(step)
    with pytest.raises(NonFiniteLoss, match="at step 3; the checkpoint of step 2 is kept"):
        end(noticed)
    assert progress.tokens_seen == 30  # of the steps that were read
    check = StepResults(kept, 9)
    end(3)
    with pytest.raises(NonFiniteLoss, match="at step 3"):  # before a log or a checkpoint
        check.finish(info)


def test_on_non_finite_skip_keeps_the_state(train, caplog):
    with caplog.at_level("WARNING"):
        loop = train(
            "skip",
            devices=1,
            on_non_finite="skip",
            max_steps=3,
            do_train=True,
            callbacks=[poison_at(1, infinite_rate=True)],
        )
    assert "were skipped" in caplog.text
    finite = [np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(loop.state.opt_state)]
    assert all(finite)


def poison_at(step, infinite_rate=False):
    """A callback that makes the embeddings infinite after `step`."""

    def poison(info):
        if info.progress.step != step:
            return None
        flat = trees.flatten(info.state.params)
        path = next(p for p in flat if p[-1] == "embedding")
        flat[path] = flat[path] * np.inf
        return dataclasses.replace(info.state, params=trees.unflatten(flat))

    return poison


@pytest.mark.slow
def test_evaluation_alone_reads_the_saved_model(train, capsys):
    trained = train("trained", devices=1)
    capsys.readouterr()
    loop = train(
        "evaluated",
        devices=1,
        do_eval=True,
        model_name_or_path=trained.folder,
        model_type=None,
        config_overrides=None,
        report_to="none",  # so that nothing but the results is written
    )
    assert loop.metrics["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=1e-6)
    assert [path.name for path in loop.folder.iterdir()] == ["eval_results.json"]
    assert "Eval... (eval_loss: " in capsys.readouterr().out, "without a step"


@pytest.mark.slow
def test_overwriting_moves_the_old_run_aside(train):
    old = train("again", devices=1)
    train("again", devices=1, overwrite_output_dir=True, max_steps=2)
    moved = [path for path in old.folder.iterdir() if path.name.startswith("previous-")]
    assert (moved[0] / "checkpoints" / "6").is_dir() and list(losses(old.folder)) == [1, 2]


@pytest.mark.slow
def test_streaming_resumes_at_the_very_row(train):
    options = {"devices": 1, "streaming": True, "save_steps": 2, "max_steps": 8}
    uninterrupted = losses(train("stream", **options).folder)
    with pytest.raises(SystemExit):
        train("cut", callbacks=[stop_at(4)], **options)
    assert losses(train("cut", **options).folder) == uninterrupted


@pytest.mark.slow
def test_frozen_parameter_is_unchanged(train):
    first = {}

    def remember(info):
        if not first:  # the rate of the first step is 0
            flat = trees.flatten(info.state.params)
            first.update({path: np.asarray(leaf).copy() for path, leaf in flat.items()})

    options = {"devices": 1, "freeze": "embeddings/", "weight_decay": 0.1, "do_train": True}
    loop = train("frozen", callbacks=[remember], **options)
    last = trees.flatten(loop.state.params)
    for path, leaf in first.items():
        frozen = "embeddings" in path
        assert np.array_equal(leaf, last[path]) == frozen, trees.join(path)


@pytest.mark.slow
def test_bfloat16_computes_in_half_and_keeps_float32_parameters(train, reference):
    expected = one_device(train, reference)
    loop = train("half", devices=1, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loop.state.params)} == {"float32"}
    assert_same(losses(loop.folder), expected, relative=5e-3)
    assert losses(loop.folder) != expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": "data=3"}, "describes 3 devices, but there are 8"),
        ({"mesh": "data=4,tenser=2"}, "did you mean 'tensor'"),
        ({"mesh": "tensor=8", "config_overrides": f"{TINY},hidden_size=36"}, "does not divide"),
        ({"global_batch_size": 12}, "multiple of 8"),
        ({"max_seq_length": 400}, "--max_seq_length 400 exceeds the 38 positions"),
        ({"warmup_steps": 99}, "--warmup_steps 99 exceeds the 6 steps"),
        ({"optim": "adamv"}, "did you mean 'adam"),
        ({"lr_scheduler_type": "linaer"}, "did you mean 'linear'"),
        ({"device": "tpu"}, "--device tpu .*jax only finds"),
        ({"config_overrides": f"{TINY},vocab_size=40"}, "40"),
        ({"config_overrides": "hiden_size=3"}, "hiden_size"),
        ({"model_type": "robrta"}, "did you mean 'roberta'"),
        ({"report_to": "tensorbord"}, "did you mean 'tensorboard'"),
        ({"attn_implementation": "flsh"}, "unknown attention"),
        ({"metric_for_best_model": "bleu"}, "--metric_for_best_model .*bleu: .*eval_loss"),
        ({"profile": "ten"}, "--profile ten .*first-last"),
    ],
)
def test_usage_errors_name_the_value_and_a_fix(train, changes, message):
    with pytest.raises(UsageError, match=message) as raised:
        train("wrong", **changes)
    assert raised.value.exit_code == 2


def test_a_failing_save_keeps_the_previous_checkpoint(train, tmp_path, monkeypatch):
    from hfseq.training.checkpointer import Checkpointer

    real = Checkpointer.save

    def full(self, state, progress):
        if progress.step == 4:
            raise self._not_saved(progress.step, OSError(28, "No space left on device"))
        return real(self, state, progress)

    monkeypatch.setattr(Checkpointer, "save", full)
    with pytest.raises(CheckpointError, match="No space left.*the checkpoint of step 2 is kept"):
        train("disk", devices=1, save_steps=2, do_train=True)
    monkeypatch.undo()
    loop = train("disk", devices=1, save_steps=2, do_train=True)
    assert losses(loop.folder).keys() == {1, 2, 3, 4, 5, 6}
