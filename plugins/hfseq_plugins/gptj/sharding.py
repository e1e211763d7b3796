"""Sharding rules of GPT-J: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"wte/embedding$", "embedding"),
    (r"([qkv]_proj|fc_in)/kernel$", "column"),
    (r"fc_in/bias$", "column_bias"),
    (r"(out_proj|fc_out)/kernel$", "row"),
    (r"fc_out/bias$", "vector"),
    (r"ln_(1|f)/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"lm_head/bias$", "column_bias"),
]
