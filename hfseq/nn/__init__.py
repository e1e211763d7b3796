"""Building blocks of model files: layers, attention, caches, activations and precision.

Model files import this package as `nn`.
"""

from hfseq.plugins.import_hooks import prepare_jax

prepare_jax()  # before the first import of flax

from hfseq.nn.attention import attend, dot_product
from hfseq.nn.context import current_options, options, row_guarantees
from hfseq.nn.dispatch import AttentionSpec, Implementation
from hfseq.nn.experts import (
    ExpertLayer,
    ExpertRows,
    choose_experts,
    mix_experts,
    mix_sharded_experts,
)
from hfseq.nn.heads import LogitReduction, reduced_logits, vocabulary_logits
from hfseq.nn.kv_cache import (
    CachedAttention,
    StateAttention,
    encoder_cache,
    extend_cache,
    is_causal,
)
from hfseq.nn.layers import (
    BatchNorm,
    Conv,
    Conv1D,
    Dropout,
    DropPath,
    Embed,
    GroupNorm,
    LayerNorm,
    Linear,
    RMSNorm,
    activation,
    dropout,
    embed_patches,
    height_and_width,
    normal,
    per_axis,
    uniform,
)
from hfseq.nn.logits import defer_logits, map_logits
from hfseq.nn.modules import (
    Buffer,
    ConvTranspose,
    Function,
    MultiheadAttention,
    Sequential,
    WeightNormConv,
    identity,
)
from hfseq.nn.positions import (
    Rotary,
    alibi_slopes,
    gather_positions,
    positions_after_padding,
    positions_from_mask,
    positions_in_segments,
    relative_position_bias,
    resize_grid,
    rope_parameters,
    rotate,
)
from hfseq.nn.precision import add_bias
from hfseq.nn.random import Keys, batch_keys, make_keys
from hfseq.nn.stack import Layers, run_layers
from hfseq.nn.visible import (
    Visibility,
    attention_mask,
    cross_attention_mask,
    visible,
    visible_across,
)

__all__ = [
    "AttentionSpec",
    "BatchNorm",
    "Buffer",
    "CachedAttention",
    "Conv",
    "Conv1D",
    "ConvTranspose",
    "DropPath",
    "Dropout",
    "Embed",
    "ExpertLayer",
    "ExpertRows",
    "Function",
    "GroupNorm",
    "Implementation",
    "Keys",
    "LayerNorm",
    "Layers",
    "Linear",
    "LogitReduction",
    "MultiheadAttention",
    "RMSNorm",
    "Rotary",
    "Sequential",
    "StateAttention",
    "Visibility",
    "WeightNormConv",
    "activation",
    "add_bias",
    "alibi_slopes",
    "attend",
    "attention_mask",
    "batch_keys",
    "choose_experts",
    "cross_attention_mask",
    "current_options",
    "defer_logits",
    "dot_product",
    "dropout",
    "embed_patches",
    "encoder_cache",
    "extend_cache",
    "is_causal",
    "gather_positions",
    "height_and_width",
    "identity",
    "make_keys",
    "map_logits",
    "mix_experts",
    "mix_sharded_experts",
    "normal",
    "options",
    "per_axis",
    "positions_after_padding",
    "positions_from_mask",
    "positions_in_segments",
    "reduced_logits",
    "relative_position_bias",
    "resize_grid",
    "rope_parameters",
    "rotate",
    "row_guarantees",
    "run_layers",
    "uniform",
    "visible",
    "visible_across",
    "vocabulary_logits",
]
