#!/usr/bin/env python
"""Train cross-encoders (rerankers), which score pairs of a query and a document.

This is `hfseq train cross_encoder` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("cross_encoder"))
