"""Finds, reads and writes checkpoint files. Nothing in this package imports JAX."""
