"""How the WMT Transformer is split over devices: as BART, with what it has beside."""

from hfseq_plugins.bart.sharding import RULES as BART

RULES = [
    *BART,
    (r"lambda_(q|k)[12]$", "replicated"),
    (r"head_norm/scale$", "replicated"),
]
