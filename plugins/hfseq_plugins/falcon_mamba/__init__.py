"""Falcon-Mamba (Zuo et al., 2024, https://arxiv.org/abs/2410.05355)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.falcon_mamba.modeling"
CITATION = """\
@misc{zuo2024falconmamba,
  title = {{Falcon Mamba}: The First Competitive Attention-free {7B} Language Model},
  author = {Zuo, Jingwei and Velikanov, Maksim and Rhaiem, Dhia Eddine and Chahed, Ilyas and
            Belkada, Younes and Kunsch, Guillaume and Hacid, Hakim},
  year = {2024},
  url = {https://arxiv.org/abs/2410.05355}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Falcon-Mamba."""
    register(
        "falcon_mamba",
        config="transformers:FalconMambaConfig",
        heads={
            "Model": f"{MODELING}:FlaxFalconMambaModel",
            "ForCausalLM": f"{MODELING}:FlaxFalconMambaForCausalLM",
        },
        sharding="hfseq_plugins.mamba2.modeling:RULES",
        card="A causal decoder with a recurrent state instead of attention (Zuo et al., 2024).",
        citation=CITATION,
    )
