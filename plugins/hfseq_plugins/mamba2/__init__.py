"""Mamba-2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.mamba2.modeling"
CITATION = """\
@inproceedings{dao2024transformers,
  title = {Transformers are {SSMs}: Generalized Models and Efficient Algorithms Through Structured
           State Space Duality},
  author = {Dao, Tri and Gu, Albert},
  booktitle = {Proceedings of ICML},
  year = {2024},
  url = {https://arxiv.org/abs/2405.21060}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Mamba-2."""
    register(
        "mamba2",
        config="transformers:Mamba2Config",
        heads={
            "Model": f"{MODELING}:FlaxMamba2Model",
            "ForCausalLM": f"{MODELING}:FlaxMamba2ForCausalLM",
        },
        sharding="hfseq_plugins.mamba2.modeling:RULES",
        card="A causal decoder with a recurrent state instead of attention (Dao and Gu, 2024).",
        citation=CITATION,
    )
