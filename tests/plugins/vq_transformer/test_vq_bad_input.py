"""What cannot work is refused with both sides of the conflict."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError, WeightsError
from hfseq_plugins.vq_transformer.configuration import VQTransformerConfig
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
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
    "reduction='assoc'.*associative_scan": {"reduction": "assoc"},
    "head_type='shgaa'.*did you mean 'shga'": {"head_type": "shgaa"},
    "attention_type='linear'.*vq_quadratic": {"attention_type": "linear"},
    "shga has one head, num_attention_heads=4.*mhga": {"num_attention_heads": 4},
    "mqa has one key head, num_key_value_heads=2.*gqa": {
        "head_type": "mqa", "num_key_value_heads": 2,
    },
    "num_attention_heads=4 does not divide by.*num_key_value_heads=3": {
        "head_type": "gqa", "num_attention_heads": 4, "num_key_value_heads": 3,
    },
    "num_attention_heads=2, num_key_value_heads=1": {
        "head_type": "mha", "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "hidden_size=20 does not divide by head_dim=8": {"head_type": "mha", "hidden_size": 20},
    "32 does not divide by num_attention_heads=5": {"head_type": "mhga", "num_attention_heads": 5},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_configurations_that_cannot_work(message):
    sizes = {"hidden_size": 16, "head_dim": 8, "num_hidden_layers": 1}
    with pytest.raises(UsageError, match=message):
        VQTransformerConfig(**{**sizes, **WRONG[message]})


def test_all_problems_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        VQTransformerConfig(window_size=-2, num_codes=0, hidden_size=17)
    for part in ("window_size=-2", "num_codes=0", "hidden_size=17"):
        assert part in str(caught.value)


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


@pytest.mark.parametrize(
    "name, total",
    [
        ("enwik8", 187_679_750),
        pytest.param("pg19", 1_314_659_584, marks=pytest.mark.slow),
        pytest.param("imagenet64", 1_249_622_276, marks=pytest.mark.slow),
    ],  # fmt: skip
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


def test_packed_rows_cannot_go_on_from_a_state(made):
    chosen, params, extra = made
    with pytest.raises(UsageError, match="past_key_values.*segment_ids.*reset_rows"):
        chosen(
            ids(2, 4), params=params, extra=extra, past_key_values=chosen.init_cache(2),
            segment_ids=np.ones((2, 4), np.int32),
        )  # fmt: skip


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
            ids(2, 4), params=params, extra=extra, past_key_values=chosen.init_cache(2),
            reset_rows=np.ones(3, bool),
        )  # fmt: skip


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
