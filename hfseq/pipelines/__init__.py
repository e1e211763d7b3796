"""A checkpoint and its tokenizer at work on text."""
