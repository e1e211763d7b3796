#!/usr/bin/env python
r"""Pretrain or fine-tune a causal language model (GPT-2, VQ Transformer, your own).

Create a tokenizer and a configuration, then train the model:

    python scripts/train_tokenizer.py --model_type gpt2 --config_name gpt2 --vocab_size 50257 \
        --train_file "$DATA/train.jsonl" --output_dir my-gpt2 \
        --config_overrides resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0

    python scripts/run_clm_flax.py --output_dir my-gpt2 --config_name my-gpt2 \
        --tokenizer_name my-gpt2 --train_file "$DATA/train.jsonl" \
        --validation_file "$DATA/valid.jsonl" --do_train --do_eval --block_size 512 \
        --per_device_train_batch_size 64 --learning_rate 5e-3 --warmup_steps 1000 \
        --adam_beta2 0.98 --weight_decay 0.01 --num_train_epochs 20 --logging_steps 500 \
        --save_steps 2500 --eval_steps 2500

Compute the perplexity per word of WikiText-2, with its lines as one stream:

    python scripts/run_clm_flax.py --output_dir wikitext --model_name_or_path my-gpt2 --do_eval \
        --validation_file wikitext-2/test.txt --cross_documents --word_perplexity

Train a VQ Transformer on the bytes of enwik8 as in its paper, with rows of 8,192 bytes and an
update every 2,048 bytes:

    python scripts/train_tokenizer.py --model_type vq_transformer --vocabulary bytes \
        --output_dir bytes

    python scripts/run_clm_flax.py --output_dir vq-enwik8 --model_type vq_transformer \
        --preset enwik8 --tokenizer_name bytes --train_file enwik8 --sample_by raw \
        --test_split_percentage 5 --do_train --do_eval --do_predict --start_with_eos \
        --block_size 8192 --update_length 2048 --global_batch_size 128 --max_steps 125000 \
        --learning_rate 4e-4 --warmup_steps 10000 --lr_scheduler_type cosine --lr_end_ratio 0.1 \
        --adam_beta2 0.98 --adam_epsilon 1e-9 --max_grad_norm 0.1 --weight_decay 2e-4 \
        --weight_decay_mode absolute --loss_per_position --eval_steps 1000 \
        --max_eval_batches 100 --load_best_model_at_end --save_steps 1000 --dtype bfloat16

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("clm", __doc__))
