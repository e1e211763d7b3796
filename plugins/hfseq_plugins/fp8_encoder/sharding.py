"""Sharding rules of the FP8 encoder: those of BERT, and of the flattened head.

The head's first kernel is split by columns and the second by rows, as in TransformerEngine's
example.
"""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"intermediate/up/kernel$", "column"),
    (r"intermediate/up/bias$", "column_bias"),
    (r"classifier/flatten/kernel$", "column"),
    (r"classifier/flatten/bias$", "column_bias"),
    (r"classifier/dense/kernel$", "row"),
    *BERT,
]
