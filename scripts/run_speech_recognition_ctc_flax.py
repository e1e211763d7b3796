#!/usr/bin/env python
r"""Train wav2vec 2.0 for speech recognition by letters, with CTC.

The data are a table with a column of audio files, relative to the table, and a column of
transcripts. The model was pretrained on audio without transcripts:

    python scripts/run_speech_recognition_ctc_flax.py --output_dir my-ears \
        --train_file spoken/train.csv --validation_file spoken/validation.csv \
        --audio_column_name audio --text_column_name text --chars_to_ignore , . ! ? \
        --model_name_or_path facebook/wav2vec2-base --freeze_feature_extractor \
        --per_device_train_batch_size 8 --learning_rate 1e-4 \
        --warmup_steps 500 --num_train_epochs 20

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("ctc", __doc__))
