"""Sharding rules of RoFormer: those of BERT, and the embedding projection."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"embeddings_project/kernel$", "table"),
    (r"embeddings_project/bias$", "vector"),
    *BERT,
]
