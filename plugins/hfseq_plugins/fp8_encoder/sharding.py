"""Sharding rules of the FP8 encoder: the rules of BERT, and rules for the `te_flatten` head.

The first kernel of the head is split by columns and the second by rows, as in TransformerEngine's
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
