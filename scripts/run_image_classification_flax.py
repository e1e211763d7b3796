#!/usr/bin/env python
r"""Train image classification on folders, tables of image files, or a dataset with images.

One folder per class, and a pretrained ViT:

    python scripts/run_image_classification_flax.py --output_dir my-flowers \
        --train_dir flowers/train --validation_dir flowers/validation \
        --model_name_or_path google/vit-base-patch16-224-in21k \
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 5 \
        --eval_strategy epoch --metric_for_best_model eval_accuracy --load_best_model_at_end

A table with a column of image paths, relative to the table, and a label column, for a new model:

    python scripts/run_image_classification_flax.py --output_dir my-digits \
        --train_file digits/train.csv --image_column file --label_column digit \
        --model_type vit --image_size 32 --no_augment \
        --config_overrides hidden_size=64,intermediate_size=128,num_hidden_layers=2,patch_size=8

Predictions of a trained model for images without labels:

    python scripts/run_image_classification_flax.py --output_dir guesses --do_predict \
        --model_name_or_path my-flowers --test_dir holiday

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_classification", __doc__))
