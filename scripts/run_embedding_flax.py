#!/usr/bin/env python
"""Train text embeddings on pairs of related texts, like sentence-transformers.

This is `hfseq train embedding` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("embedding"))
