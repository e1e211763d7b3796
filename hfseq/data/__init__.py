"""Data pipeline: sources, tokenization, packing, batches addressed by step, and prefetching.

The modules of this package do not import jax. They import transformers, datasets and tokenizers
inside of functions.
"""
