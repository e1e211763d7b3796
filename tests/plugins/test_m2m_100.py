"""M2M100 and NLLB: the battery for every head, positions, and translation."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq.testing.case import ZERO_GRADIENTS, jit
from hfseq_plugins.m2m_100.modeling import FlaxM2M100ForConditionalGeneration, FlaxM2M100Model
from tests.support.models import close, ids, m2m_100_config
from tests.support.parity import compare_tokens
from tests.support.tiers import battery
from tests.support.torch_counterparts import tensors, torch_counterpart


@pytest.mark.parametrize(("head", "checks"), battery("m2m_100", "ForSeq2SeqLM"))
def test_battery(head, checks):
    shallow = {"encoder_layers": 1, "decoder_layers": 1} if checks else {}
    check_architecture("m2m_100", m2m_100_config(**shallow), heads=[head], checks=checks)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"scale_embedding": False}, {"tie_word_embeddings": False}])
def test_battery_of_a_switch(changes):
    # If the embeddings are not tied, PyTorch's class does not use `shared` either.
    unused = [r"shared/embedding$"] if "tie_word_embeddings" in changes else []
    check_architecture(
        "m2m_100",
        m2m_100_config(**changes),
        heads=["ForSeq2SeqLM"],
        zero_gradients=[*ZERO_GRADIENTS, *unused],
    )


def test_positions_do_not_count_padding_on_either_side():
    model = FlaxM2M100Model(m2m_100_config(encoder_layers=1))
    encode = jit(lambda *inputs: model.encode(*inputs).last_hidden_state)
    padding = np.ones((1, 3), np.int32)  # pad_token_id
    mask = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]])
    padded = np.concatenate([padding, ids(1, 5), padding], 1)
    assert close(encode(padded, mask)[:, 3:8], encode(ids(1, 5)))


@pytest.mark.slow
def test_sequences_longer_than_the_configuration_equal_pytorch(tmp_path):
    model = FlaxM2M100Model(m2m_100_config(max_position_embeddings=8))
    inputs = {"input_ids": ids(2, 30), "decoder_input_ids": ids(2, 20, 1)}
    expected = torch_counterpart(model, tmp_path)(**tensors(**inputs))[0].detach().numpy()
    assert close(model(**inputs)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_translations_that_begin_with_a_language_are_pytorchs(search, tmp_path):
    model = FlaxM2M100ForConditionalGeneration(m2m_100_config(), seed=1)
    tokens, mask = ids(3, 9), np.ones((3, 9), np.int32)
    mask[0, 5:], mask[1, :2] = 0, 0
    tokens = np.where(mask, tokens, 1)
    theirs = torch_counterpart(model, tmp_path)
    options = {"forced_bos_token_id": 7, "max_new_tokens": 8, "do_sample": False}
    sequences = compare_tokens(model, theirs, tokens, mask, **options, **search)
    assert (sequences[:, 1] == 7).all()


def test_model_without_padding_token_is_refused():
    with pytest.raises(UsageError, match="pad_token_id"):
        FlaxM2M100Model(m2m_100_config(pad_token_id=None), _do_init=False)
