"""The checks find faults in the encoder, in the decoder and between them."""

from __future__ import annotations

import pytest

from hfseq import plugins
from hfseq.testing import case as cases
from hfseq.testing import check_architecture
from hfseq_plugins.bart.heads import BartModule, ConditionalGeneration
from hfseq_plugins.bart.modeling import FlaxBartForConditionalGeneration
from tests.support.models import bart_config
from tests.support.tiers import first


class LeakyEncoder(BartModule):
    def encode(self, *args, **kwargs):
        encoded = super().encode(*args, **kwargs)
        x = encoded.last_hidden_state
        return encoded.replace(last_hidden_state=x + x.mean(1, keepdims=True))


class MixedPairs(BartModule):
    def decode(self, ids, states, mask, own_mask, positions, segments, own_segments, **flags):
        return super().decode(ids, states, mask, own_mask, positions, None, own_segments, **flags)


class OtherLengths(BartModule):
    def decode(self, decoder_input_ids, *args, **kwargs):
        output = super().decode(decoder_input_ids, *args, **kwargs)
        factor = 1 + 0.1 * decoder_input_ids.shape[1]
        return output.replace(last_hidden_state=output.last_hidden_state * factor)


class Louder(BartModule):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.encoder.scale = 1.01


FAULTS = {
    "padding": (LeakyEncoder, r"padded on the right[\s\S]*logits"),
    "packing": (MixedPairs, r"packed at index 0 against alone[\s\S]*logits"),
    "cached_decoding": (OtherLengths, "decoding with a cache against the full forward pass"),
    "torch_parity": (
        Louder,
        "first hidden state that differs is .* the embeddings of the enc",
    ),
}


@pytest.mark.parametrize("check", first(FAULTS, "cached_decoding", "torch_parity"))
def test_battery_detects_injected_faults(check, monkeypatch):
    if check.startswith("torch"):
        pytest.importorskip("torch")
    faulty, message = FAULTS[check]

    class Head(ConditionalGeneration):
        module = faulty

    class FlaxFaulty(FlaxBartForConditionalGeneration):
        module_class = Head

        @classmethod
        def torch_class_name(cls):
            return "BartForConditionalGeneration"

    spec = plugins.load().architectures.get("bart")
    monkeypatch.setitem(spec.heads, "ForSeq2SeqLM", FlaxFaulty)
    config = bart_config(encoder_layers=1, decoder_layers=1, init_std=0.3)
    with pytest.raises(AssertionError, match=rf"FlaxFaulty\.{check}: [\s\S]*{message}"):
        check_architecture("bart", config, heads=["ForSeq2SeqLM"], checks=[check])


@pytest.mark.slow
def test_encoder_and_decoder_are_identified_by_output_names(tmp_path):
    spec = plugins.load().architectures.get("bart")
    case = cases.Case(
        "ForSeq2SeqLM", FlaxBartForConditionalGeneration, bart_config(), tmp_path, spec, (), 1e-5
    )
    assert case.sides == (cases.SOURCE, cases.TARGET)
    assert case.side("encoder_last_hidden_state") == cases.SOURCE
    assert case.side("logits") == cases.TARGET
    ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
    ends = mask.sum(1) - 1
    assert (ids[range(8), ends] == 2).all() and (ids == 2).sum() == 8
    assert case.inputs["decoder_input_ids"].shape[1] != ids.shape[1]
