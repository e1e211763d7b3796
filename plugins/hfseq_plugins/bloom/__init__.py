"""BLOOM (BigScience Workshop, 2022, https://arxiv.org/abs/2211.05100)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.bloom.modeling"
CITATION = """\
@misc{bigscience2022bloom,
  title = {{BLOOM}: A {176B}-Parameter Open-Access Multilingual Language Model},
  author = {{BigScience Workshop}},
  year = {2022},
  url = {https://arxiv.org/abs/2211.05100}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers BLOOM with the task heads that Transformers 4 had in Flax."""
    register(
        "bloom",
        config="transformers:BloomConfig",
        heads={
            "Model": f"{MODELING}:FlaxBloomModel",
            "ForCausalLM": f"{MODELING}:FlaxBloomForCausalLM",
        },
        sharding="hfseq_plugins.bloom.sharding:RULES",
        card="A causal Transformer decoder with ALiBi position biases (BigScience, 2022).",
        citation=CITATION,
    )
