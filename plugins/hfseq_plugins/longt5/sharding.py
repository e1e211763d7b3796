"""How LongT5 is split over devices: as T5."""

from hfseq_plugins.t5.sharding import RULES as T5

RULES = [
    (r"global_relative_attention_bias/embedding$", "heads"),
    *T5,
]
