"""Sharding rules of Whisper: those of BART, with convolutions split by output channels."""

from hfseq_plugins.bart import sharding

RULES = [
    (r"conv\d/kernel$", "channels"),
    (r"conv\d/bias$", "vector"),
    (r"(layer_weights|(projector|classifier)/bias)$", "replicated"),
    (r"projector/kernel$", "table"),
    (r"classifier/kernel$", "row_table"),
    *sharding.RULES,
]
