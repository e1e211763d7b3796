#!/usr/bin/env python
r"""Pretrain or fine-tune a masked language model (BERT, RoBERTa or your own architecture).

    python scripts/train_tokenizer.py --model_type roberta --config_name roberta \
        --vocab_size 8000 --train_file "$DATA/train.jsonl" --output_dir my-roberta

    python scripts/run_mlm_flax.py --output_dir my-roberta --config_name my-roberta \
        --tokenizer_name my-roberta --train_file "$DATA/train.jsonl" \
        --validation_file "$DATA/valid.jsonl" --max_seq_length 128 \
        --per_device_train_batch_size 32 --learning_rate 3e-4 --warmup_steps 1000 \
        --weight_decay 0.01 --adam_beta2 0.98 --num_train_epochs 18 --logging_steps 100 \
        --save_steps 1000 --eval_steps 1000

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("mlm", __doc__))
