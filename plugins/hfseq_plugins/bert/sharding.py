"""Sharding rules of BERT and its variants: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"word_embeddings/embedding$", "embedding"),
    (r"(position|token_type)_embeddings/embedding$", "table"),
    (r"self/(query|key|value)/kernel$", "column"),
    (r"self/(query|key|value)/bias$", "column_bias"),
    (r"intermediate/dense/kernel$", "column"),
    (r"intermediate/dense/bias$", "column_bias"),
    (r"output/dense/kernel$", "row"),
    (r"decoder/kernel$", "vocab_column"),
    (r"(lm_head|predictions)/bias$", "vocab"),
    (r"(pooler|transform|lm_head|classifier)/dense/kernel$", "table"),
    (r"(classifier|qa_outputs|seq_relationship|out_proj)/kernel$", "row_table"),
    (r"(classifier|qa_outputs|seq_relationship|out_proj)/bias$", "replicated"),
    (r"(LayerNorm|layer_norm|/ln)/(scale|bias)$", "vector"),
    (r"dense/bias$", "vector"),
]
