#!/usr/bin/env python
"""Train summarization: XSum, CNN/DailyMail or your own data.

This is `hfseq train summarization` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("summarization"))
