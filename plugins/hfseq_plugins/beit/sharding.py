"""Sharding rules of BEiT: the rules of ViT, and rules for relative position biases."""

from hfseq_plugins.vit.sharding import RULES as VIT

RULES = [
    (r"relative_position_bias_table$", "heads"),
    (r"lambda_[12]$", "vector"),
    (r"mask_token$", "replicated"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"lm_head/bias$", "column_bias"),
    *VIT,
]
