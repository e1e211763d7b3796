"""Runs of wav2vec 2.0 on speech without text."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import DataError, UsageError
from tests.support.audio import write_bad_audio, write_words
from tests.training.conftest import check_resume, check_two_devices, losses, make_runner

pytest.importorskip("soundfile")
#: A frame has 100 samples (6 ms), and a letter has ten frames.
SIZES = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,"
    "conv_dim=[16,32],conv_stride=[10,10],conv_kernel=[20,10],num_feat_extract_layers=2,"
    "feat_extract_norm=layer,do_stable_layer_norm=true,num_conv_pos_embeddings=8,"
    "num_conv_pos_embedding_groups=2,codevector_dim=16,num_codevectors_per_group=8,"
    "proj_codevector_dim=16,num_negatives=10,layerdrop=0.1,mask_time_length=5"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound")
    write_words(path / "train", 48)
    write_words(path / "validation", 8, seed=1)
    return path


@pytest.fixture
def pretrain(folder, tmp_path):
    return make_runner(
        "wav2vec2",
        tmp_path,
        config_overrides=SIZES,
        mask_time_prob=0.5,
        train_dir=folder / "train",
        validation_dir=folder / "validation",
        max_duration_in_seconds=0.5,
        min_duration_in_seconds=0.1,
        decode_workers=0,
        pad_to_multiple_of=100,
        global_batch_size=8,
        per_device_eval_batch_size=4,
        learning_rate=2e-3,
        max_steps=3,
    )


def test_step_skips_broken_audio(pretrain, tmp_path, caplog):
    write_words(tmp_path / "mixed", 8)
    problems = write_bad_audio(tmp_path / "mixed" / "bad")
    loop = pretrain(
        max_steps=1,
        max_duration_in_seconds=0.2,
        per_device_eval_batch_size=12,
        validation_dir=tmp_path / "mixed",
    )
    metrics = loop.metrics
    assert metrics["eval_left_out"] == len(problems) and 0.3 < metrics["eval_masked_share"] < 0.6
    assert np.isfinite(metrics["eval_loss"]) and metrics["eval_codevector_perplexity"] > 2
    for name, reason in problems.items():
        assert any(name in text and reason in text for text in caplog.messages), name


@pytest.mark.slow
def test_run_learns_and_output_loads_in_jax_and_pytorch(pretrain):
    loop = pretrain(max_steps=300, logging_steps=20, warmup_steps=20, gumbel_temperature_decay=0.99)
    train_losses = losses(loop.folder)
    assert train_losses[300] < 0.8 * train_losses[20] and loop.metrics["eval_accuracy"] > 0.3
    pytest.importorskip("torch")
    from transformers import AutoFeatureExtractor, Wav2Vec2ForPreTraining

    assert Wav2Vec2ForPreTraining.from_pretrained(loop.folder).config.hidden_size == 32
    assert AutoFeatureExtractor.from_pretrained(loop.folder).return_attention_mask


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_devices(pretrain):
    # Adam amplifies rounding errors of zero gradients, such as those of key biases.
    check_two_devices(pretrain, optim="sgd", learning_rate=0.1, max_steps=5)


@pytest.mark.slow
def test_resume_is_bit_exact(pretrain):
    # The temperature decreases with the steps: a resumed run uses that of its step.
    check_resume(pretrain, gumbel_temperature_decay=0.9, save_steps=2, max_steps=4)


def test_untrainable_data_is_rejected(pretrain, tmp_path):
    write_bad_audio(tmp_path / "bad")
    with pytest.raises(DataError, match="none of the first 4 audio files of train"):
        pretrain(train_dir=tmp_path / "bad")
    with pytest.raises(UsageError, match="'bert' has no codebook"):
        pretrain(model_type="bert", config_overrides=None)
    with pytest.raises(UsageError, match="apply_spec_augment=False disables"):
        pretrain(config_overrides=f"{SIZES},apply_spec_augment=false")
    with pytest.raises(UsageError, match="0.005 is 80 samples"):
        pretrain(max_duration_in_seconds=0.005, min_duration_in_seconds=0.0)
    with pytest.raises(UsageError, match="no data: .*--train_dir"):
        pretrain(train_dir=None, validation_dir=None)
