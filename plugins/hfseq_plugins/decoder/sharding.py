"""Sharding rules of Llama-style decoders.

As in Megatron-LM, each block consists of a column-parallel and a row-parallel projection.
"""

RULES = [
    (r"experts/gate_up_proj$", "expert_column"),
    (r"experts/down_proj$", "expert_row"),
    (r"(gate|router|shared_expert_gate)/kernel$", "replicated"),
    (r"router/bias$", "replicated"),
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

#: The rules of gpt-oss. It has attention sinks, and its experts have biases and another layout.
CLAMPED_RULES = [
    (r"experts/gate_up_proj$", "expert_row"),
    (r"experts/down_proj$", "expert_column"),
    (r"experts/gate_up_proj_bias$", "expert_column_bias"),
    (r"experts/down_proj_bias$", "expert_bias"),
    (r"sinks$", "heads"),
    *RULES,
]
