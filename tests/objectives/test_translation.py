"""Translation in the training loop: packed pairs that do not attend to each other."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from hfseq.data.arguments import TranslationArguments
from hfseq.data.pairs import PackedPairs, PairRows
from hfseq.errors import UsageError
from hfseq.objectives.translation import Translation
from tests.data.samples import make_texts
from tests.objectives.conftest import loss_of, loss_of_batch, numbers

SIDES = {
    f"{side}_{name}": n
    for side in ("encoder", "decoder")
    for name, n in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()
}
SIZES = {
    "bart": {"d_model": 32, "max_position_embeddings": 64, **SIDES},
    "marian": {"d_model": 32, "max_position_embeddings": 64, **SIDES},
    "pegasus": {"d_model": 32, "max_position_embeddings": 64, **SIDES},
    "wmt_transformer": {"d_model": 32, "max_position_embeddings": 64, **SIDES},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_of):
    return tokenizer_of("marian")


@pytest.fixture
def task_of(tokenizer, tmp_path):
    """Returns a function from a model type to (objective, model) without dropout."""

    def make(model_type="bart", load=True, **flags):
        from hfseq import plugins

        spec = plugins.load().architectures.get(model_type)
        variant = spec.load_config()
        off = {
            name: 0.0
            for name in ("dropout", "attention_dropout", "dropout_rate")
            if hasattr(variant(), name)
        }
        config = variant(vocab_size=len(tokenizer), **SIZES[model_type], **off)
        Translation.configure(config, tokenizer, from_scratch=True)
        flags = {"max_source_length": 60, "max_target_length": 50, **flags}
        data = TranslationArguments(data_cache_dir=str(tmp_path / "cache"), **flags)
        model = spec.load_head("ForSeq2SeqLM")(config, _do_init=load)
        task = Translation(data, tokenizer, config)
        task.prepare(model)
        return task, model

    return make


@pytest.fixture
def splits():
    """Returns pairs of up to a dozen words."""
    from datasets import Dataset

    sources = [" ".join(text.split()[: 2 + i % 4]) for i, text in enumerate(make_texts(40, seed=5))]
    targets = [" ".join(reversed(text.split())) for text in sources]
    pairs = Dataset.from_dict({"source": sources, "target": targets})
    return {"train": pairs, "validation": pairs}


def every_row(rows):
    return rows.fetch(np.arange(len(rows)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    ["bart", "wmt_transformer", "t5", "marian", "pegasus"],
)
def test_packed_losses_are_those_of_the_pairs_one_by_one(task_of, splits, model_type):
    task, model = task_of(model_type)
    packed = task.make_rows(splits, "train", 60)[0]
    single = task.make_rows(splits, "validation", 60)[0]
    assert isinstance(packed, PackedPairs) and isinstance(single, PairRows)
    assert len(packed) < 30 < len(single) == 40
    together, alone = (loss_of(task, model, every_row(rows)) for rows in (packed, single))
    assert together[1] == alone[1]
    assert together[0] == pytest.approx(alone[0], rel=2e-5)


def test_every_pair_starts_with_the_start_token_and_ends_with_the_end(task_of, splits, tokenizer):
    task, _ = task_of(load=False)
    rows = every_row(task.make_rows(splits, "train", 60)[0])
    batch = task.collate(rows, numbers(rows), 1)
    first = (rows["target_position_ids"] == 0) & (rows["target_segment_ids"] > 0)
    assert first.sum() == 40 and (batch["labels"] == tokenizer.eos_token_id).sum() == 40
    assert (batch["decoder_input_ids"][first] == task.config.decoder_start_token_id).all()
    later = ~first[:, 1:] & (rows["target_segment_ids"][:, 1:] > 0)
    np.testing.assert_array_equal(
        batch["decoder_input_ids"][:, 1:][later], rows["target_ids"][:, :-1][later]
    )
    real = rows["target_segment_ids"] > 0
    np.testing.assert_array_equal(batch["labels"], np.where(real, rows["target_ids"], -100))
    assert "decoder_segment_ids" in batch and {a.dtype for a in batch.values()} == {np.dtype("i4")}


def test_the_last_pair_of_a_row_is_not_seen_by_padding_and_rows_that_fill_up_do_not_count(
    task_of, splits
):
    task, _ = task_of(load=False)
    rows = every_row(task.make_rows(splits, "train", 60)[0])
    rows["valid"] = np.arange(len(rows["input_ids"])) < 2
    batch = task.collate(rows, numbers(rows), 1)
    assert (batch["labels"][2:] == -100).all() and (batch["labels"][:2] != -100).any()
    counted = (rows["segment_ids"][:2] > 0).sum() + (rows["target_segment_ids"][:2] > 0).sum()
    assert task.count_tokens(rows).sum() == counted


@pytest.mark.slow
def test_label_smoothing_reports_plain_cross_entropy(task_of, splits):
    task, model = task_of(label_smoothing_factor=0.2)
    rows = every_row(task.make_rows(splits, "validation", 60)[0])
    batch = task.collate(rows, numbers(rows), 1)
    plain, _ = task_of(load=False, label_smoothing_factor=0.0)
    step = jax.jit(
        lambda task, train: task.loss(model, model.params, batch, None, train),
        static_argnums=(0, 1),
    )
    actual = {}
    for train in (False, True):
        total, count, extra = step(task, train)
        sums = {"loss": float(total), "count": int(count)}
        actual[train] = task.metrics(sums | {k: float(v) for k, v in extra["totals"].items()})
    assert "cross_entropy" not in actual[False]  # it is the loss
    assert actual[True]["cross_entropy"] == pytest.approx(actual[False]["loss"], rel=1e-6)
    assert actual[True]["loss"] < actual[True]["cross_entropy"] - 0.1  # less its own entropy
    assert actual[True]["perplexity"] == pytest.approx(np.exp(actual[False]["loss"]), rel=1e-5)
    unsmoothed = float(step(plain, True)[0]) / int(count)
    assert unsmoothed == pytest.approx(actual[False]["loss"], rel=1e-6)


def test_a_model_that_cannot_keep_pairs_apart_gets_one_a_row(task_of, splits, messages):
    task, model = task_of(load=False)
    blind = types.SimpleNamespace(
        config=model.config,
        accepts=lambda name: "segment" not in name,
        max_length=lambda: 64,
        generation_config=model.generation_config,
    )
    other = Translation(task.arguments, task.tokenizer, task.config)
    other.prepare(blind)
    assert isinstance(other.make_rows(splits, "train", 60)[0], PairRows)
    assert "'bart' does not accept segment_ids" in messages()


def test_rows_are_packed_only_in_training_and_without_line_by_line(task_of, splits):
    task, _ = task_of(load=False, line_by_line=True, pad_to_max_length=True)
    rows = task.make_rows(splits, "train", 60)[0]
    assert isinstance(rows, PairRows) and rows.width(np.array([0])) == (60, 50)
    batch = task.collate(rows.fetch(np.arange(3)), None, 1)
    assert "decoder_segment_ids" not in batch


def test_evaluation_includes_every_pair(task_of, splits):
    task, _ = task_of(load=False, max_source_length=4, max_target_length=60)
    assert task.make_rows(splits, "train", 4)[1]["dropped"] > 5
    rows, stats = task.make_rows(splits, "validation", 4)
    assert len(rows) == 40 and stats["truncated"] > 5 and stats["dropped"] == 0


def test_lengths_beyond_the_position_table_are_refused(task_of):
    with pytest.raises(UsageError, match="--max_target_length 65 exceeds the 64 positions"):
        task_of(load=False, max_target_length=65)
    task, _ = task_of("t5", load=False, max_target_length=65)
    assert (task.choose_length(None), task.target_length(60)) == (60, 65)


@pytest.mark.parametrize("model_type", SIZES)
def test_a_fresh_model_has_the_tokenizers_special_tokens(task_of, tokenizer, model_type):
    config = task_of(model_type, load=False)[0].config
    assert (config.pad_token_id, config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.eos_token_id,
    )
    # BART starts with its end of text, the others with padding.
    expected = 2 if model_type == "bart" else tokenizer.pad_token_id
    assert config.decoder_start_token_id == expected


def test_weights_that_are_loaded_keep_their_special_tokens(tokenizer):
    from transformers import MarianConfig

    config = MarianConfig(vocab_size=60_000)
    Translation.configure(config, tokenizer, from_scratch=False)
    assert config.pad_token_id == config.decoder_start_token_id == 58_100


def test_the_saved_model_generates_as_its_evaluation_does(task_of, tmp_path):
    from transformers import GenerationConfig

    _, model = task_of(num_beams=5, length_penalty=0.6, max_new_tokens=20)
    model.save_pretrained(tmp_path / "model")
    saved = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (saved.num_beams, saved.length_penalty, saved.max_length) == (5, 0.6, 21)
    _, greedy = task_of(num_beams=1, length_penalty=0.6)
    greedy.save_pretrained(tmp_path / "greedy")
    assert GenerationConfig.from_pretrained(tmp_path / "greedy").max_length == 51


def test_texts_are_written_for_samples_spread_over_the_split(task_of, splits):
    task, model = task_of(num_beams=1, max_new_tokens=4, max_generate_samples=4)
    task.splits = splits
    generated = task.generate_texts(model, model.params, "validation")
    assert generated.sources == splits["validation"]["source"][::10]
    assert generated.references == splits["validation"]["target"][::10]
    assert len(generated.hypotheses) == 4 and set(generated.metrics) == {"bleu", "chrf"}
    assert "tok:13a" in generated.notes["bleu"]
    off, _ = task_of(load=False, predict_with_generate=False)
    assert off.generate_texts(model, model.params, "validation") is None


def test_the_loss_is_over_the_vocabulary_of_the_targets(tokenizer):
    """Marian's target vocabulary may contain words that the source vocabulary lacks."""
    from hfseq import FlaxMarianMTModel
    from tests.support.models import marian_config

    config = marian_config(
        vocab_size=60, decoder_vocab_size=90, share_encoder_decoder_embeddings=False
    )
    model = FlaxMarianMTModel(config)
    task = Translation(TranslationArguments(), tokenizer, config)
    ids = np.random.default_rng(0).integers(4, 90, (2, 7)).astype(np.int32)
    ids[0, 0] = 89
    batch = {
        "input_ids": ids % 60,
        "segment_ids": np.ones_like(ids),
        "decoder_input_ids": ids,
        "labels": ids,
    }
    total, count = loss_of_batch(task, model, batch)
    run = jax.jit(lambda ids: model(ids % 60, decoder_input_ids=ids).logits)
    inputs = np.asarray(run(ids), np.float64)
    logs = inputs - np.log(np.exp(inputs).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logs, ids[..., None], 2).sum()
    assert count == 14 and float(total) == pytest.approx(expected, rel=1e-5)
