"""RoFormer (Su et al., 2021, https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.roformer.modeling"
CITATION = """\
@misc{su2021roformer,
  title = {{RoFormer}: Enhanced Transformer with Rotary Position Embedding},
  author = {Su, Jianlin and Lu, Yu and Pan, Shengfeng and Murtadha, Ahmed and Wen, Bo and
            Liu, Yunfeng},
  year = {2021},
  url = {https://arxiv.org/abs/2104.09864}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers RoFormer with the task heads that Transformers 4 had in Flax."""
    register(
        "roformer",
        config="transformers:RoFormerConfig",
        heads={
            "Model": f"{MODELING}:FlaxRoFormerModel",
            "ForMaskedLM": f"{MODELING}:FlaxRoFormerForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxRoFormerForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxRoFormerForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxRoFormerForQuestionAnswering",
            "ForMultipleChoice": f"{MODELING}:FlaxRoFormerForMultipleChoice",
        },
        sharding="hfseq_plugins.roformer.sharding:RULES",
        card="A Transformer encoder with rotary embeddings (Su et al., 2021).",
        citation=CITATION,
    )
