"""How BigBird is split over devices: as BERT."""

from hfseq_plugins.bert.sharding import RULES as BERT

RULES = [
    (r"bert/pooler/kernel$|^pooler/kernel$", "table"),
    (r"pooler/bias$", "vector"),
    *BERT,
]
