"""The public classes of the FP8 encoder, which are stored as MegatronBERT."""

from __future__ import annotations

from typing import Any

import numpy as np

from hfseq.modeling import Derived
from hfseq_plugins.bert.modeling import FlaxBertPreTrainedModel
from hfseq_plugins.common import StoredAsTwin
from hfseq_plugins.fp8_encoder import layers
from hfseq_plugins.fp8_encoder.configuration import TWIN_TYPES, Fp8EncoderConfig


class FlaxFp8EncoderPreTrainedModel(StoredAsTwin, FlaxBertPreTrainedModel):
    """Base of the FP8 encoder's classes.

    ``save_pretrained`` writes the stock twin (MegatronBERT) with its tensors, so that PyTorch's
    Auto classes load it. Options without an exact twin are written natively, with a warning that
    names them.
    """

    config_class = Fp8EncoderConfig

    def __init__(self, config: Fp8EncoderConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # What limits the length of a row: the table of positions, a flattened head, or nothing.
        if self.module_class is layers.SequenceClassification and config.head == "te_flatten":
            self.position_table = "flatten_length"
        elif config.positions == "none":
            self.position_table = None

    def max_length(self) -> int | None:
        """Return the longest row that the positions or a flattened head allow, if any do."""
        return None if self.position_table is None else getattr(self.config, self.position_table)

    def takes(self, name: str, method: str = "__call__") -> bool:
        """Tell whether ``name`` counts; token types do not where the model has no table of them."""
        if name == "token_type_ids" and not self.config.type_vocab_size:
            return False
        return super().takes(name, method)

    def derived_weights(self) -> dict[str, Derived]:
        """Return what the twin stores beside our parameters: zeros for what this model lacks."""
        config = self.config
        if config.twin_problems():
            return {}
        found = {} if config.use_bias else self._zero_biases()
        width, tables = config.hidden_size, "embeddings.{}_embeddings.weight"
        if config.positions == "none":
            zeros = np.zeros((config.max_position_embeddings, width), np.float32)
            found[tables.format("position")] = Derived(zeros, "load it with positions='learned'")
        if not config.type_vocab_size:
            zeros = np.zeros((TWIN_TYPES, width), np.float32)
            remedy = f"load it with type_vocab_size={TWIN_TYPES}"
            found[tables.format("token_type")] = Derived(zeros, remedy)
        if self.module_class is layers.Fp8EncoderModule:
            return found
        return {f"{self.base_model_prefix}.{name}": entry for name, entry in found.items()}

    def _zero_biases(self) -> dict[str, Derived]:
        sizes = dict.fromkeys(
            [*(f"attention.self.{n}" for n in ("query", "key", "value")), "attention.output.dense"],
            self.config.hidden_size,
        )
        sizes |= {
            "intermediate.dense": self.config.intermediate_size,
            "output.dense": self.config.hidden_size,
        }
        return {
            f"encoder.layer.{number}.{name}.bias": Derived(
                np.zeros(size, np.float32), "load it with use_bias=True"
            )
            for number in range(self.config.num_hidden_layers)
            for name, size in sizes.items()
        }


class FlaxFp8EncoderModel(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder without a head: hidden states and the pooled first token."""

    module_class = layers.Fp8EncoderModule
    twin_names = {"megatron-bert": "MegatronBertModel"}


class FlaxFp8EncoderForMaskedLM(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder with the masked-LM head."""

    module_class = layers.MaskedLM
    twin_names = {"megatron-bert": "MegatronBertForMaskedLM"}


class FlaxFp8EncoderForSequenceClassification(FlaxFp8EncoderPreTrainedModel):
    """The FP8 encoder with a classifier, on the pooled first token or on all positions."""

    module_class = layers.SequenceClassification
    twin_names = {"megatron-bert": "MegatronBertForSequenceClassification"}
    # The two products of the flattened head are large; what makes the labels is not.
    precision_sites = (r"classifier/(flatten|dense)$",)
