"""SmolLM3 (Bakouch et al., 2025, https://huggingface.co/blog/smollm3).

It is Llama without rotary embeddings in some of the layers.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.smollm3.modeling"
CITATION = """\
@misc{bakouch2025smollm3,
  title = {{SmolLM3}: smol, multilingual, long-context reasoner},
  author = {Bakouch, Elie and Ben Allal, Loubna and Lozhkov, Anton and Tazi, Nouamane and others},
  year = {2025},
  url = {https://huggingface.co/blog/smollm3}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers SmolLM3."""
    register(
        "smollm3",
        config="transformers:SmolLM3Config",
        heads={
            "Model": f"{MODELING}:FlaxSmolLM3Model",
            "ForCausalLM": f"{MODELING}:FlaxSmolLM3ForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxSmolLM3ForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxSmolLM3ForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxSmolLM3ForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal decoder with rotary embeddings in most layers (Bakouch et al., 2025).",
        citation=CITATION,
    )
