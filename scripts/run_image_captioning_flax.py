#!/usr/bin/env python
r"""Train an image captioning model that consists of an image encoder and a text decoder.

The data are a table with a column of image paths, relative to the table, and a column of captions
or lists of captions:

    python scripts/run_image_captioning_flax.py --output_dir my-captions \
        --model_name_or_path vit-gpt2 --train_file coco/train.jsonl \
        --validation_file coco/validation.jsonl --image_column image_path \
        --caption_column captions --max_target_length 64 --per_device_train_batch_size 32 \
        --learning_rate 5e-5 --num_train_epochs 3 --num_beams 4

Create the directory vit-gpt2 from two checkpoints:

    python scripts/create_model_from_encoder_decoder_models.py --output_dir vit-gpt2 \
        --encoder_model_name_or_path google/vit-base-patch16-224-in21k \
        --decoder_model_name_or_path gpt2

Each evaluation generates captions for the validation images and reports ROUGE. `hfseq caption
my-captions FILE` captions other images. To continue a stopped run from its last checkpoint, run the
same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_to_text", __doc__))
