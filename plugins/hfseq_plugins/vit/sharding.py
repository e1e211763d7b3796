"""Sharding rules of ViT: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"patch_embeddings/projection/kernel$", "channels"),
    (r"attention/attention/(query|key|value)/kernel$", "column"),
    (r"attention/attention/(query|key|value)/bias$", "column_bias"),
    (r"intermediate/dense/kernel$", "column"),
    (r"intermediate/dense/bias$", "column_bias"),
    (r"output/dense/kernel$", "row"),
    (r"pooler/dense/kernel$", "table"),
    (r"classifier/kernel$", "row_table"),
    (r"classifier/bias$", "replicated"),
    (r"layernorm(_before|_after)?/(scale|bias)$", "vector"),
    (r"(dense|projection)/bias$", "vector"),
    (r"(cls_token|position_embeddings)$", "replicated"),
]
