"""Llama-style decoders: one implementation and a table of the differences between families."""
