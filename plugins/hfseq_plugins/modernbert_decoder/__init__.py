"""The decoder of ModernBERT (Weller et al., 2025, https://arxiv.org/abs/2507.11412)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CLASS = "hfseq_plugins.modernbert_decoder.modeling:FlaxModernBertDecoder"
RULES = "hfseq_plugins.modernbert_decoder.modeling:RULES"
CITATION = """\
@misc{weller2025seq,
  title = {Seq vs Seq: An Open Suite of Paired Encoders and Decoders},
  author = {Weller, Orion and Ricci, Kathryn and Marone, Marc and others},
  year = {2025},
  url = {https://arxiv.org/abs/2507.11412}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ModernBERT's decoder with the task heads that PyTorch has."""
    register(
        "modernbert-decoder",
        config="transformers:ModernBertDecoderConfig",
        heads={
            "Model": f"{CLASS}Model",
            "ForCausalLM": f"{CLASS}ForCausalLM",
            "ForSequenceClassification": f"{CLASS}ForSequenceClassification",
        },
        sharding=RULES,
        card="The causal ModernBERT decoder, with sliding windows (Weller et al., 2025).",
        citation=CITATION,
    )
