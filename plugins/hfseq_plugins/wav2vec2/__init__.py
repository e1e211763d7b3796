"""wav2vec 2.0 (Baevski et al., 2020, https://arxiv.org/abs/2006.11477)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.wav2vec2.modeling"
CITATION = """\
@inproceedings{baevski2020wav2vec,
  title = {wav2vec 2.0: A Framework for Self-Supervised Learning of Speech Representations},
  author = {Baevski, Alexei and Zhou, Yuhao and Mohamed, Abdelrahman and Auli, Michael},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2020},
  url = {https://arxiv.org/abs/2006.11477}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers wav2vec 2.0 with the task heads that Transformers 4 had in Flax."""
    register(
        "wav2vec2",
        config="transformers:Wav2Vec2Config",
        heads={
            "Model": f"{MODELING}:FlaxWav2Vec2Model",
            "ForCTC": f"{MODELING}:FlaxWav2Vec2ForCTC",
            "ForPreTraining": f"{MODELING}:FlaxWav2Vec2ForPreTraining",
        },
        sharding="hfseq_plugins.wav2vec2.sharding:RULES",
        card="An audio encoder pretrained on speech without text (Baevski et al., 2020).",
        citation=CITATION,
    )
