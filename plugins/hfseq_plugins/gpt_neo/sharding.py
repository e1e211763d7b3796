"""Sharding rules of GPT-Neo: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"wte/embedding$", "embedding"),
    (r"wpe/embedding$", "table"),
    (r"([qkv]_proj|c_fc)/kernel$", "column"),
    (r"c_fc/bias$", "column_bias"),
    (r"(out_proj|c_proj)/kernel$", "row"),
    (r"(out_proj|c_proj)/bias$", "vector"),
    (r"ln_(1|2|f)/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
]
