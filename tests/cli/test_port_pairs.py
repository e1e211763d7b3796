"""Ports of encoder-decoders whose encoder and decoder share one token embedding."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hfseq import plugins
from hfseq.cli.port import lift_pairs, verification, writer
from hfseq.cli.port.source import SourceFile
from hfseq.cli.port.translation import translate

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Runs each test in an empty directory, without the plugins of other tests."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    plugins.unload()


def methods(text: str, name: str) -> dict[str, str]:
    """Returns the source text of the methods of a class."""
    (node,) = (
        item
        for item in ast.parse(text).body
        if isinstance(item, ast.ClassDef) and item.name == name
    )
    return {m.name: ast.unparse(m) for m in node.body if isinstance(m, ast.FunctionDef)}


def test_an_encoder_decoder_can_encode_decode_and_generate():
    result = translate("bart")
    assert not result.markers and not writer.undefined_names(result.text)
    assert list(result.heads) == ["Model", "ForSeq2SeqLM"]
    assert "encoder-decoder that generates" in result.left_out["ForQuestionAnswering"]
    assert {"encode", "decode", "__call__"} <= methods(result.text, "Bart").keys()
    assert {"encode", "decode", "logits"} <= methods(result.text, "ConditionalGeneration").keys()
    attention = methods(result.text, "Attention")["__call__"]
    assert "nn.encoder_cache(self" in attention and "nn.extend_cache(self" in attention
    layer = methods(result.text, "DecoderLayer")
    assert "self.encoder_attn.cross = True" in layer["__init__"]
    assert "return (hidden_states, (weights, cross_weights))" in layer["__call__"]
    assert "class FlaxBartForConditionalGeneration(Seq2SeqGeneration" in result.text
    # Encoder and decoder use the embedding of the base model.
    assert "embed_tokens" not in methods(result.text, "Encoder")["__init__"]
    assert "requires tie_word_embeddings=True" in result.text


def test_the_default_decoder_tokens_of_bart_are_known():
    assert "def default_decoder_input_ids" in translate("bart").text


@pytest.mark.slow
def test_the_default_decoder_tokens_of_mbart_are_computed_in_another_way():
    result = translate("mbart")
    assert not result.markers and "default_decoder_input_ids" not in result.text


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("bart", True), ("pegasus", True), ("marian", False), ("t5", False), ("llama", False)],
)
def test_only_models_with_one_shared_embedding_are_pairs(model_type, expected):
    assert lift_pairs.is_pair(SourceFile(model_type)) is expected


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bart", "pegasus"])
def test_ports_of_encoder_decoders_agree_with_pytorch(model_type):
    Path("ported.py").write_text(translate(model_type).text)
    config = verification.tiny_config(model_type)
    checks = ["shapes", "torch_parity", "torch_loads_it", "cached_decoding"]
    results = list(verification.verify(Path("ported.py"), model_type, config, None, checks))
    assert [result.head for result in results] == ["Model", "ForSeq2SeqLM"]
    for result in results:
        assert result.passes, str(result)
