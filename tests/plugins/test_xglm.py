"""XGLM: the battery, its positions, and generation equal to PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from hfseq import plugins
from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.xglm.modeling import FlaxXGLMForCausalLM, FlaxXGLMModel, sinusoids
from tests.support.models import close, ids, rewrite_tensors, trees_equal, xglm_config
from tests.support.parity import compare
from tests.support.tiers import CHECKS, first

HEADS = ("Model", "ForCausalLM")


@pytest.mark.parametrize(
    ("head", "checks"),
    first([("ForCausalLM", CHECKS), *((head, None) for head in HEADS)], ("ForCausalLM", CHECKS)),
)
def test_battery(head, checks):
    config = xglm_config(num_layers=1 if checks else 2)
    check_architecture("xglm", config, heads=[head], checks=checks)


def test_battery_covers_every_registered_head():
    assert set(HEADS) == set(plugins.load().architectures["xglm"].target.heads)


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
def test_places_are_pytorchs_even_far_away(width):
    pytest.importorskip("torch")
    from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding as Theirs

    expected = Theirs.get_embedding(2050, width, 1).numpy()
    table = sinusoids(2050, width, 1)
    assert table.dtype == np.float32 and not table[1].any()
    # One bit of a frequency, at position 2049.
    assert np.abs(table - expected).max() <= 1.3e-4
    assert np.abs(table[:64] - expected[:64]).max() <= 4e-6


@pytest.mark.slow
def test_places_are_no_parameters_and_a_copy_of_them_is_no_surprise(tmp_path, caplog):
    model = FlaxXGLMForCausalLM(xglm_config(num_layers=1))
    assert not any("embed_positions" in path for path in model.required_params)
    model.save_pretrained(tmp_path)
    table = {"model.embed_positions.weights": sinusoids(42, 32, 1).copy()}
    rewrite_tensors(tmp_path / "model.safetensors", lambda tensors: tensors | table)
    assert trees_equal(FlaxXGLMForCausalLM.from_pretrained(tmp_path).params, model.params)
    assert not caplog.records


@pytest.mark.slow
def test_rows_longer_than_the_table_are_refused():
    model = FlaxXGLMForCausalLM(xglm_config(), _do_init=False)
    with pytest.raises(UsageError, match="41 tokens.*40"):
        model(ids(1, 41), params={})


# -- an encoder ------------------------------------------------------------------------------------


def test_encoder_hidden_states_need_cross_attention():
    model = FlaxXGLMModel(xglm_config(num_layers=1))
    with pytest.raises(UsageError, match="add_cross_attention=True"):
        model(ids(), encoder_hidden_states=np.zeros((2, 3, 32), np.float32))


@pytest.mark.slow
def test_hidden_states_and_attentions_are_pytorchs(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import XGLMModel

    model = FlaxXGLMModel(xglm_config(init_std=0.3))
    model.save_pretrained(tmp_path)
    theirs = XGLMModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    flags = {"output_hidden_states": True, "output_attentions": True}
    ours = model(ids(), **flags)
    expected = theirs(torch.tensor(ids()).long(), **flags)
    for name, count in (("hidden_states", 3), ("attentions", 2)):
        assert len(ours[name]) == len(expected[name]) == count
        pairs = zip(ours[name], expected[name], strict=True)
        assert all(close(a, b.detach()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_continues_as_pytorch_does_padding_included(beams, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import XGLMForCausalLM

    model = FlaxXGLMForCausalLM(xglm_config(init_std=0.3))
    model.save_pretrained(tmp_path)
    theirs = XGLMForCausalLM.from_pretrained(tmp_path).eval()
    prompts, mask = ids(3, 8), np.ones((3, 8), np.int32)
    prompts[1, :3], mask[1, :3] = 1, 0
    options = {"max_length": 14, "num_beams": beams, "do_sample": False}
    sequences = np.asarray(model.generate(prompts, attention_mask=mask, **options).sequences)
    expected = theirs.generate(
        torch.tensor(prompts).long(), attention_mask=torch.tensor(mask), **options
    )
    assert sequences[:, : expected.shape[1]].tolist() == expected.tolist()
