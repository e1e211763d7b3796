"""Truncated back-propagation: windows of a row, the state between them, and exact resumption."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.training import setup, state
from hfseq.training.checkpointer import Progress
from hfseq.training.setup import record_windows
from tests.training.conftest import assert_same, losses, stop_at

DROPOUT = "residual_dropout=0.1,sinusoid_dropout=0.2,layer_dropout=0.2"
TINY = (
    "hidden_size=16,num_hidden_layers=1,head_dim=8,num_codes=6,window_size=8,block_size=4,"
    f"sinusoid_base=100,commitment_cost=0.01,{DROPOUT}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text of 1,000 bytes in a file without extension, and a byte vocabulary."""
    from hfseq.data.tokenizers import train_tokenizer

    folder = tmp_path_factory.mktemp("raw")
    draw = np.random.default_rng(0)
    (folder / "text8").write_bytes(bytes(draw.choice(list(b"abcdefgh \n"), 1000).tolist()))
    train_tokenizer([], "vq_transformer", "bytes", output_dir=folder / "bytes")
    return folder


@pytest.fixture
def run(train, text):
    """Trains on that text: rows of 32 tokens in four windows."""

    def start(output="run", devices=1, **changes):
        options = {
            "model_type": "vq_transformer",
            "config_overrides": TINY,
            "block_size": 32,
            "tokenizer_name": text / "bytes",
            "train_file": text / "text8",
            "validation_file": None,
            "sample_by": "raw",
            "update_length": 8,
            "global_batch_size": 4,
            "max_steps": 10,
            "do_train": True,
        }
        return train(output, devices=devices, objective="clm", **(options | changes))

    return start


@pytest.fixture(scope="module")
def run_cache():
    return {}


def reference(run, run_cache):
    """Losses and state of ten uninterrupted steps on one device."""
    if not run_cache:
        loop = run("whole")
        run_cache |= {
            "losses": losses(loop.folder),
            "state": jax.device_get(loop.state),
            "saved": load_file(loop.folder / "model.safetensors"),
        }
    return run_cache


def assert_same_state(first, other, relative=2e-4):
    for name in ("params", "extra", "memory"):
        flat, expected = trees.flatten(getattr(first, name)), trees.flatten(getattr(other, name))
        for path, leaf in expected.items():
            actual, reference_leaf = np.asarray(flat[path]), np.asarray(leaf)
            scale = max(np.abs(reference_leaf).max(), 1.0)
            assert np.abs(actual - reference_leaf).max() <= relative * scale, (name, path)


@pytest.mark.slow
def test_resume_within_a_sequence_is_bit_exact(run, run_cache):
    uninterrupted = reference(run, run_cache)
    with pytest.raises(SystemExit):
        run("parts", callbacks=[stop_at(6)])  # after the second of four windows
    parts = run("parts")
    assert losses(parts.folder) == uninterrupted["losses"]
    for item, other in zip(
        jax.tree.leaves(jax.device_get(parts.state)),
        jax.tree.leaves(uninterrupted["state"]),
        strict=True,
    ):
        assert np.array_equal(item, other)
    saved = load_file(parts.folder / "model.safetensors")
    assert {name for name in saved if "codebook" in name} >= {
        "model.layers.0.attention.codebook.sums",
        "model.layers.0.attention.codebook.counts",
    }
    assert all(np.array_equal(saved[name], leaf) for name, leaf in uninterrupted["saved"].items())


@pytest.mark.slow
def test_the_codebook_moves_and_its_batch_sums_are_empty_after_a_step(run, run_cache):
    flat = trees.flatten(reference(run, run_cache)["state"].extra["codebook"])
    assert all(not leaf.any() for path, leaf in flat.items() if path[-1].startswith("new_"))
    counts = [leaf for path, leaf in flat.items() if path[-1] == "counts"]
    assert all(leaf.max() > 1.0 for leaf in counts)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [2, 4])
def test_micro_batches_give_the_same_losses_state_and_codebook(run, run_cache, micro):
    uninterrupted = reference(run, run_cache)
    loop = run("micro", gradient_accumulation_steps=micro)
    assert_same(losses(loop.folder), uninterrupted["losses"], relative=1e-4)
    assert_same_state(loop.state, uninterrupted["state"])


@pytest.mark.slow
def test_a_mesh_with_accumulation_gives_the_same_losses_state_and_codebook(run, run_cache):
    uninterrupted = reference(run, run_cache)
    loop = run("mesh", devices=2, mesh="data=2", gradient_accumulation_steps=2)
    assert_same(losses(loop.folder), uninterrupted["losses"], relative=1e-4)
    assert_same_state(loop.state, uninterrupted["state"])
    shard_shapes = [
        leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(loop.state.memory)
    ]
    assert all(shape[0] == 2 for shape in shard_shapes)


