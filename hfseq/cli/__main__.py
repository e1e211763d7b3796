"""``python -m hfseq.cli``, where the command itself is not on the path."""

import sys

from hfseq.cli import main

if __name__ == "__main__":
    sys.exit(main())
