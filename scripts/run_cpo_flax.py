#!/usr/bin/env python
"""Train a language model on preferences with CPO or SimPO, like TRL's CPO.

This is `hfseq train cpo` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("cpo"))
