"""GPT-NeoX (Black et al., 2022) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import GPTNeoXConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder import modeling as decoder
from hfseq_plugins.decoder.modeling import Decoder, FlaxDecoderPreTrainedModel

RULES = [
    (r"embed_in/embedding$", "embedding"),
    (r"(query_key_value|dense_h_to_4h)/kernel$", "column"),
    (r"(query_key_value|dense_h_to_4h)/bias$", "column_bias"),
    (r"(dense|dense_4h_to_h)/kernel$", "row"),
    (r"(dense|dense_4h_to_h)/bias$", "vector"),
    (r"norm/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"(classifier|score|qa_outputs)/kernel$", "row_table"),
    (r"(classifier|score|qa_outputs)/bias$", "replicated"),
]


class CausalLM(decoder.CausalLM):
    """Causal language model. A tied head reuses the word embeddings."""

    decoder_name = "gpt_neox"


class SequenceClassification(decoder.SequenceClassification):
    """Sequence classification or regression, from the last token that is not padding."""

    decoder_name = "gpt_neox"


class QuestionAnswering(decoder.QuestionAnswering):
    """Decoder with a head for extractive question answering."""

    decoder_name = "gpt_neox"


class TokenClassification(decoder.TokenClassification):
    """Decoder with a token classification head."""

    decoder_name, classifier_name = "gpt_neox", "classifier"


class FlaxGPTNeoXPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the GPT-NeoX models: configuration and checkpoint names."""

    config_class = GPTNeoXConfig
    base_model_prefix = "gpt_neox"
    weight_templates = {"lm_head": "embed_out"}
    weight_synonyms = {"lm_head": "embed_out"}
    weight_aliases = {"embed_out.weight": "gpt_neox.embed_in.weight"}
    module_templates = {"embed_out": "lm_head"}
    ignored_weights = (
        *FlaxDecoderPreTrainedModel.ignored_weights,
        r"attention\.(masked_)?bias$",
        r"attention\.rotary_emb\.",
    )


class FlaxGPTNeoXModel(FlaxGPTNeoXPreTrainedModel):
    """GPT-NeoX without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGPTNeoXForCausalLM(CausalGeneration, FlaxGPTNeoXPreTrainedModel):
    """GPT-NeoX with a language modeling head."""

    module_class = CausalLM


class FlaxGPTNeoXForSequenceClassification(FlaxGPTNeoXPreTrainedModel):
    """GPT-NeoX for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxGPTNeoXForQuestionAnswering(FlaxGPTNeoXPreTrainedModel):
    """GPT-NeoX for extractive question answering."""

    module_class = QuestionAnswering


class FlaxGPTNeoXForTokenClassification(FlaxGPTNeoXPreTrainedModel):
    """GPT-NeoX for token classification."""

    module_class = TokenClassification
