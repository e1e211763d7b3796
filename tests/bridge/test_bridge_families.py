"""Families that hfseq implements natively, and classes without one, through the bridge."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import hfseq
from hfseq import testing
from hfseq.errors import UsageError
from hfseq.nn import sharding, trees
from hfseq_plugins.bridge import comparison, generation, tiny
from hfseq_plugins.bridge.generation import plan_cache
from hfseq_plugins.bridge.model import bridged_class
from hfseq_plugins.bridge.refusals import UnsupportedModel
from hfseq_plugins.bridge.structure import structure_of
from tests.support import plugin_files

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
DECODER = SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
}
NATIVE = {
    "bert": ("ForMaskedLM", SIZES),
    "roberta": ("ForMaskedLM", SIZES | {"pad_token_id": 1}),
    "electra": ("ForMaskedLM", SIZES | {"embedding_size": 16}),
    "distilbert": (
        "ForMaskedLM",
        {"vocab_size": 64, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48},
    ),
    "llama": ("ForCausalLM", DECODER),
    "qwen2": ("ForCausalLM", DECODER),
    "gemma2": ("ForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 6}),
    "gpt2": ("ForCausalLM", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "bart": ("ForSeq2SeqLM", SEQ2SEQ),
    "t5": (
        "ForSeq2SeqLM",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
    ),
    "vit": (
        "ForImageClassification",
        {k: v for k, v in SIZES.items() if k.startswith(("hidden", "num", "inter"))}
        | {"image_size": 16, "patch_size": 8},
    ),
}


def example(task):
    random = np.random.default_rng(0)
    ids = random.integers(5, 64, (2, 12)).astype(np.int32)
    if task == "ForImageClassification":
        return {"pixel_values": random.normal(size=(2, 3, 16, 16)).astype(np.float32)}
    return {"input_ids": ids} | (
        {"decoder_input_ids": ids[:, :5]} if task == "ForSeq2SeqLM" else {}
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", NATIVE)
def test_native_family_has_the_same_outputs_through_the_bridge(model_type, tmp_path):
    task, sizes = NATIVE[model_type]
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    auto_class = getattr(hfseq, f"FlaxAutoModel{task}")
    native = auto_class.from_config(config)
    native.save_pretrained(tmp_path)
    model = auto_class.from_pretrained(tmp_path, bridge=True)
    expected = native(**example(task)).logits
    error = np.abs(model(**example(task)).logits - expected).max()
    assert error <= 1e-5 * max(1.0, np.abs(expected).max())


GENERATORS = {
    "olmo2": ("Olmo2ForCausalLM", transformers.Olmo2Config(**DECODER)),
    "mamba": (
        "MambaForCausalLM",
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8),
    ),
    "opt": (  # positions from the mask
        "OPTForCausalLM",
        transformers.OPTConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, ffn_dim=48,
            word_embed_proj_dim=32, max_position_embeddings=40,
        ),
    ),
    "bamba": (  # states and keys
        "BambaForCausalLM",
        transformers.BambaConfig(
            **DECODER, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
            attn_layer_indices=[1],
        ),
    ),
    "falcon_h1": (  # states and keys in the same layer
        "FalconH1ForCausalLM",
        transformers.FalconH1Config(
            **DECODER, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
            mamba_d_ssm=64, head_dim=8,
        ),
    ),
    "roformer": (  # the code needs the number of cached tokens
        "RoFormerForCausalLM",
        transformers.RoFormerConfig(
            vocab_size=64, embedding_size=32, hidden_size=32, num_hidden_layers=1,
            num_attention_heads=4, intermediate_size=48, max_position_embeddings=40,
            is_decoder=True,
        ),
    ),
    "bart": ("BartForConditionalGeneration", transformers.BartConfig(**SEQ2SEQ)),
    "switch_transformers": (  # the decoder reads all entries of the encoder's output
        "SwitchTransformersForConditionalGeneration",
        transformers.SwitchTransformersConfig(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2,
            num_heads=4, num_experts=2, expert_capacity=64, decoder_start_token_id=0,
        ),
    ),
    "m2m_100": ("M2M100ForConditionalGeneration", transformers.M2M100Config(**SEQ2SEQ)),
}  # fmt: skip
#: The caches that are not "keys".
CACHES = {
    **dict.fromkeys(("m2m_100", "roformer", "switch_transformers"), "history"),
    **dict.fromkeys(("bamba", "falcon_h1"), "hybrid"),
    "mamba": "states",
}


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("family", GENERATORS)
def test_generated_tokens_equal_those_of_torch(family, num_beams, tmp_path):
    class_name, config = GENERATORS[family]
    torch.manual_seed(0)
    reference = getattr(transformers, class_name)(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path)
    task = "ForSeq2SeqLM" if config.is_encoder_decoder else "ForCausalLM"
    model = getattr(hfseq, f"FlaxAutoModel{task}").from_pretrained(tmp_path, bridge=True)
    plan = plan_cache(model.structure, config.is_encoder_decoder)
    assert plan.cache_type == CACHES.get(family, "keys"), plan.reason
    ids = np.random.default_rng(1).integers(5, 64, (2, 7)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[1, :3] = 0  # padding on the left
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "num_beams": num_beams,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    expected = reference.generate(
        torch.from_numpy(ids).long(), attention_mask=torch.from_numpy(mask).long(), **options
    )
    tokens = model.generate(ids, attention_mask=mask, **options).sequences
    np.testing.assert_array_equal(tokens[:, : expected.shape[1]], expected.numpy())


@pytest.mark.parametrize("family", ["xlm", "xlnet", "cpmant"])
def test_generation_refuses_classes_that_prepare_other_inputs(family):
    config = tiny.tiny_config(family)
    structure = structure_of(config, comparison.generating_class(config).__name__)
    with pytest.raises(UnsupportedModel, match=rf"input_ids.*{family}.py, line \d+, in prepare_"):
        plan_cache(structure, False)


@pytest.mark.parametrize(("family", "position"), [("exaone4_5", None), ("paligemma", 1)])
def test_generation_starts_at_the_position_of_the_pytorch_class(family, position, monkeypatch):
    monkeypatch.setattr(generation, "_probe", lambda *_: generation.CachePlan("keys", {}))
    config = tiny.tiny_config(family)
    structure = structure_of(config, comparison.generating_class(config).__name__)
    assert plan_cache(structure, False).first_position == position


@pytest.mark.parametrize("family", ["blip", "qwen2_vl"])
def test_generation_refuses_images_that_pytorch_prepares_in_its_own_way(family):
    config = tiny.tiny_config(family)
    class_name = comparison.generating_class(config).__name__
    model = bridged_class(class_name)(config, _do_init=False)
    with pytest.raises(UnsupportedModel, match=f"{class_name} has its own method"):
        model.prepare_inputs_for_generation(jnp.ones((1, 2)), 4, pixel_values=jnp.ones((1, 3)))


def test_generation_refuses_encoder_decoders_of_audio():
    config = tiny.tiny_config("speech_to_text")
    model = bridged_class("Speech2TextForConditionalGeneration")(config, _do_init=False)
    with pytest.raises(UsageError, match="input_features instead of input_ids"):
        model.encode(input_features=np.zeros((1, 64, 16), np.float32))


def test_decoder_of_an_encoder_decoder_is_a_decoder():
    model = bridged_class("PegasusForCausalLM")(tiny.tiny_config("pegasus"), _do_init=False)
    assert not model.config.is_encoder_decoder
    assert model.structure is structure_of(model.config, "PegasusForCausalLM")


BATTERY = {
    "olmo2": ("ForCausalLM", "Olmo2ForCausalLM", transformers.Olmo2Config(**DECODER)),
    "mixtral": (
        "ForCausalLM",
        "MixtralForCausalLM",
        transformers.MixtralConfig(**DECODER, num_local_experts=4),
    ),
    "granite": ("ForCausalLM", "GraniteForCausalLM", transformers.GraniteConfig(**DECODER)),
    "mpnet": ("ForMaskedLM", "MPNetForMaskedLM", transformers.MPNetConfig(**SIZES)),
    "deit": (
        "ForImageClassification",
        "DeiTForImageClassification",
        transformers.DeiTConfig(**NATIVE["vit"][1]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", BATTERY)
def test_bridged_class_passes_the_battery(family, tmp_path):
    from hfseq import plugins

    task, class_name, config = BATTERY[family]
    plugin = tmp_path / f"bridged_{family}.py"
    plugin.write_text(
        "from hfseq import hookimpl\n\n\n@hookimpl\ndef register_architectures(register):\n"
        f"    register('{config.model_type}', config='transformers:{type(config).__name__}',\n"
        f"             heads={{'{task}': 'hfseq_plugins.bridge.classes:Flax{class_name}'}})\n"
    )
    plugins.load([plugin])
    report = testing.check_architecture(config.model_type, config)
    assert len(report.passed) >= 8, report


project = plugin_files.project


@pytest.mark.slow
def test_lora_on_a_bridged_model_is_read_by_peft_names(tmp_path):
    from hfseq.modeling.lora import LoraConfig

    config = transformers.Olmo2Config(**DECODER)
    model = hfseq.FlaxAutoModelForCausalLM.from_config(config, bridge=True)
    model.save_pretrained(tmp_path / "base")
    adapted = hfseq.FlaxAutoModelForCausalLM.from_pretrained(
        tmp_path / "base", bridge=True, peft_config=LoraConfig(4, target_modules=["q_proj"])
    )
    params = jax.tree.map(lambda x: x, adapted.params)
    layer = params["model"]["layers"]["0"]["self_attn"]["q_proj"]
    layer["lora_B"]["kernel"] = layer["lora_B"]["kernel"] + 0.1
    ids = example("ForCausalLM")["input_ids"]
    changed = np.abs(adapted(ids, params=params).logits - model(ids).logits).max()
    assert changed > 1e-4
    adapted.save_pretrained(tmp_path / "adapter", params=params)
    from safetensors.numpy import load_file

    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    quantized = adapted.quantize(params, "int8")
    exact = adapted(ids, params=params).logits
    assert 0 < np.abs(adapted(ids, params=quantized).logits - exact).max() < 0.05
    merged = adapted.merge_adapter(params)
    np.testing.assert_allclose(merged(ids).logits, adapted(ids, params=params).logits, atol=1e-5)


@pytest.mark.slow
def test_eight_devices_compute_the_same(tmp_path):
    config = transformers.Olmo2Config(**DECODER)
    model = hfseq.FlaxAutoModelForCausalLM.from_config(config, bridge=True)
    ids = np.random.default_rng(0).integers(5, 64, (8, 12)).astype(np.int32)
    expected = np.asarray(model(ids).logits)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    model.shard(mesh)
    np.testing.assert_allclose(model(ids).logits, expected, atol=1e-5)
    kernel = model.params["model"]["layers"]["0"]["self_attn"]["q_proj"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec("fsdp", "tensor")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("expert=4,data=2", marks=pytest.mark.slow),
        "expert=2,fsdp=2,tensor=2",
        pytest.param("expert=2,sequence=2,fsdp=2", marks=pytest.mark.slow),
    ],
)
def test_expert_axis_gives_the_numbers_of_one_device(layout):
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4)
    model = hfseq.FlaxAutoModelForCausalLM.from_config(config, bridge=True)
    ids = np.random.default_rng(0).integers(5, 64, (8, 12)).astype(np.int32)

    def loss(params):
        return (model(ids, params=params).logits ** 2).mean()

    expected = jax.value_and_grad(loss)(model.params)
    mesh = sharding.make_mesh(layout)
    model.shard(mesh)
    kernel = model.params["model"]["layers"]["0"]["mlp"]["experts"]["down_proj"]
    assert kernel.sharding.spec[0] == "expert"
    result = jax.jit(jax.value_and_grad(loss))(model.params)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), result, expected
    )


WITHOUT_TORCH = """
import importlib.util, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
real = importlib.util.find_spec
importlib.util.find_spec = (
    lambda name, package=None: None if name.split(".")[0] == "torch" else real(name, package)
)
import hfseq
import numpy as np

