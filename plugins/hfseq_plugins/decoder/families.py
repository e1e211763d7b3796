"""The classes of Llama, Mistral and Gemma; what they switch is in the model file's table."""

from __future__ import annotations

from transformers import GemmaConfig, LlamaConfig, MistralConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import CausalLM, Decoder, FlaxDecoderPreTrainedModel


class FlaxLlamaPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base of the Llama classes."""

    config_class = LlamaConfig


class FlaxLlamaModel(FlaxLlamaPreTrainedModel):
    """Llama without a head: hidden states."""

    module_class = Decoder


class FlaxLlamaForCausalLM(CausalGeneration, FlaxLlamaPreTrainedModel):
    """Llama with its language-modelling head."""

    module_class = CausalLM


class FlaxMistralPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base of the Mistral classes."""

    config_class = MistralConfig


class FlaxMistralModel(FlaxMistralPreTrainedModel):
    """Mistral without a head: hidden states."""

    module_class = Decoder


class FlaxMistralForCausalLM(CausalGeneration, FlaxMistralPreTrainedModel):
    """Mistral with its language-modelling head."""

    module_class = CausalLM


class FlaxGemmaPreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base of the Gemma classes."""

    config_class = GemmaConfig


class FlaxGemmaModel(FlaxGemmaPreTrainedModel):
    """Gemma without a head: hidden states."""

    module_class = Decoder


class FlaxGemmaForCausalLM(CausalGeneration, FlaxGemmaPreTrainedModel):
    """Gemma with its language-modelling head."""

    module_class = CausalLM
