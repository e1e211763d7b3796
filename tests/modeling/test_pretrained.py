"""from_pretrained: all checkpoint formats and options."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from hfseq import FlaxAutoModelForMaskedLM
from hfseq.errors import CheckpointError, UsageError
from hfseq.nn import trees
from hfseq_plugins.bert.modeling import (
    FlaxBertForMaskedLM,
    FlaxBertForSequenceClassification,
    FlaxBertModel,
)
from tests.support import saved_bert
from tests.support.models import (
    bert_config,
    close,
    ids,
    rewrite_tensors,
    trees_equal,
    write_v4_msgpack,
)
from tests.support.saved_bert import capture_warnings

model, saved = saved_bert.model, saved_bert.saved


# -- checkpoint formats ----------------------------------------------------------------------------


@pytest.mark.slow
def test_sharded_msgpack_of_v4_with_an_empty_first_shard(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    params = model.params
    write_v4_msgpack(tmp_path, [{}, {"bert": params["bert"]}, {"cls": params["cls"]}], [1, 2])
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, params)


def test_safetensors_with_flax_names(model, tmp_path):
    from safetensors.numpy import save_file

    model.config.save_pretrained(tmp_path)
    flat = {".".join(p): np.asarray(v) for p, v in trees.flatten(model.params).items()}
    save_file(flat, tmp_path / "model.safetensors", metadata={"format": "flax"})
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, model.params)


def test_a_weight_file_with_its_configuration(saved, model):
    path = saved / "model.safetensors"
    assert trees_equal(
        FlaxBertForMaskedLM.from_pretrained(path, config=bert_config()).params, model.params
    )
    with pytest.raises(UsageError, match="is a weight file: pass its configuration too"):
        FlaxBertForMaskedLM.from_pretrained(path)


def test_subfolder(saved, model, tmp_path):
    (tmp_path / "repository").mkdir()
    shutil.move(saved, tmp_path / "repository" / "inner")
    loaded = FlaxBertForMaskedLM.from_pretrained(tmp_path / "repository", subfolder="inner")
    assert trees_equal(loaded.params, model.params)


def test_a_subfolder_never_reads_the_weights_of_its_parent(saved, model, tmp_path):
    final = FlaxBertForMaskedLM(bert_config(), seed=1)
    final.save_pretrained(saved)
    model.save_pretrained(saved / "checkpoint-5", max_shard_size="20KB")
    loaded = FlaxBertForMaskedLM.from_pretrained(saved, subfolder="checkpoint-5")
    assert trees_equal(loaded.params, model.params)
    for path in (saved / "checkpoint-5").glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="checkpoint-5"):
        FlaxBertForMaskedLM.from_pretrained(saved, subfolder="checkpoint-5")


@pytest.mark.parametrize("old", [(".weight", ".gamma"), (".bias", ".beta")])
def test_old_names_of_norms(saved, model, old, messages):
    def rename(tensors):
        return {
            name.replace(*old) if "LayerNorm" in name else name: v for name, v in tensors.items()
        }

    rewrite_tensors(saved / "model.safetensors", rename)
    assert trees_equal(FlaxBertForMaskedLM.from_pretrained(saved).params, model.params)
    assert "not used" not in messages()


def test_buffers_and_tied_copies_are_expected(saved, model, caplog, messages):
    def add(tensors):
        tensors["bert.embeddings.position_ids"] = np.arange(40)[None]
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = table.copy()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()

    rewrite_tensors(saved / "model.safetensors", add)
    with capture_warnings(caplog):
        assert trees_equal(FlaxBertForMaskedLM.from_pretrained(saved).params, model.params)
    assert messages() == ""


def test_native_architecture_stored_as_its_twin(saved, model):
    config = json.loads((saved / "config.json").read_text())
    native = {"model_type": "bert", "hidden_dropout_prob": 0.25}
    stored = {**config, "model_type": "megatron-bert", "hfseq": native}
    (saved / "config.json").write_text(json.dumps(stored))
    loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    assert trees_equal(loaded.params, model.params) and loaded.config.hidden_dropout_prob == 0.25


# -- dtypes, devices and structure------------------------------------------------------------------


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_is_announced(saved, half, caplog, messages):
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[half]
    rewrite_tensors(
        saved / "model.safetensors", lambda t: {n: v.astype(dtype) for n, v in t.items()}
    )
    with capture_warnings(caplog):
        loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    expected = (
        f"Some of the weights of FlaxBertForMaskedLM were initialized in {half} precision from"
    )
    assert f"{expected} the model checkpoint at {saved}" in messages()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {half}
    caplog.clear()
    with capture_warnings(caplog):
        full = FlaxBertForMaskedLM.from_pretrained(saved, param_dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(full.params)} == {"float32"}
    assert messages() == ""


def test_double_precision_becomes_single(saved):
    rewrite_tensors(
        saved / "model.safetensors", lambda t: {n: v.astype(np.float64) for n, v in t.items()}
    )
    loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float32"}


@pytest.mark.parametrize("source", ["config.json", "the first floating-point tensor"])
def test_auto_is_the_dtype_that_transformers_loads(saved, source):
    transformers = pytest.importorskip("transformers.models.bert.modeling_bert")
    rewrite_tensors(
        saved / "model.safetensors",
        lambda t: {n: v.astype(ml_dtypes.bfloat16) for n, v in t.items()},
    )
    stored = json.loads((saved / "config.json").read_text())
    stored["dtype"] = stored["torch_dtype"] = "float16" if source == "config.json" else None
    (saved / "config.json").write_text(json.dumps(stored))
    theirs = transformers.BertForMaskedLM.from_pretrained(saved, dtype="auto")
    expected = str(theirs.dtype).removeprefix("torch.")
    loaded = FlaxAutoModelForMaskedLM.from_pretrained(saved, dtype="auto")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {expected}
    assert loaded.dtype == expected == jnp.dtype(loaded.precision.compute_dtype)
    full = FlaxBertForMaskedLM.from_pretrained(saved, dtype="auto", param_dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(full.params)} == {"float32"}
    assert full.dtype == expected
    assert FlaxBertForMaskedLM.from_pretrained(saved).dtype == jnp.float32


def test_unknown_dtype_is_named(saved):
    with pytest.raises(UsageError, match="dtype='fp16' is not a dtype.*bfloat16.*auto"):
        FlaxBertForMaskedLM.from_pretrained(saved, dtype="fp16")


@pytest.mark.slow
def test_dtype_is_the_second_argument_and_the_type_of_computation(saved):
    loaded = FlaxBertForMaskedLM.from_pretrained(saved, jnp.bfloat16)
    assert loaded(ids()).logits.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float32"}


@pytest.mark.slow
def test_do_init_false_returns_model_and_params(saved, model):
    loaded, params = FlaxBertForMaskedLM.from_pretrained(saved, _do_init=False)
    assert trees_equal(params, model.params)
    with pytest.raises(ValueError, match="`params` cannot be accessed from model"):
        loaded.params  # noqa: B018
    assert close(loaded(ids(), params=params).logits, model(ids()).logits, 0)


def test_missing_parameters_are_left_out_without_initialisation(tmp_path, caplog, messages):
    FlaxBertModel(bert_config()).save_pretrained(tmp_path)
    with capture_warnings(caplog):
        head, params = FlaxBertForSequenceClassification.from_pretrained(tmp_path, _do_init=False)
    assert set(params) == {"bert"} and "missing from the returned parameters" in messages()
    completed = head.init_weights(jax.random.key(0), (1, 1), params)
    assert trees_equal(completed["bert"], params["bert"]) and set(completed) == {
        "bert",
        "classifier",
    }


def test_other_keywords_change_the_configuration_or_the_constructor(saved):
    loaded = FlaxBertForMaskedLM.from_pretrained(saved, hidden_dropout_prob=0.5, seed=7)
    assert loaded.config.hidden_dropout_prob == 0.5 and loaded.seed == 7


def test_unknown_keywords_are_refused(saved):
    with pytest.raises(TypeError, match="hiden_dropout_prob"):
        FlaxBertForMaskedLM.from_pretrained(saved, hiden_dropout_prob=0.5)


def test_old_name_of_the_token(saved):
    FlaxBertForMaskedLM.from_pretrained(saved, use_auth_token="x")
    with pytest.raises(ValueError, match="`token` and `use_auth_token` are both specified"):
        FlaxBertForMaskedLM.from_pretrained(saved, use_auth_token="x", token="y")


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_sharded_loading_reads_only_slices(model, tmp_path, monkeypatch, native, scan):
    from hfseq.checkpoints import files
    from hfseq.checkpoints.weights import Tensor

    model.save_pretrained(tmp_path)
    if native:
        flat = {".".join(p): np.asarray(v) for p, v in trees.flatten(model.params).items()}
        rewrite_tensors(tmp_path / "model.safetensors", lambda _: flat, {"format": "flax"})
    largest, real = {}, files._read_safetensors

    def spying(path):
        opened = real(path)
        for name, tensor in opened.tensors.items():

            def read(index, name=name, tensor=tensor):
                part = tensor.read(index)
                largest[name] = max(largest.get(name, 0), part.size / max(1, np.prod(tensor.shape)))
                return part

            opened.tensors[name] = Tensor(tensor.shape, tensor.dtype, read)
        return opened

    monkeypatch.setattr(files, "_read_safetensors", spying)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(path, shape):
        last = len(shape) - 1
        spec = [None] * last + ["x" if shape[last] % 8 == 0 else None]
        return jax.NamedSharding(mesh, jax.P(*spec))

    loaded = FlaxBertForMaskedLM.from_pretrained(tmp_path, sharding=place, scan_layers=scan)
    assert max(largest.values()) <= 1 / 8
    assert (
        loaded.params["bert"]["embeddings"]["word_embeddings"]["embedding"].sharding.spec[1] == "x"
    )
    table = FlaxBertForMaskedLM.from_pretrained(tmp_path, scan_layers=scan).params
    assert trees_equal(loaded.params, table)


@pytest.mark.slow
def test_new_parameters_are_initialized_with_their_sharding(tmp_path):
    FlaxBertModel(bert_config()).save_pretrained(tmp_path)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(path, shape):
        return jax.NamedSharding(mesh, jax.P("x" if shape[0] % 8 == 0 else None))

    load = FlaxBertForSequenceClassification.from_pretrained
    kernel = load(tmp_path, sharding=place).params["classifier"]["kernel"]
    assert kernel.sharding.spec[0] == "x"
    assert np.array_equal(kernel, load(tmp_path).params["classifier"]["kernel"])
