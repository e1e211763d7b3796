"""Phi 3 (Abdin et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from transformers import Phi3Config

from hfseq import nn
from hfseq.errors import UsageError
from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
    SequenceClassification,
    TokenClassification,
)


class FlaxPhi3PreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Phi 3 models."""

    config_class = Phi3Config


class FlaxPhi3Model(FlaxPhi3PreTrainedModel):
    """Phi 3 without a head. Returns hidden states."""

    module_class = Decoder


class FlaxPhi3ForCausalLM(CausalGeneration, FlaxPhi3PreTrainedModel):
    """Phi 3 with a language modeling head."""

    module_class = CausalLM

    def check_generation_lengths(self, prompt_length: int, stop_length: int) -> None:
        """Checks that the frequencies of rotary embeddings do not change during generation.

        LongRoPE has one list of frequencies for texts of up to `original_max_position_embeddings`
        tokens, and another one for longer texts. All keys in the cache must use the same list.

        Args:
            prompt_length: Number of tokens of the longest prompt.
            stop_length: Maximum number of tokens of prompt and continuation.

        Raises:
            UsageError: The generated text may become so long that it needs the other list.
        """
        rope = nn.rope_parameters(self.config)
        limit = rope.get("original_max_position_embeddings", self.config.max_position_embeddings)
        if rope["rope_type"] == "longrope" and prompt_length <= limit < stop_length:
            raise UsageError(
                f"generate: the prompt has {prompt_length} tokens and the output may have "
                f"{stop_length}, but rope_type='longrope' uses other frequencies for texts of more "
                f"than {limit} tokens (original_max_position_embeddings), so the cached keys would "
                f"become invalid. Set max_length={limit}, or pass a prompt of more than {limit} "
                "tokens"
            )


class FlaxPhi3ForSequenceClassification(FlaxPhi3PreTrainedModel):
    """Phi 3 for sequence classification, from the last token."""

    module_class = SequenceClassification


class FlaxPhi3ForTokenClassification(FlaxPhi3PreTrainedModel):
    """Phi 3 for token classification."""

    module_class = TokenClassification
