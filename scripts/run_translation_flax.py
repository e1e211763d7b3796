#!/usr/bin/env python
"""Train or fine-tune a translation model (Marian, Pegasus, T5, BART, your own).

This is `hfseq train translation` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("translation"))
