"""Runs on speech with text, by connectionist temporal classification."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.objectives.metrics import edit_distance, error_rates
from tests.support.audio import write_bad_audio, write_words
from tests.support.models import trees_equal
from tests.training.conftest import check_resume, check_two_devices, make_runner

pytest.importorskip("soundfile")
#: A frame has 400 samples (25 ms), and a letter has three frames.
SIZES = (
    "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,"
    "conv_dim=[32,32,32],conv_stride=[10,10,4],conv_kernel=[20,10,4],num_feat_extract_layers=3,"
    "feat_extract_norm=layer,do_stable_layer_norm=true,num_conv_pos_embeddings=4,"
    "num_conv_pos_embedding_groups=2,codevector_dim=16,num_codevectors_per_group=8,"
    "proj_codevector_dim=16,num_negatives=10,layerdrop=0,mask_time_length=3,hidden_dropout=0"
)


def write_table(folder, split, count, seed=0):
    words = write_words(folder / split, count, seed)
    rows = [f"{split}/{number:03}.wav,{word.upper()}!\n" for number, word in enumerate(words)]
    (folder / f"{split}.csv").write_text("audio,text\n" + "".join(rows))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("spoken")
    write_table(path, "train", 64)
    write_table(path, "validation", 8, seed=1)
    return path


@pytest.fixture
def spell(folder, tmp_path):
    return make_runner(
        "ctc",
        tmp_path,
        config_overrides=SIZES,
        mask_time_prob=0.0,
        train_file=folder / "train.csv",
        validation_file=folder / "validation.csv",
        chars_to_ignore="!",
        max_duration_in_seconds=1.0,
        decode_workers=0,
        pad_to_multiple_of=100,
        global_batch_size=8,
        per_device_eval_batch_size=4,
        learning_rate=2e-3,
        max_steps=3,
    )


def test_edits_are_counted():
    assert edit_distance("kitten", "sitting") == 3 and edit_distance("", "abc") == 3
    assert edit_distance("abc", "") == 3 and edit_distance("flaw", "lawn") == 2
    rates = error_rates(["one too three", ""], ["one two three", "four"])
    assert rates == {"wer": 2 / 4, "cer": (1 + 4) / 17}
    random = np.random.default_rng(0)

    def slow(first, other):
        if not first or not other:
            return len(first) + len(other)
        substitution = slow(first[1:], other[1:]) + (first[0] != other[0])
        return min(substitution, slow(first[1:], other) + 1, slow(first, other[1:]) + 1)

    for _ in range(20):
        pair = ["".join(random.choice(list("ab"), random.integers(0, 6))) for _ in range(2)]
        assert edit_distance(*pair) == slow(*pair), pair


@pytest.mark.slow
def test_broken_audio_and_too_long_texts_do_not_count(spell, tmp_path, caplog):
    rows = write_table(tmp_path, "mixed", 6)
    problems = write_bad_audio(tmp_path / "bad")
    del problems["short.wav"]
    rows += [f"bad/{name},A\n" for name in problems]
    rows += ["mixed/000.wav," + "ab" * 16 + "\n"]
    (tmp_path / "mixed.csv").write_text("audio,text\n" + "".join(rows))
    loop = spell(max_steps=1, validation_file=tmp_path / "mixed.csv")
    metrics = loop.metrics
    assert metrics["eval_left_out"] == len(problems) + 1 and np.isfinite(metrics["eval_loss"])
    assert metrics["eval_cer"] > 0.5 and metrics["eval_wer"] >= 1
    assert any("requires 32 frames" in text for text in caplog.messages)
    again = spell("again", max_steps=1, max_duration_in_seconds=0.62)
    assert any("seconds long, more than the maximum of 0.62" in text for text in caplog.messages)
    assert again.metrics["eval_left_out"] >= 1


@pytest.mark.slow
def test_run_learns_and_output_loads_in_jax_and_pytorch(spell, folder):
    loop = spell(max_steps=300, logging_steps=50, warmup_steps=20, learning_rate=3e-3)
    assert loop.metrics["eval_cer"] < 0.1
    pytest.importorskip("torch")
    from transformers import AutoProcessor, Wav2Vec2ForCTC

    from hfseq.data.audio import AudioFile

    model, processor = (
        loaded_class.from_pretrained(loop.folder)
        for loaded_class in (Wav2Vec2ForCTC, AutoProcessor)
    )
    lines = (folder / "validation.csv").read_text().splitlines()[1:]
    right = 0
    for line in lines:
        name, text = line.split(",")
        samples = AudioFile(folder / name).read()
        inputs = processor(samples, sampling_rate=16000, return_tensors="pt")
        decoded = processor.batch_decode(model.eval()(**inputs).logits.argmax(-1))
        right += decoded == [text.lower().removesuffix("!")]
    assert right >= 0.5 * len(lines)
    # A separate evaluation has the same result.
    again = spell(
        "judged",
        model_name_or_path=loop.folder,
        config_overrides=None,
        max_steps=None,
        train_file=None,
        do_eval=True,
    )
    assert again.metrics["eval_cer"] == pytest.approx(loop.metrics["eval_cer"])
    assert again.metrics["eval_loss"] == pytest.approx(loop.metrics["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_training_continues_from_a_pretrained_encoder(spell, folder, tmp_path):
    from tests.support import runs

    flags = {
        "output_dir": tmp_path / "pretrained",
        "config_overrides": SIZES,
        "mask_time_prob": 0.5,
        "train_file": folder / "train.csv",
        "max_duration_in_seconds": 0.5,
        "max_steps": 2,
        "global_batch_size": 8,
        "decode_workers": 2,
        "compilation_cache_dir": "none",
    }
    pretrained = runs.train([f"--{n}={v}" for n, v in flags.items()], "wav2vec2", 1)
    shutil.rmtree(tmp_path / "pretrained" / "checkpoints", ignore_errors=True)
    loop = spell(
        model_name_or_path=pretrained.folder,
        config_overrides=None,
        max_steps=1,
        learning_rate=0.0,
        freeze_feature_extractor=True,
        mask_time_prob=0.2,
    )
    assert trees_equal(loop.state.params["wav2vec2"], pretrained.state.params["wav2vec2"])
    assert loop.state.params["lm_head"]["kernel"].shape == (32, 9)


@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_devices(spell):
    check_two_devices(spell, optim="sgd", learning_rate=0.1, max_steps=5, mask_time_prob=0.3)


@pytest.mark.slow
def test_resume_is_bit_exact(spell):
    check_resume(spell, mask_time_prob=0.3, save_steps=2, max_steps=4)


def test_untrainable_data_is_rejected(spell, folder):
    with pytest.raises(UsageError, match="directories contain no transcripts: use tables"):
        spell(train_file=None, train_dir=folder / "train")
    with pytest.raises(UsageError, match="--min_duration_in_seconds 2.0 is greater than"):
        spell(min_duration_in_seconds=2.0)
