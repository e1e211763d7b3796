"""Qwen 2 (Yang et al., 2024, https://arxiv.org/abs/2407.10671): Llama with attention biases."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.qwen2.modeling"
CITATION = """\
@misc{yang2024qwen2,
  title = {{Qwen2} Technical Report},
  author = {Yang, An and Yang, Baosong and Hui, Binyuan and Zheng, Bo and Yu, Bowen and others},
  year = {2024},
  url = {https://arxiv.org/abs/2407.10671}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Qwen 2."""
    register(
        "qwen2",
        config="transformers:Qwen2Config",
        heads={
            "Model": f"{MODELING}:FlaxQwen2Model",
            "ForCausalLM": f"{MODELING}:FlaxQwen2ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxQwen2ForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxQwen2ForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxQwen2ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with attention biases (Yang et al., 2024).",
        citation=CITATION,
    )
