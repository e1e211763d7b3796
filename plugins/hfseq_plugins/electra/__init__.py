"""ELECTRA (Clark et al., 2020, https://arxiv.org/abs/2003.10555)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.electra.modeling"
CITATION = """\
@inproceedings{clark2020electra,
  title = {{ELECTRA}: Pre-training Text Encoders as Discriminators Rather Than Generators},
  author = {Clark, Kevin and Luong, Minh-Thang and Le, Quoc V. and Manning, Christopher D.},
  booktitle = {International Conference on Learning Representations},
  year = {2020},
  url = {https://arxiv.org/abs/2003.10555}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ELECTRA with the task heads that Transformers 4 had in Flax."""
    register(
        "electra",
        config="transformers:ElectraConfig",
        heads={
            "Model": f"{MODELING}:FlaxElectraModel",
            "ForPreTraining": f"{MODELING}:FlaxElectraForPreTraining",
            "ForMaskedLM": f"{MODELING}:FlaxElectraForMaskedLM",
            "ForCausalLM": f"{MODELING}:FlaxElectraForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxElectraForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxElectraForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxElectraForQuestionAnswering",
            "ForMultipleChoice": f"{MODELING}:FlaxElectraForMultipleChoice",
        },
        sharding="hfseq_plugins.electra.sharding:RULES",
        card="A Transformer encoder that detects replaced tokens (Clark et al., 2020).",
        citation=CITATION,
    )
