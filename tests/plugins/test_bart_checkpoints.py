"""BART checkpoints: those of Transformers 4, and one checkpoint for every class."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.nn import trees
from hfseq_plugins.bart.modeling import (
    FlaxBartForCausalLM,
    FlaxBartForConditionalGeneration,
    FlaxBartForQuestionAnswering,
    FlaxBartForSequenceClassification,
    FlaxBartModel,
)
from tests.support.models import bart_config, rewrite_tensors, trees_equal
from tests.support.tiers import first
from tests.support.v4_trees import bart_tree, write_v4

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(scope="module")
def model():
    return FlaxBartForConditionalGeneration(bart_config(**SHALLOW))


# -- Transformers 4 checkpoints --------------------------------------------------------------------


def test_v4_msgpack_loads_as_it_is(tmp_path):
    config = bart_config(encoder_layers=1)
    tree = bart_tree(config)
    write_v4(tmp_path, config, tree)
    loaded = FlaxBartForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.required_params == trees.flatten(tree).keys()
    expected = trees.flatten(tree)
    assert all(
        np.array_equal(leaf, expected[path]) for path, leaf in trees.flatten(loaded.params).items()
    )


def test_untied_v4_file_fills_both_sides_with_its_one_table(tmp_path):
    config = bart_config(**SHALLOW, tie_word_embeddings=False)
    tree = bart_tree(config, tied=False)
    write_v4(tmp_path, config, tree)
    loaded = FlaxBartForConditionalGeneration.from_pretrained(tmp_path).params
    table = tree["model"]["shared"]["embedding"]
    assert np.array_equal(loaded["model"]["encoder"]["embed_tokens"]["embedding"], table)
    assert np.array_equal(loaded["model"]["decoder"]["embed_tokens"]["embedding"], table)
    assert np.array_equal(loaded["lm_head"]["kernel"], tree["lm_head"]["kernel"])


def test_tied_embeddings_are_stored_once(model):
    tables = {path for path in model.required_params if {"shared", "embed_tokens"} & set(path)}
    assert tables == {("model", "shared", "embedding")}
    alone = FlaxBartForCausalLM(bart_config(**SHALLOW), _do_init=False).required_params
    assert ("lm_head", "kernel") not in alone
    assert ("model", "decoder", "embed_tokens", "embedding") in alone
    assert ("model", "decoder", "layers", "0", "encoder_attn", "k_proj", "kernel") in alone


# -- one checkpoint for every class ----------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "msgpack"])
def test_decoder_model_loads_from_full_checkpoint(model, tmp_path, safe):
    model.save_pretrained(tmp_path, safe_serialization=safe)
    alone = FlaxBartForCausalLM.from_pretrained(tmp_path).params["model"]["decoder"]
    assert np.array_equal(
        alone.pop("embed_tokens")["embedding"], model.params["model"]["shared"]["embedding"]
    )
    assert trees_equal(alone, model.params["model"]["decoder"])


def test_decoder_model_loads_from_base_model(tmp_path):
    base = FlaxBartModel(bart_config(**SHALLOW))
    base.save_pretrained(tmp_path)
    alone = FlaxBartForCausalLM.from_pretrained(tmp_path).params["model"]["decoder"]
    assert np.array_equal(alone["embed_tokens"]["embedding"], base.params["shared"]["embedding"])
    assert trees_equal(alone["layers"], base.params["decoder"]["layers"])


def test_full_model_loads_from_decoder_checkpoint(tmp_path):
    alone = FlaxBartForCausalLM(bart_config(**SHALLOW))
    alone.save_pretrained(tmp_path)
    config = bart_config(**SHALLOW)
    seq2seq = FlaxBartForConditionalGeneration.from_pretrained(tmp_path, config=config)
    table = alone.params["model"]["decoder"]["embed_tokens"]["embedding"]
    assert np.array_equal(seq2seq.params["model"]["shared"]["embedding"], table)
    ours, theirs = (m.params["model"]["decoder"]["layers"] for m in (seq2seq, alone))
    assert trees_equal(ours, theirs)


@pytest.mark.parametrize(
    "head",
    first(
        [
            FlaxBartForConditionalGeneration,
            FlaxBartForSequenceClassification,
            FlaxBartForQuestionAnswering,
        ],
        FlaxBartForQuestionAnswering,
    ),
)
def test_base_into_head_and_head_into_base(head, tmp_path):
    config = bart_config(**SHALLOW)
    base = FlaxBartModel(config, seed=1)
    base.save_pretrained(tmp_path / "base")
    loaded = head.from_pretrained(tmp_path / "base")
    assert trees_equal(loaded.params["model"], base.params)
    loaded.save_pretrained(tmp_path / "head")
    assert trees_equal(FlaxBartModel.from_pretrained(tmp_path / "head").params, base.params)


@pytest.mark.slow
def test_copies_and_version_buffers_of_old_checkpoints_are_expected(model, tmp_path, caplog):
    model.save_pretrained(tmp_path)

    def add(tensors):
        table = tensors["model.shared.weight"]
        for name in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
            tensors[f"{name}.weight"] = table.copy()
        tensors["model.encoder.version"] = np.ones(1, np.float32)

    rewrite_tensors(tmp_path / "model.safetensors", add)
    assert trees_equal(
        FlaxBartForConditionalGeneration.from_pretrained(tmp_path).params, model.params
    )
    assert "were not used" not in caplog.text
