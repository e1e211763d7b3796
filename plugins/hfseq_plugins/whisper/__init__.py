"""Whisper (Radford et al., 2022, https://arxiv.org/abs/2212.04356)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.whisper.modeling"
CITATION = """\
@inproceedings{radford2023robust,
  title = {Robust Speech Recognition via Large-Scale Weak Supervision},
  author = {Radford, Alec and Kim, Jong Wook and Xu, Tao and Brockman, Greg and McLeavey, Christine
            and Sutskever, Ilya},
  booktitle = {Proceedings of ICML},
  year = {2023},
  url = {https://arxiv.org/abs/2212.04356}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Whisper with the heads that Transformers 4 had in Flax."""
    register(
        "whisper",
        config="transformers:WhisperConfig",
        heads={
            "Model": f"{MODELING}:FlaxWhisperModel",
            "ForSpeechSeq2Seq": f"{MODELING}:FlaxWhisperForConditionalGeneration",
            "ForAudioClassification": f"{MODELING}:FlaxWhisperForAudioClassification",
        },
        sharding="hfseq_plugins.whisper.sharding:RULES",
        card="A Transformer encoder-decoder for speech recognition (Radford et al., 2022).",
        citation=CITATION,
    )
