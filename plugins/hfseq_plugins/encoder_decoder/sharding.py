"""How a pair is split over devices: each as it is alone, the projection by its output."""

RULES = [
    (r"^enc_to_dec_proj/kernel$", "table"),
    (r"^enc_to_dec_proj/bias$", "vector"),
]
