#!/usr/bin/env python
"""Write a small English corpus from the language reference and docstrings of Python.

python scripts/quickstart_corpus.py quickstart/corpus.jsonl
"""

import sys
from pathlib import Path

from hfseq.cli.quickstart import write_corpus

if __name__ == "__main__":
    write_corpus(Path(sys.argv[1] if len(sys.argv) > 1 else "quickstart/corpus.jsonl"))
