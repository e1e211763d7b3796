"""Sharding rules of the projections. Both encoders use the rules of their families."""

RULES = [
    (r"^(text|visual)_projection/kernel$", "table"),
    (r"^logit_scale$", "replicated"),
]
