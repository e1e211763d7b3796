"""A translation run from files to a model: vocabulary, scores, saved settings."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import hfseq
from hfseq.checkpoints.storage import check_output_dir
from hfseq.data import tokenizers
from hfseq.errors import UsageError
from hfseq.generation import generate, request
from hfseq.nn import trees
from hfseq.training import throughput
from tests.support.models import bert_config, trees_equal
from tests.training.conftest import losses, stop_at

WMT = (
    "d_model=32,max_position_embeddings=40,encoder_layers=1,decoder_layers=1,"
    "encoder_attention_heads=4,decoder_attention_heads=4,encoder_ffn_dim=64,decoder_ffn_dim=64"
)
MARIAN = {
    "d_model": 32,
    "max_position_embeddings": 40,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "share_encoder_decoder_embeddings": False,
    "tie_word_embeddings": False,
}
OPTIONS = {
    "model_type": None,
    "config_overrides": WMT,
    "tokenizer_name": None,
    "vocab_size": 120,
    "tokenizer_algorithm": "unigram",
    "source_lang": "en",
    "target_lang": "no",
    "source_column": "source",
    "target_column": "target",
    "save_steps": 2,
}


@pytest.fixture
def trainings(monkeypatch):
    """Counts how often a vocabulary is trained."""
    calls, train = [], tokenizers.train_joint_tokenizer
    monkeypatch.setattr(
        tokenizers,
        "train_joint_tokenizer",
        lambda *args, **options: (calls.append(args), train(*args, **options))[1],
    )
    return calls


@pytest.mark.slow
def test_vocabulary_is_trained_once_and_reused_on_resume(train, trainings):
    with pytest.raises(SystemExit):
        train("parts", 1, "translation", callbacks=[stop_at(3)], do_train=True, **OPTIONS)
    loop = train("parts", 1, "translation", do_train=True, **OPTIONS)
    assert len(trainings) == 1 and 20 < len(loop.run.tokenizer) <= 120
    assert loop.progress.step == 6
    assert loop.run.model.config.model_type == "wmt_transformer"
    assert loop.run.model.config.vocab_size == len(loop.run.tokenizer)
    assert not list(loop.folder.glob("tokenizer.[!j]*"))  # neither leftovers nor a lock


def test_scores_samples_and_languages_are_left_with_the_model(train, corpus, caplog):
    caplog.set_level("INFO", "hfseq")
    loop = train(
        "scored",
        1,
        "translation",
        **OPTIONS,
        eval_steps=6,
        predict_with_generate=True,
        test_file=corpus / "valid-pairs.jsonl",
        do_train=True,
        do_eval=True,
        do_predict=True,
        num_beams=2,
        max_new_tokens=6,
        max_generate_samples=5,
        metric_for_best_model="bleu",
    )
    assert {"eval_bleu", "eval_chrf", "train_cross_entropy", "predict_bleu"} <= set(loop.metrics)
    assert "eval_cross_entropy" not in loop.metrics  # evaluation smooths nothing: it is the loss
    assert loop.progress.best_metric is not None and "tok:13a" in caplog.text
    lines = (loop.folder / "generated_predictions.txt").read_text().splitlines()
    assert len(lines) == 20  # all of the test split
    saved = json.loads((loop.folder / "generation_config.json").read_text())
    assert saved["num_beams"] == 2 and saved["max_length"] == 7
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(loop.folder)
    assert (config.source_lang, config.target_lang) == ("en", "no")
    assert config.decoder_start_token_id == config.pad_token_id == loop.run.tokenizer.pad_token_id
    check_output_dir(loop.folder)  # all that a run leaves is known as such


@pytest.mark.slow
def test_token_rates_exclude_padding(train):
    loop = train("rates", 1, "translation", max_steps=2, do_train=True)
    counts = loop.run.data.description["train"]
    metrics = loop.metrics
    padded = counts["rows"] * (32 + 32) / counts["tokens"]
    assert padded > 1
    ratio = metrics["train_padded_tokens_per_second"] / metrics["train_tokens_per_second"]
    assert ratio == pytest.approx(padded)
    assert metrics["train_padded_mfu"] > metrics["train_mfu"] > 0


def test_flops_of_pairs_use_both_lengths():
    params = {
        "encoder": {"dense": {"kernel": np.zeros((8, 16))}},
        "decoder": {"dense": {"kernel": np.zeros((8, 60))}},
        "shared": {"embedding": np.zeros((100, 8))},
    }
    config = types.SimpleNamespace(vocab_size=100, d_model=8, encoder_layers=2, decoder_layers=3)
    model = types.SimpleNamespace(abstract_params=params, config=config)
    from hfseq.data.pairs import PairSums

    pairs = [(5, 4), (9, 7)]
    s, t = (sum(side) for side in zip(*pairs, strict=True))
    squares = [sum(pair[side] ** 2 for pair in pairs) for side in (0, 1)]
    products = sum(a * b for a, b in pairs)
    crossed = 3 * 2 * 8 * 8
    matrices = 6 * (s * (8 * 16 + crossed) + t * (8 * 60 - crossed + 8 * 100))
    attention = 12 * 8 * (2 * squares[0] + 3 * (squares[1] / 2 + products))
    flops = throughput.pair_flops(model, PairSums(s, t, *squares, products))
    assert flops == matrices + attention


@pytest.mark.slow
def test_a_model_in_fp8_writes_with_the_scales_of_its_training(train, monkeypatch):
    """Generation in FP8 uses the scales of the state, and the model does not keep them."""
    observed_extra = []
    prepare = request.make_request

    def noted(model, *args, **options):
        observed_extra.append(model.extra)
        return prepare(model, *args, **options)

    monkeypatch.setattr(generate, "make_request", noted)
    loop = train(
        "fp8",
        1,
        "translation",
        **OPTIONS | {"save_steps": None},
        eval_steps=2,
        max_steps=2,
        predict_with_generate=True,
        do_train=True,
        do_eval=True,
        num_beams=2,
        max_new_tokens=6,
        max_generate_samples=3,
        precision="fp8_delayed",
        fp8_amax_history_length=4,
    )
    assert "eval_bleu" in loop.metrics
    assert trees_equal(jax.device_get(observed_extra[-1]), jax.device_get(loop.state.extra))
    assert loop.run.model.extra == {}


@pytest.mark.slow
def test_a_pair_of_models_learns_to_translate(train, corpus, tmp_path):
    """The model has no vocabulary at the top level. The loss uses that of the decoder."""
    from transformers import AutoTokenizer, EncoderDecoderConfig

    from hfseq import FlaxEncoderDecoderModel

    words = AutoTokenizer.from_pretrained(corpus / "marian")
    size, pad, end = len(words), words.pad_token_id, words.eos_token_id
    sides = [bert_config(vocab_size=size, max_position_embeddings=40) for _ in range(2)]
    tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*sides, **tokens)
    FlaxEncoderDecoderModel(config).save_pretrained(tmp_path / "pair")
    start = {"model_type": None, "config_overrides": None, "model_name_or_path": tmp_path / "pair"}
    loop = train("fine", 2, "translation", do_train=True, max_steps=20, **start)
    train_losses = losses(loop.folder)
    assert train_losses[20] < 0.9 * train_losses[1]
    FlaxEncoderDecoderModel.from_pretrained(loop.folder)
    sides[1].vocab_size = 20
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*sides, **tokens)
    FlaxEncoderDecoderModel(config).save_pretrained(tmp_path / "pair")
    with pytest.raises(UsageError, match="but config.vocab_size is 20"):
        train("small", 2, "translation", do_train=True, max_steps=1, **start)


def test_decoder_keeps_a_vocabulary_that_is_larger_than_the_source(train, corpus, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus / "marian")
    count = len(tokenizer)
    sizes = MARIAN | {
        "vocab_size": count,
        "decoder_vocab_size": count + 6 + count % 2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }
    model = hfseq.FlaxMarianMTModel(transformers.MarianConfig(**sizes))
    params = trees.unflatten(
        {
            # The best token is unknown to the tokenizer, the second best is its last one.
            path: leaf.at[..., [count + 3, count - 1]].set([60.0, 50.0])
            if path[-1] == "final_logits_bias"
            else leaf
            for path, leaf in trees.flatten(model.params).items()
        }
    )
    model.save_pretrained(tmp_path / "source", params=params)
    tokenizer.save_pretrained(tmp_path / "source")
    before = load_file(tmp_path / "source" / "model.safetensors")
    loop = train(
        "run",
        2,
        "translation",
        **{**OPTIONS, "config_overrides": None, "vocab_size": None, "tokenizer_algorithm": None},
        model_name_or_path=tmp_path / "source",
        mesh="tensor=2",
        do_train=True,
        do_predict=True,
        test_file=corpus / "valid-pairs.jsonl",
        predict_with_generate=True,
        num_beams=1,
        max_new_tokens=3,
        max_generate_samples=1,
    )
    saved = load_file(loop.folder / "model.safetensors")
    assert {name: leaf.shape for name, leaf in saved.items()} == {
        name: leaf.shape for name, leaf in before.items()
    }
    generated = (loop.folder / "generated_predictions.txt").read_text()
    assert tokenizer.decode([count - 1]) not in generated
