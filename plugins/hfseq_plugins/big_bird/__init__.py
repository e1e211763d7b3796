"""BigBird (Zaheer et al., 2020, https://arxiv.org/abs/2007.14062)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.big_bird.modeling"
CITATION = """\
@inproceedings{zaheer2020bigbird,
  title = {Big Bird: Transformers for Longer Sequences},
  author = {Zaheer, Manzil and Guruganesh, Guru and Dubey, Avinava and Ainslie, Joshua and
            Alberti, Chris and Ontanon, Santiago and Pham, Philip and Ravula, Anirudh and
            Wang, Qifan and Yang, Li and Ahmed, Amr},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2020},
  url = {https://arxiv.org/abs/2007.14062}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers BigBird with the task heads that Transformers 4 had in Flax."""
    register(
        "big_bird",
        config="transformers:BigBirdConfig",
        heads={
            "Model": f"{MODELING}:FlaxBigBirdModel",
            "ForPreTraining": f"{MODELING}:FlaxBigBirdForPreTraining",
            "ForMaskedLM": f"{MODELING}:FlaxBigBirdForMaskedLM",
            "ForCausalLM": f"{MODELING}:FlaxBigBirdForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxBigBirdForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxBigBirdForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxBigBirdForQuestionAnswering",
            "ForMultipleChoice": f"{MODELING}:FlaxBigBirdForMultipleChoice",
        },
        sharding="hfseq_plugins.big_bird.sharding:RULES",
        card="A Transformer encoder with block-sparse attention (Zaheer et al., 2020).",
        citation=CITATION,
    )
