"""The Python interface of models: printing, copies, NNX, meshes, inputs, keywords."""

from __future__ import annotations

import copy
import logging
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import hfseq
from hfseq.errors import UsageError
from tests.support import models
from tests.support.tiers import first

IDS = np.arange(4, 24).reshape(2, 10)


@pytest.fixture(scope="module")
def model():
    return hfseq.FlaxRobertaForMaskedLM(models.roberta_config(num_hidden_layers=1))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("roberta")
    model.save_pretrained(folder)
    return folder


def test_a_model_prints_its_class_size_dtypes_and_devices(model, folder):
    assert repr(model) == (
        f"FlaxRobertaForMaskedLM({model.num_parameters():,} parameters in float32 on cpu:0, "
        "computation in float32)"
    )
    loaded = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder, dtype="bfloat16")
    assert loaded.name_or_path == str(folder) and repr(str(folder)) in repr(loaded)
    assert "computation in bfloat16" in repr(loaded)
    empty, _ = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder, _do_init=False)
    assert "no parameters" in repr(empty)
    assert model.tree(1).splitlines()[1:] == ["lm_head: 1,184", "roberta: 10,960"]


def test_sizes_and_devices_are_attributes_as_in_pytorch(model):
    leaves = jax.tree.leaves(model.params)
    assert model.num_parameters() == sum(leaf.size for leaf in leaves)
    embeddings = model.params["roberta"]["embeddings"]
    tables = sum(table["embedding"].size for table in embeddings.values() if "embedding" in table)
    assert model.num_parameters(exclude_embeddings=True) == model.num_parameters() - tables
    assert model.device == jax.devices()[0]


def test_names_in_dir_are_public(model):
    names = dir(model)
    assert {"params", "config", "generate", "save_pretrained", "nnx", "shard"} <= {*names}
    assert not [name for name in names if name.startswith("_")]
    assert not {"weight_templates", "module_class", "head_counts"} & {*names}


def test_star_imports_bring_the_classes_and_nothing_else():
    names: dict = {}
    exec("from hfseq import *", names)
    assert {"FlaxBertModel", "FlaxAutoModelForCausalLM", "pipeline", "train"} <= names.keys()
    assert not {"Any", "sys", "importlib", "TYPE_CHECKING"} & names.keys()


