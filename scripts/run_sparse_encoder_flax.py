#!/usr/bin/env python
"""Train sparse encoders (SPLADE) on queries and documents.

This is `hfseq train sparse_encoder` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("sparse_encoder"))
