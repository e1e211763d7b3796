#!/usr/bin/env python
r"""Train Whisper on speech with text.

A table with a column of files, relative to it, and one of what is said, or a dataset with sound:

    python scripts/run_speech_recognition_flax.py --output_dir my-whisper \
        --model_name_or_path openai/whisper-small --language norwegian --task transcribe \
        --train_file speech/train.csv --validation_file speech/validation.csv \
        --max_duration_in_seconds 30 --per_device_train_batch_size 16 --learning_rate 1e-5 \
        --warmup_steps 500 --max_steps 5000 --eval_steps 1000

Each evaluation writes the validation sounds down and counts errors of words (WER) and characters;
`hfseq transcribe my-whisper FILE` writes others down. Run the same command again and a run that was
stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("speech_recognition", __doc__))
