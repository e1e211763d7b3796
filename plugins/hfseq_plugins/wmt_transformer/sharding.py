"""Sharding rules of the WMT Transformer: those of BART, and rules for differential attention."""

from hfseq_plugins.bart.sharding import RULES as BART

RULES = [
    *BART,
    (r"lambda_(q|k)[12]$", "replicated"),
    (r"head_norm/scale$", "replicated"),
]
