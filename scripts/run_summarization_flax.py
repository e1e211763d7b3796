#!/usr/bin/env python
r"""Train summarization: XSum, CNN/DailyMail or your own data.

    python scripts/run_summarization_flax.py --output_dir my-summaries \
        --dataset_name EdinburghNLP/xsum --model_name_or_path facebook/bart-base \
        --max_source_length 512 --max_target_length 64 --per_device_train_batch_size 16 \
        --learning_rate 5e-5 --warmup_steps 500 --num_train_epochs 3

Your own data, with lines such as {"text": "...", "summary": "..."}. T5 requires a prefix:

    python scripts/run_summarization_flax.py --output_dir my-summaries --do_train --do_eval \
        --do_predict --train_file train.jsonl --validation_file dev.jsonl --test_file test.jsonl \
        --model_name_or_path google-t5/t5-small --source_prefix "summarize: "

To continue a stopped run from its last checkpoint, run the same command again.
"""

import sys

from hfseq.training import script

if __name__ == "__main__":
    sys.exit(script.train("summarization", __doc__))
