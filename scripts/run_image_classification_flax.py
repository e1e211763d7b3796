#!/usr/bin/env python
"""Train image classification on folders, tables of image files, or a dataset with images.

This is `hfseq train image_classification` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_classification"))
