#!/usr/bin/env python
"""Train a tokenizer for a model family on your own text, like `hfseq tokenizer`."""

import sys

from hfseq.cli import tokenizer

if __name__ == "__main__":
    sys.exit(tokenizer.main(sys.argv[1:], program="python scripts/train_tokenizer.py"))
