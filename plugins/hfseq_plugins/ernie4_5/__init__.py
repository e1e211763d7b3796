"""ERNIE 4.5 (Baidu ERNIE Team, 2025, https://github.com/PaddlePaddle/ERNIE).

Llama with interleaved rotary embeddings.
"""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.ernie4_5.modeling"
CITATION = """\
@misc{ernie2025,
  title = {{ERNIE} 4.5 Technical Report},
  author = {{Baidu ERNIE Team}},
  year = {2025},
  url = {https://github.com/PaddlePaddle/ERNIE}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers ERNIE 4.5 with the task heads that Transformers has in PyTorch."""
    register(
        "ernie4_5",
        config="transformers:Ernie4_5Config",
        heads={
            "Model": f"{MODELING}:FlaxErnie4_5Model",
            "ForCausalLM": f"{MODELING}:FlaxErnie4_5ForCausalLM",
        },
        sharding="hfseq_plugins.decoder.sharding:RULES",
        card="A causal Transformer decoder with interleaved rotary embeddings (Baidu ERNIE Team,"
        " 2025).",
        citation=CITATION,
    )
