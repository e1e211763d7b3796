"""Sharding rules of Llama-style decoders: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"embed_tokens/embedding$", "embedding"),
    (r"(q|k|v|gate|up|qkv|gate_up)_proj/kernel$", "column"),
    (r"(q|k|v|gate|up|qkv|gate_up)_proj/bias$", "column_bias"),
    (r"(o|down)_proj/kernel$", "row"),
    (r"(o|down)_proj/bias$", "vector"),
    (r"mlp/(fc1|c_fc)/kernel$", "column"),
    (r"mlp/(fc1|c_fc)/bias$", "column_bias"),
    (r"(mlp/(fc2|c_proj)|self_attn/dense)/kernel$", "row"),
    (r"(mlp/(fc2|c_proj)|self_attn/dense)/bias$", "vector"),
    (r"(q|k)_norm/scale$", "replicated"),
    (r"norms/\d+/scale$", "vector"),
    (r"norm/(weight|scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"lm_head/bias$", "vocab"),
    (r"dense/kernel$", "table"),
    (r"dense/bias$", "vector"),
    (r"(classifier|score|qa_outputs)/kernel$", "row_table"),
    (r"(classifier|score|qa_outputs)/bias$", "replicated"),
]
