"""BigBird: the battery with full and block-sparse attention, for lengths that divide or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.nn import make_keys
from hfseq.nn.sharding import Layout, make_mesh
from hfseq.nn.trees import flatten, unflatten
from hfseq.testing import check_architecture
from hfseq_plugins.big_bird.modeling import (
    FlaxBigBirdForMaskedLM,
    FlaxBigBirdForQuestionAnswering,
    FlaxBigBirdModel,
    SelfAttention,
)
from tests.support.models import big_bird_config as config
from tests.support.models import close, fewest_layers, ids
from tests.support.tiers import battery, heads

# Rows of the battery have 16 tokens. Sparse attention requires more than seven blocks.
SPARSE = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
ODD = {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 2}
NOT_SPARSE = {
    "packing": "the first block would be seen by all documents of a row",
    "padding": "the last block is another one",
    # Blocks have two tokens. The end blocks are then so few queries that XLA of jax 0.10 computes
    # wrong results if heads are sharded without a mesh. `test_mesh_does_not_change_outputs`
    # has one.
    "devices": "split heads of few queries without a mesh are wrong in XLA",
}


@pytest.mark.parametrize(("head", "checks"), battery("big_bird", "ForMaskedLM"))
def test_battery(head, checks):
    answers = {"packing": "the question ends at the first separator of the row"}
    skip = answers if head == "ForQuestionAnswering" else None
    layers = fewest_layers("big_bird") if checks else {}
    check_architecture(
        "big_bird", config(num_labels=2, **layers), heads=[head], checks=checks, skip=skip
    )


@pytest.mark.slow
@pytest.mark.parametrize("head", [head for head in heads("big_bird") if head != "ForCausalLM"])
def test_battery_sparse_in_blocks(head):
    check_architecture("big_bird", config(num_labels=2, **SPARSE), heads=[head], skip=NOT_SPARSE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SPARSE, ODD], ids=str)
def test_mesh_does_not_change_outputs(options):
    model, tokens = FlaxBigBirdModel(config(**options)), ids(4, 16)
    right = model(tokens).last_hidden_state
    mesh, leaves = make_mesh("data=2,fsdp=2,tensor=2", jax.devices()[:8]), flatten(model.params)
    layout = Layout(mesh, plugins.load().architectures.get("big_bird").load_sharding(), 64)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    split = layout.shardings(shapes)
    params = unflatten({path: jax.device_put(leaves[path], split[path]) for path in leaves})
    model.use_mesh(mesh, layout.axes(shapes))
    output = jax.jit(lambda params: model(tokens, params=params).last_hidden_state)(params)
    assert close(output, right, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rescale_embeddings": True, "use_bias": False, "hidden_act": "relu"},
        {"tie_word_embeddings": False},
        SPARSE | {"use_bias": False},
        ODD,
    ],
    ids=str,
)
def test_battery_of_an_option(changes):
    skip = NOT_SPARSE if "attention_type" in changes else None
    check_architecture("big_bird", config(**changes), heads=["ForMaskedLM"], skip=skip)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SPARSE, SPARSE | {"block_size": 3}, ODD], ids=str)
@pytest.mark.parametrize("length", [14, 15, 16, 21, 22, 23, 30, 37])
def test_rows_of_any_length_are_pytorchs(options, length, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import BigBirdModel

    model = FlaxBigBirdModel(config(**options), seed=1)
    model.save_pretrained(tmp_path)
    theirs = BigBirdModel.from_pretrained(tmp_path).eval()
    tokens, mask = np.maximum(ids(3, length) % 60, 2), np.ones((3, length), np.int64)
    mask[1, length - 3 :] = 0
    mask[2, length // 2 :] = 0
    output = model(tokens, mask)
    with torch.no_grad():
        right = theirs(torch.from_numpy(tokens).long(), torch.from_numpy(mask))
    for name in ("last_hidden_state", "pooler_output"):
        theirs_, ours = right[name].numpy(), np.asarray(output[name])
        real = mask[..., None] if theirs_.ndim == 3 else 1
        assert np.abs((ours - theirs_) * real).max() < 2e-5, name


def test_rows_attend_to_global_and_neighboring_blocks():
    model = FlaxBigBirdModel(config(num_hidden_layers=1, **SPARSE), seed=1)
    tokens = np.maximum(ids(1, 24) % 60, 2)
    changed = tokens.copy()
    changed[0, 11] = 61  # in block 5: blocks 4, 5 and 6 see it, and the first and the last
    run = jax.jit(lambda ids: model(ids).last_hidden_state[0])
    original, perturbed = (np.asarray(run(t)) for t in (tokens, changed))
    moved = (np.abs(original - perturbed).max(-1) > 1e-7).reshape(12, 2).any(1)
    assert np.flatnonzero(moved).tolist() == [0, 4, 5, 6, 11]


def test_training_draws_blocks_that_are_not_seen_anyway():
    model_config = config(num_hidden_layers=1, **SPARSE | {"num_random_blocks": 2, "block_size": 1})
    layer = SelfAttention(model_config, nnx.Rngs(0))
    random_blocks = np.asarray(layer._draw_random_blocks(12, make_keys(jax.random.PRNGKey(1))))
    assert random_blocks.shape == (4, 10, 2)
    for head in random_blocks:
        for row, blocks in enumerate(head, 1):
            assert len(set(blocks)) == 2 and not set(blocks) & {0, row - 1, row, row + 1, 11}
    assert len({head.tobytes() for head in random_blocks}) == 4
    assert layer._draw_random_blocks(12, None) is None


@pytest.mark.slow
def test_steps_with_drawn_blocks_are_a_function_of_the_key_and_have_gradients():
    model = FlaxBigBirdForMaskedLM(config(**SPARSE), seed=1)

    def loss(params, key):
        return model(ids(2, 30), params=params, dropout_rng=key, train=True).logits.std()

    first_key, second_key = jax.random.split(jax.random.PRNGKey(0))
    assert (
        loss(model.params, first_key)
        == loss(model.params, first_key)
        != loss(model.params, second_key)
    )
    gradients = jax.tree.leaves(jax.grad(loss)(model.params, first_key))
    assert all(np.isfinite(leaf).all() for leaf in gradients)


def test_answers_do_not_lie_in_the_question():
    model = FlaxBigBirdForQuestionAnswering(config(), seed=1)
    tokens = np.maximum(ids(2, 12) % 60, 2)
    tokens[:, 4] = 66  # the separator
    output = jax.jit(model)(tokens)
    assert (output.start_logits[:, 1:5] < -1e5).all() and (output.end_logits[:, 5:] > -1e5).all()
    assert (output.start_logits[:, 0] > -1e5).all()
    longer = model(tokens, question_lengths=np.array([[7], [7]]))
    assert (longer.start_logits[:, 1:7] < -1e5).all()


def test_short_rows_attend_in_full():
    full, sparse = (
        jax.jit(FlaxBigBirdModel(config(num_hidden_layers=1, **changes), seed=1).__call__)
        for changes in ({}, SPARSE)
    )
    short, long = np.maximum(ids(1, 14) % 60, 2), np.maximum(ids(1, 30) % 60, 2)
    assert close(sparse(short).last_hidden_state, full(short).last_hidden_state)
    assert not close(sparse(long).last_hidden_state, full(long).last_hidden_state)


@pytest.mark.slow
def test_memory_is_linear_in_length():
    model_config = config(
        attention_type="block_sparse", block_size=16, max_position_embeddings=4096
    )
    model = FlaxBigBirdModel(model_config, _do_init=False)
    params = jax.eval_shape(model.init_weights, jax.random.PRNGKey(0), (1, 8))

    def temporary(length):
        def loss(params, tokens):
            return model(tokens, params=params).last_hidden_state.sum()

        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.2 * temporary(2048)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"segment_ids": np.ones((1, 30), int)}, "packed rows.*original_full"),
        ({"head_mask": np.ones((2, 4))}, "head_mask"),
    ],
)
def test_unsupported_sparse_attention_inputs_are_rejected(inputs, message):
    with pytest.raises(UsageError, match=message):
        FlaxBigBirdModel(config(**SPARSE))(ids(1, 30) % 60, **inputs)


def test_unsupported_attention_type_is_rejected():
    with pytest.raises(UsageError, match="attention_type='sparse'.*original_full"):
        FlaxBigBirdModel(config(attention_type="sparse"))
