#!/usr/bin/env python
"""Pretrain BART by denoising: reconstruct text with permuted sentences and masked spans.

This is `hfseq train denoising` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("denoising"))
