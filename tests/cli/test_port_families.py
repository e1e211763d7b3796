"""Ports that derive from a decoder family of hfseq, and the reasons for complete files."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from hfseq import plugins
from hfseq.cli.port import families, translation, verification, writer
from hfseq.cli.port.source import SourceFile
from tests.support.tiers import first

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Runs each test in an empty directory, and restores the options of the families."""
    from hfseq_plugins.decoder.options import FAMILY_OPTIONS

    options = dict(FAMILY_OPTIONS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plugins.unload()
    FAMILY_OPTIONS.clear()
    FAMILY_OPTIONS.update(options)


def complete_file(model_type: str) -> str:
    """Returns the port of a model type as a complete file."""
    return translation.Translator(SourceFile(model_type)).run().text


def head(text: str, model_type: str):
    """Loads a port and returns its class for causal language modeling."""
    Path("ported.py").write_text(text)
    return verification.load_port(Path("ported.py"), model_type).load_head("ForCausalLM")


def test_a_port_contains_only_the_classes_that_differ_from_the_native_family():
    result = translation.translate("arcee")
    assert result.family == "Llama" and result.complete_reason == ""
    bases = {
        node.name: ast.unparse(node.bases[0])
        for node in ast.parse(result.text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("Flax")
    }
    assert bases == {
        "MLP": "nnx.Module",
        "DecoderLayer": "decoder.Layer",
        "Arcee": "decoder.Decoder",
        "CausalLM": "decoder.CausalLM",
        "SequenceClassification": "decoder.SequenceClassification",
        "QuestionAnswering": "decoder.QuestionAnswering",
        "TokenClassification": "decoder.TokenClassification",
    }
    assert 'FAMILY_OPTIONS["arcee"] = FAMILY_OPTIONS["llama"]' in result.text
    assert not writer.undefined_names(result.text)
    assert "rope_parameters" not in result.unread_fields
    assert len(result.text.splitlines()) < len(complete_file("arcee").splitlines()) / 2


def test_attention_gets_the_arguments_that_the_layer_of_the_family_passes():
    text = translation.translate("helium", ["Model"]).text
    (attention,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)
        if node.name == "Attention"
    )  # fmt: skip
    (call,) = (item for item in attention.body if getattr(item, "name", "") == "__call__")
    names = [argument.arg for argument in call.args.args]
    assert names == ["self", "hidden_states", "position_embeddings", "attention_mask", "rngs",
                     "return_weights"]  # fmt: skip
    assert "FAMILY_OPTIONS" not in text  # hfseq has options for Helium itself
    assert "attention_class = Attention" in text and "mlp_class" not in text


@pytest.mark.parametrize(
    ("model_type", "reason"),
    first(
        [
            ("cwm", "Cwm, DecoderLayer differ from Llama"),
            ("vaultgemma", "DecoderLayer differs from Gemma2"),
            ("qwen3", "the arguments of Attention differ from Qwen2"),
            ("gpt2", ""),  # no modular file
            ("granitemoeshared", ""),  # the parent has experts
        ],
        ("vaultgemma", "DecoderLayer differs from Gemma2"),
        ("gpt2", ""),
    ),
)
def test_a_complete_file_has_a_reason(model_type, reason):
    result = translation.translate(model_type, ["Model"])
    assert (result.family, result.complete_reason) == ("", reason)


def test_the_parents_are_native_decoders_in_the_order_of_their_classes():
    from hfseq_plugins.decoder.options import FAMILY_OPTIONS

    assert families.native_parents(SourceFile("youtu"), FAMILY_OPTIONS) == ["llama", "qwen3"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["arcee", "bitnet"])
def test_the_differences_compute_the_same_as_the_complete_file(model_type):
    derived, complete = translation.translate(model_type).text, complete_file(model_type)
    assert "decoder.Decoder" in derived and "decoder.Decoder" not in complete
    tokens = np.arange(4, 24).reshape(2, 10)
    model = head(complete, model_type)(verification.tiny_config(model_type), seed=1)
    model.save_pretrained("files")
    expected = np.asarray(model(tokens).logits)
    plugins.unload()
    result = np.asarray(head(derived, model_type).from_pretrained("files")(tokens).logits)
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()
