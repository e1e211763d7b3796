"""Decoders of Llama's kind: one model file and a table of what each family switches."""
