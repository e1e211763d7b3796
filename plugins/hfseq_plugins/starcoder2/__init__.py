"""StarCoder2 (Lozhkov et al., 2024, https://arxiv.org/abs/2402.19173).

A decoder for code with layer norms, biases and a sliding window.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.starcoder2.modeling"
CITATION = """\
@misc{lozhkov2024starcoder2,
  title = {{StarCoder} 2 and The Stack v2: The Next Generation},
  author = {Lozhkov, Anton and Li, Raymond and Ben Allal, Loubna and Cassano, Federico and
            others},
  year = {2024},
  url = {https://arxiv.org/abs/2402.19173}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers StarCoder2 with the task heads that Transformers has in PyTorch."""
    register(
        "starcoder2",
        config="transformers:Starcoder2Config",
        heads={
            "Model": f"{MODELING}:FlaxStarcoder2Model",
            "ForCausalLM": f"{MODELING}:FlaxStarcoder2ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxStarcoder2ForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxStarcoder2ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder for code with a sliding window (Lozhkov et al., 2024).",
        citation=CITATION,
    )
