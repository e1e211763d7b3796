"""How the encoder is split over devices: as BERT, with its flattened head.

The head's first product is split by columns and its second by rows, as in TransformerEngine's
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
