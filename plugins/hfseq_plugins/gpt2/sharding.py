"""How GPT-2 is split over devices: Megatron's column and row pairs.

The kernels of Conv1D are (out, in), so a product that is split by its output has the tactic whose
first dimension is split by ``tensor``, ``row``, and the other way round.
"""

RULES = [
    (r"wte/embedding$", "embedding"),
    (r"wpe/embedding$", "table"),
    (r"(c_attn|q_attn|c_fc)/kernel$", "row"),
    (r"(c_attn|q_attn|c_fc)/bias$", "column_bias"),
    (r"c_proj/kernel$", "column"),
    (r"c_proj/bias$", "vector"),
    (r"ln_(1|2|f|cross_attn)/(scale|bias)$", "vector"),
    (r"lm_head/kernel$", "vocab_column"),
]
