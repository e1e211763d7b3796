"""from_pretrained and save_pretrained: every form of checkpoint, every way a user asks for one."""

from __future__ import annotations

import json
import logging
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.core import freeze

from hfseq import trees
from hfseq.errors import CheckpointError, UsageError, WeightsError
from hfseq_plugins.bert.modeling import (
    FlaxBertForMaskedLM,
    FlaxBertForPreTraining,
    FlaxBertForSequenceClassification,
    FlaxBertModel,
)
from hfseq_plugins.roberta.modeling import FlaxRobertaForMaskedLM, FlaxRobertaModel
from tests.support.models import (
    bert_config,
    close,
    ids,
    rewrite,
    roberta_config,
    same,
    write_v4_msgpack,
)


@pytest.fixture(scope="module")
def model():
    return FlaxBertForMaskedLM(bert_config())


@pytest.fixture
def saved(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def loud(caplog):
    return caplog.at_level(logging.WARNING, logger="hfseq.modeling")


# -- what is written -------------------------------------------------------------------------------


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
    assert same(tree, jax.tree.map(np.asarray, model.params))
    assert set(tree["bert"]["encoder"]["layer"]) == {"0", "1"}


@pytest.mark.parametrize("safe", [True, False])
def test_scanned_models_are_stored_layer_by_layer(model, tmp_path, safe):
    model.save_pretrained(tmp_path / "one")
    scanned = FlaxBertForMaskedLM.from_pretrained(tmp_path / "one", scan_layers=True)
    scanned.save_pretrained(tmp_path / "two", safe_serialization=safe)
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path / "two").params, model.params)
    again = FlaxBertForMaskedLM.from_pretrained(tmp_path / "two", scan_layers=True)
    assert same(again.params, scanned.params)


def test_given_params_are_saved_instead_of_the_models(model, tmp_path):
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    model.save_pretrained(tmp_path, params=freeze(changed))
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, changed)


def test_half_precision_parameters_stay_half(model, tmp_path):
    half = model.to_bf16(model.params)
    model.save_pretrained(tmp_path, params=half)
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, half)


def test_shards_have_an_index_and_load_again(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "model.safetensors").exists()
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, model.params)


def test_saving_over_another_form_is_what_loads(model, tmp_path):
    model.save_pretrained(tmp_path, safe_serialization=False)
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    model.save_pretrained(tmp_path, params=changed, max_shard_size="20kB")
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, changed)


# -- what can be read ------------------------------------------------------------------------------


def test_sharded_msgpack_of_v4_with_an_empty_first_shard(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    params = model.params
    write_v4_msgpack(tmp_path, [{}, {"bert": params["bert"]}, {"cls": params["cls"]}], [1, 2])
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, params)


def test_safetensors_with_flax_names(model, tmp_path):
    from safetensors.numpy import save_file

    model.config.save_pretrained(tmp_path)
    flat = {".".join(p): np.asarray(v) for p, v in trees.flatten(model.params).items()}
    save_file(flat, tmp_path / "model.safetensors", metadata={"format": "flax"})
    assert same(FlaxBertForMaskedLM.from_pretrained(tmp_path).params, model.params)


def test_pytorch_bin_with_from_pt(saved, model):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    loaded = FlaxBertForMaskedLM.from_pretrained(saved, from_pt=True)
    assert same(loaded.params, model.params)
    with pytest.raises(OSError, match="Use `from_pt=True` to load this model from those weights"):
        FlaxBertForMaskedLM.from_pretrained(saved)
    pair = FlaxBertForMaskedLM.from_pretrained(saved, from_pt=True, _do_init=False)
    assert same(pair[1], model.params)


def test_a_weight_file_with_its_configuration(saved, model):
    path = saved / "model.safetensors"
    assert same(
        FlaxBertForMaskedLM.from_pretrained(path, config=bert_config()).params, model.params
    )
    with pytest.raises(UsageError, match="is a weight file: pass its configuration too"):
        FlaxBertForMaskedLM.from_pretrained(path)


