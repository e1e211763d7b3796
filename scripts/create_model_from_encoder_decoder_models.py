#!/usr/bin/env python
"""Create a captioning model from an image encoder and a text decoder, like `hfseq combine`."""

import sys

from hfseq.cli import main

if __name__ == "__main__":
    sys.exit(main(["combine", *sys.argv[1:]]))
