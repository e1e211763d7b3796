"""Sharding rules of BigBird: the rules of BERT, and rules for the pooler."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"bert/pooler/kernel$|^pooler/kernel$", "table"),
    (r"pooler/bias$", "vector"),
    *BERT,
]
