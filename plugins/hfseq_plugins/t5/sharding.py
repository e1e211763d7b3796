"""Sharding rules of T5: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"(shared|embed_tokens)/embedding$", "embedding"),
    (r"relative_attention_bias/embedding$", "heads"),
    (r"(Self|EncDec)Attention/(q|k|v)/kernel$", "column"),
    (r"DenseReluDense/wi(_0|_1)?/kernel$", "column"),
    (r"(Attention/o|DenseReluDense/wo)/kernel$", "row"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"layer_norm/weight$", "vector"),
]
