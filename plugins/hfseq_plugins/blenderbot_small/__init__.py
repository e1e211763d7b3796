"""Small Blenderbot (Roller et al., 2021, https://arxiv.org/abs/2004.13637)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.blenderbot_small.modeling"
CITATION = """\
@inproceedings{roller2021recipes,
  title = {Recipes for Building an Open-Domain Chatbot},
  author = {Roller, Stephen and Dinan, Emily and Goyal, Naman and Ju, Da and Williamson, Mary and
            Liu, Yinhan and Xu, Jing and Ott, Myle and Smith, Eric Michael and Boureau, Y-Lan and
            Weston, Jason},
  booktitle = {Proceedings of EACL},
  year = {2021},
  url = {https://arxiv.org/abs/2004.13637}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers small Blenderbot with the task heads that Transformers 4 had in Flax."""
    register(
        "blenderbot-small",
        config="transformers:BlenderbotSmallConfig",
        heads={
            "Model": f"{MODELING}:FlaxBlenderbotSmallModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxBlenderbotSmallForConditionalGeneration",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A post-norm Transformer encoder-decoder for conversation (Roller et al., 2021).",
        citation=CITATION,
    )
