"""Names in adapter files: modules that PyTorch names differently in memory, and PEFT's wrappers."""

from __future__ import annotations

import logging

import jax
import numpy as np
import pytest

import hfseq
from hfseq.errors import WeightsError
from hfseq.modeling.lora import LoraConfig
from hfseq.nn import trees
from tests.support.tiers import first

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated",
    "ignore:::peft",
    "ignore:::transformers",
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = SIZES | {"vocab_size": 99, "intermediate_size": 48, "max_position_embeddings": 64}
IMAGE = SIZES | {"intermediate_size": 48, "image_size": 32, "patch_size": 8, "num_labels": 3}
LLAMA = TEXT | {"num_key_value_heads": 2, "pad_token_id": 0}
DINO = IMAGE | {"mlp_ratio": 2}
DRAW = np.random.default_rng(0)
PIXELS = {"pixel_values": DRAW.normal(size=(2, 3, 32, 32)).astype(np.float32)}
IDS = {"input_ids": DRAW.integers(5, 96, (2, 9))}
#: The configuration and the inputs of each class, and modules under PyTorch's names in files.
CLASSES = {
    "ViTForImageClassification": ("ViTConfig", IMAGE, PIXELS, ["query", "value"]),
    "BeitForImageClassification": ("BeitConfig", IMAGE, PIXELS, ["query", "intermediate.dense"]),
    "Dinov2ForImageClassification": ("Dinov2Config", DINO, PIXELS, ["query", "fc1"]),
    "CLIPTextModel": ("CLIPTextConfig", TEXT | {"eos_token_id": 97}, IDS, ["q_proj"]),
    "CLIPVisionModel": ("CLIPVisionConfig", IMAGE, PIXELS, ["q_proj", "fc1"]),
    "BertForSequenceClassification": ("BertConfig", TEXT, IDS, ["query"]),
}
#: The classes whose names differ most between memory and files.
FEW = ("BeitForImageClassification", "Dinov2ForImageClassification", "CLIPTextModel")


