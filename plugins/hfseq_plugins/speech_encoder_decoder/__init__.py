"""Speech encoder-decoders from two checkpoints (Wang et al., 2021, arXiv:2104.06678)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.speech_encoder_decoder.modeling"
CITATION = """\
@inproceedings{wang2021large,
  title = {Large-Scale Self- and Semi-Supervised Learning for Speech Translation},
  author = {Wang, Changhan and Wu, Anne and Pino, Juan and Baevski, Alexei and Auli, Michael and
            Conneau, Alexis},
  booktitle = {Proceedings of Interspeech},
  year = {2021},
  url = {https://arxiv.org/abs/2104.06678}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers the speech encoder-decoder that Transformers 4 had in Flax."""
    register(
        "speech-encoder-decoder",
        config="transformers:SpeechEncoderDecoderConfig",
        heads={"ForSpeechSeq2Seq": f"{MODELING}:FlaxSpeechEncoderDecoderModel"},
        sharding="hfseq_plugins.encoder_decoder.sharding:RULES",
        card="An audio encoder and a text decoder from two checkpoints.",
        citation=CITATION,
    )
