#!/usr/bin/env python
"""Pretrain T5 with span corruption: the decoder predicts the masked spans of the input.

This is `hfseq train span_mlm` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("span_mlm"))
