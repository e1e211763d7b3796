"""Sharding rules of BART: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"(shared|embed_tokens)/embedding$", "embedding"),
    (r"embed_positions/embedding$", "table"),
    (r"((q|k|v)_proj|fc1)/kernel$", "column"),
    (r"((q|k|v)_proj|fc1)/bias$", "column_bias"),
    (r"classification_head/dense/kernel$", "table"),
    (r"(classification_head/out_proj|qa_outputs)/kernel$", "row_table"),
    (r"(classification_head/out_proj|qa_outputs)/bias$", "replicated"),
    (r"(out_proj|fc2)/kernel$", "row"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"final_logits_bias$", "vocab_row"),
    (r"layer_?norm(_embedding)?/(scale|bias)$", "vector"),
    (r"(dense|out_proj|fc2)/bias$", "vector"),
]