@pytest.mark.slow
def test_scanned_layers_give_the_same_losses_and_resume_with_their_state(run, run_cache):
    options = {"scan_layers": True, "config_overrides": f"{TINY},num_hidden_layers=2"}
    plain = losses(run("plain", config_overrides=options["config_overrides"]).folder)
    with pytest.raises(SystemExit):
        run("scanned", callbacks=[stop_at(5)], gradient_accumulation_steps=2, **options)
    scanned = run("scanned", gradient_accumulation_steps=2, **options)
    assert_same(losses(scanned.folder), plain, relative=1e-4)


@pytest.mark.slow
def test_streams_resume_and_carry_their_state_over_the_end_of_a_row(run):
    options = {"state_reset": "never", "max_steps": 40, "logging_steps": 8}
    uninterrupted = run("stream", **options)
    with pytest.raises(SystemExit):
        run("cut", callbacks=[stop_at(21)], **options)
    assert losses(run("cut", **options).folder) == losses(uninterrupted.folder)
    positions = next(
        leaf
        for path, leaf in trees.flatten(uninterrupted.state.memory).items()
        if path[-1] == "position"
    )
    # 950 bytes of training text are 119 rows of 8, 30 per stream: the last stream restarted.
    assert len(uninterrupted.run.data.train) == 30
    assert positions.tolist() == [320, 320, 320, 80]


@pytest.mark.slow
def test_windows_match_the_full_row_without_dropout(run):
    """At learning rate 0, four windows have the loss of the row: the state carries everything."""
    quiet = ",".join(part for part in TINY.split(",") if "dropout" not in part)
    options = {"learning_rate": 0.0, "warmup_steps": 0, "config_overrides": f"{quiet},ema_decay=1"}
    steps = losses(run("windows", max_steps=4, **options).folder)
    uninterrupted = losses(run("rows", max_steps=1, update_length=None, **options).folder)
    assert np.mean(list(steps.values())) == pytest.approx(uninterrupted[1], rel=1e-4)


@pytest.mark.slow
def test_evaluation_and_results_hold_bits_per_byte_and_the_use_of_codes(run):
    loop = run(
        "judged",
        max_steps=4,
        do_eval=True,
        do_predict=True,
        test_split_percentage=10,
        eval_steps=2,
        max_eval_batches=1,
        per_device_eval_batch_size=1,
    )
    results = json.loads((loop.folder / "eval_results.json").read_text())
    predicted = json.loads((loop.folder / "predict_results.json").read_text())
    for prefix, metrics in (("eval", results), ("predict", predicted)):
        bits = metrics[f"{prefix}_loss"] / np.log(2)
        assert metrics[f"{prefix}_bits_per_byte"] == pytest.approx(bits)
        assert metrics[f"{prefix}_code_perplexity"] > 1
    log = [json.loads(line) for line in (loop.folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record["eval_loss"] for record in log if "eval_loss" in record]
    assert len(evaluated) == 3  # two of one batch, and one of all at the end
    assert evaluated[1] != evaluated[2] == results["eval_loss"]
    assert loop.progress.best_metric == min(evaluated[:2])
    trained = [record for record in log if "train_loss" in record]
    assert all(record["train_auxiliary_loss"] > 0 for record in trained)
    assert trained[0]["train_perplexity"] == pytest.approx(np.exp(trained[0]["train_loss"]))


@pytest.mark.slow
def test_evaluation_loads_the_codebook_from_the_saved_model(run):
    trained = run("trained", do_eval=True)
    loop = run(
        "evaluated",
        do_train=None,
        do_eval=True,
        model_name_or_path=trained.folder,
        model_type=None,
        config_overrides=None,
        max_steps=None,
        update_length=None,
        warmup_steps=None,
    )
    assert loop.metrics["eval_loss"] == pytest.approx(trained.metrics["eval_loss"], rel=1e-6)
    used = "eval_code_perplexity"
    assert loop.metrics[used] == pytest.approx(trained.metrics[used], rel=1e-6)


@pytest.mark.slow
def test_the_mean_of_checkpoints_has_the_mean_of_their_statistics(run):
    states = {}

    def keep(info):
        states[info.progress.step] = jax.device_get(info.state.extra)

    loop = run(
        "mean",
        max_steps=4,
        save_steps=2,
        average_checkpoints=2,
        callbacks=[keep],
    )
    expected = jax.tree.map(lambda a, b: (a + b) / 2, states[2], states[4])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), loop.state.extra, expected
    )


