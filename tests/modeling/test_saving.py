"""save_pretrained writes loadable files, and failures do not destroy existing ones."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax.core import freeze

from hfseq.errors import CheckpointError, UsageError
from hfseq.nn import trees
from hfseq_plugins.bert.modeling import FlaxBertForMaskedLM
from tests.support import saved_bert
from tests.support.models import bert_config, trees_equal

model, saved = saved_bert.model, saved_bert.saved


# -- trees that do not fit -------------------------------------------------------------------------


def pruned(model, *left_out):
    flat = trees.flatten(model.params)
    return trees.unflatten({path: leaf for path, leaf in flat.items() if path not in left_out})


@pytest.mark.parametrize(("safe", "scanned"), [(True, True), (False, False)])
def test_incomplete_tree_is_saved_with_a_warning(tmp_path, caplog, safe, scanned):
    model = FlaxBertForMaskedLM(bert_config(), scan_layers=scanned, seed=3)
    layer = ("bert", "encoder", "layer") + (() if scanned else ("1",))
    lacking = [(*layer, "output", "dense", "kernel"), ("bert", "embeddings", "LayerNorm", "bias")]
    model.save_pretrained(tmp_path, pruned(model, *lacking), safe_serialization=safe)
    assert all(trees.join(path) in caplog.messages[-1] for path in lacking)
    caplog.clear()
    loaded = FlaxBertForMaskedLM.from_pretrained(tmp_path, scan_layers=scanned)
    assert all(".".join(path) in caplog.text for path in lacking)
    assert trees.flatten(loaded.params).keys() == loaded.required_params
    assert trees_equal(pruned(loaded, *lacking), pruned(model, *lacking))
    caplog.clear()
    blank, params = FlaxBertForMaskedLM.from_pretrained(
        tmp_path, scan_layers=scanned, _do_init=False
    )
    assert all(".".join(path) in caplog.text for path in lacking)
    assert "model.init_weights(rng, params=params)" in caplog.text
    completed = blank.init_weights(jax.random.key(0), params=params)
    assert trees.flatten(completed).keys() == blank.required_params


def test_unexpected_leaves_are_reported_and_skipped(model, tmp_path, caplog):
    wrong = {**trees.flatten(model.params), ("bert", "pooler", "dense", "bias"): np.zeros(3)}
    model.save_pretrained(tmp_path, trees.unflatten(wrong))
    assert "unexpected keys in params of FlaxBertForMaskedLM: bert/pooler/dense/bias" in caplog.text
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, model.params)


def test_a_misnamed_leaf_is_named_with_the_one_that_is_missing(model, tmp_path, caplog):
    head = ("cls", "predictions", "transform", "dense")
    wrong = pruned(model, (*head, "kernel"))
    wrong["cls"]["predictions"]["transform"]["dense"]["kernl"] = np.zeros((32, 32))
    model.save_pretrained(tmp_path, wrong)
    path = "cls/predictions/transform/dense/kern"
    assert f"{path}l; did you mean '{path}el'?" in caplog.text


def test_tree_of_another_model_is_rejected_before_writing(model, tmp_path):
    with pytest.raises(UsageError, match="no parameter of FlaxBertForMaskedLM"):
        model.save_pretrained(tmp_path, params={"transformer": {"wte": np.zeros((2, 2))}})
    assert list(tmp_path.iterdir()) == []


# -- written files ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_saved_directory_holds_config_and_weights(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"] and config["model_type"] == "bert"


def test_tied_copies_are_not_stored(saved):
    from safetensors import safe_open

    with safe_open(saved / "model.safetensors", "numpy") as file:
        assert file.metadata()["format"] == "pt"
        assert "bert.embeddings.word_embeddings.weight" in file.keys()  # noqa: SIM118
        assert not any("decoder" in name for name in file.keys())  # noqa: SIM118


def test_legacy_format_is_the_v4_tree(model, tmp_path):
    from flax.serialization import msgpack_restore

    model.save_pretrained(tmp_path, safe_serialization=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "flax_model.msgpack"]
    tree = msgpack_restore((tmp_path / "flax_model.msgpack").read_bytes())
    assert trees_equal(tree, jax.tree.map(np.asarray, model.params))
    assert set(tree["bert"]["encoder"]["layer"]) == {"0", "1"}


@pytest.mark.parametrize("safe", [True, False])
def test_scanned_models_are_stored_layer_by_layer(model, tmp_path, safe):
    model.save_pretrained(tmp_path / "one")
    scanned = FlaxBertForMaskedLM.from_pretrained(tmp_path / "one", scan_layers=True)
    scanned.save_pretrained(tmp_path / "two", safe_serialization=safe)
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path / "two").params, model.params)
    again = FlaxBertForMaskedLM.from_pretrained(tmp_path / "two", scan_layers=True)
    assert trees_equal(again.params, scanned.params)


def test_explicit_params_are_saved(model, tmp_path):
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    model.save_pretrained(tmp_path, params=freeze(changed))
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, changed)


def test_half_precision_parameters_are_saved_unchanged(model, tmp_path):
    half = model.to_bf16(model.params)
    model.save_pretrained(tmp_path, params=half)
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, half)


def test_shards_have_an_index_and_load_again(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "model.safetensors").exists()
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, model.params)


def test_saving_replaces_other_weight_formats(model, tmp_path):
    model.save_pretrained(tmp_path, safe_serialization=False)
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    model.save_pretrained(tmp_path, params=changed, max_shard_size="20kB")
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, changed)


# -- failures --------------------------------------------------------------------------------------


def test_saving_into_a_file_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="file is a file"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot create the directory .*file/inside"):
        model.save_pretrained(tmp_path / "file" / "inside")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("part", ["weights", "config"])
def test_full_disk_keeps_the_previous_save(model, saved, monkeypatch, part):
    import safetensors.numpy

    initial = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    if part == "weights":
        monkeypatch.setattr(safetensors.numpy, "save_file", full)
    else:
        monkeypatch.setattr(type(model.config), "to_json_file", full)
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    with pytest.raises(CheckpointError, match="No space left on device"):
        model.save_pretrained(saved, params=changed)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == initial
