"""MegatronBERT (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.megatron_bert.modeling"
CITATION = """\
@article{shoeybi2019megatron,
  title = {{Megatron-LM}: Training Multi-Billion Parameter Language Models Using Model Parallelism},
  author = {Shoeybi, Mohammad and Patwary, Mostofa and Puri, Raul and LeGresley, Patrick and
            Casper, Jared and Catanzaro, Bryan},
  journal = {arXiv:1909.08053},
  year = {2019},
  url = {https://arxiv.org/abs/1909.08053}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers MegatronBERT, which had no Flax classes in Transformers 4."""
    register(
        "megatron-bert",
        config="transformers:MegatronBertConfig",
        heads={
            "Model": f"{MODELING}:FlaxMegatronBertModel",
            "ForMaskedLM": f"{MODELING}:FlaxMegatronBertForMaskedLM",
            "ForSequenceClassification": f"{MODELING}:FlaxMegatronBertForSequenceClassification",
        },
        sharding="hfseq_plugins.bert.sharding:RULES",
        card="BERT with pre-norm layers (Shoeybi et al., 2019).",
        citation=CITATION,
    )
