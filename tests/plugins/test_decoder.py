"""Llama-style decoders: the battery for each option, and differences from Transformers 4."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hfseq
from hfseq import plugins
from hfseq.errors import UsageError, WeightsError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq_plugins.decoder.modeling import last_token_states
from tests.support import models
from tests.support.models import close, ids
from tests.support.parity import compare_tokens
from tests.support.tiers import CHECKS, first
from tests.support.torch_counterparts import torch_counterpart

FAMILIES = (
    "llama",
    "mistral",
    "gemma",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma2",
    "gemma3_text",
)
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_factor": [1.0, 1.5, 2.0, 2.5],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}


S, T, Q = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
HEADS = {
    "llama": (S, T, Q),
    "mistral": (S, T, Q),
    "gemma": (S, T),
    "qwen2": (S, T, Q),
    "qwen3": (S, T, Q),
    "smollm3": (S, T, Q),
    "gemma2": (S, T),
    "gemma3_text": (S,),
    "eurobert": ("Model", "ForMaskedLM", S, T),
}


def config(family, **changes):
    return getattr(models, f"{family}_config")(**changes)


def built(family, head="ForCausalLM", **changes):
    stem = {"smollm3": "SmolLM3", "gemma3_text": "Gemma3"}.get(family, family.capitalize())
    return getattr(hfseq, f"Flax{stem}{head}")(config(family, **changes), seed=1)


@pytest.mark.parametrize(
    ("head", "checks"),
    first(
        [("ForCausalLM", CHECKS), ("Model", None), ("ForCausalLM", None)], ("ForCausalLM", CHECKS)
    ),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_battery(family, head, checks):
    layers = models.fewest_layers(family) if checks else {}
    check_architecture(family, config(family, **layers), heads=[head], checks=checks)


@pytest.mark.parametrize(
    ("family", "head", "checks"),
    first(
        [
            ("eurobert", "ForMaskedLM", CHECKS),
            *((family, head, None) for family, heads in HEADS.items() for head in heads),
        ],
        ("eurobert", "ForMaskedLM", CHECKS),
    ),
)
def test_battery_of_other_heads(family, head, checks):
    model_config = config(family, num_labels=3, **(models.fewest_layers(family) if checks else {}))
    check_architecture(family, model_config, heads=[head], checks=checks)


def test_batteries_cover_every_registered_head():
    for family, heads in HEADS.items():
        expected_heads = set(heads) if family == "eurobert" else {"Model", "ForCausalLM", *heads}
        assert expected_heads == set(plugins.load().architectures[family].target.heads), family


VARIANTS = {
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "no grouped queries": ("llama", {"num_key_value_heads": 4}),
    "heads of another width": ("llama", {"head_dim": 6}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "fewer positions than two heads' width": ("llama", {"max_position_embeddings": 24,
                                                        "head_dim": 16}),
    "dropout": ("llama", {"attention_dropout": 0.1}),
    "another base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4,
                                             "factor": 3.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
                                              "factor": 2.0}}),
    "llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 20}}),
    "no window": ("mistral", {"sliding_window": None}),
    "a window of two": ("mistral", {"sliding_window": 2}),
    "a window larger than the rows": ("mistral", {"sliding_window": 4096}),
    "tied mistral": ("mistral", {"tie_word_embeddings": True}),
    "one key head of gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 20}),
    "qwen2 without windows": ("qwen2", {"use_sliding_window": False, "num_hidden_layers": 2}),
    "layers with explicit types": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "yarn of qwen3": ("qwen3", {"rope_parameters": YARN, "attention_bias": True}),
    "smollm3 that sees all": ("smollm3", {"use_sliding_window": False, "sliding_window": None}),
    "positions nowhere": ("smollm3", {"no_rope_layers": [0] * 4, "mlp_bias": True}),
    "no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 untied": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3 capped": ("gemma3_text", {"final_logit_softcapping": 8.0,
                                      "attn_logit_softcapping": 2.0}),
    "gemma3 stretched": ("gemma3_text", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 9.0}}}),
    "untied gemma": ("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_battery_of_a_switch(variant):
    family, changes = VARIANTS[variant]
    check_architecture(family, config(family, **changes), heads=["ForCausalLM"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        LONG | {"original_max_position_embeddings": 8},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rows_longer_than_those_of_training_are_stretched_as_in_pytorch(rope):
    """Checks with rows of equal length, because the rotary embedding depends on the length."""
    model_config = config(
        "llama", max_position_embeddings=10, rope_parameters={"rope_theta": 1e4} | rope
    )
    message = "angles depend on the length of the longest row"
    names = ("padding", "packing", "cached_decoding", "generation", "torch_generation")
    skip = dict.fromkeys(names, message)
    check_architecture("llama", model_config, heads=["ForCausalLM"], skip=skip)


# -- differences from Transformers 4
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", first([5, None], 5))
def test_window_includes_the_query_position(window):
    model = built("mistral", num_hidden_layers=1, sliding_window=window)
    tokens = ids(1, 12)
    call = jax.jit(functools.partial(model, output_attentions=True))
    weights = np.asarray(call(tokens).attentions[0])[0, 0]
    distance = np.arange(12)[:, None] - np.arange(12)
    visible = (distance >= 0) & (distance < (window or 99))
    assert ((weights > 0) == visible).all()


def test_a_sequence_is_classified_by_its_last_token():
    states = jnp.arange(24.0).reshape(3, 4, 2)
    rows = jnp.asarray([[5, 6, 9, 9], [9, 9, 5, 6], [5, 9, 6, 7]])
    assert last_token_states(states, rows, 9)[:, 0].tolist() == [2.0, 14.0, 22.0]
    assert last_token_states(states[:1], rows[:1], None)[:, 0].tolist() == [6.0]


def test_ties_and_bases_of_the_configuration_are_not_ignored():
    tied = built("llama", tie_word_embeddings=True)
    assert "lm_head" not in tied.params
    tokens = ids(1, 12)
    plain = built("llama")
    other = built("llama", rope_parameters={"rope_type": "default", "rope_theta": 99.0})
    assert not close(
        jax.jit(plain)(tokens).logits, jax.jit(other)(tokens, params=plain.params).logits
    )


def test_rows_longer_than_trained_positions_are_accepted():
    assert jax.eval_shape(built("llama"), ids(1, 60)).logits.shape == (1, 60, 64)


def test_scaled_embeddings_are_rounded_as_pytorch_rounds_them():
    model = built("gemma", "Model", hidden_size=48, num_hidden_layers=1)
    half = type(model)(model.config, dtype=jnp.bfloat16, _do_init=False)
    run = jax.jit(lambda params: half(ids(1, 6), params=params, output_hidden_states=True))
    states = run(model.params).hidden_states[0]
    rows = jnp.asarray(model.params["embed_tokens"]["embedding"])[ids(1, 6)].astype(jnp.bfloat16)
    assert (states == rows * jnp.bfloat16(48**0.5)).all()


@pytest.mark.slow
def test_states_of_half_types_begin_with_pytorchs_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import GemmaModel

    model = built("gemma", "Model", hidden_size=48, num_hidden_layers=1)
    model.save_pretrained(tmp_path, params=model.to_bf16(model.params))
    half = hfseq.FlaxGemmaModel.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    ours = half(ids(1, 6), output_hidden_states=True)
    theirs = GemmaModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs = theirs(torch.from_numpy(ids(1, 6)).long(), output_hidden_states=True)
    begin, end = (theirs.hidden_states[index].float().detach().numpy() for index in (0, -1))
    assert (np.asarray(ours.hidden_states[0], np.float32) == begin).all()
    assert np.abs(np.asarray(ours.last_hidden_state, np.float32) - end).max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_angles_that_old_files_hold_are_ignored(family, tmp_path, caplog):
    from safetensors.numpy import load_file, save_file

    model = built(family)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(stored | buffer, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = type(model).from_pretrained(tmp_path)
    assert close(jax.jit(again)(ids(1, 6)).logits, jax.jit(model)(ids(1, 6)).logits)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_model_that_sees_both_ways_sees_all():
    model = built("gemma", "Model", use_bidirectional_attention=True)
    weights = np.asarray(
        jax.jit(functools.partial(model, output_attentions=True))(ids(1, 6)).attentions[0]
    )
    assert (weights > 0).all()
    with pytest.raises(UsageError, match="cache"):
        model.init_cache(1, 8)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_product_of_a_layer_is_one_of_fp8(family, scan_layers):
    model = type(plain := built(family))(
        plain.config, seed=1, precision="fp8_delayed", scan_layers=scan_layers
    )
    sites = {path[:-1] for path in trees.flatten(model.init_extra(jax.random.key(0)))}
    module_names = {path[-2] for path in sites}  # keys and values are one product
    assert module_names == {f"{part}_proj" for part in ("q", "k", "o", "gate", "up", "down")}
    apart = np.abs(np.asarray(model(ids(2, 12)).logits, np.float32) - plain(ids(2, 12)).logits)
    assert 0 < apart.mean() < 0.2 * np.abs(plain(ids(2, 12)).logits).mean()


# -- caches
# ------------------------------------------------------------------------------------


GENERATED = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "dynamic": (
        "llama",
        {
            "max_position_embeddings": 10,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "longrope": ("llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 10}}),
    "a window shorter than the prompt": ("mistral", {}),
    "a window of two": ("mistral", {"sliding_window": 2}),
    "a window as long as the rows": ("mistral", {"sliding_window": 23}),
    "a window larger than the cache": ("mistral", {"sliding_window": 4096}),
    "no window": ("mistral", {"sliding_window": None}),
    "gemma": ("gemma", {"num_key_value_heads": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", GENERATED)
@pytest.mark.parametrize("padded", ["left", "none"])
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_tokens_are_pytorchs(variant, padded, search, tmp_path):
    family, changes = GENERATED[variant]
    model = built(family, **changes)
    tokens, mask = np.maximum(ids(3, 9), 3), np.ones((3, 9), np.int32)
    if padded == "left":
        mask[0, :4], mask[1, :1] = 0, 0
        tokens = np.where(mask, tokens, 0)
    theirs = torch_counterpart(model, tmp_path)
    compare_tokens(model, theirs, tokens, mask, max_new_tokens=14, do_sample=False, **search)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_windows_positions_do_not_count_padding_on_the_right(scan_layers):
    model = type(plain := built("mistral"))(plain.config, seed=1, scan_layers=scan_layers)
    tokens, lengths = ids(3, 9), (9, 4, 1)
    mask = (np.arange(9) < np.array(lengths)[:, None]).astype(np.int32)
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=12).sequences
    for row, length in enumerate(lengths):
        alone = plain.generate(tokens[row : row + 1, :length], max_new_tokens=12).sequences
        assert np.array_equal(together[row, 9:], alone[0, length:])


# -- bad input
# ------------------------------------------------------------------------------------


def test_an_unknown_kind_of_rotary_positions_is_named():
    model_config = config("llama")
    model_config.rope_parameters = {"rope_type": "su", "rope_theta": 1e4}
    with pytest.raises(UsageError, match=r"unknown rope_type 'su'.*longrope"):
        hfseq.FlaxLlamaModel(model_config)


def test_sibling_checkpoint_error_names_the_mismatch(tmp_path):
    built("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    gemma = config("gemma", num_hidden_layers=1)
    with pytest.raises(WeightsError, match=r"differ in shape\n.*k_proj"):
        hfseq.FlaxGemmaForCausalLM.from_pretrained(tmp_path, config=gemma)
