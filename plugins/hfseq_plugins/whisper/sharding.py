"""How Whisper is split over devices: as BART, and its convolutions by the channels they make."""

from hfseq_plugins.bart import sharding

RULES = [
    (r"conv\d/kernel$", "channels"),
    (r"conv\d/bias$", "vector"),
    (r"(layer_weights|(projector|classifier)/bias)$", "replicated"),
    (r"projector/kernel$", "table"),
    (r"classifier/kernel$", "row_table"),
    *sharding.RULES,
]
