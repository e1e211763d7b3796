#!/usr/bin/env python
"""Train a reward model on pairs of answers, like TRL's reward trainer.

This is `hfseq train reward` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("reward"))
