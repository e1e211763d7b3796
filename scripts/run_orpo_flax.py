#!/usr/bin/env python
"""Fine-tune a language model on preferences without a reference model, like TRL's ORPO.

This is `hfseq train orpo` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("orpo"))
