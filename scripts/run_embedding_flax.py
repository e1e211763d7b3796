#!/usr/bin/env python
r"""Train text embeddings on pairs of related texts, like sentence-transformers.

The data are lines such as {"anchor": "how old is the law", "positive": "The law was made in
1814."}, optionally with {"negative": ...} for hard negatives:

    python scripts/run_embedding_flax.py --output_dir my-vectors --train_file pairs.jsonl \
        --validation_file dev.jsonl --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 \
        --per_device_train_batch_size 128 --num_train_epochs 1 --learning_rate 2e-5

Train a pretrained encoder, with embeddings that can be truncated (Matryoshka):

    python scripts/run_embedding_flax.py --output_dir my-vectors --train_file pairs.jsonl \
        --model_name_or_path answerdotai/ModernBERT-base --pooling mean --max_seq_length 256 \
        --matryoshka_dims 768,256,64 --per_device_train_batch_size 256 --dtype bfloat16

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("embedding", __doc__))