def test_a_misspelled_import_suggests_the_right_name():
    with pytest.raises(ImportError, match="did you mean 'FlaxBertForMaskedLM'"):
        from hfseq import FlaxBertForMaskLM  # noqa: F401


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16, "scan_layers": True}])
def test_copies_and_pickles_compute_the_same(options):
    original = hfseq.FlaxRobertaForMaskedLM(models.roberta_config(), **options)
    expected = original(IDS).logits
    for clone in (copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        duplicate = clone(original)
        assert np.array_equal(duplicate(IDS).logits, expected)
        duplicate.params = jax.tree.map(jnp.zeros_like, duplicate.params)
        assert np.array_equal(original(IDS).logits, expected)


def test_models_are_pytrees(model):
    logits = model(IDS).logits
    np.testing.assert_allclose(
        jax.jit(lambda model, ids: model(ids).logits)(model, IDS), logits, atol=1e-5
    )
    doubled = jax.tree.map(lambda leaf: 2 * leaf, model)
    assert isinstance(doubled, type(model)) and not np.allclose(doubled(IDS).logits, logits)
    traces = []
    count = jax.jit(lambda model: traces.append(1) or model(IDS).logits)
    count(model), count(doubled)
    assert len(traces) == 1
    model_with_remat = copy.copy(model)
    model_with_remat.enable_gradient_checkpointing()
    count(model_with_remat)
    assert len(traces) == 2


def loss_of(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()


def test_training_as_an_nnx_module_equals_training_of_params():
    config = models.roberta_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = hfseq.FlaxRobertaForMaskedLM(config, seed=1)
    ids = jnp.asarray(IDS)
    module = model.nnx()
    optimizer = nnx.Optimizer(module, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def nnx_step(module, optimizer):
        grads = nnx.grad(lambda module: loss_of(module(input_ids=ids).logits, ids))(module)
        optimizer.update(module, grads)

    transform = optax.adamw(1e-2)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: loss_of(model(ids, params=params).logits, ids))(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = model.params, transform.init(model.params)
    for _ in range(3):
        nnx_step(module, optimizer)
        params, state = step(params, state)
    logits = jax.jit(lambda params: model(ids, params=params).logits)
    before = np.asarray(logits(model.params))
    model.update_from_nnx(module)
    after = np.asarray(logits(model.params))
    assert np.abs(after - before).max() > 0.01
    np.testing.assert_allclose(after, logits(params), atol=2e-5)
    with pytest.raises(UsageError, match="update_from_nnx requires a module of FlaxRoberta"):
        model.update_from_nnx(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_a_model_inside_a_module_does_not_vanish(model):
    class Holder(nnx.Module):
        def __init__(self):
            self.encoder = model

    if "hfseq.v4" in sys.modules:  # another test; there, models are data as in Transformers 4
        assert len(jax.tree.leaves(nnx.state(Holder()))) == len(jax.tree.leaves(model.params))
    else:
        with pytest.raises(ValueError, match="encoder"):
            nnx.state(Holder())

    class DataHolder(nnx.Module):
        def __init__(self):
            self.encoder = nnx.data(model)

    assert len(jax.tree.leaves(nnx.state(DataHolder()))) == len(jax.tree.leaves(model.params))


# -- meshes


MESHES = [
    (axis_type, shape, names)
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for shape, names in (
        ((2,), ("data",)),
        ((2, 2), ("tensor", "data")),
        ((2, 2, 2), ("fsdp", "sequence", "tensor")),
    )
]


@pytest.mark.parametrize(("axis_type", "shape", "names"), first(MESHES, MESHES[4]))
def test_models_are_sharded_over_any_mesh(folder, axis_type, shape, names):
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names), devices=devices)
    single = hfseq.FlaxRobertaForMaskedLM.from_pretrained(folder)
    expected = np.asarray(jax.jit(single)(IDS).logits)
    loaded = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder, mesh=mesh)
    moved = hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder)
    complete = moved.shard(mesh)
    assert complete.axis_names[: len(names)] == names and complete.size == mesh.size
    for model in (loaded, moved):
        kernel = model.params["roberta"]["encoder"]["layer"]["0"]["output"]["dense"]["kernel"]
        is_split = not kernel.sharding.is_fully_replicated
        assert is_split == ("fsdp" in names or "tensor" in names)
        rows = "data" if "data" in names else "fsdp"
        ids = jax.device_put(IDS, NamedSharding(complete, PartitionSpec(rows)))
        step = jax.jit(lambda params, ids, model=model: model(ids, params=params).logits)
        np.testing.assert_allclose(step(model.params, ids), expected, atol=1e-5)
    np.testing.assert_allclose(jax.jit(loaded)(IDS).logits, expected, atol=1e-5)
    ids = jax.device_put(IDS, NamedSharding(mesh, PartitionSpec(rows)))
    np.testing.assert_allclose(loaded(ids).logits, expected, atol=1e-5)


