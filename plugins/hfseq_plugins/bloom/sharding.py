"""Sharding rules of BLOOM: column- and row-parallel pairs, as in Megatron-LM.

The columns of a head in the fused projection are not split.
"""

RULES = [
    (r"word_embeddings/embedding$", "embedding"),
    (r"(query_key_value|dense_h_to_4h)/kernel$", "column"),
    (r"(query_key_value|dense_h_to_4h)/bias$", "column_bias"),
    (r"(dense|dense_4h_to_h)/kernel$", "row"),
    (r"(dense|dense_4h_to_h)/bias$", "vector"),
    (r"(layernorm|ln_f)/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
]
