"""A pre-norm BERT for FP8 training, modeled on TransformerEngine's encoder example.

Checkpoints have the format of MegatronBERT if MegatronBERT can compute the same function.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.fp8_encoder.modeling"
CITATION = """\
@article{micikevicius2022fp8,
  title = {{FP8} Formats for Deep Learning},
  author = {Micikevicius, Paulius and Stosic, Dusan and Burgess, Neil and Cornea, Marius and
            Dubey, Pradeep and Grisenthwaite, Richard and Ha, Sangwon and Heinecke, Alexander and
            Judd, Patrick and Kamalu, John and others},
  journal = {arXiv:2209.05433},
  year = {2022},
  url = {https://arxiv.org/abs/2209.05433}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the three model classes of the FP8 encoder."""
    register(
        "fp8_encoder",
        config="hfseq_plugins.fp8_encoder.configuration:Fp8EncoderConfig",
        heads={
            "Model": f"{MODELING}:FlaxFp8EncoderModel",
            "ForMaskedLM": f"{MODELING}:FlaxFp8EncoderForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxFp8EncoderForSequenceClassification",
        },
        sharding="hfseq_plugins.fp8_encoder.sharding:RULES",
        card="An encoder for training in FP8 (formats of Micikevicius et al., 2022).",
        citation=CITATION,
    )