def test_explicit_axes_and_unknown_axes_are_named(model):
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    ids = jax.device_put(IDS, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(model.params, NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_allclose(model(ids, params=params).logits, model(IDS).logits, atol=1e-5)
    with pytest.raises(UsageError, match=r"input_ids is sharded .* explicit.*AxisType.Auto"):
        jax.jit(lambda ids: model(ids).logits)(ids)
    other = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    with pytest.raises(UsageError, match="axis 'model'.* data, fsdp, expert, tensor, sequence"):
        copy.copy(model).shard(other)


# -- inputs


def test_lists_and_arrays_of_pytorch_are_accepted(model):
    expected = np.asarray(model(IDS[:1]).logits)
    row = IDS[0].tolist()
    assert np.array_equal(model(row, attention_mask=[1] * 10).logits, expected)
    assert np.array_equal(model(jnp.asarray(IDS[:1])).logits, expected)
    torch = pytest.importorskip("torch")
    tensors = {"input_ids": torch.tensor(IDS[:1]), "attention_mask": torch.ones(1, 10)}
    assert np.array_equal(model(**tensors).logits, expected)


def test_generate_accepts_what_calls_accept():
    gpt2 = hfseq.FlaxGPT2LMHeadModel(models.gpt2_config())
    expected = gpt2.generate(IDS[:1], max_new_tokens=3).sequences
    row = IDS[0].tolist()
    output = gpt2.generate(row, attention_mask=[1] * 10, max_new_tokens=3)
    assert np.array_equal(output.sequences, expected)
    with pytest.raises(UsageError, match="seed: pass it as prng_key"):
        gpt2.generate(IDS, seed=1)
    with pytest.raises(UsageError, match="input_ids has the dtype float"):
        gpt2.generate(IDS * 1.0)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": np.ones((2, 3))}, r"attention_mask has the shape \(2, 3\).*\(2, 10\)"),
        ({"input_ids": IDS / 2}, "input_ids has the dtype float64, but IDs must be integers"),
        ({"token_type_ids": IDS / 2}, "token_type_ids has the dtype float64"),
        ({"input_ids": ["a text"]}, "input_ids must be an array of numbers, not text"),
        ({"input_ids": [[1, 2], [3]]}, "input_ids has rows of different lengths"),
        ({"labels": IDS}, r"FlaxRobertaForMaskedLM does not compute a loss.*docs/losses.md"),
        ({"atention_mask": IDS}, "argument atention_mask; did you mean 'attention_mask'"),
    ],
)
def test_invalid_inputs_are_named(model, inputs, message):
    with pytest.raises((UsageError, TypeError), match=message):
        model(**{"input_ids": IDS, **inputs})


# -- keywords of from_pretrained


@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_default_device_maps_have_no_effect(folder, device_map, caplog):
    with caplog.at_level(logging.WARNING, "hfseq"):
        hfseq.FlaxAutoModelForMaskedLM.from_pretrained(folder, device_map=device_map)
    assert f"device_map='{device_map}' has no effect" in caplog.text and "mesh=" in caplog.text


@pytest.mark.parametrize("loader", [hfseq.FlaxAutoModelForMaskedLM, hfseq.FlaxRobertaForMaskedLM])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"device_map": {"": 0}}, "device_map=.* mesh="),
        ({"load_in_8bit": True}, "load_in_8bit=True .* precision="),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* precision="),
        ({"variant": "fp16"}, "variant='fp16' .*/model.fp16.safetensors"),
        ({"target_lang": "fra"}, "target_lang='fra'"),
        ({"key_mapping": {"a": "b"}}, "key_mapping=.* weight_synonyms"),
    ],
)
def test_keywords_of_pytorch_are_refused_by_name(folder, loader, keywords, message):
    with pytest.raises(UsageError, match=message):
        loader.from_pretrained(folder, **keywords)


def test_keywords_of_pytorch_are_mapped(folder):
    load = hfseq.FlaxAutoModelForMaskedLM.from_pretrained
    assert load(folder, torch_dtype="bfloat16").dtype == jnp.bfloat16
    assert load(folder, attn_implementation="sdpa", low_cpu_mem_usage=True)(IDS).logits.size
    torch = pytest.importorskip("torch")
    assert load(folder, torch_dtype=torch.bfloat16).dtype == jnp.bfloat16


def test_loading_info_lists_the_differences(folder):
    model, info = hfseq.FlaxRobertaForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert info == {name: [] for name in info} and len(info) == 4 and model(IDS).logits.size
    _, info = hfseq.FlaxAutoModelForTokenClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert info["missing_keys"] == ["classifier/bias", "classifier/kernel"]
    assert any("lm_head" in name for name in info["unexpected_keys"])


def test_methods_of_pytorch_are_answered_with_the_way_of_hfseq(model):
    for name, hint in {"to": "hfseq.pipeline", "eval": "train=True", "cuda": "jax.devices"}.items():
        with pytest.raises(AttributeError, match=hint):
            getattr(model, name)
    assert not hasattr(model, "parameters")


def test_pipelines_of_transformers_name_those_of_hfseq(model):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models

    words = Tokenizer(tokenizer_models.WordLevel({"<mask>": 0, "a": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, mask_token="<mask>")
    with pytest.raises(AttributeError, match="hfseq.pipeline"):
        transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
