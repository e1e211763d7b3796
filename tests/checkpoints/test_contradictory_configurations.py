"""Keys of config.json with two spellings, keys that PyTorch ignores, and files of other formats."""

from __future__ import annotations

import json

import numpy as np
import pytest

import hfseq
from hfseq.errors import CheckpointError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DECODER = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
IDS = np.random.default_rng(1).integers(5, 99, (2, 9))


def save(folder, name, **sizes):
    """Saves a PyTorch model with random parameters, and returns its tensors by name."""
    torch.manual_seed(0)
    config_class = transformers.CONFIG_MAPPING[name]
    config = config_class(**SIZES | sizes)
    heads = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    heads = heads if name != "roformer" else transformers.MODEL_FOR_MASKED_LM_MAPPING
    model = heads[config_class](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return type(model)


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_equal(model_class, folder):
    with torch.no_grad():
        expected = model_class.from_pretrained(folder)(torch.tensor(IDS)).logits.numpy()
    model = getattr(hfseq, f"Flax{model_class.__name__}").from_pretrained(folder)
    assert np.abs(np.asarray(model(IDS).logits) - expected).max() < 1e-4
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"hidden_act": "silu"}),
        ("gemma3_text", {"hidden_act": "silu"}),
        ("gemma", {"hidden_activation": "silu"}),
        ("llama", {"hidden_activation": "gelu"}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("qwen3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_keys_that_pytorch_ignores_have_no_effect(tmp_path, name, changes):
    model_class = save(tmp_path, name, **DECODER, head_dim=8)
    change(tmp_path, **changes)
    if "partial_rotary_factor" in changes:
        stored = json.loads((tmp_path / "config.json").read_text())
        change(tmp_path, rope_parameters=stored["rope_parameters"] | changes)
    assert_equal(model_class, tmp_path)


def test_stored_rotary_tables_of_roformer_are_read_and_written(tmp_path):
    from safetensors.torch import load_file, save_file

    model_class = save(tmp_path / "a", "roformer", embedding_size=32)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    name = "roformer.encoder.embed_positions.weight"
    tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    model = assert_equal(model_class, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(saved[name], tensors[name])
    assert_equal(model_class, tmp_path / "b")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.fp16.safetensors", "contains model.fp16.safetensors; pass this file"),
        ("tf_model.h5", "contains tf_model.h5, which is not read.*from_tf"),
        ("llama.Q4.gguf", "contains llama.Q4.gguf.*gguf_file"),
    ],
)
def test_directories_with_other_weight_files_are_told_about_them(tmp_path, file, message):
    save(tmp_path, "llama", **DECODER)
    (tmp_path / "model.safetensors").rename(tmp_path / file)
    with pytest.raises(CheckpointError, match=message):
        hfseq.FlaxLlamaForCausalLM.from_pretrained(tmp_path)
    if file.endswith("safetensors"):
        loaded = hfseq.FlaxLlamaForCausalLM.from_pretrained(tmp_path / file, config=str(tmp_path))
        assert loaded.num_parameters() > 0


def test_classes_without_a_name_have_a_number():
    from hfseq.data.classification import config_labels
    from hfseq.pipelines.tasks import class_scores

    config = transformers.BertConfig(id2label={1: "a", 2: "b"})
    scores = class_scores(config, np.array([0.5, 0.2]), None)
    assert [score["label"] for score in scores] == ["LABEL_0", "a"]
    assert config_labels(config) == ["LABEL_0", "a"]
