"""Runs the command as ``python -m hfseq.cli``, for environments where it is not on the path."""

import sys

from hfseq.cli import main

if __name__ == "__main__":
    sys.exit(main())
