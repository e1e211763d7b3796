"""Sharding rules of the projection. Encoder and decoder use the rules of their families."""

RULES = [
    (r"^enc_to_dec_proj/kernel$", "table"),
    (r"^enc_to_dec_proj/bias$", "vector"),
]
