"""Conversion of public Transformer-VQ checkpoints: both layouts, files, invalid trees."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.nn import trees
from hfseq_plugins.vq_transformer.modeling import FlaxVQTransformerForCausalLM
from hfseq_plugins.vq_transformer.reference import convert_reference, read_reference
from tests.plugins.vq_transformer.vq_cases import CASES


@pytest.mark.parametrize("case", CASES)
def test_converted_trees_are_those_of_the_model(golden, case):
    reference = golden.reference(case)
    model = FlaxVQTransformerForCausalLM(reference.config, _do_init=False)
    for ours, theirs in (
        (reference.params, model.params_shape_tree),
        (reference.extra, model.extra_shape_tree),
    ):
        mine, expected = trees.flatten(ours), trees.flatten(theirs)
        assert {path: leaf.shape for path, leaf in mine.items()} == {
            path: leaf.shape for path, leaf in expected.items()
        }
        assert {leaf.dtype for leaf in mine.values()} == {np.dtype(np.float32)}


def test_fused_projection_is_cut_into_keys_values_and_gate_of_all_heads(golden):
    reference = golden.reference("main/mhga")
    name = "main/mhga/params/transformer_layers_1/scanned_attn2/kvg_proj/kernel"
    parts = reference.params["model"]["layers"]["1"]["attention_2"]
    actual = [parts[f"{part}_proj"]["kernel"] for part in ("k", "v", "g")]
    assert [part.shape[1] for part in actual] == [16, 32, 32]
    assert np.array_equal(np.concatenate(actual, 1), golden[name])


def test_stacked_leaves_are_cut_by_layer(golden):
    reference = golden.reference("opt/mqa")
    name = "opt/mqa/params/stack/MultiLayerPerceptron_0/Dense_1/kernel"
    for layer in range(2):
        kernel = reference.params["model"]["layers"][str(layer)]["mlp"]["down_proj"]["kernel"]
        assert np.array_equal(kernel, golden[name][layer, 0])


def test_options_of_the_recurrent_branch_are_understood(golden):
    actual = golden.reference("main/gau_l6_m3").config
    assert (actual.head_type, actual.block_size, actual.window_size) == ("shga", 6, 3)
    assert (actual.value_dim, actual.logit_scale, actual.sinusoid_base) == (32, 0.5, 1000)
    assert actual.tie_word_embeddings and actual.norm_affine and actual.scale_head_bias
    assert not golden.reference("main/gau_noagg").config.use_compressive_cache
    still = golden.options("main/gau") | {"grad_thru_cache": False, "p_droplyr": 0.25}
    actual = convert_reference(golden.tree("main/gau/params"), still).config
    assert actual.stop_gradient_cache and actual.layer_dropout == 0.25


def test_options_of_the_stacked_branch_are_understood(golden):
    actual = golden.reference("opt/mqa").config
    assert (actual.head_type, actual.query_heads, actual.key_heads) == ("mqa", 2, 1)
    assert (actual.inner_width, actual.value_width, actual.reduction) == (80, 8, "serial")
    assert not actual.norm_affine and not actual.scale_head_bias and actual.head_bias
    changed = golden.options("opt/mqa") | {"reduction_type": "assoc_scan"}
    actual = convert_reference(golden.tree("opt/mqa/params"), changed).config
    assert actual.reduction == "associative_scan"
    assert (actual.window_size, actual.block_size) == (4, 4)


def test_msgpack_file_of_a_train_state_is_read(golden, tmp_path):
    from flax.serialization import msgpack_serialize

    state = {"step": 3, "params": golden.tree("opt/shga/params"), "opt_state": {"0": {}}}
    file = tmp_path / "checkpoint_3"
    file.write_bytes(msgpack_serialize(state))
    actual = read_reference(file, golden.options("opt/shga"))
    expected = golden.reference("opt/shga")
    flat = trees.flatten(actual.params)
    for path, leaf in trees.flatten(expected.params).items():
        assert np.array_equal(flat[path], leaf)


def test_files_that_hold_no_tree_are_named(tmp_path):
    file = tmp_path / "notes"
    file.write_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(UsageError, match="notes"):
        read_reference(file, {})
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="notes"):
        read_reference(file, {})


def test_other_trees_are_refused():
    with pytest.raises(UsageError, match="h, wte.*transformer_layers_0.*stack"):
        convert_reference({"wte": np.zeros(2), "h": np.zeros(2)}, {})


def test_missing_options_are_named(golden):
    options = golden.options("main/gau")
    del options["d_k"], options["mem_len"]
    with pytest.raises(UsageError, match="d_k, mem_len"):
        convert_reference(golden.tree("main/gau/params"), options)


def test_unknown_reductions_and_attentions_are_named(golden):
    options = golden.options("opt/shga") | {"reduction_type": "tree"}
    with pytest.raises(UsageError, match="reduction_type='tree'.*assoc_scan"):
        convert_reference(golden.tree("opt/shga/params"), options)


@pytest.mark.parametrize("case", ["main/gau", "opt/mqa"])
def test_trees_of_another_depth_are_refused(golden, case):
    deeper = golden.options(case) | {"n_layer": 3}
    with pytest.raises(UsageError, match="lacks .*_2|have 2 layers, but n_layer is 3"):
        convert_reference(golden.tree(f"{case}/params"), deeper)
    with pytest.raises(UsageError, match="unexpected leaves|have 2 layers, but n_layer is 1"):
        convert_reference(golden.tree(f"{case}/params"), golden.options(case) | {"n_layer": 1})


@pytest.mark.parametrize(
    "case, option, value",
    [
        ("main/gau", "n_code", 12),
        ("main/gau", "d_v", 16),
        ("main/gau", "n_vocab", 18),
        ("opt/mqa", "n_code", 12),
        ("opt/mqa", "n_vocab", 18),
        ("opt/shga", "d_model", 18),
    ],
)
def test_trees_of_other_sizes_are_refused_with_both_sizes(golden, case, option, value):
    with pytest.raises(UsageError, match=f"{value if option != 'd_v' else 'd_v=16'}"):
        convert_reference(golden.tree(f"{case}/params"), golden.options(case) | {option: value})
