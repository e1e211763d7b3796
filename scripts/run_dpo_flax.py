#!/usr/bin/env python
"""Train a language model on preferences with direct preference optimization, like TRL's DPO.

This is `hfseq train dpo` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("dpo"))
