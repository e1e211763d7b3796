"""Sharding rules of CLIP: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"token_embedding/embedding$", "embedding"),
    (r"position_embedding/embedding$", "table"),
    (r"patch_embedding/kernel$", "channels"),
    (r"((q|k|v)_proj|fc1)/kernel$", "column"),
    (r"((q|k|v)_proj|fc1)/bias$", "column_bias"),
    (r"(out_proj|fc2)/kernel$", "row"),
    (r"(text|visual)_projection/kernel$", "table"),
    (r"(norm\d?)/(scale|bias)$", "vector"),
    (r"(out_proj|fc2)/bias$", "vector"),
    (r"(class_embedding|logit_scale)$", "replicated"),
]
