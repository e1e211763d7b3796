#!/usr/bin/env python
"""Train multi-vector encoders (ColBERT) on queries and documents.

This is `hfseq train multi_vector` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("multi_vector"))
