"""Llama (Touvron et al., 2023, https://arxiv.org/abs/2302.13971)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.llama.modeling"
CITATION = r"""@misc{touvron2023llama,
  title = {{LLaMA}: Open and Efficient Foundation Language Models},
  author = {Touvron, Hugo and Lavril, Thibaut and Izacard, Gautier and Martinet, Xavier and
            Lachaux, Marie-Anne and Lacroix, Timoth{\'e}e and Rozi{\`e}re, Baptiste and
            Goyal, Naman and Hambro, Eric and Azhar, Faisal and Rodriguez, Aurelien and
            Joulin, Armand and Grave, Edouard and Lample, Guillaume},
  year = {2023},
  url = {https://arxiv.org/abs/2302.13971}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Llama with the task heads that Transformers has in PyTorch."""
    register(
        "llama",
        config="transformers:LlamaConfig",
        heads={
            "Model": f"{MODELING}:FlaxLlamaModel",
            "ForCausalLM": f"{MODELING}:FlaxLlamaForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxLlamaForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxLlamaForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxLlamaForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with rotary embeddings (Touvron et al., 2023).",
        citation=CITATION,
    )
