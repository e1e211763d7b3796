"""Sharding rules of Whisper: the rules of BART, and rules for convolutions and the classifier.

Convolutions are split by output channels.
"""

from hfseq_plugins.bart import sharding

RULES = [
    (r"conv\d/kernel$", "channels"),
    (r"conv\d/bias$", "vector"),
    (r"(layer_weights|(projector|classifier)/bias)$", "replicated"),
    (r"projector/kernel$", "table"),
    (r"classifier/kernel$", "row_table"),
    *sharding.RULES,
]
