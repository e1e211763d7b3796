"""Sharding rules of ELECTRA: the rules of BERT, and rules for the heads of ELECTRA."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"generator_lm_head/kernel$", "vocab_column"),
    (r"generator_lm_head/bias$", "vocab"),
    (r"(generator|discriminator)_predictions/dense/kernel$", "table"),
    (r"embeddings_project/kernel$|sequence_summary/summary/kernel$", "table"),
    (r"(embeddings_project|summary)/bias$", "vector"),
    (r"dense_prediction/kernel$", "row_table"),
    (r"dense_prediction/bias$", "replicated"),
    *BERT,
]
