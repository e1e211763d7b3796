"""Invalid inputs raise errors that name both sides of the conflict."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError, WeightsError
from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig
from hfseq_plugins.vq_transformer.modeling import (
    FlaxVQTransformerForCausalLM,
    FlaxVQTransformerModel,
)
from hfseq_plugins.vq_transformer.torch_files.configuration_vq_transformer import (
    VQTransformerConfig as TorchConfig,
)
from tests.plugins.vq_transformer.vq_cases import config, ids, model, variables

WRONG = {
    "window_size=-1": {"window_size": -1},
    "block_size=0": {"block_size": 0},
    "block_size=-4": {"block_size": -4},
    "num_codes=0": {"num_codes": 0},
    "head_dim=0": {"head_dim": 0},
    "hidden_size=15 is odd": {"hidden_size": 15},
    "vocab_size=0": {"vocab_size": 0},
    "num_hidden_layers=0": {"num_hidden_layers": 0},
    "sinusoid_base=0": {"sinusoid_base": 0},
    "ema_decay=1.5": {"ema_decay": 1.5},
    "count_floor=0": {"count_floor": 0},
    "commitment_cost=-1": {"commitment_cost": -1.0},
    "layer_dropout=1": {"layer_dropout": 1.0},
    "value_dim=0": {"value_dim": 0},
    "intermediate_size=-3": {"intermediate_size": -3},
    "initializer_scale=-1": {"initializer_scale": -1.0},
    "embedding_initializer_range=nan": {"embedding_initializer_range": math.nan},
    "reduction='assoc'.*associative_scan": {"reduction": "assoc"},
    "head_type='shgaa'.*did you mean 'shga'": {"head_type": "shgaa"},
    "attention_type='linear'.*vq_quadratic": {"attention_type": "linear"},
    "shga has one head, but num_attention_heads=4.*mhga": {"num_attention_heads": 4},
    "mqa has one key head, but num_key_value_heads=2.*gqa": {
        "head_type": "mqa",
        "num_key_value_heads": 2,
    },
    "num_attention_heads=4 is not a multiple of.*num_key_value_heads=3": {
        "head_type": "gqa",
        "num_attention_heads": 4,
        "num_key_value_heads": 3,
    },
    "num_attention_heads=2, but num_key_value_heads=1": {
        "head_type": "mha",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "hidden_size=20 is not a multiple of head_dim=8": {"head_type": "mha", "hidden_size": 20},
    "32 is not a multiple of num_attention_heads=5": {
        "head_type": "mhga",
        "num_attention_heads": 5,
    },
}


CLASSES = {VQTransformerConfig: UsageError, TorchConfig: ValueError}


@pytest.mark.parametrize("config_class", CLASSES, ids=["flax", "torch"])
@pytest.mark.parametrize("message", WRONG)
def test_configurations_that_cannot_work(message, config_class):
    sizes = {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    # The PyTorch configuration makes no suggestions.
    pattern = (
        message if config_class is VQTransformerConfig else message.partition(".*did you mean")[0]
    )
    with pytest.raises(CLASSES[config_class], match=pattern):
        config_class(**{**sizes, **WRONG[message]})


@pytest.mark.parametrize("config_class", CLASSES, ids=["flax", "torch"])
def test_all_problems_are_told_at_once(config_class):
    wrong = {"window_size": -2, "num_codes": 0, "hidden_size": 17, "num_attention_heads": 3}
    with pytest.raises(CLASSES[config_class]) as caught:
        config_class(**wrong)
    for name, value in wrong.items():
        assert f"{name}={value}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("block_size", 4.5, "int"),
        ("window_size", None, "int"),
        ("use_compressive_cache", "no", "bool"),
        ("value_dim", "wide", "int | None"),
    ],
)
def test_options_of_wrong_types_are_refused_whenever_they_are_set(name, value, expected):
    pattern = rf"{name}={value!r} is of type .* be {re.escape(expected)}"
    with pytest.raises(UsageError, match=pattern):
        config("mqa", **{name: value})
    model_and_params = config("mqa")
    with pytest.raises(UsageError, match=pattern):
        setattr(model_and_params, name, value)


def test_options_that_are_changed_later_are_checked_by_the_next_call():
    model_and_params = model("mqa")
    params, extra = variables(model_and_params)
    model_and_params.config.block_size = 0
    with pytest.raises(UsageError, match="block_size=0 has to be greater than 0"):
        model_and_params(ids(2, 4), params=params, extra=extra)


def test_unknown_presets_are_refused():
    with pytest.raises(UsageError, match="enwik9.*did you mean 'enwik8'"):
        VQTransformerConfig.preset("enwik9")


@pytest.mark.parametrize("name", ["enwik8", "pg19", "imagenet64", "throughput"])
def test_presets_have_the_sizes_of_the_reference(name):
    preset_config = VQTransformerConfig.preset(name)
    width = 768 if name in ("enwik8", "throughput") else 2048
    assert (preset_config.hidden_size, preset_config.value_width) == (width, 2 * width)
    assert (preset_config.num_hidden_layers, preset_config.head_dim, preset_config.num_codes) == (
        24,
        128,
        512,
    )
    assert preset_config.vocab_size == (32000 if name == "pg19" else 259)
    assert (preset_config.window_size, preset_config.block_size) == (512, 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, total",
    [
        ("enwik8", 187_679_750),
        ("pg19", 1_314_659_584),
        ("imagenet64", 1_249_622_276),
    ],
)
def test_presets_have_the_number_of_parameters_of_the_reference(name, total):
    model_and_params = FlaxVQTransformerForCausalLM(
        VQTransformerConfig.preset(name), _do_init=False
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(model_and_params.params_shape_tree))
    books = [
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(model_and_params.extra_shape_tree)
        if "new_" not in str(path[-1])
    ]
    assert sum(books) == 3_170_304
    # The reference stores an embedding bias that an untied head does not use.
    unused = (
        0 if model_and_params.config.tie_word_embeddings else model_and_params.config.vocab_size
    )
    assert count + sum(books) + unused == total


def call_with(flax_model, state):
    """Calls a model with a state and zeros as parameters."""
    params, extra = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        (flax_model.params_shape_tree, flax_model.extra_shape_tree),
    )
    return flax_model(ids(2, 4), params=params, extra=extra, past_key_values=state)


@pytest.fixture(scope="module")
def model_and_params():
    flax_model = model("mqa")
    return flax_model, *variables(flax_model)


REFUSED = {
    "past_key_values .* 3, .* 2": lambda m: {"past_key_values": m.init_cache(3)},
    "window|num_codes": lambda _: {
        "past_key_values": model("mqa", window_size=9, num_codes=6).init_cache(2)
    },
    "past_key_values.*segment_ids.*reset_rows": lambda m: {
        "past_key_values": m.init_cache(2),
        "segment_ids": np.ones((2, 4), np.int32),
    },
    "reset_rows needs past_key_values": lambda _: {"reset_rows": jnp.ones(2, bool)},
    "reset_rows.*3.*2": lambda m: {
        "past_key_values": m.init_cache(2),
        "reset_rows": np.ones(3, bool),
    },
    **{
        rf"{name}.*\(2, 5\).*\(2, 4\)": lambda _, name=name: {name: np.ones((2, 5), np.int32)}
        for name in ("attention_mask", "segment_ids", "code_mask")
    },
    r"input_ids have shape \(4,\).*\(batch, length\) with at least one": lambda _: {
        "input_ids": np.zeros(4, np.int32)
    },
    r"input_ids have shape \(2, 0\).*\(batch, length\) with at least one": lambda _: {
        "input_ids": np.zeros((2, 0), np.int32)
    },
    "19.*vocabulary of 19": lambda _: {"input_ids": np.array([[19]])},
    "codebook": lambda _: {"extra": None},
}


@pytest.mark.parametrize("message", REFUSED)
def test_inputs_that_do_not_fit_are_refused(model_and_params, message):
    flax_model, params, extra = model_and_params
    inputs = {"input_ids": ids(2, 4), "params": params, "extra": extra}
    with pytest.raises(UsageError, match=message):
        flax_model(**inputs | REFUSED[message](flax_model))


@pytest.mark.parametrize(("layers", "other"), [(2, 1), (1, 2)])
def test_states_of_another_depth_are_refused(layers, other):
    with pytest.raises(
        UsageError, match=f"created for {other} attentions.*the model has {layers} "
    ):
        call_with(
            model("mqa", num_hidden_layers=layers),
            model("mqa", num_hidden_layers=other).init_cache(2),
        )


def test_states_of_another_kind_of_layer_are_refused():
    with pytest.raises(UsageError, match=r"created for 2 attentions.*attention_2.*layers/1"):
        call_with(model("mqa", num_hidden_layers=2), model("shga", value_dim=8).init_cache(2))


@pytest.mark.slow
def test_states_of_another_head_are_refused(model_and_params):
    base = FlaxVQTransformerModel(model_and_params[0].config, _do_init=False)
    with pytest.raises(UsageError, match=r"\(model/layers/0/attention\).*\(layers/0/attention\)"):
        call_with(base, model_and_params[0].init_cache(2))
    output, _ = call_with(base, base.init_cache(2))
    assert output.past_key_values.keys() == {"layers"}


@pytest.mark.parametrize("scan", [False, True])
def test_states_of_layers_stacked_otherwise_are_refused(scan):
    first, other = (
        FlaxVQTransformerForCausalLM(
            config("mqa", num_hidden_layers=2), _do_init=False, scan_layers=scan_layers
        )
        for scan_layers in (scan, not scan)
    )
    model_layout, its = ("with", "without") if scan else ("without", "with")
    pattern = f"created {its} scan_layers, but the model was created {model_layout} scan_layers"
    with pytest.raises(UsageError, match=pattern):
        call_with(first, other.init_cache(2))


@pytest.mark.slow
def test_stacked_states_of_another_depth_are_refused():
    first, other = (
        FlaxVQTransformerForCausalLM(
            config("mqa", num_hidden_layers=depth), _do_init=False, scan_layers=True
        )
        for depth in (2, 3)
    )
    with pytest.raises(UsageError, match="1 attentions in 3 layers.* 1 attentions in 2 layers"):
        call_with(first, other.init_cache(2))


FOREIGN = {
    "a cache of keys": {"a": {"cached_key": np.zeros((2, 4, 1, 8)), "cache_index": np.zeros(())}},
    "a state without its window": {"a": {"position": np.zeros(2, np.int32)}},
    "nothing in it": {"a": {}},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_caches_of_other_families_are_refused(model_and_params, name):
    with pytest.raises(UsageError, match="is not a state of a VQ Transformer.*init_cache"):
        call_with(model_and_params[0], FOREIGN[name])


def test_quadratic_baseline_has_no_state():
    with pytest.raises(UsageError, match="attention_type=full"):
        model("mqa", attention_type="full").init_cache(2)


def test_weights_of_attention_are_refused(model_and_params):
    flax_model, params, extra = model_and_params
    with pytest.raises((UsageError, TypeError), match="output_attentions"):
        flax_model(ids(2, 4), params=params, extra=extra, output_attentions=True)


@pytest.mark.slow
def test_checkpoints_with_another_number_of_codes_are_refused(tmp_path):
    FlaxVQTransformerForCausalLM(config("mqa")).save_pretrained(tmp_path)
    with pytest.raises((WeightsError, UsageError), match=r"codebook.*5.*7|codebook.*7.*5"):
        FlaxVQTransformerForCausalLM.from_pretrained(tmp_path, num_codes=7)


def test_checkpoints_without_codebooks_are_named(tmp_path, messages):
    from safetensors.numpy import load_file, save_file

    FlaxVQTransformerForCausalLM(config("mqa", absolute_positions=False)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: leaf for name, leaf in load_file(file).items() if "codebook" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    FlaxVQTransformerForCausalLM.from_pretrained(tmp_path)
    for name in ("sums", "counts"):
        assert f"model.layers.0.attention.codebook.{name}" in messages()
