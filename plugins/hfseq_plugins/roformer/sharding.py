"""Sharding rules of RoFormer: the rules of BERT, and rules for the projection of embeddings."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"embeddings_project/kernel$", "table"),
    (r"embeddings_project/bias$", "vector"),
    *BERT,
]
