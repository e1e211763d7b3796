"""GPT-Neo (Black et al., 2021)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gpt_neo.modeling"
CITATION = """\
@software{gpt-neo,
  author = {Black, Sid and Gao, Leo and Wang, Phil and Leahy, Connor and Biderman, Stella},
  title = {{GPT-Neo}: Large Scale Autoregressive Language Modeling with Mesh-{TensorFlow}},
  year = {2021},
  doi = {10.5281/zenodo.5297715}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GPT-Neo with the task heads that Transformers 4 had in Flax."""
    register(
        "gpt_neo",
        config="transformers:GPTNeoConfig",
        heads={
            "Model": f"{MODELING}:FlaxGPTNeoModel",
            "ForCausalLM": f"{MODELING}:FlaxGPTNeoForCausalLM",
        },
        sharding="hfseq_plugins.gpt_neo.sharding:RULES",
        card="A causal decoder with sliding windows in some layers (Black et al., 2021).",
        citation=CITATION,
    )
