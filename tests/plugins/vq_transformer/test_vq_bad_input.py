"""What cannot work is refused with both sides of the conflict."""

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
    "shga has one head, num_attention_heads=4.*mhga": {"num_attention_heads": 4},
    "mqa has one key head, num_key_value_heads=2.*gqa": {
        "head_type": "mqa",
        "num_key_value_heads": 2,
    },
    "num_attention_heads=4 does not divide by.*num_key_value_heads=3": {
        "head_type": "gqa",
        "num_attention_heads": 4,
        "num_key_value_heads": 3,
    },
    "num_attention_heads=2, num_key_value_heads=1": {
        "head_type": "mha",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "hidden_size=20 does not divide by head_dim=8": {"head_type": "mha", "hidden_size": 20},
    "32 does not divide by num_attention_heads=5": {"head_type": "mhga", "num_attention_heads": 5},
}


CLASSES = {VQTransformerConfig: UsageError, TorchConfig: ValueError}


@pytest.mark.parametrize("kind", CLASSES, ids=["flax", "torch"])
@pytest.mark.parametrize("message", WRONG)
def test_configurations_that_cannot_work(message, kind):
    sizes = {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    # The file beside a checkpoint makes no suggestions.
    told = message if kind is VQTransformerConfig else message.partition(".*did you mean")[0]
    with pytest.raises(CLASSES[kind], match=told):
        kind(**{**sizes, **WRONG[message]})


@pytest.mark.parametrize("kind", CLASSES, ids=["flax", "torch"])
def test_all_problems_are_told_at_once(kind):
    wrong = {"window_size": -2, "num_codes": 0, "hidden_size": 17, "num_attention_heads": 3}
    with pytest.raises(CLASSES[kind]) as caught:
        kind(**wrong)
    for name, value in wrong.items():
        assert f"{name}={value}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("block_size", 4.5, "int"),
        ("window_size", None, "int"),
        ("use_compressive_cache", "no", "bool"),
        ("value_dim", "wide", "int | None"),
    ],
)
def test_options_of_wrong_types_are_refused_whenever_they_are_set(name, value, wanted):
    told = rf"{name}={value!r} is of type .* be {re.escape(wanted)}"
    with pytest.raises(UsageError, match=told):
        config("mqa", **{name: value})
    made = config("mqa")
    with pytest.raises(UsageError, match=told):
        setattr(made, name, value)


def test_options_that_are_changed_later_are_checked_by_the_next_call():
    made = model("mqa")
    params, extra = variables(made)
    made.config.block_size = 0
    with pytest.raises(UsageError, match="block_size=0 has to be above 0"):
        made(ids(2, 4), params=params, extra=extra)


def test_unknown_presets_are_refused():
    with pytest.raises(UsageError, match="enwik9.*did you mean 'enwik8'"):
        VQTransformerConfig.preset("enwik9")


@pytest.mark.parametrize("name", ["enwik8", "pg19", "imagenet64", "throughput"])
def test_presets_have_the_sizes_of_the_reference(name):
    found = VQTransformerConfig.preset(name)
    width = 768 if name in ("enwik8", "throughput") else 2048
    assert (found.hidden_size, found.value_width) == (width, 2 * width)
    assert (found.num_hidden_layers, found.head_dim, found.num_codes) == (24, 128, 512)
    assert found.vocab_size == (32000 if name == "pg19" else 259)
    assert (found.window_size, found.block_size) == (512, 512)


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
    made = FlaxVQTransformerForCausalLM(VQTransformerConfig.preset(name), _do_init=False)
    count = sum(leaf.size for leaf in jax.tree.leaves(made.params_shape_tree))
    books = [
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(made.extra_shape_tree)
        if "new_" not in str(path[-1])
    ]
    assert sum(books) == 3_170_304
    # The reference keeps a bias at a tied embedding that an untied head never reads.
    unused = 0 if made.config.tie_word_embeddings else made.config.vocab_size
    assert count + sum(books) + unused == total


def call_with(chosen, state):
    """Call a model with ``state``; shapes are enough to refuse it."""
    params, extra = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        (chosen.params_shape_tree, chosen.extra_shape_tree),
    )
    return chosen(ids(2, 4), params=params, extra=extra, past_key_values=state)


@pytest.fixture(scope="module")
def made():
    chosen = model("mqa")
    return chosen, *variables(chosen)


def test_states_of_another_batch_are_refused(made):
    chosen, params, extra = made
    with pytest.raises(UsageError, match="past_key_values was made for 3 rows, the tokens have 2"):
        chosen(ids(2, 4), params=params, extra=extra, past_key_values=chosen.init_cache(3))


def test_states_of_another_model_are_refused(made):
    chosen, params, extra = made
    other = model("mqa", window_size=9, num_codes=6).init_cache(2)
    with pytest.raises(UsageError, match="window|num_codes"):
        chosen(ids(2, 4), params=params, extra=extra, past_key_values=other)


@pytest.mark.parametrize(("layers", "other"), [(2, 1), (1, 2)])
def test_states_of_another_depth_are_refused(layers, other):
    with pytest.raises(UsageError, match=f"made for {other} attentions.*the model has {layers} "):
        call_with(
            model("mqa", num_hidden_layers=layers),
            model("mqa", num_hidden_layers=other).init_cache(2),
        )


def test_states_of_another_kind_of_layer_are_refused():
    with pytest.raises(UsageError, match=r"made for 2 attentions.*attention_2.*layers/1"):
        call_with(model("mqa", num_hidden_layers=2), model("shga", value_dim=8).init_cache(2))


