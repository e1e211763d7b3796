"""PEGASUS: the battery, computed or stored positions, and Transformers 4 checkpoints."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hfseq.nn import trees
from hfseq.testing import check_architecture
from hfseq_plugins.bart.positions import sinusoids
from hfseq_plugins.pegasus.modeling import FlaxPegasusForConditionalGeneration
from tests.support.models import close, ids, pegasus_config, rewrite_tensors, trees_equal
from tests.support.parity import compare
from tests.support.v4_trees import bart_tree, write_v4

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
TABLE = "model.encoder.embed_positions.weight"


@pytest.fixture(scope="module")
def model():
    return FlaxPegasusForConditionalGeneration(pegasus_config(**SHALLOW))


@pytest.mark.slow
def test_battery():
    check_architecture("pegasus", pegasus_config(decoder_ffn_dim=40), heads=["ForSeq2SeqLM"])


@pytest.mark.slow
def test_battery_without_a_head():
    check_architecture("pegasus", pegasus_config(**SHALLOW), heads=["Model"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"scale_embedding": True}, {"tie_word_embeddings": False}], ids=str
)
def test_equals_pytorch(changes, tmp_path):
    pytest.importorskip("torch")
    ours = FlaxPegasusForConditionalGeneration(pegasus_config(**SHALLOW, **changes))
    ours.save_pretrained(tmp_path)
    untied = not ours.config.tie_word_embeddings
    inputs = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 7, 1)}
    # The bias of the logits is a buffer in PyTorch, and untied models do not use the shared table.
    compare(FlaxPegasusForConditionalGeneration, tmp_path, inputs, unused=2 if untied else 1)


# -- positions -------------------------------------------------------------------------------------


def test_positions_are_sines_then_cosines():
    table = sinusoids(7, 6)
    for position, column in ((0, 0), (3, 1), (6, 2)):
        angle = position / 10000 ** (2 * column / 6)
        assert np.allclose(table[position, [column, column + 3]], [np.sin(angle), np.cos(angle)])
    assert table.dtype == np.float32


def test_positions_are_written_and_are_not_parameters(model, tmp_path):
    from safetensors.numpy import load_file

    assert not any("embed_positions" in path for path in model.required_params)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for side in ("encoder", "decoder"):
        assert np.array_equal(tensors[f"model.{side}.embed_positions.weight"], sinusoids(40, 32))
    assert trees_equal(
        FlaxPegasusForConditionalGeneration.from_pretrained(tmp_path).params, model.params
    )


@pytest.mark.slow
def test_stored_positions_are_used_and_not_trained(model, tmp_path):
    model.save_pretrained(tmp_path)
    other = np.random.default_rng(3).normal(size=(40, 32)).astype(np.float32)
    rewrite_tensors(tmp_path / "model.safetensors", lambda tensors: {**tensors, TABLE: other})
    loaded = FlaxPegasusForConditionalGeneration.from_pretrained(tmp_path)
    assert not close(loaded(ids()).logits, model(ids()).logits, 1e-3)
    loaded.save_pretrained(tmp_path / "again")
    again = FlaxPegasusForConditionalGeneration.from_pretrained(tmp_path / "again")
    positions = again.params["model"]["encoder"]["embed_positions"]["embedding"]
    assert np.array_equal(positions, other)
    gradient = jax.grad(lambda p: loaded(ids(), params=p).logits.sum())(loaded.params)
    assert not gradient["model"]["encoder"]["embed_positions"]["embedding"].any()
    torch = pytest.importorskip("torch")
    from transformers import PegasusForConditionalGeneration

    theirs = PegasusForConditionalGeneration.from_pretrained(tmp_path / "again").eval()
    inputs = torch.tensor(ids()).long()
    shifted = np.concatenate([np.zeros((2, 1), int), ids()[:, :-1]], 1)
    expected = theirs(inputs, decoder_input_ids=torch.tensor(shifted)).logits.detach().numpy()
    assert close(loaded(ids()).logits, expected)


def test_half_types_round_the_same_positions(model, tmp_path):
    import jax.numpy as jnp

    model.save_pretrained(tmp_path, params=model.to_bf16(model.params))
    loaded = FlaxPegasusForConditionalGeneration.from_pretrained(tmp_path, param_dtype=jnp.float32)
    assert not any("embed_positions" in path for path in loaded.required_params)


# -- Transformers 4 checkpoints --------------------------------------------------------------------


@pytest.mark.slow
def test_v4_msgpack_loads_as_it_is(tmp_path, caplog):
    config = pegasus_config(**SHALLOW)
    tree = bart_tree(config)
    write_v4(tmp_path, config, tree)
    loaded = FlaxPegasusForConditionalGeneration.from_pretrained(tmp_path)
    expected = trees.flatten(tree)
    assert loaded.required_params == expected.keys()
    for path, leaf in trees.flatten(loaded.params).items():
        assert np.array_equal(leaf, expected[path])
    assert "newly initialized" not in caplog.text
