"""From text to batches: sources, tokenisation, packing, step-addressed batches, prefetch.

Nothing here imports jax, and transformers, datasets and tokenizers are imported inside functions.
"""
