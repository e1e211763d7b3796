#!/usr/bin/env python
"""Train an image encoder and a text encoder on images with captions, like CLIP.

This is `hfseq train image_text` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_text"))