@pytest.mark.slow
def test_states_of_another_head_are_refused(made):
    base = FlaxVQTransformerModel(made[0].config, _do_init=False)
    with pytest.raises(UsageError, match=r"\(model/layers/0/attention\).*\(layers/0/attention\)"):
        call_with(base, made[0].init_cache(2))
    output, _ = call_with(base, base.init_cache(2))
    assert output.past_key_values.keys() == {"layers"}


@pytest.mark.parametrize("scan", [False, True])
def test_states_of_layers_stacked_otherwise_are_refused(scan):
    one, other = (
        FlaxVQTransformerForCausalLM(
            config("mqa", num_hidden_layers=2), _do_init=False, scan_layers=way
        )
        for way in (scan, not scan)
    )
    own, its = ("with", "without") if scan else ("without", "with")
    with pytest.raises(UsageError, match=f"made {its} scan_layers, the model is {own}"):
        call_with(one, other.init_cache(2))


@pytest.mark.slow
def test_stacked_states_of_another_depth_are_refused():
    one, other = (
        FlaxVQTransformerForCausalLM(
            config("mqa", num_hidden_layers=depth), _do_init=False, scan_layers=True
        )
        for depth in (2, 3)
    )
    with pytest.raises(UsageError, match="1 attentions in 3 layers.* 1 attentions in 2 layers"):
        call_with(one, other.init_cache(2))


FOREIGN = {
    "a cache of keys": {"a": {"cached_key": np.zeros((2, 4, 1, 8)), "cache_index": np.zeros(())}},
    "a state without its window": {"a": {"position": np.zeros(2, np.int32)}},
    "nothing in it": {"a": {}},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_caches_of_other_families_are_refused(made, name):
    with pytest.raises(UsageError, match="is no state of a VQ Transformer.*init_cache"):
        call_with(made[0], FOREIGN[name])


@pytest.mark.parametrize("tokens", [np.zeros(4, np.int32), np.zeros((2, 0), np.int32)])
def test_tokens_that_are_no_rows_are_refused(made, tokens):
    chosen, params, extra = made
    with pytest.raises(UsageError, match=r"input_ids are \(.*\(batch, length\) with at least one"):
        chosen(tokens, params=params, extra=extra)


def test_packed_rows_cannot_go_on_from_a_state(made):
    chosen, params, extra = made
    with pytest.raises(UsageError, match="past_key_values.*segment_ids.*reset_rows"):
        chosen(
            ids(2, 4),
            params=params,
            extra=extra,
            past_key_values=chosen.init_cache(2),
            segment_ids=np.ones((2, 4), np.int32),
        )


def test_rows_to_reset_need_a_state(made):
    chosen, params, extra = made
    with pytest.raises(UsageError, match="reset_rows needs past_key_values"):
        chosen(ids(2, 4), params=params, extra=extra, reset_rows=jnp.ones(2, bool))


@pytest.mark.parametrize("name", ["attention_mask", "segment_ids", "code_mask"])
def test_masks_of_another_shape_are_refused(made, name):
    chosen, params, extra = made
    given = {name: np.ones((2, 5), np.int32)}
    with pytest.raises(UsageError, match=rf"{name}.*\(2, 5\).*\(2, 4\)"):
        chosen(ids(2, 4), params=params, extra=extra, **given)


def test_rows_to_reset_of_another_batch_are_refused(made):
    chosen, params, extra = made
    with pytest.raises(UsageError, match=r"reset_rows.*3.*2"):
        chosen(
            ids(2, 4),
            params=params,
            extra=extra,
            past_key_values=chosen.init_cache(2),
            reset_rows=np.ones(3, bool),
        )


def test_quadratic_baseline_has_no_state():
    with pytest.raises(UsageError, match="attention_type=full"):
        model("mqa", attention_type="full").init_cache(2)


def test_weights_of_attention_are_refused(made):
    chosen, params, extra = made
    with pytest.raises((UsageError, TypeError), match="output_attentions"):
        chosen(ids(2, 4), params=params, extra=extra, output_attentions=True)


def test_tokens_outside_of_the_vocabulary_are_refused(made):
    chosen, params, extra = made
    with pytest.raises(UsageError, match="hold 19.*vocabulary of 19"):
        chosen(np.array([[19]]), params=params, extra=extra)


def test_models_without_their_codebooks_are_refused(made):
    chosen, params, _ = made
    with pytest.raises(UsageError, match="codebook"):
        chosen(ids(2, 4), params=params)


@pytest.mark.slow
def test_checkpoints_with_another_number_of_codes_are_refused(tmp_path):
    FlaxVQTransformerForCausalLM(config("mqa")).save_pretrained(tmp_path)
    with pytest.raises((WeightsError, UsageError), match=r"codebook.*5.*7|codebook.*7.*5"):
        FlaxVQTransformerForCausalLM.from_pretrained(tmp_path, num_codes=7)


def test_checkpoints_without_codebooks_are_named(tmp_path, messages):
    from safetensors.numpy import load_file, save_file

    FlaxVQTransformerForCausalLM(config("mqa", absolute_positions=False)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: leaf for name, leaf in load_file(file).items() if "codebook" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    FlaxVQTransformerForCausalLM.from_pretrained(tmp_path)
    for name in ("sums", "counts"):
        assert f"model.layers.0.attention.codebook.{name}" in messages()
