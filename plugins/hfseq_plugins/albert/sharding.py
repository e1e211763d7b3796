"""Sharding rules of ALBERT: column- and row-parallel pairs, as in Megatron-LM."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"attention/(query|key|value)/kernel$", "column"),
    (r"attention/(query|key|value)/bias$", "column_bias"),
    (r"attention/dense/kernel$", "row"),
    (r"ffn/kernel$", "column"),
    (r"ffn/bias$", "column_bias"),
    (r"ffn_output/kernel$", "row"),
    (r"(ffn_output|embedding_hidden_mapping_in|pooler)/bias$", "vector"),
    (r"(embedding_hidden_mapping_in|pooler|predictions/dense)/kernel$", "table"),
    (r"full_layer_layer_norm/(scale|bias)$", "vector"),
    *BERT,
]
