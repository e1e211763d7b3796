"""The data pipeline: sources, tokenization, packing, and batches computed from step numbers.

The modules of this package do not import jax. They import transformers, datasets and tokenizers
inside of functions.
"""
