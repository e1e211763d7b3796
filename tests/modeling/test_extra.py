"""Collections: initialized, changed by a call, saved and loaded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hfseq.errors import UsageError, WeightsError
from hfseq.nn import trees
from tests.support import recurrent
from tests.support.models import bert_config, close, trees_equal
from tests.support.recurrent import FlaxRecurrentForCausalLM, RecurrentConfig

IDS = np.array([[3, 4, 5], [6, 7, 8]], np.int32)
NAME = "model.layers.{}.sums"


@pytest.fixture(scope="module", params=[False, True], ids=["loop", "scan"])
def model(request):
    return recurrent.model(scan_layers=request.param)


def trained(model):
    """Returns collections that differ from those of any seed."""
    changed = jax.tree.map(lambda leaf: leaf + 1, model.extra)
    return model.finalize_extra(changed)


def test_fresh_collections_are_those_of_a_model_with_the_same_seed(model):
    bare = FlaxRecurrentForCausalLM(model.config, scan_layers=model.scan_layers, _do_init=False)
    assert bare.extra == {}
    assert trees_equal(bare.init_extra(jax.random.PRNGKey(3)), model.extra)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model.extra)
    assert bare.extra_shape_tree == shapes


def test_models_without_collections_are_unaffected():
    from hfseq_plugins.bert.modeling import FlaxBertModel

    model = FlaxBertModel(bert_config(), _do_init=False)
    assert model.init_extra(jax.random.key(0)) == model.extra_shape_tree == {}
    assert model.finalize_extra({"a": 1}) == {"a": 1} and model.extra_metrics({}) == {}


def test_training_call_updates_collections_after_settling(model):
    _, changed = model(IDS, train=True, dropout_rng=jax.random.key(0), extra=model.extra)
    flat, initial = (trees.flatten(tree["tally"]) for tree in (changed, model.extra))
    for path, leaf in flat.items():
        assert np.array_equal(leaf, initial[path]) == (path[-1] == "sums")
    settled = trees.flatten(model.finalize_extra(changed)["tally"])
    for path, leaf in settled.items():
        if path[-1] == "new_sums":
            assert not leaf.any()
        else:
            new = flat[(*path[:-1], "new_sums")]
            np.testing.assert_allclose(leaf, initial[path] + new, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "msgpack"])
@pytest.mark.parametrize("scanned", [False, True], ids=["read-loop", "read-scan"])
def test_saved_collections_are_read_again(model, tmp_path, safe, scanned, caplog):
    extra = trained(model)
    model.save_pretrained(tmp_path, extra=extra, safe_serialization=safe)
    back = FlaxRecurrentForCausalLM.from_pretrained(tmp_path, scan_layers=scanned)
    other, params = FlaxRecurrentForCausalLM.from_pretrained(tmp_path, _do_init=False)
    assert not caplog.records
    logits = model(IDS, extra=extra)[0].logits
    assert close(back(IDS).logits, logits) and close(other(IDS, params=params).logits, logits)
    assert not np.allclose(model(IDS).logits, logits)


def test_files_hold_the_stored_variables_layer_by_layer_and_no_others(model, tmp_path):
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name for name in tensors if "sums" in name} == {NAME.format(0), NAME.format(1)}
    assert tensors[NAME.format(1)].shape == (3, 8)


def test_variables_that_a_file_lacks_are_initialised_and_named(tmp_path, caplog):
    model = recurrent.model()
    model.save_pretrained(tmp_path, extra=trained(model))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[NAME.format(1)]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    back = FlaxRecurrentForCausalLM.from_pretrained(tmp_path, seed=3)
    assert NAME.format(1) in caplog.text and NAME.format(0) not in caplog.text
    layers = back.extra["tally"]["model"]["layers"]
    fresh = model.extra["tally"]["model"]["layers"]
    assert np.array_equal(layers["1"]["sums"], fresh["1"]["sums"])
    assert not np.array_equal(layers["0"]["sums"], fresh["0"]["sums"])


def test_a_checkpoint_with_another_size_names_both(tmp_path):
    recurrent.model().save_pretrained(tmp_path)
    config = RecurrentConfig(slots=5)
    with pytest.raises(WeightsError, match=r"layers\.0\.sums: \(3, 8\) in the file, \(5, 8\)"):
        FlaxRecurrentForCausalLM.from_pretrained(tmp_path, config=config)
    model = FlaxRecurrentForCausalLM.from_pretrained(
        tmp_path, config=config, ignore_mismatched_sizes=True
    )
    assert model.extra["tally"]["model"]["layers"]["0"]["sums"].shape == (5, 8)


def test_types_of_parameters_do_not_reach_collections(tmp_path):
    recurrent.model().save_pretrained(tmp_path)
    model = FlaxRecurrentForCausalLM.from_pretrained(tmp_path, param_dtype=jnp.bfloat16)
    assert model.params["lm_head"]["kernel"].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(model.extra)} == {jnp.dtype("float32")}


def test_collections_load_with_the_requested_sharding(tmp_path):
    recurrent.model().save_pretrained(tmp_path)
    device_sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    requests = []

    def sharding(path, shape):
        requests.append((path, shape))
        return device_sharding

    def never(path, shape):
        assert path[-1] != "sums"
        return device_sharding

    model = FlaxRecurrentForCausalLM.from_pretrained(
        tmp_path, extra_sharding=sharding, sharding=never, scan_layers=True
    )
    assert requests == [(("model", "layers", "sums"), (2, 3, 8))]
    assert model.extra["tally"]["model"]["layers"]["sums"].sharding == device_sharding


def test_missing_collections_error_names_the_argument(tmp_path):
    full = recurrent.model()
    bare = FlaxRecurrentForCausalLM(full.config, _do_init=False)
    with pytest.raises(UsageError, match="requires the collections? tally, but `extra` has none"):
        bare(IDS, params=full.params)
    with pytest.raises(UsageError, match="init_extra"):
        bare.save_pretrained(tmp_path, params=full.params)
    bare(IDS, params=full.params, extra=full.extra)


@pytest.mark.slow
def test_the_mesh_reaches_the_layers():
    from jax.sharding import Mesh

    from hfseq import nn

    meshes = []

    class Watching(recurrent.RecurrentLM):
        def __call__(self, input_ids, attention_mask=None, *, rngs=None):
            meshes.append(nn.current_options().mesh)
            return super().__call__(input_ids, attention_mask, rngs=rngs)

    class Model(FlaxRecurrentForCausalLM):
        module_class = Watching

    model, mesh = Model(RecurrentConfig()), Mesh(np.array(jax.devices()[:1]), ("data",))
    model(IDS)
    model.use_mesh(mesh)
    model(IDS)
    assert meshes == [None, mesh]
