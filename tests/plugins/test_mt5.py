"""mT5: the battery, and tied and untied heads of checkpoints."""

from __future__ import annotations

import pytest

from hfseq import plugins
from hfseq.nn import trees
from hfseq.testing import check_architecture, checks
from hfseq.testing import torch as testing_torch
from hfseq.testing.case import Case, Skipped
from hfseq_plugins.mt5.modeling import FlaxMT5EncoderModel, FlaxMT5ForConditionalGeneration
from tests.support.models import close, ids, mt5_config, rewrite_tensors, trees_equal
from tests.support.parity import compare_tokens
from tests.support.tiers import battery
from tests.support.torch_counterparts import torch_counterpart


@pytest.mark.parametrize(("head", "checks"), battery("mt5", "ForSeq2SeqLM"))
def test_battery(head, checks):
    config = mt5_config(num_layers=1 if checks else 2)
    check_architecture("mt5", config, heads=[head], checks=checks)


@pytest.mark.slow
def test_battery_of_other_depths_and_widths():
    config = mt5_config(num_layers=1, num_decoder_layers=2, d_kv=16, feed_forward_proj="relu")
    check_architecture("mt5", config, heads=["ForSeq2SeqLM"])


@pytest.mark.slow
def test_battery_of_the_encoder_model(tmp_path):
    spec = plugins.load().architectures.get("mt5")
    case = Case("Model", FlaxMT5EncoderModel, mt5_config(), tmp_path, spec, (), 1e-5)
    for check in (*checks.CHECKS, *testing_torch.CHECKS):
        try:
            check(case)
        except Skipped:
            allowed = ("cached_decoding", "generation", "long_rows")
            allowed += ("torch_experts", "torch_generation")
            assert check.__name__ in allowed, check.__name__


@pytest.mark.slow
def test_new_head_is_untied_and_unscaled(tmp_path):
    model = FlaxMT5ForConditionalGeneration(mt5_config(num_layers=1))
    assert ("lm_head", "kernel") in model.required_params and model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    assert trees_equal(
        FlaxMT5ForConditionalGeneration.from_pretrained(tmp_path).params, model.params
    )


@pytest.mark.slow
def test_a_file_of_pytorchs_fresh_class_is_tied(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import MT5ForConditionalGeneration

    torch.manual_seed(0)
    theirs = MT5ForConditionalGeneration(mt5_config(num_layers=1)).eval()
    theirs.save_pretrained(tmp_path)
    model = FlaxMT5ForConditionalGeneration.from_pretrained(tmp_path)
    assert ("lm_head", "kernel") not in trees.flatten(model.params)
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(2, 7, 1)}
    expected = theirs(**{name: torch.tensor(value).long() for name, value in inputs.items()})
    assert close(model(**inputs).logits, expected.logits.detach())


@pytest.mark.slow
def test_old_file_keeps_its_untied_head(tmp_path):
    model = FlaxMT5ForConditionalGeneration(mt5_config(num_layers=1))
    model.save_pretrained(tmp_path)
    # Like google/mt5-small, with two token embeddings in addition to the shared one.
    rewrite_tensors(
        tmp_path / "model.safetensors",
        lambda t: (
            t
            | {
                f"{side}.embed_tokens.weight": t["shared.weight"].copy()
                for side in ("encoder", "decoder")
            }
        ),
    )
    config = (tmp_path / "config.json").read_text()
    old = config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (tmp_path / "config.json").write_text(old)
    assert trees_equal(
        FlaxMT5ForConditionalGeneration.from_pretrained(tmp_path).params, model.params
    )


@pytest.mark.slow
def test_decoder_shift_and_generation_match_pytorch(tmp_path):
    model = FlaxMT5ForConditionalGeneration(mt5_config(initializer_factor=2.0))
    theirs = torch_counterpart(model, tmp_path)
    for beams in (1, 3):
        compare_tokens(model, theirs, ids(3, 8), max_length=9, num_beams=beams)
