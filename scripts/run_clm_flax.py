#!/usr/bin/env python
"""Pretrain or fine-tune a causal language model (GPT-2, VQ Transformer, your own).

This is `hfseq train clm` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("clm"))
