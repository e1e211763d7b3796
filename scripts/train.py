#!/usr/bin/env python
"""Train with any objective: `hfseq train OBJECTIVE`, with the objective as a flag.

`--help` shows an example.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train(None))
