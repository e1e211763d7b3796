"""Sharding rules of OPT: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"embed_tokens/embedding$", "embedding"),
    (r"embed_positions/embedding$", "table"),
    (r"([qkv]_proj|fc1)/kernel$", "column"),
    (r"([qkv]_proj|fc1)/bias$", "column_bias"),
    (r"(out_proj|fc2)/kernel$", "row"),
    (r"(out_proj|fc2)/bias$", "vector"),
    (r"project_(in|out)/kernel$", "table"),
    (r"layer_norm/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
]
