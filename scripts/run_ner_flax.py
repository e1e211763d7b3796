#!/usr/bin/env python
"""Train token classification: named entities, parts of speech (Transformers 4: run_flax_ner.py).

This is `hfseq train token_classification` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("token_classification"))
