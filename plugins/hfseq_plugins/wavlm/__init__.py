"""WavLM (Chen et al., 2022, https://arxiv.org/abs/2110.13900)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.wavlm.modeling"
CITATION = """\
@article{chen2022wavlm,
  title = {{WavLM}: Large-Scale Self-Supervised Pre-Training for Full Stack Speech Processing},
  author = {Chen, Sanyuan and Wang, Chengyi and Chen, Zhengyang and Wu, Yu and Liu, Shujie and
            others},
  journal = {IEEE Journal of Selected Topics in Signal Processing},
  year = {2022},
  url = {https://arxiv.org/abs/2110.13900}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers WavLM with task heads that Transformers has in PyTorch."""
    register(
        "wavlm",
        config="transformers:WavLMConfig",
        heads={
            "Model": f"{MODELING}:FlaxWavLMModel",
            "ForCTC": f"{MODELING}:FlaxWavLMForCTC",
            "SequenceClassification": f"{MODELING}:FlaxWavLMForSequenceClassification",
            "ForAudioFrameClassification": f"{MODELING}:FlaxWavLMForAudioFrameClassification",
        },
        sharding="hfseq_plugins.wavlm.modeling:RULES",
        card="A Transformer encoder of speech with gated relative positions (Chen et al., 2022).",
        citation=CITATION,
    )
