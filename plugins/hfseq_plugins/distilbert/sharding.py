"""Sharding rules of DistilBERT: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"word_embeddings/embedding$", "embedding"),
    (r"position_embeddings/embedding$", "table"),
    (r"([qkv]_lin|lin1)/kernel$", "column"),
    (r"([qkv]_lin|lin1)/bias$", "column_bias"),
    (r"(out_lin|lin2)/kernel$", "row"),
    (r"(out_lin|lin2|vocab_transform|pre_classifier)/bias$", "vector"),
    (r"(vocab_transform|pre_classifier)/kernel$", "table"),
    (r"vocab_projector/kernel$", "vocab_column"),
    (r"vocab_projector/bias$", "vocab"),
    (r"(classifier|qa_outputs)/kernel$", "row_table"),
    (r"(classifier|qa_outputs)/bias$", "replicated"),
    (r"(LayerNorm|layer_norm)/(scale|bias)$", "vector"),
]
