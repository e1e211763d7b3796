"""BERT (Devlin et al., 2018, https://arxiv.org/abs/1810.04805)."""

from __future__ import annotations

from hfseq import hookimpl

MODELING = "hfseq_plugins.bert.modeling"


@hookimpl
def register_architectures(register):
    """Add BERT with the heads that Transformers 4 had in Flax."""
    register(
        "bert",
        config="transformers:BertConfig",
        heads={
            "Model": f"{MODELING}:FlaxBertModel",
            "ForPreTraining": f"{MODELING}:FlaxBertForPreTraining",
            "ForMaskedLM": f"{MODELING}:FlaxBertForMaskedLM",
            "ForCausalLM": f"{MODELING}:FlaxBertForCausalLM",
            "ForNextSentencePrediction": f"{MODELING}:FlaxBertForNextSentencePrediction",
            "ForSequenceClassification": f"{MODELING}:FlaxBertForSequenceClassification",
            "ForMultipleChoice": f"{MODELING}:FlaxBertForMultipleChoice",
            "ForTokenClassification": f"{MODELING}:FlaxBertForTokenClassification",
            "ForQuestionAnswering": f"{MODELING}:FlaxBertForQuestionAnswering",
        },
        sharding="hfseq_plugins.bert.sharding:RULES",
    )
