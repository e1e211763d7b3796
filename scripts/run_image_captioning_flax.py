#!/usr/bin/env python
r"""Train a model that writes captions of pictures, an encoder of pictures and a decoder of text.

A table with a column of files, relative to it, and one of captions or lists of them:

    python scripts/run_image_captioning_flax.py --output_dir my-captions \
        --model_name_or_path vit-gpt2 --train_file coco/train.jsonl \
        --validation_file coco/validation.jsonl --image_column image_path \
        --caption_column captions --max_target_length 64 --per_device_train_batch_size 32 \
        --learning_rate 5e-5 --num_train_epochs 3 --num_beams 4

where the folder vit-gpt2 was made of two checkpoints:

    python scripts/create_model_from_encoder_decoder_models.py --output_dir vit-gpt2 \
        --encoder_model_name_or_path google/vit-base-patch16-224-in21k \
        --decoder_model_name_or_path gpt2

Each evaluation writes captions of the validation pictures (ROUGE); `hfseq caption my-captions FILE`
writes others. Run the same command again and a run that was stopped goes on where its last
checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_to_text", __doc__))
