"""Comparison of adapters with PEFT: equal results and equal files in both directions."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import hfseq
from hfseq.cli.convert import convert
from hfseq.errors import CheckpointError, UsageError, WeightsError
from hfseq.modeling.lora import LoraConfig
from hfseq.nn import trees
from tests.support import models
from tests.support.tiers import first
from tests.support.torch_counterparts import tensors

# PEFT 0.21 uses a deprecated attribute of Transformers 5.23.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
]
#: Family, head, and PEFT's configuration.
CASES = {
    "gpt2": ("gpt2", "CausalLM", {"r": 4, "lora_alpha": 8, "fan_in_fan_out": True}),
    "classes": ("bert", "SequenceClassification", {"r": 2, "lora_alpha": 3}),
    "all-linear": (
        "llama", "CausalLM", {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
    ),
    "ranks": (
        "llama", "CausalLM",
        {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"],
         "rank_pattern": {"down_proj": 4}, "alpha_pattern": {r"layers.1.self_attn.q_proj": 2},
         "use_rslora": True},
    ),
    "words": (
        "roberta", "MaskedLM",
        {"r": 2, "lora_alpha": 2, "target_modules": ["word_embeddings", "query", "dense"],
         "exclude_modules": ["lm_head.dense"], "bias": "lora_only"},
    ),
    "layers": (
        "bart", "Seq2SeqLM",
        {"r": 2, "lora_alpha": 2, "target_modules": ["k_proj"], "layers_to_transform": [1],
         "layers_pattern": ["layers"], "bias": "all"},
    ),
}  # fmt: skip


def close(actual, right, relative=1e-5):
    actual, right = np.asarray(actual), np.asarray(right)
    assert np.abs(actual - right).max() <= relative * max(1, np.abs(right).max())


def compiled(model, inputs):
    """Returns the logits. One program is compiled faster than its operations one by one."""
    return jax.jit(lambda params: model(**inputs, params=params).logits)(model.params)


def base(name, folder):
    """Saves a model with random weights and returns its class and inputs."""
    family, head, _ = CASES[name]
    config = getattr(models, f"{family}_config")()
    auto_class = getattr(hfseq, f"FlaxAutoModelFor{head}")
    model = auto_class.from_config(config)
    model.save_pretrained(folder)
    inputs = {"input_ids": models.ids(2, 9)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, ::-1].copy()
    return auto_class, inputs


def peft_model(name, folder):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    import transformers

    _, head, options = CASES[name]
    tasks = {
        "CausalLM": "CAUSAL_LM",
        "SequenceClassification": "SEQ_CLS",
        "Seq2SeqLM": "SEQ_2_SEQ_LM",
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(folder)
    lora_config = peft.LoraConfig(task_type=tasks.get(head), **options)
    adapted = peft.get_peft_model(model, lora_config)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:  # adapters start at zero
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return adapted.eval()


def logits_of(model, inputs):
    import torch

    with torch.no_grad():
        return model(**{key: torch.from_numpy(value) for key, value in inputs.items()}).logits


@pytest.mark.parametrize("name", first(CASES, "gpt2", "classes", "ranks", "words"))
def test_an_adapter_of_peft_loads_and_goes_back(name, tmp_path):
    pytest.importorskip("peft")
    from peft import PeftModel
    from safetensors.numpy import load_file

    auto_class, inputs = base(name, tmp_path / "base")
    theirs = peft_model(name, tmp_path / "base")
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    right = logits_of(theirs, inputs)
    model = auto_class.from_pretrained(tmp_path / "theirs")
    close(compiled(model, inputs), right)
    if name == "words":
        with pytest.raises(UsageError, match="tied to the head.*tie_word_embeddings=false"):
            model.merge_adapter()
    else:
        close(compiled(model.merge_adapter(), inputs), right, 3e-5)
    model.save_pretrained(tmp_path / "ours")
    files = [
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("theirs", "ours")
    ]
    assert {key: array.shape for key, array in files[0].items()} == {
        key: array.shape for key, array in files[1].items()
    }
    assert all(np.array_equal(files[1][key], array) for key, array in files[0].items())
    ground = type(theirs.get_base_model()).from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(ground, tmp_path / "ours").eval()
    close(logits_of(again, inputs), right)
    if name not in ("layers", "ranks"):  # their layers differ
        scanned = auto_class.from_pretrained(tmp_path / "ours", scan_layers=True)
        close(compiled(scanned, inputs), right)
        if name != "words":
            close(compiled(scanned.merge_adapter(), inputs), right, 3e-5)


def test_each_step_equals_the_step_of_peft(tmp_path):
    """Every step starts from PEFT's weights, so that rounding does not grow over the steps."""
    torch = pytest.importorskip("torch")
    model_class, inputs = base("ranks", tmp_path / "base")
    peft = peft_model("ranks", tmp_path / "base")
    peft.save_pretrained(tmp_path / "0")
    model, input_ids = model_class.from_pretrained(tmp_path / "0"), inputs["input_ids"]
    params = trees.flatten(model.params)
    frozen = {path: leaf for path, leaf in params.items() if path not in model.trainable_paths}

    @jax.jit
    def gradient(adapter):
        def loss(adapter):
            params = trees.unflatten(frozen | adapter)
            logits = model(input_ids, params=params).logits[:, :-1]
            labels = input_ids[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return jax.grad(loss)(adapter)

    def adapter_of(directory):
        params = trees.flatten(model_class.from_pretrained(directory).params)
        return {path: params[path] for path in model.trainable_paths}

    parameters = [p for name, p in peft.named_parameters() if "lora_" in name]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer, labels = torch.optim.SGD(parameters, lr=0.3), torch.from_numpy(input_ids).long()
    adapter = first = adapter_of(tmp_path / "0")
    for step in (1, 2):
        updated = jax.tree.map(lambda leaf, slope: leaf - 0.3 * slope, adapter, gradient(adapter))
        optimizer.zero_grad()
        peft(input_ids=labels, labels=labels).loss.backward()
        optimizer.step()
        peft.save_pretrained(tmp_path / str(step))
        adapter = adapter_of(tmp_path / str(step))
        for path, leaf in adapter.items():
            close(updated[path], leaf)
    assert max(float(np.abs(leaf - first[path]).max()) for path, leaf in adapter.items()) > 1e-2


def test_adapters_share_the_base_parameters(tmp_path):
    auto_class, inputs = base("gpt2", tmp_path / "base")
    plain, adapted = auto_class.from_pretrained(tmp_path / "base"), []
    expected = compiled(plain, inputs)
    for seed, rank in enumerate((2, 3)):
        config = LoraConfig(rank, lora_alpha=8, target_modules=["c_attn", "c_fc"])
        model = auto_class.from_pretrained(tmp_path / "base", peft_config=config, seed=seed)
        # adapters begin at zero
        close(compiled(model, inputs), expected, 0)
        shaken = {
            path: leaf + 0.1 * (path in model.trainable_paths)
            for path, leaf in trees.flatten(model.params).items()
        }
        model.save_pretrained(tmp_path / str(seed), params=trees.unflatten(shaken))
        adapted.append(auto_class.from_pretrained(tmp_path / str(seed)))
    first = plain.load_adapter(tmp_path / "0")
    second = first.load_adapter(tmp_path / "1")
    for model, right in zip((first, second), adapted, strict=True):
        assert np.array_equal(compiled(model, inputs), compiled(right, inputs))
        assert model.params["transformer"]["wte"] is plain.params["transformer"]["wte"] or all(
            model.params["transformer"]["wte"][k] is leaf
            for k, leaf in plain.params["transformer"]["wte"].items()
        )
    with pytest.raises(CheckpointError, match="is not an adapter"):
        plain.load_adapter(tmp_path / "base")


def change(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_mismatched_adapter_error_names_the_parameters(tmp_path):
    auto_class, _ = base("all-linear", tmp_path / "base")
    config = LoraConfig(2, target_modules=("q_proj", "v_proj"))
    folder = tmp_path / "adapter"
    auto_class.from_pretrained(tmp_path / "base", peft_config=config).save_pretrained(folder)

    def refused(error, message, **fields):
        original = (folder / "adapter_config.json").read_text()
        change(folder, **fields)
        with pytest.raises(error, match=message):
            auto_class.from_pretrained(folder)
        (folder / "adapter_config.json").write_text(original)

    refused(WeightsError, r"lora_A.weight has the shape \(2, 32\), .* \(3, 32\)", r=3)
    refused(
        WeightsError,
        "lacks 8 of the tensors",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    )
    refused(UsageError, "target_modules query: no layer of this model", target_modules=["query"])
    refused(UsageError, "use_dora, which hfseq does not support", use_dora=True)
    refused(UsageError, "init_lora_weights='pissa'", init_lora_weights="pissa")
    refused(UsageError, "peft_type 'IA3'.*LORA", peft_type="IA3")
    refused(UsageError, "r=0.*ranks must be >= 1", r=0)
    refused(
        CheckpointError, "'/no/such/model' does not exist", base_model_name_or_path="/no/such/model"
    )
    refused(CheckpointError, "has no base_model_name_or_path", base_model_name_or_path=None)
    file = shutil.copytree(folder, tmp_path / "other") / "adapter_model.safetensors"
    save_file(load_file(file) | {"lora_A.weight": np.ones((2, 32), np.float32)}, file)
    with pytest.raises(WeightsError, match="'lora_A.weight'.*is not in PEFT's format"):
        auto_class.from_pretrained(tmp_path / "other")
    other = models.llama_config(num_hidden_layers=1)
    auto_class.from_config(other).save_pretrained(tmp_path / "shallow")
    refused(
        WeightsError,
        r"does not fit this base model, which lacks:\n  model.layers.1.self_attn.q_proj.lora_A",
        base_model_name_or_path=str(tmp_path / "shallow"),
    )
    with pytest.raises(UsageError, match="target_modules nope: no layer"):
        auto_class.from_pretrained(
            tmp_path / "base", peft_config=LoraConfig(2, target_modules=("q_proj", "nope"))
        )
    with pytest.raises(UsageError, match="no default target_modules for 'modernbert'"):
        hfseq.FlaxModernBertModel(models.modernbert_config(), peft_config=LoraConfig(2))


def test_an_adapter_keeps_the_end_of_text_of_its_training(tmp_path):
    base("gpt2", tmp_path / "base")
    load = hfseq.FlaxAutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "base", peft_config=LoraConfig(r=2, target_modules="all-linear"))
    old, new = model.config.eos_token_id, 7
    assert old != new
    model.config.eos_token_id = new
    model.generation_config.eos_token_id = [new, old]
    model.save_pretrained(tmp_path / "adapter")
    adapted = load(tmp_path / "adapter")
    original = load(tmp_path / "base")
    loaded = original.load_adapter(tmp_path / "adapter")
    assert original.config.eos_token_id == original.generation_config.eos_token_id == old
    adapted.merge_adapter().save_pretrained(tmp_path / "merged")
    merged = load(tmp_path / "merged")
    for each in (adapted, loaded, merged):
        assert each.config.eos_token_id == new
        assert each.generation_config.eos_token_id == [new, old]


#: Class, configuration, target, modules to save; the default suite runs the first.
TIED_TABLES = {
    "head": ("LlamaForCausalLM", "llama", "q_proj", ["lm_head"]),
    "words": ("LlamaForCausalLM", "llama", "q_proj", ["embed_tokens"]),
    "both": ("LlamaForCausalLM", "llama", "q_proj", ["embed_tokens", "lm_head"]),
    "bart": ("BartForConditionalGeneration", "bart", "q_proj", ["shared"]),
    "bart tables": ("BartForConditionalGeneration", "bart", "q_proj", ["embed_tokens"]),
    "t5": ("T5ForConditionalGeneration", "t5", "q", ["lm_head"]),
    "t5 tables": ("T5ForConditionalGeneration", "t5", "q", ["embed_tokens"]),
    "bert": ("BertForMaskedLM", "bert", "query", ["cls"]),
}


def tied_base(name, folder):
    """Saves a PyTorch model with tied word embeddings, and returns the classes and inputs."""
    torch = pytest.importorskip("torch")
    import transformers

    class_name, config_name, *_ = TIED_TABLES[name]
    config = getattr(models, f"{config_name}_config")(tie_word_embeddings=True)
    theirs = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = theirs(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    inputs = {"input_ids": models.ids(2, 9)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = models.ids(2, 5, seed=1)
    return theirs, getattr(hfseq, f"Flax{class_name}"), inputs


def outputs_in_peft(theirs, base_folder, folder, inputs):
    from peft import PeftModel

    model = PeftModel.from_pretrained(theirs.from_pretrained(base_folder), folder).eval()
    return model(**tensors(**inputs))[0].detach().numpy()


@pytest.mark.parametrize(
    ("name", "ensure"),
    [
        ("head", False),
        *(pytest.param(n, False, marks=pytest.mark.slow) for n in [*TIED_TABLES][1:]),
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in ("head", "words", "both")),
    ],
)
def test_adapters_that_replace_tied_tables_equal_pefts(name, ensure, tmp_path):
    peft = pytest.importorskip("peft")
    theirs, ours, inputs = tied_base(name, tmp_path / "base")
    *_, target, saved = TIED_TABLES[name]
    config = peft.LoraConfig(
        r=2, target_modules=[target], modules_to_save=saved, ensure_weight_tying=ensure
    )
    adapted = peft.get_peft_model(theirs.from_pretrained(tmp_path / "base"), config)
    for parameter in adapted.parameters():
        parameter.data.add_(0.1 * parameter.requires_grad * parameter.data.cos())
    adapted.save_pretrained(tmp_path / "adapter")
    expected = outputs_in_peft(theirs, tmp_path / "base", tmp_path / "adapter", inputs)
    loaded = ours.from_pretrained(tmp_path / "adapter")
    close(jax.jit(loaded)(**inputs)[0], expected, 1e-4)
    on_base = ours.from_pretrained(tmp_path / "base").load_adapter(tmp_path / "adapter")
    close(on_base(**inputs)[0], expected, 1e-4)
    loaded.save_pretrained(tmp_path / "back")
    close(outputs_in_peft(theirs, tmp_path / "base", tmp_path / "back", inputs), expected)
    convert(str(tmp_path / "adapter"), tmp_path / "merged", merge=True, strict=True)
    merged = theirs.from_pretrained(tmp_path / "merged").eval()
    close(merged(**tensors(**inputs))[0].detach(), expected, 1e-4)


@pytest.mark.parametrize(
    "name",
    ["words", *(pytest.param(n, marks=pytest.mark.slow) for n in TIED_TABLES if n != "words")],
)
def test_trained_copies_of_tied_tables_open_in_peft(name, tmp_path):
    pytest.importorskip("peft")
    theirs, ours, inputs = tied_base(name, tmp_path / "base")
    *_, target, saved = TIED_TABLES[name]
    config = LoraConfig(2, target_modules=[target], modules_to_save=saved)
    model = ours.from_pretrained(tmp_path / "base", peft_config=config)
    assert any("lora" not in str(path) for path in model.trainable_paths)
    model.params = trees.unflatten(
        {
            path: leaf + 0.1 * np.cos(np.arange(leaf.size)).reshape(leaf.shape)
            if path in model.trainable_paths
            else leaf
            for path, leaf in trees.flatten(model.params).items()
        }
    )
    model.save_pretrained(tmp_path / "adapter")
    expected = outputs_in_peft(theirs, tmp_path / "base", tmp_path / "adapter", inputs)
    close(model(**inputs)[0], expected, 1e-4)
    close(ours.from_pretrained(tmp_path / "adapter")(**inputs)[0], expected, 1e-4)


def test_ensure_weight_tying_needs_the_name_of_the_tied_table():
    config = LoraConfig(2, modules_to_save=["lm_head"], ensure_weight_tying=True)
    with pytest.raises(UsageError, match="model.embed_tokens"):
        hfseq.FlaxLlamaForCausalLM(
            models.llama_config(tie_word_embeddings=True), peft_config=config, _do_init=False
        )