def test_subfolder(saved, model, tmp_path):
    (tmp_path / "repository").mkdir()
    shutil.move(saved, tmp_path / "repository" / "inner")
    loaded = FlaxBertForMaskedLM.from_pretrained(tmp_path / "repository", subfolder="inner")
    assert same(loaded.params, model.params)


@pytest.mark.parametrize("old", [(".weight", ".gamma"), (".bias", ".beta")])
def test_old_names_of_norms(saved, model, old, messages):
    def rename(tensors):
        return {
            name.replace(*old) if "LayerNorm" in name else name: v for name, v in tensors.items()
        }

    rewrite(saved / "model.safetensors", rename)
    assert same(FlaxBertForMaskedLM.from_pretrained(saved).params, model.params)
    assert "not used" not in messages()


def test_buffers_and_tied_copies_are_no_surprise(saved, model, caplog, messages):
    def add(tensors):
        tensors["bert.embeddings.position_ids"] = np.arange(40)[None]
        table = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = table.copy()
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].copy()

    rewrite(saved / "model.safetensors", add)
    with loud(caplog):
        assert same(FlaxBertForMaskedLM.from_pretrained(saved).params, model.params)
    assert messages() == ""


# -- another head ----------------------------------------------------------------------------------


def test_base_model_into_a_head_and_back(tmp_path, caplog, messages):
    base = FlaxBertModel(bert_config())
    base.save_pretrained(tmp_path / "base")
    with loud(caplog):
        head = FlaxBertForSequenceClassification.from_pretrained(tmp_path / "base")
    assert "are newly initialized: classifier.bias classifier.kernel You should" in messages()
    assert same(head.params["bert"], base.params)
    head.save_pretrained(tmp_path / "head")
    caplog.clear()
    with loud(caplog):
        again = FlaxBertModel.from_pretrained(tmp_path / "head")
    assert same(again.params, base.params)
    assert "were not used when initializing FlaxBertModel: ['classifier.bias'" in messages()


def test_new_parameters_are_those_of_the_seed(tmp_path):
    FlaxBertModel(bert_config()).save_pretrained(tmp_path)
    load = FlaxBertForSequenceClassification.from_pretrained
    one, two = load(tmp_path, seed=1), load(tmp_path, seed=2)
    assert same(one.params["classifier"], load(tmp_path, seed=1).params["classifier"])
    assert not same(one.params["classifier"], two.params["classifier"])


