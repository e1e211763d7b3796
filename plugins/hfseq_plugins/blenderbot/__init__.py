"""Blenderbot (Roller et al., 2021, https://arxiv.org/abs/2004.13637)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.blenderbot.modeling"
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
    """Registers Blenderbot with the Flax task heads of Transformers 4, sharded like BART."""
    register(
        "blenderbot",
        config="transformers:BlenderbotConfig",
        heads={
            "Model": f"{MODELING}:FlaxBlenderbotModel",
            "ForSeq2SeqLM": f"{MODELING}:FlaxBlenderbotForConditionalGeneration",
        },
        sharding="hfseq_plugins.bart.sharding:RULES",
        card="A pre-norm Transformer encoder-decoder for conversation (Roller et al., 2021).",
        citation=CITATION,
    )
