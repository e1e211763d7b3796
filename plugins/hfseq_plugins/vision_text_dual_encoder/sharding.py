"""How two encoders are split over devices: each as it is alone, the projections by their output."""

RULES = [
    (r"^(text|visual)_projection/kernel$", "table"),
    (r"^logit_scale$", "replicated"),
]
