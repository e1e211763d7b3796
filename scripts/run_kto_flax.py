#!/usr/bin/env python
"""Train a language model on good and bad completions, like TRL's KTO.

This is `hfseq train kto` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("kto"))
