"""GPT-NeoX (Black et al., 2022, https://arxiv.org/abs/2204.06745), the architecture of Pythia."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gpt_neox.modeling"
CITATION = """\
@misc{black2022gptneox,
  title = {{GPT-NeoX-20B}: An Open-Source Autoregressive Language Model},
  author = {Black, Sid and Biderman, Stella and Hallahan, Eric and Anthony, Quentin and others},
  year = {2022},
  url = {https://arxiv.org/abs/2204.06745}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GPT-NeoX with the task heads that Transformers has in PyTorch."""
    register(
        "gpt_neox",
        config="transformers:GPTNeoXConfig",
        heads={
            "Model": f"{MODELING}:FlaxGPTNeoXModel",
            "ForCausalLM": f"{MODELING}:FlaxGPTNeoXForCausalLM",
            "ForSequenceClassification": f"{MODELING}:FlaxGPTNeoXForSequenceClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxGPTNeoXForQuestionAnswering",
            "ForTokenClassification": f"{MODELING}:FlaxGPTNeoXForTokenClassification",
        },
        sharding="hfseq_plugins.gpt_neox.modeling:RULES",
        card="A causal Transformer decoder with parallel attention and feed-forward blocks "
        "(Black et al., 2022).",
        citation=CITATION,
    )
