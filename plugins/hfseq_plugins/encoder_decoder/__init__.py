"""Warm-started encoder-decoders (Rothe et al., 2020, https://arxiv.org/abs/1907.12461)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

CITATION = """\
@article{rothe2020leveraging,
  title = {Leveraging Pre-trained Checkpoints for Sequence Generation Tasks},
  author = {Rothe, Sascha and Narayan, Shashi and Severyn, Aliaksei},
  journal = {Transactions of the Association for Computational Linguistics},
  volume = {8},
  year = {2020},
  url = {https://arxiv.org/abs/1907.12461}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the text encoder-decoder that Transformers 4 had in Flax."""
    register(
        "encoder-decoder",
        config="transformers:EncoderDecoderConfig",
        heads={"ForSeq2SeqLM": "hfseq_plugins.encoder_decoder.modeling:FlaxEncoderDecoderModel"},
        sharding="hfseq_plugins.encoder_decoder.sharding:RULES",
        card="A text encoder and a text decoder from two checkpoints (Rothe et al., 2020).",
        citation=CITATION,
    )