@pytest.mark.slow
def test_skipped_step_keeps_the_codebook(run):
    extra_by_step = {}

    def poison(info):
        extra_by_step[info.progress.step] = jax.device_get(info.state.extra)
        if info.progress.step != 2:
            return None
        flat = trees.flatten(info.state.params)
        path = next(p for p in flat if p[-1] == "embedding")
        flat[path] = flat[path] * np.inf
        return dataclasses.replace(info.state, params=trees.unflatten(flat))

    run(
        "skipped",
        max_steps=3,
        on_non_finite="skip",
        callbacks=[poison],
    )
    same = jax.tree.map(lambda a, b: bool((a == b).all()), extra_by_step[3], extra_by_step[2])
    assert all(jax.tree.leaves(same))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), extra_by_step[2], extra_by_step[1])
    assert any(jax.tree.leaves(moved))


@pytest.mark.slow
def test_rows_after_a_skipped_first_step_restart(run):
    def poison(info):
        if info.progress.step != 4:  # the next step is the first window of other rows
            return None
        flat = trees.flatten(info.state.params)
        path = next(p for p in flat if p[-1] == "embedding")
        params = trees.unflatten(flat | {path: flat[path] * np.inf})
        return dataclasses.replace(info.state, params=params)

    loop = run(
        "poisoned",
        max_steps=5,
        on_non_finite="skip",
        gradient_accumulation_steps=2,
        callbacks=[poison],
    )
    left, empty = loop.state.memory, loop.run.model.init_cache(4, 0)
    jax.tree.map(np.testing.assert_array_equal, left, empty)


@pytest.mark.slow
def test_a_checkpoint_of_another_cut_is_refused_with_both_cuts(run):
    with pytest.raises(SystemExit):
        run("cut", callbacks=[stop_at(3)])
    for changes, message in (
        ({"update_length": 16}, "step 3 .* with --update_length 8 .* with --update_length 16"),
        ({"state_reset": "never"}, "--state_reset sequence .* --state_reset never"),
        ({"block_size": 16}, "--block_size 32 .* --block_size 16"),
        ({"global_batch_size": 8}, "--global_batch_size 4, .* --global_batch_size 8: "),
        ({"update_length": None}, "with --update_length 8 .* without --update_length"),
    ):
        with pytest.raises(UsageError, match=message):
            run("cut", **changes)


def test_a_checkpoint_without_windows_does_not_go_on_in_windows():
    windows, progress = setup.Windows(8, 4, True), Progress(step=1)
    with pytest.raises(UsageError, match="without --update_length, .* --state_reset never"):
        record_windows(windows, 4, progress)
    progress.step = 0
    record_windows(windows, 4, progress)  # a fresh run records its own
    progress.step = 1
    record_windows(windows, 4, progress)


def test_rows_are_reset_on_the_second_axis_of_stacks():
    memory = state.Carry(3, 4, (("layers",),))
    old = {"layers": {"a": np.ones((2, 3, 5))}, "position": np.array([7, 8, 9])}
    reset_memory = memory.reset(
        old, np.array([False, True, False]), jax.tree.map(np.zeros_like, old)
    )
    assert reset_memory["position"].tolist() == [7, 0, 9]
    assert reset_memory["layers"]["a"].sum(axis=(0, 2)).tolist() == [10, 0, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"update_length": 12}, "rows of 32 tokens .* divisor .*1, 2, 4, 8, 16, 32"),
        ({"update_length": 64}, "--update_length 64: rows of 32 tokens"),
        ({"state_reset": "sometimes"}, "sequence, never"),
        ({"sample_by": None, "dataset_name": "none"}, "Add --cross_documents"),
        (
            {"model_type": "gpt2", "config_overrides": "n_embd=8,n_layer=1,n_head=1"},
            "'gpt2' caches keys and values .* vq_transformer",
        ),
        ({"config_overrides": f"{TINY},attention_type=full"}, "attention_type=full .* no state"),
        (
            {"train_file": "images.npy", "sample_by": None, "state_reset": "never"},
            "images are independent rows.* Drop --state_reset",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused_with_a_reason(run, changes, message):
    changes = {"train_file": None, **changes} if "dataset_name" in changes else changes
    with pytest.raises(UsageError, match=message):
        run("wrong", **changes)


def test_other_objectives_reject_update_length():
    training = SimpleNamespace(update_length=8, state_reset="sequence", do_train=True)
    objective = SimpleNamespace(carries_state=False, name="mlm")
    model = SimpleNamespace(config=SimpleNamespace(model_type="roberta"), fixed_state=False)
    with pytest.raises(UsageError, match="'mlm' requires whole rows"):
        setup.plan_windows(SimpleNamespace(training=training, data=None), objective, model, 32)
