"""StableLM (Bellagente et al., 2024, https://arxiv.org/abs/2402.17834).

Llama with layer norms and rotary embeddings in a quarter of each head.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.stablelm.modeling"
CITATION = """\
@misc{bellagente2024stablelm,
  title = {Stable {LM} 2 1.6{B} Technical Report},
  author = {Bellagente, Marco and Tow, Jonathan and Mahan, Dakota and Phung, Duy and others},
  year = {2024},
  url = {https://arxiv.org/abs/2402.17834}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers StableLM with the task heads that Transformers has in PyTorch."""
    register(
        "stablelm",
        config="transformers:StableLmConfig",
        heads={
            "Model": f"{MODELING}:FlaxStableLmModel",
            "ForCausalLM": f"{MODELING}:FlaxStableLmForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxStableLmForSequenceClassification",
            "ForTokenClassification": f"{MODELING}:FlaxStableLmForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with layer norms (Bellagente et al., 2024).",
        citation=CITATION,
    )
