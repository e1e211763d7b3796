#!/usr/bin/env python
"""Pretrain wav2vec 2.0 on audio without transcripts, with the contrastive objective.

This is `hfseq train wav2vec2` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("wav2vec2"))
