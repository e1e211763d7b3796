#!/usr/bin/env python
r"""Pretrain BART by denoising: reconstruct text with permuted sentences and masked spans.

Create a tokenizer and a configuration, then train the model:

    python scripts/train_tokenizer.py --model_type bart --config_name bart --vocab_size 50265 \
        --train_file "$DATA/train.jsonl" --output_dir my-bart \
        --config_overrides d_model=768,encoder_layers=6,decoder_layers=6

    python scripts/run_bart_dlm_flax.py --output_dir my-bart --config_name my-bart \
        --tokenizer_name my-bart --train_file "$DATA/train.jsonl" \
        --validation_file "$DATA/valid.jsonl" --max_seq_length 1024 \
        --per_device_train_batch_size 32 --learning_rate 1e-4 --warmup_steps 2000 \
        --logging_steps 500 --save_steps 2000 --eval_steps 2000

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("denoising", __doc__))
