"""A pre-norm BERT for FP8 training, stored as MegatronBERT; TransformerEngine's encoder example."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.fp8_encoder.modeling"


@hookimpl
def register_architectures(register):
    """Add the encoder, which is stored as MegatronBERT where it equals it."""
    register(
        "fp8_encoder",
        config="hfseq_plugins.fp8_encoder.configuration:Fp8EncoderConfig",
        heads={
            "Model": f"{MODELING}:FlaxFp8EncoderModel",
            "ForMaskedLM": f"{MODELING}:FlaxFp8EncoderForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxFp8EncoderForSequenceClassification",
        },
        sharding="hfseq_plugins.fp8_encoder.sharding:RULES",
    )
