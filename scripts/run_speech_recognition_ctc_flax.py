#!/usr/bin/env python
"""Train wav2vec 2.0 for speech recognition with CTC, where the labels are letters.

This is `hfseq train ctc` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("ctc"))
