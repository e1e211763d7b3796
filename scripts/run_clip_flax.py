#!/usr/bin/env python
r"""Train an encoder of pictures and one of texts on pictures with captions, as CLIP was.

A table with a column of files, relative to it, and one of captions or lists of them:

    python scripts/run_clip_flax.py --output_dir my-pairs --model_name_or_path vit-bert \
        --train_file coco/train.jsonl --validation_file coco/validation.jsonl \
        --image_column image_path --caption_column captions --max_seq_length 96 \
        --per_device_train_batch_size 64 --learning_rate 5e-5 --num_train_epochs 20

where the folder vit-bert was made of two checkpoints:

    from hfseq import FlaxVisionTextDualEncoderModel
    from transformers import AutoTokenizer, ViTImageProcessorPil

    pictures, texts = "google/vit-base-patch16-224", "google-bert/bert-base-uncased"
    model = FlaxVisionTextDualEncoderModel.from_vision_text_pretrained(pictures, texts)
    model.save_pretrained("vit-bert")
    ViTImageProcessorPil.from_pretrained(pictures).save_pretrained("vit-bert")
    AutoTokenizer.from_pretrained(texts).save_pretrained("vit-bert")

The loss is over the global batch, across all devices. Run the same command again and a run that was
stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("image_text", __doc__))
