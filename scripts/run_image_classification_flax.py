#!/usr/bin/env python
r"""Classify pictures: folders of classes, tables of files, or a dataset with pictures.

A folder for each class, and ViT that has read many pictures already:

    python scripts/run_image_classification_flax.py --output_dir my-flowers \
        --train_dir flowers/train --validation_dir flowers/validation \
        --model_name_or_path google/vit-base-patch16-224-in21k \
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 5 \
        --eval_strategy epoch --metric_for_best_model eval_accuracy --load_best_model_at_end

A table with a column of files, relative to it, and one of labels; a model from scratch:

    python scripts/run_image_classification_flax.py --output_dir my-digits \
        --train_file digits/train.csv --image_column file --label_column digit \
        --model_type vit --image_size 32 --no_augment \
        --config_overrides hidden_size=64,intermediate_size=128,num_hidden_layers=2,patch_size=8

Predictions for pictures without labels, by a model that was trained:

    python scripts/run_image_classification_flax.py --output_dir guesses --do_predict \
        --model_name_or_path my-flowers --test_dir holiday

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_classification", __doc__))
