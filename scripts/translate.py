#!/usr/bin/env python
r"""Translate text, a file or standard input, like `hfseq translate`.

python scripts/translate.py my-translator "The cat is blue."
python scripts/translate.py my-translator --input_file source.txt --output_file target.txt
zcat source.gz | python scripts/translate.py my-translator --num_beams 1 > target.txt
"""

import sys

from hfseq.cli.models import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