def test_another_number_of_labels(tmp_path, caplog, messages):
    head = FlaxBertForSequenceClassification(bert_config(num_labels=2))
    head.save_pretrained(tmp_path)
    load = FlaxBertForSequenceClassification.from_pretrained
    with pytest.raises(
        ValueError, match=r"classifier\.weight: \(2, 32\).*\(5, 32\)[\s\S]*ignore_mism"
    ):
        load(tmp_path, num_labels=5)
    with loud(caplog):
        other = load(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert "the shapes did not match" in messages()
    assert other(ids()).logits.shape == (2, 5)
    assert same(other.params["bert"], head.params["bert"])


def test_what_is_new_beside_a_mismatch_is_told_too(tmp_path, caplog, messages):
    FlaxBertForMaskedLM(bert_config()).save_pretrained(tmp_path)
    load = FlaxBertForPreTraining.from_pretrained
    with loud(caplog):
        load(tmp_path, type_vocab_size=3, ignore_mismatched_sizes=True)
    assert "the shapes did not match" in messages() and "seq_relationship" in messages()


# -- types, places and structure -------------------------------------------------------------------


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_precision_is_announced(saved, half, caplog, messages):
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[half]
    rewrite(saved / "model.safetensors", lambda t: {n: v.astype(dtype) for n, v in t.items()})
    with loud(caplog):
        loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    expected = (
        f"Some of the weights of FlaxBertForMaskedLM were initialized in {half} precision from"
    )
    assert f"{expected} the model checkpoint at {saved}" in messages()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {half}
    caplog.clear()
    with loud(caplog):
        full = FlaxBertForMaskedLM.from_pretrained(saved, param_dtype=jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(full.params)} == {"float32"}
    assert messages() == ""


def test_double_precision_becomes_single(saved):
    rewrite(saved / "model.safetensors", lambda t: {n: v.astype(np.float64) for n, v in t.items()})
    loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float32"}


def test_dtype_is_the_second_argument_and_the_type_of_computation(saved):
    loaded = FlaxBertForMaskedLM.from_pretrained(saved, jnp.bfloat16)
    assert loaded(ids()).logits.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float32"}


def test_without_initialisation_the_parameters_come_beside_the_model(saved, model):
    loaded, params = FlaxBertForMaskedLM.from_pretrained(saved, _do_init=False)
    assert same(params, model.params)
    with pytest.raises(ValueError, match="`params` cannot be accessed from model"):
        loaded.params  # noqa: B018
    assert close(loaded(ids(), params=params).logits, model(ids()).logits, 0)


def test_missing_parameters_are_left_out_without_initialisation(tmp_path, caplog, messages):
    FlaxBertModel(bert_config()).save_pretrained(tmp_path)
    with loud(caplog):
        head, params = FlaxBertForSequenceClassification.from_pretrained(tmp_path, _do_init=False)
    assert set(params) == {"bert"} and "missing from the returned parameters" in messages()
    filled = head.init_weights(jax.random.key(0), (1, 1), params)
    assert same(filled["bert"], params["bert"]) and set(filled) == {"bert", "classifier"}


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
    from hfseq import checkpoint_files as files
    from hfseq.weights import Tensor

    model.save_pretrained(tmp_path)
    if native:
        flat = {".".join(p): np.asarray(v) for p, v in trees.flatten(model.params).items()}
        rewrite(tmp_path / "model.safetensors", lambda _: flat, {"format": "flax"})
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
    assert same(loaded.params, table)


def test_new_parameters_are_initialised_where_they_lie(tmp_path):
    FlaxBertModel(bert_config()).save_pretrained(tmp_path)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(path, shape):
        return jax.NamedSharding(mesh, jax.P("x" if shape[0] % 8 == 0 else None))

    load = FlaxBertForSequenceClassification.from_pretrained
    kernel = load(tmp_path, sharding=place).params["classifier"]["kernel"]
    assert kernel.sharding.spec[0] == "x"
    assert np.array_equal(kernel, load(tmp_path).params["classifier"]["kernel"])


# -- through PyTorch -------------------------------------------------------------------------------


def heads():
    from hfseq import plugins

    for name, config in (("bert", bert_config), ("roberta", roberta_config)):
        spec = plugins.load().architectures[name].target
        for task in spec.heads:
            yield pytest.param(spec, task, config, id=f"{name}-{task}")


@pytest.mark.parametrize(("spec", "task", "config"), list(heads()))
def test_pytorch_checkpoints_survive_a_round_trip(spec, task, config, tmp_path):
    pytest.importorskip("torch")
    import transformers
    from safetensors.numpy import load_file

    cls = spec.load_head(task)
    config = config(is_decoder=task == "ForCausalLM")
    theirs = getattr(transformers, cls.torch_class_name())(config)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = cls.from_pretrained(tmp_path / "theirs", _do_init=True)
    loaded.save_pretrained(tmp_path / "ours")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert same(dict(sorted(after.items())), dict(sorted(before.items())))
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    assert same(cls.from_pretrained(tmp_path / "shards").params, loaded.params)


@pytest.mark.parametrize("present", [True, False])
def test_pytorch_base_models_load_with_and_without_their_prefix(tmp_path, present):
    pytest.importorskip("torch")
    import transformers

    whole = transformers.BertForMaskedLM(bert_config())
    (whole if present else whole.bert).save_pretrained(tmp_path)
    expected = whole.bert.embeddings.word_embeddings.weight.detach().numpy()
    for cls in (FlaxBertModel, FlaxBertForMaskedLM):
        params = cls.from_pretrained(tmp_path).params
        table = params.get("bert", params)["embeddings"]["word_embeddings"]["embedding"]
        assert np.array_equal(table, expected)


# -- bad input -------------------------------------------------------------------------------------


def test_missing_directory_and_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: is it a directory that a model was"):
        FlaxBertModel.from_pretrained(tmp_path)


def test_config_without_weights(tmp_path):
    bert_config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no file named flax_model.msgpack"):
        FlaxBertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"vocab_size": "many"}'])
