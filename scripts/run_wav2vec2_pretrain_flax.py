#!/usr/bin/env python
r"""Pretrain wav2vec 2.0 on audio without transcripts, with the contrastive objective.

A folder of audio files, in any sampling rate and format that libsndfile reads, for a new model:

    python scripts/run_wav2vec2_pretrain_flax.py --output_dir my-speech \
        --train_dir talks/train --validation_dir talks/validation \
        --config_name facebook/wav2vec2-base --mask_time_prob 0.65 \
        --per_device_train_batch_size 8 --learning_rate 5e-4 --warmup_steps 2000 \
        --adam_beta2 0.98 --weight_decay 0.01 --max_steps 20000 --gumbel_temperature_decay 0.9999

Continue training a pretrained model on a dataset with audio:

    python scripts/run_wav2vec2_pretrain_flax.py --output_dir my-more-speech \
        --model_name_or_path facebook/wav2vec2-large-lv60 --dataset_name openslr/librispeech_asr \
        --dataset_config_name clean --train_split_name train.100 --mask_time_prob 0.65 \
        --max_duration_in_seconds 15 --min_duration_in_seconds 2 --num_train_epochs 3

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("wav2vec2", __doc__))
