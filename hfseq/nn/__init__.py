"""What model files are made of: layers, attention, caches, activations and precision."""

from hfseq.nn.attention import attend, dot_product
from hfseq.nn.choice import Facts, Implementation
from hfseq.nn.context import current_options, knowing, options
from hfseq.nn.kv_cache import CachedAttention, StateAttention, encoder_cache, extend_cache
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
)
from hfseq.nn.positions import (
    alibi_slopes,
    gather_positions,
    positions_after_padding,
    positions_from_mask,
    positions_in_segments,
    relative_position_bias,
    stretched,
)
from hfseq.nn.precision import add_bias
from hfseq.nn.random import Keys, batch_keys, make_keys
from hfseq.nn.rotary import Rotary, rope_parameters, rotate
from hfseq.nn.stack import Layers, run_layers
from hfseq.nn.visible import (
    Visible,
    attention_mask,
    cross_attention_mask,
    visible,
    visible_across,
)

__all__ = [
    "CachedAttention",
    "Conv",
    "Conv1D",
    "DropPath",
    "Dropout",
    "Embed",
    "Facts",
    "BatchNorm",
    "GroupNorm",
    "Implementation",
    "Keys",
    "LayerNorm",
    "Layers",
    "Linear",
    "RMSNorm",
    "Rotary",
    "StateAttention",
    "Visible",
    "activation",
    "add_bias",
    "alibi_slopes",
    "attend",
    "attention_mask",
    "batch_keys",
    "cross_attention_mask",
    "current_options",
    "dot_product",
    "dropout",
    "embed_patches",
    "encoder_cache",
    "extend_cache",
    "gather_positions",
    "height_and_width",
    "knowing",
    "make_keys",
    "normal",
    "options",
    "positions_after_padding",
    "positions_from_mask",
    "positions_in_segments",
    "relative_position_bias",
    "rope_parameters",
    "rotate",
    "run_layers",
    "stretched",
    "visible",
    "visible_across",
]
