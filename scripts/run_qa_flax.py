#!/usr/bin/env python
"""Train extractive question answering: SQuAD or your own data (Transformers 4: run_qa.py).

This is `hfseq train question_answering` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("question_answering"))
