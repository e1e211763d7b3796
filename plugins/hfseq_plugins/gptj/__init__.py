"""GPT-J (Wang and Komatsuzaki, 2021)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gptj.modeling"
CITATION = """\
@misc{gpt-j,
  author = {Wang, Ben and Komatsuzaki, Aran},
  title = {{GPT-J-6B}: A 6 Billion Parameter Autoregressive Language Model},
  year = {2021},
  url = {https://github.com/kingoflolz/mesh-transformer-jax}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GPT-J with the task heads that Transformers 4 had in Flax."""
    register(
        "gptj",
        config="transformers:GPTJConfig",
        heads={
            "Model": f"{MODELING}:FlaxGPTJModel",
            "ForCausalLM": f"{MODELING}:FlaxGPTJForCausalLM",
        },
        sharding="hfseq_plugins.gptj.sharding:RULES",
        card="A causal Transformer decoder with rotary embeddings (Wang and Komatsuzaki, 2021).",
        citation=CITATION,
    )
