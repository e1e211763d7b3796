"""Sharding rules of GPT-2: column- and row-parallel pairs, as in Megatron-LM.

Conv1D kernels are `(out, in)`. A column-parallel projection therefore uses the rule `row`, which
shards the first dimension over the `tensor` axis, and vice versa.
"""

RULES = [
    (r"wte/embedding$", "embedding"),
    (r"wpe/embedding$", "table"),
    (r"(c_attn|q_attn|c_fc)/kernel$", "row"),
    (r"(c_attn|q_attn|c_fc)/bias$", "column_bias"),
    (r"c_proj/kernel$", "column"),
    (r"c_proj/bias$", "vector"),
    (r"ln_(1|2|f|cross_attn)/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
]
