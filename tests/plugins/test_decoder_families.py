"""Decoders that differ from Llama in the names, kinds and positions of their modules."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq_plugins.decoder import options
from tests.support import models
from tests.support.models import close, ids
from tests.support.parity import compare_tokens
from tests.support.tiers import CHECKS, first, heads
from tests.support.torch_counterparts import torch_counterpart

FAMILIES = (
    *("olmo", "olmo2", "olmo3", "phi", "phi3", "granite", "glm", "glm4", "cohere", "cohere2"),
    *("stablelm", "gpt_neox", "starcoder2", "ministral", "exaone4", "ernie4_5", "seed_oss"),
    *("helium", "falcon"),
)
#: LongRoPE with the factors of four pairs of features.
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_factor": [1.0, 1.5, 2.0, 2.5],
}


def config(family, **changes):
    return getattr(models, f"{family}_config")(**changes)


def built(family, head="ForCausalLM", **changes):
    spec = plugins.load().architectures.get(family)
    return spec.load_head(head)(config(family, **changes), seed=1)


@pytest.mark.parametrize(
    ("family", "head", "checks"),
    first(
        [
            *((family, "ForCausalLM", CHECKS) for family in FAMILIES),
            *((family, head, None) for family in FAMILIES for head in heads(family)),
        ],
        *((family, "ForCausalLM", CHECKS) for family in FAMILIES),
    ),
)
def test_battery(family, head, checks):
    model_config = config(family, num_labels=3, **(models.fewest_layers(family) if checks else {}))
    check_architecture(family, model_config, heads=[head], checks=checks)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 5.0,
    "original_max_position_embeddings": 8,
}
FALCON_7B = {"new_decoder_architecture": False, "multi_query": True, "bias": False}
FALCON_RW = {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False}
VARIANTS = {
    "no limits": ("olmo", {"clip_qkv": None, "tie_word_embeddings": True}),
    "one key head": ("olmo2", {"num_key_value_heads": 1}),
    "plain heads of phi": ("phi", {"qk_layernorm": False, "tie_word_embeddings": True}),
    "a smaller part of phi": (
        "phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                             "partial_rotary_factor": 0.3}},
    ),
    "no window of phi3": ("phi3", {"sliding_window": None, "tie_word_embeddings": True}),
    "longrope": (
        "phi3",
        {"partial_rotary_factor": 1.0, "rope_parameters": LONG,
         "original_max_position_embeddings": 20},
    ),
    "yarn in half of each head": (
        "glm", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "attention_bias": False},
    ),
    "plain heads of cohere": ("cohere", {"use_qk_norm": False, "tie_word_embeddings": False}),
    "untied cohere2": ("cohere2", {"tie_word_embeddings": False, "attention_bias": False}),
    "parallel stablelm": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": False, "use_qkv_bias": False},
    ),
    "sequential neox": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "tied neox": ("gpt_neox", {"tie_word_embeddings": True}),
    "no biases of starcoder2": (
        "starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "ministral that sees all": ("ministral", {"layer_types": ["full_attention"] * 4}),
    "exaone4 that sees all": (
        "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "untied ernie": ("ernie4_5", {"tie_word_embeddings": False, "use_bias": False}),
    "falcon 7b": ("falcon", FALCON_7B),
    "falcon 11b": ("falcon", {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
    "falcon rw": ("falcon", FALCON_RW | {"alibi": True, "num_kv_heads": 4}),
    "sequential falcon": ("falcon", FALCON_RW | {"multi_query": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_battery_of_a_switch(variant):
    family, changes = VARIANTS[variant]
    check_architecture(family, config(family, **changes), heads=["ForCausalLM"])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "falcon rw"])
@pytest.mark.parametrize("padded", ["left", "none"])
def test_generated_tokens_are_pytorchs(family, padded, tmp_path):
    name, changes = VARIANTS.get(family, (family, {}))
    model = built(name, **changes)
    tokens, mask = np.maximum(ids(3, 9), 3), np.ones((3, 9), np.int32)
    if padded == "left":
        mask[0, :4], mask[1, :1] = 0, 0
        tokens = np.where(mask, tokens, 0)
    theirs = torch_counterpart(model, tmp_path)
    compare_tokens(model, theirs, tokens, mask, max_new_tokens=14, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "falcon rw"])
def test_padding_on_the_right_does_not_change_generated_tokens(family):
    name, changes = VARIANTS.get(family, (family, {}))
    model = built(name, **changes)
    tokens, lengths = np.maximum(ids(3, 9), 3), (9, 4, 1)
    mask = (np.arange(9) < np.array(lengths)[:, None]).astype(np.int32)
    together = model.generate(tokens, attention_mask=mask, max_new_tokens=12).sequences
    for row, length in enumerate(lengths):
        alone = model.generate(tokens[row : row + 1, :length], max_new_tokens=12).sequences
        assert np.array_equal(together[row, 9:], alone[0, length:])


#: Options that only refuse configurations.
CHECKED = ("window_required", "square_output")


def switches(family):
    """Returns pairs of an option that differs from its default, and another value of it."""
    row = options.FAMILY_OPTIONS[family]
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if value == field.default or field.name in CHECKED or field.name.endswith("_dropout"):
            continue
        if isinstance(field.default, bool):
            yield field.name, not options.is_enabled(config(family), value)
        else:
            yield field.name, field.default


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "falcon"])
def test_every_switch_of_a_row_changes_the_model(family, monkeypatch):
    model = built(family, hidden_size=32)
    tokens, row = ids(2, 16), options.FAMILY_OPTIONS[family]
    expected = model(tokens).logits
    for name, value in switches(family):
        changed = dataclasses.replace(row, **{name: value})
        monkeypatch.setitem(options.FAMILY_OPTIONS, family, changed)
        try:
            other = type(model)(model.config, _do_init=False)
        except (AttributeError, TypeError, UsageError):
            continue  # the other option does not fit the configuration
        shapes = [
            {path: leaf.shape for path, leaf in trees.flatten(tree).items()}
            for tree in (other.abstract_params, model.params)
        ]
        same = shapes[0] == shapes[1]
        assert not same or not close(other(tokens, params=model.params).logits, expected), name


# -- checkpoints
# ------------------------------------------------------------------------------------


def test_head_of_gpt_neox_is_read_with_both_names(tmp_path):
    from safetensors.numpy import load_file, save_file

    model = built("gpt_neox")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = type(model).from_pretrained(tmp_path)
    assert close(jax.jit(again)(ids(1, 6)).logits, jax.jit(model)(ids(1, 6)).logits, 0)


@pytest.mark.parametrize("family", ["ministral", "exaone4", "phi3"])
def test_biases_that_the_family_does_not_have_are_ignored(family, tmp_path):
    model = built(family, num_hidden_layers=1, layer_types=["sliding_attention"])
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored |= {"attention_bias": True, "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    again = type(model).from_pretrained(tmp_path)
    assert trees.flatten(again.params).keys() == trees.flatten(model.params).keys()


# -- bad input
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("cohere2", {"sliding_window": None}, r"sliding_window=None.*sliding_attention"),
        ("olmo3", {"sliding_window": None}, r"sliding_window=None.*sliding_attention"),
        ("ministral", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("granite", {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ("helium", {"head_dim": 12}, r"head_dim=12.*hidden_size=32"),
        ("falcon", {"parallel_attn": False}, "parallel_attn=False"),
        ("falcon", FALCON_7B | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
        ("falcon", {"num_kv_heads": 3}, "num_kv_heads=3"),
        ("falcon", {"num_attention_heads": 5}, "num_attention_heads=5"),
        ("gpt_neox", {"hidden_act": "gated"}, "unknown activation 'gated'"),
    ],
)
def test_unsupported_configurations_are_refused(family, changes, message):
    spec = plugins.load().architectures.get(family)
    with pytest.raises(UsageError, match=message):
        spec.load_head("ForCausalLM")(config(family, **changes), _do_init=False)


@pytest.mark.parametrize("family", ["phi3", "glm", "gpt_neox", "falcon"])
def test_unknown_rotary_type_is_named(family):
    model_config = config(family)
    model_config.rope_parameters = dict(model_config.rope_parameters, rope_type="mrope")
    spec = plugins.load().architectures.get(family)
    with pytest.raises(UsageError, match="unknown rope_type 'mrope'"):
        spec.load_head("ForCausalLM")(model_config, _do_init=False)


def test_generation_does_not_change_the_frequencies_of_longrope():
    changes = {"rope_parameters": LONG, "original_max_position_embeddings": 10}
    model = built("phi3", partial_rotary_factor=1.0, num_hidden_layers=1, **changes)
    with pytest.raises(UsageError, match=r"longrope.*max_length=10"):
        model.generate(ids(1, 6), max_new_tokens=6)
    assert model.generate(ids(1, 6), max_new_tokens=4).sequences.shape == (1, 10)
    assert model.generate(ids(1, 11), max_new_tokens=2).sequences.shape == (1, 13)
