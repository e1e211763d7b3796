"""The example models of the documentation, against the PyTorch classes.

They are loaded as plugins, as a user loads them, and replace in-tree families of the same type.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from transformers import (
    CLIPTextConfig,
    Mamba2Config,
    ModernBertConfig,
    OPTConfig,
    Qwen3MoeConfig,
)

from hfseq import plugins
from hfseq.testing import check_architecture
from tests.support.plugin_files import ROOT

EXAMPLES = ROOT / "docs" / "examples"
PARITY = ["torch_loads_it", "torch_tree", "torch_parity"]


def opt(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    options = {"num_attention_heads": 4, "word_embed_proj_dim": 32, "max_position_embeddings": 24}
    return OPTConfig(**{**sizes, **options, **changes})


def clip(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    # Smaller initial values keep the rounding of a zero gradient below the battery's limit.
    options = {"num_attention_heads": 4, "max_position_embeddings": 24, "eos_token_id": 2}
    options["initializer_factor"] = 0.5
    return CLIPTextConfig(**{**sizes, **options, "pad_token_id": 1, "bos_token_id": 0, **changes})


def modernbert(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    options = {"num_attention_heads": 4, "max_position_embeddings": 24, "local_attention": 6}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    return ModernBertConfig(**{**sizes, **options, **tokens, "sep_token_id": 2, **changes})


def qwen3_moe(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    options["max_position_embeddings"] = 24
    return Qwen3MoeConfig(**{**sizes, **options, **experts, **tokens, **changes})


def mamba2(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 4}
    options = {"num_hidden_layers": 2, "n_groups": 2, "chunk_size": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return Mamba2Config(**{**sizes, **options, **tokens, **changes})


MODELS = {
    "mamba2": (
        "mamba2_decoder", 240, {"packing", "long_rows", "torch_experts", "torch_dropout"},
        {
            "plain": mamba2(),
            "tied, all biases": mamba2(
                tie_word_embeddings=True, use_bias=True, use_conv_bias=False, conv_kernel=3,
                time_step_limit=(0.001, 0.1),
            ),
        },
    ),
    "qwen3_moe": (
        "experts_decoder", 110, set(),
        {"normalized": qwen3_moe(norm_topk_prob=True), "plain": qwen3_moe(norm_topk_prob=False)},
    ),
    "opt": (
        "opt_decoder", 160, {"torch_experts", "torch_dropout"},
        {
            "tied": opt(),
            "narrow, norms after": opt(
                word_embed_proj_dim=16, do_layer_norm_before=False, tie_word_embeddings=False,
                enable_bias=False, layer_norm_elementwise_affine=False, dropout=0.0,
            ),
        },
    ),
    "clip_text_model": (
        # An encoder, which generates no text.
        "clip_text_encoder", 110, {"cached_decoding", "torch_experts"},
        {"old end": clip(), "own end": clip(eos_token_id=5, attention_dropout=0.1)},
    ),
    "modernbert": (
        "modernbert_encoder", 180, {"cached_decoding", "torch_experts"},
        {
            "tied": modernbert(),
            "untied, all biases": modernbert(
                tie_word_embeddings=False, norm_bias=True, attention_bias=True, mlp_bias=True,
                classifier_bias=True, attention_dropout=0.1, mlp_dropout=0.1,
                embedding_dropout=0.1,
            ),
            "no decoder bias": modernbert(decoder_bias=False, num_hidden_layers=3),
        },
    ),
}  # fmt: skip


@pytest.fixture
def configs(request):
    """Loads the example of a model and returns its configurations."""
    plugins.unload()
    name, _, _, configs = MODELS[request.param]
    loaded = plugins.load([EXAMPLES / f"{name}.py"])
    assert loaded.architectures[request.param].plugin == name
    yield request.param, configs
    plugins.unload()


@pytest.mark.slow
@pytest.mark.parametrize("configs", MODELS, indirect=True)
def test_the_example_passes_the_battery(configs):
    pytest.importorskip("torch")
    model_type, tiny = configs
    skip = {"torch_dropout": "the example has no layerdrop"} if model_type == "opt" else {}
    report = check_architecture(model_type, tiny, skip=skip)
    assert not report.not_run
    # Base models do not generate.
    skipped = MODELS[model_type][2] | {"generation", "torch_generation"}
    assert {label.rpartition(".")[2] for label in report.skipped} == skipped


@pytest.mark.parametrize("configs", ["clip_text_model"], indirect=True)
def test_the_example_equals_pytorch(configs):
    pytest.importorskip("torch")
    model_type, tiny = configs
    config = next(iter(tiny.values()))
    config.num_hidden_layers = 1
    assert len(check_architecture(model_type, config, checks=PARITY).passed) == 3


@pytest.mark.parametrize("model_type", MODELS)
def test_the_example_is_short(model_type):
    name, lines, _, _ = MODELS[model_type]
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= lines


@pytest.mark.parametrize("configs", ["qwen3_moe"], indirect=True)
def test_experts_of_a_file_by_pytorch_are_read(configs, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = next(iter(configs[1].values()))
    torch_model = transformers.Qwen3MoeForCausalLM(config).eval()
    torch_model.save_pretrained(tmp_path)
    model_class = plugins.load().architectures.get("qwen3_moe").load_head("ForCausalLM")
    model = model_class.from_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(3, 64, (2, 7))
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(jax.jit(model)(ids).logits, expected, atol=1e-5)


def test_a_recurrent_state_is_carried_between_windows():
    plugins.unload()
    loaded = plugins.load([EXAMPLES / "mamba2_decoder.py"])
    model = loaded.architectures["mamba2"].target.load_head("ForCausalLM")(mamba2(), seed=1)
    ids = np.random.default_rng(0).integers(3, 64, (2, 12))
    run = jax.jit(model)
    whole = run(ids).logits
    cache = model.init_cache(2, 0)
    first = run(ids[:, :5], past_key_values=cache)
    carried = run(ids[:, 5:], past_key_values=first.past_key_values)
    np.testing.assert_allclose(carried.logits, whole[:, 5:], atol=1e-5)
    rows = np.array([True, False])
    reset = run(ids[:, 5:], past_key_values=first.past_key_values, reset_rows=rows)
    np.testing.assert_allclose(reset.logits[0], run(ids[:, 5:]).logits[0], atol=1e-5)
    np.testing.assert_allclose(reset.logits[1], whole[1, 5:], atol=1e-5)
    plugins.unload()


def test_the_classification_head_passes_the_battery():
    plugins.unload()
    loaded = plugins.load([EXAMPLES / "classification_head.py"])
    config_class = loaded.architectures["llama_mean"].target.load_config()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24}
    config = config_class(**sizes, **heads, pad_token_id=0, num_labels=3)
    head = ["ForSequenceClassification"]
    checks = ["shapes", "gradients", "padding"]
    report = check_architecture("llama_mean", config, heads=head, checks=checks)
    assert "FlaxLlamaMeanForSequenceClassification.padding" in report.passed
    assert "hidden_act" in report.unmoved and "hidden_size" not in report.unmoved
    plugins.unload()
