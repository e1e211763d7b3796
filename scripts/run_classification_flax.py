#!/usr/bin/env python
"""Train text classification or regression on texts or text pairs: GLUE or your own data.

This is `hfseq train classification` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("classification"))
