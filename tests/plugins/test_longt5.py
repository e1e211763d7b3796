"""LongT5: both attention types, at lengths that are multiples of the block size and others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS
from hfseq_plugins.longt5.modeling import FlaxLongT5ForConditionalGeneration, FlaxLongT5Model
from tests.support.models import fewest_layers, ids
from tests.support.models import longt5_config as config
from tests.support.tiers import battery

GLOBAL = {"encoder_attention_type": "transient-global", "global_block_size": 4}
NOT_PACKED = {"packing": "the summaries would join the documents of a row"}


@pytest.mark.parametrize(("head", "checks"), battery("longt5", "ForSeq2SeqLM"))
def test_battery(head, checks):
    layers = fewest_layers("longt5") if checks else {}
    check_architecture("longt5", config(**layers), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        GLOBAL,
        GLOBAL | {"global_block_size": 5, "local_radius": 4},
        GLOBAL | {"global_block_size": 40},  # longer than the rows, so without summaries
        {"local_radius": 2},
        {"local_radius": 20},
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"num_decoder_layers": 1, "dropout_rate": 0.0},
    ],
    ids=str,
)
def test_battery_of_an_option(changes):
    skip = NOT_PACKED if "global_block_size" in changes else None
    without = [*ZERO_GRADIENTS]
    if changes.get("global_block_size") == 40:
        skip, without = None, [*without, "global_input_layer_norm", "global_relative_attention"]
    check_architecture(
        "longt5", config(**changes), heads=["ForSeq2SeqLM"], skip=skip, zero_gradients=without
    )


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, GLOBAL], ids=["local", "global"])
@pytest.mark.parametrize("length", [3, 4, 8, 11, 16, 17, 23])
def test_encoders_of_any_length_are_pytorchs(variant, length, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import LongT5Model

    model = FlaxLongT5Model(config(**variant), seed=1)
    model.save_pretrained(tmp_path)
    theirs = LongT5Model.from_pretrained(tmp_path).eval()
    tokens, mask = np.maximum(ids(3, length), 2), np.ones((3, length), np.int64)
    mask[1, length // 2 + 1 :] = 0
    mask[2, 1:] = 0
    actual = model.encode(tokens, mask).last_hidden_state
    with torch.no_grad():
        right = theirs.encoder(
            input_ids=torch.from_numpy(tokens).long(), attention_mask=torch.from_numpy(mask)
        ).last_hidden_state.numpy()
    assert np.abs(np.where(mask[..., None], actual - right, 0)).max() < 2e-5


@pytest.mark.parametrize("variant", [{}, GLOBAL], ids=["local", "global"])
def test_a_token_sees_its_radius_and_summaries_beyond_it(variant):
    model = FlaxLongT5Model(config(num_layers=1, **variant), seed=1)
    tokens = np.maximum(ids(1, 24), 2)
    changed = tokens.copy()
    changed[0, 20] = 63 - changed[0, 20]
    encode = jax.jit(lambda ids: model.encode(ids).last_hidden_state[0])
    initial, updated = (np.asarray(encode(t)) for t in (tokens, changed))
    far = np.abs(initial - updated).max(-1)
    assert (far[17:24] > 1e-6).all() and (far[:17] > 0).any() == bool(variant)


def test_packed_rows_are_rejected_with_global_summaries():
    model = FlaxLongT5Model(config(**GLOBAL))
    with pytest.raises(UsageError, match="transient-global attention does not support packed rows"):
        model.encode(ids(1, 12), segment_ids=np.ones((1, 12), int))


def test_unsupported_attention_type_is_rejected():
    with pytest.raises(UsageError, match="encoder_attention_type='global' .*transient-global"):
        FlaxLongT5Model(config(encoder_attention_type="global"), _do_init=False)


@pytest.mark.slow
def test_local_attention_memory_is_linear_in_length():
    model = FlaxLongT5ForConditionalGeneration(config(local_radius=15), _do_init=False)
    params = jax.eval_shape(model.init_weights, jax.random.PRNGKey(0), (1, 8))

    def temporary(length):
        def loss(params, tokens):
            return model.encode(tokens, params=params).last_hidden_state.sum()

        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2.2 * temporary(2048)
