"""XGLM: the battery, its positions, and generation equal to PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.xglm.modeling import FlaxXGLMForCausalLM, FlaxXGLMModel, sinusoids
from tests.support.models import ids, rewrite_tensors, trees_equal, xglm_config
from tests.support.parity import compare, compare_states, compare_tokens
from tests.support.tiers import battery
from tests.support.torch_counterparts import torch_counterpart


@pytest.mark.parametrize(("head", "checks"), battery("xglm", "ForCausalLM"))
def test_battery(head, checks):
    config = xglm_config(num_layers=1 if checks else 2)
    check_architecture("xglm", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_with_cross_attention_and_untied_embeddings():
    config = xglm_config(num_layers=1, add_cross_attention=True, tie_word_embeddings=False)
    check_architecture("xglm", config, heads=["ForCausalLM"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"scale_embedding": False}, {"activation_function": "relu"}, {"pad_token_id": 5}]
)
def test_equals_pytorch(changes, tmp_path):
    pytest.importorskip("torch")
    FlaxXGLMForCausalLM(xglm_config(num_layers=1, **changes)).save_pretrained(tmp_path)
    compare(FlaxXGLMForCausalLM, tmp_path, {"input_ids": ids()})


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 33, 1024])
def test_positions_are_pytorchs_even_far_away(width):
    pytest.importorskip("torch")
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding as Theirs

    expected = Theirs.get_embedding(2050, width, 1).numpy()
    table = sinusoids(2050, width, 1)
    assert table.dtype == np.float32 and not table[1].any()
    # One bit of a frequency, at position 2049.
    assert np.abs(table - expected).max() <= 1.3e-4
    assert np.abs(table[:64] - expected[:64]).max() <= 4e-6


@pytest.mark.slow
def test_positions_are_not_parameters_and_a_copy_of_them_is_expected(tmp_path, caplog):
    model = FlaxXGLMForCausalLM(xglm_config(num_layers=1))
    assert not any("embed_positions" in path for path in model.required_params)
    model.save_pretrained(tmp_path)
    table = {"model.embed_positions.weights": sinusoids(42, 32, 1).copy()}
    rewrite_tensors(tmp_path / "model.safetensors", lambda tensors: tensors | table)
    assert trees_equal(FlaxXGLMForCausalLM.from_pretrained(tmp_path).params, model.params)
    assert not caplog.records


# -- an encoder ------------------------------------------------------------------------------------


def test_encoder_hidden_states_need_cross_attention():
    model = FlaxXGLMModel(xglm_config(num_layers=1))
    with pytest.raises(UsageError, match="add_cross_attention=True"):
        model(ids(), encoder_hidden_states=np.zeros((2, 3, 32), np.float32))


@pytest.mark.slow
def test_hidden_states_and_attentions_are_pytorchs(tmp_path):
    compare_states(FlaxXGLMModel(xglm_config(init_std=0.3)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_continues_as_pytorch_does_padding_included(beams, tmp_path):
    model = FlaxXGLMForCausalLM(xglm_config(init_std=0.3))
    prompts, mask = ids(3, 8), np.ones((3, 8), np.int32)
    prompts[1, :3], mask[1, :3] = 1, 0
    options = {"max_length": 14, "num_beams": beams, "do_sample": False}
    compare_tokens(model, torch_counterpart(model, tmp_path), prompts, mask, **options)
