#!/usr/bin/env python
r"""Train vectors of texts by pairs that belong together (sentence-transformers' trainer).

Lines such as {"anchor": "how old is the law", "positive": "The law was made in 1814."}, with
{"negative": ...} for texts that look right and are not:

    python scripts/run_embedding_flax.py --output_dir my-vectors --train_file pairs.jsonl \
        --validation_file dev.jsonl --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 \
        --per_device_train_batch_size 128 --num_train_epochs 1 --learning_rate 2e-5

From an encoder that was never trained for it, with vectors that may be cut short:

    python scripts/run_embedding_flax.py --output_dir my-vectors --train_file pairs.jsonl \
        --model_name_or_path answerdotai/ModernBERT-base --pooling mean --max_seq_length 256 \
        --matryoshka_dims 768,256,64 --per_device_train_batch_size 256 --dtype bfloat16

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("embedding", __doc__))
