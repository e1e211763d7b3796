#!/usr/bin/env python
"""Fine-tune a causal language model on conversations or prompts with completions, like TRL's SFT.

This is `hfseq train sft` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("sft"))
