"""Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825): Llama with a sliding window."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.mistral.modeling"
CITATION = """\
@misc{jiang2023mistral,
  title = {Mistral {7B}},
  author = {Jiang, Albert Q. and Sablayrolles, Alexandre and Mensch, Arthur and Bamford, Chris and
            Chaplot, Devendra Singh and de las Casas, Diego and Bressand, Florian and
            Lengyel, Gianna and Lample, Guillaume and Saulnier, Lucile and others},
  year = {2023},
  url = {https://arxiv.org/abs/2310.06825}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Mistral with the task heads that Transformers has in PyTorch."""
    register(
        "mistral",
        config="transformers:MistralConfig",
        heads={
            "Model": f"{MODELING}:FlaxMistralModel",
            "ForCausalLM": f"{MODELING}:FlaxMistralForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxMistralForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxMistralForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxMistralForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with a sliding window (Jiang et al., 2023).",
        citation=CITATION,
    )
