"""Clocks that jump, rows with a non-finite loss, and workers that die."""

from __future__ import annotations

import time

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from hfseq.errors import DataError, NonFiniteLoss
from hfseq.objectives.mlm import MaskedLM
from hfseq.reports.log import read_metrics
from tests.support import killers
from tests.training.conftest import losses

OPTIONS = {"devices": 1, "save_steps": 2, "max_steps": 10, "save_total_limit": 2}


@pytest.fixture(scope="module")
def plain():
    """The directory of an undisturbed run."""
    return []


@pytest.fixture
def uninterrupted(train, plain):
    if not plain:
        plain.append(train("whole", **OPTIONS).folder)
    return plain[0]


def same(first, other):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (first, other))
    return all((ours[name] == theirs[name]).all() for name in ours | theirs)


# -- the clock


@pytest.mark.slow
def test_a_clock_that_jumps_changes_nothing(train, uninterrupted, monkeypatch, tmp_path):
    """A clock that jumps by years between steps, and a second part in the past."""
    real = time.time
    jumps = iter((10**8, -(10**9), 0, 3600, -3600, -(10**8), 10**7))

    def jump(info):
        offset = next(jumps)
        monkeypatch.setattr(time, "time", lambda: real() + offset)

    part = OPTIONS | {"max_steps": 4, "lr_scheduler_type": "constant"}
    train("jumped", callbacks=[jump], **part)
    monkeypatch.setattr(time, "time", lambda: real() - 10**9)
    second = train("jumped", callbacks=[jump], **part | {"max_steps": 6})
    assert second.start_step == 4  # the newest by its step
    train("steady", **part | {"max_steps": 6})
    assert losses(second.folder) == losses(tmp_path / "steady")
    assert same(second.folder, tmp_path / "steady")
    assert [record["step"] for record in read_metrics(second.folder / "metrics.jsonl")] == sorted(
        record["step"] for record in read_metrics(second.folder / "metrics.jsonl")
    )


# -- rows with a non-finite loss


@pytest.fixture
def breaking_rows(monkeypatch):
    """The loss is NaN for some batches, depending on their content: steps 5, 6 and 8 of twelve."""
    real = MaskedLM.loss

    def loss(self, model, params, batch, rngs, train, **kwargs):
        total, *outputs = real(self, model, params, batch, rngs, train, **kwargs)
        broken = (batch["input_ids"].sum() % 5 == 4) & train
        return jnp.where(broken, jnp.nan, total), *outputs

    monkeypatch.setattr(MaskedLM, "loss", loss)


@pytest.mark.slow
def test_a_row_that_breaks_the_loss_stops_the_run_before_anything_is_lost(
    train, breaking_rows, tmp_path
):
    options = OPTIONS | {"save_steps": 1, "max_steps": 12}
    with pytest.raises(NonFiniteLoss, match=r"NaN or infinite at step (\d+)") as stopped:
        train("broken", **options)
    text = str(stopped.value)
    assert "at step 5" in text and "the checkpoint of step 4 is kept" in text
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    assert all(np.isfinite(value).all() for value in weights.values())
    loop = train("broken", on_non_finite="skip", **options)  # as the message advises
    assert loop.progress.step == 12 and loop.start_step == 4
    weights = load_file(loop.folder / "model.safetensors")
    assert all(np.isfinite(value).all() for value in weights.values())


# -- workers


def test_a_worker_that_dies_while_tokenising_is_named_and_nothing_half_done_is_kept(
    tmp_path, monkeypatch
):
    from datasets import Dataset

    from hfseq.data import tokenize
    from hfseq.data.tokenizers import train_tokenizer

    tokenizer = train_tokenizer([], "vq_transformer", "bytes")
    dataset = Dataset.from_dict({"text": [f"text {i}" for i in range(400)]})

    monkeypatch.setattr(tokenize, "_encode_in_worker", killers.kill)
    with pytest.raises(DataError, match="tokenization process died.*fewer"):
        tokenize.tokenize(dataset, tokenizer, "text", cache_dir=tmp_path, num_proc=2)
    assert [p for p in tmp_path.iterdir() if p.suffix != ".lock"] == []
    assert len(tokenize.tokenize(dataset, tokenizer, "text", cache_dir=tmp_path)) == 400


@pytest.mark.slow
def test_an_error_of_the_thread_that_makes_batches_ends_the_run_with_it(
    train, tmp_path, uninterrupted
):
    """Earlier batches are trained on and saved. Without the error, the run resumes."""

    def install(info):
        if info.progress.step == 1:  # some batches are made already
            real = info.run.data.train.indices

            def indices(step):
                if step >= 7:
                    raise DataError("the disk with the data is gone")
                return real(step)

            info.run.data.train.indices = indices

    with pytest.raises(DataError, match="the disk with the data is gone"):
        train("broken", callbacks=[install], **OPTIONS)
    loop = train("broken", **OPTIONS)
    assert loop.start_step == 6 and losses(loop.folder) == losses(uninterrupted)
    assert same(loop.folder, uninterrupted)
