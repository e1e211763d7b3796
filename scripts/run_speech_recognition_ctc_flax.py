#!/usr/bin/env python
r"""Teach wav2vec 2.0 the letters of speech, by connectionist temporal classification.

A table with a column of files, relative to it, and one of what is said; a model that was trained on
speech without text:

    python scripts/run_speech_recognition_ctc_flax.py --output_dir my-ears \
        --train_file spoken/train.csv --validation_file spoken/validation.csv \
        --audio_column_name audio --text_column_name text --chars_to_ignore , . ! ? \
        --model_name_or_path facebook/wav2vec2-base --freeze_feature_extractor \
        --per_device_train_batch_size 8 --learning_rate 1e-4 \
        --warmup_steps 500 --num_train_epochs 20

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("ctc", __doc__))
