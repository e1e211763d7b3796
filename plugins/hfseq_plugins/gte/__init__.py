"""GTE (Zhang et al., 2024, https://arxiv.org/abs/2407.19669)."""

from __future__ import annotations

from hfseq import RegisterArchitecture, hookimpl

MODELING = "hfseq_plugins.gte.modeling"
CITATION = """\
@inproceedings{zhang2024mgte,
  title = {{mGTE}: Generalized Long-Context Text Representation and Reranking Models for
           Multilingual Text Retrieval},
  author = {Zhang, Xin and Zhang, Yanzhao and Long, Dingkun and Xie, Wen and Dai, Ziqi and
            Tang, Jialong and Lin, Huan and Yang, Baosong and Xie, Pengjun and Huang, Fei and
            Zhang, Meishan and Li, Wenjie and Zhang, Min},
  booktitle = {Proceedings of EMNLP: Industry Track},
  year = {2024},
  url = {https://arxiv.org/abs/2407.19669}
}"""


@hookimpl
def register_architectures(register: RegisterArchitecture) -> None:
    """Registers GTE with the task heads that PyTorch has, and its older model type `new`."""
    configs = {
        "gte": "transformers:GteConfig",
        "new": "hfseq_plugins.gte.configuration:NewConfig",
    }
    for model_type, config in configs.items():
        register(
            model_type,
            config=config,
            heads={
                "Model": f"{MODELING}:FlaxGteModel",
                "ForMaskedLM": f"{MODELING}:FlaxGteForMaskedLM",
                "ForSequenceClassification": f"{MODELING}:FlaxGteForSequenceClassification",
                "ForTokenClassification": f"{MODELING}:FlaxGteForTokenClassification",
            },
            sharding="hfseq_plugins.rotary_bert.modeling:RULES",
            card="BERT with rotary positions and gated layers (Zhang et al., 2024).",
            citation=CITATION,
        )
