#!/usr/bin/env python
r"""Pretrain T5 with span corruption: the decoder predicts the masked spans of the input.

Create a tokenizer and a configuration, then train the model:

    python scripts/train_tokenizer.py --model_type t5 --config_name t5 --vocab_size 32000 \
        --train_file "$DATA/train.jsonl" --output_dir my-t5 \
        --config_overrides feed_forward_proj=gated-gelu,tie_word_embeddings=false

    python scripts/run_t5_mlm_flax.py --output_dir my-t5 --config_name my-t5 \
        --tokenizer_name my-t5 --train_file "$DATA/train.jsonl" \
        --validation_file "$DATA/valid.jsonl" --max_seq_length 512 \
        --per_device_train_batch_size 32 --adafactor --learning_rate 0.005 \
        --weight_decay 0.001 --warmup_steps 2000 --logging_steps 500 --save_steps 10000 \
        --eval_steps 2500

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("span_mlm", __doc__))
