#!/usr/bin/env python
r"""Summarise texts: XSum, CNN/DailyMail, or your own (version 4: run_summarization_flax.py).

    python scripts/run_summarization_flax.py --output_dir my-summaries \
        --dataset_name EdinburghNLP/xsum --model_name_or_path facebook/bart-base \
        --max_source_length 512 --max_target_length 64 --per_device_train_batch_size 16 \
        --learning_rate 5e-5 --warmup_steps 500 --num_train_epochs 3

Your own, of lines such as {"text": "...", "summary": "..."}; T5 wants to be told what to do:

    python scripts/run_summarization_flax.py --output_dir my-summaries --do_train --do_eval \
        --do_predict --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path google-t5/t5-small --source_prefix "summarize: "

Run the same command again and a run that was stopped goes on where its last checkpoint is.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("summarization", __doc__))
