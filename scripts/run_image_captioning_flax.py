#!/usr/bin/env python
"""Train an image captioning model that consists of an image encoder and a text decoder.

This is `hfseq train image_to_text` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_to_text"))
