#!/usr/bin/env python
"""Pretrain or fine-tune a masked language model (BERT, RoBERTa or your own architecture).

This is `hfseq train mlm` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("mlm"))