def test_broken_config_is_named(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot read the configuration of"):
        FlaxBertForMaskedLM.from_pretrained(saved)


def test_native_architecture_stored_as_its_twin(saved, model):
    config = json.loads((saved / "config.json").read_text())
    native = {"model_type": "bert", "hidden_dropout_prob": 0.25}
    stored = {**config, "model_type": "megatron-bert", "hfseq": native}
    (saved / "config.json").write_text(json.dumps(stored))
    loaded = FlaxBertForMaskedLM.from_pretrained(saved)
    assert same(loaded.params, model.params) and loaded.config.hidden_dropout_prob == 0.25


def test_config_of_another_model_type(tmp_path):
    FlaxRobertaModel(roberta_config()).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match="of type 'roberta', FlaxBertModel is for 'bert'.*AutoModel"
    ):
        FlaxBertModel.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="of type 'roberta', FlaxBertModel is for 'bert'"):
        FlaxBertModel.from_pretrained(tmp_path, config=roberta_config())


def test_checkpoint_of_another_architecture(saved):
    rewrite(saved / "model.safetensors", lambda _: {"h.0.ln_1.weight": np.ones(3, np.float32)})
    with pytest.raises(
        WeightsError, match=r"no tensor that FlaxBertForMaskedLM knows \(for example h\.0"
    ):
        FlaxBertForMaskedLM.from_pretrained(saved)


def test_another_family_of_the_same_shape_is_not_taken(tmp_path):
    FlaxRobertaForMaskedLM(roberta_config()).save_pretrained(tmp_path)
    bert_config().save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="is it a checkpoint of another architecture"):
        FlaxBertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["int64", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_wrong_types_are_named(saved, dtype):
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)

    def change(tensors):
        tensors["bert.pooler"] = np.zeros(2, np.float32)
        name = "cls.predictions.transform.dense.bias"
        tensors[name] = tensors[name].astype(kind)

    rewrite(saved / "model.safetensors", change)
    with pytest.raises((WeightsError, CheckpointError)) as error:
        FlaxBertForMaskedLM.from_pretrained(saved)
    assert "transform.dense.bias" in str(error.value) or "damaged" in str(error.value)
    assert "float32" in str(error.value) or "damaged" in str(error.value)


def test_wrong_shapes_are_listed_together(saved):
    with pytest.raises(WeightsError) as error:
        FlaxBertForMaskedLM.from_pretrained(saved, vocab_size=99)
    message = str(error.value)
    assert "word_embeddings.weight: (64, 32) in the file, (99, 32)" in message
    assert "cls.predictions.bias: (64,) in the file, (99,)" in message


def test_saving_into_a_file_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file: give a directory"):
        model.save_pretrained(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot make the directory"):
        model.save_pretrained(tmp_path / "file" / "inside")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("part", ["weights", "config"])
def test_full_disk_keeps_the_previous_save(model, saved, monkeypatch, part):
    import safetensors.numpy

    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    if part == "weights":
        monkeypatch.setattr(safetensors.numpy, "save_file", full)
    else:
        monkeypatch.setattr(type(model.config), "to_json_file", full)
    changed = jax.tree.map(lambda leaf: leaf + 1, model.params)
    with pytest.raises(CheckpointError, match="No space left on device.*untouched"):
        model.save_pretrained(saved, params=changed)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