def randomize(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_base(folder, name, config=None, sizes=None):
    torch.manual_seed(0)
    config_name, default_sizes, *_ = CLASSES.get(name, (config, sizes))
    model_class = getattr(transformers, name)
    randomize(model_class(getattr(transformers, config_name)(**default_sizes))).save_pretrained(
        folder
    )
    return model_class


def output(model, inputs):
    """The first output of a PyTorch or hfseq model."""
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            tensors = {key: torch.tensor(value) for key, value in inputs.items()}
            return model.eval()(**tensors)[0].numpy()
    run = jax.jit(lambda params: model(**inputs, params=params)[0])
    return np.asarray(run(model.params))


def assert_close(first, second, inputs):
    assert np.abs(output(first, inputs) - output(second, inputs)).max() < 1e-4


def save_peft(folder, base, model_class, save=None, **options):
    model = peft.get_peft_model(model_class.from_pretrained(base), peft.LoraConfig(r=4, **options))
    randomize(model).save_pretrained(folder, **(save or {}))
    return model


def assert_both_ways(tmp_path, model_class, reference, inputs):
    """Loads PEFT's adapter, saves it again, and loads that in PEFT."""
    base = tmp_path / "base"
    flax_class = getattr(hfseq, f"Flax{model_class.__name__}")
    model = flax_class.from_pretrained(tmp_path / "adapter")
    assert_close(model, reference, inputs)
    assert_close(flax_class.from_pretrained(base).load_adapter(tmp_path / "adapter"), model, inputs)
    model.save_pretrained(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(model_class.from_pretrained(base), tmp_path / "again")
    assert_close(again, reference, inputs)


@pytest.mark.parametrize("name", first(CLASSES, *FEW))
def test_adapters_of_peft_are_read_and_written(tmp_path, name):
    model_class, inputs = save_base(tmp_path / "base", name), CLASSES[name][2]
    reference = save_peft(
        tmp_path / "adapter", tmp_path / "base", model_class, target_modules="all-linear"
    )
    assert_both_ways(tmp_path, model_class, reference, inputs)


@pytest.mark.parametrize("name", first(CLASSES, *FEW))
@pytest.mark.parametrize("targets", ["all-linear", "names in files"])
def test_adapters_of_hfseq_are_read_by_peft(tmp_path, name, targets):
    model_class, inputs = save_base(tmp_path / "base", name), CLASSES[name][2]
    modules = "all-linear" if targets == "all-linear" else CLASSES[name][3]
    model = getattr(hfseq, f"Flax{name}").from_pretrained(
        tmp_path / "base", peft_config=LoraConfig(r=4, target_modules=modules)
    )
    flat = trees.flatten(model.params)
    model.params = trees.unflatten(
        {path: leaf + 0.05 * (path in model.trainable_paths) for path, leaf in flat.items()}
    )
    model.save_pretrained(tmp_path / "adapter")
    base = model_class.from_pretrained(tmp_path / "base")
    reference = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert_close(model, reference, inputs)
    plain = output(model_class.from_pretrained(tmp_path / "base"), inputs)
    assert np.abs(output(model, inputs) - plain).max() > 1e-3


CASES = {
    "saved head with all biases": (
        "BertForTokenClassification",
        {"task_type": "TOKEN_CLS", "target_modules": ["query"], "bias": "all"},
        {},
    ),
    "saved embeddings": (
        "LlamaForCausalLM",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"save_embedding_layers": True},
    ),
    "ends of module names": (
        "LlamaForCausalLM",
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        {},
    ),
    "pooler that the head does not read": (
        "BigBirdForMaskedLM",
        {"target_modules": "all-linear"},
        {},
    ),
}
CONFIGS = {
    "BertForTokenClassification": ("BertConfig", TEXT | {"num_labels": 3}),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "BigBirdForMaskedLM": ("BigBirdConfig", TEXT | {"attention_type": "original_full"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_names_of_wrapped_modules_are_read(tmp_path, case, caplog):
    name, options, save = CASES[case]
    model_class = save_base(tmp_path / "base", name, *CONFIGS[name])
    reference = save_peft(tmp_path / "adapter", tmp_path / "base", model_class, save, **options)
    with caplog.at_level(logging.WARNING, "hfseq"):
        assert_both_ways(tmp_path, model_class, reference, IDS)
    assert ("does not use: bert.pooler" in caplog.text) == case.startswith("pooler")


def test_a_missing_task_type_stays_missing(tmp_path):
    model_class = save_base(tmp_path / "base", "CLIPTextModel")
    save_peft(tmp_path / "adapter", tmp_path / "base", model_class, target_modules=["q_proj"])
    model = hfseq.FlaxCLIPTextModel.from_pretrained(tmp_path / "adapter")
    assert model.peft_config.task_type is None


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]])
def test_adapters_of_a_resized_vocabulary_name_its_size(tmp_path, targets):
    model_class = save_base(tmp_path / "base", "LlamaForCausalLM", *CONFIGS["LlamaForCausalLM"])
    base = model_class.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(107, mean_resizing=False)
    options = {"target_modules": targets, "task_type": "CAUSAL_LM"}
    if len(targets) == 1:
        options["modules_to_save"] = ["embed_tokens", "lm_head"]
    model = randomize(peft.get_peft_model(base, peft.LoraConfig(r=4, **options)))
    model.save_pretrained(tmp_path / "adapter")
    flax_class = hfseq.FlaxLlamaForCausalLM
    message = "adapter .*adapter was trained with a vocabulary of 107 tokens.*base model has 99"
    with pytest.raises(WeightsError, match=message):
        flax_class.from_pretrained(tmp_path / "adapter")
    with pytest.raises(WeightsError, match=message):
        flax_class.from_pretrained(tmp_path / "base").load_adapter(tmp_path / "adapter")
    if len(targets) == 1:
        assert_close(flax_class.from_pretrained(tmp_path / "adapter", vocab_size=107), model, IDS)
