#!/usr/bin/env python
r"""Train Whisper on audio with transcripts.

The data are a table with a column of audio files, relative to the table, and a column of
transcripts, or a dataset with audio:

    python scripts/run_speech_recognition_flax.py --output_dir my-whisper \
        --model_name_or_path openai/whisper-small --language norwegian --task transcribe \
        --train_file speech/train.csv --validation_file speech/validation.csv \
        --max_duration_in_seconds 30 --per_device_train_batch_size 16 --learning_rate 1e-5 \
        --warmup_steps 500 --max_steps 5000 --eval_steps 1000

Each evaluation transcribes the validation audio and reports the word and character error rates.
`hfseq transcribe my-whisper FILE` transcribes other files. To continue a stopped run from its last
checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("speech_recognition", __doc__))
