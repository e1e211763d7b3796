"""GPT-2 (Radford et al., 2019, Language Models are Unsupervised Multitask Learners)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gpt2.modeling"
CITATION = """\
@techreport{radford2019language,
  title = {Language Models are Unsupervised Multitask Learners},
  author = {Radford, Alec and Wu, Jeffrey and Child, Rewon and Luan, David and Amodei, Dario and
            Sutskever, Ilya},
  institution = {OpenAI},
  year = {2019}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GPT-2 with the Flax task heads of Transformers 4.

    GPT-SW3 checkpoints are loaded as GPT-2 checkpoints.
    """
    register(
        "gpt2",
        config="transformers:GPT2Config",
        heads={
            "Model": f"{MODELING}:FlaxGPT2Model",
            "ForCausalLM": f"{MODELING}:FlaxGPT2LMHeadModel",
        },
        sharding="hfseq_plugins.gpt2.sharding:RULES",
        card="A causal Transformer decoder (Radford et al., 2019).",
        citation=CITATION,
    )
