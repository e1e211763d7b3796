"""Seed-OSS (ByteDance Seed Team, 2025, https://github.com/ByteDance-Seed/seed-oss).

Llama with biases in the projections of queries, keys and values, and with dropout.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.seed_oss.modeling"
CITATION = """\
@misc{seed2025oss,
  title = {{Seed-OSS} Open-Source Models},
  author = {{ByteDance Seed Team}},
  year = {2025},
  url = {https://github.com/ByteDance-Seed/seed-oss}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers Seed-OSS with the task heads that Transformers has in PyTorch."""
    register(
        "seed_oss",
        config="transformers:SeedOssConfig",
        heads={
            "Model": f"{MODELING}:FlaxSeedOssModel",
            "ForCausalLM": f"{MODELING}:FlaxSeedOssForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxSeedOssForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxSeedOssForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxSeedOssForTokenClassification",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with biases for queries, keys and values (ByteDance "
        "Seed Team, 2025).",
        citation=CITATION,
    )
