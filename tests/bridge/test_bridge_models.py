"""Bridged models: equal to native ones, with the same files, and clear errors for bad inputs."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import hfseq
from hfseq.errors import HfseqError, UsageError, WeightsError
from hfseq.nn import trees
from hfseq.plugins import FALLBACK_TASKS
from hfseq_plugins.bridge import heads, tiny
from hfseq_plugins.bridge.structure import structure_of
from tests.support import quantized
from tests.support.models import write_random_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
CONFIGS = {
    "ForMaskedLM": transformers.BertConfig(**SIZES),
    "ForCausalLM": transformers.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0),
}
AUTO = {task: getattr(hfseq, f"FlaxAutoModel{task}") for task in CONFIGS}


def inputs(rows=2, length=12, vocab_size=64):
    ids = np.random.default_rng(0).integers(4, vocab_size, (rows, length)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("task", CONFIGS)
def test_bridged_model_equals_the_native_one_and_keeps_its_files(task, tmp_path):
    native = AUTO[task].from_config(CONFIGS[task])
    native.save_pretrained(tmp_path / "native")
    model = AUTO[task].from_pretrained(tmp_path / "native", bridge=True)
    assert type(model).__module__ == "hfseq_plugins.bridge.classes"
    real = inputs()["attention_mask"][..., None] == 1
    logits = jax.jit(lambda params: model(**inputs(), params=params).logits)(model.params)
    expected = jax.jit(native)(**inputs()).logits
    np.testing.assert_allclose(logits * real, expected * real, atol=1e-5)
    model.save_pretrained(tmp_path / "bridged")
    first, second = (load_file(tmp_path / n / "model.safetensors") for n in ("native", "bridged"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)
    saved_config = json.loads((tmp_path / "bridged" / "config.json").read_text())
    assert saved_config["architectures"] == [native.torch_class_name()]


@pytest.mark.slow
def test_tables_that_only_checkpoints_contain_are_read_and_saved(tmp_path):
    # DeepSeek-V4 looks up the experts of each token.
    torch_model = tiny.tiny_model("deepseek_v4")
    tables = {n: b for n, b in torch_model.named_buffers() if n.endswith("tid2eid")}
    random = np.random.default_rng(0)
    for table in tables.values():
        experts = random.integers(0, torch_model.config.num_local_experts, (len(table), 1))
        chosen = (experts + np.arange(table.shape[1])) % torch_model.config.num_local_experts
        table.copy_(torch.from_numpy(chosen))
    torch_model.save_pretrained(tmp_path / "torch")
    ids = random.integers(1, 90, (1, 16))
    with torch.no_grad():
        expected = torch_model(input_ids=torch.from_numpy(ids))[0].numpy()
    model = hfseq.FlaxAutoModel.from_pretrained(
        tmp_path / "torch", bridge=True, param_dtype=jnp.bfloat16
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(model.extra["buffers"])} == {jnp.dtype("int32")}
    model = hfseq.FlaxAutoModel.from_pretrained(tmp_path / "torch", bridge=True)
    np.testing.assert_allclose(
        model(input_ids=ids).last_hidden_state, expected, atol=1e-5 * abs(expected).max()
    )
    model.save_pretrained(tmp_path / "bridged")
    again, loading = type(torch_model).from_pretrained(
        tmp_path / "bridged", output_loading_info=True
    )
    assert not any(loading.values())
    for name, buffer in again.named_buffers():
        if name in tables:
            assert torch.equal(buffer, tables[name])


def test_layers_are_in_the_order_of_their_numbers():
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 8, "num_hidden_layers": 11})
    model = AUTO["ForCausalLM"].from_config(config, bridge=True, _do_init=False)
    flat = trees.flatten(model.params_shape_tree)
    params = {path: np.full(leaf.shape, i) for i, (path, leaf) in enumerate(flat.items())}
    tensors, _ = model.nnx(trees.unflatten(params)).tensors()
    for path, value in params.items():
        assert tensors[model.structure.names[path]].mean() == value.mean()


def test_a_layer_whose_bias_is_tied_to_an_earlier_one_keeps_it():
    config = transformers.CamembertConfig(**SIZES)
    layers = {layer.name: layer for layer in structure_of(config, "CamembertForMaskedLM").layers}
    # The linear layer of hfseq would have no bias, because the bias belongs to `lm_head`.
    assert layers["lm_head.decoder"].layer_type == "plain"
    assert layers["lm_head.dense"].layer_type == "linear"


def test_auto_prefers_the_native_class():
    config = CONFIGS["ForMaskedLM"]
    model = AUTO["ForMaskedLM"].from_config(config, bridge="auto", _do_init=False)
    assert type(model) is hfseq.FlaxBertForMaskedLM
    config = transformers.MPNetConfig(**SIZES)
    model = AUTO["ForMaskedLM"].from_config(config, bridge="auto", _do_init=False)
    assert type(model).__name__ == "FlaxMPNetForMaskedLM"
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    with pytest.raises(UsageError, match="bridge='yes'"):
        AUTO["ForMaskedLM"].from_config(config, bridge="yes")


def test_every_task_of_transformers_has_an_auto_class():
    for name in dir(transformers):
        if name.startswith("AutoModel") and hasattr(getattr(transformers, name), "from_config"):
            assert hasattr(hfseq, f"Flax{name}"), name
    assert {"ForObjectDetection", "ForCTC", "ForDepthEstimation"} <= {*FALLBACK_TASKS}
    assert heads.torch_heads("detr")["ForObjectDetection"] == "DetrForObjectDetection"


def test_frozen_parameters_are_named_and_get_no_gradient(caplog):
    config = transformers.PatchTSTConfig(
        num_input_channels=1,
        context_length=16,
        patch_length=8,
        patch_stride=8,
        d_model=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=8,
        do_mask_input=False,
        positional_encoding_type="sincos",
    )
    with caplog.at_level("INFO", logger="hfseq"):
        model = hfseq.FlaxAutoModel.from_config(config, bridge=True)
    assert "PyTorch does not train 1 parameters (requires_grad=False)" in caplog.text
    (frozen,) = set(trees.flatten(model.params)) - model.trainable_paths
    assert frozen[-1] == "position_enc" and ".".join(frozen) in caplog.text
    values = np.random.default_rng(0).normal(size=(2, 16, 1)).astype(np.float32)

    def loss(params):
        return jnp.square(model(past_values=values, params=params).last_hidden_state).sum()

    gradients = trees.flatten(jax.jit(jax.grad(loss))(model.params))
    assert not gradients.pop(frozen).any()
    assert all(jnp.isfinite(gradient).all() for gradient in gradients.values())
    assert any(gradient.any() for gradient in gradients.values())


class UnknownConfig(transformers.PreTrainedConfig):
    model_type = "no-such-model"


@pytest.mark.parametrize(
    ("task", "config", "options", "message"),
    [
        ("ForMaskedLM", UnknownConfig(), {}, "no model type 'no-such-model'"),
        (
            "ForObjectDetection",
            CONFIGS["ForMaskedLM"],
            {},
            "ForObjectDetection.*'bert'.*ForMaskedLM",
        ),
        ("ForMaskedLM", CONFIGS["ForMaskedLM"], {"trust_remote_code": True}, "trust_remote_code"),
        ("ForMaskedLM", CONFIGS["ForMaskedLM"], {"scan_layers": True}, "scan_layers"),
        ("Model", transformers.TimmWrapperConfig(), {}, "pip install timm"),
        ("ForObjectDetection", transformers.DetrConfig(), {}, "DetrForObj.* pip install timm"),
        (
            "ForMaskedLM",
            transformers.MPNetConfig(**SIZES | {"hidden_size": 30}),
            {},
            "MPNetForMaskedLM cannot be built",
        ),
    ],
)
def test_bad_requests_name_their_cause(task, config, options, message):
    auto_class = getattr(hfseq, f"FlaxAutoModel{task.removeprefix('Model')}")
    with pytest.raises(UsageError, match=message):
        auto_class.from_config(config, bridge=True, **options)


@pytest.mark.parametrize("version", ["1.9.0", "2.12.1+cpu", "2.14.0", "3.0.0"])
def test_torch_must_have_a_tested_version(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UsageError, match=rf"torch >=2\.13,<2\.14, but torch {version[:4]}"):
        heads.describe_architecture("bert", "ForMaskedLM")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.4+cpu")
    assert "ForMaskedLM" in heads.describe_architecture("bert", "ForMaskedLM")["heads"]


REMOTE_CODE = {"auto_map": {"AutoModelForMaskedLM": "custom.Model"}}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"model_type": "custom", "auto_map": {"AutoConfig": "custom.Config"}},
            {},
            "requires code from the checkpoint, which is not run",
        ),
        (
            CONFIGS["ForMaskedLM"].to_dict() | {"model_type": "bert", **REMOTE_CODE},
            {"trust_remote_code": True},
            "runs the code of Transformers, not the code in .*: remove trust_remote_code",
        ),
    ],
    ids=["unknown type", "trusted"],
)
def test_code_of_a_checkpoint_is_not_run(config, options, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "custom.py").write_text("raise SystemExit('the code was run')\n")
    with pytest.raises(HfseqError, match=message):
        AUTO["ForMaskedLM"].from_pretrained(tmp_path, bridge=True, **options)


def test_missing_torch_is_named_with_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "torch" else find_spec(name, *a),
    )
    with pytest.raises(UsageError, match=r"pip install 'hfseq\[bridge\]'"):
        AUTO["ForMaskedLM"].from_config(CONFIGS["ForMaskedLM"], bridge=True)


def test_checkpoints_with_other_shapes_or_incomplete_weights_are_refused(tmp_path):
    model = AUTO["ForMaskedLM"].from_config(CONFIGS["ForMaskedLM"])
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(WeightsError, match="intermediate"):
        AUTO["ForMaskedLM"].from_pretrained(tmp_path, bridge=True)
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    path.write_text(json.dumps(config | {"quantization_config": settings}))
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("query.weight"))
    tensors[name] = tensors[name].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(HfseqError, match="quantiz"):
        AUTO["ForMaskedLM"].from_pretrained(tmp_path, bridge=True)


def test_quantized_checkpoints_are_dequantized(tmp_path):
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96}
    config = transformers.LlamaConfig(**sizes, head_dim=16, tie_word_embeddings=False)
    source = write_random_model(config, tmp_path / "source", "ForCausalLM")
    values = quantized.quantize_directory(source, tmp_path / "quantized", "gptq")
    model = AUTO["ForCausalLM"].from_pretrained(
        tmp_path / "quantized", bridge=True, param_dtype=jnp.float32
    )
    for name, expected in values.items():
        layer = functools.reduce(dict.__getitem__, name.split(".")[:-1], model.params)
        np.testing.assert_allclose(layer["kernel"].T, expected, rtol=1e-6, atol=1e-9)
    assert np.isfinite(model(np.arange(8)[None]).logits).all()


def test_sharding_rules_follow_the_plan_of_the_configuration():
    model = AUTO["ForCausalLM"].from_config(CONFIGS["ForCausalLM"], bridge=True, _do_init=False)
    rules = {pattern.rpartition("/")[0]: tactic for pattern, tactic in model.sharding_rules()}
    layer = r"^model/layers/0"
    assert rules[f"{layer}/self_attn/q_proj"] == "column"
    assert rules[f"{layer}/self_attn/o_proj"] == "row"
    assert rules[r"^model/embed_tokens"] == "embedding"
    assert rules[r"^lm_head"] == "vocab_column"
    assert jnp.float32 == jax.tree.leaves(model.abstract_params)[0].dtype


@pytest.mark.parametrize(("width", "tactic"), [(32, "expert_table"), (30, "expert_bias")])
def test_experts_of_the_plan_are_split_by_expert(width, tactic):
    sizes = SIZES | {"num_local_experts": 6, "num_key_value_heads": 2, "intermediate_size": width}
    config = transformers.MixtralConfig(**sizes)
    model = AUTO["ForCausalLM"].from_config(config, bridge=True, _do_init=False)
    rules = dict(model.sharding_rules())
    assert rules[r"^model/layers/0/mlp/experts/gate_up_proj$"] == tactic
    assert rules[r"^model/layers/0/mlp/experts/down_proj$"] == "expert_table"
    assert rules[r"^model/layers/0/self_attn/q_proj/kernel$"] == "column"
