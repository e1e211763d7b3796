#!/usr/bin/env python
"""Train Whisper on audio with transcripts.

This is `hfseq train speech_recognition` as a script. `--help` shows examples.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("speech_recognition"))