folder, auto_name = sys.argv[1:]
model = getattr(hfseq, auto_name).from_pretrained(folder, bridge=True)
stored = dict(np.load(folder + "/stored.npz"))
ids, logits, tokens = stored["ids"], stored["logits"], stored["tokens"]
assert np.abs(model(ids).logits - logits).max() < 1e-5
if tokens.size:
    new = model.generate(ids[:, :6], max_new_tokens=6, do_sample=False).sequences
    assert (new == tokens).all()
try:
    model(np.ones((1, 33), np.int32))
except hfseq.errors.UsageError as error:
    print(error)
assert "torch" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mpnet", "olmo2"])
def test_exported_programs_run_without_torch(family, tmp_path):
    pytest.importorskip("flatbuffers")
    task, _, config = BATTERY[family]
    auto_name = f"FlaxAutoModel{task}"
    model = getattr(hfseq, auto_name).from_config(config, bridge=True)
    model.save_pretrained(tmp_path)
    path = os.pathsep.join((str(ROOT), str(ROOT / "plugins"), *sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    sizes = ["--batch_sizes", "4", "--lengths", "16", "32"]
    subprocess.run(
        [sys.executable, "-m", "hfseq.cli", "bridge", "export", str(tmp_path), *sizes],
        env=environment,
        check=True,
    )
    ids = example(task)["input_ids"]
    tokens = np.zeros(0)
    if type(model).can_generate():
        tokens = model.generate(ids[:, :6], max_new_tokens=6, do_sample=False).sequences
    np.savez(tmp_path / "stored.npz", ids=ids, logits=model(ids).logits, tokens=tokens)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path), auto_name]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "4 x 16" in result.stdout and "33" in result.stdout


@pytest.mark.slow
def test_detector_trains_like_pytorch():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=5,
        num_labels=3,
        dropout=0.0,
        **{name: size for name, size in SEQ2SEQ.items() if name[:2] in ("d_", "en", "de")},
    )
    torch.manual_seed(0)
    reference = transformers.DetrForObjectDetection(config).train()
    pixels = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32)
    expected = reference(torch.from_numpy(pixels))
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model = hfseq.FlaxAutoModelForObjectDetection.from_pretrained(folder, bridge=True)

    def loss(params):
        output, _ = model(
            pixel_values=pixels,
            params=params,
            extra=model.extra,
            train=True,
            dropout_rng=jax.random.key(0),
        )
        return (output.logits**2).sum() + (output.pred_boxes**2).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(model.params)
    expected_loss = (expected.logits**2).sum() + (expected.pred_boxes**2).sum()
    np.testing.assert_allclose(value, expected_loss.item(), rtol=1e-4)
    expected_loss.backward()
    expected_gradient = reference.model.input_projection.weight.grad.numpy()
    gradient = trees.flatten(gradients)[("model", "input_projection", "weight")]
    size = np.abs(expected_gradient).max()
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-3 * size)
