"""Sharding rules of wav2vec 2.0: column- and row-parallel pairs, as in Megatron-LM."""

RULES = [
    (r"(conv_layers|adapter/layers)/\d+/conv/kernel$", "channels"),
    (r"pos_conv_embed/conv/weight_v$", "row_table"),
    (r"pos_conv_embed/conv/weight_g$", "replicated"),
    (r"((q|k|v)_proj|intermediate_dense|linear_1)/kernel$", "column"),
    (r"((q|k|v)_proj|intermediate_dense|linear_1)/bias$", "column_bias"),
    (r"(out_proj|output_dense|linear_2)/kernel$", "row"),
    (r"(projection|proj|project_hid|project_q|weight_proj)/kernel$", "table"),
    (r"lm_head/kernel$", "vocab_column"),
    (r"lm_head/bias$", "column_bias"),
    (r"norm/(scale|bias)$", "vector"),
    (r"(conv|out_proj|output_dense|linear_2)/bias$", "vector"),
    (r"(projection|proj|project_hid|project_q|weight_proj)/bias$", "vector"),
    (r"(codevectors|masked_spec_embed)$", "replicated"),
]
