"""Granite-MoE (Shen et al., 2024) on Flax NNX, implemented by `hfseq_plugins.decoder`."""

from __future__ import annotations

from typing import ClassVar

from transformers import GraniteMoeConfig

from hfseq.generation import CausalGeneration
from hfseq_plugins.decoder.modeling import (
    CausalLM,
    Decoder,
    FlaxDecoderPreTrainedModel,
)


class FlaxGraniteMoePreTrainedModel(FlaxDecoderPreTrainedModel):
    """Base class of the Granite-MoE models."""

    config_class = GraniteMoeConfig
    # Maps the names of modules in Transformers' PyTorch class to the names in checkpoints.
    weight_templates: ClassVar[dict[str, str]] = {
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router": "block_sparse_moe.router.layer",
    }
    weight_synonyms: ClassVar[dict[str, str]] = {
        **weight_templates,
        "block_sparse_moe.router.layer.layer": "block_sparse_moe.router.layer",
    }
    module_templates: ClassVar[dict[str, str]] = {
        stored: name for name, stored in weight_templates.items()
    }


class FlaxGraniteMoeModel(FlaxGraniteMoePreTrainedModel):
    """Granite-MoE without a head. Returns hidden states."""

    module_class = Decoder


class FlaxGraniteMoeForCausalLM(CausalGeneration, FlaxGraniteMoePreTrainedModel):
    """Granite-MoE with a language modeling head."""

    module_class = CausalLM
