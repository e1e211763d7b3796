"""Sharding rules of Llama-style decoders: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"embed_tokens/embedding$", "embedding"),
    (r"(q|k|v|gate|up)_proj/kernel$", "column"),
    (r"(q|k|v|gate|up)_proj/bias$", "column_bias"),
    (r"(o|down)_proj/kernel$", "row"),
    (r"(o|down)_proj/bias$", "vector"),
    (r"norm/weight$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"lm_head/bias$", "vocab"),
    (r"dense/kernel$", "table"),
    (r"dense/bias$", "vector"),
    (r"(classifier|score|qa_outputs)/kernel$", "row_table"),
    (r"(classifier|score|qa_outputs)/bias$", "replicated"),
]
