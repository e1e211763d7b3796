"""Marian: the battery, separate vocabularies, and published configurations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hfseq.errors import UsageError
from hfseq.testing import check_architecture
from hfseq_plugins.bart.positions import sinusoids
from hfseq_plugins.marian.modeling import FlaxMarianModel, FlaxMarianMTModel
from tests.support.models import close, ids, marian_config, rewrite_tensors, trees_equal
from tests.support.parity import compare

SHALLOW = {"encoder_layers": 1, "decoder_layers": 1}
APART = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 80}
INPUTS = {"input_ids": ids(2, 9), "decoder_input_ids": ids(2, 7, 1)}


@pytest.mark.slow
def test_battery():
    check_architecture("marian", marian_config(), heads=["ForSeq2SeqLM"])


@pytest.mark.slow
def test_battery_without_a_head():
    check_architecture("marian", marian_config(**SHALLOW), heads=["Model"])


VARIANTS = {
    "scaled": {"scale_embedding": True, "activation_function": "swish"},
    "untied": {"tie_word_embeddings": False},
    "apart": APART,
    "apart and untied": {**APART, "tie_word_embeddings": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_pytorch(name, tmp_path):
    pytest.importorskip("torch")
    model = FlaxMarianMTModel(marian_config(**SHALLOW, **VARIANTS[name]))
    model.save_pretrained(tmp_path)
    compare(FlaxMarianMTModel, tmp_path, INPUTS, unused=2 if name == "untied" else 1)


def test_tables_of_sides_that_are_apart():
    blank = FlaxMarianMTModel(marian_config(**SHALLOW, **APART), _do_init=False)
    tables = {path for path in blank.required_params if path[-1] == "embedding"}
    assert tables == {
        ("model", side, "embed_tokens", "embedding") for side in ("encoder", "decoder")
    }
    assert blank.params_shape_tree["final_logits_bias"].shape == (1, 80)
    with pytest.raises(UsageError, match="input_ids .*70.* of .* vocabulary of 64"):
        blank(np.full((1, 3), 70), decoder_input_ids=ids(1, 3), params={})
    with pytest.raises(UsageError, match="decoder_input_ids .*80.* of .* of 80"):
        blank(ids(1, 3), decoder_input_ids=np.full((1, 3), 80), params={})


def test_positions_are_not_written_and_a_copy_of_them_is_expected(tmp_path, caplog):
    from safetensors.numpy import load_file

    model = FlaxMarianMTModel(marian_config(**SHALLOW))
    model.save_pretrained(tmp_path)
    assert not any("positions" in name for name in load_file(tmp_path / "model.safetensors"))
    table = {"model.encoder.embed_positions.weight": sinusoids(40, 32)}
    rewrite_tensors(tmp_path / "model.safetensors", lambda tensors: tensors | table)
    assert trees_equal(FlaxMarianMTModel.from_pretrained(tmp_path).params, model.params)
    assert "were not used" not in caplog.text


def test_without_a_head_positions_are_written_as_pytorch_keeps_them(tmp_path, caplog):
    from safetensors.numpy import load_file

    model = FlaxMarianModel(marian_config(**SHALLOW))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for side in ("encoder", "decoder"):
        np.testing.assert_array_equal(stored[f"{side}.embed_positions.weight"], sinusoids(40, 32))
    assert trees_equal(FlaxMarianModel.from_pretrained(tmp_path).params, model.params)
    assert "were not used" not in caplog.text


# -- published models ------------------------------------------------------------------------------

# Options other than sizes in config.json of Helsinki-NLP/opus-mt-*.
OPUS = {
    "model_type": "marian", "architectures": ["MarianMTModel"], "activation_function": "swish",
    "bad_words_ids": [[63]], "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 63,
    "decoder_start_token_id": 63, "num_beams": 4, "max_length": 512, "scale_embedding": True,
    "static_position_embeddings": True, "max_position_embeddings": 512, "init_std": 0.3,
    "add_final_layer_norm": False, "normalize_before": False, "vocab_size": 64, "d_model": 32,
    **{f"{side}_{name}": value for side in ("encoder", "decoder")
       for name, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()},
}  # fmt: skip


def write_opus(folder, described):
    """Writes a model as on the Hub, with generation options in config.json."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    MarianMTModel(MarianConfig.from_dict(dict(described))).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(described))


def assert_same_translations(folder, rows):
    import torch
    from transformers import MarianMTModel

    theirs = MarianMTModel.from_pretrained(folder).eval()
    ours = FlaxMarianMTModel.from_pretrained(folder)
    assert ours.generation_config.num_beams == 4
    for options in ({}, {"num_beams": 1}):
        sequences = ours.generate(rows, max_length=8, **options).sequences
        expected = theirs.generate(torch.tensor(rows).long(), max_length=8, **options)
        assert np.asarray(sequences).tolist() == expected.tolist(), options


def test_translates_as_pytorch_does(tmp_path):
    pytest.importorskip("torch")
    write_opus(tmp_path, OPUS)
    assert_same_translations(tmp_path, ids(3, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opus-mt-en-mg", "opus-mt-tc-big-fr-en"])
def test_published_configuration_translates_as_pytorch_does(name, tmp_path, shared):
    pytest.importorskip("torch")
    described = json.loads((shared / "tokenizers" / name / "config.json").read_text())
    small = {name: OPUS[name] for name in ("d_model", "init_std")}
    small |= {name: value for name, value in OPUS.items() if name[:7] in ("encoder", "decoder")}
    del small["decoder_start_token_id"]
    write_opus(tmp_path, described | small)
    assert_same_translations(tmp_path, ids(2, 7))


@pytest.mark.slow
def test_logits_of_a_decoder_that_reads_the_source_shifted():
    model = FlaxMarianMTModel(marian_config(**SHALLOW))
    tokens = ids()
    shifted = np.concatenate([np.full((2, 1), 3), tokens[:, :-1]], 1)
    assert close(model(tokens).logits, model(tokens, decoder_input_ids=shifted).logits, 0)
